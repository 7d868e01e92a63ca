"""Readers return a parameter's part in the layer's own shape, from the tensors of a checkpoint.

torch keeps matrices as `[out, in]`; this library multiplies by `[in, out]`. A reader is given the part wanted, in the
layer's own shape, and reads that part of the file. A weight that is stored quantized is returned as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from xen_moe_jax._numbers import as_int
from xen_moe_jax._quantized_weight import SCALED
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
    """Reads a part of a matrix `[out, in]`, together with a `_scale_inv` (of blocks) or `_scale` (of channels).

    Raises ValueError unless types and shapes of both fit.
    """
    rows, columns = checkpoint.shape(name, 2)
    blocks, channels = f"{name}_scale_inv", f"{name}_scale"
    if blocks in checkpoint:
        beside, block = blocks, _block_size(checkpoint)
        count = -(-rows // block[0]), -(-columns // block[1])
        wanted = f"one scale for each block of {list(block)}"
    elif channels in checkpoint:
        beside, block, count = channels, (1, columns), (rows, 1)
        wanted = f"one scale for each of the {rows} rows"
    else:
        return checkpoint.read(name, index)
    values, scales = checkpoint.read(name), checkpoint.read(beside)
    if values.dtype.name not in SCALED or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{name} is {values.dtype} and {beside} {scales.dtype}: values with scales must be one of {SCALED}, and "
            "scales floating point; load a checkpoint in bfloat16"
        )
    if scales.shape not in (count, count[:1] if beside == channels else count):
        raise ValueError(
            f"{beside} has shape {list(scales.shape)}: must have {wanted} of {name}, {list(count)}; load a checkpoint "
            "in bfloat16"
        )
    return Shipped(values, scales.reshape(count).astype(np.float32), block).part(*index)


def _block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Returns rows and columns that share a scale: those of the config, or DeepSeek-V3's."""
    found = checkpoint.config.get("quantization_config")
    given = found.get("weight_block_size") if isinstance(found, dict) else None
    given = (128, 128) if given is None else given
    if not isinstance(given, list | tuple) or len(given) != 2 or any((as_int(size) or 0) < 1 for size in given):
        raise ValueError(
            f"config.json has quantization_config.weight_block_size={given!r}: must be two positive ints, rows and "
            "columns of a scale"
        )
    return given[0], given[1]


def vector(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads a tensor in its stored shape and dtype."""
    return lambda index: checkpoint.read(name, index)


def matrices(checkpoint: Checkpoint, template: str, num_experts: int) -> Reader:
    """Reads one `[out, in]` matrix an expert as `[E, in, out]`.

    Raises:
      ValueError: the checkpoint has more experts.
    """
    if (more := template.format(num_experts)) in checkpoint:
        raise ValueError(
            f"{more}: config.json counts {num_experts} experts; put the config.json of this checkpoint there"
        )

    def read(index: Index) -> np.ndarray | Shipped:
        which, rows, columns = index
        first = template.format(0)
        for name in map(template.format, range(*which.indices(num_experts))):
            if checkpoint.described(name) != checkpoint.described(first):
                raise ValueError(
                    f"{name} is {checkpoint.described(name)} and {first} {checkpoint.described(first)}: a layer's "
                    "experts must have one shape and type; fetch the file again, or load a checkpoint in bfloat16"
                )
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
        shape = checkpoint.shape(name, len(index))
        size, rest = divmod(shape[-2 if out_first else -1], parts)
        if rest:
            raise ValueError(
                f"{name} has shape {list(shape)}: its outputs must be {parts} equal parts, one per parameter"
            )
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
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    *outer, _ = checkpoint.shape(blocks, 4)
    given = checkpoint.described(blocks), checkpoint.described(scales)
    if given != (f"U8{[*outer, 16]}", f"U8{outer}"):
        raise ValueError(
            f"{blocks} is {given[0]} and {scales} {given[1]}: must be U8[experts, outputs, inputs / 32, 16] and "
            "U8[experts, outputs, inputs / 32]"
        )
    part = (which, columns)
    whole = quantized.mxfp4(checkpoint.read(blocks, part), checkpoint.read(scales, part))
    return whole.swapped().part(rows, slice(None))
