"""The grouped matmul of quantized experts in plain JAX: rows and weights in fp8 (e4m3) or int8, float32 sums. Every
rounding is written here; the kernels of `hopper_float8` follow the same rule.

Rows have a scale for 128 elements, weights one for 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3). A product
is the sum, in ascending order, of blocks of 128 of the contracted dimension: each block is a float32 sum of products,
which are exact, times the product of both scales, added to a float32 sum. The result is rounded to the rows' dtype
once. In int8 the sum of a block is an int32, and exact; `jax.lax.ragged_dot` gets int8 operands, which a TPU's MXU
multiplies as they are. On CUDA it gets bfloat16, with the same sums.

The gradient of the rows is such a product, too: the cotangent, quantized for 128 elements along the dimension that is
contracted then, is multiplied by the same quantized weights. The gradient of the weights contracts the rows of each
group, in blocks of 128 rows from the group's first row on. In it, the cotangent and the rows have a scale for 128 rows
of a column; the rows are quantized again, from the numbers that the codes of the forward pass stand for. This gradient
has the dtype of the weights, and is taken as that of the weights before they are quantized (straight-through).

A NaN or an infinity makes the scale of its block NaN. In a product this makes its row NaN, in the gradient of weights
its row or its column.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._float8_weight import DTYPE, Float8Weight, padding_of
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import parts, vary, vary_alike, whole
from xen_moe_jax._quantize import Wire, dequantize_arrays, parse_wire, quantize_arrays
from xen_moe_jax._quantized_weight import QuantizedWeight, without_gradient
from xen_moe_jax._spec import SCALE_BLOCK as BLOCK
from xen_moe_jax._types import BlockScaled, experts_of_rows
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts import hopper, hopper_float8
from xen_moe_jax.experts.arrived import ArrivedRows
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.experts.grouped_matmul import warn_once
from xen_moe_jax.experts.ragged_dot import ragged_dot

Weight = jax.Array | QuantizedWeight | Float8Weight


def grouped_matmul(rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns rows `[C, A]` times the weights `[L, A, B]` of their groups: `[C, B]` in the rows' dtype.

    Args:
      rows: floating point, sorted by group, or `ArrivedRows`; rows past the last group come out unspecified.
      weights: floating point; or a `Float8Weight` with a master, whose codes are used; or a `QuantizedWeight` of fp8
        (e4m3) in blocks of 128 x 128, which is used as it is.
      group_sizes: int32 `[L]`.

    Raises:
      ValueError: a `QuantizedWeight` of another format.
    """
    return _grouped_matmul(DTYPE, rows, weights, group_sizes)


