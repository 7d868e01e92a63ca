"""Dispatch, combine and redispatch as primitives, with their derivatives.

Both directions are linear in the rows that they carry. The tangent of a dispatch is a redispatch of the tangent, the
transpose of a redispatch is an unweighted combine, and that of a combine a redispatch; the rest is JAX's. A quantized
wire is straight-through: tangents and cotangents travel by `gradient_wire`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from xen_moe_jax import _active, _layout, _mesh, _nodes, _shapes
from xen_moe_jax._collective_primitives import all_to_all_p
from xen_moe_jax._primitive import declare, declare_composite
from xen_moe_jax._spec import Spec

ROWS, HANDLE, OUT = "xen_moe_rows", "xen_moe_handle", "xen_moe_out"
"""`checkpoint_name`s: rows, routing, and combined tokens."""


class Dispatched(NamedTuple):
    """Results of a dispatch. `row_scales` has no columns unless `x` came quantized; `local_idx`: ranked layout only."""

    rows: Any
    row_scales: Any
    positions: Any
    recv_counts: Any
    weights: Any
    topk_idx: Any
    local_idx: Any = None

    def named(self) -> Dispatched:
        """Returns these results under `checkpoint_name`s, so that a remat policy can keep them."""
        rows, row_scales = (checkpoint_name(a, ROWS) for a in self[:2])
        return Dispatched(rows, row_scales, *(a if a is None else checkpoint_name(a, HANDLE) for a in self[2:]))


# -- implementations ---------------------------------------------------------------------------------------------------


# Operands: docs/design/internals.md. `active` comes last in a dispatch, and after the arrays of the handle elsewhere.
dispatch_p = declare("dispatch", _shapes.dispatch, mask=_active.mask_dispatch)
combine_p = declare("combine", _shapes.combine, mask=_active.mask_handle)
redispatch_p = declare("redispatch", _shapes.redispatch, mask=_active.mask_handle, finish=_active.zero_left_out)


# -- derivatives of a dispatch -----------------------------------------------------------------------------------------


def zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def are_zero(*tangents: Any) -> bool:
    return all(type(t) is ad.Zero for t in tangents)


def rows_tangent(rows: Any, x_dot: Any, scales_dot: Any, handle: Any, params: Any) -> Any:
    """Tangent of the rows that a dispatch of `x` gave."""
    if are_zero(x_dot, scales_dot):
        return zero(rows)
    check_carries_gradient(rows)
    (rows_dot,) = redispatch_p.bind(x_dot, *handle, **_for_gradients(params))
    return rows_dot


def check_carries_gradient(x: Any) -> None:
    """Raises TypeError for values of one byte."""
    if x.dtype.itemsize == 1:
        raise TypeError(
            "dispatch of a BlockScaled x has no gradient: float8 and int8 values cannot carry one. Pass the float "
            "array and wire='float8_e4m3fn' (or 'int8') instead: that quantizes on the wire and lets gradients "
            "straight through."
        )


def _for_gradients(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "wire": params["gradient_wire"]}


def weights_tangent(known: Any, topk_weights_dot: Any, active: Any, params: Any) -> Any:
    """Tangent of the rows' router weights: one number per (token, slot), sent to where its row went. `known`: results
    of the dispatch from the positions on."""
    positions, recv_counts, weights, topk_idx, *local_idx = known
    if are_zero(topk_weights_dot):
        return zero(weights)
    spec: Spec = params["spec"]
    if 0 in spec.row_dims:
        return jnp.zeros_like(weights)
    handle = topk_idx, positions, recv_counts, active, *local_idx
    return weights_to_rows_p.bind(topk_weights_dot, *handle, spec=spec, config=params["config"])[0]


def _weights_to_rows(values: Any, *handle: Any, **params: Any) -> Any:
    """Sends numbers by one all-to-all of a number for every (rank, token, slot).

    With inactive ranks, and between nodes, where each number would cross once for every rank, rows carry them instead.
    """
    topk_idx, positions, recv_counts, active, *local_idx = handle
    spec: Spec = params["spec"]
    if _active.given(active) or _nodes.several(spec.num_ranks, params["config"]):
        return _weights_by_rows(values, (topk_idx, positions, recv_counts, active), local_idx, params)
    owner = _layout.owners(topk_idx, spec.local_experts)
    ranks = jnp.arange(spec.num_ranks, dtype=jnp.int32)
    came = jnp.where(owner[None] == ranks[:, None, None], values[None], 0.0)
    if spec.num_ranks > 1:
        (came,) = all_to_all_p.bind(
            came,
            axis_name=spec.axis_name,
            axis_sizes=spec.axis_sizes,
            split_axis=0,
            concat_axis=0,
            tiled=True,
            axis_index_groups=None,
            config=params["config"],
        )
    rows = math.prod(spec.row_dims)
    at = jnp.where(positions >= 0, positions, rows)
    out = jnp.zeros(spec.weights_shape, values.dtype)
    if spec.layout == "ranked":
        return out.at[at[..., 0]].add(came, mode="drop")
    return out.reshape(rows).at[at].add(came, mode="drop").reshape(out.shape)


def _weights_by_rows(values: Any, handle: Any, local_idx: Any, params: Any) -> Any:
    """`_weights_to_rows` by a redispatch: every row carries the numbers of all slots of its token. An all-to-all would
    wait for inactive ranks."""
    spec: Spec = params["spec"]
    (rows,) = redispatch_p.bind(values, *handle, **{**params, "wire": None, "gradient_wire": None})
    if local_idx:
        return jnp.where(local_idx[0] >= 0, rows, 0.0)
    positions = handle[1]
    flat = rows.reshape(-1, spec.top_k)
    at = jnp.where(positions >= 0, positions, flat.shape[0])
    slots = jnp.broadcast_to(jnp.arange(spec.top_k, dtype=jnp.int32), positions.shape)
    slot = jnp.full(flat.shape[0], -1, jnp.int32).at[at].set(slots, mode="drop", unique_indices=True)
    chosen = jnp.take_along_axis(flat, jnp.maximum(slot, 0)[:, None], axis=1)[:, 0]
    return jnp.where(slot >= 0, chosen, 0.0).reshape(spec.row_dims)


def _weights_from_rows(values: Any, *handle: Any, **params: Any) -> Any:
    spec: Spec = params["spec"]
    slots = jax.ShapeDtypeStruct((spec.num_tokens, spec.top_k), values.dtype)
    return jax.linear_transpose(lambda given: _weights_to_rows(given, *handle, **params), slots)(values)[0]


# Sends one number for each slot of a token (a router weight, for example) to the token's rows and back, without the
# rows. Operands are the numbers, the arrays of the handle, `active` among them, and `local_idx` in the ranked layout.
weights_to_rows_p = declare(
    "weights_to_rows",
    lambda values, *_, spec, **__: [(spec.weights_shape, values.dtype)],
    mask=_active.mask_handle,
    otherwise=_weights_to_rows,
)
weights_from_rows_p = declare(
    "weights_from_rows",
    lambda values, *_, spec, **__: [((spec.num_tokens, spec.top_k), values.dtype)],
    mask=_active.mask_handle,
    otherwise=_weights_from_rows,
)


def transposed_by(primitive: Any, transpose: Any) -> None:
    """Declares the derivatives of `primitive`: it is linear in the first operand, and `transpose` is its transpose."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        if are_zero(tangents[0]):
            return out, [zero(out[0])]
        return out, primitive.bind(tangents[0], *primals[1:], **params)

    def transposed(cotangents: Any, values: Any, *handle: Any, **params: Any) -> Any:
        (cotangent,) = cotangents
        if are_zero(cotangent):
            return [ad.Zero(values.aval), *[None] * len(handle)]
        return [*transpose.bind(cotangent, *handle, **params), *[None] * len(handle)]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transposed


