"""A million random operations inside jitted loops, ranks delayed at random, every result checked by its hash.

A loop on the device draws, for each step, an operation and its data (the same on every rank) and a delay (of each rank
alone), runs it, and compares the hash of all its results with the one that the reference backend gave for that
operation and those data. Only the number of wrong steps and the first of them leave the device.

    python tests/gpu/random_calls.py --calls 1000000 --seconds 400
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

POOL = 8
"""Data sets that a step draws from."""
TOKENS, HIDDEN, TOP_K = 48, 512, 4
DELAYS = (0, 0, 0, 1, 4, 16)
"""Products of two matrices of `DELAY_SIZE` that a rank makes before a step."""
DELAY_SIZE = 512


def hash_of(tree: Any, keep: Any = None) -> jax.Array:
    """uint32 `[]` of every bit of every leaf; `keep`: which leading entries of leaves of that length are specified."""
    total = jnp.uint32(0)
    for number, array in enumerate(jax.tree.leaves(tree)):
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
        place = jnp.arange(array.size, dtype=jnp.uint32).reshape(array.shape) * jnp.uint32(2654435761) + number
        mixed = (bits + 1) * ((place ^ (place >> 16)) | 1)
        mixed = mixed ^ (mixed >> 13)
        if keep is not None and array.ndim and array.shape[: keep.ndim] == keep.shape:
            mixed = jnp.where(keep.reshape(keep.shape + (1,) * (array.ndim - keep.ndim)), mixed, 0)
        total = total * jnp.uint32(31) + jnp.sum(mixed, dtype=jnp.uint32)
    return total


@dataclasses.dataclass(frozen=True)
class Step:
    """`run(config, x, idx, weights)` makes `operations` operations and gives the hash of their results."""

    name: str
    operations: int
    run: Callable[..., jax.Array]


def _dispatch(config: xm.KernelConfig, x: Any, idx: Any, weights: Any, **options: Any) -> xm.Routed:
    experts = 4 * jax.lax.axis_size("ep")
    return xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", config=config, **options)


def _rows(routed: xm.Routed, layout: str) -> jax.Array:
    from benchmarks.lib.verify import defined_rows

    return defined_rows(layout, routed)


def _round(layout: str, **options: Any) -> Callable:
    def run(config, x, idx, weights):
        routed = _dispatch(config, x, idx, weights, layout=layout, **options)
        keep = _rows(routed, layout)
        wire = options.get("wire")
        out = xm.combine(routed.x, routed.handle, weighted=False, wire=wire, config=config)
        results = (routed.x, routed.handle.positions, routed.handle.recv_counts)
        return hash_of(results, keep) * 31 + hash_of(out)

    return run


def _redispatch(config, x, idx, weights):
    routed = _dispatch(config, x, idx, weights)
    keep = _rows(routed, "grouped")
    return hash_of(xm.redispatch(x[:, :128] * 2, routed.handle, config=config), keep)


def _scaled(config, x, idx, weights):
    routed = _dispatch(config, xm.quantize(x), idx, weights)
    return hash_of((routed.x.values, routed.x.scales), _rows(routed, "grouped"))


def _gradient(config, x, idx, weights):
    def loss(x, weights):
        routed = _dispatch(config, x, idx, weights)
        out = xm.combine(routed.x, routed.handle, config=config)
        return jnp.sum(out.astype(jnp.float32) * jnp.float32(0.5))

    return hash_of(jax.grad(loss)(x, weights))


def _exchange(config, x, idx, weights):
    return hash_of(xm.all_to_all(x, "ep", 0, 0, tiled=True, config=config))


def _ragged(config, x, idx, weights):
    ranks = jax.lax.axis_size("ep")
    # every rank sends `1 + (sum of its first experts) % each` rows to each other, at the start of the receiver's
    # segment
    each = TOKENS // ranks
    size = 1 + jnp.sum(jnp.maximum(idx[:, 0], 0)) % each
    sizes = jnp.full(ranks, size, jnp.int32)
    received = xm.all_to_all(sizes, "ep", 0, 0, tiled=True, config=config)
    offsets = jnp.arange(ranks, dtype=jnp.int32) * each
    mine = jnp.full(ranks, jax.lax.axis_index("ep") * each, jnp.int32)
    out = xm.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, mine, received, axis_name="ep", config=config)
    return hash_of(out)


def _gathers(config, x, idx, weights):
    """Through lines, through rings, through a wire, and before a matmul whose sums are exact."""
    small = hash_of(xm.all_gather(x[:16], "ep", config=config))
    large = hash_of(xm.all_gather(x, "ep", config=dataclasses.replace(config, mode="throughput")))
    rounded = hash_of(xm.all_gather(x, "ep", axis=1, wire="int8", config=config))
    rows = jnp.maximum(idx, 0).astype(jnp.bfloat16) % 8
    product = xm.all_gather_matmul(
        rows, jnp.ones((rows.shape[1], 64), jnp.bfloat16), "ep", config=dataclasses.replace(config, mode="throughput")
    )
    return small + large * 31 + rounded * 961 + hash_of(product) * 29791


STEPS = (
    Step("grouped", 2, _round("grouped")),
    Step("grouped-fp8", 2, _round("grouped", wire="float8_e4m3fn")),
    Step("grouped-mxfp4", 2, _round("grouped", wire="mxfp4")),
    Step("grouped-align-capacity", 2, _round("grouped", alignment=8, capacity=96)),
    Step("grouped-drop-source", 3, _round("grouped", capacity=96, drop="source")),
    Step("grouped-drop-weight-fp8", 3, _round("grouped", capacity=96, drop="weight", wire="float8_e4m3fn")),
    Step("ranked", 2, _round("ranked")),
    Step("padded", 2, _round("padded")),
    Step("redispatch", 2, _redispatch),
    Step("scaled", 1, _scaled),
    Step("gradient", 4, _gradient),
    Step("exchange", 1, _exchange),
    Step("ragged", 2, _ragged),
    Step("gathers", 4, _gathers),
)


def without_exchange() -> tuple[Step, ...]:
    """The steps that the kernels between nodes take."""
    return tuple(step for step in STEPS if step.name not in ("exchange", "ragged"))


def pools(mesh: Mesh, seed: int) -> tuple[jax.Array, ...]:
    """`POOL` data sets: uniform, skewed, all to one expert, unused slots, duplicates."""
    rng = np.random.default_rng(seed)
    rows, experts = mesh.size * TOKENS, 4 * mesh.size
    x = rng.standard_normal((POOL, rows, HIDDEN)).astype(jnp.bfloat16)
    idx = rng.integers(0, experts, (POOL, rows, TOP_K)).astype(np.int32)
    idx[1] = np.minimum(rng.zipf(1.5, (rows, TOP_K)) - 1, experts - 1)
    idx[2] = rng.integers(0, experts)
    idx[3][rng.random((rows, TOP_K)) < 0.5] = -1
    idx[4] = -1
    idx[5] = experts + 7
    weights = rng.uniform(-1, 1, (POOL, rows, TOP_K)).astype(np.float32)
    sharding = NamedSharding(mesh, P(None, "ep"))
    return tuple(jax.device_put(a, sharding) for a in (x, idx, weights))


def tables(mesh: Mesh, config: xm.KernelConfig, data: tuple, steps: tuple[Step, ...]) -> jax.Array:
    """uint32 `[ranks, steps, POOL]`: the hash of each step on each data set, from `config`'s backend."""
    columns = []
    for step in steps:

        def one(*pool, step=step):
            def at(i, out):
                return out.at[i].set(step.run(config, *(a[i] for a in pool)))

            return jax.lax.fori_loop(0, POOL, at, jnp.zeros(POOL, jnp.uint32))[None]

        spec = P(None, "ep")
        program = jax.shard_map(one, mesh=mesh, in_specs=(spec,) * 3, out_specs=P("ep"), check_vma=False)
        columns.append(jax.block_until_ready(jax.jit(program)(*data)))
    return jnp.stack(columns, axis=1)