def in_int8(rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns rows `[C, A]` times the weights `[L, A, B]` of their groups, as `grouped_matmul` does, but by operands in
    int8: `[C, B]` in the rows' dtype. No kernel of this library multiplies them, on any platform.

    Args:
      rows: as in `grouped_matmul`; `ArrivedRows` are in int8.
      weights: floating point; or a `QuantizedWeight` of int8 in blocks of 128 x 128, which is used as it is.
      group_sizes: int32 `[L]`.

    Raises:
      ValueError: the weights are a `QuantizedWeight` of another format, or a `Float8Weight`.
    """
    return _grouped_matmul("int8", rows, weights, group_sizes)


def automatic_in_int8(rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns `in_int8`. On a Hopper GPU it warns once: it has no kernels there.

    Raises:
      ValueError: as `in_int8`.
    """
    if hopper.on_hopper():
        warn_once(
            f"experts in int8 are multiplied in plain JAX on GPUs, slowly: {DTYPE} has kernels (grouped_matmul="
            "'ragged_dot' says nothing)"
        )
    return in_int8(rows, weights, group_sizes)


def _grouped_matmul(dtype: str, rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns the product of `grouped_matmul` or, with `dtype` "int8", of `in_int8`."""
    check_weights(weights, dtype)
    x, arrived, weights, group_sizes = vary_all((*parts_of(rows), weights, group_sizes))
    if isinstance(weights, QuantizedWeight):
        return _multiply(dtype, x, arrived, None, weights.values, weights.scales, group_sizes)
    if isinstance(weights, Float8Weight):
        _, a, b = weights.shape
        return _multiply(dtype, x, arrived, weights.master, weights.values[:, :a, :b], weights.scales, group_sizes)
    codes = quantize_weights(jax.lax.stop_gradient(weights), dtype)
    return _multiply(dtype, x, arrived, weights, *codes, group_sizes)


def by_hopper(rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns `grouped_matmul` of bfloat16 or float16 by kernels for Hopper GPUs.

    Raises:
      ValueError: the kernels cannot multiply such operands on this machine, or a `QuantizedWeight` of another format.
    """
    check_supported(rows, weights)
    return hopper_float8.grouped_matmul(*vary_all((*parts_of(rows), weights, group_sizes)))


def automatic(rows: jax.Array | ArrivedRows, weights: Weight, group_sizes: jax.Array) -> jax.Array:
    """Returns `grouped_matmul` by kernels on a Hopper GPU for operands that they support, otherwise in plain JAX.

    Raises:
      ValueError: a `QuantizedWeight` of another format.
    """
    return (by_hopper if by_kernels(automatic, rows, weights) else grouped_matmul)(rows, weights, group_sizes)


BY_NAME = {
    DTYPE: {"auto": automatic, "ragged_dot": grouped_matmul, "hopper": by_hopper},
    "int8": {"auto": automatic_in_int8, "ragged_dot": in_int8},
}
"""`choose` returns one of these functions, by the dtype of the experts and the value of `grouped_matmul`."""

MATMULS, MATMULS_IN_INT8 = (tuple(BY_NAME[dtype].values()) for dtype in (DTYPE, "int8"))
"""The functions that `choose` returns for experts in fp8, and those for experts in int8."""


def by_kernels(function: Any, rows: jax.Array | ArrivedRows, weights: Weight) -> bool:
    """Returns True if kernels multiply such operands for the grouped matmul `function`, one of `MATMULS` or any other.

    For `automatic` on a Hopper GPU it warns, once for each reason, where they cannot.

    Raises:
      ValueError: `function` is `by_hopper`, and they cannot; or `automatic`, and `check_weights` raises.
    """
    if function is by_hopper:
        check_supported(rows, weights)
        return True
    if function is not automatic:
        return False
    check_weights(weights)
    supported = hopper_float8.supports(rows, weights)
    if not supported and hopper.on_hopper():
        warn_once(
            f"experts in {DTYPE}: {hopper_float8.why_not(rows, weights)}; they are multiplied in plain JAX, slowly"
        )
    return supported


def check_supported(rows: jax.Array | ArrivedRows, weights: Weight) -> None:
    """Raises ValueError unless the kernels can multiply such operands on this machine."""
    check_weights(weights)
    if not hopper_float8.supports(rows, weights):
        reason = hopper_float8.why_not(rows, weights) or f"{jax.devices()[0].device_kind} is no Hopper GPU"
        raise ValueError(f"experts in {DTYPE} with grouped_matmul='hopper': {reason}; use 'auto' or 'ragged_dot'")


def check_weights(weights: Weight, dtype: str = DTYPE) -> None:
    """Raises ValueError for weights that are quantized in another format than that of experts in `dtype`."""
    if isinstance(weights, Float8Weight) and dtype != DTYPE:
        raise ValueError(f"experts in {dtype} with a Float8Weight: pass its master")
    if not isinstance(weights, QuantizedWeight) or (weights.dtype, weights.block) == (jnp.dtype(dtype), (BLOCK, BLOCK)):
        return
    raise ValueError(
        f"experts in {dtype} with weights in {weights.dtype} and blocks of {weights.block}: must be {dtype} in "
        f"blocks of {(BLOCK, BLOCK)}; load them without keep_quantised, or leave expert_dtype None"
    )


def parts_of(rows: jax.Array | ArrivedRows) -> tuple[jax.Array, BlockScaled | None]:
    """Returns the rows that get a cotangent, and the quantized rows that are multiplied in their place; None where the
    former are multiplied."""
    return (rows.x, rows.scaled) if isinstance(rows, ArrivedRows) else (rows, None)


def vary_all(tree: Any) -> Any:
    """Makes all arrays of a tree whole and applies `vary_alike` to them: no matmul here is divided over explicit axes.
    Differentiating the result by the codes of its quantized weights is a TypeError."""

    def fixed(leaf: Any) -> Any:
        if isinstance(leaf, Float8Weight):
            return leaf.without_codes_gradient()
        return without_gradient(leaf) if is_quantized(leaf) else leaf

    tree = jax.tree.map(fixed, tree, is_leaf=is_quantized)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, vary_alike(*map(whole, leaves)))


def is_quantized(weight: Any) -> bool:
    """Returns True for a weight that has codes."""
    return isinstance(weight, QuantizedWeight | Float8Weight)


def quantize_weights(weights: jax.Array, dtype: str = DTYPE) -> tuple[jax.Array, jax.Array]:
    """Quantizes weights `[L, A, B]` by the rule of rows for the 128 x 128 elements of a block: returns `[L, A, B]` in
    `dtype` and float32 scales `[L, ceil(A / 128), ceil(B / 128)]`. A dimension whose blocks explicit axes of the mesh
    divide is made whole."""
    cut = [i for i in (-2, -1) if weights.shape[i] % (BLOCK * parts(weights, i))]
    weights = whole(weights, *cut) if cut else weights
    local, rows, columns = weights.shape
    above, beside = -(-rows // BLOCK), -(-columns // BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, above * BLOCK - rows), (0, beside * BLOCK - columns)))
    blocks = weights.reshape(local, above, BLOCK, beside, BLOCK).swapaxes(2, 3)
    values, scales = quantize_arrays(blocks.reshape(local, above, beside, BLOCK * BLOCK), Wire(dtype), BLOCK * BLOCK)
    values = values.reshape(blocks.shape).swapaxes(2, 3).reshape(weights.shape)
    return values[:, :rows, :columns], scales[..., 0]


def codes_of(weights: jax.Array) -> Float8Weight:
    """Returns the codes of weights `[L, A, B]`, without a master and without a gradient by the weights: by kernels for
    bfloat16 and float16 on a Hopper GPU, in plain JAX otherwise."""
    weights = jax.lax.stop_gradient(weights)
    if hopper.on_hopper() and hopper_float8.why_not(weights, weights) is None:
        return hopper_float8.codes_of(weights)
    values, scales = quantize_weights(weights)
    padding = padding_of(weights.shape)
    values = jnp.pad(values, [(0, 0), *((0, more) for more in padding)])
    return Float8Weight(values, scales, values.swapaxes(1, 2), scales.swapaxes(1, 2), padding=padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    dtype: str, rows: Any, arrived: Any, master: Any, values: Any, scales: Any, group_sizes: Any
) -> jax.Array:
    """Returns `[C, B]` in the rows' dtype, by operands in `dtype`. `master` are the floating-point weights of which
    `values` and `scales` are made, and which get the gradient; None where the weights are given quantized."""
    del master
    return _product(*_quantized(dtype, rows, arrived), values, scales, group_sizes).astype(rows.dtype)


def _quantized(dtype: str, rows: Any, arrived: BlockScaled | None) -> tuple[jax.Array, jax.Array]:
    """Returns the values in `dtype` and the float32 scales that are multiplied: those of the rows that `arrived`, or
    else those of `rows`, which are quantized here."""
    return quantize_arrays(rows, Wire(dtype)) if arrived is None else (arrived.values, arrived.scales)


def _forward(
    dtype: str, rows: Any, arrived: Any, master: Any, values: Any, scales: Any, group_sizes: Any
) -> tuple[Any, Any]:
    rows, master = jax.tree.map(hopper.first_order_quantized, (rows, master))
    quantized = _quantized(dtype, rows, arrived)
    out = _product(*quantized, values, scales, group_sizes).astype(rows.dtype)
    # The backward pass reads the dtypes of these arrays without elements.
    dtypes = jnp.zeros((0,), rows.dtype), None if master is None else jnp.zeros((0,), master.dtype)
    return out, (*quantized, values, scales, group_sizes, *dtypes)


def _backward(dtype: str, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    row_values, row_scales, values, scales, group_sizes, of_rows, of_master = kept
    transposed, cotangent = (values.swapaxes(1, 2), scales.swapaxes(1, 2)), hopper.first_order_quantized(cotangent)
    by_rows = _product(*quantize_arrays(cotangent, Wire(dtype)), *transposed, group_sizes).astype(of_rows.dtype)
    by_master = None
    if of_master is not None:
        rows = dequantize_arrays(row_values, row_scales, jnp.float32)
        by_master = _contract_rows(dtype, rows, cotangent.astype(jnp.float32), group_sizes).astype(of_master.dtype)
    return by_rows, None, by_master, None, None, None


_multiply.defvjp(_forward, _backward)


def _product(
    row_values: jax.Array, row_scales: jax.Array, values: jax.Array, scales: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Returns float32 `[C, B]`: quantized rows `[C, A]`, with scales `[C, ceil(A / 128)]`, times quantized weights
    `[L, A, B]`, with scales `[L, ceil(A / 128), ceil(B / 128)]`."""
    count, depth = row_values.shape
    group = jnp.minimum(experts_of_rows(group_sizes, count), values.shape[0] - 1)

    def part(k: int) -> jax.Array:
        block = slice(k * BLOCK, min((k + 1) * BLOCK, depth))
        sums = _sums(ragged_dot, row_values[:, block], values[:, block], group_sizes)
        of_columns = jnp.repeat(scales[:, k][group], BLOCK, axis=1)[:, : values.shape[2]]
        return sums * (row_scales[:, k, None] * of_columns)

    return functools.reduce(jnp.add, map(part, range(row_scales.shape[1])))


def _sums(multiply: Callable[..., jax.Array], left: jax.Array, right: jax.Array, *others: jax.Array) -> jax.Array:
    """Returns `multiply(left, right, *others, preferred_element_type=...)` of quantized factors, sums of up to 128
    products, in float32. fp8 becomes bfloat16, which holds each of its numbers, but on a TPU whose matrix units
    multiply two factors in fp8; int8 has exact sums in int32.

    For CUDA, int8 becomes bfloat16 as well. Its sums stay below 2**24, so that they are exact in float32, too. Without
    autotuning, XLA takes a tile for int8 that is 16 elements deep, and an instruction that multiplies 32. It fills both
    halves of the instruction with the same 16 elements, and so counts each product twice (jax 0.11.2).
    """

    def wide(left: jax.Array, right: jax.Array, *others: jax.Array) -> jax.Array:
        factors = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
        return multiply(*factors, *others, preferred_element_type=jnp.float32)

    def narrow(*operands: jax.Array) -> jax.Array:
        return multiply(*operands, preferred_element_type=jnp.int32).astype(jnp.float32)

    if left.dtype != jnp.int8:
        as_they_are = hardware.traced_for().multiplies_two_float8
        product = functools.partial(multiply, preferred_element_type=jnp.float32) if as_they_are else wide
        return product(left, right, *others)
    return jax.lax.platform_dependent(left, right, *others, cuda=wide, default=narrow)


def _contract_rows(dtype: str, rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns float32 `[L, A, B]` for float32 `rows [C, A]` and `cotangent [C, B]`: of each group the rows, transposed,
    times its rows of the cotangent, both quantized for 128 rows of a column."""
    count, local = rows.shape[0], group_sizes.shape[0]
    blocks = count // BLOCK + local  # at most
    of_group = -(-group_sizes // BLOCK)
    first = jnp.cumsum(of_group) - of_group
    group = experts_of_rows(group_sizes, count)
    known = jnp.minimum(group, local - 1)
    begin = jnp.cumsum(group_sizes) - group_sizes
    inside = jnp.arange(count, dtype=jnp.int32) - begin[known]
    place = jnp.where(group < local, first[known] * BLOCK + inside, blocks * BLOCK)  # past the last group: nowhere

    def by_columns(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns values `[blocks, N, 128]` and scales `[blocks, N]` of an array `[C, N]`."""
        spread = jnp.zeros((blocks * BLOCK, array.shape[1]), jnp.float32)
        spread = vary(spread, varying_axes(array)).at[place].set(array, mode="drop")
        values, scales = quantize_arrays(spread.reshape(blocks, BLOCK, -1).swapaxes(1, 2), Wire(dtype))
        return values, scales[..., 0]

    owner = jnp.minimum(experts_of_rows(of_group, blocks), local - 1)  # blocks behind the last one hold zeros

    def add(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        (left, left_scales), (right, right_scales), expert = block
        products = _sums(functools.partial(jnp.einsum, "ar,br->ab"), left, right)
        return total.at[expert].add(products * (left_scales[:, None] * right_scales[None, :])), None

    start = jnp.zeros((local, rows.shape[1], cotangent.shape[1]), jnp.float32)
    start = vary(start, varying_axes(rows) | varying_axes(cotangent))
    return jax.lax.scan(add, start, (by_columns(rows), by_columns(cotangent), owner))[0]


def wire_of_rows(function: ExpertFunction, wire: Any) -> Wire | None:
    """Returns the parsed `wire` if the experts of `function` are quantized and multiply its rows as they arrive; None
    if they quantize the rows again, or are not quantized."""
    matmul = function.grouped_matmul
    if matmul not in (*MATMULS, *MATMULS_IN_INT8) or function.apply_weights_to == "input" or wire is None:
        return None
    parsed = parse_wire(wire)
    return parsed if parsed is not None and parsed.dtype == (DTYPE if matmul in MATMULS else "int8") else None


def dtype_name(value: Any) -> Any:
    """Returns the name of a dtype, as NumPy or JAX has it; returns any other value, a function too, unchanged."""
    if not isinstance(value, np.dtype | type):
        return value
    try:
        found = jnp.dtype(value)
    except TypeError:
        return value
    return value if found == np.object_ else found.name  # NumPy's dtype of a class that it does not know


def choose(dtype: Any, grouped: Any, experts: Any, layout: str, caller: str) -> Any:
    """Returns the grouped matmul of experts in `dtype`; with `dtype=None` that is `grouped`, or the name
    for which `choose` returned it: a config that is made from another one has a function.

    Args:
      dtype: None, "float8_e4m3fn" or "int8".
      grouped: "auto", kernels where this library has any for `dtype`; "ragged_dot", plain JAX; or "hopper", the kernels
        for Hopper GPUs, which multiply fp8 alone. A function that this function returned stands for its name.
      experts: None; another value of `MoEConfig.experts` is refused.
      layout: "grouped"; the other one is refused.
      caller: the name of the argument `dtype`, for messages.

    Raises:
      ValueError: `dtype` is another one, or `grouped`, `experts` or `layout` asks for another computation as well.
    """
    names = (name for functions in BY_NAME.values() for name, function in functions.items() if function is grouped)
    grouped = next(names, grouped)
    if dtype is None:
        return grouped
    if not isinstance(dtype, str) or dtype not in BY_NAME:
        raise ValueError(f"{caller}={dtype!r}: must be None, {DTYPE!r} or 'int8'")
    by_name = BY_NAME[dtype]
    for name, value, unset in (
        ("grouped_matmul", grouped, tuple(by_name)),
        ("experts", experts, (None,)),
        ("layout", layout, ("grouped",)),
    ):
        if not (value is None or isinstance(value, str)) or value not in unset:
            raise ValueError(f"{caller}={dtype!r} with {name}={value!r}: it has a matmul of its own; use {unset[0]!r}")
    return by_name[grouped]
