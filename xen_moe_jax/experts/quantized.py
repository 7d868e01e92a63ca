"""Grouped matmuls by weights in the format in which they are shipped, for few rows a group on a Hopper GPU.

A decode step is the reading of weights. The kernel (cuda_kernels/experts/quantized_rows.cu) reads values and scales,
a half or a quarter of the bytes of bfloat16, and widens them in registers as `QuantizedWeight.widen` does: its products
are those of the widened weights, added up in float32 in ascending order, and rounded once. With more rows a group the
weights are widened by XLA and multiplied by the kernels of `hopper`, since each tile of rows would widen them anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, vary_alike
from xen_moe_jax._mxfp4 import BLOCK as FP4_BLOCK
from xen_moe_jax._overlap import define_derivative, in_overlap
from xen_moe_jax._quantized_weight import SCALED, QuantizedWeight, without_gradient
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import module
from xen_moe_jax.experts import hopper
from xen_moe_jax.experts.grouped_matmul import warn_once

TARGET = "xen_moe_quantized_rows"
COLUMN_UNIT = 16
"""The number of columns is a multiple of this: rows of values begin at multiples of 16 bytes."""
DEPTH_UNIT = 8
"""The contracted dimension is a multiple of this, for MXFP4 of its block: rows of bfloat16 begin at multiples of 16
bytes."""
BLOCK_UNIT = 64
"""Blocks of scales are as high as a multiple of this, or as the weight."""
MOST_GROUPS = 512


def by_kernel(grouped_matmul: str | Callable[..., Any], rows: jax.Array, weights: Sequence[Any]) -> bool:
    """Returns True if the kernel multiplies `rows [C, A]` by these weights for `grouped_matmul` on this machine.

    On a Hopper GPU it warns, once for each reason, where the kernel does not multiply few rows by quantized weights.
    """
    named = grouped_matmul in ("auto", "hopper") and all(isinstance(weight, QuantizedWeight) for weight in weights)
    if not named or not hopper.on_hopper():
        return False
    reason = why_not(rows, weights) or not_built()
    if reason is not None and 0 < rows.shape[0] <= hopper.FEW_ROWS * weights[0].shape[0]:
        message = (
            "xen_moe_jax: experts with few rows widen their quantized weights in memory in every call, which takes"
        )
        warn_once(f"{message} longer than to read bfloat16: {reason}")
    return reason is None


@functools.cache
def not_built() -> str | None:
    """Returns why the compiled module cannot be loaded, or None."""
    try:
        module.compiled()
    except BackendUnavailable as error:
        return str(error)
    return None


def why_not(rows: jax.Array | jax.ShapeDtypeStruct, weights: Sequence[QuantizedWeight]) -> str | None:
    """Returns why a Hopper GPU widens these weights in memory instead of in registers, or None."""
    first = weights[0]
    groups, depth, columns = first.shape
    unit = FP4_BLOCK if first.is_mxfp4 else DEPTH_UNIT
    if any((w.shape, w.dtype, w.block) != (first.shape, first.dtype, first.block) for w in weights):
        return "the projections are in different formats"
    if rows.dtype != jnp.bfloat16:
        return f"the rows are {rows.dtype.name}: the kernel for quantized weights takes bfloat16"
    if not first.is_mxfp4 and first.dtype.name not in SCALED:
        return f"values of {first.dtype.name} have no kernel"
    if rows.shape[0] > hopper.FEW_ROWS * groups:
        return f"{rows.shape[0]} rows for {groups} groups are more than {hopper.FEW_ROWS} a group"
    if 0 in rows.shape or 0 in first.shape:
        return "an operand is empty"
    if groups > MOST_GROUPS:
        return f"{groups} groups are more than {MOST_GROUPS}"
    if depth % unit or columns % COLUMN_UNIT:
        return f"{depth} by {columns} are no multiples of {unit} and {COLUMN_UNIT}"
    if not first.is_mxfp4 and first.block[0] % BLOCK_UNIT and first.block[0] < depth:
        return f"blocks of {first.block} are no multiples of {BLOCK_UNIT} high"
    return None


def grouped_matmuls(rows: jax.Array, weights: Sequence[QuantizedWeight], group_sizes: jax.Array) -> list[jax.Array]:
    """Returns the rows times each of the weights of their groups, `[C, B]` each, in bfloat16.

    Rows past the last group come out unspecified. The products are differentiable by the rows alone. `by_kernel` must
    hold.

    Args:
      rows: bfloat16 `[C, A]`, sorted by group.
      weights: one or two, `[L, A, B]`, in the same format.
      group_sizes: int32 `[L]`.
    """
    kept = [without_gradient(weight) for weight in weights]
    leaves = [leaf for weight in kept for leaf in (weight.values, weight.scales)]
    rows, group_sizes, *leaves = vary_alike(rows, group_sizes.astype(jnp.int32), *leaves)
    return _multiply(kept[0].block, rows, group_sizes, *leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(block: tuple[int, int], rows: jax.Array, group_sizes: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
    module.registered()
    if leaves[0].dtype == jnp.uint8:
        rows = even_elements_first(rows)
    results = [jax.ShapeDtypeStruct((rows.shape[0], values.shape[2]), rows.dtype) for values in leaves[::2]]
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    sizes = {"block_rows": np.int64(block[0]), "block_columns": np.int64(block[1])}
    products = call(rows, group_sizes, *leaves, **sizes, claimed=np.int64(in_overlap()))
    return [vary(product, varying_axes(rows)) for product in products]


def _forward(block: tuple[int, int], *operands: jax.Array) -> tuple[list[jax.Array], Any]:
    return _multiply(block, *operands), operands


def _backward(block: tuple[int, int], kept: Any, cotangents: list[jax.Array]) -> tuple[Any, ...]:
    rows, group_sizes, *leaves = kept
    total = None
    for values, scales, cotangent in zip(leaves[::2], leaves[1::2], cotangents, strict=True):
        wide = QuantizedWeight(values, scales, block).widen(rows.dtype)
        _, by_rows = jax.vjp(lambda rows, wide=wide: hopper.grouped_matmul(rows, wide, group_sizes), rows)
        (part,) = by_rows(cotangent)
        total = part if total is None else total + part
    return (total, None, *(None for _ in leaves))


define_derivative(_multiply, _forward, _backward)


def even_elements_first(rows: jax.Array) -> jax.Array:
    """Returns rows `[C, A]` in the order in which the kernel unpacks MXFP4: of each 16 elements, the even-numbered ones
    come in front of the odd-numbered ones."""
    return rows.reshape(rows.shape[0], -1, 8, 2).swapaxes(2, 3).reshape(rows.shape)
