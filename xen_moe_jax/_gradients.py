"""`custom_vjp` on top of the primitives: the gradient of a dispatch is a combine, and that of a combine a
redispatch."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax import _layout, _primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire, parse_wire
from xen_moe_jax._spec import Spec


@dataclasses.dataclass(frozen=True)
class Static:
    """Static half of one call."""

    spec: Spec
    wire: Wire | None
    config: KernelConfig
    weighted: bool = False

    @property
    def gradient_wire(self) -> Wire | None:
        return parse_wire(self.config.gradient_wire, "config.gradient_wire")


class Dispatched(NamedTuple):
    """Results of the dispatch primitive, named."""

    rows: jax.Array
    row_scales: jax.Array | None
    positions: jax.Array
    recv_counts: jax.Array
    weights: jax.Array
    local_idx: jax.Array | None


def _bind_dispatch(static: Static, x, scales, topk_idx, topk_weights) -> Dispatched:
    operands = [x, topk_idx, topk_weights] if scales is None else [x, scales, topk_idx, topk_weights]
    out = list(_primitives.dispatch_p.bind(*operands, spec=static.spec, wire=static.wire, config=static.config))
    rows = out.pop(0)
    row_scales = out.pop(0) if scales is not None else None
    positions, recv_counts, weights = out[:3]
    local_idx = out[3] if static.spec.layout == "ranked" else None
    return Dispatched(rows, row_scales, positions, recv_counts, weights, local_idx)


def _bind_combine(static: Static, wire, weighted, y, topk_idx, positions, recv_counts, weights):
    (out,) = _primitives.combine_p.bind(
        y,
        topk_idx,
        positions,
        recv_counts,
        weights,
        spec=static.spec,
        weighted=weighted,
        wire=wire,
        config=static.config,
    )
    return out


def _bind_redispatch(static: Static, wire, x, topk_idx, positions, recv_counts):
    (rows,) = _primitives.redispatch_p.bind(
        x, topk_idx, positions, recv_counts, spec=static.spec, wire=wire, config=static.config
    )
    return rows


# -- dispatch ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(static: Static, x, scales, topk_idx, topk_weights) -> Dispatched:
    return _bind_dispatch(static, x, scales, topk_idx, topk_weights)


def _dispatch_forward(static, x, scales, topk_idx, topk_weights):
    out = _bind_dispatch(static, x, scales, topk_idx, topk_weights)
    return out, (topk_idx, out.positions, out.recv_counts, out.weights)


def _dispatch_backward(static: Static, residuals, cotangent: Dispatched):
    topk_idx, positions, recv_counts, weights = residuals
    if cotangent.row_scales is not None:
        raise TypeError(
            "dispatch of a BlockScaled x has no gradient: float8 and int8 values cannot carry one. Pass the float "
            "array and wire='float8_e4m3fn' (or 'int8') instead: that quantises on the wire and lets gradients "
            "straight through."
        )
    dx = _bind_combine(static, static.gradient_wire, False, cotangent.rows, topk_idx, positions, recv_counts, weights)
    return dx, None, None, _return_to_slots(static, cotangent.weights, positions, topk_idx)


def _return_to_slots(static: Static, row_values, positions, topk_idx) -> jax.Array:
    """float32 `[T, K]`: brings one number per (row, slot) back to the source's (token, slot)."""
    spec = static.spec
    if 0 in spec.row_dims:
        return (topk_idx * 0).astype(jnp.float32)
    keep = positions >= 0
    at = jnp.maximum(positions, 0)
    if spec.layout == "ranked":
        values = jnp.where(keep, row_values.at[at[..., 0]].get(mode="promise_in_bounds"), 0.0)
    else:
        values = jnp.where(keep, row_values.reshape(-1).at[at].get(mode="promise_in_bounds"), 0.0)
    (values,) = _primitives.all_to_all_p.bind(
        values,
        axis_name=spec.axis_name,
        axis_sizes=spec.axis_sizes,
        split_axis=0,
        concat_axis=0,
        tiled=True,
        axis_index_groups=None,
        config=static.config,
    )
    owner = _layout.owners(topk_idx, spec.local_experts)
    mine = owner == jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None, None]
    return jnp.sum(jnp.where(mine, values, 0.0), axis=0)


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


# -- combine ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(static: Static, y, topk_idx, positions, recv_counts, weights):
    return _bind_combine(static, static.wire, static.weighted, y, topk_idx, positions, recv_counts, weights)


def _combine_forward(static, y, topk_idx, positions, recv_counts, weights):
    out = _bind_combine(static, static.wire, static.weighted, y, topk_idx, positions, recv_counts, weights)
    # y is needed for the weights' gradient only; its shape and dtype are the cotangent's
    return out, (y if static.weighted else None, topk_idx, positions, recv_counts, weights)


def _combine_backward(static: Static, residuals, cotangent):
    y, topk_idx, positions, recv_counts, weights = residuals
    rows = _bind_redispatch(static, static.gradient_wire, cotangent, topk_idx, positions, recv_counts)
    used = _layout.used_rows(recv_counts, static.spec)
    if not static.weighted:
        return jnp.where(used[..., None], rows, jnp.zeros((), rows.dtype)), None, None, None, None
    product = weights[..., None] * rows.astype(jnp.float32)
    dy = jnp.where(used[..., None], product, 0.0).astype(y.dtype)
    per_row = jnp.sum(y.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    return dy, None, None, None, jnp.where(used, per_row, 0.0)


combine.defvjp(_combine_forward, _combine_backward)


# -- redispatch -------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def redispatch(static: Static, x, topk_idx, positions, recv_counts):
    return _bind_redispatch(static, static.wire, x, topk_idx, positions, recv_counts)


def _redispatch_forward(static, x, topk_idx, positions, recv_counts):
    return redispatch(static, x, topk_idx, positions, recv_counts), (topk_idx, positions, recv_counts)


def _redispatch_backward(static: Static, residuals, cotangent):
    topk_idx, positions, recv_counts = residuals
    weights = jnp.zeros(static.spec.weights_shape, jnp.float32)
    dx = _bind_combine(static, static.gradient_wire, False, cotangent, topk_idx, positions, recv_counts, weights)
    return dx, None, None, None


redispatch.defvjp(_redispatch_forward, _redispatch_backward)
