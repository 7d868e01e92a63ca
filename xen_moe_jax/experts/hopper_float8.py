"""Experts in fp8 on Hopper GPUs: the rule of `float8` by kernels, for single matmuls and for a whole expert.

In a whole expert, the activation is quantized where it is computed, from float32 projections, and the second matmul
reads its codes. The backward pass computes it again from projections in the dtype of the rows. For the backward pass
the quantized weights are kept as they lie, in half of the memory of the weights in bfloat16.

Where a combine weights the rows, the backward pass multiplies by these weights in front of the last matmul, as
`combined` explains.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._float8_weight import Float8Weight, padding_of
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary
from xen_moe_jax._overlap import define_derivative, in_overlap
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax._types import BlockScaled
from xen_moe_jax.experts import hopper
from xen_moe_jax.pallas_kernels.hopper import float8_activation, float8_quantize
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.float8_contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, Quantized, activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import ROW_ALIGNMENT, Tiles

TILES = Tiles(k=BLOCK)
"""Tiles of all kernels. The kernel of a gated activation gives half of a tile's columns to each projection."""
UNIT, LEAST = 64, 128
"""Hidden sizes and widths are padded to multiples of UNIT, and to LEAST, by a copy of rows and weights."""


def why_not(rows: Any, weights: Any) -> str | None:
    """Returns why the kernels cannot multiply `rows [C, A]` by `weights [L, A, B]`, or None. It needs no device, and
    leaves the format of a `QuantizedWeight` to `float8.check_weights`."""
    if rows.dtype.name not in hopper.DTYPES:
        return f"the rows are {rows.dtype.name}: none of {' and '.join(hopper.DTYPES)}"
    if not isinstance(weights, QuantizedWeight) and weights.dtype.name not in hopper.DTYPES:
        return f"the weights are {weights.dtype.name}: none of {' and '.join(hopper.DTYPES)}"
    if 0 in rows.shape or 0 in weights.shape:
        return "an operand is empty"
    return None


def supports(rows: Any, weights: Any) -> bool:
    """True if the kernels can multiply such operands on this machine."""
    return hopper.on_hopper() and why_not(rows, weights) is None


def _tiles() -> Tiles:
    """Returns the tiles of a kernel. In the work of an `xm.overlap`, thread blocks claim them one by one."""
    return dataclasses.replace(TILES, claimed=in_overlap())


