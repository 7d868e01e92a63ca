"""(source, token) pairs, brought together in full blocks, and ordered there: pairs with most rows first.

What moves: tables alone, block by block through VMEM. Pairs that exist are appended to a block until it is full; then
it is ordered and leaves by DMA. So `reduce_slots` visits only pairs that exist, in full groups of nearly the same
number of rows, however few of all pairs exist: of 256 ranks with 8 slots a token, one in 32. The order is stable within
a block, and the rows of a pair stay in slot order. Where a device has two cores, each makes blocks of one half of the
pairs, and its last block may be partly empty.
A table is permuted by a matrix product with a matrix of zeros and ones, byte by byte, which is exact: a TPU gathers
scalars slowly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch, divided, precision

BLOCK = 256
"""Pairs that are ordered together at most: counts up to this are exact in bfloat16."""
SUBLANES = 8
AT_ONCE = 8
"""Entries of a table that one turn of a loop writes."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Entries of a table of `block` pairs with `slots` rows each: row `n` of it begins at word `n * block`.

    Rows 0 to `slots - 1`: rows of `y` in slot order, used rows first, then `-1`. Then peer (`-1` for no pair),
    address, how many rows the pair has, and facts: number `s` is how many pairs have more than `s` rows, number
    `slots` how many pairs there are.
    """

    slots: int
    block: int

    @property
    def peer(self) -> int:
        return self.slots

    @property
    def address(self) -> int:
        return self.slots + 1

    @property
    def depth(self) -> int:
        return self.slots + 2

    @property
    def facts(self) -> int:
        return self.slots + 3

    @property
    def rows(self) -> int:
        return -(-(self.slots + 4) // SUBLANES) * SUBLANES

    @property
    def words(self) -> int:
        return self.rows * self.block


@dataclasses.dataclass(frozen=True)
class _Refs:
    given: Any
    tables: Any
    ordered: Any
    made: Any
    gathered: Any
    table: Any
    columns: Any
    moved: Any
    fill: Any


def packed(used: jax.Array, *tables: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Each of int32 `tables [slots, N]` with the rows that are `used` first, in order, and `-1` after them; and the
    number of used rows, int32 `[1, N]`.
    """
    slots = used.shape[0]
    place, count = [], jnp.zeros((1, used.shape[1]), jnp.int32)
    for s in range(slots):
        place.append(jnp.where(used[s : s + 1], count, -1))
        count = count + used[s : s + 1].astype(jnp.int32)
    at = jnp.concatenate(place, axis=0)
    lowest = jnp.iinfo(jnp.int32).min
    out = []
    for table in tables:
        found = [jnp.max(jnp.where(at == s, table, lowest), axis=0, keepdims=True) for s in range(slots)]
        out.append(jnp.concatenate([jnp.where(count > s, f, -1) for s, f in enumerate(found)], axis=0))
    return out, count


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b, exact = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), precision(jnp.bfloat16)
    return lax.dot_general(a, b, dims, exact, preferred_element_type=jnp.float32)


def ordered(key: jax.Array, bins: int, table: jax.Array) -> jax.Array:
    """Columns of int32 `table [V, N]` in ascending order of int32 `key [1, N]`, in `[0, bins)`; stable. `V` is a
    multiple of 8, `N` at most `BLOCK`.
    """
    count = key.shape[1]
    number = lax.broadcasted_iota(jnp.int32, (-(-bins // SUBLANES) * SUBLANES, count), 0)
    hot = (number == key).astype(jnp.float32)
    earlier = dot(hot, _triangle(count), (1, 0))
    behind, to = jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, count), jnp.float32)
    for b in range(bins):
        to = to + hot[b : b + 1] * (earlier[b : b + 1] + behind)
        behind = behind + jnp.sum(hot[b : b + 1], axis=1, keepdims=True)
    return moved(table, to)


def _triangle(count: int) -> jax.Array:
    """float32 `[count, count]`: ones where the row comes before the column."""
    row, column = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    return (row < column).astype(jnp.float32)


def moved(table: jax.Array, to: jax.Array) -> jax.Array:
    """Columns of int32 `table [V, N]` at the places float32 `to [1, N]` of a table of the same size: zeros where no
    column goes; a column whose place lies outside is left out. `V` is a multiple of 8.
    """
    count = to.shape[1]
    row = lax.broadcasted_iota(jnp.int32, (count, count), 0)
    chosen = (row.astype(jnp.float32) == to).astype(jnp.float32)  # row `j` has a one for the column of place `j`
    out = jnp.zeros(table.shape, jnp.int32)
    for byte in range(4):
        part = (lax.shift_right_logical(table, 8 * byte) & 255).astype(jnp.float32)
        out = out | (dot(part, chosen, (1, 1)).astype(jnp.int32) << (8 * byte))
    return out


@dataclasses.dataclass(frozen=True)
class Ordered:
    """Pairs in the order in which `reduce_slots` visits them.

    Attributes:
      columns: layout of the tables. tables: int32 `[blocks, 1, words]`.
      rows: the rows again, as columns, as `order_pairs` makes them: int32 `[blocks, group, block / group * slots]`.
      made: int32 `[N]`, how many of the first blocks of each `N`-th part of them there are.
      expected: int32 `[R]` at least, records that arrive from each rank. staging_rows: rows of staging.
      few: of few tokens, for which a table of visits would cost XLA more time than the steps gain by it.
    """

    columns: Columns
    tables: jax.Array
    rows: jax.Array
    made: jax.Array
    expected: jax.Array
    staging_rows: int
    few: bool = True


def counted(mask: jax.Array) -> jax.Array:
    """int32 `[1, 1]`: number of true entries of `mask [1, N]`."""
    return jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)


