"""The library's own operations as programs that can be timed: every call depends on the one before.

A round trip feeds its output to the next dispatch. A lone dispatch or combine has no such output, so a flag read from
its result (one where the first element is NaN, which never happens and which the compiler cannot know) enters the
next call's routing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from xen_moe_jax.tuning.problem import AXIS
from xen_moe_jax.tuning.workload import Capacities, Workload

Experts = Callable[..., jax.Array]
"""`(rows [..., H], local expert of each row int32 [...], group_sizes=None) -> rows`; `group_sizes` int32 `[L]` where
the dispatch has grouped and counted the rows."""

RoundTrip = Callable[[jax.Array, jax.Array, jax.Array, Experts], jax.Array]
"""`(x [T,H], topk_idx [T,K], topk_weights [T,K], experts) -> [T,H]`, on one rank inside `shard_map`."""


def identity_experts(rows: jax.Array, local_expert: jax.Array, group_sizes: jax.Array | None = None) -> jax.Array:
    """Computes nothing, and only promises that the rows exist in memory, grouped for a matrix product, as a real expert
    needs.
    """
    del local_expert, group_sizes
    return jax.lax.optimization_barrier(rows)


def expert_scale(expert: Any) -> Any:
    """The factor of expert `e` in checks: exact in every dtype that the benchmark knows."""
    return 1.0 + (expert % 7) / 8.0


def scaling_experts(
    rows: jax.Array, local_expert: jax.Array, group_sizes: jax.Array | None = None, *, local_experts: int
) -> jax.Array:
    """Every expert multiplies by its own factor, so that a row at the wrong expert shows."""
    del group_sizes
    scale = expert_scale(local_expert + jax.lax.axis_index(AXIS) * local_experts)
    return rows * jax.lax.expand_dims(scale, [scale.ndim]).astype(rows.dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to time. All callables run on one rank inside `shard_map`.

    Attributes:
      name: name of the implementation.
      operation: "dispatch", "redispatch", "combine", "round trip", or "none" for the empty loop.
      prepare: `(x [T,H], topk_idx [T,K], topk_weights [T,K]) -> operands`, outside the timed loop; arrays of rank >= 1.
      initial: `(operands, topk_idx, topk_weights) -> carry`.
      step: `(operands, carry, topk_idx, topk_weights) -> carry`, the timed call.
      chain: `carry -> int32`, always zero: added to the number of the next routing.
      round_trip: for the check of results; None where `operation` is not a round trip.
      relative_cost: calls in one timed loop are divided by this.
    """

    name: str
    operation: str
    prepare: Callable[..., Any]
    initial: Callable[..., Any]
    step: Callable[..., Any]
    chain: Callable[[Any], jax.Array] = lambda carry: jnp.int32(0)
    round_trip: RoundTrip | None = None
    relative_cost: int = 1


def never(values: jax.Array) -> jax.Array:
    """int32 zero that the compiler cannot tell from one: depends on the first element of `values`."""
    first = values.reshape(-1)[0].astype(jnp.float32)
    return (first != first).astype(jnp.int32)


def round_trip_program(name: str, round_trip: RoundTrip, relative_cost: int = 1) -> Program:
    """The round trip with identity experts; weights sum to one, so that the chained tokens keep their size."""

    def step(operands, x, topk_idx, topk_weights):
        del operands
        return round_trip(x, topk_idx, topk_weights, identity_experts)

    return Program(
        name,
        "round trip",
        prepare=lambda x, topk_idx, topk_weights: x,
        initial=lambda x, topk_idx, topk_weights: x,
        step=step,
        round_trip=round_trip,
        relative_cost=relative_cost,
    )


def dispatch_arguments(work: Workload, caps: Capacities, config: xm.KernelConfig) -> dict[str, Any]:
    capacity = {"grouped": caps.grouped, "ranked": caps.ranked, "padded": None}[work.layout]
    return {
        "num_experts": work.experts,
        "axis_name": AXIS,
        "layout": work.layout,
        "capacity": capacity,
        "wire": None if work.block_scaled else work.wire,
        "config": config,
    }


def own_round_trip(work: Workload, caps: Capacities, config: xm.KernelConfig) -> RoundTrip:
    """dispatch, experts, combine. `BlockScaled` workloads quantize on the way out, so that the loop carries plain
    tokens.
    """
    arguments = dispatch_arguments(work, caps, config) | {"wire": work.dtype if work.block_scaled else work.wire}

    def round_trip(x, topk_idx, topk_weights, experts):
        routed = xm.dispatch(x, topk_idx, topk_weights, **arguments)
        y = apply_experts(work, routed, routed.x, experts)
        return xm.combine(y, routed.handle, weighted=work.layout != "ranked", wire=work.combine_wire, config=config)

    return round_trip


