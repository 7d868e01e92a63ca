"""`python -m benchmarks overlap`: an operation beside matmuls, synchronous, and with the matmuls between start and
done.

It times dispatch and combine, in loops of dependent calls: the operation alone; start and done with nothing between; a
chain of matmuls alone that takes about as long; operation and chain one after the other; and the chain between start
and done. The figure is the last time over the longer one of operation and chain; at 1 the overlap is free.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from benchmarks.lib import options as command_options
from benchmarks.lib import report, verify
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.problem import Problem
from xen_moe_jax.tuning.programs import Program, never

LOOP_US = 30_000.0
"""Length of a timed loop: starting a program counts for little in it."""
MOST_MATMULS = 64
MOST_WEIGHTS = 4
LEAST_ROWS = 1024
"""The rows of a link are a multiple of this for a training batch."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """`links` matmuls `[rows, columns] @ [columns, columns]`, each fed by the one before."""

    rows: int
    columns: int
    links: int

    def start(self, key: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first operand and the weights, which are several matrices so that no cache holds them all."""
        keys = jax.random.split(jax.random.key(key))
        shape = (min(self.links, MOST_WEIGHTS), self.columns, self.columns)
        w = jax.random.normal(keys[0], shape, jnp.float32) / self.columns**0.5
        return jax.random.normal(keys[1], (self.rows, self.columns), jnp.bfloat16), w.astype(jnp.bfloat16)

    def run(self, a: jax.Array, w: jax.Array) -> jax.Array:
        for link in range(self.links):
            a = a @ w[link % MOST_WEIGHTS]
        return a


def shape_of_chain(tokens: int, hidden: int) -> tuple[int, int]:
    """Rows and columns: bound by arithmetic for a training batch, by reading weights for a decode step."""
    return (4 * tokens, min(hidden, 2048)) if tokens > 512 else (tokens, min(hidden, 4096))


def chain_of(shape: tuple[int, int], us: float, link_us: float) -> Chain:
    """Returns a chain that takes about `us`, where a link of this shape takes `link_us`.

    The number of links is even and at least two, so that a loop finds the operand where it left it and copies nothing.
    Rows are fewer than in `shape` where whole links are too coarse.
    """
    rows, columns = shape
    wanted = us / max(link_us, 1e-3)
    links = max(2, min(MOST_MATMULS, 2 * round(wanted / 2)))
    if rows > LEAST_ROWS:
        rows = max(LEAST_ROWS, round(rows * wanted / links / LEAST_ROWS) * LEAST_ROWS)
    return Chain(rows, columns, links)


def variants(problem: Problem, operation: str, config: xm.KernelConfig, chain: Chain) -> dict[str, Program]:
    """The five programs, by name. All carry `(result of the operation, operand of the chain)`."""
    work, caps = problem.work, problem.caps
    dispatching = operation == "dispatch"
    arguments = programs.dispatch_arguments(work, caps, config) | ({} if dispatching else {"wire": None})
    weighted: dict[str, Any] = {"weighted": work.layout != "ranked", "wire": work.combine_wire, "config": config}

    def prepare(x, topk_idx, topk_weights):
        a, w = chain.start(work.seed)
        if dispatching:
            return xm.quantize(x, dtype=work.dtype) if work.block_scaled else x, None, a, w
        routed = xm.dispatch(x, topk_idx, topk_weights, **arguments)
        return routed.x, routed.handle, a, w

    def whole(operands, result, topk_idx, topk_weights):
        values, handle, *_ = operands
        if dispatching:
            return xm.dispatch(values, topk_idx, topk_weights, **arguments).x
        return xm.combine(values, after(handle, result), **weighted)

    def start(operands, result, topk_idx, topk_weights):
        values, handle, *_ = operands
        if dispatching:
            return xm.dispatch_start(values, topk_idx, topk_weights, **arguments)
        return xm.combine_start(values, after(handle, result), **weighted)

    def after(handle, result):
        return dataclasses.replace(handle, topk_idx=handle.topk_idx - never(jax.tree.leaves(result)[-1]))

    def done(flight):
        return xm.dispatch_done(flight).x if dispatching else xm.combine_done(flight)

    def initial(operands, topk_idx, topk_weights):
        result = None if dispatching else jnp.zeros((work.tokens, work.hidden), operands[0].dtype)
        shapes = jax.eval_shape(lambda: whole(operands, result, topk_idx, topk_weights))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), operands[2]

    def alone(operands, carry, *routing):
        return whole(operands, carry[0], *routing), carry[1]

    def halves(operands, carry, *routing):
        return done(start(operands, carry[0], *routing)), carry[1]

    def matmuls(operands, carry, *routing):
        del routing
        return carry[0], chain.run(carry[1], operands[3])

    def in_turn(operands, carry, *routing):
        result, a = jax.lax.optimization_barrier((whole(operands, carry[0], *routing), carry[1]))
        return result, chain.run(a, operands[3])

    def overlapped(operands, carry, *routing):
        flight = start(operands, carry[0], *routing)
        flight, a = xm.overlap(flight, lambda a: chain.run(a, operands[3]), carry[1])
        return done(flight), a

    def chained(carry):
        return never(jax.tree.leaves(carry[0])[-1])

    steps: dict[str, Callable[..., Any]] = {
        "whole": alone,
        "in halves": halves,
        "matmuls": matmuls,
        "in turn": in_turn,
        "overlapped": overlapped,
    }
    return {name: Program(name, operation, prepare, initial, step, chained) for name, step in steps.items()}


