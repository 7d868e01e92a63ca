"""Asynchronous operations: `*_start` sends the rows and `*_done` waits for them. Work between the two runs meanwhile.

Where a backend has no asynchronous form of an operation, start runs the whole operation and done returns its result.
The bits of the result are equal in both cases.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xen_moe_jax import _api, _async_primitives, _prepare
from xen_moe_jax import _moe_primitives as primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._placement import Placement
from xen_moe_jax._types import BlockScaled, Flight, Handle, Routed, pytree, use_flight

_IN_OVERLAP = contextvars.ContextVar("_IN_OVERLAP", default=False)


def in_overlap() -> bool:
    """Returns True while the work of an `overlap` is traced. Pending operations may then occupy multiprocessors that
    the kernels of this work would otherwise have."""
    return _IN_OVERLAP.get()


@contextlib.contextmanager
def overlap_work(within: bool = True) -> Iterator[None]:
    """Traces the block of its `with` statement as the work of an `overlap`, or with `within=False` as other work."""
    token = _IN_OVERLAP.set(within)
    try:
        yield
    finally:
        _IN_OVERLAP.reset(token)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Traced:
    """A residual without arrays: whether the forward pass was traced as work of an `overlap`."""

    in_overlap: bool


def define_derivative(function: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Calls `function.defvjp` with rules that trace the backward pass as work of an `overlap` if `forward` was traced
    within such work: by itself JAX traces a backward pass when the `overlap` has returned.

    A derivative of `jax.jit`, `jax.checkpoint` or `lax.scan` traces `forward`, too, when an `overlap` within has
    returned. Neither pass is then traced as its work.
    """

    def keep(*operands: Any) -> tuple[Any, Any]:
        out, kept = forward(*operands)
        return out, (kept, _Traced(in_overlap()))

    def back(*given: Any) -> Any:
        *static, (kept, traced), cotangent = given
        with overlap_work(traced.in_overlap):
            return backward(*static, kept, cotangent)

    function.defvjp(keep, back)


@pytree(static=("static",))
class PendingDispatch:
    """State of a started dispatch.

    Attributes:
      operands: operands of the start, which the done operation takes again.
      known: the fields of the result that the primitive does not compute.
      pending: arrays that the backend has started to fill.
      static: static parameters of both operations.
    """

    operands: Any
    known: _prepare.Known
    pending: Any
    static: _prepare.Static


@pytree(static=("static", "weighted"))
class PendingCombine:
    """State of a started combine: operands, which the done operation takes again, and the pending arrays."""

    operands: Any
    pending: Any
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
    drop: str = "position",
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    placement: Placement | None = None,
    balance: str | None = None,
    slots_per_rank: int | None = None,
    config: KernelConfig | None = None,
) -> Flight:
    """Starts a `dispatch`, with the same arguments and errors. Finish it with `dispatch_done`.

    XLA keeps start and done apart only around work that data dependencies put between them: pass it to `overlap`.
    """
    prepared = _prepare.dispatch("dispatch_start", **locals())  # the arguments, by their names
    static = prepared.static
    if not _async_primitives.runs_async(static.spec, static.config):
        results = primitives.dispatch_p.bind(*prepared.operands, **static.params)
        return Flight(_api.routed(primitives.Dispatched(*results), static.spec, prepared.known), "dispatch")
    pending = _async_primitives.dispatch_start_p.bind(*prepared.start_operands, **static.params)
    return Flight(PendingDispatch(prepared.start_operands, prepared.known, pending, static), "dispatch")


@jax.named_scope("xen_moe_dispatch_done")
def dispatch_done(flight: Flight) -> Routed:
    """Waits for the rows of a started dispatch and returns them. A flight is finished exactly once.

    Raises:
      TypeError: `flight` is not the result of `dispatch_start`. ValueError: it was finished before.
    """
    state = _finish(flight, "dispatch")
    if not isinstance(state, PendingDispatch):
        return state
    results = _async_primitives.dispatch_done_p.bind(*state.operands, *state.pending, **state.static.params)
    return _api.routed(primitives.Dispatched(*results), state.static.spec, state.known)


@jax.named_scope("xen_moe_combine_start")
def combine_start(
    y: jax.Array,
    handle: Handle,
    *,
    weighted: bool | None = None,
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    placement: Placement | None = None,
    config: KernelConfig | None = None,
) -> Flight:
    """Starts a `combine`, with the same arguments and errors. Finish it with `combine_done`.

    With a placement the start is the whole operation, unless its `sums`, the layout or `wire` adds where the rows are.
    """
    prepared = _prepare.combine("combine_start", **locals())  # the arguments, by their names
    static = prepared.static
    if prepared.at_home is not None or not _async_primitives.runs_async(static.spec, static.config):
        return Flight(_api.combined_whole(prepared), "combine")
    pending = _async_primitives.combine_start_p.bind(*prepared.operands, **prepared.params)
    return Flight(PendingCombine(prepared.operands, pending, static, prepared.weighted), "combine")


