"""A decode layer in one kernel: few tokens to the ranks of their experts, through them, and back.

What moves: routing, to every rank; a token's record, to the ranks that it names; the weights of the experts that have
rows, from HBM once, as in `decode_experts`; the sum of a (source, token) pair's rows, back to the token's rank as soon
as the last of its experts is done. Nothing but weights is read from HBM twice or written there. Slabs of weights are on
their way from the beginning on where nearly all experts have rows (`certain`), else from when the routing is known, and
fill their buffers while records travel. Sums of earlier experts travel while later ones are multiplied.

Steps: pack this rank's tokens; send routing and records; `decode_routing` orders the rows; then visit after visit: rows
are gathered, multiplied, rounded and kept in VMEM; pairs whose last row this was are added up and leave. At the end
each rank adds up what has come for its own tokens.

Who waits: ranks announce themselves as `peers` says. A sum lies where its token's record was, which no later expert
reads.

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
from xen_moe_jax.pallas_kernels.decode_experts import GROUP, Pieces, Streams, for_columns, rounded_sums
from xen_moe_jax.pallas_kernels.decode_experts import vmem_bytes as experts_bytes
from xen_moe_jax.pallas_kernels.decode_routing import AT_ONCE, ROW_BITS, Sizes, number_of
from xen_moe_jax.pallas_kernels.launch import Launch, for_row_groups
from xen_moe_jax.pallas_kernels.order_pairs import SUBLANES
from xen_moe_jax.pallas_kernels.record import LANES, Record, bits_of, encode, values_of
from xen_moe_jax.pallas_kernels.reduce_ranks import keep
from xen_moe_jax.pallas_kernels.send import Link, recv_semaphores, wait_rows

_ABSENT = dict.fromkeys(("gate", "gates", "gate_sum", "gate_bias", "up_bias", "down_bias"))
"""References that some layers do not have."""


PAIRS = 2
"""Pairs that are added up side by side."""
ROUTING, TOKENS, SUMS = range(3)
"""Semaphores of what leaves."""


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

    def left(self, i: Any) -> Any:
        return self.refs.rows

    def _records(self, ref: Any) -> _Records:
        return _Records(ref, self.record, self.flat)

    def before(self, i: Any) -> None:
        """Gathers the records of a visit's rows, and unpacks them."""
        refs, visit = self.refs, self.visit(i)
        first, count = refs.firsts[visit], refs.sizes[visit]
        gathered, tokens = self._records(refs.gathered), self._records(refs.tokens)

        def gather(at: Any, rows: int) -> None:
            numbers = [number_of(refs.links[first + at + n], self.sizes.tokens)[2] for n in range(rows)]
            for n, number in enumerate(numbers):
                for b in tokens.registers:
                    gathered.ref[at + n, gathered.part(b), :] = tokens.ref[number, tokens.part(b), :]

        many = lax.div(count, AT_ONCE)

        @pl.loop(0, many)
        def _(n: Any) -> None:
            gather(n * AT_ONCE, AT_ONCE)

        @pl.loop(many * AT_ONCE, count)
        def _(n: Any) -> None:
            gather(n, 1)

        @pl.loop(0, refs.counts[visit])
        def _(n: Any) -> None:
            rows = pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)
            for j in range(self.record.value_rows):
                words = gathered.load(j, n * GROUP, GROUP)
                for part, c in self._chunks(j):
                    values = values_of(words, part, self.record.dtype)
                    refs.rows[rows, c * LANES : (c + 1) * LANES] = values.astype(refs.rows.dtype)

    def after(self, i: Any) -> None:
        """Rounds the sums of a visit, keeps them as records, and sends what is complete."""
        refs, visit = self.refs, self.visit(i)
        dtype, expert = refs.result.dtype, refs.experts[visit]
        first, kept = refs.firsts[visit], self._records(refs.kept)

        def work(rows: Any) -> None:
            def columns(at: Any, size: int) -> None:
                at = pl.ds(at, size)
                refs.result[rows, at] = rounded_sums(refs.out_sum[rows, at], refs.down_bias, expert, at, dtype)

            for_columns(refs.out_sum.shape[1], columns)

        self.for_rows(i, work)

        @pl.loop(0, refs.counts[visit])
        def _(n: Any) -> None:
            rows = pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)
            for j in range(self.record.value_rows):
                word = self._word([refs.result[rows, c * LANES : (c + 1) * LANES] for _, c in self._chunks(j)])
                kept.store(j, first + n * GROUP, word)

        def noted(n: Any, count: Any) -> Any:
            refs.ended[count] = first + n
            return count + (refs.ends[first + n] >= 0).astype(jnp.int32)

        ended = lax.fori_loop(0, refs.sizes[visit], noted, jnp.int32(0), unroll=False)
        many = lax.div(ended, PAIRS)

        @pl.loop(0, many)
        def _(n: Any) -> None:
            self._send([refs.ended[n * PAIRS + k] for k in range(PAIRS)])

        @pl.loop(many * PAIRS, ended)
        def _(n: Any) -> None:
            self._send([refs.ended[n]])

    def _send(self, last: list[Any]) -> None:
        """Adds up the rows of pairs in slot order, of which these are the last ones, and sends the sums to the tokens'
        ranks."""
        refs, kept, tokens = self.refs, self._records(self.refs.kept), self._records(self.refs.tokens)
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
        for (source, token, number), sums in zip(places, totals, strict=True):
            if self.back is None:  # float32 sums stay, 128 elements a row
                for part in range(parts):
                    for b in kept.registers:
                        rows = pl.ds(part * self.record.value_rows + b * SUBLANES, SUBLANES)
                        bits = lax.bitcast_convert_type(sums[b * parts + part], jnp.int32)
                        refs.sums_back[number, rows, :] = bits
                continue
            for b in kept.registers:
                word = self._word([keep(a, self.zero) for a in sums[b * parts : (b + 1) * parts]])
                tokens.ref[number, tokens.part(b), :] = word
            there = self.rank * self.sizes.tokens + token, pl.ds(0, self.record.shape[0])
            self.back.start(tokens.at(number), there, source, SUMS)

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