def delayed(rank_number: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, after a delay of this rank's own drawing."""
    matrix = jnp.full((DELAY_SIZE, DELAY_SIZE), 1e-3, jnp.float32)

    def after(products: int) -> Callable:
        def run(x):
            busy = matrix
            for _ in range(products):
                busy = jnp.tanh(busy @ matrix)
            return jax.lax.optimization_barrier((x, busy))[0]

        return run

    return jax.lax.switch(rank_number % len(DELAYS), [after(n) for n in DELAYS], x)


def draw(seed: jax.Array, step: jax.Array, salt: int) -> jax.Array:
    """A number for each step: the same on all ranks."""
    mixed = (step.astype(jnp.uint32) + seed) * jnp.uint32(2654435761) + jnp.uint32(salt) * jnp.uint32(40503)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    return ((mixed ^ (mixed >> 13)) >> 4).astype(jnp.int32)


def loop(mesh: Mesh, config: xm.KernelConfig, steps: tuple[Step, ...], length: int) -> Callable:
    """Jitted: `(seed, table, *pools)` -> wrong steps, the first of them, operations made, each `[ranks]`."""
    counts = np.array([step.operations for step in steps], np.int32)

    def run(seed, table, *pool):
        def one(i, carry):
            wrong, first, made = carry
            which = draw(seed[0], i, 1) % len(steps)
            chosen = draw(seed[0], i, 2) % POOL
            mine = draw(seed[0], i, 3 + 7 * (1 + jax.lax.axis_index("ep")))
            x, idx, weights = (a[chosen] for a in pool)
            x = delayed(mine, x)
            branches = [lambda *a, s=step: s.run(config, *a) for step in steps]
            found = jax.lax.switch(which, branches, x, idx, weights)
            bad = found != table[0, which, chosen]
            first = jnp.where(bad & (first < 0), i, first)
            return wrong + bad.astype(jnp.int32), first, made + jnp.asarray(counts)[which]

        zero = jnp.int32(0)
        out = jax.lax.fori_loop(0, length, one, (zero, jnp.int32(-1), zero))
        return tuple(a.reshape(1) for a in out)

    specs = (P(), P("ep"), *(P(None, "ep"),) * 3)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P("ep"),) * 3, check_vma=False))


