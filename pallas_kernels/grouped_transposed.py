"""Grouped matmuls and their gradients by the rows, in one kernel for several weights of the same rows:
`rows [C, A] @ weights_p[expert]`, with the activation of the products; `sum over p of cotangent_p [C, A_p] @
weights_p[expert].T`; and the latter behind an activation.

What moves: weights as they lie. For a gradient both operands are contracted along their last axis, so that no
transposed copy of `[L, B, A]` is made, and the products of several matmuls (gate and up) are added up in float32 before
the sum is rounded once and written.

Who does it: a visit is a tile of rows and an expert with rows in it. Tiles come in order, so a tile that has rows of
several experts stays in VMEM for all of them. A visit multiplies the rows of its expert in pieces, of which the last
one may be longer than the others. The first piece begins with at most 15 rows of another expert; only where the last
piece would end behind the tile do all pieces begin earlier. The gradients write rows past the last expert as zeros, the
products leave them unspecified. Tiles of columns are the first dimension of the grid; two cores share them.

The combines of v5e read rows in halves, `[2 * C, B / 2]`: the first and the second half of each row are two rows, one
behind the other. The kernels write this form with `halves`: a visit multiplies both halves of the columns in one step.

`activation_gradients` has more to do where a piece's sums are complete: the sums are the cotangent of an activation's
output, and it writes the cotangents of the activation's operands, so that no pass over the rows follows.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch, precision


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Division of the kernel's work.

    Attributes:
      rows, columns: of a tile of the result; `rows` divides `C`. With `halves` the tile has `2 * rows` rows.
      depth: elements of the contracted dimension in a step; it divides that dimension.
      piece: rows that are multiplied at a time, a multiple of 32; it divides `rows`.
    """

    rows: int
    columns: int
    depth: int
    piece: int

    @property
    def longer(self) -> tuple[int, ...]:
        """Numbers of rows of the longer pieces, ascending: 1 1/4, 1 1/2 and 1 3/4 times `piece`, of which only 1 1/2
        remains for 32 rows. A longer piece takes the place of an expert's last whole piece and of the rows behind it.
        There is none where a tile is one piece."""
        apart = max(ALIGNMENT, self.piece // 4)
        return tuple(range(self.piece + apart, 2 * self.piece, apart)) if self.piece < self.rows else ()

    def vmem_bytes(self, weights: int, given: int, itemsize: int, results: int = 1) -> int:
        """Returns the bytes of VMEM that the kernel's blocks take. Blocks of operands and of results are there twice,
        because the next step's blocks arrive while a step computes; blocks of sums are there once.

        Args:
          weights: number of weights, each with a block of float32 sums. With `halves` each half counts as a weight.
          given: number of operands `[C, A]` that are multiplied. itemsize: bytes of an element of operands and results.
          results: number of blocks `[rows, columns]` of results, and of operands that only `finish` reads.
        """
        operands = 2 * (given * self.rows + weights * self.columns) * self.depth * itemsize
        return operands + self.rows * self.columns * (4 * weights + 2 * results * itemsize)


def visits_of(group_sizes: jax.Array, rows: int, tile: int, least: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the visits in order: int32 `[V]`, the tile of rows of each visit; `[V]`, its group; and `[G]`, the end of
    each group's rows. `V` is `rows / tile + G`. Visits that are not needed come last, with the last tile and group `G`.

    Args:
      group_sizes: int32 `[G]`, which add up to at most `rows`. tile: rows of a tile. least: 1 for a visit of each group
        without rows, too.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    first = (ends - group_sizes) // tile
    count = jnp.where(group_sizes > 0, (ends - 1) // tile - first + 1, least)
    until = jnp.cumsum(count, dtype=jnp.int32)
    groups, tiles = group_sizes.shape[0], rows // tile
    visit = jnp.arange(tiles + groups, dtype=jnp.int32)
    group = jnp.sum(until[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
    of_group = jnp.arange(groups, dtype=jnp.int32)[None, :] == group[:, None]
    begin = jnp.sum(jnp.where(of_group, (first - until + count)[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.where(group < groups, jnp.clip(begin + visit, 0, tiles - 1), tiles - 1), group, ends


@dataclasses.dataclass(frozen=True)
class Window:
    """The rows from `first` on, `count` of `rows`; multiples of a tile's rows. A kernel reads and makes these alone.

    An operand of `count` rows has the rows of the window, and one of `rows` rows has all of them. `into` has the
    results with all rows by their numbers: an array, whose other rows stay as they are, or None for a fresh one, whose
    other rows are unspecified. Every other result has the rows of the window.
    """

    first: int
    count: int
    rows: int
    into: Mapping[int, jax.Array | None] = dataclasses.field(default_factory=dict)

    def of(self, group_sizes: jax.Array) -> jax.Array:
        """Returns int32 `[G]`: how many rows of each group are in the window."""
        ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
        inside = [jnp.clip(at, self.first, self.first + self.count) for at in (ends - group_sizes, ends)]
        return inside[1] - inside[0]


ALIGNMENT = 16
"""A piece of rows begins at a multiple of this, the rows of a tile of bfloat16 in VMEM."""
Store = Callable[[Any, jax.Array], None]
"""`(block of a result, float32 values of a piece)`: writes the rows of the expert, leaves those of experts before it,
and sets those behind it to zero. A block of numbers of rows, `[1, 1, rows / 16, 16]`, takes values `[1, piece]`."""
Finish = Callable[[Any, Any, Sequence[jax.Array], Store], None]
"""`(references, rows of the piece, its sums float32 [piece, columns], store)`: makes the results of a piece."""
Sums = Sequence[Sequence[tuple[int, int]]]
"""The products that are added up in each sum: numbers of the rows and of the weights that are multiplied."""


def pieces_of(begin: Any, end: Any, tiles: Tiles) -> tuple[Any, Any, Any]:
    """Returns how the rows `[begin, end)` of a tile are cut into pieces: the first row of the first piece, the number
    of pieces of `tiles.piece` rows, and the number of the longer piece that follows them, counted from 1 in
    `tiles.longer`; 0 if none follows.

    A piece of `tiles.piece` rows takes as long as a shorter one would, and one longer piece is cheaper than two pieces.
    All results are int32, of the shape of `begin`.

    Args:
      begin, end: int32, numbers of rows within the tile; `begin` may be `end`.
    """
    first, apart = lax.div(begin, ALIGNMENT) * ALIGNMENT, max(ALIGNMENT, tiles.piece // 4)
    count, rest = lax.div(end - first, tiles.piece), lax.rem(end - first, tiles.piece)
    more = lax.div(rest + (apart - 1), apart)
    more = jnp.where((count > 0) & (more <= len(tiles.longer)), more, 0)
    count = jnp.where(more > 0, count - 1, count + (rest > 0))
    size = jnp.where(more > 0, tiles.piece + more * apart, 0)
    # where the last piece would end behind the tile, all of them begin earlier, with rows of other experts
    return jnp.minimum(first, tiles.rows - count * tiles.piece - size), count, more


def rows_of_visit(refs: Any, visit: Any, rows: int) -> tuple[Any, Any]:
    """Returns where the rows of a visit's group begin and end within its tile of `rows` rows; `refs` has the results of
    `visits_of` as `tiles`, `experts` and `ends`."""
    expert, above = refs.experts[visit], refs.tiles[visit] * rows
    begin = jnp.maximum(jnp.where(expert > 0, refs.ends[jnp.maximum(expert - 1, 0)], 0) - above, 0)
    return begin, jnp.minimum(refs.ends[jnp.minimum(expert, refs.ends.shape[0] - 1)] - above, rows)


def _body(
    refs: Any, *, tiles: Tiles, sums: Sums, transposed: bool, local: int, outs: int, zeros: bool, finish: Finish
) -> None:
    """Body of the kernels: one step of one visit. An expert's number from `local` on stands for the rows past the last
    expert, which with `zeros` are a group of their own, or for a visit that has nothing to do."""
    visit, step = pl.program_id(1), pl.program_id(2)
    expert, last = refs.experts[visit], pl.num_programs(2) - 1
    begin, end = rows_of_visit(refs, visit, tiles.rows)
    first, count, more = pieces_of(begin, end, tiles)

    def store_at(first: Any) -> Store:
        def store(out: Any, value: jax.Array) -> None:
            times = out.shape[0] // tiles.rows if len(out.shape) < 4 else 1  # 2 with `halves`

            def put(at: Any, value: jax.Array, axis: int, first: Any) -> None:
                row = lax.broadcasted_iota(jnp.int32, value.shape, axis) + first
                mine = (row >= times * begin) & (row < times * end)
                others = jnp.where(row < times * begin, out[at].astype(jnp.float32), 0.0)
                out[at] = jnp.where(mine, value, others).astype(out.dtype)

            if len(out.shape) < 4:
                put((pl.ds(times * first, value.shape[0]),), value, 0, times * first)
                return
            for n in range(0, value.shape[1], ALIGNMENT):
                at = (0, 0, pl.ds(lax.div(first, ALIGNMENT) + n // ALIGNMENT, 1))
                put(at, value[:, n : n + ALIGNMENT], 1, first + n)

        return store

    def multiply(first: Any, size: int) -> None:
        first = pl.multiple_of(first, ALIGNMENT)
        here, store = pl.ds(first, size), store_at(first)
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))

        def product(rows: int, weight: int) -> jax.Array:
            left, right = getattr(refs, f"rows_{rows}")[here], getattr(refs, f"weight_{weight}")[0]
            return lax.dot_general(left, right, contracted, precision(left.dtype), preferred_element_type=jnp.float32)

        totals = [functools.reduce(lax.add, (product(*pair) for pair in pairs)) for pairs in sums]
        if refs.total_0 is None:
            finish(refs, here, totals, store)
            return
        kept = [getattr(refs, f"total_{n}") for n in range(len(sums))]

        @pl.when(step == 0)
        def _() -> None:
            for ref, total in zip(kept, totals, strict=True):
                ref[here] = total

        @pl.when(step > 0)
        def _() -> None:
            for ref, total in zip(kept, totals, strict=True):
                ref[here] += total

        @pl.when(step == last)
        def _() -> None:
            finish(refs, here, [ref[here] for ref in kept], store)

    @pl.loop(0, jnp.where(expert < local, count, 0))
    def _(number: Any) -> None:
        multiply(first + number * tiles.piece, tiles.piece)

    for which, size in enumerate(tiles.longer, 1):

        @pl.loop(0, ((expert < local) & (more == which)).astype(jnp.int32))
        def _(only: Any, size: int = size) -> None:
            del only
            multiply(first + count * tiles.piece, size)

    if not zeros:
        return
    none = lax.div(begin, tiles.piece)

    @pl.loop(none, jnp.where((expert == local) & (step == last), tiles.rows // tiles.piece, none))
    def _(number: Any) -> None:
        at = pl.multiple_of(number * tiles.piece, tiles.piece)
        for n in range(outs):
            out = getattr(refs, f"out_{n}")
            rows = out.shape[0] // tiles.rows * tiles.piece
            shape = (1, tiles.piece) if len(out.shape) == 4 else (rows, out.shape[1])
            store_at(at)(out, jnp.zeros(shape, jnp.float32))


def _one_sum(refs: Any, here: Any, totals: Sequence[jax.Array], store: Store) -> None:
    del here
    store(refs.out_0, totals[0])


def _in_halves(refs: Any, here: Any, totals: Sequence[jax.Array], store: Store) -> None:
    """Stores the rounded sums `[piece, columns]` of the first and of the second half of the columns as bfloat16
    `[2 * piece, columns]`. A register of bfloat16 holds two rows in words of 32 bits, the first row in the low half: so
    a word is made of the two halves' elements, and no row moves."""
    del here
    dtype = refs.out_0.dtype
    first, second = (lax.bitcast_convert_type(t.astype(dtype).astype(jnp.float32), jnp.int32) for t in totals)
    words = lax.shift_right_logical(first, jnp.int32(16)) | second
    store(refs.out_0, pltpu.bitcast(words, dtype).astype(jnp.float32))


def grouped_products(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    activation: Any = None,
    keep: bool = True,
    halves: bool = False,
    tiles: Tiles,
    launch: Launch,
    window: Window | None = None,
) -> list[jax.Array]:
    """Rows times each of several weights of their experts, and the activation of the products.

    Args:
      rows: `[C, A]`, sorted by expert. weights: each `[L, A, B]` of the same dtype. group_sizes: int32 `[L]`.
      activation: on float32, of the products as they are rounded; None for none.
      keep: the products are results.
      halves: the product is made as rows in halves, `[2 * C, B / 2]`. The rows are bfloat16, there is one weight and no
        activation. Two rows of bfloat16 share words of 32 bits in HBM; in this form they are the halves of one row, so
        that a DMA that reads a row reads no other one. The tiles' columns divide `B / 2`.

    Returns:
      `[C, B]` each in the dtype of the rows, unspecified past the last group: the activation if there is one, and the
      products with `keep`. With `halves`, `[2 * C, B / 2]`.
    """

    def finish(refs: Any, here: Any, totals: Sequence[jax.Array], store: Store) -> None:
        del here
        found = list(totals) if keep else []
        if activation is not None:
            found.insert(0, activation(*(total.astype(rows.dtype).astype(jnp.float32) for total in totals)))
        for n, value in enumerate(found):
            store(getattr(refs, f"out_{n}"), value)

    given = [*weights] * (2 if halves else 1)
    return _launched(
        "xen_moe_grouped_products",
        [rows],
        given,
        group_sizes,
        (),
        sums=[[(0, n)] for n in range(len(given))],
        transposed=False,
        finish=_in_halves if halves else finish,
        results=(activation is not None) + keep * len(weights),
        zeros=False,
        halves=2 if halves else 1,
        tiles=tiles,
        launch=launch,
        window=window,
    )


def grouped_transposed(
    cotangents: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    halves: bool = False,
    tiles: Tiles,
    launch: Launch,
    window: Window | None = None,
) -> jax.Array:
    """Rows times the transposed weights of their experts.

    Args:
      cotangents: each `[C, A]`, sorted by expert. weights: each `[L, B, A]` of the same dtype.
      group_sizes: int32 `[L]`, rows of each expert.
      halves: the result is bfloat16 and has the form of rows in halves, as in `grouped_products`.

    Returns:
      `[C, B]` in the dtype of the cotangents, or `[2 * C, B / 2]` with `halves`; zero past the last group.
    """
    parts, count = 2 if halves else 1, len(weights)
    (out,) = _launched(
        "xen_moe_grouped_transposed",
        cotangents,
        [*weights] * parts,
        group_sizes,
        (),
        sums=[[(n, part * count + n) for n in range(count)] for part in range(parts)],
        finish=_in_halves if halves else _one_sum,
        results=1,
        halves=parts,
        tiles=tiles,
        launch=launch,
        window=window,
    )
    return out


def activation_gradients(
    cotangent: jax.Array,
    weight: jax.Array,
    projections: Sequence[jax.Array],
    factors: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Any,
    tiles: Tiles,
    launch: Launch,
    window: Window | None = None,
) -> list[jax.Array]:
    """Gradients of `(f * a(projections)) @ weight[expert]`, without the product's value.

    Args:
      cotangent: `[C, A]`, of the product. weight: `[L, B, A]`. group_sizes: int32 `[L]`.
      projections: each `[C, B]`, operands of the activation `a`. factors: float32 `[C]`, `f`.
      activation: `a`, with `a.gradients(cotangent, *projections)`, on float32.
      tiles: their columns divide `B`.

    Returns:
      The cotangents of the projections, in their place; `f * a(projections)`, `[C, B]`; and float32
      `[N, C / rows, rows / 16, 16]`, whose sum over `N` tiles of columns is the cotangent of `f`. All of them are zero
      past the last group. With a window the last two have its rows alone.
    """

    def finish(refs: Any, here: Any, totals: Sequence[jax.Array], store: Store) -> None:
        (total,) = totals
        operands = [getattr(refs, f"extra_{n}")[here].astype(jnp.float32) for n in range(len(projections))]
        factor = getattr(refs, f"extra_{len(projections)}")[here]
        inner = activation(*operands)
        for n, value in enumerate((*activation.gradients(total * factor, *operands), inner * factor)):
            store(getattr(refs, f"out_{n}"), value)
        # a product with ones adds up along lanes, and leaves the sums of rows side by side
        ones = jnp.ones((8, total.shape[1]), jnp.float32)
        by_factor = lax.dot_general(
            ones, total * inner, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        store(getattr(refs, f"out_{len(projections) + 1}"), by_factor[:1])

    return _launched(
        "xen_moe_activation_gradients",
        [cotangent],
        [weight],
        group_sizes,
        [*projections, factors[:, None]],
        sums=[[(0, 0)]],
        finish=finish,
        results=len(projections) + 1,
        of_rows=1,
        tiles=tiles,
        launch=launch,
        window=window,
        in_place=len(projections),
    )


def _launched(
    name: str,
    given: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    extra: Sequence[jax.Array],
    *,
    sums: Sums,
    transposed: bool = True,
    finish: Finish,
    results: int,
    of_rows: int = 0,
    zeros: bool = True,
    halves: int = 1,
    tiles: Tiles,
    launch: Launch,
    window: Window | None = None,
    in_place: int = 0,
) -> list[jax.Array]:
    """Runs the kernel.

    Args:
      given: rows `[C, A]`, multiplied as `sums` says with `weights`, `[L, B, A]` if `transposed`, else `[L, A, B]`.
      extra: operands `[C, B]` or `[C, 1]` of `finish`.
      results: number of results `[C, B]` in the dtype of the rows; zero past the last group with `zeros`.
      of_rows: number of further results, float32 `[N, C / rows, rows / 16, 16]`, which have one number of each row for
        each of `N` tiles of columns.
      halves: 2 for results `[2 * C, B / 2]`, rows in halves; else 1. With 2, `weights` has every weight twice: the
        kernel reads blocks of the first half of the columns from the first half of the list, and blocks of the second
        half of the columns from the second half of the list.
      in_place: so many results take the place of the first operands in `extra`. A tile is written when it has been
        read, because the visits of a tile follow each other.

    Returns:
      The results, then the further ones.
    """
    depth, (local, *shape), dtype = given[0].shape[1], weights[0].shape, given[0].dtype
    width = shape[0 if transposed else 1] // halves
    sizes = group_sizes.astype(jnp.int32)
    if window is None:
        window = Window(0, given[0].shape[0], given[0].shape[0])
    else:
        sizes = window.of(sizes)
    if zeros:  # what follows the last expert is a group, too
        sizes = jnp.append(sizes, jnp.maximum(window.count - jnp.sum(sizes, dtype=jnp.int32), 0))
    table = visits_of(sizes, window.count, tiles.rows)
    across, steps = pl.cdiv(width, tiles.columns), depth // tiles.depth

    def above(rows: int) -> int:
        """Tiles in front of the window in an array of `rows` rows."""
        return 0 if rows == window.count else window.first // tiles.rows

    def of_given(first: int, n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del n, expert, ends
        return tile[v] + first, k

    def of_weights(half: int, n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del tile, ends
        n = n + half * across
        return jnp.minimum(expert[v], local - 1), *((n, k) if transposed else (k, n))

    def block(rows: int, one: bool = False) -> pl.BlockSpec:
        """Tiles of an array of `rows` rows, or of an array with one column."""

        def at(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
            del k, expert, ends
            return tile[v] + above(rows), 0 if one else n

        return pl.BlockSpec((tiles.rows, 1) if one else (halves * tiles.rows, tiles.columns), at)

    def of_sums(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del k, expert, ends
        return n, tile[v], 0, 0

    before = 3 + len(given) + len(weights)
    filled = [(n, a) for n, a in window.into.items() if a is not None]
    aliases = {n: n - before for n in range(before, before + in_place)}
    aliases |= {before + len(extra) + at: n for at, (n, _) in enumerate(filled)}
    high = [window.rows if n < in_place or n in window.into else window.count for n in range(results)]
    numbers = (window.count // tiles.rows, tiles.rows // ALIGNMENT, ALIGNMENT)
    outs = results + of_rows
    references = ["tiles", "experts", "ends", *(f"rows_{n}" for n in range(len(given)))]
    references += [f"weight_{n}" for n in range(len(weights))] + [f"extra_{n}" for n in range(len(extra))]
    references += [f"into_{n}" for n, _ in filled] + [f"out_{n}" for n in range(outs)]
    scratch = [pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)] * (len(sums) if steps > 1 else 0)
    of_step = (tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)
    body = functools.partial(
        _body, tiles=tiles, sums=sums, transposed=transposed, local=local, outs=outs, zeros=zeros, finish=finish
    )
    return launch.call(
        body,
        functools.partial(types.SimpleNamespace, **({} if scratch else {"total_0": None})),
        [*references, *(f"total_{n}" for n in range(len(scratch)))],
        name=name,
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(across, table[0].shape[0], steps),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.depth), functools.partial(of_given, above(a.shape[0]))) for a in given
            ]
            + [
                pl.BlockSpec((1, *of_step), functools.partial(of_weights, halves * n // len(weights)))
                for n in range(len(weights))
            ]
            + [block(a.shape[0], a.shape[1] != width) for a in extra]
            + [pl.BlockSpec(memory_space=pltpu.HBM)] * len(filled),
            out_specs=[block(rows) for rows in high] + [pl.BlockSpec((1, 1, *numbers[1:]), of_sums)] * of_rows,
            scratch_shapes=scratch,
        ),
        out_shape=[((halves * rows, width), dtype) for rows in high] + [((across, *numbers), jnp.float32)] * of_rows,
        aliases=aliases,
    )(*table, *given, *weights, *extra, *(a for _, a in filled))
