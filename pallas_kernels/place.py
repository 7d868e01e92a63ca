"""Staged records -> rows of `routed.x`.

What moves: for each block of output rows, the records that belong there, by one local DMA each, into VMEM; there they
are unpacked, dequantised where asked, and leave as a block in XLA's own layout of `[C, H]`. A record that several
experts need is read once for each of them; padding rows are zeros that never were in memory. Blocks without live rows
are not visited at all. Where a device has two cores, each visits one half of the blocks; where they do not halve, the
last one is visited twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import gather
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, divided, for_row_groups, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Record, decode, decode_scale, decode_values


@dataclasses.dataclass(frozen=True)
class _Refs:
    blocks: Any
    last: Any
    gathered: Any
    now: Any
    following: Any
    staged: Any
    out: Any
    buffer: Any
    semaphore: Any
    scales: Any = None
    header: Any = None


def _body(refs: _Refs, *, record: Record, padding_rows: bool) -> None:
    keep_scales = refs.scales is not None

    def start(table: Any, slot: Any) -> None:
        gather.start_rows(table, refs.staged, refs.buffer.at[slot], refs.semaphore.at[slot], zero_others=padding_rows)

    def wait(slot: Any) -> None:
        gather.await_rows(refs.buffer.at[slot], refs.gathered[0, 0, 0], refs.semaphore.at[slot])

    slot = gather.double_buffered(start, wait, refs.now, refs.following)

    def write(rows: Any) -> None:
        load = gather.rows_in(refs.buffer.at[slot], rows.start, rows.size)
        for c in range(record.chunks):
            values = decode_values(record, load, c) if keep_scales else decode(record, load, c)
            refs.out[rows, c * LANES : (c + 1) * LANES] = values.astype(refs.out.dtype)
            if keep_scales:
                refs.scales[rows, c : c + 1] = decode_scale(record, load, c)
        if refs.header is not None:
            refs.header[rows, :] = load(record.header_row)

    for_row_groups(refs.out.shape[0], tile_rows(refs.out.dtype), write)


def vmem_bytes(record: Record, out_dtype: Any, keep_scales: bool, keep_header: bool, block: int) -> int:
    """VMEM that a block size needs: two record buffers and two output blocks (pipelined)."""
    row = record.hidden * jnp.dtype(out_dtype).itemsize + (4 * LANES * record.scale_rows if keep_scales else 0)
    row += 4 * LANES if keep_header else 0
    return 2 * block * (record.bytes + row)


def smem_bytes(blocks: int, block: int) -> int:
    """SMEM: which blocks are visited, and two blocks of each of two tables."""
    return 4 * (blocks + 4 * block)


def place(
    staged: jax.Array,
    source: jax.Array,
    live: jax.Array,
    *,
    record: Record,
    out_dtype: Any,
    keep_scales: bool,
    padding_rows: bool,
    launch: Launch,
    keep_header: bool = False,
) -> tuple[jax.Array, ...]:
    """Builds rows from staged records.

    Args:
      staged: int32 `[N, *record.shape]`.
      source: int32 `[C]`, staged record of each row, `-1` for none.
      live: bool `[C]`, rows that are specified; blocks of rows without any are left unwritten.
      padding_rows: rows without a record are zero; otherwise they are unspecified.
      keep_scales: results are the values as they travelled and their scales, not their product.
      keep_header: the block row with the header is a result, too; unspecified where there is no record.

    Returns:
      `(rows [C, hidden],)` of `out_dtype`, with `keep_scales` also float32 `[C, chunks]`, with `keep_header` also int32
      `[C, 128]`.
    """
    rows = source.shape[0]
    block = block_rows(launch.block, rows, tile_rows(out_dtype))
    steps = -(-rows // block)
    pad = steps * block - rows
    table = jnp.pad(source, (0, pad), constant_values=-1).reshape(steps, 1, block)
    wanted = jnp.any(jnp.pad(live, (0, pad)).reshape(steps, block), axis=1)
    blocks = jnp.argsort(~wanted, stable=True).astype(jnp.int32)
    num_blocks = jnp.maximum(jnp.sum(wanted, dtype=jnp.int32), 1)
    gathered = jnp.sum(table >= 0, axis=2, keepdims=True, dtype=jnp.int32)

    each = divided(num_blocks, launch.cores)

    def visited(core: Any, i: Any, blocks: Any, last: Any) -> Any:
        return blocks[jnp.minimum(core * pl.num_programs(1) + i, last[0])]

    def table_of(ahead: int, count: int) -> Any:
        def at(core: Any, i: Any, *known: Any) -> Any:
            return visited(core, i + ahead, *known), 0, 0

        return pl.BlockSpec((1, 1, count), at, memory_space=pltpu.SMEM)

    def rows_of_block(core: Any, i: Any, *known: Any) -> Any:
        return visited(core, i, *known), 0

    out_specs = [pl.BlockSpec((block, record.hidden), rows_of_block)]
    out_shape = [((rows, record.hidden), out_dtype)]
    if keep_scales:
        out_specs.append(pl.BlockSpec((block, record.chunks), rows_of_block))
        out_shape.append(((rows, record.chunks), jnp.float32))
    if keep_header:
        out_specs.append(pl.BlockSpec((block, LANES), rows_of_block))
        out_shape.append(((rows, LANES), jnp.int32))
    return tuple(
        launch.call(
            functools.partial(_body, record=record, padding_rows=padding_rows),
            _Refs,
            ["blocks", "last", "gathered", "now", "following", "staged", "out"]
            + (["scales"] if keep_scales else [])
            + (["header"] if keep_header else [])
            + ["buffer", "semaphore"],
            name="xen_moe_place",
            remote=False,
            by_dma=False,
            shared=True,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(launch.cores, each),
                in_specs=[table_of(0, 1), table_of(0, block), table_of(1, block), pl.BlockSpec(memory_space=pltpu.HBM)],
                out_specs=out_specs,
                scratch_shapes=gather.buffers(record, block),
            ),
            out_shape=out_shape,
        )(blocks, (num_blocks - 1).reshape(1), gathered, table, table, staged)
    )
