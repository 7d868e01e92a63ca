"""Dispatch, combine and their halves: argument checks, defaults, and the pytrees around the primitives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _gradients, _halves, _layout, _primitives, _validate
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec, worst_case_capacity
from xen_moe_jax._types import BlockScaled, DispatchLayout, Flight, Handle, Routed


def dispatch(
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
    config: KernelConfig | None = None,
) -> Routed:
    """Sends every token's hidden state to the ranks that hold its experts. Call it inside `jax.shard_map`.

    Rank `r` of `R` owns experts `[r*L, min(E, (r+1)*L))`, `L = ceil(E / R)`. A row crosses the link once per (token,
    destination rank), however many of the rank's experts the token names.

    Args:
      x: `[T, H]` float32, bfloat16 or float16, this rank's tokens; or a `BlockScaled` from `quantize`, which travels
        as it is and arrives as a `BlockScaled`. `T` is the same on every rank.
      topk_idx: integer `[T, K]`, global expert of each slot; an entry outside `[0, num_experts)` is an unused slot.
      topk_weights: float `[T, K]`, router weights; None means 1.
      num_experts: global number of experts `E`; need not divide by `R`.
      axis_name: mesh axis, or `(slow, fast)` pair of axes.
      layout: "grouped": `routed.x [C, H]` by local expert, then (source rank, token, slot), ready for
        `jax.lax.ragged_dot` with `routed.group_sizes`. "ranked": one row per (token, rank), `routed.topk_idx` holds
        local expert ids. "padded": `routed.x [L, R*T, H]`, each expert's rows at the front.
      capacity: rows of `routed.x` (grouped and ranked). None is the worst case, which cannot overflow while no token
        names one expert twice. Rows at positions `>= capacity` are dropped and counted in `routed.num_dropped`.
      alignment: grouped: each group's rows are rounded up to a multiple of this; the padding rows are zero.
      wire: None sends the input dtype; "float8_e4m3fn" or "int8" (with ":ue8m0" for power-of-two scales) quantises on
        the wire and dequantises on arrival. Gradients go straight through.
      config: tuning; never changes the result.

    Returns:
      `Routed`. Rows past the last group are unspecified and are never read by `combine` or by a gradient.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    prepared = _prepare_dispatch(
        "dispatch",
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        axis_name=axis_name,
        layout=layout,
        capacity=capacity,
        alignment=alignment,
        wire=wire,
        config=config,
    )
    return _routed(_gradients.dispatch(*prepared), prepared[3], prepared[0].spec)


