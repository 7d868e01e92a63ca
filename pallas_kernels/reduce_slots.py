"""Expert rank: a token's rows -> one partial record -> staging of the token's rank.

What moves: for each group of (source, token) pairs, their rows of `y`, one local DMA each, read in XLA's own layout
of `[C, H]`: a float32 row as it is, a bfloat16 row as the pair of rows that shares its 32-bit words, of which one is
used. Where `y` was made as `[2 * C, H / 2]`, the two rows of a pair are the halves of one row, and both are used. Rows
are multiplied by their weights and added in float32 in slot order; the sum becomes a record and leaves by remote DMA.
Steps: a block of pairs, ordered by `order_pairs`, has a table in SMEM, and its groups follow each other in a loop.
Double buffers everywhere: the next group's rows and the next block's table arrive, and the last group's records leave,
while this group is added up. Ranks begin with different blocks, so that they do not all send to the same rank.
Two cores, where a device has them, each reduce the pairs of one half of the ranks. A core signals and sends to the core
of its own number in other ranks, and is the only one that sends to the ranks of its half.
Who waits: as in `push`. Local form (`axes=None`): records go to a send buffer of this rank's own, for `exchange`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK, Columns, Ordered, order_pairs
from xen_moe_jax.pallas_kernels.record import LANES, Quantization, Record
from xen_moe_jax.pallas_kernels.reduce_ranks import encode_sums, keep
from xen_moe_jax.pallas_kernels.send import Link, Outgoing, await_whole, scratch


@dataclasses.dataclass(frozen=True)
class Pairs:
    """(source, token) pairs to reduce, and where their sums go.

    Attributes:
      rows: int32 `[P, S]`, rows of each pair in slot order, negative where a slot has none.
      peer: int32 `[P]`, the token's rank, `-1` for no pair.
      address: int32 `[P]`, row of its staging.
      expected: int32 `[R]`, partial records that arrive from each rank. Unused in the local form.
      staging_rows: rows of staging.
    """

    rows: jax.Array
    peer: jax.Array
    address: jax.Array
    expected: jax.Array
    staging_rows: int


@dataclasses.dataclass(frozen=True)
class _Refs:
    expected: Any
    zero: Any
    visits: Any
    count: Any
    columns: Any
    tables: Any
    y: Any
    target: Any
    table: Any
    table_came: Any
    state: Any
    buffer: Any
    arrived: Any
    acc: Any
    outgoing: Any
    sent: Any
    send: Any
    weights: Any = None
    into: Any = None
    weight_rows: Any = None
    recv: Any = None
    credits: Any = None


TILE = 8
"""Rows of a group that one turn of a loop requests: a turn costs as much as a row's DMA does, and inside a turn the
places of the rows are constants."""
GROUP, GATHERED = 0, 1
"""`state`: how many groups are done; from here on, rows that each buffer waits for."""


@dataclasses.dataclass(frozen=True)
class _Static:
    record: Record
    quantize: Quantization | None
    columns: Columns
    weighted: bool
    paired: bool
    halved: bool
    axes: peers.Axes | None
    cores: int
    table: bool


def _visit(turn: Any, first: Any, made: Sequence[Any], part: int) -> Any:
    """Returns which of its blocks a core visits at its turn. All operands are int32, scalars or arrays.

    Args:
      first: the place of the block with which the core begins among its blocks that are there.
      made: how many of the first blocks of each part of `part` blocks are there.
    """
    total = functools.reduce(operator.add, made)
    at = turn + first
    at = jnp.where(at >= total, at - total, at)
    before = made[0]
    for n, there in enumerate(made[1:], 1):  # a block behind those of part `n - 1` is the first of part `n`
        at = jnp.where(at >= before, at - before + n * part, at)
        before = there + n * part
    return at


def _table(made: jax.Array, first: jax.Array, blocks: int) -> jax.Array:
    """Returns the blocks that each core visits in turn, int32 `[blocks]`, one core's behind the other's.

    Args:
      made: int32 `[cores, N]`, blocks that are there of each of the core's `N` parts of all `blocks`.
      first: int32 `[cores]`, as in `_visit`.
    """
    (cores, parts), own = made.shape, blocks // made.shape[0]
    of_parts = [made[:, n : n + 1] for n in range(parts)]
    at = _visit(jnp.arange(own, dtype=jnp.int32), first[:, None], of_parts, own // parts)
    return jnp.minimum(at + own * jnp.arange(cores, dtype=jnp.int32)[:, None], blocks - 1).reshape(-1)


def _visited(core: Any, turn: Any, visits: Any, count: Any, blocks: int, table: bool) -> Any:
    """Returns which of all `blocks` a core visits at its turn. `visits` is the `_table`, and `count` has the blocks of
    each core; without a table `visits` has the first visit of the one core, and `count` the blocks of each part."""
    if table:
        return visits[core * (blocks // count.shape[0]) + turn]
    parts = count.shape[0]
    return _visit(turn, visits[0], [count[n] for n in range(parts)], blocks // parts)


def _table_copy(refs: _Refs, static: _Static, block: Any) -> Any:
    blocks, _, words = refs.tables.shape
    at = _visited(pl.program_id(0), block, refs.visits, refs.count, blocks, static.table)
    slot = lax.rem(block, 2)
    into = pl.ds(pl.multiple_of(slot * words, words), words)
    return pltpu.make_async_copy(refs.tables.at[at, 0], refs.table.at[into], refs.table_came.at[slot])


def _known(refs: _Refs, static: _Static, block: Any, row: int, n: Any) -> Any:
    """Number `n` of a row of the table of a block."""
    return refs.table[lax.rem(block, 2) * static.columns.words + row * static.columns.block + n]


def _start(refs: _Refs, static: _Static, block: Any, group: Any, slot: Any) -> None:
    """Starts the DMAs of a group's rows. Pairs are ordered: the pairs that have a row `s` are the first `n`."""
    pairs = refs.acc.shape[0]
    first = group * pairs
    rows = refs.y.bitcast(jnp.int32) if refs.y.dtype == jnp.bfloat16 else refs.y

    def fetch(s: Any, tile: Any, sublane: Any, count: int) -> None:
        first_pair = tile * TILE + sublane
        at = lax.rem(block, 2) * static.columns.words + s * static.columns.block + first + first_pair
        # all numbers are read before the first DMA starts: the compiler does not move a read before a DMA
        numbers = [refs.table[at + n] for n in range(count)]
        for n, row in enumerate(numbers):
            row = lax.shift_right_logical(row, 1) if static.paired else row
            into = refs.buffer.at[slot, s, tile, pl.ds(sublane + n, 1)]
            pltpu.make_async_copy(rows.at[pl.ds(row, 1)], into, refs.arrived.at[slot]).start()
        if static.weighted:
            for n, row in enumerate(numbers):
                from_row = refs.weights.at[pl.ds(lax.shift_right_logical(row, 7), 1)]
                into = refs.weight_rows.at[slot, s, tile, pl.ds(sublane + n, 1)]
                pltpu.make_async_copy(from_row, into, refs.arrived.at[slot]).start()

    refs.state[GATHERED + slot] = 0

    @pl.loop(0, _known(refs, static, block, static.columns.depth, first))
    def _(s: Any) -> None:
        n = jnp.clip(_known(refs, static, block, static.columns.facts, s) - first, 0, pairs)
        refs.state[GATHERED + slot] = refs.state[GATHERED + slot] + n
        whole = lax.div(n, TILE)

        @pl.loop(0, whole)
        def _(tile: Any) -> None:
            fetch(s, tile, 0, TILE)

        @pl.loop(0, lax.rem(n, TILE))
        def _(sublane: Any) -> None:
            fetch(s, whole, sublane, 1)


