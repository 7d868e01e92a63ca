"""A decode layer in one kernel: few tokens to the ranks of their experts, through them, and back.

What moves: routing, to every rank; a token's record, to the ranks that it names; the weights of the experts that have
rows, from HBM once, as in `decode_experts`; the sum of a (source, token) pair's rows, back to the token's rank as soon
as the last of its experts is done. Nothing but weights is read from HBM twice or written there. Slabs of weights are on
their way from the beginning on where nearly all experts have rows (`certain`), else from when the routing is known, and
fill their buffers while records travel. Sums of earlier experts travel while later ones are multiplied.

Steps: pack this rank's tokens; send routing, and records in the order in which they are needed; `decode_routing` orders
the rows; then visit after visit: rows are gathered, multiplied, rounded and kept in VMEM; pairs whose last row this was
are added up and leave. At the end each rank adds up what has come for its own tokens.

Who waits: ranks announce themselves as `peers` says. A visit waits for the records of its group of experts, which have
semaphores of their own. A sum lies where its pair's last row was, which nothing else reads; a further pass waits until
the sums of the one before it have left.

Where VMEM is short (`in_hbm`), rows leave instead of sums, for their places in HBM, and `decode_sums` adds them up. The
rows of `VISITS_KEPT` visits are kept: a visit waits until those that lay in its place have left.

Two cores share a rank's experts where one could not keep up with HBM. Each runs this kernel with half of them, reaches
the cores of its number alone, and sends rows.

A record here has no header, and takes whole registers: `whole` rows of 128 words, of which the first ones travel.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import decode_routing, peers
from xen_moe_jax.pallas_kernels.decode_experts import COLUMNS, GROUP, Pieces, Streams, bias_of, rounded_sums
from xen_moe_jax.pallas_kernels.decode_experts import vmem_bytes as experts_bytes
from xen_moe_jax.pallas_kernels.decode_routing import AT_ONCE, ROW_BITS, TOKEN_BITS, Sizes, number_of
from xen_moe_jax.pallas_kernels.decode_sums import decode_sums, lines, put_places
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import SUBLANES
from xen_moe_jax.pallas_kernels.record import LANES, Record, bits_of, encode, values_of
from xen_moe_jax.pallas_kernels.reduce_ranks import keep
from xen_moe_jax.pallas_kernels.scaled_weights import scales_of
from xen_moe_jax.pallas_kernels.send import Link, recv_semaphores, wait_rows

_ABSENT = dict.fromkeys(("gate", "gates", "gate_sum", "gate_bias", "up_bias", "down_bias"))
"""References that some layers do not have."""


PAIRS = 4
"""Pairs that are added up side by side."""
ROUTING, TOKENS, SUMS = range(3)
"""Semaphores of what leaves. Rows that leave one by one take `VISITS_KEPT` from `SUMS` on, visits by turns."""
VISITS_KEPT = 8
"""Visits whose rows may be leaving one by one, a power of two. They leave behind the records of tokens, which on tpu7x
travel for seven visits of DeepSeek-V3 with 128 tokens and weights of one byte."""


def record_of(hidden: int, dtype: Any) -> Record:
    """The record of a token of `hidden` elements."""
    return Record(-(-hidden // LANES) * LANES, jnp.dtype(dtype).name)


def whole_rows(record: Record) -> int:
    """Rows of 128 words that a record takes in VMEM."""
    return -(-record.shape[0] // SUBLANES) * SUBLANES


def _whole_sums(record: Record) -> int:
    """Rows that float32 sums take: the last register of each part may reach behind the part."""
    rows = (record.per_word - 1) * record.value_rows + whole_rows(record)
    return -(-max(rows, record.chunks) // SUBLANES) * SUBLANES


def sums_of(record: Record) -> Record:
    """The record of float32 sums that do not travel."""
    return Record(record.hidden, "float32")


@dataclasses.dataclass(frozen=True)
class _Records:
    """Records in VMEM, `ref [N, whole, 128]`.

    Attributes:
      flat: a block row of several records is addressed with a stride, which takes half of the instructions. Interpret
        mode finds no races then.
    """

    ref: Any
    record: Record
    flat: bool

    @property
    def registers(self) -> range:
        return range(self.ref.shape[1] // SUBLANES)

    def at(self, n: Any) -> Any:
        """The rows of record `n` that travel."""
        return self.ref.at[n, pl.ds(0, self.record.shape[0])]

    def part(self, b: int) -> Any:
        """Register `b` of a record."""
        return pl.ds(b * SUBLANES, SUBLANES)

    def _block_row(self, j: int, first: Any, count: int) -> tuple[Any, tuple[Any, ...]]:
        """The ref and index of block row `j` of `count` records."""
        if not self.flat:
            return self.ref, (pl.ds(first, count), j)
        number, rows, lanes = self.ref.shape
        return self.ref.reshape(number * rows, lanes), (pl.ds(first * rows + j, count, stride=rows),)

    def load(self, j: int, first: Any, count: int) -> jax.Array:
        """Block row `j` of `count` records."""
        ref, index = self._block_row(j, first, count)
        return ref[(*index, slice(None))]

    def store(self, j: int, first: Any, words: jax.Array) -> None:
        """Writes block row `j` of as many records as `words` has rows."""
        ref, index = self._block_row(j, first, words.shape[0])
        ref[(*index, slice(None))] = words

    def wait(self, count: Any, semaphore: Any) -> None:
        """Waits for the DMAs of `count` records."""
        rows = pl.ds(0, self.record.shape[0])
        wait_rows(lambda n: [self.ref.at[pl.ds(0, n), rows]], self.ref.shape[0], count, semaphore)


@dataclasses.dataclass(frozen=True)
class _Layer(Streams):
    """Visits whose rows come from the tokens of all ranks, and go back as sums."""

    record: Record
    sizes: Sizes
    rank: Any
    back: Link | None
    zero: Any
    flat: bool
    first_expert: Any = 0

    def left(self, i: Any) -> Any:
        return self.refs.rows

    def _records(self, ref: Any) -> _Records:
        return _Records(ref, self.record, self.flat)

    def await_records(self, end: Any) -> None:
        """Waits until the records of the groups below `end` have come from all ranks. Groups for which an earlier call
        has waited are left out."""
        refs, sizes = self.refs, self.sizes
        if self.back is None:
            return
        tokens, begin = self._records(refs.tokens), refs.awaited[0]

        @pl.loop(begin, end)
        def _(group: Any) -> None:
            came = refs.tokens_came.at[group]

            def await_source(source: Any) -> None:
                semaphore = came.at[lax.rem(source, recv_semaphores(sizes.ranks))]
                tokens.wait(decode_routing.arriving(refs, group, source), semaphore)

            for_peers(sizes.ranks, self.rank, await_source)

        refs.awaited[0] = jnp.maximum(begin, end)

    def before(self, i: Any) -> None:
        """Waits for the records of a visit's rows, gathers them, and unpacks them."""
        refs, visit = self.refs, self.visit(i)
        first, last = refs.firsts[visit], refs.firsts[visit] + refs.sizes[visit] - 1
        gathered, tokens = self._records(refs.gathered), self._records(refs.tokens)
        self.await_records(lax.div(refs.experts[visit] - self.first_expert, self.sizes.of_group) + 1)

        @pl.loop(0, refs.counts[visit])
        def _(n: Any) -> None:
            # a group may reach past the last row: there the last row is gathered again, and its results are not used
            links = [refs.links[jnp.minimum(first + n * GROUP + k, last)] for k in range(GROUP)]
            for k, link in enumerate(links):
                number = number_of(link, self.sizes.tokens)[2]
                for b in tokens.registers:
                    gathered.ref[k, gathered.part(b), :] = tokens.ref[number, tokens.part(b), :]
            rows = pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)
            for j in range(self.record.value_rows):
                words = gathered.load(j, 0, GROUP)
                for part, c in self._chunks(j):
                    values = values_of(words, part, self.record.dtype)
                    refs.rows[rows, c * LANES : (c + 1) * LANES] = values.astype(refs.rows.dtype)

    def after(self, i: Any) -> None:
        """Rounds the sums of a visit, keeps them as records, and sends what is complete."""
        refs, visit = self.refs, self.visit(i)
        dtype, expert = jnp.dtype(self.record.dtype), refs.experts[visit]
        first, kept = refs.firsts[visit], self._records(refs.kept)
        hidden = refs.out_sum.shape[1]
        turn = i & (VISITS_KEPT - 1)
        place = turn * self.pieces.rows_at_once if self.sizes.in_hbm else first
        if self.sizes.in_hbm:
            self.await_left(i - VISITS_KEPT)

        def rounded(rows: Any, c: int) -> jax.Array:
            columns = pl.ds(c * LANES, min(LANES, hidden - c * LANES))
            begin = c * LANES // COLUMNS * COLUMNS  # Mosaic reads a row of many columns, or whole tiles
            row = bias_of(refs.down_bias, expert, pl.ds(begin, min(COLUMNS, hidden - begin)))
            bias = None if row is None else row[:, columns.start - begin :][:, : columns.size]
            value = rounded_sums(refs.out_sum[rows, columns], bias, dtype)
            if columns.size == LANES:
                return value
            # columns that the experts do not have leave as zeros
            beyond = jnp.zeros((rows.size, LANES - columns.size), jnp.float32)
            return jnp.concatenate([value.astype(jnp.float32), beyond], axis=1).astype(dtype)

        size = refs.sizes[visit]

        @pl.loop(0, refs.counts[visit])
        def _(n: Any) -> None:
            rows = pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)
            for j in range(self.record.value_rows):
                word = self._word([rounded(rows, c) for _, c in self._chunks(j)])
                kept.store(j, place + n * GROUP, word)
            if self.sizes.in_hbm:
                rest = jnp.minimum(size - n * GROUP, GROUP)
                self._send_rows(first + n * GROUP, place + n * GROUP, rest, SUMS + turn)

        if self.sizes.in_hbm:
            return

        def noted(n: Any, count: Any) -> Any:
            ends = [refs.ends[first + n * AT_ONCE + k] for k in range(AT_ONCE)]
            for k, end in enumerate(ends):
                refs.ended[count] = first + n * AT_ONCE + k
                count = count + ((end >= 0) & (n * AT_ONCE + k < size)).astype(jnp.int32)
            return count

        ended = lax.fori_loop(0, lax.div(size + (AT_ONCE - 1), AT_ONCE), noted, jnp.int32(0), unroll=False)
        many = lax.div(ended, PAIRS)

        @pl.loop(0, many)
        def _(n: Any) -> None:
            self._send([refs.ended[n * PAIRS + k] for k in range(PAIRS)])

        @pl.loop(many * PAIRS, ended)
        def _(n: Any) -> None:
            self._send([refs.ended[n]])

    def await_left(self, i: Any) -> None:
        """Waits until the rows of visit `i` have left, if there is such a visit and rows leave one by one."""

        @pl.when(i >= 0)
        def _() -> None:
            count = self.refs.sizes[self.visit(i)]
            self._records(self.refs.kept).wait(count, self.refs.sent.at[SUMS + (i & (VISITS_KEPT - 1))])

    def _send_rows(self, first: Any, place: Any, count: Any, semaphore: Any) -> None:
        """Sends `count` rows, from row `first` on, which lie from `kept[place]` on, to their places among the rows of
        their tokens, on the tokens' ranks."""
        refs, kept, back = self.refs, self._records(self.refs.kept), self.back
        assert back is not None
        many = lax.div(count, AT_ONCE)

        def send(n: Any, count: int) -> None:
            at = first + n
            # read before the first DMA starts: the compiler does not move a read before a DMA
            places = [(number_of(refs.links[at + k], self.sizes.tokens), refs.weight[at + k]) for k in range(count)]
            for k, ((source, token, _), row) in enumerate(places):
                there = row * self.sizes.tokens + token, pl.ds(0, self.record.shape[0])
                back.start(kept.at(place + n + k), there, source, semaphore)

        @pl.loop(0, many)
        def _(n: Any) -> None:
            send(n * AT_ONCE, AT_ONCE)

        @pl.loop(many * AT_ONCE, count)
        def _(n: Any) -> None:
            send(n, 1)

    def _send(self, last: list[Any]) -> None:
        """Adds up the rows of pairs in slot order, of which these are the last ones, and sends the sums to the tokens'
        ranks."""
        refs, kept = self.refs, self._records(self.refs.kept)
        parts = self.record.per_word

        def product(row: Any) -> list[jax.Array]:
            weight = lax.bitcast_convert_type(jnp.full((SUBLANES, LANES), refs.weight[row]), jnp.float32)
            words = [kept.ref[row, kept.part(b), :] for b in kept.registers]
            values = [values_of(word, part, self.record.dtype) for word in words for part in range(parts)]
            return [keep(value * weight, self.zero) for value in values]

        def add(_: Any, carry: Any) -> Any:
            row, sums = carry
            row = refs.links[row] & ((1 << ROW_BITS) - 1)
            return row, tuple(a + b for a, b in zip(sums, product(row), strict=True))

        ends, places = [refs.ends[row] for row in last], [number_of(refs.links[row], self.sizes.tokens) for row in last]
        nothing = lax.bitcast_convert_type(jnp.full((SUBLANES, LANES), self.zero), jnp.float32)
        first = [end & ((1 << ROW_BITS) - 1) for end in ends]
        totals = [tuple(nothing + value for value in product(row)) for row in first]
        for n, end in enumerate(ends):
            _, totals[n] = lax.fori_loop(1, lax.shift_right_logical(end, ROW_BITS), add, (first[n], totals[n]))
        for row, (source, token, number), sums in zip(last, places, totals, strict=True):
            if self.back is None:  # float32 sums stay, 128 elements a row
                for part in range(parts):
                    for b in kept.registers:
                        rows = pl.ds(part * self.record.value_rows + b * SUBLANES, SUBLANES)
                        bits = lax.bitcast_convert_type(sums[b * parts + part], jnp.int32)
                        refs.sums_back[number, rows, :] = bits
                continue
            for b in kept.registers:
                word = self._word([keep(a, self.zero) for a in sums[b * parts : (b + 1) * parts]])
                kept.ref[row, kept.part(b), :] = word
            there = self.rank * self.sizes.tokens + token, pl.ds(0, self.record.shape[0])
            self.back.start(kept.at(row), there, source, SUMS)
        refs.leaving[0] = refs.leaving[0] + len(last)

    def _chunks(self, j: int) -> list[tuple[int, int]]:
        """Returns the parts of the words of block row `j`, and which 128 columns each of them has."""
        return chunks_of(self.record, j)

    def _word(self, values: list[jax.Array]) -> jax.Array:
        word, shift = None, 32 // self.record.per_word
        for part, value in enumerate(values):
            bits = bits_of(value.astype(self.record.dtype), self.record.dtype)
            word = bits if word is None else word | (bits << (shift * part))
        assert word is not None
        return word


