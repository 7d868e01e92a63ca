"""Result shapes of every primitive: `(shape, dtype)` of each result, in the order of docs/design/internals.md."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from xen_moe_jax._mesh import group_size
from xen_moe_jax._spec import Spec

ShapeDtype = tuple[tuple[int, ...], Any]


def dispatch(x: Any, scales: Any, *_: Any, spec: Spec, **__: Any) -> list[ShapeDtype]:
    """Shapes of the results of a dispatch; `row_scales` has no columns where `x` has no scales."""
    shapes: list[ShapeDtype] = [
        (spec.rows_shape(x.shape[1]), x.dtype),
        (spec.rows_shape(scales.shape[1]), jnp.float32),
        ((spec.num_ranks, spec.num_tokens, spec.slots), jnp.int32),
        ((spec.num_ranks, spec.local_experts), jnp.int32),
        (spec.weights_shape, jnp.float32),
        ((spec.num_tokens, spec.top_k), jnp.int32),
    ]
    if spec.layout == "ranked":
        shapes.append((spec.weights_shape, jnp.int32))
    return shapes


def combine(y: Any, *_: Any, spec: Spec, **__: Any) -> list[ShapeDtype]:
    return [((spec.num_tokens, y.shape[-1]), y.dtype)]


def redispatch(x: Any, *_: Any, spec: Spec, **__: Any) -> list[ShapeDtype]:
    return [(spec.rows_shape(x.shape[1]), x.dtype)]


def all_to_all(
    x: Any, *, axis_sizes: Any, split_axis: int, concat_axis: int, tiled: bool, axis_index_groups: Any, **_: Any
) -> list[ShapeDtype]:
    size = group_size(axis_sizes, axis_index_groups)
    shape = list(x.shape)
    if tiled:
        shape[split_axis] //= size
        shape[concat_axis] *= size
    else:
        del shape[split_axis]
        shape.insert(concat_axis, size)
    return [(tuple(shape), x.dtype)]


def all_gather(
    x: Any, *, axis_sizes: Any, axis_index_groups: Any, concat_axis: int, tiled: bool, **_: Any
) -> list[ShapeDtype]:
    size = group_size(axis_sizes, axis_index_groups)
    shape = list(x.shape)
    if tiled:
        shape[concat_axis] *= size
    else:
        shape.insert(concat_axis, size)
    return [(tuple(shape), x.dtype)]


def all_gather_matmul(x: Any, w: Any, *, axis_sizes: Any, **_: Any) -> list[ShapeDtype]:
    return [((group_size(axis_sizes, None) * x.shape[0], w.shape[1]), x.dtype)]


def ragged_all_to_all(operand: Any, output: Any, *_: Any, **__: Any) -> list[ShapeDtype]:
    return [(output.shape, output.dtype)]
