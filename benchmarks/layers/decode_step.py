"""`python -m benchmarks decode-step`: a decode step as a server runs it, replayed and checked, beside JAX's.

The step is `--layers` MoE layers in one compiled program (normalise, dispatch, grouped matmuls of a SwiGLU expert,
combine, residual), with weights of their own, CUDA graphs on. Every implementation has the same weights, routings and
grouped matmuls, those of the Flax layers. Replays cycle through a pool of routings; each hashes its result on the
device and compares it with the first result of that routing, which was compared with plain JAX. So one wrong bit in one
replay of ten thousand shows, and only a count leaves the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.layers import layer_programs
from benchmarks.lib import options as command_options
from benchmarks.lib import report, turns
from benchmarks.lib.verify import WrongResultError
from benchmarks.peers import registry as peers
from xen_moe_jax import cuda
from xen_moe_jax.experts.mlp import built_in
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.tuning.problem import AXIS, POOL_SPEC, RANK_SPEC, Problem, make_mesh, make_problem
from xen_moe_jax.tuning.programs import Experts, RoundTrip, own_round_trip
from xen_moe_jax.tuning.timing import on_ranks
from xen_moe_jax.tuning.workload import Workload

BATCHES = (1, 32, 128)
BLOCK = 100
"""Replays between two looks at the clock."""
MOST_ERROR = 0.25
"""Tolerance of a token's result, relative in the Euclidean norm: bfloat16 roundings of many layers, matmuls by other
algorithms."""
NOT_BY_DEFAULT = ("einsum",)
"""Peers that no decode step would use: parts of their names."""


@dataclasses.dataclass
class Step:
    """One implementation at one batch size, compiled."""

    name: str
    run: Any
    problem: Problem
    compile_s: float


def main(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Measures every batch size; returns the JSON document.

    Raises:
      WrongResultError: a result of the library's own differs from plain JAX, or a replay from the first one of its
        input.
    """
    ranks = options.ranks or jax.device_count()
    base = dataclasses.replace(
        command_options.workload(options, jax.device_count()), tokens=1, layout=options.layout or "grouped"
    )
    mesh = make_mesh(ranks)
    weights = make_weights(base, mesh, options.layers, options.intermediate)
    kernel = command_options.kernel_config(options)
    config = layer_programs.layer_config(base, options.intermediate, options.grouped_matmul, kernel)
    head = report.header(arguments, base)
    del head["workload"]["tokens"]
    document = head | {
        "mode": options.mode,
        "layers": options.layers,
        "intermediate": options.intermediate,
        "weight_bytes_per_layer_and_rank": sum(leaf.nbytes for leaf in weights[0].values()) // ranks,
        "grouped_matmul": layer_programs.name_of_matmul(options.grouped_matmul),
        "results": [],
    }
    problems = [make_problem(dataclasses.replace(base, tokens=batch), mesh) for batch in options.batches or BATCHES]
    lowered = [lower_all(problem, config, weights, options) for problem in problems]
    count = sum(map(len, lowered))
    report.progress(f"compiling {count} programs of {options.layers} layers")
    with futures.ThreadPoolExecutor(max(1, min(count, os.cpu_count() or 1))) as pool:
        compiling = [[pool.submit(finish) for finish in programs] for programs in lowered]
        truths = [plain_results(problem, config, weights) for problem in problems]
        for programs, truth in zip(compiling, truths, strict=True):
            for program in programs:
                own, step = program is programs[0], program.result()
                replays = options.replays if own else options.peer_replays
                with turns.alone(options.lock):
                    row = measure(step, weights, truth, replays, options.replay_seconds, own)
                batch = [r for r in document["results"] if r["tokens"] == row["tokens"]]
                row["times_own"] = row["us_median"] / (batch[0] if batch else row)["us_median"]
                document["results"].append(row)
                report.progress(f"  batch {row['tokens']}: {row['name']}: {row['us_median']:.0f} us a step")
                if options.json:  # the results so far, in case a later program hangs
                    report.write_json(options.json, document)
    return document


