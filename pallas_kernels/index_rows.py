"""Headers of staged records -> which record and which weight every row has, and which row every slot of every token.

What moves: the headers of a run of a source's records by one strided DMA into VMEM, runs of several sources side by
side until a block is full; there the slots that belong to this rank are brought together (`order_pairs.ordered`), go to
SMEM as a table, and are written one by one into windows of the results, which fit SMEM. So only slots that came here
cost scalar work, sources that sent little share a table, and no rank needs other ranks' routing. The headers of the
next block arrive meanwhile. A step takes as many sources as positions of which fit SMEM. Where a device has two cores,
each takes one half of the steps.
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
from xen_moe_jax.pallas_kernels.order_pairs import (
    BLOCK,
    SUBLANES,
    copy_now,
    counted_by_depth,
    for_each_entry,
    ordered,
    packed,
)
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

PADDING = 128
"""Places behind a window, for rows that lie in another one."""
FILLED = 4096
"""Places of a window that one DMA fills; of a smaller window it fills a quarter of that."""
POSITIONS = 32 * 1024
"""Positions of a step's sources, unless one source has more."""


@dataclasses.dataclass(frozen=True)
class _Refs:
    start: Any
    count: Any
    facts: Any
    staged: Any
    source: Any
    weights: Any
    positions: Any
    headers: Any
    came: Any
    places: Any
    lines: Any
    table: Any
    moved: Any
    filled: Any
    source_window: Any
    weights_window: Any
    positions_window: Any


FIRST_EXPERT, EXPERTS, ROWS = range(3)
"""`facts`: this rank's first expert and how many it has; rows in use."""


RECORD, SOURCE = range(2)
"""`places`: for each header of a block the number of its record, and where the positions of its source begin."""


@dataclasses.dataclass(frozen=True)
class _Static:
    """Attributes:
    tokens: tokens of a source, up to whole registers. block: headers of a table. window: rows of a window.
    sources: sources of a step.
    """

    record: Record
    top_k: int
    tokens: int
    block: int
    window: int
    sources: int

    @property
    def entries(self) -> int:
        """Positions of a source."""
        return self.top_k * self.tokens

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


