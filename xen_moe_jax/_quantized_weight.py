"""Weights of experts in the formats that checkpoints ship: fp8 in blocks, int8 per channel, MXFP4.

MXFP4 is E2M1 values with a power of two (E8M0) for 32 of them: OCP Microscaling Formats, version 1.0. Blocks of
128 x 128 are DeepSeek-V3's (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _mxfp4
from xen_moe_jax._numbers import as_int
from xen_moe_jax._types import export_as, pytree

SCALED = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Dtypes of values that have float32 scales."""
MXFP4_BLOCK = _mxfp4.BLOCK
"""Elements along the contracted dimension that share one exponent in MXFP4."""


@pytree(static=("block",))
class QuantizedWeight:
    """A weight `[..., A, B]`, contracted along `A`, as it is shipped: it is `values` times the scale of their block.

    The Flax layers and their grouped matmuls take it in place of an array, and multiply by `widen(dtype of the rows)`.
    It has no gradient: differentiating by it is a TypeError.

    Attributes:
      values: float8_e4m3fn, float8_e5m2 or int8 `[..., A, B]`; for MXFP4 uint8 `[..., A / 2, B]`, where row `n` holds
        elements `2 n` (in the low four bits) and `2 n + 1` of each column.
      scales: float32 `[..., ceil(A / a), ceil(B / b)]`; for MXFP4 uint8 exponents `[..., A / 32, B]`, biased by 127,
        of which 255 is NaN.
      block: `(a, b)`, rows and columns that share a scale: (128, 128) in DeepSeek-V3, (A, 1) for a scale a channel,
        (32, 1) in MXFP4.
    """

    values: Any
    scales: Any
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, `[..., A, B]`."""
        *before, rows, columns = self.values.shape
        return (*before, rows * (2 if self.is_mxfp4 else 1), columns)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of `values`."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales, which may be shapes without arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in (self.values, self.scales))

    @property
    def is_mxfp4(self) -> bool:
        """True where `values` holds two E2M1 numbers a byte."""
        return self.values.dtype == jnp.uint8

    def part_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of values and scales of a weight of `shape` in this format."""
        *before, rows, columns = shape
        a, b = self.block
        return (*before, rows // 2 if self.is_mxfp4 else rows, columns), (*before, -(-rows // a), -(-columns // b))

    def widen(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """Returns the weight `[..., A, B]`: `float32(values) * scales`, rounded to `dtype`.

        Raises:
          TypeError: a gradient by the weight is asked for, or the dtypes are of no known format.
          ValueError: the scales do not fit the values.
        """
        check_format("QuantizedWeight", self)
        weight = without_gradient(self)
        scales = _spread(_mxfp4.scales_of(weight.scales) if self.is_mxfp4 else weight.scales, self)
        values = _unpacked(weight.values) if self.is_mxfp4 else weight.values.astype(jnp.float32)
        product = values * scales
        if jnp.dtype(dtype) == jnp.bfloat16:  # not a conversion alone, which XLA may leave out in front of a matmul
            product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
        return product.astype(dtype)


export_as(QuantizedWeight)


def widened(weight: Any, dtype: Any) -> Any:
    """Returns `weight.widen(dtype)` of a `QuantizedWeight`, and an array as it is."""
    return weight.widen(dtype) if isinstance(weight, QuantizedWeight) else weight


def adopted(name: str, weight: Any) -> Any:
    """Returns a weight that qwix has quantized, a `QArray` or a parameter around one, as a `QuantizedWeight`; anything
    else as it is.

    Raises:
      ValueError: it has zero points, or experts share a scale.
    """
    weight = weight.array if hasattr(weight, "how") and hasattr(weight, "array") else weight  # a PTQ parameter
    if not all(hasattr(weight, field) for field in ("qvalue", "scale", "zero_point")):
        return weight
    if weight.zero_point is not None:
        raise ValueError(f"{name} has zero points: quantize it with weight_calibration_method='absmax'")
    *before, depth, columns = weight.qvalue.shape
    *of_experts, rows, beside = weight.scale.shape
    if of_experts != before:
        raise ValueError(f"{name} has scales {weight.scale.shape}: must be one or more for each expert, {before}")
    return QuantizedWeight(weight.qvalue, weight.scale.astype(jnp.float32), (depth // rows, columns // beside))


def adopted_by_name(weights: Any) -> dict[str, Any]:
    """Returns weights by name, each as `adopted` has it. Raises TypeError unless they are a dict of arrays."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}: must be a dict of arrays by name")
    for name, weight in weights.items():
        if weight is None or isinstance(weight, list | tuple | int | float | str):
            raise TypeError(
                f"weights[{name!r}] is a {type(weight).__name__}: must be an array or an xm.QuantizedWeight"
            )
    return {name: adopted(name, weight) for name, weight in weights.items()}


def check_format(name: str, weight: QuantizedWeight) -> None:
    """Raises TypeError or ValueError unless dtypes, shapes and block of the weight belong to one format."""
    for part, array in (("values", weight.values), ("scales", weight.scales)):
        if not hasattr(array, "dtype"):
            raise TypeError(f"{name} has {part} of type {type(array).__name__}: must be an array")
    sizes = [as_int(size) or 0 for size in weight.block] if isinstance(weight.block, Sequence) else []
    if len(sizes) != 2 or min(sizes) <= 0:
        raise ValueError(f"{name} has block={weight.block!r}: must be two positive ints, rows and columns of a scale")
    values, scales = (f"{a.dtype}{list(a.shape)}" for a in (weight.values, weight.scales))
    given = f"{name} has values {values} and scales {scales} with block={weight.block}"
    dtypes = weight.values.dtype.name, weight.scales.dtype.name
    if dtypes != ("uint8", "uint8") and dtypes not in [(known, "float32") for known in SCALED]:
        raise TypeError(f"{given}: must be values of one of {SCALED} with float32 scales, or uint8 with uint8 (MXFP4)")
    if weight.is_mxfp4 and (weight.block != (MXFP4_BLOCK, 1) or weight.shape[-2] % MXFP4_BLOCK):
        raise ValueError(f"{given}: MXFP4 has blocks of {(MXFP4_BLOCK, 1)} that divide the weight {weight.shape}")
    if weight.part_shapes(weight.shape)[1] != tuple(weight.scales.shape):
        raise ValueError(f"{given}: the scales must have shape {weight.part_shapes(weight.shape)[1]}")


def without_gradient(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the weight; differentiating the result by it is a TypeError."""
    values, scales = refuse_gradient(weight.values, weight.scales)
    return QuantizedWeight(values, scales, weight.block)


@jax.custom_jvp
def refuse_gradient(*parts: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays of a quantized weight; differentiating the result by them is a TypeError."""
    return parts


@refuse_gradient.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"a gradient by a quantized weight ({primals[0].dtype}{list(primals[0].shape)}) was asked for: it has none. "
        "Differentiate by other arguments alone (the weight may be closed over), or train weights in bfloat16 or "
        "float32: load_hugging_face(..., keep_quantised=False), or .widen(dtype)"
    )


def _spread(scales: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns scales that broadcast to the shape of the weight."""
    for axis, size in zip((-2, -1), weight.block, strict=True):
        if scales.shape[axis] > 1 and size > 1:
            scales = lax.slice_in_dim(jnp.repeat(scales, size, axis), 0, weight.shape[axis], axis=scales.ndim + axis)
    return scales


def _unpacked(packed: jax.Array) -> jax.Array:
    """Returns float32 `[..., A, B]` of E2M1 values `[..., A / 2, B]` in pairs."""
    return _mxfp4.values_of(_mxfp4.unpack(packed.swapaxes(-1, -2)).swapaxes(-1, -2))
