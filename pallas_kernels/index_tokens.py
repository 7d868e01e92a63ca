"""Every rank's tokens on every rank: headers of gathered records -> the place of each slot, and the blocks that `place`
visits.

No rank announced how many slots it has for each peer: all ranks read all headers and count. What moves: headers of
all records by one strided DMA a source into VMEM. There slots are counted by expert, ordered within experts by a
product with a triangular matrix, and give positions, as whole vectors. Only the slots that belong to this rank are
looked at one by one: `order_pairs` brings them together, and they are written into windows of the results in SMEM.
Rows are listed by the blocks that `place` visits: the used blocks of a padded slab, close together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import (
    SUBLANES,
    copy_now,
    counted_by_depth,
    dot,
    for_each_entry,
    ordered,
    packed,
)
from xen_moe_jax.pallas_kernels.place import TOKEN_BITS, Visits
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

READ = 4
"""Slots that are read before the first of them is written: the numbers in between must fit the scalar registers."""
FILLED = 2048
"""Entries of a window that one DMA fills; windows are multiples of it."""


@dataclasses.dataclass(frozen=True)
class Slabs:
    """Layout of the rows of `routed.x`.

    Attributes:
      experts: local experts of this rank. block: rows of `routed.x` that `place` makes at a time.
      rows: number of rows. slab: rows of each expert (padded layout); 0: one group follows the other.
      alignment: group sizes are multiples of it.
    """

    experts: int
    block: int
    rows: int
    slab: int
    alignment: int

    def places(self, slots: int) -> int:
        """Most rows of the visited blocks when `slots` slots arrive."""
        blocks = -(-self.rows // self.block)
        if self.slab:
            shared = self.slab % self.block != 0  # an expert's rows may then begin inside a block
            blocks = min(blocks, (1 + shared) * self.experts + slots // self.block)
        return blocks * self.block


@dataclasses.dataclass(frozen=True)
class _Refs:
    first_expert: Any
    staged: Any
    source: Any
    weights: Any
    blocks: Any
    gathered: Any
    last: Any
    positions: Any
    counts: Any
    headers: Any
    came: Any
    local: Any
    bits: Any
    sums: Any
    starts: Any
    blocks_row: Any
    gathered_row: Any
    last_row: Any
    lines: Any
    filled: Any
    moved: Any
    table: Any
    source_window: Any
    weights_window: Any


@dataclasses.dataclass(frozen=True)
class _Static:
    record: Record
    top_k: int
    ranks: int
    tokens: int
    slabs: Slabs

    @property
    def block(self) -> int:
        """Tokens of a source, up to whole registers."""
        return whole(self.tokens)

    @property
    def experts(self) -> int:
        """Experts of this rank, rounded up to whole registers."""
        return -(-self.slabs.experts // SUBLANES) * SUBLANES

    @property
    def visits(self) -> int:
        return self.slabs.places(self.ranks * self.tokens * self.top_k) // self.slabs.block

    @property
    def counts(self) -> int:
        """Lines of a table: place and row, weight of each depth, the record; then the number of pairs of each depth."""
        return 3 * self.top_k + 1

    @property
    def lines(self) -> int:
        return -(-(self.counts + 1) // SUBLANES) * SUBLANES


def whole(n: int) -> int:
    return -(-n // LANES) * LANES


def as_row(column: jax.Array) -> jax.Array:
    """`[N, 1]` float32 -> `[1, N]`."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]


def above(column: jax.Array, largest: bool = False) -> jax.Array:
    """`[N, 1]` float32, none negative: sum, or largest, of the entries above each."""
    count = column.shape[0]
    row, lane = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    others = jnp.where(lane < row, as_row(column), 0.0)
    return (jnp.max if largest else jnp.sum)(others, axis=1, keepdims=True)


def _up(x: jax.Array, multiple: int) -> jax.Array:
    """float32 whole numbers `x` below 2**21 -> how many times `multiple` they need."""
    return jnp.floor((x + (multiple - 0.5)) * (1.0 / multiple))


