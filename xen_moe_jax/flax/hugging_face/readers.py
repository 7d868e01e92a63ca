"""Readers return a parameter's part in the layer's own shape, from the tensors of a checkpoint.

torch keeps matrices as `[out, in]`; this library multiplies by `[in, out]`. A reader is given the part wanted, in the
layer's own shape, and reads that part of the file. A weight that is stored quantized is returned as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xen_moe_jax.flax.hugging_face import quantized
from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint, Index
from xen_moe_jax.flax.hugging_face.quantized import Shipped

Reader = Callable[[Index], np.ndarray | Shipped]


def _swapped(array: np.ndarray | Shipped) -> np.ndarray | Shipped:
    return array.swapped() if isinstance(array, Shipped) else array.swapaxes(-1, -2)


def transposed(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads `[out, in]` as `[in, out]`, from any stored dtype."""

    def read(index: Index) -> np.ndarray | Shipped:
        rows, columns = index
        return _swapped(matrix(checkpoint, name, (columns, rows)))

    return read


def matrix(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray | Shipped:
    """Reads a part of a matrix `[out, in]`, together with a `_scale_inv` (of blocks) or `_scale` (of channels)."""
    blocks, channels = f"{name}_scale_inv", f"{name}_scale"
    if blocks in checkpoint:
        block = checkpoint.config.get("quantization_config", {}).get("weight_block_size", (128, 128))
        scales, size = checkpoint.read(blocks), (int(block[0]), int(block[1]))
    elif channels in checkpoint:
        rows, columns = checkpoint.shape(name)
        scales, size = checkpoint.read(channels).reshape(-1, 1), (1, columns)
        if scales.shape != (rows, 1):
            raise ValueError(
                f"{channels} has shape {list(checkpoint.shape(channels))}: must have one scale for each of the {rows} "
                f"rows of {name}; load a checkpoint in bfloat16"
            )
    else:
        return checkpoint.read(name, index)
    whole = Shipped(checkpoint.read(name), scales.astype(np.float32), size)
    return whole.part(*index)


def vector(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads a tensor in its stored shape and dtype."""
    return lambda index: checkpoint.read(name, index)


def matrices(checkpoint: Checkpoint, template: str, num_experts: int) -> Reader:
    """Reads one `[out, in]` matrix an expert as `[E, in, out]`."""

    def read(index: Index) -> np.ndarray | Shipped:
        which, rows, columns = index
        parts = [matrix(checkpoint, template.format(e), (columns, rows)) for e in range(*which.indices(num_experts))]
        shipped = [part for part in parts if isinstance(part, Shipped)]
        if not shipped:
            return np.stack([part.T for part in parts if not isinstance(part, Shipped)])
        if len(shipped) < len(parts):
            raise ValueError(
                f"{template.format('*')}: {len(shipped)} of {len(parts)} experts have scales; must all or none"
            )
        return quantized.stacked(shipped).swapped()

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

    def read(index: Index) -> np.ndarray | Shipped:
        *before, last = index
        begin, end, _ = last.indices(1 << 62)
        both = slice(2 * begin, None if last.stop is None else 2 * end)
        found = stacked(checkpoint, name, (*before, both))
        if isinstance(found, Shipped):  # in MXFP4, whose blocks are one column wide
            return Shipped(found.values[..., offset::2], found.scales[..., offset::2], found.block)
        return found[..., offset::2]

    return read


def stacked(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray | Shipped:
    """Reads a part of `[E, in, out]`, or of MXFP4 weights stored as `[E, out, in]` in blocks of 32 along `in`."""
    if f"{name}_blocks" not in checkpoint:
        return checkpoint.read(name, index)
    which, rows, columns = index
    part = (which, columns)
    whole = quantized.mxfp4(checkpoint.read(f"{name}_blocks", part), checkpoint.read(f"{name}_scales", part))
    return whole.swapped().part(rows, slice(None))
