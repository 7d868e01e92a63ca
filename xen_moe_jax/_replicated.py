"""Tokens that every rank of the expert axis has (decode): nothing is dispatched.

Each rank takes the rows of its own experts out of the tokens, and one sum over the ranks gives every token its output.
That is one collective of `[T, H]` in place of a dispatch, a combine and a gather.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _layout, _validate
from xen_moe_jax._mesh import vary_over
from xen_moe_jax._moe_primitives import HANDLE, OUT, ROWS
from xen_moe_jax._numbers import is_one_of
from xen_moe_jax._spec import Spec, worst_case_capacity
from xen_moe_jax._types import BlockScaled, ReplicatedHandle, Routed

LAYOUTS = ("grouped", "padded")


def dispatch_replicated(
    x: jax.Array | BlockScaled,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    num_experts: int,
    axis_name: str | tuple[str, str],
    layout: str = "grouped",
    alignment: int = 1,
) -> Routed:
    """Takes the rows of this rank's experts out of tokens that every rank has. Call it inside `jax.shard_map`.

    It is the counterpart of `dispatch` for tokens that are replicated over `axis_name`, as in decode. Nothing is sent.
    Rank `r` of `R` owns experts `[r*L, min(E, (r+1)*L))`, `L = ceil(E / R)`, as in `dispatch`.

    Args:
      x, topk_idx, topk_weights: as in `dispatch`, with the same values on every rank of `axis_name` (`in_specs=P()`).
      num_experts: global number of experts `E`.
      axis_name: mesh axis, or `(slow, fast)` pair of axes, that the experts are split over.
      layout: "grouped": `routed.x [C, H]` by local expert, then (token, slot), with room for
        `C = T * min(K, L)` rows and the padding of `alignment`. "padded": `routed.x [L, T, H]`, each expert's rows at
        the front.
      alignment: grouped: each group's rows are rounded up to a multiple of this; the padding rows are zero.

    Returns:
      `Routed`, whose fields have the shapes that they have after a `dispatch` on one rank. `num_dropped` is zero unless
      tokens name one expert twice and the rows exceed `C`, or `T` of one expert in the padded layout.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    return dispatch_replicated_for("dispatch_replicated", **locals())  # the arguments, by their names