def _read(refs: _Refs, static: _Static, source: Any) -> None:
    """Reads the headers of a source: its slots' local experts, `-1` for experts of other ranks, and their weights;
    counts."""
    top_k, header = static.top_k, Header(static.top_k)
    upright = jnp.transpose(refs.headers[source])
    lane = lax.broadcasted_iota(jnp.int32, (top_k, static.block), 1)
    experts = upright[header.experts : header.experts + top_k]
    local = experts - refs.first_expert[0]
    mine = (experts >= 0) & (local >= 0) & (local < static.slabs.experts) & (lane < static.tokens)
    local = jnp.where(mine, local, -1)
    refs.local[source] = local
    refs.bits[source] = upright[header.weights : header.weights + top_k]
    count = jnp.sum(hot(local, static.experts), axis=1, keepdims=True)
    column = lax.broadcasted_iota(jnp.int32, (static.experts, LANES), 1)
    refs.sums[...] = jnp.where(column == source, count, refs.sums[...])


def hot(local: jax.Array, experts: int) -> jax.Array:
    """float32 `[experts, N]`: number of slots of each token that name each expert, of int32 `local [K, N]`."""
    expert = lax.broadcasted_iota(jnp.int32, (experts, local.shape[1]), 0)
    total = jnp.zeros(expert.shape, jnp.float32)
    for s in range(local.shape[0]):
        total = total + (expert == local[s : s + 1]).astype(jnp.float32)
    return total


def placed(local: jax.Array, sums: jax.Array, source: Any, *tables: jax.Array) -> tuple[jax.Array, ...]:
    """Orders the slots of a source within their experts.

    Args:
      local: int32 `[K, N]`, local expert of each slot, `-1` for none. sums: float32 `[experts, 128]`, slots of each
        source (lane) for each expert.
      tables: float32 `[experts, 1]`.

    Returns:
      int32 `[K, N]`: number of each slot among those of its expert in (source, token, slot) order; then each table at
      the slot's expert, 0 where there is none.
    """
    block, experts = local.shape[1], sums.shape[0]
    expert = lax.broadcasted_iota(jnp.int32, (experts, block), 0)
    row, column = (lax.broadcasted_iota(jnp.int32, (block, block), axis) for axis in (0, 1))
    before = dot(hot(local, experts), (row < column).astype(jnp.float32), (1, 0))
    number = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    before = before + jnp.sum(jnp.where(number < source, sums, 0.0), axis=1, keepdims=True)
    found: list[list[jax.Array]] = [[] for _ in range(1 + len(tables))]
    for s in range(local.shape[0]):
        here = expert == local[s : s + 1]
        for rows, table in zip(found, (before, *tables), strict=True):
            rows.append(jnp.sum(jnp.where(here, table, 0.0), axis=0, keepdims=True))
        before = before + here.astype(jnp.float32)
    return tuple(jnp.concatenate(rows, axis=0).astype(jnp.int32) for rows in found)


class _Starts(NamedTuple):
    """float32 `[experts, 1]` each.

    Attributes:
      row: first row of each expert. place: the same among the rows of visited blocks. kept: rows that it gets.
      visit: number of its first visit. visits: how many it adds: a block that it shares is an earlier expert's visit.
    """

    row: jax.Array
    place: jax.Array
    kept: jax.Array
    visit: jax.Array
    visits: jax.Array


def _starts(refs: _Refs, static: _Static) -> tuple[_Starts, jax.Array]:
    """Returns the starts of the experts' rows, and the number of visited blocks, `[1, 1]`."""
    slabs = static.slabs
    totals = jnp.sum(refs.sums[...], axis=1, keepdims=True)
    if slabs.slab:
        kept = jnp.minimum(totals, float(slabs.slab))
        row = lax.broadcasted_iota(jnp.int32, totals.shape, 0).astype(jnp.float32) * slabs.slab
        last = jnp.where(kept > 0, _up(row + kept, slabs.block), 0.0)
        first = jnp.maximum(jnp.floor((row + 0.5) * (1.0 / slabs.block)), above(last, largest=True))
        visits = jnp.maximum(last - first, 0.0)
        visit = above(visits)
        place = row + (visit - first) * slabs.block
        return _Starts(row, place, kept, visit, visits), jnp.sum(visits, axis=0, keepdims=True)
    sizes = _up(totals, slabs.alignment) * slabs.alignment
    row = above(sizes)
    used = jnp.minimum(jnp.sum(sizes, axis=0, keepdims=True), float(slabs.rows))
    kept = jnp.clip(slabs.rows - row, 0.0, totals)
    return _Starts(row, row, kept, row, row), _up(used, slabs.block)