def own(array: jax.Array) -> np.ndarray:
    """The entries of this process, of all ranks in one process."""
    return np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])


@dataclasses.dataclass
class Result:
    operations: int
    steps: int
    seconds: float
    wrong: int
    first: str = ""


def run(
    mesh: Mesh,
    config: xm.KernelConfig,
    *,
    calls: int,
    seconds: float = float("inf"),
    length: int = 2000,
    steps: tuple[Step, ...] = STEPS,
    reference: xm.KernelConfig | None = None,
    seed: int = 0,
) -> Result:
    """Loops of `length` steps until `calls` operations are made, or `seconds` have passed."""
    data = pools(mesh, seed)
    table = tables(mesh, reference or xm.KernelConfig(backend="reference"), data, steps)
    program = loop(mesh, config, steps, length)
    result = Result(0, 0, 0.0, 0)
    began = None
    while result.operations < calls:
        number = np.full(1, seed + 7919 * (1 + result.steps // length), np.uint32)
        wrong, first, made = (own(a) for a in program(number, table, *data))
        xm.check()
        if began is None:  # the first loop compiled
            began = time.perf_counter()
        result.operations += int(made[0])
        result.steps += length
        if wrong.any() and not result.first:
            rank = int(np.flatnonzero(wrong)[0])
            at = jnp.int32(first[rank])
            name = steps[int(draw(number[0], at, 1)) % len(steps)].name
            loops, process = result.steps // length, jax.process_index()
            result.first = f"step {int(first[rank])} of loop {loops}: {name}, rank {rank} of process {process}"
        result.wrong += int(wrong.sum())
        result.seconds = time.perf_counter() - began
        if result.seconds > seconds:
            break
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=0, help="default: every device")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks-per-node", type=int, help="virtual nodes of so many ranks; without the drop-ins")
    parser.add_argument("--seconds", type=float, default=400.0, help="give up, and fail, after this long")
    parser.add_argument("--length", type=int, default=2000, help="steps of a loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    devices = jax.devices()[: options.ranks or None]
    mesh = Mesh(np.array(devices), ("ep",))
    nodes = options.ranks_per_node
    config = xm.KernelConfig(backend=options.backend, ranks_per_node=nodes, timeout_s=60.0)
    steps = STEPS if nodes is None or nodes == len(devices) else without_exchange()
    result = run(
        mesh,
        config,
        calls=options.calls,
        seconds=options.seconds,
        length=options.length,
        steps=steps,
        reference=xm.KernelConfig(backend="reference", ranks_per_node=nodes),
        seed=options.seed,
    )
    summary = dataclasses.asdict(result) | {
        "ranks": len(devices),
        "ranks_per_node": nodes,
        "device": devices[0].device_kind,
        "wanted": options.calls,
        "kinds": [step.name for step in steps],
    }
    print(json.dumps(summary, indent=1))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(result.wrong) or result.operations < options.calls)


if __name__ == "__main__":
    sys.exit(main())
