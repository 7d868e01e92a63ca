"""Weights that checkpoints hold quantized: fp8 or int8 with scales of blocks or channels, MXFP4 (gpt-oss)."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

from xen_moe_jax._quantized_weight import MXFP4_BLOCK, QuantizedWeight

FP4 = ml_dtypes.float4_e2m1fn


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A weight, or a part of one, as a checkpoint holds it, in NumPy.

    Attributes:
      values: fp8, int8 or float4_e2m1fn `[..., M, N]`.
      scales: float32 `[..., ceil(M / block[0]), ceil(N / block[1])]`.
      block: rows and columns that share a scale.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def swapped(self) -> Shipped:
        """Returns the weight with its last two dimensions exchanged."""
        return Shipped(self.values.swapaxes(-1, -2), self.scales.swapaxes(-1, -2), self.block[::-1])

    def with_block(self, block: tuple[int, int]) -> Shipped:
        """Returns the same weight with smaller blocks, which divide the present ones."""
        scales = self.scales
        for axis, (size, now) in enumerate(zip(block, self.block, strict=True), start=-2):
            count = -(-self.shape[axis] // size)
            if scales.shape[axis] != count:
                scales = np.repeat(scales, now // size, axis).take(range(count), axis)
        return Shipped(self.values, scales, block)

    def part(self, rows: slice, columns: slice) -> Shipped:
        """Returns a part. Where it does not begin and end between blocks, it has smaller ones."""
        ranges = [s.indices(n)[:2] for s, n in zip((rows, columns), self.shape[-2:], strict=True)]
        block = tuple(
            size if end - begin == whole else math.gcd(size, begin, end)
            for (begin, end), whole, size in zip(ranges, self.shape[-2:], self.block, strict=True)
        )
        fine = self.with_block((block[0], block[1]))
        above, beside = (slice(begin // b, -(-end // b)) for (begin, end), b in zip(ranges, block, strict=True))
        return dataclasses.replace(fine, values=self.values[..., rows, columns], scales=fine.scales[..., above, beside])

    def widened(self) -> np.ndarray:
        """Returns float32 values times the scales of their blocks."""
        return self.values.astype(np.float32) * self.with_block((1, 1)).scales

    def as_weight(self) -> QuantizedWeight:
        """Returns the weight in the format of `QuantizedWeight`, still in NumPy."""
        if self.values.dtype != FP4:
            return QuantizedWeight(self.values, self.scales, self.block)
        codes = self.values.view(np.uint8)
        packed = codes[..., 0::2, :] | codes[..., 1::2, :] << 4
        exponents = (self.scales.view(np.uint32) >> 23).astype(np.uint8)  # 2 ** -127 and NaN have 0 and 255 there
        return QuantizedWeight(packed, exponents, self.block)


def stacked(parts: list[Shipped]) -> Shipped:
    """Returns one weight `[E, M, N]` of `E` parts `[M, N]`."""
    values, scales = (np.stack([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    return Shipped(values, scales, parts[0].block)


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> Shipped:
    """Returns the weight `[..., N]` of uint8 blocks `[..., N/32, 16]` and uint8 exponents `[..., N/32]`, biased by 127.

    A byte holds two elements, the earlier one in its low four bits.
    """
    pairs = np.stack([blocks & 0xF, blocks >> 4], axis=-1)
    values = pairs.reshape(*blocks.shape[:-2], -1).view(FP4)
    return Shipped(values, scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), (1, MXFP4_BLOCK))