def _visit(refs: _Refs, static: _Static, starts: _Starts, blocks: jax.Array) -> None:
    """Computes which blocks of rows are visited, and how many records each of them gets."""
    slabs, shape = static.slabs, (static.experts, whole(static.visits))
    visit = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.float32)
    begin = visit * slabs.block
    end = starts.place + starts.kept
    here = jnp.minimum(end, begin + slabs.block) - jnp.maximum(starts.place, begin)
    refs.gathered_row[...] = jnp.sum(jnp.maximum(here, 0.0), axis=0, keepdims=True).astype(jnp.int32)
    number = visit[:1]
    if slabs.slab:
        skipped = (starts.row - starts.place) * (1.0 / slabs.block)
        new = (visit >= starts.visit) & (visit < starts.visit + starts.visits)
        number = number + jnp.sum(jnp.where(new, skipped, 0.0), axis=0, keepdims=True)
    refs.blocks_row[...] = jnp.floor(number + 0.5).astype(jnp.int32)
    last = jnp.maximum(blocks, 1.0) - 1.0
    refs.last_row[...] = jnp.broadcast_to(last, (1, LANES)).astype(jnp.int32)


def _sort(refs: _Refs, static: _Static, source: Any, starts: _Starts) -> None:
    """Writes the positions of a source's slots, and the table of the slots that have a row on this rank."""
    slabs, top_k, block = static.slabs, static.top_k, static.block
    local = refs.local[source]
    order, begin = placed(local, refs.sums[...], source, starts.place)
    place = order + begin
    rows = order + local * slabs.slab if slabs.slab else place
    fits = order < slabs.slab if slabs.slab else rows < slabs.rows
    mine = local >= 0
    refs.positions[source] = jnp.where(mine, jnp.where(fits, rows, -2), -1)

    tables, depth = packed(mine & fits, place, rows, refs.bits[source])
    lane = lax.broadcasted_iota(jnp.int32, (1, block), 1)
    empty = jnp.zeros((static.lines - static.counts, block), jnp.int32)
    record = lane | (source << TOKEN_BITS)
    lines = ordered(top_k - depth, top_k + 1, jnp.concatenate([*tables, record, empty], axis=0))
    counts = counted_by_depth(depth, top_k)
    for n in range(static.counts + 1):
        refs.lines[:, n * block : (n + 1) * block] = counts if n == static.counts else lines[n : n + 1]


def _write(refs: _Refs, static: _Static) -> None:
    """Writes the entries of a table into the windows."""
    top_k = static.top_k

    def known(line: Any, n: Any) -> Any:
        return refs.table[line * static.block + n]

    def put(s: Any, first: Any, count: int) -> None:
        # all numbers are read before the first is written: the compiler does not move a read before a write
        entries = [
            (known(s, first + n), known(s + top_k, first + n), known(s + 2 * top_k, first + n)) for n in range(count)
        ]
        records = [known(3 * top_k, first + n) for n in range(count)]
        for (place, row, bits), record in zip(entries, records, strict=True):
            refs.source_window[place] = record
            refs.weights_window[row] = bits

    for_each_entry(lambda s: known(static.counts, s), top_k, put, READ)