def for_each_entry(counts: Callable[[Any], Any], slots: int, put: Callable[..., None], read: int = 1) -> None:
    """Calls `put(s, first, count)` for the entries of every slot `s` of a table in SMEM, which has `counts(s)` of them:
    for `read` entries at a time, `AT_ONCE` in a turn of the loop, and for the last ones one at a time."""

    @pl.loop(0, slots)
    def _(s: Any) -> None:
        count = counts(s)
        whole = lax.div(count, AT_ONCE)

        @pl.loop(0, whole)
        def _(i: Any) -> None:
            for n in range(0, AT_ONCE, read):
                put(s, i * AT_ONCE + n, read)

        @pl.loop(whole * AT_ONCE, count)
        def _(n: Any) -> None:
            put(s, n, 1)


def copy_now(origin: Any, target: Any, semaphore: Any) -> None:
    """Copies by one DMA, and waits for its end."""
    dma = pltpu.make_async_copy(origin, target, semaphore)
    dma.start()
    dma.wait()


def counted_by_depth(depth: jax.Array, slots: int) -> jax.Array:
    """int32 `[1, N]`: in lane `s < slots`, the number of entries of `depth [1, N]` above `s`; 0 in further lanes."""
    lane = lax.broadcasted_iota(jnp.int32, depth.shape, 1)
    counts = jnp.zeros(depth.shape, jnp.int32)
    for s in range(slots):
        counts = jnp.where(lane == s, counted(depth > s), counts)
    return counts


def order_block(
    table_ref: Any, columns_ref: Any, columns: Columns, rows: jax.Array, peer: jax.Array, address: jax.Array
) -> None:
    """Orders one block: rows `[slots, N]`, peer and address `[1, N]`."""
    slots, block = columns.slots, columns.block
    (rows,), depth = packed(rows >= 0, rows)
    lane = lax.broadcasted_iota(jnp.int32, (1, block), 1)
    deeper = counted_by_depth(jnp.where(peer >= 0, depth, -1), slots)
    facts = jnp.where(lane == slots, counted(peer >= 0), deeper)
    key = jnp.where(peer >= 0, slots - depth, slots + 1)
    none = jnp.zeros((columns.rows - slots - 3, block), jnp.int32)
    table = ordered(key, slots + 2, jnp.concatenate([rows, peer, address, depth, none], axis=0))
    for n in range(columns.rows):
        table_ref[:, n * block : (n + 1) * block] = facts if n == columns.facts else table[n : n + 1]
    upright, group = jnp.transpose(table)[:, :slots], columns_ref.shape[0]
    columns_ref[...] = jnp.concatenate([upright[n : n + group] for n in range(0, block, group)], axis=1)