def _prepare_dispatch(
    caller: str,
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    num_experts: Any,
    axis_name: Any,
    layout: Any = "grouped",
    capacity: Any = None,
    alignment: Any = 1,
    wire: Any = None,
    config: KernelConfig | None = None,
) -> tuple[_gradients.Static, jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Checked arguments of a dispatch: static half, values, scales, sanitised indices, weights."""
    config = _validate.config(config, caller)
    values, scales = _validate.payload(x, caller)
    num_tokens = values.shape[0]
    topk_idx, topk_weights = _validate.routing(topk_idx, topk_weights, num_tokens, caller)
    parsed_wire = _validate.wire(wire, caller)
    if scales is not None and parsed_wire is not None:
        raise ValueError(f"{caller}: wire={wire!r} with a BlockScaled x: it is quantised already; pass wire=None")
    spec = _make_spec(
        caller,
        axis_name=axis_name,
        num_experts=num_experts,
        num_tokens=num_tokens,
        top_k=topk_idx.shape[1],
        layout=layout,
        capacity=capacity,
        alignment=alignment,
    )
    idx = _layout.sanitize(topk_idx, spec.num_experts)
    weights = jnp.ones(idx.shape, jnp.float32) if topk_weights is None else topk_weights.astype(jnp.float32)
    static = _gradients.Static(spec, parsed_wire, _for_shape(config, spec, values.shape[1]))
    operands = [values, idx, weights] if scales is None else [values, idx, weights, scales]
    values, idx, weights, *rest = _primitives.vary_over(operands, spec.axis_name)
    return static, values, rest[0] if rest else None, idx, weights


def _make_spec(
    caller: str,
    *,
    axis_name: Any,
    num_experts: Any,
    num_tokens: int,
    top_k: int,
    layout: Any,
    capacity: Any,
    alignment: Any,
) -> Spec:
    layout = _validate.layout(layout, caller)
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    alignment = _validate.integer(alignment, "alignment", caller, minimum=1)
    if alignment > 1 and layout != "grouped":
        raise ValueError(f"{caller}: alignment={alignment} with layout={layout!r}: only 'grouped' has groups to align")
    names, sizes = _validate.axes(axis_name, caller)
    worst = worst_case_capacity(
        layout=layout,
        num_ranks=math.prod(sizes),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        alignment=alignment,
    )
    if capacity is None:
        capacity = worst
    elif layout == "padded":
        raise ValueError(
            f"{caller}: capacity={capacity!r} with layout='padded': its rows are always [L, R*T]; pass None"
        )
    else:
        capacity = _validate.integer(capacity, "capacity", caller, minimum=0)
    _validate.row_limit(capacity, "capacity", caller)
    return Spec(names, sizes, num_experts, num_tokens, top_k, layout, capacity, alignment)


def _for_shape(config: KernelConfig, spec: Spec, hidden: int) -> KernelConfig:
    """Nothing moves when a dimension is empty: plain JAX answers, and no kernel has to think of it."""
    empty = spec.num_tokens == 0 or spec.capacity == 0 or hidden == 0
    return dataclasses.replace(config, backend="reference") if empty else config


def _routed(out: _gradients.Dispatched, topk_idx: jax.Array, spec: Spec) -> Routed:
    ranked = spec.layout == "ranked"
    if ranked:
        assert out.local_idx is not None
        counts = _layout.ranked_counts(out.recv_counts, out.local_idx, spec)
    else:
        counts = _layout.group_counts(out.recv_counts, spec)
    return Routed(
        x=out.rows if out.row_scales is None else BlockScaled(out.rows, out.row_scales),
        group_sizes=counts.group_sizes,
        num_tokens_per_expert=counts.num_tokens_per_expert,
        num_dropped=counts.num_dropped,
        weights=None if ranked else out.weights,
        topk_idx=out.local_idx,
        topk_weights=out.weights if ranked else None,
        handle=Handle(topk_idx, out.positions, out.recv_counts, out.weights, spec),
    )


def combine(
    y: jax.Array,
    handle: Handle,
    *,
    weighted: bool | None = None,
    wire: Any = None,
    config: KernelConfig | None = None,
) -> jax.Array:
    """Brings expert outputs back to their tokens and adds them up, in an order that every backend shares.

    On each expert rank a token's rows are multiplied by their router weights and added in float32 in slot order, then
    rounded to the wire dtype; on the token's rank these partial sums are added in float32 in ascending rank order and
    rounded to `y.dtype`.

    Args:
      y: expert outputs in the layout that `dispatch` returned: `[C, H_out]`, or `[L, R*T, H_out]` in the padded layout.
      handle: `routed.handle` of that dispatch.
      weighted: multiply by router weights. Default: True, except in the ranked layout, where the caller has already
        reduced over its local experts and it must be False.
      wire: as in `dispatch`; the default sends partial sums in `y.dtype`.
      config: tuning; never changes the result.

    Returns:
      `[T, H_out]` of `y.dtype`. A token with no used slot, or whose rows were all dropped, is zero.

    Raises:
      ValueError, TypeError: `y` does not match the handle, or another argument is wrong.
    """
    return _gradients.combine(*_prepare_combine("combine", y, handle, weighted=weighted, wire=wire, config=config))


def _prepare_combine(
    caller: str, y: Any, handle: Any, *, weighted: Any = None, wire: Any = None, config: KernelConfig | None = None
) -> tuple[Any, ...]:
    """Checked arguments of a combine: static half, then the operands of the primitive."""
    config = _validate.config(config, caller)
    handle = _validate.handle(handle, caller)
    spec = handle.spec
    y = _validate.rows(y, spec, caller)
    if weighted is None:
        weighted = spec.layout != "ranked"
    if weighted not in (True, False):
        raise TypeError(f"{caller}: weighted={weighted!r}: must be True, False or None")
    if weighted and spec.layout == "ranked":
        raise ValueError(
            f"{caller}: weighted=True with layout='ranked': a row stands for several experts; apply "
            f"routed.topk_weights while "
            "reducing over the local experts and pass weighted=False"
        )
    config = _for_shape(config, spec, y.shape[-1])
    static = _gradients.Static(spec, _validate.wire(wire, caller), config, bool(weighted))
    operands = [y, handle.topk_idx, handle.positions, handle.recv_counts, handle.weights]
    return static, *_primitives.vary_over(operands, spec.axis_name)


def redispatch(x: jax.Array, handle: Handle, *, wire: Any = None, config: KernelConfig | None = None) -> jax.Array:
    """Sends a new payload along a known routing: no layout work.

    Args:
      x: `[T, H2]` float32, bfloat16 or float16; `H2` need not be the first payload's.
      handle: `routed.handle` of an earlier `dispatch`.
      wire, config: as in `dispatch`.

    Returns:
      rows in the layout of that dispatch, `[C, H2]` or `[L, R*T, H2]`.
    """
    caller = "redispatch"
    config = _validate.config(config, caller)
    handle = _validate.handle(handle, caller)
    spec = handle.spec
    values, scales = _validate.payload(x, caller)
    if scales is not None:
        raise TypeError(f"{caller}: x is a BlockScaled: pass the float array and wire=... instead")
    if values.shape[0] != spec.num_tokens:
        raise ValueError(f"{caller}: x has {values.shape[0]} tokens: the handle was made for {spec.num_tokens}")
    static = _gradients.Static(spec, _validate.wire(wire, caller), _for_shape(config, spec, values.shape[1]))
    operands = [values, handle.topk_idx, handle.positions, handle.recv_counts]
    return _gradients.redispatch(static, *_primitives.vary_over(operands, spec.axis_name))


def get_dispatch_layout(
    topk_idx: jax.Array, *, num_experts: int, num_ranks: int, ranks_per_node: int | None = None
) -> DispatchLayout:
    """Counts what a dispatch of `topk_idx` would send. Runs anywhere: nothing is communicated.

    Args:
      topk_idx: integer `[T, K]`.
      num_experts, num_ranks: `E` and `R`.
      ranks_per_node: also count tokens per node of this many ranks; must divide `num_ranks`.

    Returns:
      `DispatchLayout`: `num_tokens_per_rank [R]`, `num_tokens_per_node` or None, `num_tokens_per_expert [E]`,
      `is_token_in_rank bool [T, R]`.
    """
    caller = "get_dispatch_layout"
    topk_idx, _ = _validate.routing(topk_idx, None, None, caller)
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    num_ranks = _validate.integer(num_ranks, "num_ranks", caller, minimum=1)
    if ranks_per_node is not None:
        ranks_per_node = _validate.integer(ranks_per_node, "ranks_per_node", caller, minimum=1)
        if num_ranks % ranks_per_node:
            raise ValueError(f"{caller}: ranks_per_node={ranks_per_node}: must divide num_ranks={num_ranks}")
    return _layout.dispatch_layout(
        topk_idx, num_experts=num_experts, num_ranks=num_ranks, ranks_per_node=ranks_per_node
    )


def dispatch_start(*args: Any, **kwargs: Any) -> Flight:
    """First half of `dispatch`, same arguments: rows are on their way when it returns. Finish with `dispatch_done`.

    On TPU the halves are two kernels. XLA keeps them apart only around work that data dependencies put between them:
    tie it with `jax.lax.optimization_barrier`, as docs/tpu.md shows.
    """
    prepared = _prepare_dispatch("dispatch_start", *args, **kwargs)
    if _halves.available(prepared[0]):
        return Flight(_halves.start_dispatch(*prepared), "dispatch")
    return Flight(_routed(_gradients.dispatch(*prepared), prepared[3], prepared[0].spec), "dispatch")


def dispatch_done(flight: Flight) -> Routed:
    """Second half of `dispatch`: waits for the rows."""
    state = _land(flight, "dispatch")
    if not isinstance(state, _halves.DispatchInFlight):
        return state
    return _routed(_halves.finish_dispatch(state), state.topk_idx, state.static.spec)


def combine_start(*args: Any, **kwargs: Any) -> Flight:
    """First half of `combine`, same arguments. Finish with `combine_done`."""
    prepared = _prepare_combine("combine_start", *args, **kwargs)
    if _halves.available(prepared[0]):
        return Flight(_halves.start_combine(*prepared), "combine")
    return Flight(_gradients.combine(*prepared), "combine")


def combine_done(flight: Flight) -> jax.Array:
    """Second half of `combine`: waits for the partial sums and adds them up."""
    state = _land(flight, "combine")
    return _halves.finish_combine(state) if isinstance(state, _halves.CombineInFlight) else state


def _land(flight: Flight, kind: str) -> Any:
    if not isinstance(flight, Flight) or flight.kind != kind:
        got = f"a {flight.kind} flight" if isinstance(flight, Flight) else type(flight).__name__
        raise TypeError(f"{kind}_done: flight is {got}: pass what {kind}_start returned")
    if isinstance(flight.state, _halves.DispatchInFlight | _halves.CombineInFlight):
        return flight.state
    return jax.lax.optimization_barrier(flight.state)