def _whole(n: int, unit: int = LANES) -> int:
    return -(-n // unit) * unit


def filled_at_once(places: int) -> int:
    """Places of a window of so many that one DMA fills."""
    return FILLED if places >= FILLED else FILLED // 4


def _window(places: int) -> int:
    """Places up to whole DMAs."""
    return _whole(places, filled_at_once(places))


def records_at_once(tokens: int) -> int:
    """Headers of a table."""
    return min(BLOCK, _whole(tokens))


def sources_at_once(ranks: int, tokens: int, top_k: int) -> int:
    """Sources of a step: by uniform routing they fill a table, and their positions fit SMEM."""
    records = -(-tokens * min(ranks, top_k) // ranks)
    return max(1, min(ranks, records_at_once(tokens) // records, POSITIONS // (top_k * _whole(tokens))))


def _table(refs: _Refs, static: _Static, slot: Any, valid: Any) -> None:
    """Makes the table of a block of headers `[N, 128]`, of which `valid` are records."""
    top_k, block = static.top_k, static.block
    upright = jnp.transpose(refs.headers[slot])
    places = refs.places[slot]
    header = Header(top_k)
    experts, rows, weights = (upright[n : n + top_k] for n in (header.experts, header.rows, header.weights))
    token = upright[header.token : header.token + 1] + places[SOURCE : SOURCE + 1]
    lane = lax.broadcasted_iota(jnp.int32, (1, block), 1)
    local = experts - refs.facts[FIRST_EXPERT]
    mine = (local >= 0) & (local < refs.facts[EXPERTS]) & (experts >= 0) & (lane < valid)
    entry = token + static.tokens * lax.broadcasted_iota(jnp.int32, (top_k, block), 0)
    tables, depth = packed(mine, rows, entry, weights)
    empty = jnp.zeros((static.lines - static.number - 1, block), jnp.int32)
    number = places[RECORD : RECORD + 1]
    lines = ordered(top_k - depth, top_k + 1, jnp.concatenate([*tables, number, empty], axis=0))
    counts = counted_by_depth(depth, top_k)
    for n in range(static.counts + 1):
        refs.lines[:, n * block : (n + 1) * block] = counts if n == static.counts else lines[n : n + 1]


def _write(refs: _Refs, static: _Static, first_row: Any) -> None:
    """Writes the entries of a table into the windows."""

    def known(line: Any, n: Any) -> Any:
        return refs.table[line * static.block + n]

    def put(s: Any, n: Any, _: int) -> None:
        row = known(s, n)
        refs.positions_window[0, known(s + static.top_k, n)] = row
        at = row - first_row
        at = jnp.where((at >= 0) & (at < static.window), at, static.window)
        refs.source_window[0, at] = known(static.number, n)
        refs.weights_window[0, at] = known(s + static.weight, n)

    for_each_entry(lambda s: known(static.counts, s), static.top_k, put)


def _collect(refs: _Refs, static: _Static, slot: Any, source: Any, offset: Any, end: Any) -> tuple[Any, Any, Any]:
    """Starts the DMAs of a block of headers: those of `source` from its record `offset` on, and of further sources
    before `end`, run by run while they fit. Returns the number of headers, and where the next block begins.
    """
    block, first = static.block, source
    lane = lax.broadcasted_iota(jnp.int32, (1, block), 1)

    def run_of(source: Any, offset: Any) -> Any:
        """Number of records of the next run; more than fit, where there is no run."""
        count = refs.count[jnp.minimum(source, refs.count.shape[0] - 1)] - offset
        return jnp.where(source < end, jnp.minimum(count, block), block + 1)

    def add(known: tuple[Any, ...]) -> tuple[Any, ...]:
        source, offset, fill, run, record, place = known
        begin = refs.start[source] + offset

        @pl.when(run > 0)
        def _() -> None:
            origin = refs.staged.at[pl.ds(begin, run), static.record.header_row]
            pltpu.make_async_copy(origin, refs.headers.at[slot, pl.ds(fill, run)], refs.came.at[slot]).start()

        here = lane >= fill
        record = jnp.where(here, lane + (begin - fill), record)
        place = jnp.where(here, lax.rem(source, jnp.int32(static.sources)) * static.entries, place)
        whole = offset + run >= refs.count[source]
        source, offset = jnp.where(whole, source + 1, source), jnp.where(whole, 0, offset + run)
        return source, offset, fill + run, run_of(source, offset), record, place

    zero = jnp.zeros((1, block), jnp.int32)
    state = (first, offset, jnp.int32(0), run_of(first, offset), zero, zero)
    source, offset, fill, _, record, place = lax.while_loop(lambda known: known[2] + known[3] <= block, add, state)
    refs.places[slot] = jnp.concatenate([record, place, jnp.zeros((SUBLANES - 2, block), jnp.int32)], axis=0)
    return fill, source, offset


def _fill(refs: _Refs, windows: tuple[tuple[Any, int], ...]) -> None:
    """Fills each of the SMEM windows `[1, N]` with a number."""
    for n, (_, value) in enumerate(windows):
        refs.filled[n] = jnp.full(refs.filled.shape[1:], value, jnp.int32)
    for wait in (False, True):
        for n, (window, _) in enumerate(windows):
            at_once = filled_at_once(window.shape[1])

            @pl.loop(0, window.shape[1] // at_once)
            def _(i: Any, window: Any = window, n: int = n, at_once: int = at_once, wait: bool = wait) -> None:
                into = window.at[0, pl.ds(pl.multiple_of(i * at_once, at_once), at_once)]
                dma = pltpu.make_async_copy(refs.filled.at[n, 0, pl.ds(0, at_once)], into, refs.moved)
                dma.wait() if wait else dma.start()


def _body(refs: _Refs, *, static: _Static) -> None:
    core, part, turn = (pl.program_id(n) for n in range(3))
    ranks = refs.start.shape[0]
    step = core * pl.num_programs(2) + turn
    first = jnp.minimum(step * static.sources, ranks)
    end = jnp.minimum(first + static.sources, ranks)
    first_row = part * static.window

    # every source's tokens again for every window of rows; a slot's row is the same each time
    wanted = (part == 0) | (first_row < refs.facts[ROWS])
    end = jnp.where(wanted, end, first)
    fill, source, offset = _collect(refs, static, 0, first, jnp.int32(0), end)

    @pl.when(turn == 0)
    def _() -> None:
        _fill(refs, ((refs.source_window, -1), (refs.weights_window, 0)))

    _fill(refs, ((refs.positions_window, -1),))

    def block_of_headers(known: tuple[Any, ...]) -> tuple[Any, ...]:
        slot, fill, source, offset = known
        following, source, offset = _collect(refs, static, 1 - slot, source, offset, end)
        origin = refs.staged.at[pl.ds(0, fill), static.record.header_row]
        pltpu.make_async_copy(origin, refs.headers.at[slot, pl.ds(0, fill)], refs.came.at[slot]).wait()
        _table(refs, static, slot, fill)
        copy_now(refs.lines.at[0], refs.table, refs.moved)
        _write(refs, static, first_row)
        return 1 - slot, following, source, offset

    lax.while_loop(lambda known: known[1] > 0, block_of_headers, (jnp.int32(0), fill, source, offset))

    @pl.when((first < ranks) & (part == 0))
    def _() -> None:
        copy_now(refs.positions_window, refs.positions.at[step], refs.moved)

    @pl.when(turn == pl.num_programs(2) - 1)
    def _() -> None:
        for rows, out in ((refs.source_window, refs.source), (refs.weights_window, refs.weights)):
            copy_now(rows.at[:, pl.ds(0, static.window)], out.at[core, part], refs.moved)


def smem_bytes(tokens: int, top_k: int, window: int) -> int:
    """SMEM of the windows and the table; the numbers of the sources take little besides."""
    static = _Static(Record(LANES, "int8"), top_k, _whole(tokens), records_at_once(tokens), window, 1)
    positions = _window(max(static.entries, POSITIONS))
    return 4 * (positions + 2 * _window(window + PADDING) + static.lines * static.block)


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
      staged: int32 `[N, *record.shape]`.
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
    sources = sources_at_once(ranks, tokens, top_k)
    static = _Static(record, top_k, _whole(tokens), records_at_once(tokens), window, sources)
    steps = -(-ranks // sources)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    words = static.lines * static.block
    names = ["start", "count", "facts", "staged", "source", "weights", "positions"]
    names += ["headers", "came", "places", "lines", "table", "moved", "filled"]
    names += ["source_window", "weights_window", "positions_window"]
    in_window, positions_of = (launch.cores, windows, 1, window), _window(sources * static.entries)
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
            grid=(launch.cores, windows, divided(steps, launch.cores)),
            in_specs=[hbm],
            out_specs=[hbm] * 3,
            scratch_shapes=[
                pltpu.VMEM((2, static.block, LANES), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((2, SUBLANES, static.block), jnp.int32),
                pltpu.VMEM((1, words), jnp.int32),
                pltpu.SMEM((words,), jnp.int32),
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((2, 1, FILLED), jnp.int32),
                pltpu.SMEM((1, _window(window + PADDING)), jnp.int32),
                pltpu.SMEM((1, _window(window + PADDING)), jnp.int32),
                pltpu.SMEM((1, positions_of), jnp.int32),
            ],
        ),
        out_shape=[(in_window, jnp.int32), (in_window, jnp.int32), ((steps, 1, positions_of), jnp.int32)],
    )(start, count, jnp.stack(facts).astype(jnp.int32), staged)
    # one core knows a row; every other core has -1 and 0 there
    source, weights = jnp.max(source, axis=0), jnp.bitwise_or.reduce(weights, axis=0)
    source, weights = (a.reshape(-1)[:size] for a in (source, weights))
    positions = positions[:, 0, : sources * static.entries].reshape(-1, top_k, static.tokens)
    return source, lax.bitcast_convert_type(weights, jnp.float32), positions[:ranks, :, :tokens].swapaxes(1, 2)