def _body(
    refs: Any,
    *,
    pieces: Pieces,
    activate: Callable[..., jax.Array],
    record: Record,
    sizes: Sizes,
    axes: peers.Axes | None,
    flat: bool,
) -> None:
    rank = jnp.int32(0) if axes is None else lax.axis_index(axes.names).astype(jnp.int32)
    tokens, ranks = _Records(refs.tokens, record, flat), sizes.ranks

    def link(target: Any, came: Any) -> Link:
        return Link(axes, target, refs.sent, came, refs.credits, place=rank)

    there = link(refs.tokens, refs.tokens_came)
    back = None if axes is None else link(refs.sums_back, refs.sums_came)
    there.announce()
    layer = _Layer(refs, pieces, activate, jnp.int32(0), 1, jnp.int32(0), record, sizes, rank, back, None, flat)
    ahead, early = layer.beginning(), min(pieces.ahead, sizes.certain * sum(pieces.slabs(*refs.up.shape[1:])))
    if early:

        @pl.loop(0, sizes.certain)
        def _(e: Any) -> None:
            refs.experts[e] = e

        ahead = layer.first_slabs(early, sizes.certain)

    given, hidden = refs.x, refs.x.shape[1]
    if record.hidden > hidden:  # the last of its 128 columns are zeros
        given = refs.wide
        given[...] = jnp.zeros(given.shape, given.dtype)
        given[:, :hidden] = refs.x[...]

    def pack(rows: Any) -> None:
        def put(j: int, words: jax.Array) -> None:
            tokens.store(j, rank * sizes.tokens + rows.start, words)

        encode(record, lambda c: given[rows, c * LANES : (c + 1) * LANES], None, put, rows.size)

    for_row_groups(sizes.tokens, GROUP, pack)
    if record.hidden > refs.out_sum.shape[1]:  # columns that the experts do not have leave as zeros
        beyond = (refs.result.shape[0], record.hidden - refs.out_sum.shape[1])
        refs.result[:, refs.out_sum.shape[1] :] = jnp.zeros(beyond, refs.result.dtype)
    decode_routing.put_own(refs, sizes, rank)
    there.await_peers()

    if axes is not None:

        @pl.loop(0, ranks)
        def _(peer: Any) -> None:
            @pl.when(peer != rank)
            def _() -> None:
                link(refs.routing, refs.routing_came).start(refs.routing.at[rank], rank, peer, ROUTING)

        @pl.loop(0, sizes.tokens)
        def _(token: Any) -> None:
            bits = refs.own[token]
            number = rank * sizes.tokens + token
            for peer in range(ranks):

                @pl.when((lax.shift_right_logical(bits, peer) & 1 == 1) & (peer != rank))
                def _(peer: int = peer) -> None:
                    there.start(tokens.at(number), (number, pl.ds(0, record.shape[0])), peer, TOKENS)

    def every_peer(work: Callable[[Any], None]) -> None:
        if axes is None:
            return

        @pl.loop(0, ranks)
        def _(peer: Any) -> None:
            @pl.when(peer != rank)
            def _() -> None:
                work(peer)

    def arrivals(came: Any, source: Any) -> Any:
        return came.at[lax.rem(source, recv_semaphores(ranks))]

    def await_routing(semaphore: Any) -> None:
        pltpu.make_async_copy(refs.routing.at[0], refs.routing.at[0], semaphore).wait()

    every_peer(lambda source: await_routing(arrivals(refs.routing_came, source)))
    passes = decode_routing.count(refs, sizes, rank)
    blocks = jnp.where(passes == 1, sizes.blocks, 1)

    @pl.loop(0, passes)
    def _(n: Any) -> None:
        mine = decode_routing.order(refs, sizes, rank, n, n + blocks)
        of_pass = dataclasses.replace(layer, mine=mine, zero=lax.shift_right_logical(mine, 31))
        place = of_pass.more_slabs(n == 0, early, ahead)

        @pl.when(n == 0)
        def _() -> None:
            every_peer(
                lambda source: tokens.wait(decode_routing.expected(refs, source), arrivals(refs.tokens_came, source))
            )
            every_peer(lambda peer: await_routing(refs.sent.at[ROUTING]))
            every_peer(lambda peer: tokens.wait(decode_routing.returned(refs, sizes, peer), refs.sent.at[TOKENS]))

        of_pass.visits(place)

    if axes is None:
        _add_up(refs, _Records(refs.sums_back, sums_of(record), flat), sizes)
        return

    @pl.loop(0, ranks)
    def _(source: Any) -> None:
        tokens.wait(decode_routing.expected(refs, source), refs.sent.at[SUMS])
        tokens.wait(decode_routing.returned(refs, sizes, source), arrivals(refs.sums_came, source))

    _add_up(refs, _Records(refs.sums_back, record, flat), sizes)
    there.leave()


