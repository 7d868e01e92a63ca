"""Weights of one byte in the decode kernels: they travel as they are, and are scaled behind the sum.

The matrix units of v5e and of later chips multiply bfloat16 by fp8. Other weights of one byte are converted before the
matrix units get them: fp8 on v4 and beside float32 rows, and int8. A value of fp8 or int8 is exact in bfloat16, so a
slab's product is that of its values. On v5e, v5p and v6e a NaN in fp8 weights counts as 480, because the matrix units'
own fp8 has a number in the place of the NaN.

Scales of blocks multiply the sums of `BLOCK` products, since a block is at least so many rows high; scales of channels
multiply the whole sum once. That is the product with widened weights but for the rounding of each widened weight, which
this kernel does not make: both are equal where scales are powers of two. Scaling sums takes far fewer operations than
scaling weights: an expert has 16 to 64 rows here, and a block 128.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from xen_moe_jax.pallas_kernels.launch import precision

BLOCK = 128
"""Rows and columns that scales of blocks may differ by."""


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales of one matrix `[L, A, B]`.

    Attributes:
      ref: blocks: float32 `[L * ceil(A / a) * ceil(B / b)]` in SMEM, a matrix's rows one after the other. Channels:
        float32 `[L, B]` in VMEM.
      block: `(a, b)`, both multiples of `BLOCK`; None for channels.
      shape: `[L, A, B]`.
      widened: True converts fp8 before it is multiplied by bfloat16; with False the matrix units take it as it is.
    """

    ref: Any
    block: tuple[int, int] | None
    shape: tuple[int, ...]
    widened: bool

    def product(self, left: jax.Array, buffer: Any, row: Any, at: Any, size: int, expert: Any) -> jax.Array:
        """Returns the sums of a slab's products for `size` columns, which channels' scales have still to multiply.

        Args:
          left: `[m, k]`, rows. buffer: ref of the slab, `[k, B]`, which begins at row `row` of the matrix.
          at: first of the columns.
        """
        depth, columns = left.shape[1], pl.ds(at, size)
        dot = functools.partial(jnp.dot, precision=precision(left.dtype), preferred_element_type=jnp.float32)

        def values(rows: Any) -> jax.Array:
            found = buffer[rows, columns]
            multiplied = not self.widened and (left.dtype, found.dtype) == (jnp.bfloat16, jnp.float8_e4m3fn)
            return found if multiplied else found.astype(left.dtype)

        if self.block is None:
            return dot(left, values(slice(None)))
        total = None
        for k in range(0, depth, BLOCK):
            rows = pl.ds(k, min(BLOCK, depth - k))
            part = dot(left[:, k : k + BLOCK], values(rows))
            part = part * self._of_columns(expert, row + k, at, size)
            total = part if total is None else total + part
        assert total is not None  # a slab has rows
        return total

    def _of_columns(self, expert: Any, row: Any, at: Any, size: int) -> jax.Array:
        """Returns float32 `[1, size]`, the scale of each column of blocks that hold row `row`."""
        assert self.block is not None
        _, rows, columns = self.shape
        above, beside = (-(-n // b) for n, b in zip((rows, columns), self.block, strict=True))
        first = (expert * above + jax.lax.div(jnp.int32(row), jnp.int32(self.block[0]))) * beside
        pieces = []
        for offset in range(0, size, BLOCK):
            scale = self.ref[first + jax.lax.div(jnp.int32(at + offset), jnp.int32(self.block[1]))]
            pieces.append(jnp.full((1, min(BLOCK, size - offset)), scale, jnp.float32))
        return jnp.concatenate(pieces, axis=1)

    def finish(self, total: jax.Array, expert: Any, at: Any) -> jax.Array:
        """Returns sums times the scales of channels."""
        return total if self.block is not None else total * self.ref[pl.ds(expert, 1), at]


def scales_of(refs: Any, blocks: dict[str, tuple[int, int] | None], widened: bool) -> dict[str, Scales]:
    """Returns the scales of a kernel's matrices by their names, from the references `{name}` and `{name}_scales`."""
    return {
        name: Scales(getattr(refs, f"{name}_scales"), block, getattr(refs, name).shape, widened)
        for name, block in blocks.items()
    }


def supports(values: Any, scales: Any, block: tuple[int, int]) -> bool:
    """True for weights that the kernel reads as they are: one byte a value, whole tiles of 32 rows, and scales of
    channels or of blocks that are multiples of 128 x 128."""
    whole = values.shape[-2] % 32 == 0 and values.shape[-1] % 32 == 0
    of_channels = scales.shape[-2] == 1 and block[1] == 1
    of_blocks = block[0] % BLOCK == 0 and block[1] % BLOCK == 0
    return values.dtype.name in ("float8_e4m3fn", "int8") and whole and (of_channels or of_blocks)
