"""Format of one row on the wire: a `(rows, 128)` block of int32 words.

Values of 1 or 2 bytes share words by column, not by row: word `j` of a row holds elements `j`, `j + W`, `j + 2W`, ...
(`W` words). So packing is shifts and ors on whole vectors, a row is one contiguous block at any row number, and one
DMA carries a row of any dtype together with its scales, which follow the values as float32 bits, 128 to a block row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128


@dataclasses.dataclass(frozen=True)
class Record:
    """Shape of one row on the wire.

    Attributes:
      hidden: elements of a row, a multiple of 128.
      dtype: dtype name of the values that travel.
      scaled: True if one float32 scale per 128 elements travels with them.
      header: words of routing that travel with them, in the last lanes of the last block row: beside the scales where
        there is room, else in a block row of their own.
    """

    hidden: int
    dtype: str
    scaled: bool = False
    header: int = 0

    @property
    def chunks(self) -> int:
        """Blocks of 128 elements."""
        return self.hidden // LANES

    @property
    def per_word(self) -> int:
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def value_rows(self) -> int:
        return -(-self.chunks // self.per_word)

    @property
    def scale_rows(self) -> int:
        return -(-self.chunks // LANES) if self.scaled else 0

    @property
    def header_rows(self) -> int:
        """Block rows that only the header needs."""
        room = self.scale_rows * LANES - self.chunks if self.scaled else 0
        return 1 if self.header > room else 0

    @property
    def header_row(self) -> int:
        """The block row that the header is in, if there is one."""
        return self.shape[0] - 1

    @property
    def shape(self) -> tuple[int, int]:
        return (self.value_rows + self.scale_rows + self.header_rows, LANES)

    @property
    def bytes(self) -> int:
        return self.shape[0] * LANES * 4


class Quantization(NamedTuple):
    """Parameters of the quantization rule of docs/design/internals.md.

    Attributes:
      dtype: dtype name of the quantized values.
      scale_format: "float32", or "ue8m0" for powers of two.
      qmax: largest magnitude of a quantized value.
      min_amax: smallest magnitude that a block is scaled by; blocks of smaller values use it.
    """

    dtype: str
    scale_format: str
    qmax: float
    min_amax: float


@dataclasses.dataclass(frozen=True)
class Header:
    """Routing that travels in a record: where each of its token's slots belongs, the same for every destination.

    Attributes:
      top_k: slots of a token.
      experts, rows, weights, token: lanes at which they begin: experts (global, `-1` for none), rows of their ranks'
        results (negative: dropped), bits of float32 weights, `top_k` of each; number of the token.
    """

    top_k: int

    @property
    def words(self) -> int:
        return 3 * self.top_k + 1

    @property
    def experts(self) -> int:
        return LANES - self.words

    @property
    def rows(self) -> int:
        return self.experts + self.top_k

    @property
    def weights(self) -> int:
        return self.rows + self.top_k

    @property
    def token(self) -> int:
        return LANES - 1


def bits_of(values: jax.Array, dtype: str) -> jax.Array:
    """Values that are exact in `dtype` -> their bits in the low end of int32."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 4:
        return lax.bitcast_convert_type(values.astype(dtype), jnp.int32)
    if itemsize == 2:
        wide = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
        return lax.shift_right_logical(wide, jnp.int32(16))
    if dtype == "int8":
        return values.astype(jnp.int32) & 0xFF
    return lax.bitcast_convert_type(values.astype(dtype), jnp.int8).astype(jnp.int32) & 0xFF