def chunks_of(record: Record, j: int) -> list[tuple[int, int]]:
    """(part of a word, number of a 128-element block) for each part of block row `j` that is used."""
    return [
        (part, part * record.value_rows + j)
        for part in range(record.per_word)
        if part * record.value_rows + j < record.chunks
    ]


def for_peers(ranks: int, rank: Any, work: Callable[[Any], None]) -> None:
    """Calls `work(peer)` for every rank but this one."""

    @pl.loop(0, ranks)
    def _(peer: Any) -> None:
        @pl.when(peer != rank)
        def _() -> None:
            work(peer)


def _body(
    refs: Any,
    *,
    pieces: Pieces,
    activate: Callable[..., jax.Array],
    record: Record,
    sizes: Sizes,
    axes: peers.Axes | None,
    blocks: dict[str, tuple[int, int] | None],
    flat: bool,
) -> None:
    rank = jnp.int32(0) if axes is None else lax.axis_index(axes.names).astype(jnp.int32)
    tokens, ranks = _Records(refs.tokens, record, flat), sizes.ranks
    core = pl.program_id(0) if sizes.cores > 1 else None
    place = rank if core is None else rank * sizes.cores + core
    first_expert = 0 if core is None else core * sizes.experts

    def link(target: Any, came: Any) -> Link:
        return Link(axes, target, refs.sent, came, refs.credits, place=rank, core=core)

    back = None if axes is None else link(refs.sums_back, refs.sums_came)
    meeting = link(refs.routing, refs.routing_came)
    meeting.announce()
    for n in range(min(2, _groups_of(refs.x, refs.given))):
        _given(refs, n).start()
    nothing = jnp.int32(0)
    scales = scales_of(refs, blocks, pieces.widened)
    layer = _Layer(
        refs, pieces, activate, nothing, 1, nothing, record, sizes, rank, back, None, flat, first_expert, scales=scales
    )
    ahead, early = layer.beginning(), min(pieces.ahead, sizes.certain * sum(pieces.slabs(*refs.up.shape[1:])))
    if early:

        @pl.loop(0, sizes.certain)
        def _(e: Any) -> None:
            refs.experts[e] = e + first_expert

        ahead = layer.first_slabs(early, sizes.certain)

    _pack(refs, sizes, rank, tokens)
    decode_routing.put_own(refs, sizes, rank, core)
    refs.awaited[0] = 0
    refs.leaving[0] = 0
    meeting.await_peers()

    def every_peer(work: Callable[[Any], None]) -> None:
        if axes is not None:
            for_peers(ranks, rank, work)

    def arrivals(came: Any, source: Any) -> Any:
        return came.at[lax.rem(source, recv_semaphores(ranks))]

    def await_routing(semaphore: Any) -> None:
        pltpu.make_async_copy(refs.routing.at[0], refs.routing.at[0], semaphore).wait()

    every_peer(lambda peer: meeting.start(refs.routing.at[rank], rank, peer, ROUTING))
    if axes is not None:
        _send_tokens(refs, sizes, rank, tokens, lambda group: link(refs.tokens, refs.tokens_came.at[group]))
    if sizes.in_hbm:
        put_places(refs, sizes, rank, core)
    every_peer(lambda source: await_routing(arrivals(refs.routing_came, source)))
    decode_routing.count(refs, sizes, place)

    def one_pass(begin: Any) -> Any:
        end = decode_routing.end_of_pass(refs, sizes, begin)
        mine = decode_routing.order(refs, sizes, place, begin, end, first_expert)
        of_pass = dataclasses.replace(layer, mine=mine, zero=lax.shift_right_logical(mine, 31))
        of_pass.visits(of_pass.more_slabs(begin == 0, early, ahead))
        if sizes.in_hbm:
            pl.loop(jnp.maximum(mine - VISITS_KEPT, 0), mine)(of_pass.await_left)
        elif axes is not None:
            _Records(refs.kept, record, flat).wait(refs.leaving[0], refs.sent.at[SUMS])
            refs.leaving[0] = 0
        return end

    if sizes.blocks == 1:
        one_pass(nothing)
    else:
        lax.while_loop(lambda begin: begin < sizes.blocks, one_pass, nothing)
    layer.await_records(sizes.groups)
    if axes is None:
        _add_up(refs, _Records(refs.sums_back, sums_of(record), flat), sizes)
        return
    every_peer(lambda peer: await_routing(refs.sent.at[ROUTING]))
    if core is None:
        every_peer(lambda peer: tokens.wait(decode_routing.returned(refs, sizes, peer), refs.sent.at[TOKENS]))
    else:  # at once: here nothing is left to hide the turns of further loops
        left = [decode_routing.returned(refs, sizes, peer) for peer in range(ranks)]
        tokens.wait(sum(left) - decode_routing.returned(refs, sizes, rank), refs.sent.at[TOKENS])

    came = decode_routing.returned_rows if sizes.in_hbm else decode_routing.returned

    @pl.loop(0, ranks)
    def _(source: Any) -> None:
        tokens.wait(came(refs, sizes, source), arrivals(refs.sums_came, source))

    if not sizes.in_hbm:  # else `decode_sums` adds up
        _add_up(refs, _Records(refs.sums_back, record, flat), sizes)
    meeting.leave()


