"""Block quantization: fp8 (e4m3) or int8 values with one float32 scale per 128 elements of the hidden dimension, and
MXFP4 with one power of two per 32, which rows may travel in.

The block size and the e4m3 range follow DeepSeek-V3 (arXiv:2412.19437, section 3.3.2); ue8m0 (a power of two) follows
the OCP Microscaling Formats specification, section 5.4.1. The arithmetic is spelled out so that every backend gives
the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _mesh, _mxfp4
from xen_moe_jax._numbers import array, is_one_of
from xen_moe_jax._spec import SCALE_BLOCK, scale_blocks
from xen_moe_jax._types import BlockScaled

QMAX = {"float8_e4m3fn": 448.0, "int8": 127.0}
WIRES = QMAX | {"mxfp4": _mxfp4.LARGEST}
"""Formats of rows that travel, and the largest number of each."""
SCALE_FORMATS = ("float32", "ue8m0")
MIN_AMAX = 2.0**-96
"""Blocks quieter than this use its scale: neither the scale nor its inverse then leaves the normal float32 range."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """Format of rows that travel quantized: values of `dtype`, and one scale for every 128 of them.

    "mxfp4" is no dtype but a format: E2M1 values, two a byte, and a power of two for every 32 (`scale_format` "ue8m0").
    """

    dtype: str
    scale_format: str = "float32"

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        if name not in WIRES:
            raise ValueError(f"Wire.dtype={self.dtype!r}: must be one of {tuple(WIRES)}")
        if not is_one_of(self.scale_format, SCALE_FORMATS):
            raise ValueError(f"Wire.scale_format={self.scale_format!r}: must be one of {SCALE_FORMATS}")
        object.__setattr__(self, "dtype", name)
        if self.is_mxfp4:
            object.__setattr__(self, "scale_format", "ue8m0")

    @property
    def is_mxfp4(self) -> bool:
        """True where two values share a byte."""
        return self.dtype == "mxfp4"

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return _mxfp4.BLOCK if self.is_mxfp4 else SCALE_BLOCK

    @property
    def jnp_dtype(self) -> Any:
        """The dtype on the wire, as jax.numpy has it."""
        return jnp.dtype("uint8" if self.is_mxfp4 else self.dtype)

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one row on the wire, scales included."""
        if self.is_mxfp4:
            return -(-hidden // _mxfp4.BLOCK) * (_mxfp4.BLOCK // 2 + 1)
        return hidden + 4 * scale_blocks(hidden)


def _dtype_name(value: Any) -> str:
    """Returns the name of a dtype in any form; for anything else its text, which names no dtype."""
    if isinstance(value, str) and value in WIRES:
        return value
    try:
        return jnp.dtype(value).name if value is not None else "None"
    except TypeError:
        return str(value)


def parse_wire(wire: Any, name: str = "wire") -> Wire | None:
    """None, "float8_e4m3fn", "int8", "mxfp4", "float8_e4m3fn:ue8m0", a dtype, or a `Wire`."""
    if wire is None or isinstance(wire, Wire):
        return wire
    if isinstance(wire, str):
        text, _, scale_format = wire.partition(":")
    else:
        text, scale_format = _dtype_name(wire), ""
    scale_format = scale_format or "float32"
    if text not in WIRES or scale_format not in SCALE_FORMATS:
        raise ValueError(
            f"{name}={wire!r}: must be None (the input dtype travels) or one of {tuple(WIRES)}, optionally followed by "
            f"':ue8m0' for power-of-two scales"
        )
    return Wire(text, scale_format)


def _blocks(x: jax.Array, size: int = SCALE_BLOCK) -> jax.Array:
    """[..., H] -> [..., ceil(H/size), size], zero-filled. Where explicit axes of the mesh divide blocks, H is made
    whole."""
    hidden = x.shape[-1]
    blocks = -(-hidden // size)
    if hidden % (size * _mesh.parts(x)):
        x = _mesh.whole(x, -1)
    pad = blocks * size - hidden
    if pad:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return x.reshape(*x.shape[:-1], blocks, size)


def _join(blocks: jax.Array, hidden: int) -> jax.Array:
    """Inverse of `_blocks`; also of no blocks at all, where a size could not be inferred."""
    *rows, count, size = blocks.shape
    if hidden % size:
        blocks = _mesh.whole(blocks, -2, -1)
    return blocks.reshape(*rows, count * size)[..., :hidden]


def _power_of_two_at_least(scale: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits >> 23) + jnp.where(bits & 0x7FFFFF, 1, 0)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, correctly rounded, of positive float32 numbers whose quotient is normal; other inputs give any number.

    In integers: XLA's own division is approximate on GPU, and a division by a constant is a multiplication everywhere.
    Neither operand has more than 24 bits, so no quotient lies halfway between two floats.
    """
    a_bits, b_bits = (lax.bitcast_convert_type(v, jnp.uint32) for v in (a, b))
    leading = jnp.uint32(1 << 23)
    a_mantissa, b_mantissa = ((bits & (leading - 1)) | leading for bits in (a_bits, b_bits))
    less = a_mantissa < b_mantissa
    remainder = jnp.where(less, a_mantissa << 1, a_mantissa) - b_mantissa  # the quotient's leading bit is one
    quotient = jnp.ones_like(remainder)
    for _ in range(3):  # eight bits at a time: 24 behind the leading one, the last of them to round by
        shifted = remainder << 8
        digit = shifted // b_mantissa
        quotient, remainder = (quotient << 8) | digit, shifted - digit * b_mantissa
    exponent = (a_bits >> 23) - (b_bits >> 23) + jnp.uint32(127) - less.astype(jnp.uint32)
    return lax.bitcast_convert_type((exponent << 23) + ((quotient + 1) >> 1) - leading, jnp.float32)


def quantize_arrays(x: jax.Array, wire: Wire, block: int | None = None) -> tuple[jax.Array, jax.Array]:
    """`x [..., H]` float -> (values `[..., H]` of the wire dtype, scales float32 `[..., ceil(H/128)]`).

    MXFP4: values uint8 `[..., 16 * ceil(H/32)]`, exponents uint8 `[..., ceil(H/32)]`.

    Args:
      block: elements that share a scale, if not as many as the format says.
    """
    qmax = WIRES[wire.dtype]
    blocks = _blocks(x.astype(jnp.float32), block or wire.block)
    magnitude = lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF  # as integers: NaN > inf > every finite value
    amax_bits = jnp.max(magnitude, axis=-1)
    finite = amax_bits < 0x7F800000
    amax = jnp.maximum(lax.bitcast_convert_type(amax_bits, jnp.float32), jnp.float32(MIN_AMAX))
    qmaxes = jnp.full_like(amax, qmax)
    scale = _divide(amax, qmaxes)
    if wire.scale_format == "ue8m0":
        scale = _power_of_two_at_least(scale)
        inverse = _divide(jnp.ones_like(scale), scale)
    else:
        inverse = _divide(qmaxes, amax)
    inverse = jnp.where(finite, inverse, 0.0)
    scaled = blocks * inverse[..., None]
    scaled = jnp.where(finite[..., None], scaled, 0.0)
    if wire.is_mxfp4:
        packed = _mxfp4.pack(_mxfp4.codes_of(scaled))
        exponents = _mxfp4.exponents_of(jnp.where(finite, scale, jnp.float32(jnp.nan)))
        return packed.reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1]), exponents
    if wire.dtype == "int8":
        scaled = jnp.clip(jnp.round(scaled), -127, 127)
    values = _mesh.divided_alike(_join(scaled.astype(wire.jnp_dtype), x.shape[-1]), x)
    return values, jnp.where(finite, scale, jnp.float32(jnp.nan))


def dequantize_arrays(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of `quantize_arrays` up to rounding: `float32(value) * scale`, rounded to `dtype`."""
    hidden = values.shape[-1]
    blocks = _blocks(values).astype(jnp.float32) * scales[..., None]
    return _mesh.divided_alike(_join(blocks, hidden).astype(dtype), values)


def from_wire(payload: tuple[jax.Array, jax.Array], wire: Wire, hidden: int, dtype: Any) -> jax.Array:
    """Inverse of `quantize_arrays` for rows of `hidden` elements, rounded to `dtype`."""
    if not wire.is_mxfp4:
        return dequantize_arrays(*payload, dtype)
    values, exponents = payload
    blocks = _blocks(_mxfp4.values_of(_mxfp4.unpack(values)), _mxfp4.BLOCK)
    return _join(blocks * _mxfp4.scales_of(exponents)[..., None], hidden).astype(dtype)


def quantize(x: jax.Array, dtype: Any = "float8_e4m3fn", scale_format: str = "float32") -> BlockScaled:
    """Quantizes `x` in blocks of 128 along its last dimension.

    Args:
      x: float array `[..., H]`; `H` need not be a multiple of 128 (the last block is short).
      dtype: "float8_e4m3fn" or "int8".
      scale_format: "float32", or "ue8m0" for scales that are powers of two (stored as float32).

    Returns:
      `BlockScaled(values [..., H], scales float32 [..., ceil(H/128)])`. A block that holds a NaN or an infinity has
      scale NaN.

    Raises:
      TypeError: `x` is not a float array, or its gradient is asked for.
      ValueError: unknown `dtype` or `scale_format`, or `x` is a scalar.
    """
    if isinstance(x, BlockScaled):
        raise TypeError("quantize: x is already a BlockScaled; dequantize() it first")
    x = array(x, "quantize", "x")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize: x has dtype {x.dtype}: must be float32, bfloat16 or float16")
    if x.ndim == 0:
        raise ValueError("quantize: x is a scalar: must have a hidden dimension to take blocks of")
    if not is_one_of(scale_format, SCALE_FORMATS):
        raise ValueError(f"quantize: scale_format={scale_format!r}: must be one of {SCALE_FORMATS}")
    name = _dtype_name(dtype)
    if name not in QMAX:
        raise ValueError(f"quantize: dtype={dtype!r}: must be one of {tuple(QMAX)}")
    return BlockScaled(*_quantized(Wire(name, scale_format), x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(wire: Wire, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`quantize_arrays` without a gradient: JAX's own would round cotangents to fp8, and lose them all in int8."""
    return quantize_arrays(x, wire)


def _refuse(wire: Wire, kept: None, cotangents: Any) -> Any:
    raise TypeError(
        f"quantize to {wire.dtype} has no gradient: its values have no room for one. Pass the float array and "
        f"wire={wire.dtype!r} to dispatch or moe_mlp, which let gradients straight through, or quantize "
        "jax.lax.stop_gradient(x)"
    )


_quantized.defvjp(lambda wire, x: (_quantized(wire, x), None), _refuse)


def dequantize(x: BlockScaled, dtype: Any = jnp.bfloat16) -> jax.Array:
    """`float32(values) * scales`, rounded to `dtype`; shape `[..., H]`.

    Raises:
      TypeError: `x` is not a `BlockScaled` of quantized values and float32 scales, or `dtype` is no float dtype.
      ValueError: the scales do not fit the values.
    """
    if not isinstance(x, BlockScaled):
        raise TypeError(f"dequantize: x is a {type(x).__name__}: must be a BlockScaled, as quantize() returns")
    for field in ("values", "scales"):
        if not isinstance(getattr(x, field), jax.Array | np.ndarray):
            raise TypeError(f"dequantize: x.{field} is a {type(getattr(x, field)).__name__}: must be an array")
    if x.values.dtype.name not in QMAX or x.scales.dtype != jnp.float32:
        raise TypeError(
            f"dequantize: x holds {x.values.dtype} values with {x.scales.dtype} scales: must be values of one of "
            f"{tuple(QMAX)} with float32 scales"
        )
    if x.values.ndim == 0:
        raise ValueError("dequantize: x.values is a scalar: must have a hidden dimension that the scales divide")
    wanted = (*x.values.shape[:-1], scale_blocks(x.values.shape[-1]))
    if x.scales.shape != wanted:  # a single block's scales would be taken for those of all blocks
        raise ValueError(
            f"dequantize: x.scales has shape {x.scales.shape}: must be {wanted}, one scale per 128 elements of x.values"
        )
    try:
        known = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"dequantize: dtype={dtype!r}: must be a float dtype")
    return dequantize_arrays(x.values, x.scales, dtype)