def _body(refs: _Refs, *, static: _Static) -> None:
    def header(source: Any) -> Any:
        origin = refs.staged.at[source, static.record.header_row]
        return pltpu.make_async_copy(origin, refs.headers.at[source, pl.ds(0, static.tokens)], refs.came)

    def fill(window: Any, value: int) -> None:
        refs.filled[...] = jnp.full(refs.filled.shape, value, jnp.int32)

        @pl.loop(0, window.shape[0] // FILLED)
        def _(i: Any) -> None:
            copy_now(refs.filled.at[0], window.at[pl.ds(pl.multiple_of(i * FILLED, FILLED), FILLED)], refs.moved)

    @pl.loop(0, static.ranks)
    def _(source: Any) -> None:
        header(source).start()

    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
    fill(refs.source_window, -1)
    fill(refs.weights_window, 0)

    @pl.loop(0, static.ranks)
    def _(source: Any) -> None:
        header(source).wait()

    @pl.loop(0, static.ranks)
    def _(source: Any) -> None:
        _read(refs, static, source)

    starts, blocks = _starts(refs, static)
    refs.counts[...] = jnp.transpose(refs.sums[...])[: static.ranks, : static.slabs.experts].astype(jnp.int32)
    _visit(refs, static, starts, blocks)
    for n, start in enumerate(starts):
        refs.starts[n] = jnp.broadcast_to(start, refs.sums.shape)

    @pl.loop(0, static.ranks)
    def _(source: Any) -> None:
        _sort(refs, static, source, _Starts(*(refs.starts[n][:, :1] for n in range(len(_Starts._fields)))))
        copy_now(refs.lines.at[0], refs.table, refs.moved)
        _write(refs, static)

    copy_now(refs.source_window, refs.source, refs.moved)
    copy_now(refs.weights_window, refs.weights, refs.moved)
    copy_now(refs.blocks_row.at[0], refs.blocks, refs.moved)
    copy_now(refs.gathered_row.at[0], refs.gathered, refs.moved)
    copy_now(refs.last_row.at[0], refs.last, refs.moved)


def _windows(static: _Static) -> tuple[int, int]:
    """Entries of the windows: rows of visited blocks, and rows."""
    return tuple(-(-n // FILLED) * FILLED for n in (static.visits * static.slabs.block, static.slabs.rows))  # type: ignore[return-value]


def smem_bytes(record: Record, top_k: int, ranks: int, tokens: int, slabs: Slabs) -> int:
    """SMEM of the windows and the table."""
    static = _Static(record, top_k, ranks, tokens, slabs)
    return 4 * (sum(_windows(static)) + static.lines * static.block)


def vmem_bytes(record: Record, top_k: int, ranks: int, tokens: int, slabs: Slabs) -> int:
    """VMEM of the headers of all records, and of the tables made from them."""
    static = _Static(record, top_k, ranks, tokens, slabs)
    registers = ranks * (LANES + 3 * 2 * -(-top_k // SUBLANES) * SUBLANES) * static.block
    return 4 * (registers + 4 * static.experts * LANES + SUBLANES * (static.lines * static.block + FILLED))


def index_tokens(
    staged: jax.Array, first_expert: jax.Array, *, record: Record, top_k: int, slabs: Slabs, launch: Launch
) -> tuple[Visits, jax.Array, jax.Array, jax.Array]:
    """Reads the headers of the tokens of all ranks.

    Args:
      staged: int32 `[R, S, T, 128]`, as `pack_tokens` makes each rank's; `T` at most 256.
      first_expert: int32 `[1]`, this rank's first expert.

    Returns:
      the visits of `place`; weights float32 `[rows]`, 0 where there is no row; positions int32 `[R, K, T]`, row of each
      slot, `-1` for slots that belong elsewhere, `-2` for those that are dropped; slots of each source for each of
      this rank's experts, int32 `[R, L]`.
    """
    ranks, _, tokens, _ = staged.shape
    static = _Static(record, top_k, ranks, tokens, slabs)
    block, experts, visits = static.block, static.experts, whole(static.visits)
    places, rows = _windows(static)
    words = static.lines * block
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    names = ["first_expert", "staged", "source", "weights", "blocks", "gathered", "last", "positions", "counts"]
    names += ["headers", "came", "local", "bits", "sums", "starts", "blocks_row", "gathered_row", "last_row", "lines"]
    names += ["filled", "moved", "table", "source_window", "weights_window"]
    source, weights, blocks, gathered, last, positions, counts = launch.call(
        functools.partial(_body, static=static),
        _Refs,
        names,
        name="xen_moe_index_tokens",
        remote=False,
        by_dma=False,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[hbm],
            out_specs=[hbm] * 5 + [vmem] * 2,
            scratch_shapes=[
                pltpu.VMEM((ranks, block, LANES), jnp.int32),
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((ranks, top_k, block), jnp.int32),
                pltpu.VMEM((ranks, top_k, block), jnp.int32),
                pltpu.VMEM((experts, LANES), jnp.float32),
                pltpu.VMEM((len(_Starts._fields), experts, LANES), jnp.float32),
                pltpu.VMEM((1, visits), jnp.int32),
                pltpu.VMEM((1, visits), jnp.int32),
                pltpu.VMEM((1, LANES), jnp.int32),
                pltpu.VMEM((1, words), jnp.int32),
                pltpu.VMEM((1, FILLED), jnp.int32),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((words,), jnp.int32),
                pltpu.SMEM((places,), jnp.int32),
                pltpu.SMEM((rows,), jnp.int32),
            ],
        ),
        out_shape=[
            ((places,), jnp.int32),
            ((rows,), jnp.int32),
            ((visits,), jnp.int32),
            ((visits,), jnp.int32),
            ((LANES,), jnp.int32),
            ((ranks, top_k, block), jnp.int32),
            ((ranks, slabs.experts), jnp.int32),
        ],
    )(first_expert, staged)
    found = Visits(blocks, last, gathered, source, slabs.block)
    weights = lax.bitcast_convert_type(weights[: slabs.rows], jnp.float32)
    return found, weights, positions[:, :, :tokens], counts