def _fitting(size: int) -> int:
    """Returns the hidden size or width to which `size` is padded."""
    return max(LEAST, -(-size // UNIT) * UNIT)


def whole(array: Any, *axes: int) -> Any:
    """Pads `axes` with zeros to sizes that the kernels take: axis 0 counts rows, the other axes count columns."""
    if array is None:
        return None
    if isinstance(array, QuantizedWeight):
        return array  # padded when it is laid out
    if isinstance(array, Float8Weight):
        return array.with_master(lambda master: whole(master, *axes))
    widths = [(0, 0)] * array.ndim
    for axis in axes:
        size = array.shape[axis]
        widths[axis] = (0, -size % ROW_ALIGNMENT if axis == 0 else _fitting(size) - size)
    return jnp.pad(array, widths) if any(more for _, more in widths) else array


def _varying(tree: Any, like: Any) -> Any:
    """Makes all arrays of `tree` vary over the mesh axes over which `like` varies."""
    return jax.tree.map(lambda array: vary(array, varying_axes(like)), tree)


def _rows(x: jax.Array, arrived: BlockScaled | None) -> Quantized:
    """Returns rows `x [C, A]` quantized for a product, or the rows that `arrived` in their place, padded to the same
    sizes."""
    if arrived is None:
        return _varying(float8_quantize.rows(x), x)
    below = x.shape[0] - arrived.values.shape[0]
    beside = -(-x.shape[1] // BLOCK) * BLOCK
    values = jnp.pad(arrived.values, ((0, below), (0, beside - arrived.values.shape[1])))
    scales = jnp.pad(arrived.scales, ((0, below), (0, beside // BLOCK - arrived.scales.shape[1])))
    return Quantized(values, scales.T[None])


def _layouts(weight: Any, *, product: bool, gradient: bool) -> tuple[Quantized | None, Quantized | None]:
    """Returns a weight `[L, A, B]` quantized for a product, and for the gradient of rows; None for one that the caller
    does not ask for. Weights that are quantized already keep their codes."""
    if isinstance(weight, Float8Weight):
        turned, lying = Quantized(weight.turned, weight.turned_scales), Quantized(weight.values, weight.scales)
        return turned if product else None, lying if gradient else None
    if not isinstance(weight, QuantizedWeight):
        return _varying(float8_quantize.weights(weight, product=product, gradient=gradient), weight)
    _, a, b = weight.values.shape
    ends = [-(-_fitting(size) // BLOCK) for size in (a, b)]
    values = jnp.pad(weight.values, [(0, 0), *((0, end * BLOCK - size) for end, size in zip(ends, (a, b)))])
    scales = jnp.pad(weight.scales, [(0, 0), *((0, end - n) for end, n in zip(ends, weight.scales.shape[1:]))])
    turned = Quantized(values.swapaxes(1, 2), scales.swapaxes(1, 2))
    return turned if product else None, Quantized(values, scales) if gradient else None


def codes_of(weight: jax.Array) -> Float8Weight:
    """Returns the codes of a weight `[L, A, B]`, bfloat16 or float16, without a master."""
    turned, lying = _layouts(whole(weight, 1, 2), product=True, gradient=True)
    assert turned is not None and lying is not None
    return Float8Weight(lying.values, lying.scales, turned.values, turned.scales, padding=padding_of(weight.shape))


def _columns(array: Any, blocks: jax.Array, like: Any) -> Quantized:
    """Returns rows quantized for the gradient of a weight, with a scale for 128 rows of a column."""
    return _varying(float8_quantize.columns(array, blocks), like)


def _both(array: Any, blocks: jax.Array | None, like: Any) -> tuple[Quantized, Quantized | None]:
    """Returns a cotangent's rows quantized for a product and, with `blocks` from `blocks_of_groups`, for the gradient
    of a weight, else None."""
    if blocks is None:
        return _rows(array, None), None
    return _varying(float8_quantize.both(array, blocks), like)


def _times(pairs: Sequence[Any], group_sizes: Any, columns: int, like: Any) -> Any:
    """Returns the sum of the products of pairs of quantized rows and weights, `[C, columns]` in the dtype of `like`."""
    out = rows_by_weights(tuple(pairs), group_sizes, columns=columns, dtype=like.dtype, tiles=_tiles())
    return vary(out, varying_axes(like))


def _by_weight(rows: Quantized | None, others: Quantized | None, blocks: Any, of: Any) -> Any:
    """Returns the gradient of the weight that `of`, from `_shape_of`, describes; None if `of` is None."""
    if of is None:
        return None
    if isinstance(of, Float8Weight):
        return of.gradient(_by_weight(rows, others, blocks, of.master))
    height, width = of.shape[2:]
    out = rows_by_rows(rows, others, blocks, height=height, width=width, dtype=of.dtype, tiles=_tiles())
    return vary(out, varying_axes(of))


def grouped_matmul(x: Any, arrived: BlockScaled | None, weights: Any, group_sizes: Any) -> Any:
    """Returns rows `x [C, A]`, or the rows that `arrived` in their place, times `weights [L, A, B]` of their groups:
    `[C, B]` in the dtype of `x`, bfloat16 or float16. `supports` must hold."""
    padded = whole(x, 0, 1), whole(weights, 1, 2)
    return _multiply(padded[0], arrived, padded[1], group_sizes)[: x.shape[0], : weights.shape[2]]


@jax.custom_vjp
def _multiply(x: Any, arrived: Any, weights: Any, group_sizes: Any) -> Any:
    product, _ = _layouts(weights, product=True, gradient=False)
    return _times([(_rows(x, arrived), product)], group_sizes, _fitting(weights.shape[2]), x)


def _forward(x: Any, arrived: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    x, weights = jax.tree.map(hopper.first_order_quantized, (x, weights))
    rows = _rows(x, arrived)
    product, gradient = _layouts(weights, product=True, gradient=True)
    out = _times([(rows, product)], group_sizes, _fitting(weights.shape[2]), x)
    return out, (rows, gradient, group_sizes, _shape_of(x), _shape_of(weights))


def _shape_of(array: Any) -> Any:
    """Returns an array `[0, ...]` without elements, a residual that has the dtype of `array`, and its shape behind the
    first dimension; for a `Float8Weight` a cotangent that holds this array of its master; None for a `QuantizedWeight`,
    which gets no gradient."""
    if isinstance(array, QuantizedWeight):
        return None
    if isinstance(array, Float8Weight):
        return array.gradient(_shape_of(array.master))
    return vary(jnp.zeros((0, *array.shape), array.dtype), varying_axes(array))


def _backward(kept: Any, cotangent: Any) -> tuple[Any, ...]:
    rows, gradient, group_sizes, of_x, of_weights = kept
    cotangent = hopper.first_order_quantized(cotangent)
    facts, blocks = float8_quantize.blocks_of_groups(group_sizes, cotangent.shape[0])
    by, right = _both(cotangent, None if of_weights is None else facts, cotangent)
    by_x = _times([(by, gradient)], group_sizes, of_x.shape[2], of_x)
    return by_x, None, _by_weight(_columns(rows, facts, cotangent), right, blocks, of_weights), None


define_derivative(_multiply, _forward, _backward)


def run(
    activation: Activation, x: Any, arrived: Any, first: Sequence[Any], last: Any, group_sizes: Any, *, keep: bool
) -> tuple[Any, Any]:
    """Returns the experts' rows `[C, H]`, and with `keep` the residuals that `back` needs, else None.

    Args:
      x: `[C, H]`, bfloat16 or float16; only its shape and dtype count where rows have `arrived`.
      arrived: values and scales of the rows from a wire, or None.
      first: weights of the projections, `[L, H, F]` each.
      last: `[L, F, H]`.
      group_sizes: int32 `[L]`.
    """
    if keep:
        x, first, last = jax.tree.map(hopper.first_order_quantized, (x, first, last))
    rows = _rows(x, arrived)
    laid_out = [_layouts(w, product=True, gradient=keep) for w in first]
    turned, lying = _layouts(last, product=True, gradient=keep)
    inner, projections = _varying(
        activated_rows(
            rows,
            tuple(product for product, _ in laid_out),
            group_sizes,
            width=_fitting(first[0].shape[2]),
            activation=activation,
            projections=x.dtype if keep else None,
            tiles=_tiles(),
        ),
        x,
    )
    out = _times([(inner, turned)], group_sizes, x.shape[1], x)
    if not keep:
        return out, None
    shapes = _shape_of(x), [_shape_of(w) for w in first], _shape_of(last)
    return out, (rows, projections, [gradient for _, gradient in laid_out], lying, group_sizes, shapes)


def back(activation: Activation, kept: Any, cotangent: Any, row_weights: Any = None) -> tuple[Any, ...]:
    """Returns the cotangents of `x`, `first`, `last` and `row_weights`; None for a weight that is a `QuantizedWeight`,
    and for `row_weights` that are None.

    Args:
      kept: from `run`.
      cotangent: `[C, H]`, of the rows after they are weighted.
      row_weights: float32 `[C]`, factors of the rows that `run` returned, or None.
    """
    rows, projections, first, last, group_sizes, (of_x, of_first, of_last) = kept
    projections, cotangent, row_weights = jax.tree.map(
        hopper.first_order_quantized, (projections, cotangent, row_weights)
    )
    facts, blocks = float8_quantize.blocks_of_groups(group_sizes, cotangent.shape[0])
    width = projections[0].shape[1]
    by, right = _both(cotangent, None if of_last is None else facts, cotangent)
    by_inner = _times([(by, last)], group_sizes, width, of_x)
    inner, by_row_weights = None, None
    if of_last is not None or any(of is not None for of in of_first):
        given = by_inner, projections, row_weights, facts
        both, inner, by_row_weights = _varying(
            float8_activation.gradients(activation, *given, claimed=in_overlap()), cotangent
        )
    else:
        wide, by_wide = [p.astype(jnp.float32) for p in projections], by_inner.astype(jnp.float32)
        if row_weights is not None:
            by_row_weights = jnp.sum(activation(*wide) * by_wide, axis=1)
            by_wide = by_wide * row_weights[:, None]
        both = [(_rows(a.astype(of_x.dtype), None), None) for a in activation.gradients(by_wide, *wide)]
    by_x = _times(
        [(a, gradient) for (a, _), gradient in zip(both, first, strict=True)], group_sizes, of_x.shape[2], of_x
    )
    by_last = _by_weight(inner, right, blocks, of_last)
    left = _columns(rows, facts, cotangent)
    by_first = [_by_weight(left, right, blocks, of) for (_, right), of in zip(both, of_first, strict=True)]
    return by_x, by_first, by_last, by_row_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts(activation: Activation, x: Any, arrived: Any, first: Any, last: Any, group_sizes: Any) -> Any:
    """Returns the experts' rows of `run`, with derivatives. The caller pads the operands by `whole`."""
    return run(activation, x, arrived, first, last, group_sizes, keep=False)[0]


def _experts_forward(activation: Activation, *operands: Any) -> tuple[Any, Any]:
    return run(activation, *operands, keep=True)


def _experts_backward(activation: Activation, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    by_x, by_first, by_last, _ = back(activation, kept, cotangent)
    return by_x, None, tuple(by_first), by_last, None


define_derivative(experts, _experts_forward, _experts_backward)
