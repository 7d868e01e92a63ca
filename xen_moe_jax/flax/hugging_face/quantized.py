"""Weights that checkpoints hold quantized: fp8 in blocks with scales (DeepSeek-V3), MXFP4 (gpt-oss)."""

from __future__ import annotations

import numpy as np

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1 values by their four bits (OCP Microscaling Formats, version 1.0)."""


def by_blocks(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """fp8 `[M, N]` times float32 scales `[ceil(M/b0), ceil(N/b1)]`, one per block: float32 `[M, N]`."""
    rows, columns = values.shape
    spread = np.repeat(np.repeat(np.asarray(scales, np.float32), block[0], 0), block[1], 1)
    return values.astype(np.float32) * spread[:rows, :columns]


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 blocks `[..., N/32, 16]` and uint8 exponents `[..., N/32]`, biased by 127: float32 `[..., N]`.

    A byte holds two elements, the earlier one in its low four bits.
    """
    pairs = np.stack([FP4[blocks & 0xF], FP4[blocks >> 4]], axis=-1)
    values = pairs.reshape(*blocks.shape[:-1], 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*blocks.shape[:-2], -1)
