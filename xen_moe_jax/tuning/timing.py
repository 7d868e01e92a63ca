"""Times a call: N dependent calls inside one compiled program, on the slowest rank, over interleaved repeats."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xen_moe_jax.tuning.problem import Problem, rank_spec, specs
from xen_moe_jax.tuning.programs import Program


@dataclasses.dataclass
class Timed:
    """A compiled loop of `inner` calls and the times it took.

    Attributes:
      microseconds: per call, one entry per repeat, of the slowest rank.
      memory: bytes per device of one call's program, from the compiler: argument, output, temp, total.
    """

    program: Program
    inner: int
    compiled: Any
    operands: Any
    memory: dict[str, int]
    microseconds: list[float] = dataclasses.field(default_factory=list)
    result: Any = None

    def run_once(self) -> float:
        """Runs the loop; returns microseconds per call."""
        start = time.perf_counter()
        self.result = jax.block_until_ready(self.compiled(*self.operands))
        return (time.perf_counter() - start) / self.inner * 1e6

    @property
    def median(self) -> float:
        return statistics.median(self.microseconds)


def memory_bytes(compiled: Any) -> dict[str, int]:
    """Bytes per device that the compiler planned; `total` counts donated buffers once. Empty where it does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    parts = {
        "argument": analysis.argument_size_in_bytes,
        "output": analysis.output_size_in_bytes,
        "temp": analysis.temp_size_in_bytes,
        "alias": analysis.alias_size_in_bytes,
    }
    total = parts["argument"] + parts["output"] + parts["temp"] - parts.pop("alias")
    return {name: int(size) for name, size in parts.items()} | {"total": int(total)}


def on_ranks(function: Any, mesh: Mesh, in_specs: Any) -> Any:
    """`function` on every rank, jitted; all results are sharded over the leading axis."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rank_spec(mesh), check_vma=False))


def pick(pool: jax.Array, i: jax.Array) -> jax.Array:
    """Entry `i` modulo the pool's length."""
    return jax.lax.dynamic_index_in_dim(pool, jax.lax.rem(i, jnp.int32(pool.shape[0])), keepdims=False)


def compile_only(
    program: Program,
    problem: Problem,
    inner: int,
    unroll: int = 1,
    *,
    with_memory: bool = False,
    around: AbstractContextManager = contextlib.nullcontext(),  # noqa: B008  it holds nothing
    kept: list[Any] | None = None,
) -> Callable[[], Timed]:
    """Compiles the timed loop of a program. Several threads may compile programs side by side.

    Args:
      inner: calls in the loop, divided by `program.relative_cost`.
      unroll: calls in one turn of the loop.
      with_memory: whether to compile a single call, too, for `Timed.memory`, which is empty otherwise.
      around: entered while the loop is traced and compiled.
      kept: gets the compiled loop.

    Returns:
      A function that prepares the operands and returns the `Timed` program. It runs collectives: every process must
      call these functions of several programs one after another, in the same order.
    """
    mesh, inputs = problem.mesh, problem.inputs
    inner = max(1, inner // program.relative_cost)
    whole, prepared = preparing(program, problem)
    prepare = whole.lower(*inputs.arrays()).compile()

    def loop(prepared, idx_pool, weights_pool):
        def body(i, carry):
            routing = i + program.chain(carry)
            return program.step(prepared, carry, pick(idx_pool, routing), pick(weights_pool, routing))

        carry = program.initial(prepared, idx_pool[0], weights_pool[0])
        if unroll > 1 and problem.platform == "gpu":
            return chained_by_barriers(program, prepared, carry, idx_pool, weights_pool, inner, unroll)
        return jax.lax.fori_loop(0, inner, body, carry, unroll=min(unroll, inner))

    pools = (inputs.topk_idx, inputs.topk_weights)
    with around:
        compiled = on_ranks(loop, mesh, specs(mesh)).lower(prepared, *pools).compile()
    if kept is not None:
        kept.append(compiled)
    memory = memory_bytes(compile_single(program, problem)) if with_memory else {}

    def start() -> Timed:
        return Timed(program, inner, compiled, (prepare(*inputs.arrays()), *pools), memory)

    return start


def preparing(program: Program, problem: Problem) -> tuple[Any, Any]:
    """Returns the jitted function that prepares a program's operands from `problem.inputs.arrays()`, and the operands'
    shapes, dtypes and shardings."""

    def first(x, idx_pool, weights_pool):
        return program.prepare(x, idx_pool[0], weights_pool[0])

    whole = on_ranks(first, problem.mesh, specs(problem.mesh))
    sharding = jax.sharding.NamedSharding(problem.mesh, rank_spec(problem.mesh))
    shapes = jax.eval_shape(whole, *problem.inputs.arrays())
    return whole, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)


