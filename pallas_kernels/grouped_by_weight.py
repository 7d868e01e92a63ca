"""Gradient of a grouped matmul by the weights: `rows[group].T @ cotangents[group]` for each expert.

What moves: tiles of rows `[C, A]` and of cotangents `[C, B]`, of which a visit multiplies the rows of one expert, in
pieces as deep as the matrix unit. A piece may have rows of other experts, and rows past the last expert, which may be
uninitialised memory: zeros take their place in both operands. The sums of an expert stay in VMEM in float32. A turn of
the loop adds the products of two pieces to them, one after the other, because the matrix units wait where a turn
begins; an odd last piece has a turn of its own. Every turn also writes the sums, rounded, to the block of the result,
which leaves after the expert's last visit: so no pass over the sums stands between two experts.

Tiles of a weight are the first two dimensions of the grid; two cores share the first. Tiles of many rows are cut at
fewer experts, so fewer pieces are filled in part.

A call may have the rows of a window alone. The float32 sums of its last expert stay in HBM, and the next window's call
goes on with them: the additions, and their order, are those of one call.
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

from xen_moe_jax.pallas_kernels.grouped_transposed import ALIGNMENT, Window, rows_of_visit, visits_of
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


def _body(refs: Any, *, tiles: WeightTiles, local: int, window: Window | None) -> None:
    """Body of the kernel: one visit. Visits of the expert number `local` have nothing to do."""
    visit, expert = pl.program_id(2), refs.experts[pl.program_id(2)]
    begin, end = rows_of_visit(refs, visit, tiles.rows)
    first, count = pieces_of(begin, end, tiles)
    starts = (visit == 0) | (refs.experts[jnp.maximum(visit - 1, 0)] != expert)
    some = (expert < local) & (begin < end)

    count = jnp.where(some, count, 0)
    if window is not None:
        kept = [pl.ds(pl.program_id(n) * size, size) for n, size in enumerate((tiles.above, tiles.columns))]
        goes_on = (visit == 0) & (refs.cut[0] > 0)
        starts &= jnp.logical_not(goes_on)

        @pl.when(goes_on)
        def _() -> None:
            pltpu.sync_copy(refs.sums.at[*kept], refs.total)

        @pl.loop(0, ((visit == 0) & (refs.cut[1] > 0)).astype(jnp.int32))
        def _(only: Any) -> None:  # the window has no rows: what is written are the sums of the last expert
            del only
            if window.first == 0:
                refs.total[...] = jnp.zeros_like(refs.total)
            refs.out[0] = refs.total[...].astype(refs.out.dtype)

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

    if window is not None and window.first + window.count < window.rows:

        @pl.when(visit == pl.num_programs(2) - 1)
        def _() -> None:
            pltpu.sync_copy(refs.total, refs.sums.at[*kept])


def _cut(group_sizes: jax.Array, window: Window) -> tuple[list[jax.Array], Any]:
    """Returns int32 `[3]`: 1 if the sums of the window before go on, or are written because this one has no rows; 1 if
    it has no rows; and the expert of its last visit. Then the `least` of `visits_of`: experts without any rows are
    visited in the first window."""
    ends, some = jnp.cumsum(group_sizes, dtype=jnp.int32), group_sizes > 0
    begins, number = ends - group_sizes, jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    empty = jnp.sum(window.of(group_sizes)) == 0
    known = some & (begins < window.first + window.count)
    least: Any = 0
    if window.first == 0:
        goes_on, known, least = jnp.array(False), known | ~some, (~some).astype(jnp.int32)
    else:
        goes_on = empty | jnp.any((begins < window.first) & (ends > window.first))
    last = jnp.max(jnp.where(known, number, -1))
    last = jnp.where(last < 0, number[-1], last)
    return [jnp.stack([goes_on.astype(jnp.int32), empty.astype(jnp.int32), last])], least


def grouped_by_weight(
    rows: jax.Array,
    cotangents: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: WeightTiles,
    launch: Launch,
    window: Window | None = None,
) -> list[jax.Array]:
    """Sums of outer products of the rows of each expert.

    Args:
      rows: `[C, A]`, sorted by expert. cotangents: `[C, B]` of the same dtype. Both are not read past the last group.
        With a window they have its rows alone.
      group_sizes: int32 `[L]`, rows of each expert.
      window: its `into` are the results of the window before it; the first window has none.

    Returns:
      `[L, A, B]` in the dtype of the rows, added up in float32; zero for an expert without rows. With a window the sums
      of experts whose rows begin behind it are unspecified, and a second result is the float32 sums `[A, B]` of its
      last expert.
    """
    (count, depth), width, local = rows.shape, cotangents.shape[1], group_sizes.shape[0]
    group_sizes = group_sizes.astype(jnp.int32)
    least: Any = 1
    cut: list[jax.Array] = []
    if window is not None:
        cut, least = _cut(group_sizes, window)
        group_sizes = window.of(group_sizes)
    table = visits_of(group_sizes, count, tiles.rows, least)

    def of_rows(a: Any, b: Any, v: Any, tile: Any, expert: Any, *_: Any) -> Any:
        del b, expert
        return tile[v], a

    def of_cotangents(a: Any, b: Any, v: Any, tile: Any, expert: Any, *_: Any) -> Any:
        del a, expert
        return tile[v], b

    def of_weights(a: Any, b: Any, v: Any, tile: Any, expert: Any, ends: Any, *cut: Any) -> Any:
        del tile, ends
        return jnp.minimum(expert[v], cut[0][2] if cut else local - 1), a, b

    hbm, into = pl.BlockSpec(memory_space=pltpu.HBM), [] if window is None else list(window.into.values())
    out_spec = pl.BlockSpec((1, tiles.above, tiles.columns), of_weights)
    results: list[Any] = [((local, depth, width), rows.dtype), *[((depth, width), jnp.float32)] * len(cut)]
    names = [
        "tiles",
        "experts",
        "ends",
        *["cut"] * len(cut),
        "rows",
        "cotangents",
        *["given", "sums_given"][: len(into)],
    ]
    return launch.call(
        functools.partial(_body, tiles=tiles, local=local, window=window and dataclasses.replace(window, into={})),
        types.SimpleNamespace,
        [*names, "out", *["sums"] * len(cut), "total"],
        name="xen_moe_grouped_by_weight",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(cut),
            grid=(depth // tiles.above, width // tiles.columns, table[0].shape[0]),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.above), of_rows),
                pl.BlockSpec((tiles.rows, tiles.columns), of_cotangents),
                *[hbm] * len(into),
            ],
            out_specs=[out_spec, *[hbm] * len(cut)],
            scratch_shapes=[pltpu.VMEM((tiles.above, tiles.columns), jnp.float32)],
        ),
        out_shape=results,
        aliases={3 + len(cut) + 2 + n: n for n in range(len(into))},
    )(*table, *cut, rows, cotangents, *into)