def _groups_of(rows: Any, buffer: Any) -> int:
    """Returns how many groups of `N` rows `rows [T, H]` has, which go through `buffer [2, N, H]`."""
    return int(rows.shape[0]) // int(buffer.shape[1])


def _rows_of(n: Any, size: int) -> Any:
    """Rows of group `n`."""
    return pl.ds(n * size if isinstance(n, int) else pl.multiple_of(n * size, size), size)


def _given(refs: Any, n: Any) -> Any:
    """Returns the DMA of group `n` of this rank's tokens into VMEM."""
    slot = lax.rem(jnp.int32(n), 2)
    rows = _rows_of(n, refs.given.shape[1])
    return pltpu.make_async_copy(refs.x.at[rows], refs.given.at[slot], refs.given_semaphore.at[slot])


def _pack(refs: Any, sizes: Sizes, rank: Any, tokens: _Records) -> None:
    """Packs this rank's tokens into records, a group after the other."""
    record, (size, hidden), groups = tokens.record, refs.given.shape[1:], _groups_of(refs.x, refs.given)

    def one(n: Any) -> None:
        slot = lax.rem(jnp.int32(n), 2)
        _given(refs, n).wait()

        def chunk(c: int) -> jax.Array:
            values = refs.given[slot, :, c * LANES : min((c + 1) * LANES, hidden)]
            if values.shape[1] == LANES:
                return values
            # the last of a record's 128 columns are zeros
            beyond = jnp.zeros((size, LANES - values.shape[1]), jnp.float32)
            return jnp.concatenate([values.astype(jnp.float32), beyond], axis=1).astype(values.dtype)

        encode(record, chunk, None, lambda j, words: tokens.store(j, rank * sizes.tokens + n * size, words), size)

        @pl.when(n + 2 < groups)
        def _() -> None:
            _given(refs, n + 2).start()

    if groups == 1:
        one(0)
    else:
        pl.loop(0, groups)(one)


