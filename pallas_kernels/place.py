"""Staged records -> rows of `routed.x`.

What moves: for each block of output rows, one local DMA a row fetches its record into VMEM. The kernel unpacks the
records there, dequantizes them where asked, and stores the block in XLA's own layout of `[C, H]`. A record that several
experts need is read once for each of them; padding rows are zeros that are never read. Blocks without live rows are not
visited. Where a device has two cores, each visits one half of the blocks; of an odd number, both visit the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import gather
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, divided, for_row_groups, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Record, decode, decode_scale, decode_values

TOKEN_BITS = 16
"""Record `token` of `source` of `[R, S, T, 128]` has the number `source << TOKEN_BITS | token`."""


@dataclasses.dataclass(frozen=True)
class Visits:
    """The `last[0] + 1` visits of `place`: visit `v` writes block `blocks[v]` of the rows.

    Attributes:
      blocks: int32 `[V]`. gathered: int32 `[V]`, number of records that each visit fetches.
      last: int32 `[N]`, whose first entry is the number of the last visit.
      records: int32 `[V * block]` at least, record of each row in the numbering of `TOKEN_BITS`; `-1` for none.
      block: rows of a block.
    """

    blocks: jax.Array
    last: jax.Array
    gathered: jax.Array
    records: jax.Array
    block: int


@dataclasses.dataclass(frozen=True)
class _Refs:
    blocks: Any
    last: Any
    gathered: Any
    staged: Any
    out: Any
    buffer: Any
    semaphore: Any
    now: Any = None
    following: Any = None
    records: Any = None
    scales: Any = None
    header: Any = None
    into: Any = None


def _body(refs: _Refs, *, record: Record, padding_rows: bool) -> None:
    """Body of the kernel. Tables arrive block by block, `now` and `following`, or all at once, `records`."""
    block = refs.out.shape[0]

    def start_block(number: Any, at: Any, slot: Any) -> None:
        target, semaphore = refs.buffer.at[slot], refs.semaphore.at[slot]
        gather.start_rows(number, block, at, target, semaphore, zero_others=padding_rows)

    def start(table: Any, slot: Any) -> None:
        start_block(lambda n: table[0, 0, n], lambda row: refs.staged.at[row], slot)

    def start_visit(visit: Any, slot: Any) -> None:
        def at(number: Any) -> Any:
            token = number & ((1 << TOKEN_BITS) - 1)
            return refs.staged.at[lax.shift_right_logical(number, TOKEN_BITS), :, token]

        start_block(lambda n: refs.records[visit * block + n], at, slot)

    def wait(slot: Any, gathered: Any) -> None:
        gather.await_rows(refs.buffer.at[slot], gathered, refs.semaphore.at[slot])

    if refs.records is None:
        slot = gather.double_buffered(start, lambda slot: wait(slot, refs.gathered[0, 0, 0]), refs.now, refs.following)
    else:
        now, following = (_visit(pl.program_id(0), pl.program_id(1) + n, refs.last) for n in range(2))
        slot = gather.double_buffered(start_visit, lambda slot: wait(slot, refs.gathered[now]), now, following)
    _write(refs, record, slot)


def _visit(core: Any, turn: Any, last: Any) -> Any:
    return jnp.minimum(core * pl.num_programs(1) + turn, last[0])


def _write(refs: _Refs, record: Record, slot: Any) -> None:
    keep_scales = refs.scales is not None

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
    """SMEM of the list of visited blocks, and of two blocks of each of two tables."""
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
    into: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Builds rows from staged records.

    Args:
      staged: int32 `[N, *record.shape]`.
      source: int32 `[C]`, staged record of each row, `-1` for none.
      live: bool `[C]`, rows that are specified; blocks of rows without any are left unwritten.
      padding_rows: rows without a record are zero; otherwise they are unspecified.
      keep_scales: results are the values as they travelled and their scales, not their product.
      keep_header: the block row with the header is a result, too; unspecified where there is no record.
      into: `[C, hidden]`, which becomes the result: its rows outside of the visited blocks stay. Rows are the only
        result then.

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

    def table_of(ahead: int, count: int) -> Any:
        def at(core: Any, turn: Any, blocks: Any, last: Any) -> Any:
            return blocks[_visit(core, turn + ahead, last)], 0, 0

        return pl.BlockSpec((1, 1, count), at, memory_space=pltpu.SMEM)

    hbm, given = pl.BlockSpec(memory_space=pltpu.HBM), [] if into is None else [into]
    return _launched(
        ["blocks", "last", "gathered", "now", "following", "staged", *["into"] * len(given)],
        [table_of(0, 1), table_of(0, block), table_of(1, block), hbm, *[hbm] * len(given)],
        (blocks, (num_blocks - 1).reshape(1), gathered, table, table, staged, *given),
        num_blocks=num_blocks,
        rows=rows,
        block=block,
        record=record,
        out_dtype=out_dtype,
        keep_scales=keep_scales,
        keep_header=keep_header,
        padding_rows=padding_rows,
        launch=launch,
    )


def _launched(
    names: list[str],
    in_specs: list[Any],
    operands: tuple[jax.Array, ...],
    *,
    num_blocks: jax.Array,
    rows: int,
    block: int,
    record: Record,
    out_dtype: Any,
    keep_scales: bool,
    keep_header: bool,
    padding_rows: bool,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on `operands`, which the body finds in `_Refs` by `names`.

    The last `len(in_specs)` operands are blocked by `in_specs`; the ones in front, `blocks` and `last` among them, are
    prefetched scalars.
    """

    def rows_of_block(core: Any, turn: Any, blocks: Any, last: Any, *_: Any) -> Any:
        return blocks[_visit(core, turn, last)], 0

    results = [("out", record.hidden, out_dtype)]
    if keep_scales:
        results.append(("scales", record.chunks, jnp.float32))
    if keep_header:
        results.append(("header", LANES, jnp.int32))
    return tuple(
        launch.call(
            functools.partial(_body, record=record, padding_rows=padding_rows),
            _Refs,
            [*names, *(name for name, _, _ in results), "buffer", "semaphore"],
            name="xen_moe_place",
            remote=False,
            by_dma=False,
            shared=True,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(operands) - len(in_specs),
                grid=(launch.cores, divided(num_blocks, launch.cores)),
                in_specs=in_specs,
                out_specs=[pl.BlockSpec((block, columns), rows_of_block) for _, columns, _ in results],
                scratch_shapes=gather.buffers(record, block),
            ),
            out_shape=[((rows, columns), dtype) for _, columns, dtype in results],
            aliases={len(operands) - 1: 0} if "into" in names else {},
        )(*operands)
    )


def place_visits(
    staged: jax.Array,
    visits: Visits,
    *,
    rows: int,
    record: Record,
    out_dtype: Any,
    keep_scales: bool,
    padding_rows: bool,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """`place` from int32 `staged [R, S, T, 128]`, for few visits: their tables are in SMEM as a whole."""
    if not launch.interpret:  # XLA would put so small an array into VMEM, where rows are loaded and not fetched
        staged = pltpu.with_memory_space_constraint(staged, pltpu.HBM)
    return _launched(
        ["blocks", "last", "gathered", "records", "staged"],
        [pl.BlockSpec(memory_space=pltpu.HBM)],
        (visits.blocks, visits.last, visits.gathered, visits.records, staged),
        num_blocks=visits.last[0] + 1,
        rows=rows,
        block=visits.block,
        record=record,
        out_dtype=out_dtype,
        keep_scales=keep_scales,
        keep_header=False,
        padding_rows=padding_rows,
        launch=launch,
    )