transposed_by(weights_to_rows_p, weights_from_rows_p)
transposed_by(weights_from_rows_p, weights_to_rows_p)


def _dispatch_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    active = primals[4]
    x_dot, scales_dot, _, weights_dot, _ = tangents
    # the arrays of the tangent are named, so that a policy that saves the names does not dispatch again
    out = Dispatched(*dispatch_p.bind(*primals, **params)).named()
    handle = out.topk_idx, out.positions, out.recv_counts, active
    rows_dot = rows_tangent(out.rows, x_dot, scales_dot, handle, params)
    results = [a for a in out if a is not None]
    dots = [zero(a) for a in results]
    dots[0] = rows_dot
    dots[4] = weights_tangent(results[2:], weights_dot, active, params)
    return results, dots


def _dispatch_transpose(
    cotangents: Any, x: Any, scales: Any, topk_idx: Any, topk_weights: Any, active: Any, **params: Any
) -> list[Any]:
    """Transposes a dispatch that is linear by itself (`jax.linear_transpose`).

    Its routing is recomputed by a dispatch in which zeros stand for the operands that are not known.
    """
    rows_ct, _, _, _, weights_ct, *_ = cotangents
    wanted = ad.is_undefined_primal(x), ad.is_undefined_primal(topk_weights)
    given = x, scales, topk_idx, topk_weights
    values = [jnp.zeros(v.aval.shape, v.aval.dtype) if ad.is_undefined_primal(v) else v for v in given]
    if not are_zero(rows_ct, weights_ct):
        values = _mesh.vary_alike(*values)
        out = Dispatched(*dispatch_p.bind(*values, active, **params))
        handle = out.topk_idx, out.positions, out.recv_counts, active
    x_ct, topk_weights_ct = (zero_if(w, v) for w, v in zip(wanted, (x, topk_weights), strict=True))
    if wanted[0] and not are_zero(rows_ct):
        check_carries_gradient(values[0])
        (x_ct,) = combine_p.bind(
            rows_ct, *handle, jnp.zeros_like(out.weights), weighted=False, **_for_gradients(params)
        )
    if wanted[1] and not are_zero(weights_ct):
        local = () if out.local_idx is None else (out.local_idx,)
        spec, config = params["spec"], params["config"]
        (topk_weights_ct,) = weights_from_rows_p.bind(weights_ct, *handle, *local, spec=spec, config=config)
    return [x_ct, None, None, topk_weights_ct, None]