def _send_tokens(refs: Any, sizes: Sizes, rank: Any, tokens: _Records, link: Callable[[Any], Link]) -> None:
    """Sends this rank's tokens, one to each rank in turn, in the order of `decode_routing.leaving`. The receiver's
    semaphores are those of the token's group, which `link(group)` names."""
    most = nothing = jnp.int32(0)
    for peer in range(sizes.ranks):
        most = jnp.maximum(most, jnp.where(peer == rank, nothing, decode_routing.returned(refs, sizes, peer)))

    @pl.loop(0, most)
    def _(n: Any) -> None:
        # read before the first DMA starts: the compiler does not move a read before a DMA
        words = [decode_routing.leaving(refs, sizes, peer, n) for peer in range(sizes.ranks)]
        for peer, word in enumerate(words):

            @pl.when(word >= 0)
            def _(peer: int = peer, word: Any = word) -> None:
                token, group = word & ((1 << TOKEN_BITS) - 1), lax.shift_right_logical(word, TOKEN_BITS)
                number = rank * sizes.tokens + token
                there = number, pl.ds(0, tokens.record.shape[0])
                link(group).start(tokens.at(number), there, peer, TOKENS)


def _add_up(refs: Any, back: _Records, sizes: Sizes) -> None:
    """Adds up the sums of this rank's tokens in the order of ranks, a group of tokens after the other."""
    record, size = back.record, refs.total.shape[1]
    groups = _groups_of(refs.out, refs.total)

    def leave(n: Any) -> Any:  # XLA would copy a result that lies in VMEM
        slot = lax.rem(jnp.int32(n), 2)
        return pltpu.make_async_copy(refs.total.at[slot], refs.out.at[_rows_of(n, size)], refs.out_semaphore.at[slot])

    def add(n: Any) -> None:
        slot, begin = lax.rem(n, 2), pl.multiple_of(n * size, size)

        @pl.when(n >= 2)
        def _() -> None:
            leave(n - 2).wait()

        for j in range(record.value_rows):
            totals = [jnp.zeros((size, LANES), jnp.float32) for _ in chunks_of(record, j)]
            for r in range(sizes.ranks):
                words = back.load(j, r * sizes.tokens + begin, size)
                words = words & refs.masks[r, pl.ds(begin, size), :]  # what has not come adds +0.0: no sum changes
                totals = [total + values_of(words, part, record.dtype) for part, total in enumerate(totals)]
            for (_part, c), total in zip(chunks_of(record, j), totals, strict=True):
                columns = slice(c * LANES, min((c + 1) * LANES, refs.total.shape[2]))
                refs.total[slot, :, columns] = total[:, : columns.stop - columns.start].astype(refs.total.dtype)
        leave(n).start()

    pl.loop(0, groups)(add)
    for last in range(max(0, groups - 2), groups):
        leave(last).wait()


