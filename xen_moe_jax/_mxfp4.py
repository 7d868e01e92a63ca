"""MXFP4: E2M1 numbers, two a byte, with one power of two (E8M0) for 32 of them.

OCP Microscaling Formats specification, version 1.0, sections 5.3.3 and 5.4.1. `_quantize.py` chooses the scales.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32
"""Consecutive elements that share one exponent."""
LARGEST = 6.0
"""Largest E2M1 number."""
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Numbers halfway between neighbours, and True where the larger neighbour has the even code, which a tie takes."""


def codes_of(x: jax.Array) -> jax.Array:
    """Returns the int32 codes (0 to 15) of float32 numbers, rounded to the nearest E2M1 number, ties to even.

    Numbers beyond 6 become 6.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
    code = jnp.zeros_like(bits)
    for midpoint, up in _MIDPOINTS:
        code += (magnitude >= midpoint if up else magnitude > midpoint).astype(jnp.int32)
    return code | jnp.where(bits < 0, 8, 0)


def values_of(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of E2M1 codes, int32 0 to 15: a sign, two bits of exponent, one of mantissa."""
    magnitude = codes & 7
    normal = ((magnitude >> 1) + 126 << 23) | ((magnitude & 1) << 22)
    bits = jnp.where(magnitude > 1, normal, jnp.where(magnitude == 1, 126 << 23, 0))
    return lax.bitcast_convert_type(bits | ((codes >> 3) << 31), jnp.float32)


def pack(codes: jax.Array) -> jax.Array:
    """int32 codes `[..., N]`, `N` even -> uint8 `[..., N / 2]`, the earlier one of a pair in the low four bits."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """Inverse of `pack`."""
    pairs = packed[..., None].astype(jnp.int32)
    return jnp.concatenate([pairs & 0xF, pairs >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def exponents_of(scales: jax.Array) -> jax.Array:
    """Returns the uint8 exponents, biased by 127, of powers of two in float32; 255 for NaN."""
    return ((lax.bitcast_convert_type(scales, jnp.int32) >> 23) & 0xFF).astype(jnp.uint8)


def scales_of(exponents: jax.Array) -> jax.Array:
    """Returns float32 `2 ** (exponents - 127)`, and NaN for 255."""
    bits = exponents.astype(jnp.int32)
    bits = jnp.where(bits == 0, 1 << 22, jnp.where(bits == 255, 0x7FC00000, bits << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)