ad.primitive_jvps[dispatch_p] = _dispatch_jvp
ad.primitive_transposes[dispatch_p] = _dispatch_transpose


def _redispatch_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (rows,) = redispatch_p.bind(*primals, **params)
    return [rows], [rows_tangent(rows, tangents[0], tangents[0], primals[1:], params)]


def _redispatch_transpose(cotangents: Any, x: Any, *handle: Any, **params: Any):
    (cotangent,) = cotangents
    if are_zero(cotangent):
        return [ad.Zero(x.aval), *[None] * len(handle)]
    weights = jnp.zeros(params["spec"].weights_shape, jnp.float32)
    (x_ct,) = combine_p.bind(cotangent, *handle, weights, weighted=False, **_for_gradients(params))
    return [x_ct, *[None] * len(handle)]


ad.primitive_jvps[redispatch_p] = _redispatch_jvp
ad.primitive_transposes[redispatch_p] = _redispatch_transpose


# -- derivatives of a combine ------------------------------------------------------------------------------------------


def _two_combines(y_dot: Any, weights_dot: Any, y: Any, weights: Any, *handle: Any, **params: Any) -> Any:
    (by_rows,) = combine_p.bind(y_dot, *handle, weights, **params)
    (by_weights,) = combine_p.bind(y, *handle, weights_dot, **params)
    return by_rows + by_weights


# The tangent in both rows and weights, as one operation: its transpose then moves the cotangent once, not twice.
combine_tangent_p = declare_composite("combine_tangent", _shapes.combine, _two_combines)


def combine_tangent(y_dot: Any, weights_dot: Any, y: Any, weights: Any, handle: Any, params: Any) -> Any:
    """`combine(y_dot, weights) + combine(y, weights_dot)`; None where it is zero."""
    if 0 in y.shape:  # and `y` is no residual: XLA's compiler crashes on one without elements that leaves a shard_map
        return None
    params = _for_gradients(params)
    if not params["weighted"] or are_zero(weights_dot):
        if are_zero(y_dot):
            return None
        return combine_p.bind(y_dot, *handle, weights, **params)[0]
    if are_zero(y_dot):
        return combine_p.bind(y, *handle, weights_dot, **params)[0]
    return combine_tangent_p.bind(y_dot, weights_dot, y, weights, *handle, **params)[0]


