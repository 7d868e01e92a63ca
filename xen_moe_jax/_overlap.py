"""Halves: `*_start` puts rows on their way, `*_done` waits for them; what stands between the two runs meanwhile.

Where a backend has no halves for an operation, its start is the whole operation and its done hands the result over:
the same program gives the same bits.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _active, _api, _prepare
from xen_moe_jax import _flight_primitives as halves
from xen_moe_jax import _moe_primitives as primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._types import BlockScaled, Flight, Handle, Routed, pytree, use_flight

_BESIDE_FLIGHTS = contextvars.ContextVar("_BESIDE_FLIGHTS", default=False)


def beside_flights() -> bool:
    """Whether what is traced now is the work of an `overlap` whose flights are under way: kernels may then find
    multiprocessors taken."""
    return _BESIDE_FLIGHTS.get()


@contextlib.contextmanager
def _said_to_be_beside_flights() -> Iterator[None]:
    token = _BESIDE_FLIGHTS.set(True)
    try:
        yield
    finally:
        _BESIDE_FLIGHTS.reset(token)


@pytree(static=("static",))
class DispatchInFlight:
    """Operands, which the done half is given again; rows that `active` keeps from leaving; what the backend left under
    way."""

    operands: Any
    withheld: Any
    in_flight: Any
    static: _prepare.Static


@pytree(static=("static", "weighted"))
class CombineInFlight:
    """Operands, which the done half is given again, and what the backend left under way."""

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

    XLA keeps the halves apart only around work that data dependencies put between them: give it to `overlap`.
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
    if not halves.splits(static.spec, static.config):
        results = primitives.dispatch_p.bind(*prepared.operands, **static.params)
        whole = _api.routed(
            primitives.Dispatched(*results),
            static.spec,
            active=prepared.handle_active,
            withheld=prepared.withheld,
        )
        return Flight(whole, "dispatch")
    in_flight = halves.dispatch_start_p.bind(*prepared.start_operands, **static.params)
    return Flight(DispatchInFlight(prepared.start_operands, prepared.withheld, in_flight, static), "dispatch")


@jax.named_scope("xen_moe_dispatch_done")
def dispatch_done(flight: Flight) -> Routed:
    """Second half of `dispatch`: waits for the rows. A flight is finished once.

    Raises:
      TypeError: `flight` is not what `dispatch_start` returned. ValueError: it was finished before.
    """
    state = _land(flight, "dispatch")
    if not isinstance(state, DispatchInFlight):
        return state
    results = halves.dispatch_done_p.bind(*state.operands, *state.in_flight, **state.static.params)
    *_, active = state.operands
    return _api.routed(
        primitives.Dispatched(*results),
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
    if not halves.splits(static.spec, static.config):
        (out,) = primitives.combine_p.bind(*prepared.operands, **prepared.params)
        return Flight(checkpoint_name(out, primitives.OUT), "combine")
    in_flight = halves.combine_start_p.bind(*prepared.operands, **prepared.params)
    return Flight(CombineInFlight(prepared.operands, in_flight, static, prepared.weighted), "combine")


@jax.named_scope("xen_moe_combine_done")
def combine_done(flight: Flight) -> jax.Array:
    """Second half of `combine`: waits for the partial sums and adds them up. A flight is finished once."""
    state = _land(flight, "combine")
    if not isinstance(state, CombineInFlight):
        return state
    params = {**state.static.params, "weighted": state.weighted}
    (out,) = halves.combine_done_p.bind(*state.operands, *state.in_flight, **params)
    return checkpoint_name(out, primitives.OUT)


@jax.named_scope("xen_moe_overlap")
def overlap[T](flights: T, work: Callable[..., Any], *args: Any) -> tuple[T, Any]:
    """Runs `work(*args)` while flights are under way: after their starts and before they are finished.

    XLA orders operations by their data alone, and would else put a done half right behind its start. Here the
    arguments of `work` wait for the starts, and the flights that come back wait for all that `work` returns. The same
    holds in the backward pass, for the flights that it makes of these and the transpose of `work`.

        flight = xm.dispatch_start(x, topk_idx, topk_weights, num_experts=E, axis_name="ep")
        flight, dense = xm.overlap(flight, shared_expert, x)
        routed = xm.dispatch_done(flight)

    Args:
      flights: a `Flight` or a pytree of them, none of them finished.
      work: called once; it returns a pytree of arrays. It may start and finish other flights.
      args: pytrees with an array among them. Work that does not depend on them may run at any time. Numbers and other
        leaves that are no arrays reach `work` as they are.

    Returns:
      The flights, to be finished instead of those given, and what `work` returned. Where nothing can overlap (plain
      JAX) the flights have arrived already, and no order is imposed.

    Raises:
      TypeError: `flights` holds no flight, or `work` is no function. ValueError: there is no array among `args`.
    """
    is_flight = lambda node: isinstance(node, Flight)  # noqa: E731
    nodes, tree = jax.tree.flatten(flights, is_leaf=is_flight)
    if not nodes or not all(map(is_flight, nodes)):
        raise TypeError(
            f"overlap: flights={type(flights).__name__}: pass what dispatch_start or combine_start returned, or a "
            "pytree of that"
        )
    if not callable(work):
        raise TypeError(f"overlap: work is a {type(work).__name__}: must be a function; its arguments follow it")
    if not any(map(halves.is_array, jax.tree.leaves(args))):
        raise ValueError(
            "overlap: no array among args: work can only be held back until the flights have started by what it is "
            "given. Pass an array that it begins with, as in overlap(flight, work, x)"
        )
    split = [i for i, flight in enumerate(nodes) if under_way(flight)]
    if not split:
        return flights, work(*args)
    for i in split:
        use_flight(nodes[i], "overlap")
    states = [nodes[i].state for i in split]
    states, args = _order(states, args)
    with _said_to_be_beside_flights():
        out = work(*args)
    states, out = _order(states, out)
    for i, state in zip(split, states, strict=True):
        nodes[i] = dataclasses.replace(nodes[i], state=state)
    return jax.tree.unflatten(tree, nodes), out


def _order(states: list[Any], others: Any) -> tuple[list[Any], Any]:
    """`halves.order` of all that is under way and `others`, less what a collective of XLA brings: ordered, it would be
    complete before `others` are used.
    """
    brought = [halves.brought_by_xla(state.static.spec, state.static.config) for state in states]
    ordered = [
        {n: array for n, array in enumerate(state.in_flight) if n not in left_out}
        for state, left_out in zip(states, brought, strict=True)
    ]
    ordered, others = halves.order(ordered, others)
    states = [
        dataclasses.replace(state, in_flight=[known.get(n, array) for n, array in enumerate(state.in_flight)])
        for state, known in zip(states, ordered, strict=True)
    ]
    return states, others


def under_way(flight: Flight) -> bool:
    """Whether its start left something to its done; elsewhere it is the whole operation."""
    return isinstance(flight.state, DispatchInFlight | CombineInFlight)


def _land(flight: Flight, kind: str) -> Any:
    if not isinstance(flight, Flight) or flight.kind != kind:
        got = f"a {flight.kind} flight" if isinstance(flight, Flight) else type(flight).__name__
        raise TypeError(f"{kind}_done: flight is {got}: pass what {kind}_start returned")
    use_flight(flight, f"{kind}_done")
    if under_way(flight):
        return flight.state
    return jax.lax.optimization_barrier(flight.state)
