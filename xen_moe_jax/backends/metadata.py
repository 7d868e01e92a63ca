"""Routing metadata in plain JAX: every source's routing on every rank, and the places of rows that follow from it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout, _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._spec import Spec


def gather_metadata(
    topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec
) -> tuple[_layout.SourceRouting, jax.Array, jax.Array]:
    """Every source's routing, weights `[R, T, K]` and pairs `[R, R]` on every rank: one all-gather of int32 words."""
    own = _layout.source_routing(topk_idx, spec)
    own = own._replace(topk_idx=_ranks.absent_is_unused(own.topk_idx, spec.axis_name))
    words = [*own, lax.bitcast_convert_type(topk_weights.astype(jnp.float32), jnp.int32)]
    shapes = [w.shape for w in words]
    packed = jnp.concatenate([w.reshape(-1) for w in words])
    gathered = _ranks.all_gather(packed, spec.axis_name)
    splits = [sum(w.size for w in words[:i]) for i in range(1, len(words))]
    parts = [
        part.reshape(spec.num_ranks, *shape)
        for part, shape in zip(jnp.split(gathered, splits, axis=1), shapes, strict=True)
    ]
    weights = lax.bitcast_convert_type(parts[4], jnp.float32)
    routed = _ranks.absent_is_unused(parts[0], spec.axis_name)
    return _layout.SourceRouting(routed, *parts[1:4]), weights, parts[3]


def place_slots(values: jax.Array, positions: jax.Array, spec: Spec, *, fill: Any, flat: bool = False) -> jax.Array:
    """Scatters per-(source, token, slot) values to the rows that they belong to.

    `flat`: one value per slot -> `[rows]`. Otherwise (ranked) one vector `[K]` per token -> `[rows, K]`.
    """
    num_rows = spec.capacity
    target = ops.where(positions >= 0, positions, num_rows).reshape(-1)
    values = values.reshape(-1) if flat else values.reshape(target.shape[0], -1)
    out = jnp.full((num_rows, *values.shape[1:]), fill, values.dtype)
    return ops.put(out, target, values)


def place_weights(weights: jax.Array, layout: _layout.RecvLayout, spec: Spec) -> jax.Array:
    if spec.layout == "ranked":
        local = ops.where(layout.local_idx >= 0, weights, 0.0)
        return place_slots(local, layout.positions, spec, fill=0.0)
    return place_slots(weights, layout.positions, spec, fill=0.0, flat=True).reshape(spec.row_dims)