@jax.named_scope("xen_moe_combine_done")
def combine_done(flight: Flight) -> jax.Array:
    """Waits for the partial sums of a started combine and returns their sum. A flight is finished exactly once.

    Raises:
      TypeError: `flight` is not the result of `combine_start`. ValueError: it was finished before.
    """
    state = _finish(flight, "combine")
    if not isinstance(state, PendingCombine):
        return state
    params = {**state.static.params, "weighted": state.weighted}
    (out,) = _async_primitives.combine_done_p.bind(*state.operands, *state.pending, **params)
    return _api.combined(out, state.static.spec)


@jax.named_scope("xen_moe_overlap")
def overlap[T](flights: T, work: Callable[..., Any], *args: Any) -> tuple[T, Any]:
    """Runs `work(*args)` while `flights` are pending: after their starts and before they are finished.

    XLA orders operations by their data alone, and would otherwise run done right after start. Here the arguments of
    `work` wait for the starts, and the returned flights wait for everything that `work` returns. The backward pass
    is made of whole operations.

        flight = xm.dispatch_start(x, topk_idx, topk_weights, num_experts=E, axis_name="ep")
        flight, dense = xm.overlap(flight, shared_expert, x)
        routed = xm.dispatch_done(flight)

    Args:
      flights: a `Flight` or a pytree of them, none of them finished.
      work: called once; it returns a pytree of arrays. It may start and finish other flights.
      args: pytrees with an array among them. Work that does not depend on them may run at any time. Numbers and other
        leaves that are no arrays reach `work` as they are.

    Returns:
      (flights, results of `work`). Finish these flights instead of the given ones. Where nothing can overlap (plain
      JAX), the flights are complete already and no order is imposed.

    Raises:
      TypeError: `flights` holds no flight, or `work` is no function. ValueError: there is no array among `args`, or a
        flight was finished or given to `overlap` before.
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
    if not any(map(_async_primitives.is_array, jax.tree.leaves(args))):
        raise ValueError(
            "overlap: no array among args: work can only be held back until the flights have started by what it is "
            "given. Pass an array that it begins with, as in overlap(flight, work, x)"
        )
    split = [i for i, flight in enumerate(nodes) if is_pending(flight)]
    for i, flight in enumerate(nodes):
        use_flight(flight, "overlap")
        if i not in split:  # complete: other arrays make it another flight
            nodes[i] = dataclasses.replace(flight, state=jax.lax.optimization_barrier(flight.state))
    if not split:
        return jax.tree.unflatten(tree, nodes), work(*args)
    states = [nodes[i].state for i in split]
    states, args = _order(states, args)
    with overlap_work():
        out = work(*args)
    states, out = _order(states, out)
    for i, state in zip(split, states, strict=True):
        nodes[i] = dataclasses.replace(nodes[i], state=state)
    return jax.tree.unflatten(tree, nodes), out


def _order(states: list[Any], others: Any) -> tuple[list[Any], Any]:
    """Orders the pending arrays of `states` against `others`, both ways.

    Arrays that a collective of XLA receives are left out: ordering them would make the collective complete before
    `others` are used.
    """
    brought = [_async_primitives.received_by_xla(state.static.spec, state.static.config) for state in states]
    ordered = [
        {n: array for n, array in enumerate(state.pending) if n not in left_out}
        for state, left_out in zip(states, brought, strict=True)
    ]
    ordered, others = _async_primitives.order(ordered, others)
    states = [
        dataclasses.replace(state, pending=[known.get(n, array) for n, array in enumerate(state.pending)])
        for state, known in zip(states, ordered, strict=True)
    ]
    return states, others


def is_pending(flight: Flight) -> bool:
    """Returns True if the start of `flight` left work to its done; otherwise the start ran the whole operation."""
    return isinstance(flight.state, PendingDispatch | PendingCombine)


def _finish(flight: Flight, kind: str) -> Any:
    if not isinstance(flight, Flight) or flight.kind != kind:
        got = f"a {flight.kind} flight" if isinstance(flight, Flight) else type(flight).__name__
        raise TypeError(f"{kind}_done: flight is {got}: pass what {kind}_start returned")
    use_flight(flight, f"{kind}_done")
    if is_pending(flight):
        return flight.state
    return jax.lax.optimization_barrier(flight.state)