def _time(problem: Problem, chosen: list[Program], inner: int, repeats: int) -> list[timing.Timed]:
    timed = [start() for start in timing.compile_all(chosen, problem, inner)]
    timing.measure(timed, repeats)
    return timed


def measure(
    problem: Problem, operation: str, config: xm.KernelConfig, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each number of thread blocks of the asynchronous operation; all are timed in turns."""
    work = problem.work
    shape = shape_of_chain(work.tokens, work.hidden)
    on_cpu = problem.platform == "cpu"
    probe = variants(problem, operation, config, Chain(*shape, 4))
    inner = options.inner or (2 if on_cpu else 20)
    whole, four = _time(problem, [probe["whole"], probe["matmuls"]], inner, 3)
    chain = Chain(*shape, 1) if on_cpu else chain_of(shape, whole.median, four.median / 4)
    inner = options.inner or (2 if on_cpu else int(max(20, min(1000, LOOP_US / whole.median))))
    fixed = variants(problem, operation, config, chain)
    counts = options.num_sms or [None]
    chosen = [fixed[name] for name in ("whole", "matmuls", "in turn")]
    for num_sms in counts:
        made = variants(problem, operation, dataclasses.replace(config, num_sms=num_sms), chain)
        chosen += [made["in halves"], made["overlapped"]]
    timed = _time(problem, chosen, inner, options.repeats)
    rows = []
    for i, num_sms in enumerate(counts):
        mine = [*timed[:3], *timed[3 + 2 * i : 5 + 2 * i]]
        _check(timed[2], mine[-1])
        rows.append(_row(operation, num_sms, chain, mine))
        report.progress(f"  {operation}, {num_sms or 'default'} blocks: " + str(rows[-1]["us"]))
    return rows


def _check(in_turn: timing.Timed, overlapped: timing.Timed) -> None:
    """Both loops leave the same bits behind. Rows of a dispatch that belong to no expert are not looked at."""
    first = 1 if in_turn.program.operation == "dispatch" else 0
    pairs = [jax.tree.leaves(entry.result[first:]) for entry in (in_turn, overlapped)]
    for wanted, got in zip(*pairs, strict=True):
        different = sum(
            int(np.sum(np.asarray(a.data).view(np.uint8) != np.asarray(b.data).view(np.uint8)))
            for a, b in zip(wanted.addressable_shards, got.addressable_shards, strict=True)
        )
        if different:
            raise verify.WrongResultError(f"overlapped: {different} bytes differ from those of the parts in turn")


def _row(operation: str, num_sms: int | None, chain: Chain, timed: list[timing.Timed]) -> dict[str, Any]:
    us = {entry.program.name: entry.median for entry in timed}
    longer = max(us["whole"], us["matmuls"])
    return {
        "operation": operation,
        "num_sms": num_sms,
        "matmul": dataclasses.asdict(chain),
        "us": us,
        "us_min": {entry.program.name: min(entry.microseconds) for entry in timed},
        "us_max": {entry.program.name: max(entry.microseconds) for entry in timed},
        "over_longer": us["overlapped"] / longer,
        "hidden": (us["in turn"] - us["overlapped"]) / min(us["whole"], us["matmuls"]),
    }


def check_halves(problem: Problem, config: xm.KernelConfig) -> None:
    """Checks that a round trip by start and done gives the bits of a synchronous one."""
    work = problem.work
    arguments = programs.dispatch_arguments(work, problem.caps, config)
    weighted: dict[str, Any] = {"weighted": work.layout != "ranked", "wire": work.combine_wire, "config": config}

    def differing(x, idx_pool, weights_pool):
        values = xm.quantize(x, dtype=work.dtype) if work.block_scaled else x
        rows = lambda routed: xm.dequantize(routed.x, x.dtype) if work.block_scaled else routed.x  # noqa: E731
        whole = xm.dispatch(values, idx_pool[0], weights_pool[0], **arguments)
        split = xm.dispatch_done(xm.dispatch_start(values, idx_pool[0], weights_pool[0], **arguments))
        wanted = xm.combine(rows(whole), whole.handle, **weighted)
        got = xm.combine_done(xm.combine_start(rows(split), split.handle, **weighted))
        return jnp.sum(wanted != got)[None]

    mapped = timing.on_ranks(differing, problem.mesh, timing.specs(problem.mesh))
    if count := int(jnp.sum(mapped(*problem.inputs.arrays()))):
        raise verify.WrongResultError(f"a round trip in halves: {count} elements differ from those of a whole one")


def run(problem: Problem, config: xm.KernelConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for every operation that `options` ask for; a round trip has no start and done of its own."""
    check_halves(problem, config)
    rows = []
    for operation in command_options.operations(options):
        if operation != "round trip":
            report.progress(f"measuring overlap: {operation}")
            rows += measure(problem, operation, config, options)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    names = ["whole", "in halves", "matmuls", "in turn", "overlapped"]
    head = ["operation", "num_sms", *(f"{name}, us" for name in names), "over the longer", "hidden"]
    body = [
        [
            row["operation"],
            str(row["num_sms"] or "default"),
            *(f"{row['us'][name]:.1f}" for name in names),
            f"{row['over_longer']:.2f}",
            f"{row['hidden']:.0%}",
        ]
        for row in rows
    ]
    return report.format_table(head, body)
