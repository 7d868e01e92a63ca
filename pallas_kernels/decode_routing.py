"""Routing of a decode layer: slots of all ranks' tokens -> rows of this rank's experts.

What moves: tables in VMEM, as whole vectors, source by source, or several sources of few tokens side by side; only
the slots that belong to this rank are looked at one by one, and written to SMEM. Rows lie in the order in which
`decode_layer` visits experts: at most `most` rows of each expert, then what is left of each. A pair of a source and a
token is done when its last row is. More rows than fit are passed some blocks at a time, a block being the sources that
lie side by side. A rank sends its tokens in the order in which their destination visits them, in as many groups as
`Sizes.groups`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.decode_experts import GROUP
from xen_moe_jax.pallas_kernels.index_tokens import above, as_row, hot, placed, whole
from xen_moe_jax.pallas_kernels.order_pairs import SUBLANES, copy_now, counted, counted_by_depth, ordered, packed
from xen_moe_jax.pallas_kernels.record import LANES

AT_ONCE = 4
"""Rows that one turn of a loop writes."""
ROW_BITS = 16
"""Bits of the number of a row. `links` of a row: the pair's next row in slot order, and above these bits its record
(`number_of`). `ends` of a pair's last row: its first row, and above these bits its number of rows; of others, -1."""
TOKEN_BITS = 8
GROUPS, GROUPS_OF_MANY, MANY = 4, SUBLANES - 1, 32
"""Groups of a rank's experts: `GROUPS`, or `GROUPS_OF_MANY` where a rank has more than `MANY` tokens, whose records
travel for long. A register has a line for each group and one more (`arrived`), so that there are at most seven groups.
Records of the first group's tokens come first, and its experts are visited while further records travel."""