def _wait(refs: _Refs, static: _Static, slot: Any) -> None:
    rows = [buffer.at[slot, 0, 0] for buffer in (refs.buffer, *([refs.weight_rows] if static.weighted else []))]
    await_whole(rows, refs.state[GATHERED + slot], refs.arrived.at[slot])


def _values(words: jax.Array, number: jax.Array, high: jax.Array | bool | None) -> jax.Array:
    """Returns float32 values `[N, LANES]` of rows, `+0.0` where the row's `number [N, 1]` is negative.

    Args:
      words: int32 words of two bfloat16 elements each, or float32 elements, `[N, LANES]`.
      high: True where the element in the high half of a word is taken, False where that in the low half is: for all
        rows, or bool `[N, 1]`. None: `words` are float32.
    """
    there = jnp.where(number >= 0, jnp.int32(-1 if high is None else -65536), 0)
    if high is not None:
        words = words << ((0 if high else 16) if isinstance(high, bool) else jnp.where(high, 0, 16))
    else:
        words = lax.bitcast_convert_type(words, jnp.int32)
    return lax.bitcast_convert_type(words & there, jnp.float32)


def _add_up(refs: _Refs, static: _Static, group: Any, depth: Any, slot: Any) -> None:
    """Writes to `acc` the float32 sums of a group of pairs. An absent row adds `+0.0`, which changes no sum: no sum is
    `-0.0`."""
    pairs = refs.acc.shape[0]
    table = refs.columns[0]
    slots, part = static.columns.slots, table.shape[0]
    slot_lane = lax.broadcasted_iota(jnp.int32, table.shape, 1) - group * (pairs // part * slots)
    lane = lax.broadcasted_iota(jnp.int32, (part, LANES), 1)

    def add_part(n: int, s: Any, before: Any) -> None:
        """Adds part `n` of the pairs, one column of the table."""
        number = jnp.max(jnp.where(slot_lane == s + n * slots, table, -1), axis=1, keepdims=True)
        here, tiles = slice(n * part, (n + 1) * part), slice(n * part // TILE, (n + 1) * part // TILE)
        weight = None
        if static.weighted:
            mine = (lane == (number & (LANES - 1))) & (number >= 0)
            weights = refs.weight_rows[slot, s, tiles].reshape(part, LANES)
            weight = jnp.sum(jnp.where(mine, weights, 0.0), axis=1, keepdims=True)
        halves, high = (2, None) if static.halved else (1, (number & 1) == 1 if static.paired else None)
        chunks = static.record.chunks // halves
        for c in range(chunks):
            words = refs.buffer[slot, s, tiles, :, c * LANES : (c + 1) * LANES].reshape(part, LANES)
            for half in range(halves):
                columns = slice((c + half * chunks) * LANES, (c + half * chunks + 1) * LANES)
                row = _values(words, number, half == 1 if static.halved else high)
                if weight is not None:
                    row = keep(row * weight, refs.zero[0])
                refs.acc[here, columns] = before(here, columns) + row

    def add(s: Any, before: Any) -> None:
        for n in range(pairs // part):
            add_part(n, s, before)

    nothing = lax.bitcast_convert_type(jnp.full((part, LANES), refs.zero[0]), jnp.float32)
    add(0, lambda here, columns: nothing)

    @pl.loop(1, depth)
    def _(s: Any) -> None:
        add(s, lambda here, columns: refs.acc[here, columns])


def _group(refs: _Refs, static: _Static, link: Link, block: Any, blocks: Any, group: Any, last: Any) -> None:
    """Reduces one group of pairs; `last`: it is the last of its block."""
    pairs = refs.acc.shape[0]
    number = refs.state[GROUP]
    slot = lax.rem(number, 2)
    first = group * pairs
    ends = last & (block == blocks - 1)

    def outgoing(slot: Any) -> Outgoing:
        return Outgoing(refs.outgoing.at[slot], spread=True)

    @pl.when(last & (block + 1 < blocks))
    def _() -> None:
        _table_copy(refs, static, block + 1).wait()

    @pl.when(jnp.logical_not(ends))
    def _() -> None:
        _start(refs, static, jnp.where(last, block + 1, block), jnp.where(last, 0, group + 1), 1 - slot)

    _wait(refs, static, slot)
    _add_up(refs, static, group, _known(refs, static, block, static.columns.depth, first), slot)

    @pl.when(number >= 2)
    def _() -> None:
        link.await_sent(outgoing(slot), refs.sent[slot], slot)

    encode_sums(
        static.record,
        lambda c: refs.acc[:, c * LANES : (c + 1) * LANES],
        static.quantize,
        refs.zero[0],
        outgoing(slot).put(pl.ds(0, pairs)),
        pairs,
    )

    @pl.when(number == 0)
    def _() -> None:
        link.await_peers()

    exist = _known(refs, static, block, static.columns.facts, static.columns.slots)
    leave = jnp.clip(exist - first, 0, pairs)

    def entry(row: int) -> Any:
        return lambda i: _known(refs, static, block, row, first + i)

    link.start_records(outgoing(slot), leave, entry(static.columns.peer), entry(static.columns.address), slot)
    refs.sent[slot] = leave
    refs.state[GROUP] = number + 1

    @pl.when(ends)
    def _() -> None:
        link.drain_blocks(outgoing, refs.sent, refs.expected.at[pl.program_id(0)], number)


def _body(refs: _Refs, *, static: _Static) -> None:
    block = pl.program_id(1)
    blocks = refs.count[pl.program_id(0)] if static.cores > 1 else pl.num_programs(1)
    pairs = refs.acc.shape[0]
    link = Link(static.axes, refs.target, refs.send, refs.recv, refs.credits)

    @pl.when(block == 0)
    def _() -> None:
        link.announce()
        refs.state[GROUP] = 0
        _table_copy(refs, static, block).start()
        _table_copy(refs, static, block).wait()
        _start(refs, static, block, 0, 0)

    @pl.when(block + 1 < blocks)
    def _() -> None:
        _table_copy(refs, static, block + 1).start()

    exist = _known(refs, static, block, static.columns.facts, static.columns.slots)
    # a block without pairs has one empty group, so that the next one's rows are asked for in one place
    groups = jnp.maximum(lax.div(exist + (pairs - 1), pairs), 1)
    if static.cores > 1:  # the grid has as many steps as the core with more blocks needs
        groups = jnp.where(block < blocks, groups, 0)

    @pl.loop(0, groups)
    def _(group: Any) -> None:
        _group(refs, static, link, block, blocks, group, group + 1 == groups)


def _pair_words(y: jax.Array) -> jax.Array:
    """Returns `y` as `y.bitcast(int32)` shows it to the kernel on a TPU, `[C / 2, hidden]`: interpret mode cannot
    bitcast a buffer in HBM.
    """
    bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32).reshape(-1, 2, y.shape[1])
    return lax.bitcast_convert_type(bits[:, 0] | (bits[:, 1] << 16), jnp.int32)


def vmem_bytes(record: Record, slots: int, block: int, *, halved: bool = False) -> int:
    """VMEM that a block of pairs needs: two buffers of rows and two of weights, sums, two record buffers, tables. Each
    word of a buffer of rows is for one element of a row; with `halved` it is for two."""
    words = record.hidden // (2 if halved else 1)
    return block * (4 * (words + LANES) * 2 * slots + 4 * record.hidden + 2 * record.bytes + 2 * 4 * LANES)


def halves_of_ranks(num_ranks: int, tokens: int, cores: int) -> bool:
    """True if `order_pairs` gives each core the pairs of one half of the ranks, `tokens` of each rank."""
    return num_ranks % cores == 0 and num_ranks // cores * tokens % BLOCK == 0


def pairs_at_once(block: int) -> int:
    """Pairs of a group."""
    return next(n for n in (128, 64, 32, 16, 8) if n <= max(block, 8))


def pairs_beside(block: int) -> int:
    """Pairs that a column of the ordered rows holds: of 16 the columns of eight slots fill all lanes."""
    return min(pairs_at_once(block), 16)


def in_order(pairs: Pairs, launch: Launch) -> Ordered:
    """Orders pairs for `reduce_slots` with this launch."""
    made = order_pairs(pairs.rows, pairs.peer, pairs.address, pairs_beside(launch.block), launch=launch)
    return Ordered(*made, pairs.expected, pairs.staging_rows, few=False)


def reduce_slots(
    y: jax.Array,
    pairs: Pairs | Ordered,
    weights: jax.Array | None,
    zero: jax.Array,
    *,
    record: Record,
    quantize: Quantization | None,
    axes: peers.Axes | None,
    launch: Launch,
    cores: int = 1,
    halved: bool = False,
    into: jax.Array | None = None,
) -> jax.Array:
    """Reduces each pair's rows and sends the partial sums.

    Args:
      y: `[C, hidden]`, float32, or bfloat16 with an even `C`.
      pairs: in any order, or ordered already.
      weights: float32 `[C]`, factors of the rows, or None.
      zero: int32 `[1]` at least, a zero unknown to the compiler, first.
      quantize: how to quantize partial sums, or None to send partial sums in `y.dtype`.
      cores: cores that share the pairs: 1; or `launch.cores` where `halves_of_ranks` is true, or where the sums stay on
        this rank (`axes=None`).
      halved: read `y` as `[2 * C, hidden / 2]`; `y` must be bfloat16, and `hidden` a multiple of 256. Where a kernel
        made `y` in this form, the DMAs read half as many bytes; elsewhere XLA copies `y` first.
      into: of the form of the result, which it becomes; rows that no pair addresses stay. For `axes=None`.

    Returns:
      int32 `[staging_rows, *record.shape]`; rows that no rank addressed are unspecified.
    """
    words = jnp.int32 if y.dtype.itemsize == 2 else y.dtype
    if halved:
        y = y.reshape(-1, record.hidden // 2)
    if y.dtype.itemsize == 2 and launch.interpret:
        y = _pair_words(y)
    group = pairs_at_once(launch.block)
    pairs = pairs if isinstance(pairs, Ordered) else in_order(pairs, launch)
    columns, tables, ordered, made = pairs.columns, pairs.tables, pairs.rows, pairs.made
    slots = columns.slots
    blocks = ordered.shape[0]
    made = made.reshape(cores, -1)
    count = jnp.sum(made, axis=1, dtype=jnp.int32)
    first, expected = jnp.zeros_like(count), jnp.broadcast_to(pairs.expected, (cores, *pairs.expected.shape))
    if axes is not None:
        rank, ranks = lax.axis_index(axes.names).astype(jnp.int32), axes.num_ranks // cores
        first = lax.div(lax.rem(rank + 1, ranks) * count, ranks)
        if cores > 1:  # all ranks send to this one from the same core
            expected = jnp.where(jnp.arange(cores)[:, None] == lax.div(rank, ranks), expected, 0)
    turns = jnp.max(count)
    table = cores > 1 or not pairs.few
    visits, count = (_table(made, first, blocks), count) if table else (first, made[0])

    def visited(core: Any, turn: Any, expected: Any, zero: Any, visits: Any, count: Any) -> Any:
        return _visited(core, turn, visits, count, blocks, table), 0, 0

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    names = ["expected", "zero", "visits", "count", "columns", "tables", "y"]
    scratch_shapes = [
        pltpu.SMEM((2 * columns.words,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((GATHERED + 2,), jnp.int32),
        pltpu.VMEM((2, slots, group // TILE, TILE, y.shape[1]), words),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((group, record.hidden), jnp.float32),
        Outgoing.scratch(record.shape, group, spread=True),
        pltpu.SMEM((2,), jnp.int32),
        *scratch(axes, axes.num_ranks if axes else 0, 2),
    ]
    operands = []
    if weights is not None:
        names.append("weights")
        scratch_shapes.append(pltpu.VMEM((2, slots, group // TILE, TILE, LANES), jnp.float32))
        operands.append(jnp.pad(weights, (0, -weights.shape[0] % LANES)).reshape(-1, LANES))
    if into is not None:
        names.append("into")
        operands.append(into)
    names += ["target", "table", "table_came", "state", "buffer", "arrived", "acc", "outgoing", "sent", "send"]
    names += ["recv", "credits"] if axes is not None else []
    names += ["weight_rows"] if weights is not None else []
    paired = words == jnp.int32 and not halved
    static = _Static(record, quantize, columns, weights is not None, paired, halved, axes, cores, table)
    return launch.call(
        functools.partial(_body, static=static),
        _Refs,
        names,
        name="xen_moe_reduce_slots" if axes is not None else "xen_moe_reduce_slots_local",
        remote=axes is not None,
        by_dma=True,
        shared=cores > 1,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, turns),
            in_specs=[
                pl.BlockSpec((1, *ordered.shape[1:]), visited),
                *[hbm] * (2 + len(operands)),
            ],
            out_specs=hbm,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=((pairs.staging_rows, *record.shape), jnp.int32),
        aliases={} if into is None else {6 + len(operands): 0},
    )(expected, zero, visits, count, ordered, tables, y, *operands)
