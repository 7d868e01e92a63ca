"""(source, token) pairs, ordered within blocks: pairs with most rows first, missing pairs last.

What moves: tables alone, block by block through VMEM. So that `reduce_slots` visits only pairs that exist, in
groups of nearly the same number of rows. The order is stable, and the rows of a pair stay in slot order.
A table is permuted by a matrix product with a matrix of zeros and ones, byte by byte, which is exact: a TPU gathers
scalars slowly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xen_moe_jax.pallas_kernels.launch import Launch

BLOCK = 256
"""Pairs that are ordered together at most: counts up to this are exact in bfloat16."""
SUBLANES = 8


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
    facts: Any
    table: Any
    columns: Any


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
    return lax.dot_general(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32)


def ordered(key: jax.Array, bins: int, table: jax.Array) -> jax.Array:
    """Columns of int32 `table [V, N]` in ascending order of int32 `key [1, N]`, in `[0, bins)`; stable. `V` is a
    multiple of 8, `N` at most `BLOCK`.
    """
    count = key.shape[1]
    number = lax.broadcasted_iota(jnp.int32, (-(-bins // SUBLANES) * SUBLANES, count), 0)
    hot = (number == key).astype(jnp.float32)
    row, column = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    earlier = dot(hot, (row < column).astype(jnp.float32), (1, 0))
    behind, to = jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, count), jnp.float32)
    for b in range(bins):
        to = to + hot[b : b + 1] * (earlier[b : b + 1] + behind)
        behind = behind + jnp.sum(hot[b : b + 1], axis=1, keepdims=True)

    chosen = (row.astype(jnp.float32) == to).astype(jnp.float32)  # row `j` has a one for the pair of place `j`
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
      expected: int32 `[R]` at least, records that arrive from each rank. staging_rows: rows of staging.
    """

    columns: Columns
    tables: jax.Array
    rows: jax.Array
    expected: jax.Array
    staging_rows: int


def counted(mask: jax.Array) -> jax.Array:
    """int32 `[1, 1]`: number of true entries of `mask [1, N]`."""
    return jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)


def counted_by_depth(depth: jax.Array, slots: int) -> jax.Array:
    """int32 `[1, N]`: in lane `s < slots`, the number of entries of `depth [1, N]` above `s`; 0 in further lanes."""
    lane = lax.broadcasted_iota(jnp.int32, depth.shape, 1)
    counts = jnp.zeros(depth.shape, jnp.int32)
    for s in range(slots):
        counts = jnp.where(lane == s, counted(depth > s), counts)
    return counts


def order_block(
    table_ref: Any,
    columns_ref: Any,
    columns: Columns,
    rows: jax.Array,
    peer: jax.Array,
    address: jax.Array,
    facts: jax.Array | None,
) -> None:
    """Orders one block: rows `[slots, N]`, peer and address `[1, N]`; without `facts` they are counted here."""
    slots, block = columns.slots, columns.block
    (rows,), depth = packed(rows >= 0, rows)
    if facts is None:
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


def _body(refs: _Refs, *, slots: int, block: int) -> None:
    given = refs.given[...]
    rows, peer, address = given[:slots], given[slots : slots + 1], given[slots + 1 : slots + 2]
    columns = Columns(slots, block)
    order_block(refs.table.at[0], refs.columns.at[0], columns, rows, peer, address, refs.facts[0])


def order_pairs(
    rows: jax.Array, peer: jax.Array, address: jax.Array, group: int, *, launch: Launch
) -> tuple[Columns, jax.Array, jax.Array]:
    """Orders pairs within blocks.

    Args:
      rows: int32 `[P, slots]`, rows of each pair in slot order, negative where there is none.
      peer, address: int32 `[P]`; the peer is `-1` for no pair.
      group: pairs of a column (`reduce_slots.pairs_beside`); divides 128.

    Returns:
      The layout of the tables; tables int32 `[blocks, 1, words]`; and the rows again, as columns, one group beside the
      other, since unused lanes take memory too: int32 `[blocks, group, block / group * slots]`.
    """
    count, slots = rows.shape
    block = min(BLOCK, -(-count // 128) * 128)
    blocks = -(-count // block)
    columns = Columns(slots, block)
    beside = group, block // group * slots
    given = jnp.concatenate([rows.T, peer[None], address[None]], axis=0)
    given = jnp.pad(given, ((0, 0), (0, blocks * block - count)), constant_values=-1)
    depth = jnp.sum(given[:slots] >= 0, axis=0, dtype=jnp.int32).reshape(blocks, block)
    # a pair that exists is deeper than -1, one that does not is not
    depth = jnp.where(given[slots].reshape(blocks, block) >= 0, depth, -1)
    deeper = jnp.concatenate([jnp.arange(slots, dtype=jnp.int32), jnp.full((1,), -1, jnp.int32)])
    facts = jnp.sum(depth[:, None, :] > deeper[:, None], axis=2, dtype=jnp.int32)
    facts = jnp.pad(facts, ((0, 0), (0, block - slots - 1))).reshape(blocks, 1, block)
    table, ordered = launch.call(
        functools.partial(_body, slots=slots, block=block),
        _Refs,
        ["given", "facts", "table", "columns"],
        name="xen_moe_order_pairs",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pl.GridSpec(
            grid=(blocks,),
            in_specs=[
                pl.BlockSpec((slots + 2, block), lambda i: (0, i)),
                pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0)),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, columns.words), lambda i: (i, 0, 0)),
                pl.BlockSpec((1, *beside), lambda i: (i, 0, 0)),
            ],
        ),
        out_shape=[((blocks, 1, columns.words), jnp.int32), ((blocks, *beside), jnp.int32)],
    )(given, facts)
    return columns, table, ordered
