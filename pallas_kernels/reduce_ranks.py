"""Token's rank: staged partial records -> output rows, added in float32 in the table's order.

What moves: for each block of tokens, their partial records, one local DMA each, double-buffered; missing ones are
zeros. The sum leaves as a block of `[T, H]`, or, for a second level of reduction, as records again.
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
from xen_moe_jax.pallas_kernels.record import LANES, Record, decode_scale, decode_values, encode, quantize_chunk


def keep(x: jax.Array, zero: jax.Array) -> jax.Array:
    """float32 `x`, rounded before it is used: `zero` is an int32 zero that the compiler does not know to be one."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ zero, jnp.float32)


def encode_sums(
    record: Record, total: Any, quantise: tuple[str, str] | None, zero: jax.Array, put: Any, rows: int
) -> None:
    """float32 sums, `total(c) [rows, 128]` for each 128-element block `c`, -> records, as `record.encode` puts them."""
    latest = {}

    def chunk(c: int) -> jax.Array:
        values = keep(total(c), zero)
        if quantise is None:
            return values.astype(record.dtype)
        values, latest["scale"] = quantize_chunk(values, *quantise)
        return values

    encode(record, chunk, (lambda c: latest["scale"]) if record.scaled else None, put, rows)


@dataclasses.dataclass(frozen=True)
class _Refs:
    zero: Any
    gathered: Any
    now: Any
    following: Any
    sources: Any
    staged: Any
    out: Any
    buffer: Any
    semaphore: Any
    total: Any


def _body(refs: _Refs, *, record: Record, entries: int, quantise: tuple[str, str] | None, as_records: bool) -> None:
    buffer, out, total = refs.buffer, refs.out, refs.total

    def start(table: Any, slot: Any) -> None:
        gather.start_rows(
            lambda n: table[0, 0, n],
            table.shape[2],
            lambda row: refs.staged.at[row],
            buffer.at[slot],
            refs.semaphore.at[slot],
            zero_others=False,
        )

    def wait(slot: Any) -> None:
        gather.await_rows(buffer.at[slot], refs.gathered[0, 0, 0], refs.semaphore.at[slot])

    slot = gather.double_buffered(start, wait, refs.now, refs.following)
    tokens = refs.now.shape[2] // entries
    nothing = refs.zero[0]

    def add(rows: Any) -> None:
        sources = refs.sources[rows, :]
        lane = lax.broadcasted_iota(jnp.int32, sources.shape, 1)

        @pl.loop(0, entries)
        def _(entry: Any) -> None:
            load = gather.rows_in(buffer.at[slot], entry * tokens + rows.start, rows.size)
            came = jnp.max(jnp.where(lane == entry, sources, -1), axis=1, keepdims=True) >= 0
            for c in range(record.chunks):
                columns = slice(c * LANES, (c + 1) * LANES)
                values = decode_values(record, load, c)
                if record.scaled:
                    values = keep(values * decode_scale(record, load, c), nothing)
                before = jnp.where(entry == 0, 0.0, total[rows, columns])
                total[rows, columns] = jnp.where(came, before + values, before)

        if as_records:

            def put(j: int, words: jax.Array) -> None:
                out[rows, j, :] = words

            encode_sums(record, lambda c: total[rows, c * LANES : (c + 1) * LANES], quantise, nothing, put, rows.size)
        else:
            for c in range(record.chunks):
                columns = slice(c * LANES, (c + 1) * LANES)
                out[rows, columns] = total[rows, columns].astype(out.dtype)

    for_row_groups(tokens, tile_rows(out.dtype), add)


def vmem_bytes(record: Record, out_dtype: Any, entries: int, block: int) -> int:
    """VMEM that a block of tokens needs: two buffers of partial records, the sums, two output blocks (pipelined)."""
    return 2 * block * (entries * record.bytes + record.hidden * (jnp.dtype(out_dtype).itemsize + 2))


def reduce_ranks(
    staged: jax.Array,
    source: jax.Array,
    zero: jax.Array,
    *,
    record: Record,
    out_dtype: Any,
    quantise: tuple[str, str] | None = None,
    as_records: bool = False,
    launch: Launch,
) -> jax.Array:
    """Adds each token's partial records.

    Args:
      staged: int32 `[N, *record.shape]`.
      source: int32 `[T, D]`, record of each summand in the order of addition, `-1` for none.
      zero: int32 `[1]`, a zero unknown to the compiler.
      quantise: with `as_records`, how the sum is quantised.

    Returns:
      `[T, hidden]` of `out_dtype`, or with `as_records` int32 `[T, *record.shape]`.
    """
    tokens, entries = source.shape
    block = block_rows(launch.block, tokens, tile_rows(jnp.int32 if as_records else out_dtype))
    steps = -(-tokens // block)
    sources = jnp.pad(source, ((0, steps * block - tokens), (0, 0)), constant_values=-1)
    table = sources.reshape(steps, block, entries).swapaxes(1, 2).reshape(steps, 1, entries * block)
    gathered = jnp.sum(table >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    each = divided(steps, launch.cores)

    def visited(core: Any, i: Any) -> Any:
        return jnp.minimum(core * each + i, steps - 1)

    def table_of(ahead: int, count: int) -> Any:
        return pl.BlockSpec(
            (1, 1, count), lambda core, i, *_: (visited(core, i + ahead), 0, 0), memory_space=pltpu.SMEM
        )

    if as_records:
        out_spec = pl.BlockSpec((block, *record.shape), lambda core, i, *_: (visited(core, i), 0, 0))
        out_shape: tuple[tuple[int, ...], Any] = ((tokens, *record.shape), jnp.int32)
    else:
        out_spec = pl.BlockSpec((block, record.hidden), lambda core, i, *_: (visited(core, i), 0))
        out_shape = ((tokens, record.hidden), out_dtype)
    return launch.call(
        functools.partial(_body, record=record, entries=entries, quantise=quantise, as_records=as_records),
        _Refs,
        ["zero", "gathered", "now", "following", "sources", "staged", "out", "buffer", "semaphore", "total"],
        name="xen_moe_reduce_ranks",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(launch.cores, each),
            in_specs=[
                table_of(0, 1),
                table_of(0, entries * block),
                table_of(1, entries * block),
                pl.BlockSpec((block, entries), lambda core, i, *_: (visited(core, i), 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=out_spec,
            scratch_shapes=[
                *gather.buffers(record, entries * block),
                pltpu.VMEM((block, record.hidden), jnp.float32),
            ],
        ),
        out_shape=out_shape,
    )(zero, gathered, table, table, sources, staged)