def values_of(word: jax.Array, part: int, dtype: str) -> jax.Array:
    """float32 value number `part` of each int32 word."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 4:
        return lax.bitcast_convert_type(word, jnp.float32)
    if itemsize == 2:
        wide = word & jnp.int32(-65536) if part else word << 16
        return lax.bitcast_convert_type(wide, jnp.float32)
    byte = lax.shift_right_arithmetic(word << (24 - 8 * part), jnp.int32(24))
    if dtype == "int8":
        return byte.astype(jnp.float32)
    return lax.bitcast_convert_type(byte.astype(jnp.int8), jnp.dtype(dtype)).astype(jnp.float32)


def encode(
    record: Record,
    chunk: Callable[[int], jax.Array],
    scale: Callable[[int], jax.Array] | None,
    put: Callable[[int, jax.Array], None],
    rows: int,
    header: jax.Array | None = None,
) -> None:
    """Encodes a block of `B` rows as records.

    Args:
      chunk: number of a 128-element block -> its values `[B, 128]`, exact in `record.dtype`. Called once per block.
      scale: number of a block -> its scale float32 `[B, 1]`, called after `chunk` of the same number; None without
        scales.
      put: takes number and value of each block row, int32 `[B, 128]`.
      header: int32 `[B, 128]`, zeros but for its last lanes, where the record has one.
    """
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    scale_words = [jnp.zeros((rows, LANES), jnp.float32) for _ in range(record.scale_rows)]
    shift = 32 // record.per_word
    for j in range(record.value_rows):
        word = None
        for part in range(record.per_word):
            c = part * record.value_rows + j
            if c >= record.chunks:
                break
            bits = bits_of(chunk(c), record.dtype)
            word = bits if word is None else word | (bits << (shift * part))
            if scale is not None:
                row = c // LANES
                scale_words[row] = jnp.where(lane == c % LANES, scale(c), scale_words[row])
        assert word is not None
        put(j, word)
    last = [lax.bitcast_convert_type(words, jnp.int32) for words in scale_words]
    if header is not None:
        last = [*last, header] if record.header_rows else [*last[:-1], last[-1] | header]
    for row, bits in enumerate(last):
        put(record.value_rows + row, bits)


def decode_scale(record: Record, load: Callable[[int], jax.Array], c: int) -> jax.Array:
    """Scale `[B, 1]` of 128-element block `c`; `load` gives block row `j` as int32 `[B, 128]`."""
    words = load(record.value_rows + c // LANES)
    lane = c % LANES
    return lax.bitcast_convert_type(words, jnp.float32)[:, lane : lane + 1]


def decode_values(record: Record, load: Callable[[int], jax.Array], c: int) -> jax.Array:
    """Values float32 `[B, 128]` of 128-element block `c`, not multiplied by any scale."""
    part, j = divmod(c, record.value_rows)
    return values_of(load(j), part, record.dtype)


def decode(record: Record, load: Callable[[int], jax.Array], c: int) -> jax.Array:
    """Values float32 `[B, 128]` of block `c`, scaled where the record has scales."""
    values = decode_values(record, load, c)
    return values * decode_scale(record, load, c) if record.scaled else values


def quantize_chunk(x: jax.Array, how: Quantization) -> tuple[jax.Array, jax.Array]:
    """Quantizes one block by the rule of docs/design/internals.md.

    Takes float32 `[B, 128]`; returns values of `how.dtype` and their scales, float32 `[B, 1]`.
    """
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)  # a NaN counts as an infinity
    amax = jnp.max(magnitude, axis=-1, keepdims=True)
    finite = amax < jnp.inf
    amax = jnp.maximum(jnp.where(finite, amax, 1.0), jnp.float32(how.min_amax))
    # Always qmax, but not a constant: XLA would turn the division into a multiplication by an inexact 1 / qmax.
    qmax = jnp.where(amax > 0.0, jnp.float32(how.qmax), 1.0)
    scale = amax / qmax
    if how.scale_format == "ue8m0":
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        exponent = (bits >> 23) + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
        inverse = 1.0 / scale
    else:
        inverse = qmax / amax
    scaled = jnp.where(finite, x * inverse, 0.0)
    if how.dtype == "int8":
        values = jnp.clip(jnp.round(scaled), -127.0, 127.0).astype(jnp.int32)
    else:
        values = scaled.astype(how.dtype)
    return values, jnp.where(finite, scale, jnp.nan)