def _combine_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y, *handle, weights = primals
    out = combine_p.bind(*primals, **params)
    out_dot = combine_tangent(tangents[0], tangents[-1], y, weights, handle, params)
    return out, [zero(out[0]) if out_dot is None else out_dot]


def combine_cotangents(
    cotangent: Any, y: Any, weights: Any, wanted: tuple[bool, bool], handle: Any, params: Any
) -> list[Any]:
    """Cotangents of the rows and of the weights; `y` and `weights` are values, or avals where the value is not
    known."""
    moved = {name: value for name, value in _for_gradients(params).items() if name != "weighted"}
    (rows,) = redispatch_p.bind(cotangent, *handle, **moved)
    return row_cotangents(rows, y, weights, wanted, handle, params)


def row_cotangents(
    rows: Any, y: Any, weights: Any, wanted: tuple[bool, bool], handle: Any, params: dict[str, Any]
) -> list[Any]:
    """`combine_cotangents` from the cotangent's rows, where the experts' rows are."""
    _, positions, recv_counts, active = handle
    used = _layout.used_rows(recv_counts, params["spec"])
    if _active.given(active):  # no zero may meet the weights and outputs of an inactive rank's rows, which may be NaN
        used &= ~_active.left_out(positions, active, params["spec"])
    y_ct = weights_ct = None
    if wanted[0] and params["weighted"]:
        product = weights[..., None] * rows.astype(jnp.float32)
        y_ct = jnp.where(used[..., None], product, 0.0).astype(y.dtype)
    elif wanted[0]:
        y_ct = jnp.where(used[..., None], rows, jnp.zeros((), rows.dtype))
    if wanted[1]:
        per_row = jnp.sum(y.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
        weights_ct = jnp.where(used, per_row, 0.0)
    return [y_ct, weights_ct]


def _known_or_aval(value: Any) -> Any:
    return value.aval if ad.is_undefined_primal(value) else value


def zero_if(wanted: bool, value: Any) -> Any:
    return ad.Zero(value.aval) if wanted else None


def combine_transpose(cotangents: Any, y: Any, *rest: Any, **params: Any) -> list[Any]:
    *handle, weights = rest
    wanted = ad.is_undefined_primal(y), ad.is_undefined_primal(weights)
    if are_zero(*cotangents):
        return [zero_if(wanted[0], y), *[None] * len(handle), zero_if(wanted[1], weights)]
    y_ct, weights_ct = combine_cotangents(
        cotangents[0], _known_or_aval(y), _known_or_aval(weights), wanted, handle, params
    )
    return [y_ct, *[None] * len(handle), weights_ct]


def _combine_tangent_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y_dot, weights_dot, y, weights, *handle = primals
    out = combine_tangent_p.bind(*primals, **params)
    parts = (
        combine_tangent(tangents[0], tangents[1], y, weights, handle, params),
        combine_tangent(tangents[2], tangents[3], y_dot, weights_dot, handle, params),
    )
    moving = [part for part in parts if part is not None]
    return out, [sum(moving[1:], moving[0]) if moving else zero(out[0])]


def _combine_tangent_transpose(
    cotangents: Any, y_dot: Any, weights_dot: Any, y: Any, weights: Any, *handle: Any, **params: Any
) -> list[Any]:
    wanted = ad.is_undefined_primal(y_dot), ad.is_undefined_primal(weights_dot)
    rest = [None] * (2 + len(handle))
    if are_zero(*cotangents):
        return [zero_if(wanted[0], y_dot), zero_if(wanted[1], weights_dot), *rest]
    return [*combine_cotangents(cotangents[0], y, weights, wanted, handle, params), *rest]


ad.primitive_jvps[combine_p] = _combine_jvp
ad.primitive_transposes[combine_p] = combine_transpose
ad.primitive_jvps[combine_tangent_p] = _combine_tangent_jvp
ad.primitive_transposes[combine_tangent_p] = _combine_tangent_transpose
