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
from xen_moe_jax.benchmark.problem import AXIS
from xen_moe_jax.benchmark.workload import Capacities, Workload

Experts = Callable[..., jax.Array]
"""`(rows [..., H], local expert of each row int32 [...], group_sizes=None) -> rows`; `group_sizes` int32 `[L]` where
rows come grouped from somebody who has counted them."""

RoundTrip = Callable[[jax.Array, jax.Array, jax.Array, Experts], jax.Array]
"""`(x [T,H], topk_idx [T,K], topk_weights [T,K], experts) -> [T,H]`, on one rank inside `shard_map`."""


def identity_experts(rows: jax.Array, local_expert: jax.Array, group_sizes: jax.Array | None = None) -> jax.Array:
    """Nothing but the promise that the rows exist in memory, grouped for a matrix product, as a real expert needs
    them.
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
      name: of the implementation.
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


def own_dispatch(work: Workload, caps: Capacities, config: xm.KernelConfig, name: str) -> Program:
    """dispatch alone; layout work is part of it."""
    arguments = dispatch_arguments(work, caps, config)

    def prepare(x, topk_idx, topk_weights):
        return xm.quantize(x, dtype=work.dtype) if work.block_scaled else x

    def step(tokens, rows, topk_idx, topk_weights):
        return xm.dispatch(tokens, topk_idx, topk_weights, **arguments).x

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


def own_combine(work: Workload, caps: Capacities, config: xm.KernelConfig, name: str) -> Program:
    """combine alone, weighted where the layout allows, of the rows that a dispatch of the first routing brought."""
    # the expert outputs are in the compute dtype, whatever the tokens travelled in
    arguments = dispatch_arguments(work, caps, config) | {"wire": None}

    def prepare(x, topk_idx, topk_weights):
        routed = xm.dispatch(x, topk_idx, topk_weights, **arguments)
        return routed.x, routed.handle

    def initial(operands, topk_idx, topk_weights):
        return jnp.zeros((work.tokens, work.hidden), operands[0].dtype)

    def step(operands, out, topk_idx, topk_weights):
        y, handle = operands
        handle = dataclasses.replace(handle, topk_idx=handle.topk_idx - never(out))
        return xm.combine(y, handle, weighted=work.layout != "ranked", wire=work.combine_wire, config=config)

    return Program(name, "combine", prepare, initial, step)


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another way to write the round trip, in its two halves; both run on one rank inside `shard_map`.

    Attributes:
      dispatch: `(tokens, topk_idx [T,K]) -> (rows, local expert of each row int32, route)`; `tokens` is an array or a
        `BlockScaled`, `rows` is of the same kind; `route` holds arrays of rank >= 1.
      combine: `(y, route, topk_weights [T,K]) -> [T,H]`.
      quantized: whether `dispatch` takes a `BlockScaled`; where it does not, tokens travel in the compute dtype.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    quantized: bool = True


def peer_wire(work: Workload, peer: Peer) -> str | None:
    """The quantized wire of a peer's dispatch, None where rows travel in the compute dtype."""
    wire = work.dtype if work.block_scaled else work.wire
    return wire if peer.quantized else None


def peer_round_trip(work: Workload, peer: Peer) -> RoundTrip:
    """Quantize where the workload does, dispatch, dequantize, experts, combine."""
    wire = peer_wire(work, peer)

    def round_trip(x, topk_idx, topk_weights, experts):
        tokens = x if wire is None else xm.quantize(x, dtype=wire)
        rows, local_expert, route = peer.dispatch(tokens, topk_idx)
        rows = rows if wire is None else xm.dequantize(rows, x.dtype)
        return peer.combine(experts(rows, local_expert), route, topk_weights)

    return round_trip


def peer_dispatch(work: Workload, peer: Peer, name: str, relative_cost: int = 1) -> Program:
    """A peer's dispatch alone; tokens that come quantized arrive quantized, as they do in `own_dispatch`."""
    comes_scaled = work.block_scaled and peer.quantized

    def prepare(x, topk_idx, topk_weights):
        return xm.quantize(x, dtype=work.dtype) if comes_scaled else x

    def step(tokens, carry, topk_idx, topk_weights):
        if work.wire is not None and peer.quantized:
            rows = xm.dequantize(peer.dispatch(xm.quantize(tokens, dtype=work.wire), topk_idx)[0], tokens.dtype)
        else:
            rows = peer.dispatch(tokens, topk_idx)[0]
        return jax.lax.optimization_barrier(rows)

    def initial(tokens, topk_idx, topk_weights):
        rows = jax.eval_shape(lambda: step(tokens, None, topk_idx, topk_weights))
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rows)

    def chain(rows):
        return sum(never(leaf) for leaf in jax.tree.leaves(rows))

    return Program(name, "dispatch", prepare, initial, step, chain, relative_cost=relative_cost)


def peer_combine(work: Workload, peer: Peer, name: str, relative_cost: int = 1) -> Program:
    """A peer's combine alone, of the rows that its dispatch of the first routing brought in the compute dtype."""

    def prepare(x, topk_idx, topk_weights):
        rows, _, route = peer.dispatch(x, topk_idx)
        return rows, route, topk_weights

    def initial(operands, topk_idx, topk_weights):
        return jnp.zeros((work.tokens, work.hidden), operands[0].dtype)

    def step(operands, out, topk_idx, topk_weights):
        y, route, weights = operands
        # nothing of a call may be computed before the last one has ended, nor once for all of them
        y, again = jax.lax.optimization_barrier((y, never(out)))
        return peer.combine(y, jax.tree.map(lambda leaf: leaf - again, route), weights)

    return Program(name, "combine", prepare, initial, step, relative_cost=relative_cost)


def empty_chain() -> Program:
    """What is between the lone calls of `timing.chained_by_barriers`: the routing with a flag from what was before."""
    return Program(
        "empty loop",
        "none",
        prepare=lambda x, topk_idx, topk_weights: x[:1],
        initial=lambda x, topk_idx, topk_weights: topk_idx,
        step=lambda operands, carry, topk_idx, topk_weights: topk_idx,
        chain=never,
    )


def empty_loop() -> Program:
    """What the loop of a lone dispatch costs by itself: picking a routing, chaining calls."""

    def step(operands, carry, topk_idx, topk_weights):
        topk_idx, topk_weights = jax.lax.optimization_barrier((topk_idx, topk_weights))
        return carry + topk_weights[:1, :1] + topk_idx[:1, :1].astype(jnp.float32)

    return Program(
        "empty loop",
        "none",
        prepare=lambda x, topk_idx, topk_weights: x[:1],
        initial=lambda x, topk_idx, topk_weights: jnp.zeros((1, 1), jnp.float32),
        step=step,
        chain=never,
    )


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