def number_of(link: Any, tokens: int) -> tuple[Any, Any, Any]:
    """Source, token, and number of the record among those of all ranks."""
    record = lax.shift_right_logical(link, ROW_BITS)
    source, token = lax.shift_right_logical(record, TOKEN_BITS), record & ((1 << TOKEN_BITS) - 1)
    return source, token, source * tokens + token


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Attributes:
    ranks, tokens, top_k, experts: sizes; tokens of a rank, at most 256, and experts of a rank.
    most: rows of a visit. kept: rows that there is room for.
    certain: experts that are visited whether they have rows or not, the first ones: their weights are on their way
      before the routing is known.
    cores: cores of a rank that share its experts. A rank then has `cores` times `experts` experts, and each core a run
      of them. A core gets tokens from the cores of its own number on the other ranks.
    in_hbm: `decode_layer` does not add up rows: each row leaves for its place among the rows of its token (`by_rank`),
      in HBM. Always so with two cores.
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    most: int
    kept: int
    certain: int
    cores: int = 1
    in_hbm: bool = False

    @property
    def wide(self) -> int:
        return whole(self.tokens)

    @property
    def beside(self) -> int:
        """Sources of a block: as many as fill the lanes of a register, and have no more rows than are kept."""
        together = min(LANES // self.tokens, self.ranks, self.kept // (self.tokens * self.top_k))
        return max(1, together)

    @property
    def blocks(self) -> int:
        return -(-self.ranks // self.beside)

    @property
    def half(self) -> int:
        """Lines of a rank's routing: its experts, and then as many of weights."""
        return -(-self.top_k // SUBLANES) * SUBLANES

    @property
    def registers(self) -> int:
        return -(-self.experts // SUBLANES) * SUBLANES

    @property
    def of_group(self) -> int:
        """Experts of a group."""
        return -(-self.experts // (GROUPS if self.tokens <= MANY else GROUPS_OF_MANY))

    @property
    def groups(self) -> int:
        return -(-self.experts // self.of_group)

    @property
    def at_experts(self) -> int:
        """Place in `come` of the rows of each expert; before it the records of each source, all and by group."""
        return (1 + self.groups) * LANES

    @property
    def at_blocks(self) -> int:
        """Place in `come` of the rows of each block."""
        return self.at_experts + whole(self.registers)

    @property
    def rows(self) -> int:
        """Most rows of a pass: those of one block at least, also where a token names an expert twice."""
        of_source = self.tokens * self.top_k
        return min(self.ranks * of_source, max(self.kept, self.beside * of_source))

    @property
    def visits(self) -> int:
        return self.experts + self.rows // self.most + 1

    @property
    def facts(self) -> int:
        """Line of a source's table that counts pairs by depth; before it rows, links, weights and ends by depth."""
        return 4 * self.top_k

    @property
    def lines(self) -> int:
        return -(-(self.facts + 1) // SUBLANES) * SUBLANES

    def scratch(self) -> dict[str, Any]:
        """The references that this module reads and writes."""
        own, come = self._windows()
        table, windows = pltpu.SMEM((self.visits,), jnp.int32), pltpu.SMEM((whole(self.rows + AT_ONCE),), jnp.int32)
        sometimes: dict[str, Any] = {}
        if self.beside > 1:
            sometimes["merged"] = pltpu.VMEM((self.blocks, 2 * self.half, self.wide), jnp.int32)
        if not self.in_hbm:
            sometimes["masks"] = pltpu.VMEM((self.ranks, self.wide, LANES), jnp.int32)
        return sometimes | {
            "routing": pltpu.VMEM((self.ranks, 2 * self.half, self.wide), jnp.int32),
            "sums": pltpu.VMEM((self.registers, LANES), jnp.float32),
            "arrived": pltpu.VMEM((SUBLANES, LANES), jnp.float32),
            "lines": pltpu.VMEM((1, self.lines * self.wide), jnp.int32),
            "own_row": pltpu.VMEM((1, own), jnp.int32),
            "come_row": pltpu.VMEM((1, come), jnp.int32),
            "moved": pltpu.SemaphoreType.DMA,
            "table": pltpu.SMEM((self.lines * self.wide,), jnp.int32),
            "own": pltpu.SMEM((own,), jnp.int32),
            "come": pltpu.SMEM((come,), jnp.int32),
            "links": windows,
            "weight": windows,
            "ends": windows,
            "ended": pltpu.SMEM((self.most,), jnp.int32),
            "experts": table,
            "firsts": table,
            "counts": table,
            "sizes": table,
            "awaited": pltpu.SMEM((1,), jnp.int32),
            "leaving": pltpu.SMEM((1,), jnp.int32),
        }

    def _windows(self) -> tuple[int, int]:
        """Words of `own` and `come`."""
        return self.ranks * self.wide + LANES, self.at_blocks + LANES

    def smem_bytes(self) -> int:
        tables = 3 * whole(self.rows + AT_ONCE) + self.most + self.lines * self.wide + 4 * self.visits + 2
        return 4 * (tables + sum(self._windows()))

    def vmem_bytes(self) -> int:
        registers = self.ranks * (4 * self.half * self.wide + self.wide * LANES) + self.registers * LANES
        return 4 * (registers + SUBLANES * (LANES + self.lines * self.wide + sum(self._windows())))


def by_rank(experts: jax.Array, of_rank: int, ranks: int) -> tuple[jax.Array, jax.Array]:
    """Returns two int32 `[K, N]` for the slots of int32 `experts [K, N]`: the rank of a slot's expert, `ranks` if it
    names none; and the place of the slot among those of its token, in the order of ranks and, for one rank, of slots.
    `of_rank`: experts of a rank."""
    owner = sum((experts >= r * of_rank).astype(jnp.int32) for r in range(1, ranks + 1))
    owner = jnp.where(experts >= 0, owner, ranks)
    slot = lax.broadcasted_iota(jnp.int32, experts.shape, 0)
    place = jnp.zeros_like(owner)
    for s in range(experts.shape[0]):
        other = owner[s : s + 1]
        place = place + ((other < owner) | ((other == owner) & (slot > s))).astype(jnp.int32)
    return owner, place


def put_own(refs: Any, sizes: Sizes, rank: Any, core: Any) -> None:
    """Puts this rank's routing where it leaves from; writes which tokens go to each rank, to its core of this number.

    `own` then has, for every rank, its tokens in the order of their groups, a word each (`leaving`), and behind these
    the number of tokens that go to each rank (`returned`); with `in_hbm` also the number of their rows
    (`returned_rows`). Else `masks[r]` has ones in the rows of tokens that go to rank `r`.
    """
    top_k, tokens, wide = sizes.top_k, sizes.tokens, sizes.wide
    refs.routing[rank] = jnp.full((2 * sizes.half, wide), -1, jnp.int32)
    refs.routing[rank, :top_k, :tokens] = refs.topk_idx[...]
    weights = lax.bitcast_convert_type(refs.topk_weights[...], jnp.int32)
    refs.routing[rank, sizes.half : sizes.half + top_k, :tokens] = weights
    experts = refs.routing[rank, :top_k]
    number = lax.broadcasted_iota(jnp.int32, (-(-sizes.ranks // SUBLANES) * SUBLANES, wide), 0)
    least = jnp.full(number.shape, sizes.experts, jnp.int32)
    rows = jnp.zeros(number.shape, jnp.float32)
    first = number * sizes.experts if sizes.cores == 1 else (number * sizes.cores + core) * sizes.experts
    for s in range(top_k):
        local = experts[s : s + 1] - first
        least = jnp.where(local >= 0, jnp.minimum(least, local), least)
        if sizes.in_hbm:
            rows = rows + ((local >= 0) & (local < sizes.experts)).astype(jnp.float32)
    hit = least < sizes.experts
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    returned = jnp.zeros((1, LANES), jnp.int32)
    if sizes.in_hbm:
        for r in range(sizes.ranks):
            of_rank = jnp.sum(rows[r : r + 1], axis=1, keepdims=True).astype(jnp.int32)
            returned = jnp.where(lane == LANES // 2 + r, of_rank, returned)
    upright = None if sizes.in_hbm else jnp.transpose(hit.astype(jnp.float32))
    for r in range(sizes.ranks):
        returned = jnp.where(lane == r, counted(hit[r : r + 1]), returned)
        if upright is not None:
            goes = jnp.broadcast_to(upright[:, r : r + 1], (wide, LANES)) > 0
            refs.masks[r] = jnp.where(goes, jnp.int32(-1), jnp.int32(0))
    refs.own_row[:, sizes.ranks * wide :] = returned
    if sizes.ranks > 1:
        token = lax.broadcasted_iota(jnp.int32, number.shape, 1)
        group = sum(((least >= g * sizes.of_group).astype(jnp.int32) for g in range(1, sizes.groups)), 0 * least)
        words = jnp.where(hit & (number != rank), token | (group << TOKEN_BITS), -1)
        key = jnp.where(words >= 0, group, sizes.groups)
        rows = lax.broadcasted_iota(jnp.int32, (SUBLANES, wide), 0)
        for r in range(sizes.ranks):
            table = jnp.where(rows == 0, words[r : r + 1], 0)
            line = ordered(key[r : r + 1], sizes.groups + 1, table)[:1]
            refs.own_row[:, r * wide : (r + 1) * wide] = line
    copy_now(refs.own_row.at[0], refs.own, refs.moved)


def leaving(refs: Any, sizes: Sizes, rank: Any, n: Any) -> Any:
    """Returns the `n`-th token that goes to another rank, and above `TOKEN_BITS` its group; -1 where there is none."""
    return refs.own[rank * sizes.wide + n]


def returned(refs: Any, sizes: Sizes, rank: Any) -> Any:
    """Returns how many of this rank's tokens have rows on `rank`; with two cores, on its core of this core's number."""
    return refs.own[sizes.ranks * sizes.wide + rank]


def returned_rows(refs: Any, sizes: Sizes, rank: Any) -> Any:
    """Returns how many rows of this rank's tokens the core of this core's number on `rank` has, with `in_hbm`."""
    return refs.own[sizes.ranks * sizes.wide + LANES // 2 + rank]


def arriving(refs: Any, group: Any, source: Any) -> Any:
    """Number of tokens of a source that come with a group."""
    return refs.come[(1 + group) * LANES + source]


def _merge(refs: Any, sizes: Sizes) -> None:
    """Puts the routing of the sources of each block side by side."""
    lane = lax.broadcasted_iota(jnp.int32, (2 * sizes.half, sizes.wide), 1)
    for source in range(sizes.ranks):
        block, n = divmod(source, sizes.beside)
        given = refs.routing[source]
        if n == 0:  # lanes that are no token's have no experts
            refs.merged[block] = given
        else:
            shifted = pltpu.roll(given, n * sizes.tokens, 1)
            refs.merged[block] = jnp.where(lane >= n * sizes.tokens, shifted, refs.merged[block])


def _routing(refs: Any, sizes: Sizes) -> Any:
    return refs.merged if sizes.beside > 1 else refs.routing


def _numbers(sizes: Sizes, block: Any) -> tuple[jax.Array, jax.Array]:
    """int32 `[1, N]`: source and token of each lane of a block."""
    lane = lax.broadcasted_iota(jnp.int32, (1, sizes.wide), 1)
    within = jnp.zeros_like(lane)
    for n in range(1, sizes.beside):
        within = within + (lane >= n * sizes.tokens).astype(jnp.int32)
    return block * sizes.beside + within, lane - within * sizes.tokens


def _local(refs: Any, sizes: Sizes, block: Any, place: Any) -> jax.Array:
    """int32 `[K, N]`: the expert here of each slot of a block, `-1` for the others; `place` as in `count`."""
    local = _routing(refs, sizes)[block, : sizes.top_k] - place * sizes.experts
    return jnp.where((local >= 0) & (local < sizes.experts), local, -1)


def count(refs: Any, sizes: Sizes, place: Any) -> None:
    """Counts the slots of all ranks, and the records that come; `place` numbers this core among those of all ranks."""
    if sizes.beside > 1:
        _merge(refs, sizes)
    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
    refs.arrived[...] = jnp.zeros(refs.arrived.shape, jnp.float32)
    refs.come_row[...] = jnp.zeros(refs.come_row.shape, jnp.int32)
    lane = lax.broadcasted_iota(jnp.int32, refs.arrived.shape, 1)
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, sizes.wide), 0)
    column = lax.broadcasted_iota(jnp.int32, refs.sums.shape, 1)

    @pl.loop(0, sizes.blocks)
    def _(block: Any) -> None:
        local = _local(refs, sizes, block, place)
        count = jnp.sum(hot(local, sizes.registers), axis=1, keepdims=True)
        refs.sums[...] = jnp.where(column == block, count, refs.sums[...])
        least = jnp.min(jnp.where(local >= 0, local, sizes.experts), axis=0, keepdims=True)
        # row 0: all tokens with rows here; row 1 + g: those of group g
        begin = jnp.where(row == 0, 0, (row - 1) * sizes.of_group)
        end = jnp.where(row == 0, sizes.experts, jnp.minimum(begin + sizes.of_group, sizes.experts))
        there = (least >= begin) & (least < end)
        source, _ = _numbers(sizes, block)
        for n in range(sizes.beside):
            number = block * sizes.beside + n
            some = jnp.sum((there & (source == number)).astype(jnp.float32), axis=1, keepdims=True)
            refs.arrived[...] = jnp.where(lane == number, some, refs.arrived[...])

    for n in range(1 + sizes.groups):
        refs.come_row[:, n * LANES : (n + 1) * LANES] = refs.arrived[n : n + 1].astype(jnp.int32)
    blocks = jnp.sum(refs.sums[...], axis=0, keepdims=True)
    refs.come_row[:, sizes.at_blocks :] = blocks.astype(jnp.int32)
    copy_now(refs.come_row.at[0], refs.come, refs.moved)


def end_of_pass(refs: Any, sizes: Sizes, begin: Any) -> Any:
    """Returns the block at which a pass ends that begins with block `begin`. The pass takes as many blocks as there is
    room for their rows, and one at least; the block that is returned is not among them."""

    def fits(carry: Any) -> Any:
        end, rows = carry
        return (end < sizes.blocks) & (rows + refs.come[sizes.at_blocks + end] <= sizes.rows)

    def take(carry: Any) -> Any:
        end, rows = carry
        return end + 1, rows + refs.come[sizes.at_blocks + end]

    return lax.while_loop(fits, take, (begin + 1, refs.come[sizes.at_blocks + begin]))[0]


def _sums(refs: Any, begin: Any, end: Any) -> jax.Array:
    """Slots of the blocks from `begin` to `end` for each expert."""
    column = lax.broadcasted_iota(jnp.int32, refs.sums.shape, 1)
    return jnp.where((column >= begin) & (column < end), refs.sums[...], 0.0)


def order(refs: Any, sizes: Sizes, place: Any, begin: Any, end: Any, first_expert: Any = 0) -> Any:
    """Makes the tables of the rows of the blocks from `begin` to `end`; returns the number of visits. The certain
    experts are visited where `begin` is 0. `first_expert` is the rank's number of this core's first expert."""
    totals = jnp.sum(_sums(refs, begin, end), axis=1, keepdims=True)
    refs.come_row[:, sizes.at_experts : sizes.at_experts + sizes.registers] = as_row(totals).astype(jnp.int32)
    copy_now(refs.come_row.at[0], refs.come, refs.moved)
    first = jnp.minimum(totals, float(sizes.most))
    begins = above(first), jnp.sum(first, axis=0, keepdims=True) + above(totals - first)

    @pl.loop(begin, end)
    def _(block: Any) -> None:
        _sort(refs, sizes, block, place, begin, *begins)
        copy_now(refs.lines.at[0], refs.table, refs.moved)
        _write(refs, sizes)

    return _fill_visits(refs, sizes, jnp.where(begin == 0, sizes.certain, 0), first_expert)


def _sort(refs: Any, sizes: Sizes, block: Any, place: Any, first_block: Any, begin: jax.Array, rest: jax.Array) -> None:
    """Makes the table of a block: its pairs with rows here, those with most rows first."""
    top_k, wide = sizes.top_k, sizes.wide
    local = _local(refs, sizes, block, place)
    order, begins, rests = placed(local, _sums(refs, first_block, block), block, begin, rest)
    row = jnp.where(order < sizes.most, begins + order, rests + order - sizes.most)
    mine = local >= 0
    last = jnp.max(jnp.where(mine, row, -1), axis=0, keepdims=True)
    if not sizes.in_hbm:
        weights = _routing(refs, sizes)[block, sizes.half : sizes.half + top_k]
    else:  # the places to which rows leave stand where weights do
        experts = _routing(refs, sizes)[block, :top_k]
        weights = by_rank(experts, sizes.experts * sizes.cores, sizes.ranks)[1]
    (rows, weights), depth = packed(mine, row, weights)
    source, token = _numbers(sizes, block)
    record = token | (source << TOKEN_BITS)
    following = jnp.concatenate([rows[1:], rows[:1]], axis=0) & ((1 << ROW_BITS) - 1)
    ends = jnp.where(rows == last, rows[:1] | (depth << ROW_BITS), -1)
    empty = jnp.zeros((sizes.lines - sizes.facts, wide), jnp.int32)
    table = jnp.concatenate([rows, following | (record << ROW_BITS), weights, ends, empty], axis=0)
    lines = ordered(top_k - depth, top_k + 1, table)
    counts = counted_by_depth(depth, top_k)
    for n in range(sizes.facts + 1):
        refs.lines[:, n * wide : (n + 1) * wide] = counts if n == sizes.facts else lines[n : n + 1]


def _write(refs: Any, sizes: Sizes) -> None:
    """Writes the rows of a table's pairs."""
    top_k = sizes.top_k

    def known(line: Any, n: Any) -> Any:
        return refs.table[line * sizes.wide + n]

    def put(s: Any, at: Any, count: int) -> None:
        # all numbers are read before the first is written: the compiler does not move a read before a write
        entries = [[known(s + part * top_k, at + n) for part in range(4)] for n in range(count)]
        for row, link, weight, ends in entries:
            refs.links[row] = link
            refs.weight[row] = weight
            refs.ends[row] = ends

    @pl.loop(0, top_k)
    def _(s: Any) -> None:
        count = known(sizes.facts, s)
        many = lax.div(count, AT_ONCE)

        @pl.loop(0, many)
        def _(i: Any) -> None:
            put(s, i * AT_ONCE, AT_ONCE)

        @pl.loop(many * AT_ONCE, count)
        def _(n: Any) -> None:
            put(s, n, 1)


def _fill_visits(refs: Any, sizes: Sizes, certain: Any, first_expert: Any) -> Any:
    """Writes expert, first row and number of rows of every visit, and how many groups they make; returns the number of
    visits."""

    def add(visit: Any, e: Any, at: Any, rows: Any, wanted: Any) -> tuple[Any, Any]:
        refs.experts[visit] = e + first_expert
        refs.firsts[visit] = at
        refs.sizes[visit] = rows
        refs.counts[visit] = lax.shift_right_logical(rows + (GROUP - 1), GROUP.bit_length() - 1)
        return visit + wanted.astype(jnp.int32), at + rows

    def first(e: Any, carry: Any) -> Any:
        rows = jnp.minimum(refs.come[sizes.at_experts + e], sizes.most)
        return add(carry[0], e, carry[1], rows, (rows > 0) | (e < certain))

    def rest(e: Any, carry: Any) -> Any:
        left = jnp.maximum(refs.come[sizes.at_experts + e] - sizes.most, 0)

        def piece(p: Any, carry: Any) -> Any:
            return add(carry[0], e, carry[1], jnp.minimum(left - p * sizes.most, sizes.most), jnp.bool_(True))

        return lax.fori_loop(0, lax.div(left + (sizes.most - 1), sizes.most), piece, carry)

    zero = jnp.int32(0)
    carry = lax.fori_loop(0, sizes.experts, first, (zero, zero))
    return lax.fori_loop(0, sizes.experts, rest, carry)[0]
