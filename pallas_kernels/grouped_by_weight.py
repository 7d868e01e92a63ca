"""Gradient of a grouped matmul by the weights: `rows[group].T @ cotangents[group]` for each expert.

What moves: tiles of rows `[C, A]` and of cotangents `[C, B]`, of which a visit multiplies the rows of one expert, in
pieces as deep as the matrix unit. A piece may have rows of other experts, and rows past the last expert, which may be
uninitialised memory: zeros take their place in both operands. The sums of an expert stay in VMEM in float32. A turn of
the loop adds the products of two pieces to them, one after the other, because the matrix units wait where a turn
begins; an odd last piece has a turn of its own. Every turn also writes the sums, rounded, to the block of the result,
which leaves after the expert's last visit: so no pass over the sums stands between two experts.

Tiles of a weight are the first two dimensions of the grid; two cores share the first. Tiles of many rows are cut at
fewer experts, so fewer pieces are filled in part.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.grouped_transposed import ALIGNMENT, rows_of_visit, visits_of
from xen_moe_jax.pallas_kernels.launch import Launch, precision


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """Division of the kernel's work.

    Attributes:
      rows: rows that a visit reads; it divides `C`. above, columns: of a tile of the result; they divide `A` and `B`.
      piece: rows that are multiplied at a time, a multiple of 16; it divides `rows`.
    """

    rows: int
    above: int
    columns: int
    piece: int

    def vmem_bytes(self, itemsize: int) -> int:
        """Returns the bytes of VMEM that the kernel takes: two blocks of each operand and of the result, whose elements
        have `itemsize` bytes; the float32 sums; and the new float32 sums that a turn computes before it stores them."""
        given = 2 * self.rows * (self.above + self.columns) * itemsize
        return given + self.above * self.columns * (2 * 4 + 2 * itemsize)


def pieces_of(begin: Any, end: Any, tiles: WeightTiles) -> tuple[Any, Any]:
    """Returns how the rows `[begin, end)` of a tile are cut into pieces: the first row of the first piece, and the
    number of pieces."""
    first = lax.div(begin, ALIGNMENT) * ALIGNMENT
    count = lax.div(end - first + (tiles.piece - 1), tiles.piece)
    # where the last piece would end behind the tile, all of them begin earlier, with rows of other experts
    return jnp.minimum(first, tiles.rows - count * tiles.piece), count


def _body(refs: Any, *, tiles: WeightTiles, local: int) -> None:
    """Body of the kernel: one visit. Visits of the expert number `local` have nothing to do."""
    visit, expert = pl.program_id(2), refs.experts[pl.program_id(2)]
    begin, end = rows_of_visit(refs, visit, tiles.rows)
    first, count = pieces_of(begin, end, tiles)
    starts = (visit == 0) | (refs.experts[jnp.maximum(visit - 1, 0)] != expert)
    some = (expert < local) & (begin < end)

    count = jnp.where(some, count, 0)

    def multiply(number: Any, pieces: int) -> None:
        """Adds the products of `pieces` pieces from piece `number` on to the sums, and writes the sums once."""
        total = jnp.where(starts & (number == 0), 0.0, refs.total[...])
        for n in range(pieces):
            at = pl.multiple_of(first + (number + n) * tiles.piece, ALIGNMENT)

            def masked(ref: Any, at: Any = at) -> jax.Array:
                value = ref[pl.ds(at, tiles.piece)]
                row = lax.broadcasted_iota(jnp.int32, value.shape, 0) + at
                return jnp.where((row >= begin) & (row < end), value, jnp.zeros_like(value))

            total = total + lax.dot_general(
                masked(refs.rows),
                masked(refs.cotangents),
                (((0,), (0,)), ((), ())),
                precision(refs.rows.dtype),
                preferred_element_type=jnp.float32,
            )
        refs.total[...] = total
        refs.out[0] = total.astype(refs.out.dtype)

    done: Any = 0
    for pieces in (2, 1) if tiles.rows > tiles.piece else (1,):
        turns = lax.div(count - done, pieces)

        @pl.loop(0, turns)
        def _(turn: Any, pieces: int = pieces, done: Any = done) -> None:
            multiply(done + turn * pieces, pieces)

        done = done + turns * pieces

    @pl.loop(0, ((expert < local) & starts & jnp.logical_not(some)).astype(jnp.int32))
    def _(only: Any) -> None:  # the one visit of an expert without rows
        del only
        refs.out[...] = jnp.zeros_like(refs.out)


def grouped_by_weight(
    rows: jax.Array, cotangents: jax.Array, group_sizes: jax.Array, *, tiles: WeightTiles, launch: Launch
) -> jax.Array:
    """Sums of outer products of the rows of each expert.

    Args:
      rows: `[C, A]`, sorted by expert. cotangents: `[C, B]` of the same dtype. Both are not read past the last group.
      group_sizes: int32 `[L]`, rows of each expert.

    Returns:
      `[L, A, B]` in the dtype of the rows, added up in float32; zero for an expert without rows.
    """
    (count, depth), width, local = rows.shape, cotangents.shape[1], group_sizes.shape[0]
    table = visits_of(group_sizes.astype(jnp.int32), count, tiles.rows, least=1)

    def of_rows(a: Any, b: Any, v: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del b, expert, ends
        return tile[v], a

    def of_cotangents(a: Any, b: Any, v: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del a, expert, ends
        return tile[v], b

    def of_weights(a: Any, b: Any, v: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del tile, ends
        return jnp.minimum(expert[v], local - 1), a, b

    return launch.call(
        functools.partial(_body, tiles=tiles, local=local),
        types.SimpleNamespace,
        ["tiles", "experts", "ends", "rows", "cotangents", "out", "total"],
        name="xen_moe_grouped_by_weight",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(depth // tiles.above, width // tiles.columns, table[0].shape[0]),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.above), of_rows),
                pl.BlockSpec((tiles.rows, tiles.columns), of_cotangents),
            ],
            out_specs=pl.BlockSpec((1, tiles.above, tiles.columns), of_weights),
            scratch_shapes=[pltpu.VMEM((tiles.above, tiles.columns), jnp.float32)],
        ),
        out_shape=((local, depth, width), rows.dtype),
    )(*table, rows, cotangents)
