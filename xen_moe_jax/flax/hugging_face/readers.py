"""Readers return a parameter's part in the layer's own shape, from the tensors of a checkpoint.

torch keeps matrices as `[out, in]`; this library multiplies by `[in, out]`. A reader is given the part wanted, in the
layer's own shape, and reads that part of the file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xen_moe_jax.flax.hugging_face import quantized
from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint, Index

Reader = Callable[[Index], np.ndarray]


def transposed(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads `[out, in]` as `[in, out]`, from any stored dtype."""

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        return matrix(checkpoint, name, (columns, rows)).T

    return read


def matrix(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    """Reads a part of a matrix in its stored dtype; fp8 with a `_scale_inv` beside it is returned in float32."""
    scale = f"{name}_scale_inv"
    if scale not in checkpoint:
        return checkpoint.read(name, index)
    block = tuple(checkpoint.config.get("quantization_config", {}).get("weight_block_size", (128, 128)))
    return quantized.by_blocks(checkpoint.read(name), checkpoint.read(scale), block)[index]


def vector(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads a tensor in its stored shape and dtype."""
    return lambda index: checkpoint.read(name, index)


def matrices(checkpoint: Checkpoint, template: str, num_experts: int) -> Reader:
    """Reads one `[out, in]` matrix an expert as `[E, in, out]`."""

    def read(index: Index) -> np.ndarray:
        which, rows, columns = index
        numbers = range(*which.indices(num_experts))
        return np.stack([matrix(checkpoint, template.format(e), (columns, rows)).T for e in numbers])

    return read


def fused(checkpoint: Checkpoint, name: str, *, out_first: bool, part: int = 0, parts: int = 1) -> Reader:
    """Reads part `part` of the output dimension, cut into `parts`, of one tensor as `[..., in, out / parts]`.

    Gate and up are the two halves of one tensor in many checkpoints, with or without a first dimension for experts.

    Args:
      out_first: True for `[..., out, in]`, False for `[..., in, out]`.
    """

    def read(index: Index) -> np.ndarray:
        *before, rows, columns = index
        size = checkpoint.shape(name)[-2 if out_first else -1] // parts
        begin, end, _ = columns.indices(size)
        columns = slice(begin + part * size, end + part * size)
        if not out_first:
            return checkpoint.read(name, (*before, rows, columns))
        return checkpoint.read(name, (*before, columns, rows)).swapaxes(-1, -2)

    return read


def every_other(checkpoint: Checkpoint, name: str, offset: int) -> Reader:
    """Reads every second element of the last dimension, from `offset` on: gate and up take turns in gpt-oss."""

    def read(index: Index) -> np.ndarray:
        *before, last = index
        begin, end, _ = last.indices(1 << 62)
        both = slice(2 * begin, None if last.stop is None else 2 * end)
        return stacked(checkpoint, name, (*before, both))[..., offset::2]

    return read


def stacked(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    """Reads a part of `[E, in, out]`, or of MXFP4 weights stored as `[E, out, in]` in blocks of 32 along `in`."""
    if f"{name}_blocks" not in checkpoint:
        return checkpoint.read(name, index)
    which, rows, columns = index
    part = (which, columns)
    whole = quantized.mxfp4(checkpoint.read(f"{name}_blocks", part), checkpoint.read(f"{name}_scales", part))
    return whole[:, :, rows].swapaxes(1, 2)
