"""Dispatch, combine, redispatch: checked arguments into the primitives, their results into pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _layout, _prepare, _validate
from xen_moe_jax import _moe_primitives as primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._home_sums import combine_at_home_p
from xen_moe_jax._placement import Placement
from xen_moe_jax._spec import Spec
from xen_moe_jax._types import BlockScaled, DispatchLayout, Handle, Routed


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
    drop: str = "position",
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    placement: Placement | None = None,
    balance: str | None = None,
    slots_per_rank: int | None = None,
    config: KernelConfig | None = None,
) -> Routed:
    """Sends every token's hidden state to the ranks that hold its experts. Call it inside `jax.shard_map`.

    Rank `r` of `R` owns experts `[r*L, min(E, (r+1)*L))`, `L = ceil(E / R)`. A row crosses the link once per (token,
    destination rank), even if the token names several of the rank's experts.

    Args:
      x: `[T, H]` float32, bfloat16 or float16, this rank's tokens; or a `BlockScaled` from `quantize`, which travels
        as it is and arrives as a `BlockScaled`. `T` is the same on every rank. Tokens may have several dimensions,
        `x [B, S, H]` with `topk_idx`, `topk_weights` `[B, S, K]`: `T` is then their product, `routed` is that of the
        tokens in one row, and `combine` returns `[B, S, H_out]`.
      topk_idx: integer `[T, K]`, global expert of each slot; an entry outside `[0, num_experts)` is an unused slot. Any
        integer dtype that can name every expert. Without `jax_enable_x64`, JAX cuts 64-bit integers of NumPy to 32 bits
        where they become arguments of `jax.jit`: 2**32 would name expert 0. So cast or mask them before.
      topk_weights: float `[T, K]`, router weights; None means 1.
      num_experts: global number of experts `E`; need not divide by `R`.
      axis_name: mesh axis, or `(slow, fast)` pair of axes.
      layout: "grouped": `routed.x [C, H]` by local expert, then (source rank, token, slot), ready for
        `jax.lax.ragged_dot` with `routed.group_sizes`. "ranked": one row per (token, rank), `routed.topk_idx` holds
        local expert ids. "padded": `routed.x [L, R*T, H]`, each expert's rows at the front.
      capacity: rows of `routed.x` (grouped and ranked). None is the worst case, which cannot overflow while no token
        names one expert twice. Rows for which a rank has no room are dropped, as `drop` says, and counted in
        `routed.num_dropped` of that rank.
      alignment: grouped: each group's rows are rounded up to a multiple of this; the padding rows are zero.
      drop: which rows are dropped where a rank has more than `capacity`; the same on every backend.
        "position": those at positions `>= capacity` of `routed.x`, so the last local experts'.
        "source": the last in the order (source rank, expert, token, slot), so the last ranks' (MaxText's all-to-all).
        "weight": those of the smallest router weights, ties in the order (source rank, token, slot); a NaN is the
        smallest. Ranked: the weight of a row is the sum over its slots.
        By "source" and "weight" a rank keeps the rows before the first one that does not fit, alignment included. This
        is decided before anything is sent, with one more all-gather (of counts, or of router weights), and dropped
        slots are -1 in `routed.handle.topk_idx`. No gradient passes through the choice. In the layouts "ranked" and
        "padded", "source" is "position".
      wire: None sends the input dtype; "float8_e4m3fn" or "int8" (with ":ue8m0" for power-of-two scales), "mxfp4" (not
        on TPUs) or a `Wire` quantizes on the wire and dequantizes on arrival. Gradients go straight through.
      gradient_wire: wire format of gradients, named as in `wire`; None is their own dtype.
      active: bool `[R]`, the same on every rank: True for ranks that take part. It is an array like any other, so that
        it changes from call to call without a new program. Nothing goes to an inactive rank and nothing comes from it.
        The results of its tokens are zero; rows that other ranks would have sent to it are left out and counted in
        `routed.num_dropped`. On GPUs no rank waits for an inactive rank, whether or not the inactive rank runs the
        program; docs/user/failures.md says how it comes back. None means all ranks.
      placement: from `xm.balance`, the same on every rank: experts are where it says, and some on several ranks. `L`
        becomes `S`, and what `routed` says of a local expert holds for a slot; `num_experts` and `topk_idx` are of
        experts as before. Data, as `active` is: another placement is no new program. None: experts are as said above.
      balance: "exact": a placement is computed from this batch's counts, which one more all-gather brings to all ranks.
        No rank gets more than `T * K` rows, and none is dropped, whatever the routing: `C = T * K`, and room for the
        padding of `alignment`. `routed.handle.placement.move(weights, None, routed.handle.placement)` brings weights
        from the experts' homes to the slots; it does not wait for the rows. Grouped layout only. With `active`, these
        ranks share the rows, and experts at home on an inactive rank get none; give `active` to `move` too.
      slots_per_rank: `S` of `balance="exact"`, `L + 1` or more; None is `L + ceil(L / 4)`. A rank fetches at most
        `S - L` experts, but where many small experts have to move: then up to `S`.
      config: tuning; never changes the result.

    Returns:
      `Routed`. Rows past the last group are unspecified and are never read by `combine` or by a gradient.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    return dispatch_for("dispatch", **locals())  # the arguments, by their names