@jax.named_scope("xen_moe_dispatch_replicated")
def dispatch_replicated_for(
    caller: str,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    *,
    num_experts: Any,
    axis_name: Any,
    layout: Any,
    alignment: Any,
) -> Routed:
    """`dispatch_replicated`; messages name `caller`."""
    values, scales, token_dims = _validate.payload(x, caller)
    topk_idx, topk_weights = _validate.routing(topk_idx, topk_weights, token_dims, caller)
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    _validate.names_every_expert(topk_idx, num_experts, caller)
    names, sizes = _validate.axes(axis_name, caller)
    num_local = -(-num_experts // math.prod(sizes))
    spec = _spec(caller, names, num_local, token_dims, topk_idx.shape[1], layout, alignment)
    weights = jnp.ones(topk_idx.shape, jnp.float32) if topk_weights is None else topk_weights.astype(jnp.float32)
    # The axis varies from here on: a cotangent is summed over the ranks once for each token, not once for each row.
    values, weights = vary_over([values, weights], names)

    first = lax.axis_index(names) * num_local
    idx = _layout.sanitize(topk_idx, num_experts)
    local = jnp.where((idx >= first) & (idx < first + num_local), idx - first, -1)
    order, counts = _layout.order_within_bins(local.reshape(-1), num_local)
    rows = _layout.recv_layout(
        local[None], order.reshape(1, *local.shape), counts[None], jnp.zeros((), jnp.int32), spec
    )
    positions = rows.positions[0]
    num_rows = math.prod(spec.row_dims)
    place = jnp.where(positions >= 0, positions, num_rows)
    token = lax.broadcasted_iota(jnp.int32, place.shape, 0)
    token_of_row = jnp.full(num_rows, spec.num_tokens, jnp.int32).at[place].set(token, mode="drop")

    def taken(array: jax.Array) -> jax.Array:
        # Rows past the last group are no token's. Their cotangents are unspecified, and no token gets them.
        found = array.at[token_of_row].get(mode="fill", fill_value=0)
        return checkpoint_name(found.reshape(*spec.row_dims, array.shape[-1]), ROWS)

    groups = _layout.group_counts(rows.recv_counts, spec)
    row_weights = jnp.zeros(num_rows, jnp.float32).at[place].set(weights, mode="drop").reshape(spec.row_dims)
    return Routed(
        x=taken(values) if scales is None else BlockScaled(taken(values), taken(vary_over([scales], names)[0])),
        group_sizes=groups.group_sizes,
        num_tokens_per_expert=groups.num_tokens_per_expert,
        num_dropped=groups.num_dropped,
        weights=row_weights,
        topk_idx=None,
        topk_weights=None,
        handle=ReplicatedHandle(checkpoint_name(positions, HANDLE), weights, spec),
    )


@jax.named_scope("xen_moe_combine_replicated")
def combine_replicated(y: jax.Array, handle: ReplicatedHandle, *, weighted: bool | None = None) -> jax.Array:
    """Adds up the outputs of all experts for tokens that every rank has; the result is the same on every rank.

    On each rank a token's rows are multiplied by their router weights and added in float32; one `jax.lax.psum` adds
    these sums over the ranks in float32, in XLA's order, and the result is rounded to `y.dtype`.

    Args:
      y: expert outputs in the layout that `dispatch_replicated` returned: `[C, H_out]` or `[L, T, H_out]`.
      handle: `routed.handle` of that call.
      weighted: multiply by router weights; None means True.

    Returns:
      `[T, H_out]` of `y.dtype` (`[..., H_out]` for `x [..., H]`), not varying over the expert axis (`out_specs=P()`). A
      token with no used slot is zero.

    Raises:
      ValueError, TypeError: `y` does not match the handle, or another argument is wrong.
    """
    caller = "combine_replicated"
    if not isinstance(handle, ReplicatedHandle):
        raise TypeError(
            f"{caller}: handle is a {type(handle).__name__}: pass the `handle` field that dispatch_replicated returned"
        )
    spec = handle.spec
    names, _ = _validate.axes(spec.axis_name, f"{caller} (axis_name of the handle)")
    y = _validate.rows(y, spec, caller)
    chosen = _validate.boolean(weighted, "weighted", caller, optional=True)
    out = lax.psum(own_sums(y, handle, weighted=chosen is not False), names).astype(y.dtype)
    return checkpoint_name(out.reshape(spec.tokens_shape(out.shape[-1])), OUT)


def own_sums(y: jax.Array, handle: ReplicatedHandle, *, weighted: bool) -> jax.Array:
    """float32 `[T, H_out]`, this rank's part of the sums of `combine_replicated`."""
    num_rows = math.prod(handle.spec.row_dims)
    place = jnp.where(handle.positions >= 0, handle.positions, num_rows)
    # Not even a weight of zero may meet a row past the last group, nor the weight of an unused slot a row of zeros.
    slots = y.reshape(num_rows, y.shape[-1]).at[place].get(mode="fill", fill_value=0).astype(jnp.float32)
    if weighted:
        slots = slots * jnp.where(handle.positions >= 0, handle.weights, 0.0)[..., None]
    return jnp.sum(slots, axis=1)


def _spec(
    caller: str,
    names: tuple[str, ...],
    num_local: int,
    token_dims: tuple[int, ...],
    top_k: int,
    layout: Any,
    alignment: Any,
) -> Spec:
    """Static description of this rank's rows, as of a dispatch on one rank."""
    if not is_one_of(layout, LAYOUTS):
        raise ValueError(f"{caller}: layout={layout!r}: must be one of {LAYOUTS}")
    alignment = _validate.integer(alignment, "alignment", caller, minimum=1)
    if alignment > 1 and layout != "grouped":
        raise ValueError(f"{caller}: alignment={alignment} with layout={layout!r}: only 'grouped' has groups to align")
    num_tokens = math.prod(token_dims)
    capacity = worst_case_capacity(
        layout=layout, num_ranks=1, num_tokens=num_tokens, top_k=top_k, num_experts=num_local, alignment=alignment
    )
    _validate.row_limit(capacity, alignment, caller)
    token_dims = token_dims if len(token_dims) > 1 else ()
    return Spec(names, (1,) * len(names), num_local, num_tokens, top_k, layout, capacity, alignment, token_dims)