def compile_single(program: Program, problem: Problem) -> Any:
    """Returns the compiled program of a single call, without the loop of `compile_only`: its memory is that of the
    operation alone."""

    def single(prepared, topk_idx, topk_weights):
        carry = program.initial(prepared, topk_idx, topk_weights)
        return program.step(prepared, carry, topk_idx, topk_weights)

    mesh, pools = problem.mesh, problem.inputs.arrays()[1:]
    sharding = jax.sharding.NamedSharding(mesh, rank_spec(mesh))
    routing = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=sharding) for a in pools)
    prepared = preparing(program, problem)[1]
    return on_ranks(single, mesh, (rank_spec(mesh),) * 3).lower(prepared, *routing).compile()


def compile_all(
    chosen: list[Program], problem: Problem, inner: int, unroll: int = 1, *, with_memory: bool = False
) -> list[Callable[[], Timed]]:
    """`compile_only` of several programs, side by side where one process holds all ranks."""
    workers = min(8, (os.cpu_count() or 1) // 2) if jax.process_count() == 1 else 1
    with futures.ThreadPoolExecutor(max(1, workers)) as pool:
        compiling = [
            pool.submit(compile_only, program, problem, inner, unroll, with_memory=with_memory) for program in chosen
        ]
    return [compiled.result() for compiled in compiling]


def chained_by_barriers(
    program: Program, prepared: Any, carry: Any, idx_pool: jax.Array, weights_pool: jax.Array, inner: int, unroll: int
) -> Any:
    """`inner` calls, `unroll` of them in a turn of the loop, with as little of XLA between them as there can be.

    A call of some microseconds costs less than the kernels that pick its routing. So the calls of a turn have routings
    of their own, picked when compiling. The remaining cost is the flag that `program.chain` reads from the previous
    call's result, one small kernel; a round trip, whose tokens are the chain, has no such cost. Optimisation barriers
    keep XLA from joining those kernels.
    """
    routings = [(idx_pool[p], weights_pool[p]) for p in range(idx_pool.shape[0])]

    def calls(count, carry):
        for i in range(count):
            topk_idx, topk_weights = routings[i % len(routings)]
            topk_idx = topk_idx + program.chain(carry)
            topk_idx, topk_weights, carry = jax.lax.optimization_barrier((topk_idx, topk_weights, carry))
            carry = program.step(prepared, carry, topk_idx, topk_weights)
        return carry

    carry = jax.lax.fori_loop(0, inner // unroll, lambda _, carry: calls(unroll, carry), carry)
    return calls(inner % unroll, carry)


def slowest_process(microseconds: float) -> float:
    """The largest of every process's time; one process already waits for all of its devices."""
    if jax.process_count() == 1:
        return microseconds
    from jax.experimental import multihost_utils

    return float(np.max(multihost_utils.process_allgather(np.float64(microseconds))))


def measure(
    timed: list[Timed], repeats: int, warmup: int = 1, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Fills `microseconds` of every program: repeats are interleaved and start at another program each time.

    Args:
      progress: a function, called after every repeat with the share that is done and the seconds that are left.
    """
    for entry in timed:
        for _ in range(warmup):
            entry.run_once()
    began = time.perf_counter()
    for repeat in range(repeats):
        shift = repeat % len(timed)
        for entry in timed[shift:] + timed[:shift]:
            entry.microseconds.append(slowest_process(entry.run_once()))
        left = (time.perf_counter() - began) / (repeat + 1) * (repeats - repeat - 1)
        progress(f"  repeat {repeat + 1} of {repeats}, {left:.0f} s left")