def _kept(pieces: Pieces, sizes: Sizes) -> int:
    """Returns the rows that lie in VMEM when they have been computed."""
    return VISITS_KEPT * pieces.rows_at_once if sizes.in_hbm else sizes.rows + GROUP


def vmem_bytes(
    pieces: Pieces,
    record: Record,
    sizes: Sizes,
    shape: tuple[int, ...],
    gated: bool,
    of_weights: int | None = None,
) -> int:
    """VMEM that the kernel needs beside biases and scales.

    Args:
      shape: of `up`, `[L, H, F]`.
      of_weights: bytes of a weight; None for as many as an element of a token has.
    """
    itemsize, all_tokens = 4 // record.per_word, sizes.ranks * sizes.tokens
    back = 0 if sizes.in_hbm else all_tokens
    records = (all_tokens + back + _kept(pieces, sizes) + GROUP) * 4 * LANES * whole_rows(record)
    given = 2 * GROUP * record.hidden * (itemsize + 4)
    hidden, width = shape[1:]
    # the experts' kernel has two buffers of rows in and out each, this one has one of rows in
    rows = 3 * pieces.rows_at_once * record.hidden * itemsize
    return (
        records + given + sizes.vmem_bytes() + experts_bytes(pieces, hidden, width, gated, itemsize, of_weights) - rows
    )


