"""Headers of staged records -> which record and which weight every row has, and which row every slot of every token.

What moves: the headers of each source's records by one strided DMA a block into VMEM; there the slots that belong to
this rank are brought together (`order_pairs.ordered`), go to SMEM as a table, and are written one by one into windows
of the results, which fit SMEM. So only slots that came here cost scalar work, and no rank needs other ranks' routing.
Where a device has two cores, each takes one half of the sources.
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

from xen_moe_jax.pallas_kernels.launch import Launch, divided
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK, SUBLANES, counted_by_depth, ordered, packed
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

PADDING = 128
"""Places behind a window, for rows that lie in another one."""
AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class _Refs:
    start: Any
    count: Any
    facts: Any
    staged: Any
    none: Any
    zero: Any
    no_row: Any
    source: Any
    weights: Any
    positions: Any
    headers: Any
    came: Any
    lines: Any
    table: Any
    moved: Any
    source_window: Any
    weights_window: Any
    positions_window: Any


FIRST_EXPERT, EXPERTS, ROWS = range(3)
"""`facts`: this rank's first expert and how many it has; rows in use."""


@dataclasses.dataclass(frozen=True)
class _Static:
    record: Record
    top_k: int
    block: int
    window: int

    @property
    def weight(self) -> int:
        return 2 * self.top_k

    @property
    def number(self) -> int:
        return 3 * self.top_k

    @property
    def counts(self) -> int:
        return self.number + 1

    @property
    def lines(self) -> int:
        """Lines of a table: rows, entries, weights of each depth, number of the record; and the number of pairs of each
        depth."""
        return -(-(self.counts + 1) // SUBLANES) * SUBLANES


def records_at_once(tokens: int) -> int:
    """Records whose headers are read by one DMA; staging has the same number of rows behind the last record."""
    return min(BLOCK, -(-tokens // LANES) * LANES)


def _table(refs: _Refs, static: _Static, headers: jax.Array, valid: Any) -> None:
    """Makes the table of a block of headers `[N, 128]`, of which `valid` are records."""
    top_k, block = static.top_k, static.block
    upright = jnp.transpose(headers)
    header = Header(top_k)
    experts, rows, weights = (upright[n : n + top_k] for n in (header.experts, header.rows, header.weights))
    token = upright[header.token : header.token + 1]
    lane = lax.broadcasted_iota(jnp.int32, (1, block), 1)
    local = experts - refs.facts[FIRST_EXPERT]
    mine = (local >= 0) & (local < refs.facts[EXPERTS]) & (experts >= 0) & (lane < valid)
    entry = token * top_k + lax.broadcasted_iota(jnp.int32, (top_k, block), 0)
    tables, depth = packed(mine, rows, entry, weights)
    empty = jnp.zeros((static.lines - static.number - 1, block), jnp.int32)
    lines = ordered(top_k - depth, top_k + 1, jnp.concatenate([*tables, lane, empty], axis=0))
    counts = counted_by_depth(depth, top_k)
    for n in range(static.counts + 1):
        refs.lines[:, n * block : (n + 1) * block] = counts if n == static.counts else lines[n : n + 1]


def _write(refs: _Refs, static: _Static, first_row: Any, first_record: Any) -> None:
    """Writes the entries of a table into the windows."""

    def known(line: Any, n: Any) -> Any:
        return refs.table[line * static.block + n]

    def put(s: Any, n: Any) -> None:
        row = known(s, n)
        refs.positions_window[0, known(s + static.top_k, n)] = row
        at = row - first_row
        at = jnp.where((at >= 0) & (at < static.window), at, static.window)
        refs.source_window[0, at] = known(static.number, n) + first_record
        refs.weights_window[0, at] = known(s + static.weight, n)

    @pl.loop(0, static.top_k)
    def _(s: Any) -> None:
        count = known(static.counts, s)
        whole = lax.div(count, AT_ONCE)

        @pl.loop(0, whole)
        def _(i: Any) -> None:
            for n in range(AT_ONCE):
                put(s, i * AT_ONCE + n)

        @pl.loop(whole * AT_ONCE, count)
        def _(n: Any) -> None:
            put(s, n)


def _body(refs: _Refs, *, static: _Static) -> None:
    core, part, turn = (pl.program_id(n) for n in range(3))
    source = core * pl.num_programs(2) + turn
    there = source < refs.start.shape[0]
    source = jnp.minimum(source, refs.start.shape[0] - 1)
    first_row = part * static.window
    block, first, count = static.block, refs.start[source], refs.count[source]

    def move(origin: Any, target: Any) -> None:
        dma = pltpu.make_async_copy(origin, target, refs.moved)
        dma.start()
        dma.wait()

    def headers(i: Any) -> Any:
        slot = lax.rem(i, 2)
        origin = refs.staged.at[pl.ds(first + i * block, block), static.record.header_row]
        return pltpu.make_async_copy(origin, refs.headers.at[slot], refs.came.at[slot])

    @pl.when(turn == 0)
    def _() -> None:
        move(refs.none.at[0], refs.source_window)
        move(refs.zero.at[0], refs.weights_window)

    # every source's tokens again for every window of rows; a slot's row is the same each time
    move(refs.no_row.at[0], refs.positions_window)
    wanted = there & ((part == 0) | (first_row < refs.facts[ROWS]))
    blocks = jnp.where(wanted, lax.div(count + (block - 1), block), 0)

    @pl.when(blocks > 0)
    def _() -> None:
        headers(0).start()

    @pl.loop(0, blocks)
    def _(i: Any) -> None:
        @pl.when(i + 1 < blocks)
        def _() -> None:
            headers(i + 1).start()

        headers(i).wait()
        _table(refs, static, refs.headers[lax.rem(i, 2)], count - i * block)
        move(refs.lines.at[0], refs.table)
        _write(refs, static, first_row, first + i * block)

    @pl.when(there & (part == 0))
    def _() -> None:
        move(refs.positions_window, refs.positions.at[source])

    @pl.when(turn == pl.num_programs(2) - 1)
    def _() -> None:
        move(refs.source_window, refs.source.at[core, part])
        move(refs.weights_window, refs.weights.at[core, part])


def smem_bytes(tokens: int, top_k: int, window: int) -> int:
    """SMEM of the windows and the table; the numbers of the sources take little besides."""
    static = _Static(Record(LANES, "int8"), top_k, records_at_once(tokens), window)
    return 4 * (tokens * top_k + PADDING + 2 * (window + PADDING) + static.lines * static.block)


def index_rows(
    staged: jax.Array,
    start: jax.Array,
    count: jax.Array,
    facts: tuple[jax.Array, jax.Array, jax.Array],
    *,
    record: Record,
    tokens: int,
    top_k: int,
    size: int,
    window: int,
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the headers of staged records.

    Args:
      staged: int32 `[N + records_at_once, *record.shape]`.
      start, count: int32 `[R]`, first record and number of records of each source.
      facts: int32 `[]` each: this rank's first expert, how many it has, rows in use.
      size: rows that there are. window: rows that are made at a time, a multiple of 128.

    Returns:
      source int32 `[size]`, staged record of each row, `-1` for none; weights float32 `[size]`, 0 where there is no
      row; positions int32 `[R, tokens, top_k]`, row of each slot as its header says, `-1` for slots that belong
      elsewhere.
    """
    ranks = start.shape[0]
    window = min(window, -(-size // PADDING) * PADDING)
    windows = -(-size // window)
    entries = -(-tokens * top_k // LANES) * LANES
    static = _Static(record, top_k, records_at_once(tokens), window)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    words = static.lines * static.block
    names = ["start", "count", "facts", "staged", "none", "zero", "no_row", "source", "weights", "positions"]
    names += ["headers", "came", "lines", "table", "moved", "source_window", "weights_window", "positions_window"]
    in_window = (launch.cores, windows, 1, window + PADDING)
    source, weights, positions = launch.call(
        functools.partial(_body, static=static),
        _Refs,
        names,
        name="xen_moe_index_rows",
        remote=False,
        by_dma=True,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(launch.cores, windows, divided(ranks, launch.cores)),
            in_specs=[hbm] * 4,
            out_specs=[hbm] * 3,
            scratch_shapes=[
                pltpu.VMEM((2, static.block, LANES), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((1, words), jnp.int32),
                pltpu.SMEM((words,), jnp.int32),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((1, window + PADDING), jnp.int32),
                pltpu.SMEM((1, window + PADDING), jnp.int32),
                pltpu.SMEM((1, entries), jnp.int32),
            ],
        ),
        out_shape=[(in_window, jnp.int32), (in_window, jnp.int32), ((ranks, 1, entries), jnp.int32)],
    )(
        start,
        count,
        jnp.stack(facts).astype(jnp.int32),
        staged,
        jnp.full((1, 1, window + PADDING), -1, jnp.int32),
        jnp.zeros((1, 1, window + PADDING), jnp.int32),
        jnp.full((1, 1, entries), -1, jnp.int32),
    )
    # one core knows a row; every other core has -1 and 0 there
    source, weights = jnp.max(source, axis=0), jnp.bitwise_or.reduce(weights, axis=0)
    source, weights = (a[:, 0, :window].reshape(-1)[:size] for a in (source, weights))
    positions = positions[:, 0, : tokens * top_k].reshape(ranks, tokens, top_k)
    return source, lax.bitcast_convert_type(weights, jnp.float32), positions
