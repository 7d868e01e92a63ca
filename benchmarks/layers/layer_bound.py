"""The least time of a layer on this machine, from its pieces: experts, transfers, and their price for the experts.

    python -m benchmarks layer-bound --json benchmarks/results/least_layer_h200x4.json

A layer whose transfers run under its matmuls sends a rank's tokens in `c` chunks: dispatch of the next one and combine
of the last one are pending on `s` thread blocks while the experts compute. A pending operation (a flight) holds its
multiprocessors, so matmuls that fill the GPU lose them as long as it lasts. With everything measured in one job,

    least(c, s) = rest + passes * (dispatch(c) + combine(c))
                  + max(experts(c) + price * s * flights, flights)
    flights     = passes * (c - 1) * (dispatch in flight(c, s) + combine in flight(c, s))
    price       = share of their speed that the experts lose with one multiprocessor: 1 / SMs, or a smaller measured one

where `passes` is 1 forward and 2 with the backward pass; dispatch(c) and combine(c) are whole operations of one chunk
(the first and the last, under which nothing can run), experts(c) is the experts of all chunks, and `rest` is the
layer's time beside its experts and transfers (the router). It is a lower bound: SMs are given back at once, matmuls
lose nothing by smaller caches, and two flights never meet. `fused` is the limit of a kernel that multiplies rows as
they arrive and sends them as they are done, with nothing in the open:

    fused = rest + experts(1) + passes * min over s of (price * s * flights of one whole)

Beside it stand layers whose chunks do overlap, measured. `--parts` measures some of the pieces, so that several
processes can compile at a time; `--join FILE ...` makes one document of theirs and works the bounds out, without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from benchmarks.layers import layer, layer_programs
from benchmarks.lib import report, turns
from benchmarks.lib.options import positive
from benchmarks.lib.verify import WrongResultError
from benchmarks.ops import overlap
from xen_moe_jax.experts import hopper
from xen_moe_jax.experts.mlp import built_in
from xen_moe_jax.flax import _chunks
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.tuning import timing
from xen_moe_jax.tuning.problem import RANK_SPEC, make_problem
from xen_moe_jax.tuning.workload import Workload, round_up

PARTS = ("layers", "experts", "transfers")
PASSES = {"forward": 1, "forward+backward": 2}
KERNELS = ("rows_by_weights", "rows_by_rows", "activated_rows")
"""Functions of `experts/hopper.py` that take `num_sms`."""
DEALT = "dealt"
"""Name of the overlapping layers whose matmuls do not claim their tiles."""
COMPILING = 8
"""Programs at a time."""
Pieces = list[dict[str, Any]]
Measure = Callable[[], Pieces]
"""Measures after all programs are compiled."""


def add_layer_options(add: Callable[..., Any]) -> None:
    add("--tokens", type=positive, default=4096, help="of a rank")
    add("--hidden", type=positive, default=4096)
    add("--width", type=positive, default=1536, help="of an expert")
    add("--experts", type=positive, default=64)
    add("--top-k", type=positive, default=8)
    add("--capacity-factor", type=float, default=1.25)
    add("--blocks", type=positive, nargs="+", default=[12, 16, 24, 32], help="thread blocks of a flight")


def layer_of(options: argparse.Namespace) -> layer_programs.LayerProblem:
    """Returns one layer of these sizes, with router weights in front of the last matmul."""
    work = Workload(
        tokens=options.tokens, hidden=options.hidden, experts=options.experts, top_k=options.top_k,
        ranks=jax.device_count(), capacity_factor=options.capacity_factor, pool=2,
    )  # fmt: skip
    config = layer_programs.layer_config(work, options.width, "auto", xm.KernelConfig())
    config = dataclasses.replace(config, apply_weights_to="activation")
    return layer_programs.LayerProblem(make_problem(work), config, 1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=pathlib.Path)
    add_layer_options(add)
    add("--chunks", type=positive, nargs="+", default=[1, 2, 4])
    add("--overlapped-blocks", type=positive, default=24, help="of the flights of the layers that are measured")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--join", type=pathlib.Path, nargs="+", metavar="FILE", help="measure nothing: files of other parts of one job")
    add("--inner", type=positive, default=20, help="layers that are queued at once; transfers run 20 times as often")
    add("--repeats", type=positive, default=5)
    add("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    options = parser.parse_args(arguments)
    if 1 not in options.chunks:
        parser.error(f"--chunks {options.chunks}: must have 1, the layer as it is")
    return options


# -- the model ---------------------------------------------------------------------------------------------------------


def least(passes: int, chunks: int, held: float, *, rest: float, experts: float, whole: float, flight: float) -> float:
    """`least(c, s)` of the module's first lines, microseconds.

    Args:
      held: the share of the experts' speed that a pending operation takes: `price * s`.
      experts: time of the experts of all chunks.
      whole: dispatch and combine of one chunk, as whole operations.
      flight: dispatch and combine of one chunk, asynchronous on `s` thread blocks.
    """
    flights = passes * (chunks - 1) * flight
    return rest + passes * whole + max(experts + held * flights, flights)


def bounds(pieces: Pieces, sms: int) -> list[dict[str, Any]]:
    """Bounds of each operation: every `least(c, s)`, then `fused`, each with its ratio to the experts alone.

    Args:
      pieces: rows with `piece` ("layer", "experts", "dispatch", "combine"), `chunks`, `blocks` (thread blocks of an
        asynchronous operation, None where it is whole; for experts the SMs that they lack), `us`, and `operation` for
        layers and experts.
    """

    def of(piece: str, chunks: int, blocks: int | None = None, operation: str | None = None) -> float:
        wanted = {"piece": piece, "chunks": chunks, "blocks": blocks, "operation": operation}
        found = [row["us"] for row in pieces if all(row.get(k) == v for k, v in wanted.items()) and "us" in row]
        if not found:
            raise LookupError(f"no piece {wanted} has been measured")
        return found[0]

    def both(chunks: int, blocks: int | None = None) -> float:
        return of("dispatch", chunks, blocks) + of("combine", chunks, blocks)

    counts = sorted({row["chunks"] for row in pieces if row["piece"] == "dispatch"})
    tried = sorted({row["blocks"] for row in pieces if row["piece"] == "dispatch" and row["blocks"] is not None})
    found = []
    for operation, passes in PASSES.items():
        alone = of("experts", 1, operation=operation)
        price = 1 / sms
        for row in pieces:
            if row["piece"] == "experts" and row["blocks"] and row["operation"] == operation:
                price = min(price, max(0.0, 1 - alone / row["us"]) / row["blocks"])
        rest = max(0.0, of("layer", 1, operation=operation) - passes * both(1) - alone)
        head = {"operation": operation, "rest_us": rest, "experts_us": alone, "price": price}
        for chunks in counts:
            experts = of("experts", chunks, operation=operation)
            for blocks in tried[:1] if chunks == 1 else tried:  # one chunk has no pending operations
                us = least(
                    passes, chunks, price * blocks, rest=rest, experts=experts, whole=both(chunks),
                    flight=both(chunks, blocks),
                )  # fmt: skip
                at = {"chunks": chunks, "blocks": None if chunks == 1 else blocks}
                found.append({"bound": "least", **at, "us": us, "ratio": us / alone, **head})
        held = min(price * blocks * both(1, blocks) for blocks in tried)
        us = rest + alone + passes * held
        found.append({"bound": "fused", "held_us": passes * held, "us": us, "ratio": us / alone, **head})
    return found


# -- the pieces --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def experts_on(num_sms: int | str | None) -> Iterator[None]:
    """Gives the Hopper kernels traced in this context `num_sms` thread blocks; None: one for each multiprocessor.
    `DEALT`: one for each multiprocessor, and each block has a fixed share of the tiles beside pending operations
    too."""
    if num_sms is None:
        yield
        return
    if num_sms == DEALT:
        with mock.patch.object(hopper, "in_overlap", lambda: False):
            yield
        return
    bound: dict[str, Any] = {name: functools.partial(getattr(hopper, name), num_sms=num_sms) for name in KERNELS}
    with mock.patch.multiple(hopper, **bound):
        yield


def drawn_rows(options: argparse.Namespace, ranks: int, chunks: int) -> tuple[Any, ...]:
    """Draws for every chunk rows `[R * C, H]`, sizes of groups `[R * L]` and router weights, in the numbers of balanced
    routing."""
    rng = np.random.default_rng(0)
    local = options.experts // ranks
    rows = options.tokens // chunks * options.top_k
    capacity = round_up(int(rows * options.capacity_factor), 8)
    drawn = []
    for number in range(chunks):
        x = jax.random.normal(jax.random.key(number), (ranks * capacity, options.hidden), jnp.bfloat16)
        sizes = np.concatenate([rng.multinomial(rows, np.full(local, 1 / local)) for _ in range(ranks)])
        drawn.append((x, jnp.asarray(sizes, jnp.int32), jax.random.uniform(jax.random.key(number), (len(x),))))
    return tuple(drawn)


def experts_program(config: MoEConfig, operation: str) -> Callable[..., Any]:
    """`(weights, ((rows, sizes, router weights), ...)) -> ...`: the experts on every chunk, on one rank."""
    experts = built_in(config)

    def forward(weights: Any, chunks: Any) -> Any:
        return [experts(rows, sizes, weights, factors) for rows, sizes, factors in chunks]

    def with_gradients(weights: Any, chunks: Any) -> Any:
        def run(weights: Any, rows: Any, factors: Any) -> Any:
            return forward(weights, zip(rows, [c[1] for c in chunks], factors, strict=True))

        y, pull = jax.vjp(run, weights, [c[0] for c in chunks], [c[2] for c in chunks])
        return y, pull([c[0] for c in chunks])  # random cotangents, as in training

    return forward if operation == "forward" else with_gradients


def experts_to_measure(options: argparse.Namespace, given: layer_programs.LayerProblem, weights: Any) -> Measure:
    """Experts of every number of chunks, and of one chunk on fewer multiprocessors, for the price of these."""
    sms = getattr(jax.devices()[0], "core_count", 0)
    cases: list[tuple[int, int | None]] = [(chunks, None) for chunks in options.chunks]
    if given.problem.platform == "gpu" and sms:
        cases += [(1, blocks) for blocks in (min(options.blocks), max(options.blocks))]
    inputs = {chunks: drawn_rows(options, given.work.ranks, chunks) for chunks in options.chunks}
    split = jax.sharding.NamedSharding(given.problem.mesh, RANK_SPEC)
    inputs = jax.tree.map(lambda a: jax.device_put(a, split), inputs)
    weights = {name: w[0] for name, w in weights.items() if name != "router"}
    lowered = {}
    for chunks, blocks in cases:
        for operation in PASSES:
            with experts_on(None if blocks is None else sms - blocks):
                mapped = jax.shard_map(
                    experts_program(given.config, operation), mesh=given.problem.mesh, in_specs=(RANK_SPEC, RANK_SPEC),
                    out_specs=RANK_SPEC, check_vma=False,
                )  # fmt: skip
                lowered[chunks, blocks, operation] = jax.jit(mapped).lower(weights, inputs[chunks])
    programs = compile_all(lowered)
    if errors := [program for program in programs.values() if isinstance(program, Exception)]:
        raise errors[0]

    def measure() -> Pieces:
        taken = in_turns({key: (program, (weights, inputs[key[0]])) for key, program in programs.items()}, options)
        return [
            {"piece": "experts", "chunks": chunks, "blocks": blocks, "operation": operation, **summary(us)}
            for (chunks, blocks, operation), us in taken.items()
        ]

    return measure


def transfers_to_measure(options: argparse.Namespace, work: Workload) -> Measure:
    """Dispatch and combine of one chunk, synchronous, and as start and done with nothing in between."""
    cases = [(operation, blocks) for operation in ("dispatch", "combine") for blocks in (None, *options.blocks)]
    compiled = {}
    for chunks in options.chunks:
        problem = make_problem(dataclasses.replace(work, tokens=work.tokens // chunks))
        programs = []
        for operation, blocks in cases:
            made = overlap.variants(problem, operation, xm.KernelConfig(num_sms=blocks), overlap.Chain(8, 8, 1))
            programs.append(made["whole" if blocks is None else "in halves"])
        inner = 1 if problem.platform == "cpu" else 20 * options.inner * chunks
        compiled[chunks] = timing.compile_all(programs, problem, inner)

    def measure() -> Pieces:
        pieces: Pieces = []
        for chunks, starting in compiled.items():
            timed = [start() for start in starting]
            timing.measure(timed, options.repeats)
            for (operation, blocks), entry in zip(cases, timed, strict=True):
                pieces.append({"piece": operation, "chunks": chunks, "blocks": blocks, **summary(entry.microseconds)})
        return pieces

    return measure


def layers_to_measure(options: argparse.Namespace, given: layer_programs.LayerProblem, operands: Any) -> Measure:
    """The layer as it is, and with chunks that overlap wherever the backend has asynchronous operations; results are
    compared. A grouped matmul has one thread block for each SM. A block whose SM a pending operation holds begins late
    and claims fewer tiles. For comparison, blocks have fixed shares of the tiles, and matmuls leave the operations' SMs
    free."""
    sms = getattr(jax.devices()[0], "core_count", 0)
    cases: list[tuple[int, int | str | None]] = [(1, None)]
    for chunks in options.chunks:
        if chunks > 1:
            cases += [(chunks, None)]
            cases += [(chunks, sms - options.overlapped_blocks)] if sms else []
            cases += [(chunks, DEALT)] if sms else []
    lowered = {}
    for chunks, matmul_blocks in cases:
        kernel = xm.KernelConfig(num_sms=options.overlapped_blocks if chunks > 1 else None)
        config = dataclasses.replace(given.config, num_chunks=chunks, kernel=kernel)
        with experts_on(matmul_blocks), mock.patch.object(_chunks, "OVERLAPPING", (*_chunks.OVERLAPPING, "cuda")):
            for operation in PASSES:
                program = layer.lowered(given, operation, layer_programs.own_layer(config, given.work), operands)
                lowered[chunks, matmul_blocks, operation] = program
    programs = compile_all(lowered)

    def measure() -> Pieces:
        rows: dict[Any, dict[str, Any]] = {}
        expected: dict[str, Any] = {}
        ready = {}
        for key, program in programs.items():
            chunks, matmul_blocks, operation = key
            blocks = None if chunks == 1 else options.overlapped_blocks
            row = rows[key] = {"piece": "layer", "chunks": chunks, "operation": operation, "blocks": blocks}
            row["matmul_blocks"] = matmul_blocks
            try:
                if isinstance(program, Exception):
                    raise RuntimeError(str(program)) from program
                result = jax.block_until_ready(program(*operands))
                if operation not in expected:
                    expected[operation] = result
                else:
                    row["max difference"] = layer.compare(given, "overlapped", result, expected[operation])
                ready[key] = program, operands
            except (RuntimeError, WrongResultError) as error:  # a refusal of an asynchronous operation is a result
                row["error"] = f"{type(error).__name__}: {error}"[:300]
        for key, us in in_turns(ready, options).items():
            rows[key] |= summary(us)
        return list(rows.values())

    return measure


def compile_all(lowered: dict[Any, Any]) -> dict[Any, Any]:
    """Executables, or the errors in their place."""

    def one(program: Any) -> Any:
        try:
            return program.compile()
        except jax.errors.JaxRuntimeError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
        return dict(zip(lowered, pool.map(one, lowered.values()), strict=True))


def in_turns(programs: dict[Any, tuple[Any, Any]], options: argparse.Namespace) -> dict[Any, list[float]]:
    """Microseconds of each program, repeats interleaved: a warm GPU is slower than a cool one."""
    taken: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(options.repeats):
        for key, (program, operands) in programs.items():
            taken[key] += turns.queued(program, operands, options.inner, 1)
    return taken


def summary(us: list[float]) -> dict[str, float]:
    return {"us": statistics.median(us), "us_min": min(us), "us_max": max(us)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles all, then measures the pieces; returns the JSON document, which is written after every part too."""
    given = layer_of(options)
    work = given.work
    operands = layer_programs.draw_operands(given)
    document = report.header([], work) | {
        "command": shlex.join(["python", "-m", "benchmarks", "layer-bound", *sys.argv[1:]]),
        "width": options.width,
        "sms": getattr(jax.devices()[0], "core_count", None) or 1,
        "pieces": [],
    }
    prepare: dict[str, Callable[[], Measure]] = {
        "layers": lambda: layers_to_measure(options, given, operands),
        "experts": lambda: experts_to_measure(options, given, operands.weights),
        "transfers": lambda: transfers_to_measure(options, work),
    }
    parts = [prepare[part]() for part in PARTS if part in options.parts]
    with turns.alone(options.lock):
        for measure in parts:
            document["pieces"] += measure()
            report.progress(f"{len(document['pieces'])} pieces")
            write(options, document)
    document["bounds"] = bounds(document["pieces"], document["sms"]) if set(options.parts) == set(PARTS) else []
    write(options, document)
    return document


def joined(options: argparse.Namespace) -> dict[str, Any]:
    """Makes one document of the files that `--join` names, which have measured different pieces of one layer."""
    documents = [json.loads(path.read_text()) for path in options.join]
    pieces = [row for document in documents for row in document["pieces"]]
    document = documents[0] | {"pieces": pieces, "command": "; ".join(d["command"] for d in documents)}
    document["bounds"] = bounds(pieces, document["sms"])
    write(options, document)
    return document


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    document = joined(options) if options.join else run(options)
    for row in document["pieces"]:
        where = f"{row['piece']:9s} {row.get('operation', ''):17s} chunks {row['chunks']} blocks {row['blocks'] or '-'}"
        where += f" matmuls' {row['matmul_blocks']}" if row.get("matmul_blocks") else ""
        print(f"{where}: {row['us']:.0f} us" if "us" in row else f"{where}: {row['error']}")
    for row in document["bounds"]:
        where = f"{row['bound']} {row['operation']} chunks {row.get('chunks', '-')} blocks {row.get('blocks') or '-'}"
        print(f"{where}: {row['us']:.0f} us, {row['ratio']:.3f} of the experts alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