def _add_up(refs: Any, back: _Records, sizes: Sizes) -> None:
    """Adds up the sums of this rank's tokens in the order of ranks."""
    record = back.record

    def add(rows: Any) -> None:
        for j in range(record.value_rows):
            totals = [jnp.zeros((rows.size, LANES), jnp.float32) for _ in chunks_of(record, j)]
            for r in range(sizes.ranks):
                words = back.load(j, r * sizes.tokens + rows.start, rows.size)
                words = words & refs.masks[r, rows, :]  # what has not come adds +0.0, which changes no sum
                totals = [total + values_of(words, part, record.dtype) for part, total in enumerate(totals)]
            for (_, c), total in zip(chunks_of(record, j), totals, strict=True):
                columns = slice(c * LANES, min((c + 1) * LANES, refs.total.shape[1]))
                refs.total[rows, columns] = total[:, : columns.stop - columns.start].astype(refs.total.dtype)

    for_row_groups(sizes.tokens, GROUP, add)
    out = pltpu.make_async_copy(refs.total, refs.out, refs.moved)  # XLA would copy a result that lies in VMEM
    out.start()
    out.wait()


def vmem_bytes(pieces: Pieces, record: Record, sizes: Sizes, shape: tuple[int, ...], gated: bool) -> int:
    """VMEM that the kernel needs beside biases.

    Args:
      shape: of `up`, `[L, H, F]`.
    """
    itemsize = 4 // record.per_word
    rows = 4 * LANES * whole_rows(record)
    records = (2 * sizes.ranks * sizes.tokens + sizes.rows + 2 * sizes.most + GROUP) * rows
    given = 3 * max(sizes.tokens, GROUP) * record.hidden * itemsize
    return records + given + sizes.vmem_bytes() + experts_bytes(pieces, shape[1], shape[2], gated, itemsize)


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
) -> jax.Array:
    """Tokens through the experts that they name, and their weighted sums.

    Args:
      x: `[T, H]`; `T` at most 256, a multiple of 16 or less than 16.
      topk_idx: int32 `[K, T]`, global experts, `-1` for none. topk_weights: float32 `[K, T]`.
      gate, up, down, biases, activate: as in `decode_experts`.
      kept: rows that there is room for. Where more come to a rank, it passes block by block of sources, and reads the
        weights as often.
      certain: experts whose weights come before the routing is known, the first ones; at most `L`.
      axes: the ranks; None: tokens and experts are this rank's alone, and sums are not rounded.

    Returns:
      `[T, H]` in `x.dtype`, without axes float32.
    """
    tokens, (local, hidden, width) = x.shape[0], up.shape
    dtype, gated = x.dtype, gate is not None
    record = record_of(hidden, dtype)
    wide, out_dtype = record.hidden, dtype if axes else jnp.dtype(jnp.float32)
    sizes = Sizes(axes.num_ranks if axes else 1, tokens, topk_idx.shape[0], local, pieces.rows_at_once, kept, certain)
    operands: dict[str, Any] = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "up": up, "down": down}
    if gated:
        operands["gate"] = gate
    streamed = ("up", "down", "gate")
    for name, bias in (biases or {}).items():
        operands[f"{name}_bias"] = bias

    def slab(count: int, size: int, columns: int) -> Any:
        return pltpu.VMEM((count, size, columns), dtype)

    def records(count: int) -> Any:
        return pltpu.VMEM((count, whole_rows(record), LANES), jnp.int32)

    ups, downs = pieces.buffers(hidden, width)
    most = pieces.rows_at_once
    scratch: dict[str, Any] = {
        **sizes.scratch(),
        "tokens": records(sizes.ranks * tokens),
        "sums_back": records(sizes.ranks * tokens)
        if axes
        else pltpu.VMEM((tokens, _whole_sums(record), LANES), jnp.int32),
        "kept": records(sizes.rows + GROUP),
        "gathered": records(most),
        "total": pltpu.VMEM((tokens, hidden), out_dtype),
        "rows": pltpu.VMEM((most, wide), dtype),
        "ups": slab(ups, min(pieces.depth, hidden), width),
        "downs": slab(downs, min(pieces.width, width), hidden),
        "up_sum": pltpu.VMEM((most, width), jnp.float32),
        "hidden": pltpu.VMEM((most, width), dtype),
        "out_sum": pltpu.VMEM((most, hidden), jnp.float32),
        "result": pltpu.VMEM((most, wide), dtype),
        "up_semaphore": pltpu.SemaphoreType.DMA((ups,)),
        "down_semaphore": pltpu.SemaphoreType.DMA((downs,)),
        "sent": pltpu.SemaphoreType.DMA((3,)),
        **{
            f"{name}_came": pltpu.SemaphoreType.DMA((recv_semaphores(sizes.ranks),))
            for name in ("routing", "tokens", "sums")
        },
        "credits": pltpu.SemaphoreType.REGULAR,
    }
    if wide > hidden:
        scratch["wide"] = pltpu.VMEM((tokens, wide), dtype)
    if gated:
        scratch["gates"] = slab(ups, min(pieces.depth, hidden), width)
        scratch["gate_sum"] = pltpu.VMEM((most, width), jnp.float32)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    return launch.call(
        functools.partial(
            _body, pieces=pieces, activate=activate, record=record, sizes=sizes, axes=axes, flat=not launch.interpret
        ),
        functools.partial(types.SimpleNamespace, **_ABSENT),
        [*operands, "out", *scratch],
        name="xen_moe_decode_layer",
        remote=axes is not None,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(),
            in_specs=[in_hbm if name in streamed else in_vmem for name in operands],
            out_specs=in_hbm,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=((tokens, hidden), out_dtype),
    )(*operands.values())