def decode_layer(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    biases: dict[str, jax.Array] | None,
    *,
    activate: Callable[..., jax.Array],
    pieces: Pieces,
    kept: int,
    certain: int,
    axes: peers.Axes | None,
    launch: Launch,
    in_hbm: bool = False,
    scales: dict[str, tuple[jax.Array, tuple[int, int] | None]] | None = None,
) -> jax.Array:
    """Tokens through the experts that they name, and their weighted sums.

    Args:
      x: `[T, H]`; `T` at most 256, a multiple of 16 or less than 16.
      topk_idx: int32 `[K, T]`, global experts, `-1` for none. topk_weights: float32 `[K, T]`.
      gate, up, down, biases, activate, scales: as in `decode_experts`.
      kept: rows that there is room for. Where more come to a rank, it passes some blocks of sources at a time, and
        reads the weights as often.
      certain: experts whose weights come before the routing is known, the first ones; at most `L`.
      axes: the ranks; None: tokens and experts are this rank's alone, and sums are not rounded.
      launch: where it has two cores, `axes` are given, the number of experts is even, each core has half of them, and
        `kept` and `certain` are those of a core.
      in_hbm: rows come back one by one into HBM, not sums into VMEM; with axes. Always so with two cores.

    Returns:
      `[T, H]` in `x.dtype`, without axes float32.
    """
    tokens, (local, hidden, width) = x.shape[0], up.shape
    dtype, gated, cores = x.dtype, gate is not None, launch.cores
    record = record_of(hidden, dtype)
    wide, out_dtype = record.hidden, dtype if axes else jnp.dtype(jnp.float32)
    ranks, top_k, in_hbm = axes.num_ranks if axes else 1, topk_idx.shape[0], in_hbm or cores > 1
    sizes = Sizes(ranks, tokens, top_k, local // cores, pieces.rows_at_once, kept, certain, cores, in_hbm)
    operands: dict[str, Any] = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "up": up, "down": down}
    if gated:
        operands["gate"] = gate
    spaces = {name: pltpu.HBM if name in ("x", "up", "down", "gate") else pltpu.VMEM for name in operands}
    for name, bias in (biases or {}).items():
        operands[f"{name}_bias"], spaces[f"{name}_bias"] = bias, pltpu.VMEM
    for name, (of_matrix, block) in (scales or {}).items():
        operands[f"{name}_scales"], spaces[f"{name}_scales"] = of_matrix, pltpu.VMEM if block is None else pltpu.SMEM

    def slab(count: int, size: int, columns: int, dtype: Any) -> Any:
        return pltpu.VMEM((count, size, columns), dtype)

    def records(count: int) -> Any:
        return pltpu.VMEM((count, whole_rows(record), LANES), jnp.int32)

    ups, downs = pieces.buffers(hidden, width)
    most = pieces.rows_at_once
    came = recv_semaphores(ranks)
    scratch: dict[str, Any] = {
        **sizes.scratch(),
        "tokens": records(ranks * tokens),
        "kept": records(_kept(pieces, sizes)),
        "gathered": records(GROUP),
        "given": pltpu.VMEM((2, min(tokens, GROUP), hidden), dtype),
        "rows": pltpu.VMEM((most, wide), dtype),
        "ups": slab(ups, min(pieces.depth, hidden), width, up.dtype),
        "downs": slab(downs, min(pieces.width, width), hidden, down.dtype),
        "up_sum": pltpu.VMEM((most, width), jnp.float32),
        "hidden": pltpu.VMEM((most, width), dtype),
        "out_sum": pltpu.VMEM((most, hidden), jnp.float32),
        "up_semaphore": pltpu.SemaphoreType.DMA((ups,)),
        "down_semaphore": pltpu.SemaphoreType.DMA((downs,)),
        "given_semaphore": pltpu.SemaphoreType.DMA((2,)),
        "sent": pltpu.SemaphoreType.DMA((SUMS + (VISITS_KEPT if in_hbm else 1),)),
        "routing_came": pltpu.SemaphoreType.DMA((came,)),
        "tokens_came": pltpu.SemaphoreType.DMA((sizes.groups, came)),
        "sums_came": pltpu.SemaphoreType.DMA((came,)),
        "credits": pltpu.SemaphoreType.REGULAR,
    }
    of_sums = (ranks * tokens, whole_rows(record), LANES) if axes else (tokens, _whole_sums(record), LANES)
    if not in_hbm:
        scratch["total"] = pltpu.VMEM((2, min(tokens, GROUP), hidden), out_dtype)
        scratch["out_semaphore"] = pltpu.SemaphoreType.DMA((2,))
        scratch["sums_back"] = pltpu.VMEM(of_sums, jnp.int32)
    if gated:
        scratch["gates"] = slab(ups, min(pieces.depth, hidden), width, up.dtype)
        scratch["gate_sum"] = pltpu.VMEM((most, width), jnp.float32)
    outputs: dict[str, Any] = {"out": ((tokens, hidden), out_dtype)}
    if in_hbm:
        table = (sizes.wide, lines(top_k))
        scratch["upright"] = pltpu.VMEM(table, jnp.float32)
        outputs = {"sums_back": ((top_k * tokens, *of_sums[1:]), jnp.int32), "places": (table, jnp.float32)}
    body = functools.partial(_body, pieces=pieces, activate=activate, record=record, sizes=sizes, axes=axes)
    blocks = {name: block for name, (_, block) in (scales or {}).items()}
    made = launch.call(
        functools.partial(body, blocks=blocks, flat=not launch.interpret),
        functools.partial(types.SimpleNamespace, **_ABSENT),
        [*operands, *outputs, *scratch],
        name="xen_moe_decode_layer",
        remote=axes is not None,
        by_dma=True,
        shared=cores > 1,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(cores,) if cores > 1 else (),
            in_specs=[pl.BlockSpec(memory_space=spaces[name]) for name in operands],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(outputs.values()),
    )(*operands.values())
    if not in_hbm:
        return made[0]
    return decode_sums(*made, record=record, shape=(tokens, hidden), dtype=dtype, launch=launch)