def _body(refs: _Refs, *, columns: Columns, blocks: int) -> None:
    """Body of the kernel. There is one step more than blocks of given pairs: the last block leaves there."""
    core, step, turns = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    slots, block = columns.slots, columns.block
    last = step == turns

    def leave(number: Any) -> tuple[Any, ...]:
        at = core * turns + number
        return tuple(
            pltpu.make_async_copy(origin, target.at[at], refs.moved.at[n])
            for n, (origin, target) in enumerate(((refs.table, refs.tables), (refs.columns, refs.ordered)))
        )

    @pl.when(step == 0)
    def _() -> None:
        refs.fill[0] = 0
        refs.made[0, 0, 0] = 0
        refs.gathered[...] = jnp.zeros(refs.gathered.shape, jnp.int32)

    given = refs.given[...]
    there = (given[slots : slots + 1] >= 0) & jnp.logical_not(last) & (core * turns + step < blocks)
    hot = jnp.broadcast_to(there.astype(jnp.float32), (SUBLANES, block))
    fill = refs.fill[0]
    earlier = dot(hot, _triangle(block), (1, 0))[:1]
    to = jnp.where(there, earlier + fill.astype(jnp.float32), -1.0)
    count = jnp.sum(hot[:1]).astype(jnp.int32)
    # a place that no pair has yet is zero, so numbers are kept larger by one
    larger = given + 1
    if beyond := refs.gathered.shape[0] - slots - 2:  # Mosaic has no empty vectors
        larger = jnp.concatenate([larger, jnp.zeros((beyond, block), jnp.int32)], axis=0)
    refs.gathered[...] = refs.gathered[...] | moved(larger, to)
    made = refs.made[0, 0, 0]
    full = (fill + count >= block) | (last & ((fill > 0) | (made == 0)))  # a core makes a block even without pairs

    @pl.loop(0, full.astype(jnp.int32))
    def _(only: Any) -> None:
        @pl.when(made > 0)
        def _() -> None:
            for dma in leave(made - 1):
                dma.wait()

        table = refs.gathered[...] - 1
        order_block(
            refs.table, refs.columns, columns, table[:slots], table[slots : slots + 1], table[slots + 1 : slots + 2]
        )
        for dma in leave(made):
            dma.start()
        refs.made[0, 0, 0] = made + 1
        refs.gathered[...] = moved(larger, to - float(block))

    refs.fill[0] = jnp.where(full, fill + count - block, fill + count)

    @pl.when(last & (refs.made[0, 0, 0] > 0))
    def _() -> None:
        for dma in leave(refs.made[0, 0, 0] - 1):
            dma.wait()


def order_pairs(
    rows: jax.Array, peer: jax.Array, address: jax.Array, group: int, *, launch: Launch
) -> tuple[Columns, jax.Array, jax.Array, jax.Array]:
    """Orders pairs within blocks of pairs that exist.

    Args:
      rows: int32 `[P, slots]`, rows of each pair in slot order, negative where there is none.
      peer, address: int32 `[P]`; the peer is `-1` for no pair.
      group: pairs of a column (`reduce_slots.pairs_beside`); divides 128.

    Returns:
      The layout of the tables; tables int32 `[blocks, 1, words]`; the rows again, as columns, one group beside the
      other, since unused lanes take memory too: int32 `[blocks, group, block / group * slots]`; and int32 `[cores]`,
      how many of its blocks each core made, at least one. Other blocks are unspecified.
    """
    count, slots = rows.shape
    block = min(BLOCK, -(-count // 128) * 128)
    blocks = -(-count // block)
    turns = divided(blocks, launch.cores)
    columns = Columns(slots, block)
    beside = group, block // group * slots
    lines = -(-(slots + 2) // SUBLANES) * SUBLANES
    given = jnp.concatenate([rows.T, peer[None], address[None]], axis=0)
    given = jnp.pad(given, ((0, 0), (0, blocks * block - count)), constant_values=-1)

    def block_of(core: Any, step: Any) -> Any:
        return 0, jnp.minimum(core * turns + jnp.minimum(step, turns - 1), blocks - 1)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    table, ordered, made = launch.call(
        functools.partial(_body, columns=columns, blocks=blocks),
        _Refs,
        ["given", "tables", "ordered", "made", "gathered", "table", "columns", "moved", "fill"],
        name="xen_moe_order_pairs",
        remote=False,
        by_dma=True,
        shared=True,
        grid_spec=pl.GridSpec(
            grid=(launch.cores, turns + 1),
            in_specs=[pl.BlockSpec((slots + 2, block), block_of)],
            out_specs=[
                hbm,
                hbm,
                pl.BlockSpec((1, 1, 1), lambda core, step: (core, 0, 0), memory_space=pltpu.SMEM),
            ],
            scratch_shapes=[
                pltpu.VMEM((lines, block), jnp.int32),
                pltpu.VMEM((1, columns.words), jnp.int32),
                pltpu.VMEM(beside, jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            ((launch.cores * turns, 1, columns.words), jnp.int32),
            ((launch.cores * turns, *beside), jnp.int32),
            ((launch.cores, 1, 1), jnp.int32),
        ],
    )(given)
    return columns, table, ordered, made.reshape(-1)