def make_weights(work: Workload, mesh: jax.sharding.Mesh, layers: int, width: int) -> list[dict[str, jax.Array]]:
    """Weights of each layer: `gate`, `up` `[R*L, H, F]`, `down` `[R*L, F, H]`, scaled so that the tokens keep their
    size."""
    experts, hidden, dtype = work.ranks * work.local_experts, work.hidden, work.compute_dtype
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(AXIS)))
    def draw(key):
        keys = jax.random.split(key, len(shapes))
        return {
            name: (jax.random.normal(one, (experts, *shape), dtype) * shape[0] ** -0.5).astype(dtype)
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    return [draw(key) for key in jax.random.split(jax.random.key(work.seed), layers)]


def on_any_rows(config: MoEConfig, weights: dict[str, jax.Array]) -> Experts:
    """The experts of the Flax layers on rows of any shape."""
    grouped = built_in(config)
    count = weights["gate"].shape[0]

    def experts(rows, local_expert, group_sizes=None):
        if rows.ndim == 2:  # [C, H] by expert; rows past the last group are never read
            if group_sizes is None:
                group_sizes = (local_expert[None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]).sum(1)
            return grouped(rows, group_sizes.astype(jnp.int32), weights)
        by_expert = rows if rows.ndim == 3 else rows.swapaxes(0, 1)  # [L, M, H], or [R, L, cap, H]
        flat = by_expert.reshape(-1, rows.shape[-1])
        y = grouped(flat, jnp.full((count,), flat.shape[0] // count, jnp.int32), weights).reshape(by_expert.shape)
        return y if rows.ndim == 3 else y.swapaxes(0, 1)

    return experts


class State(NamedTuple):
    """State that a step hands to the next, in the same buffers, so that a graph finds every buffer at its old address.

    Attributes:
      replay: int32 `[1]` of each rank, how many there were.
      out: `[T, H]`, the latest result.
      hashes: uint32 `[pool]`, of the first result of every input.
      wrong: int32 `[1]`, later results with another hash.
    """

    replay: jax.Array
    out: jax.Array
    hashes: jax.Array
    wrong: jax.Array


def lower_step(
    name: str, round_trip: RoundTrip, problem: Problem, config: MoEConfig, weights: list[Any]
) -> Callable[[], Step]:
    """The step as `(state, x, routings, their weights, weights) -> state`; the call compiles it, in any thread. Replay
    `i` begins with routing `i`."""
    work = problem.work
    layer = jax.jit(one_layer(round_trip, config))  # traced once for all

    def on_rank(state, x, idx_pool, weights_pool, weights):
        turn = jax.lax.rem(state.replay[0], jnp.int32(work.pool))
        idx, router_weights = (jnp.roll(pool, -turn, axis=0) for pool in (idx_pool, weights_pool))
        start = x
        for number, own in enumerate(weights):
            at = number % work.pool
            x = layer(x, idx[at], router_weights[at], own)
        found = digest(x - start)
        first = state.replay[0] < work.pool
        return State(
            replay=state.replay + 1,
            out=x,
            hashes=jnp.where(first, state.hashes.at[turn].set(found), state.hashes),
            wrong=state.wrong + (~first & (found != state.hashes[turn])),
        )

    specs = (RANK_SPEC, RANK_SPEC, POOL_SPEC, POOL_SPEC, RANK_SPEC)
    mapped = jax.shard_map(on_rank, mesh=problem.mesh, in_specs=specs, out_specs=RANK_SPEC, check_vma=False)
    lowered = jax.jit(mapped, donate_argnums=0).lower(start_state(problem), *problem.inputs.arrays(), weights)

    def finish() -> Step:
        began = time.perf_counter()
        run = lowered.compile()
        return Step(name, run, problem, time.perf_counter() - began)

    return finish


def one_layer(round_trip: RoundTrip, config: MoEConfig) -> Callable[..., jax.Array]:
    """`(x, topk_idx, topk_weights, weights) -> x`, on one rank."""

    def layer(x, topk_idx, topk_weights, own):
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return x + round_trip(normal.astype(x.dtype), topk_idx, topk_weights, on_any_rows(config, own))

    return layer


def plain_results(problem: Problem, config: MoEConfig, weights: list[Any]) -> list[np.ndarray]:
    """Results of plain JAX for every input of the pool, layer after layer."""
    plain = dataclasses.replace(config.kernel, backend="reference", chunk_tokens=None)
    layer = one_layer(own_round_trip(problem.work, problem.caps, plain), config)
    run = on_ranks(layer, problem.mesh, (RANK_SPEC,) * 4)
    routings = list(zip(problem.inputs.topk_idx, problem.inputs.topk_weights, strict=True))
    found = []
    for replay in range(problem.work.pool):
        x = problem.inputs.x
        for number, own in enumerate(weights):
            x = run(x, *routings[(replay + number) % problem.work.pool], own)
        found.append(local_values(x))
    return found


def start_state(problem: Problem) -> State:
    work = problem.work
    shapes = {
        "replay": ((1,), np.int32),
        "out": ((work.tokens, work.hidden), work.compute_dtype),
        "hashes": ((work.pool,), np.uint32),
        "wrong": ((1,), np.int32),
    }
    sharding = NamedSharding(problem.mesh, RANK_SPEC)

    def zeros(shape, dtype):
        whole = np.zeros((work.ranks * shape[0], *shape[1:]), dtype)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return State(**{name: zeros(*shape) for name, shape in shapes.items()})


def digest(values: jax.Array) -> jax.Array:
    """uint32 `[]`: hash of every bit of every element and of its place."""
    width = {2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, width).astype(jnp.uint32).reshape(-1)
    place = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | 1
    mixed = (bits ^ (bits << 13)) * place
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def lower_all(
    problem: Problem, config: MoEConfig, weights: list[Any], options: argparse.Namespace
) -> list[Callable[[], Step]]:
    """The library's own step, then the peers'."""
    work = problem.work
    names = command_options.peer_names(options)
    if names is None:
        names = tuple(n for n, e in peers.PEERS.items() if e.usual and not any(part in n for part in NOT_BY_DEFAULT))
    chosen: list[tuple[str, RoundTrip]] = [("xen_moe_jax", own_round_trip(work, problem.caps, config.kernel))]
    for program in peers.peer_programs(work, problem.caps, problem.platform, names):
        assert program.round_trip is not None
        chosen.append((program.name, program.round_trip))
    return [lower_step(name, round_trip, problem, config, weights) for name, round_trip in chosen]


def first_results(step: Step, weights: list[Any]) -> tuple[list[np.ndarray], State]:
    """The result of every input of the pool, and the state after them."""
    found, state = [], start_state(step.problem)
    for _ in range(step.problem.work.pool):
        state = step.run(state, *step.problem.inputs.arrays(), weights)
        found.append(local_values(state.out))
    return found, state


def local_values(array: jax.Array) -> np.ndarray:
    """float32: the shards of this process."""
    shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
    return np.concatenate([np.asarray(s.data).astype(np.float32) for s in shards])


def measure(
    step: Step,
    weights: list[Any],
    truth: list[np.ndarray],
    replays: int,
    seconds: float = math.inf,
    must_agree: bool = True,
) -> dict[str, Any]:
    """Times replays in blocks: `replays`, or the number that fits into `seconds`. The count of wrong replays passes
    from replay to replay on the device.

    Args:
      must_agree: a wrong result is an error. Not of peers, whose sums may be scattered in any order: the row counts.

    Raises:
      WrongResultError: as `main`.
    """
    problem = step.problem
    first, state = first_results(step, weights)
    error = max(
        float(np.max(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))
        for a, b in zip(first, truth, strict=True)
    )
    if not error <= MOST_ERROR and must_agree:
        raise WrongResultError(
            f"{step.name}, batch {problem.work.tokens}: relative error {error:.3g} against plain JAX, more than "
            f"{MOST_ERROR}"
        )
    before, times, done, start = launches(), [], 0, time.perf_counter()
    while done < replays and (not done or time.perf_counter() - start < seconds):
        block = min(BLOCK, replays - done)
        began = time.perf_counter()
        for _ in range(block):
            state = step.run(state, *problem.inputs.arrays(), weights)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / block * 1e6)
        done += block
    bad = int(sum(np.asarray(s.data).sum() for s in state.wrong.addressable_shards))
    if bad and must_agree:
        raise WrongResultError(
            f"{step.name}, batch {problem.work.tokens}: {bad} results of {done} replays on {problem.work.ranks} "
            "ranks differ from the first result of the same input"
        )
    launched, captured = (now - then for now, then in zip(launches(), before, strict=True))
    return {
        "name": step.name,
        "tokens": problem.work.tokens,
        "us_median": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
        "us_p99": float(np.quantile(times, 0.99)),
        "replays": done,
        "wrong": bad,
        "relative_error": error,
        "compile_s": step.compile_s,
        "launched_by_host": launched,
        "captured": captured,
    }


def launches() -> tuple[int, int]:
    """Operations of this library that the host has launched on CUDA, and how many of those into a graph."""
    found = cuda.workspaces() if jax.default_backend() == "gpu" else []
    return sum(w["launches"] for w in found), sum(w["captured"] for w in found)


def describe(document: dict[str, Any]) -> str:
    """Machine, model and table, for people."""
    mib = document["weight_bytes_per_layer_and_rank"] / 2**20
    model = (
        f"{document['layers']} layers; expert width {document['intermediate']}, {mib:.0f} MiB of expert weights a "
        f"layer and rank; grouped matmul: {document['grouped_matmul']}"
    )
    lines = [
        [
            row["name"],
            str(row["tokens"]),
            f"{row['us_median']:.0f}",
            f"{row['us_min']:.0f}..{row['us_max']:.0f}",
            f"{row['us_median'] / document['layers']:.1f}",
            f"{row['times_own']:.2f}x",
            f"{row['replays']}, {row['wrong']} wrong",
            f"{row['relative_error']:.1e}",
        ]
        for row in document["results"]
    ]
    columns = ["program", "batch a rank", "us a step", "min..max", "us a layer", "vs ours", "replays", "error"]
    return "\n".join([report.describe(document), model, "", report.format_table(columns, lines), "", FOOTNOTE])


FOOTNOTE = (
    "us a step: median over blocks of 100 replays, issued one after the other without waiting. Replays: how many, and\n"
    "how many results on any rank differed in a bit from the first of the same input. error: of the first results\n"
    "against plain JAX, relative, of the worst token."
)
