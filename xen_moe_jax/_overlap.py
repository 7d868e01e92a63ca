"""Halves: `*_start` puts rows on their way, `*_done` waits for them; what stands between the two runs meanwhile.

Where a backend has no halves for an operation, its start is the whole operation and its done hands the result over:
the same program gives the same bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _active, _api, _prepare
from xen_moe_jax import _moe_primitives as primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._types import BlockScaled, Flight, Handle, Routed, pytree


@pytree(static=("static",))
class DispatchInFlight:
    """Operands, which derivatives go to; the routing, which is known already; rows that `active` keeps from leaving;
    and what the backend left under way."""

    operands: Any
    known: Any
    withheld: Any
    in_flight: Any
    static: _prepare.Static


@pytree(static=("static", "weighted"))
class CombineInFlight:
    """Operands, which derivatives go to, and what the backend left under way."""

    operands: Any
    in_flight: Any
    static: _prepare.Static
    weighted: bool


@jax.named_scope("xen_moe_dispatch_start")
def dispatch_start(
    x: jax.Array | BlockScaled,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    num_experts: int,
    axis_name: str | tuple[str, str],
    layout: str = "grouped",
    capacity: int | None = None,
    alignment: int = 1,
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    config: KernelConfig | None = None,
) -> Flight:
    """First half of `dispatch`, same arguments: rows are on their way when it returns. Finish with `dispatch_done`.

    XLA keeps the halves apart only around work that data dependencies put between them: tie it with
    `jax.lax.optimization_barrier`, as docs/tpu.md shows.
    """
    prepared = _prepare.dispatch(
        "dispatch_start",
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        axis_name=axis_name,
        layout=layout,
        capacity=capacity,
        alignment=alignment,
        wire=wire,
        gradient_wire=gradient_wire,
        active=active,
        config=config,
    )
    static = prepared.static
    if not primitives.splits(static.spec, static.config):
        results = primitives.dispatch_p.bind(*prepared.operands, **static.params)
        whole = _api.routed(
            primitives.Dispatched(*results),
            prepared.topk_idx,
            static.spec,
            active=prepared.handle_active,
            withheld=prepared.withheld,
        )
        return Flight(whole, "dispatch")
    results = primitives.dispatch_start_p.bind(*prepared.start_operands, **static.params)
    known = 4 if static.spec.layout == "ranked" else 3
    state = DispatchInFlight(prepared.start_operands, results[:known], prepared.withheld, results[known:], static)
    return Flight(state, "dispatch")


@jax.named_scope("xen_moe_dispatch_done")
def dispatch_done(flight: Flight) -> Routed:
    """Second half of `dispatch`: waits for the rows. A flight is finished once.

    Raises:
      TypeError: `flight` is not what `dispatch_start` returned. ValueError: it was finished before.
    """
    state = _land(flight, "dispatch")
    if not isinstance(state, DispatchInFlight):
        return state
    x, scales, topk_idx, _, active = state.operands
    positions, recv_counts, *_ = state.known
    rows = primitives.dispatch_done_p.bind(
        x, scales, topk_idx, positions, recv_counts, active, *state.in_flight, **state.static.params
    )
    return _api.routed(
        primitives.Dispatched(*rows, *state.known),
        topk_idx,
        state.static.spec,
        active=active if _active.given(active) else None,
        withheld=state.withheld,
    )


@jax.named_scope("xen_moe_combine_start")
def combine_start(
    y: jax.Array,
    handle: Handle,
    *,
    weighted: bool | None = None,
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    config: KernelConfig | None = None,
) -> Flight:
    """First half of `combine`, same arguments. Finish with `combine_done`."""
    prepared = _prepare.combine(
        "combine_start",
        y,
        handle,
        weighted=weighted,
        wire=wire,
        gradient_wire=gradient_wire,
        active=active,
        config=config,
    )
    static = prepared.static
    if not primitives.splits(static.spec, static.config):
        (out,) = primitives.combine_p.bind(*prepared.operands, **prepared.params)
        return Flight(checkpoint_name(out, primitives.OUT), "combine")
    in_flight = primitives.combine_start_p.bind(*prepared.operands, **prepared.params)
    return Flight(CombineInFlight(prepared.operands, in_flight, static, prepared.weighted), "combine")


@jax.named_scope("xen_moe_combine_done")
def combine_done(flight: Flight) -> jax.Array:
    """Second half of `combine`: waits for the partial sums and adds them up. A flight is finished once."""
    state = _land(flight, "combine")
    if not isinstance(state, CombineInFlight):
        return state
    params = {**state.static.params, "weighted": state.weighted}
    (out,) = primitives.combine_done_p.bind(*state.operands, *state.in_flight, **params)
    return checkpoint_name(out, primitives.OUT)


_finished: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""An array of every flight that was finished and of no other, by identity: a copy of a flight shares it."""


def _land(flight: Flight, kind: str) -> Any:
    if not isinstance(flight, Flight) or flight.kind != kind:
        got = f"a {flight.kind} flight" if isinstance(flight, Flight) else type(flight).__name__
        raise TypeError(f"{kind}_done: flight is {got}: pass what {kind}_start returned")
    split = isinstance(flight.state, DispatchInFlight | CombineInFlight)
    ticket = jax.tree.leaves(flight.state.in_flight if split else flight.state)[0]
    if _finished.get(id(ticket)) is ticket:
        raise ValueError(
            f"{kind}_done: flight was finished before: a flight is used once. Keep the result of the first "
            f"{kind}_done, or call {kind}_start again"
        )
    _finished[id(ticket)] = ticket
    if split:
        return flight.state
    return jax.lax.optimization_barrier(flight.state)