def apply_experts(work: Workload, routed: Any, rows: jax.Array, experts: Experts) -> jax.Array:
    """Runs `experts` on the rows of any layout; ranked rows are reduced over their local experts, as that layout
    asks.
    """
    if work.layout == "padded":
        local = jnp.arange(rows.shape[0], dtype=jnp.int32)
        return experts(rows, jnp.broadcast_to(local[:, None], rows.shape[:2]))
    if work.layout == "grouped":
        ends = jnp.cumsum(routed.group_sizes)
        local = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right").astype(jnp.int32)
        return experts(rows, local, routed.group_sizes)
    total = jnp.zeros(rows.shape, jnp.float32)
    for slot in range(work.top_k):
        local = routed.topk_idx[:, slot]
        y = experts(rows, jnp.maximum(local, 0)).astype(jnp.float32)
        total += jnp.where(local >= 0, routed.topk_weights[:, slot], 0.0)[:, None] * y
    return total.astype(rows.dtype)


def own_dispatch(
    work: Workload, caps: Capacities, config: xm.KernelConfig, name: str, dispatch: Callable[..., Any] = xm.dispatch
) -> Program:
    """Returns a program of dispatch alone, layout work included. `dispatch` may be another function that takes the
    arguments of `xm.dispatch`."""
    arguments = dispatch_arguments(work, caps, config)

    def prepare(x, topk_idx, topk_weights):
        return xm.quantize(x, dtype=work.dtype) if work.block_scaled else x

    def step(tokens, rows, topk_idx, topk_weights):
        return dispatch(tokens, topk_idx, topk_weights, **arguments).x

    def initial(tokens, topk_idx, topk_weights):
        rows = jax.eval_shape(lambda: step(tokens, None, topk_idx, topk_weights))
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rows)

    def chain(rows):
        return never(jax.tree.leaves(rows)[-1])  # the scales of a BlockScaled, else the rows

    return Program(name, "dispatch", prepare, initial, step, chain)


def own_redispatch(work: Workload, caps: Capacities, config: xm.KernelConfig, name: str) -> Program:
    """redispatch along the handle that a dispatch of the first routing left."""
    arguments = dispatch_arguments(work, caps, config) | {"wire": None}

    def prepare(x, topk_idx, topk_weights):
        return x, xm.dispatch(x, topk_idx, topk_weights, **arguments).handle

    def step(operands, rows, topk_idx, topk_weights):
        x, handle = operands
        handle = dataclasses.replace(handle, topk_idx=handle.topk_idx - never(rows))
        return xm.redispatch(x, handle, config=config)

    def initial(operands, topk_idx, topk_weights):
        rows = jax.eval_shape(lambda: xm.redispatch(*operands, config=config))
        return jnp.zeros(rows.shape, rows.dtype)

    return Program(name, "redispatch", prepare, initial, step)


def own_combine(
    work: Workload,
    caps: Capacities,
    config: xm.KernelConfig,
    name: str,
    combine: Callable[..., Any] = xm.combine,
) -> Program:
    """Returns a program of combine alone, weighted where the layout allows, of rows that a dispatch of the first
    routing brings. `combine`: a function that takes the arguments of `xm.combine`."""
    # the expert outputs are in the compute dtype, independent of the tokens' wire
    arguments = dispatch_arguments(work, caps, config) | {"wire": None}

    def prepare(x, topk_idx, topk_weights):
        routed = xm.dispatch(x, topk_idx, topk_weights, **arguments)
        return routed.x, routed.handle

    def initial(operands, topk_idx, topk_weights):
        return jnp.zeros((work.tokens, work.hidden), operands[0].dtype)

    def step(operands, out, topk_idx, topk_weights):
        y, handle = operands
        handle = dataclasses.replace(handle, topk_idx=handle.topk_idx - never(out))
        return combine(y, handle, weighted=work.layout != "ranked", wire=work.combine_wire, config=config)

    return Program(name, "combine", prepare, initial, step)


def own_programs(
    work: Workload, caps: Capacities, config: xm.KernelConfig, operations: tuple[str, ...]
) -> list[Program]:
    """The library's programs for the named operations."""
    name = f"xen_moe_jax ({config.backend or 'default backend'})"
    makers = {
        "dispatch": lambda: own_dispatch(work, caps, config, name),
        "redispatch": lambda: own_redispatch(work, caps, config, name),
        "combine": lambda: own_combine(work, caps, config, name),
        "round trip": lambda: round_trip_program(name, own_round_trip(work, caps, config)),
    }
    return [makers[operation]() for operation in operations]