@jax.named_scope("xen_moe_dispatch")
def dispatch_for(caller: str, x: Any, topk_idx: Any, topk_weights: Any, **options: Any) -> Routed:
    """`dispatch` with every one of its `options`; messages name `caller`."""
    prepared = _prepare.dispatch(caller, x, topk_idx, topk_weights, **options)
    results = primitives.dispatch_p.bind(*prepared.operands, **prepared.static.params)
    return routed(primitives.Dispatched(*results), prepared.static.spec, prepared.known)


def routed(out: primitives.Dispatched, spec: Spec, known: _prepare.Known) -> Routed:
    """The public result of a dispatch; its arrays carry `checkpoint_name`s."""
    out = out.named()
    ranked = spec.layout == "ranked"
    if ranked:
        counts = _layout.ranked_counts(out.recv_counts, out.local_idx, spec)
    else:
        counts = _layout.group_counts(out.recv_counts, spec)
    return Routed(
        x=out.rows if out.rows.dtype.itemsize > 1 else BlockScaled(out.rows, out.row_scales),
        group_sizes=counts.group_sizes,
        num_tokens_per_expert=counts.num_tokens_per_expert,
        num_dropped=counts.num_dropped if known.withheld is None else counts.num_dropped + known.withheld,
        weights=None if ranked else out.weights,
        topk_idx=out.local_idx,
        topk_weights=out.weights if ranked else None,
        handle=Handle(
            out.topk_idx,
            out.positions,
            out.recv_counts,
            out.weights,
            spec,
            known.active,
            known.placement,
            known.topk_weights,
        ),
    )


@jax.named_scope("xen_moe_combine")
def combine(
    y: jax.Array,
    handle: Handle,
    *,
    weighted: bool | None = None,
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    placement: Placement | None = None,
    config: KernelConfig | None = None,
) -> jax.Array:
    """Brings expert outputs back to their tokens and adds them up, in an order that every backend shares.

    On each expert rank a token's rows are multiplied by their router weights and added in float32 in slot order, then
    rounded to the wire dtype; on the token's rank these partial sums are added in float32 in ascending rank order and
    rounded to `y.dtype`. After a dispatch with a placement, "expert rank" in this sentence is the expert's home: the
    result has the bits of the result without a placement, whatever the placement is. Every row then travels by itself.

    Args:
      y: expert outputs in the layout that `dispatch` returned: `[C, H_out]`, or `[L, R*T, H_out]` in the padded layout.
      handle: `routed.handle` of that dispatch.
      weighted: multiply by router weights. Default: True, except in the ranked layout, where the caller has already
        reduced over its local experts and it must be False.
      wire: as in `dispatch`; the default sends partial sums in `y.dtype`.
      gradient_wire: as in `dispatch`.
      active: as in `dispatch`; the default is the dispatch's own `active`.
      placement: as in `dispatch`; the default is the dispatch's own. In the ranked layout, and with a quantized `wire`,
        rows are added on the ranks that hold them all the same, and the last bits depend on the placement. So they do
        where `placement.sums` is "rank".
      config: tuning; never changes the result, but for the order of sums that `ranks_per_node` on a single axis says.

    Returns:
      `[T, H_out]` of `y.dtype`, or `[..., H_out]` after a dispatch of `x [..., H]`. A token with no used slot, or whose
      rows were all dropped, is zero.

    Raises:
      ValueError, TypeError: `y` does not match the handle, or another argument is wrong.
    """
    prepared = _prepare.combine("combine", **locals())  # the arguments, by their names
    return combined_whole(prepared)


