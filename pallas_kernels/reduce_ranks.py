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
from xen_moe_jax.pallas_kernels.record import (
    LANES,
    Quantization,
    Record,
    decode_scale,
    decode_values,
    encode,
    quantize_chunk,
)


def keep(x: jax.Array, zero: jax.Array) -> jax.Array:
    """float32 `x`, rounded before it is used: `zero` is an int32 zero that the compiler does not know to be one."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ zero, jnp.float32)


def encode_sums(
    record: Record, total: Any, quantize: Quantization | None, zero: jax.Array, put: Any, rows: int
) -> None:
    """Encodes float32 sums, `total(c) [rows, 128]` for each 128-element block `c`, as records, by `record.encode`."""
    latest = {}

    def chunk(c: int) -> jax.Array:
        values = keep(total(c), zero)
        if quantize is None:
            return values.astype(record.dtype)
        values, latest["scale"] = quantize_chunk(values, quantize)
        return values

    encode(record, chunk, (lambda c: latest["scale"]) if record.scaled else None, put, rows)


@dataclasses.dataclass(frozen=True)
class Summands:
    """Summands of few tokens, whose tables are in SMEM as a whole.

    Attributes:
      numbers: int32 `[D * N]`, staged record of summand `d` of token `t` at `d * N + t`, `-1` for none.
      gathered: int32 `[M]`, records of each block of tokens, first.
      came: int32 `[N, D]`, the same numbers, token by token. block: tokens of a block.
    """

    numbers: jax.Array
    gathered: jax.Array
    came: jax.Array
    block: int


@dataclasses.dataclass(frozen=True)
class _Refs:
    zero: Any
    gathered: Any
    sources: Any
    staged: Any
    out: Any
    buffer: Any
    semaphore: Any
    total: Any
    now: Any = None
    following: Any = None
    numbers: Any = None


def _fetch(refs: _Refs, entries: int, steps: int) -> Any:
    """Fetches this step's summands and the next one's; the buffer that holds this step's. Tables come step by step,
    `now` and `following`, or all at once, `numbers`.
    """
    buffer, tokens = refs.buffer, refs.sources.shape[0]

    def start(number: Any, slot: Any) -> None:
        target, semaphore = buffer.at[slot], refs.semaphore.at[slot]
        gather.start_rows(
            number, entries * tokens, lambda row: refs.staged.at[row], target, semaphore, zero_others=False
        )

    def wait(slot: Any, gathered: Any) -> None:
        gather.await_rows(buffer.at[slot], gathered, refs.semaphore.at[slot])

    if refs.numbers is None:
        return gather.double_buffered(
            lambda table, slot: start(lambda n: table[0, 0, n], slot),
            lambda slot: wait(slot, refs.gathered[0, 0, 0]),
            refs.now,
            refs.following,
        )

    def start_block(block: Any, slot: Any) -> None:
        apart, first = refs.numbers.shape[0] // entries, block * tokens

        def number(n: Any) -> Any:
            if tokens & (tokens - 1):
                entry, token = lax.div(n, tokens), lax.rem(n, tokens)
            else:  # a shift and a mask: a division costs more than the DMA
                entry, token = lax.shift_right_logical(n, tokens.bit_length() - 1), n & (tokens - 1)
            return refs.numbers[entry * apart + token + first]

        start(number, slot)

    each = pl.num_programs(1)
    now, following = (jnp.minimum(pl.program_id(0) * each + pl.program_id(1) + n, steps - 1) for n in range(2))
    return gather.double_buffered(start_block, lambda slot: wait(slot, refs.gathered[now]), now, following)


def _body(
    refs: _Refs, *, record: Record, entries: int, steps: int, quantize: Quantization | None, as_records: bool
) -> None:
    buffer, out, total = refs.buffer, refs.out, refs.total
    slot = _fetch(refs, entries, steps)
    tokens = refs.sources.shape[0]
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

            encode_sums(record, lambda c: total[rows, c * LANES : (c + 1) * LANES], quantize, nothing, put, rows.size)
        else:
            for c in range(record.chunks):
                columns = slice(c * LANES, (c + 1) * LANES)
                out[rows, columns] = total[rows, columns].astype(out.dtype)

    for_row_groups(tokens, tile_rows(out.dtype), add)


def vmem_bytes(record: Record, out_dtype: Any, entries: int, block: int) -> int:
    """VMEM that a block of tokens needs: two buffers of partial records, the sums, two output blocks (pipelined)."""
    return 2 * block * (entries * record.bytes + record.hidden * (jnp.dtype(out_dtype).itemsize + 2))


def block_tokens(launch: Launch, tokens: int, dtype: Any) -> int:
    """Tokens that are added up at a time."""
    return block_rows(launch.block, tokens, tile_rows(dtype))


def reduce_ranks(
    staged: jax.Array,
    source: jax.Array | Summands,
    zero: jax.Array,
    *,
    record: Record,
    out_dtype: Any,
    quantize: Quantization | None = None,
    as_records: bool = False,
    launch: Launch,
    tokens: int | None = None,
) -> jax.Array:
    """Adds each token's partial records.

    Args:
      staged: int32 `[N, *record.shape]`.
      source: int32 `[T, D]`, record of each summand in the order of addition, `-1` for none; or tables of these
        numbers.
      zero: int32 `[1]` at least, a zero unknown to the compiler, first.
      quantize: with `as_records`, how the sum is quantized.
      tokens: `T`, where `source` is tables.

    Returns:
      `[T, hidden]` of `out_dtype`, or with `as_records` int32 `[T, *record.shape]`.
    """
    known = source if isinstance(source, Summands) else None
    sources = source.came if isinstance(source, Summands) else source
    entries = sources.shape[1]
    tokens = tokens or sources.shape[0]
    block = known.block if known else block_tokens(launch, tokens, jnp.int32 if as_records else out_dtype)
    steps = -(-tokens // block)
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
    if known:
        names, in_specs = ["zero", "gathered", "numbers"], []
        tables = [zero, known.gathered, known.numbers]
    else:
        sources = jnp.pad(sources, ((0, steps * block - tokens), (0, 0)), constant_values=-1)
        table = sources.reshape(steps, block, entries).swapaxes(1, 2).reshape(steps, 1, entries * block)
        gathered = jnp.sum(table >= 0, axis=2, keepdims=True, dtype=jnp.int32)
        names = ["zero", "gathered", "now", "following"]
        in_specs = [table_of(0, 1), table_of(0, entries * block), table_of(1, entries * block)]
        tables = [zero, gathered, table, table]
    return launch.call(
        functools.partial(_body, record=record, entries=entries, steps=steps, quantize=quantize, as_records=as_records),
        _Refs,
        [*names, "sources", "staged", "out", "buffer", "semaphore", "total"],
        name="xen_moe_reduce_ranks",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables) - len(in_specs),
            grid=(launch.cores, each),
            in_specs=[
                *in_specs,
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
    )(*tables, sources, staged)
