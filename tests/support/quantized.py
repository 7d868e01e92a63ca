"""Random weights in every format of `QuantizedWeight`, in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import xen_moe_jax as xm

FORMATS = ("fp8 blocks", "fp8 channels", "e5m2 blocks", "int8 channels", "MXFP4")


def quantized_weight(name: str, groups: int, depth: int, columns: int, seed: int = 0) -> xm.QuantizedWeight:
    """A weight `[groups, depth, columns]` whose elements are about `depth ** -0.5`."""
    rng = np.random.default_rng(seed + depth)
    if name == "MXFP4":
        codes = rng.integers(0, 256, (groups, depth // 2, columns), np.uint8)
        return xm.QuantizedWeight(codes, rng.integers(118, 124, (groups, depth // 32, columns), np.uint8), (32, 1))
    dtype, largest = {
        "e": (ml_dtypes.float8_e5m2, 100.0),
        "i": (np.int8, 40.0),
        "f": (ml_dtypes.float8_e4m3fn, 100.0),
    }[name[0]]
    block = (128, 128) if "blocks" in name else (depth, 1)
    values = np.clip(rng.normal(size=(groups, depth, columns)) * largest, -127, 127)
    values = (np.round(values) if dtype is np.int8 else values).astype(dtype)
    shape = (groups, -(-depth // block[0]), -(-columns // block[1]))
    scales = (rng.uniform(0.5, 2.0, shape) / (largest * depth**0.5)).astype(np.float32)
    return xm.QuantizedWeight(values, scales, block)


def widen_in_numpy(weight: xm.QuantizedWeight, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    """`weight.widen(dtype)`, written down a second time."""
    *before, depth, columns = weight.shape
    values, scales = np.asarray(weight.values), np.asarray(weight.scales)
    if weight.is_mxfp4:
        codes = np.stack([values & 15, values >> 4], axis=-2).reshape(*before, depth, columns)
        values = codes.view(ml_dtypes.float4_e2m1fn)
        scales = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float32) - 127))
    for axis, size in zip((-2, -1), weight.block, strict=True):
        scales = np.repeat(scales, size, axis=axis).take(range(weight.shape[axis]), axis=axis)
    return (values.astype(np.float32) * scales.astype(np.float32)).astype(dtype)