def combined_whole(prepared: _prepare.PreparedCombine) -> jax.Array:
    """Runs a combine as one operation; returns its public result."""
    if prepared.at_home is None:
        (out,) = primitives.combine_p.bind(*prepared.operands, **prepared.params)
    else:
        (out,) = combine_at_home_p.bind(*prepared.operands, *prepared.at_home, **prepared.params)
    return combined(out, prepared.static.spec)


def combined(out: jax.Array, spec: Spec) -> jax.Array:
    """The public result of a combine: `[T, H]` in the dimensions of the tokens."""
    shape = spec.tokens_shape(out.shape[-1])
    return checkpoint_name(out if out.shape == shape else out.reshape(shape), primitives.OUT)


@jax.named_scope("xen_moe_redispatch")
def redispatch(
    x: jax.Array,
    handle: Handle,
    *,
    wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    config: KernelConfig | None = None,
) -> jax.Array:
    """Sends a new payload along a known routing: no layout work.

    Args:
      x: `[T, H2]` float32, bfloat16 or float16, or in the dimensions that the dispatch's tokens had; `H2` need not be
        the first payload's.
      handle: `routed.handle` of an earlier `dispatch`.
      wire, gradient_wire, config: as in `dispatch`.
      active: as in `dispatch`; the default is the dispatch's own `active`. Rows of an inactive rank are zero.

    Returns:
      rows in the layout of that dispatch, `[C, H2]` or `[L, R*T, H2]`, of the dtype of `x`.

    Raises:
      ValueError, TypeError: `x` does not match the handle, or another argument is wrong.
    """
    prepared = _prepare.redispatch("redispatch", **locals())  # the arguments, by their names
    (rows,) = primitives.redispatch_p.bind(*prepared.operands, **prepared.static.params)
    return checkpoint_name(rows, primitives.ROWS)


def get_dispatch_layout(
    topk_idx: jax.Array, *, num_experts: int, num_ranks: int, ranks_per_node: int | None = None
) -> DispatchLayout:
    """Counts the tokens that a dispatch of `topk_idx` would send. Runs anywhere: nothing is communicated.

    Args:
      topk_idx: integer `[T, K]` or `[..., K]`.
      num_experts, num_ranks: `E` and `R`.
      ranks_per_node: also count tokens per node of this many ranks; must divide `num_ranks`.

    Returns:
      `DispatchLayout`: `num_tokens_per_rank [R]`, `num_tokens_per_node` or None, `num_tokens_per_expert [E]`,
      `is_token_in_rank bool [T, R]`, or `[..., R]`.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    caller = "get_dispatch_layout"
    idx, _ = _validate.routing(topk_idx, None, None, caller)
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    _validate.names_every_expert(idx, num_experts, caller)
    num_ranks = _validate.integer(num_ranks, "num_ranks", caller, minimum=1)
    if ranks_per_node is not None:
        ranks_per_node = _validate.ranks_per_node(ranks_per_node, num_ranks, caller)
    found = _layout.dispatch_layout(idx, num_experts=num_experts, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    in_rank = found.is_token_in_rank.reshape(*jnp.shape(topk_idx)[:-1], num_ranks)
    return dataclasses.replace(found, is_token_in_rank=in_rank)
