"""Gradients of grouped matmuls by their rows: `sum over p of cotangent_p [C, A_p] @ weights_p[expert].T`, in one
kernel, and the same behind an activation.

What moves: weights as they lie, `[L, B, A]`, of which both operands are contracted along their last axis, so that no
transposed copy of them is made; the cotangents of several matmuls of the same rows (gate and up), whose products are
added up in float32 before the sum is rounded once and written.

Who does it: a visit is a tile of rows and an expert with rows in it. Tiles come in order, so a tile that has rows of
several experts stays in VMEM for all of them. Of a tile, a visit multiplies the pieces that hold rows of its expert.
Rows past the last expert are written as zeros. Tiles of columns are the first dimension of the grid; two cores share
them.

`activation_gradients` has more to do where a piece's sums are complete: the sums are the cotangent of an activation's
output, and it writes the cotangents of the activation's operands, so that no pass over the rows follows.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
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
      rows, columns: of a tile of the result; `rows` divides `C`.
      depth: elements of the contracted dimension in a step; it divides that dimension.
      piece: rows that are multiplied at a time, a multiple of 16; it divides `rows`.
    """

    rows: int
    columns: int
    depth: int
    piece: int

    def vmem_bytes(self, operands: int, itemsize: int, results: int = 1) -> int:
        """Returns the bytes of VMEM that the kernel takes for `operands` cotangents, each with a weight, and `results`
        blocks of the size of the result."""
        given = 2 * operands * (self.rows + self.columns) * self.depth * itemsize
        return given + self.rows * self.columns * (4 + 2 * results * itemsize)


def visits_of(group_sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the visits in order: int32 `[V]`, the tile of rows of each visit; `[V]`, its group; and `[G]`, the end of
    each group's rows. `V` is `rows / tile + G`. Visits that are not needed come last, with the last tile and group `G`.

    Args:
      group_sizes: int32 `[G]`, which add up to `rows`. tile: rows of a tile.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    first = (ends - group_sizes) // tile
    count = jnp.where(group_sizes > 0, (ends - 1) // tile - first + 1, 0)
    until = jnp.cumsum(count, dtype=jnp.int32)
    groups, tiles = group_sizes.shape[0], rows // tile
    visit = jnp.arange(tiles + groups, dtype=jnp.int32)
    group = jnp.sum(until[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
    of_group = jnp.arange(groups, dtype=jnp.int32)[None, :] == group[:, None]
    begin = jnp.sum(jnp.where(of_group, (first - until + count)[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.where(group < groups, jnp.clip(begin + visit, 0, tiles - 1), tiles - 1), group, ends


Store = Callable[[Any, jax.Array], None]
"""`(block of a result, float32 values of a piece)`: writes the rows of the expert, and leaves those of others. A block
of numbers of rows, `[1, 1, pieces, piece]`, takes values `[1, piece]`."""
Finish = Callable[[Any, Any, jax.Array, Store], None]
"""`(references, rows of the piece, its sums float32 [piece, columns], store)`: makes the results of a piece."""


def _body(refs: Any, *, tiles: Tiles, pairs: Sequence[tuple[str, str]], local: int, outs: int, finish: Finish) -> None:
    visit, step = pl.program_id(1), pl.program_id(2)
    expert, last = refs.experts[visit], pl.num_programs(2) - 1
    above = refs.tiles[visit] * tiles.rows
    begin = jnp.where(expert > 0, refs.ends[jnp.maximum(expert - 1, 0)], 0) - above
    end = refs.ends[jnp.minimum(expert, local)] - above
    first = lax.div(jnp.maximum(begin, 0), tiles.piece)
    behind = lax.div(jnp.minimum(end, tiles.rows) + (tiles.piece - 1), tiles.piece)

    def rows_of(number: Any) -> Any:
        return pl.ds(pl.multiple_of(number * tiles.piece, tiles.piece), tiles.piece)

    @pl.loop(first, jnp.where(expert < local, behind, first))
    def _(number: Any) -> None:
        here = rows_of(number)
        total: Any = None
        for cotangent, weight in pairs:
            left, right = getattr(refs, cotangent)[here], getattr(refs, weight)[0]
            product = lax.dot_general(
                left, right, (((1,), (1,)), ((), ())), precision(left.dtype), preferred_element_type=jnp.float32
            )
            total = product if total is None else total + product
        is_first = begin <= number * tiles.piece

        def store(out: Any, value: jax.Array) -> None:
            of_rows = len(out.shape) == 4
            at = (0, 0, pl.ds(number, 1)) if of_rows else (here,)
            row = lax.broadcasted_iota(jnp.int32, value.shape, int(of_rows)) + number * tiles.piece
            mine = (row >= begin) & (row < end)
            others = jnp.where(is_first, 0.0, out[at].astype(jnp.float32))  # rows of no expert are zero
            out[at] = jnp.where(mine, value, others).astype(out.dtype)

        if refs.total is None:
            finish(refs, here, total, store)
            return

        @pl.when(step == 0)
        def _() -> None:
            refs.total[here] = total

        @pl.when(step > 0)
        def _() -> None:
            refs.total[here] += total

        @pl.when(step == last)
        def _() -> None:
            finish(refs, here, refs.total[here], store)

    none = lax.div(jnp.maximum(begin, 0) + (tiles.piece - 1), tiles.piece)

    @pl.loop(none, jnp.where((expert == local) & (step == last), behind, none))
    def _(number: Any) -> None:
        for n in range(outs):
            out = getattr(refs, f"out_{n}")
            if len(out.shape) == 4:
                out[0, 0, pl.ds(number, 1)] = jnp.zeros((1, tiles.piece), out.dtype)
            else:
                out[rows_of(number)] = jnp.zeros((tiles.piece, out.shape[1]), out.dtype)


def _sums(refs: Any, here: Any, total: jax.Array, store: Store) -> None:
    del here
    store(refs.out_0, total)


def grouped_transposed(
    cotangents: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    tiles: Tiles,
    launch: Launch,
) -> jax.Array:
    """Rows times the transposed weights of their experts.

    Args:
      cotangents: each `[C, A]`, sorted by expert. weights: each `[L, B, A]` of the same dtype.
      group_sizes: int32 `[L]`, rows of each expert.

    Returns:
      `[C, B]` in the dtype of the cotangents, zero past the last group.
    """
    name = "xen_moe_grouped_transposed"
    return _launched(name, cotangents, weights, group_sizes, (), finish=_sums, results=1, tiles=tiles, launch=launch)[0]


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
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Gradients of `(f * a(projections)) @ weight[expert]`, without the product's value.

    Args:
      cotangent: `[C, A]`, of the product. weight: `[L, B, A]`. group_sizes: int32 `[L]`.
      projections: each `[C, B]`, operands of the activation `a`. factors: float32 `[C]`, `f`.
      activation: `a`, with `a.gradients(cotangent, *projections)`, on float32.
      tiles: their columns divide `B`.

    Returns:
      The cotangents of the projections; `f * a(projections)`, `[C, B]`; and float32 `[C]`, the cotangent of `f`. All of
      them are zero past the last group.
    """

    def finish(refs: Any, here: Any, total: jax.Array, store: Store) -> None:
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

    *by_projections, weighted, by_factors = _launched(
        "xen_moe_activation_gradients",
        [cotangent],
        [weight],
        group_sizes,
        [*projections, factors[:, None]],
        finish=finish,
        results=len(projections) + 1,
        of_rows=1,
        tiles=tiles,
        launch=launch,
    )
    return by_projections, weighted, jnp.sum(by_factors, axis=0).reshape(-1)


def _launched(
    name: str,
    cotangents: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    extra: Sequence[jax.Array],
    *,
    finish: Finish,
    results: int,
    of_rows: int = 0,
    tiles: Tiles,
    launch: Launch,
) -> list[jax.Array]:
    """Runs the kernel. `extra`: operands `[C, B]` or `[C, 1]` of `finish`; `results` are `[C, B]` in the dtype of the
    cotangents, and `of_rows` more float32 `[N, C / rows, rows / piece, piece]` for `N` tiles of columns."""
    (rows, depth), (local, width, _), dtype = cotangents[0].shape, weights[0].shape, cotangents[0].dtype
    sizes = group_sizes.astype(jnp.int32)
    behind = jnp.maximum(rows - jnp.sum(sizes, dtype=jnp.int32), 0)  # what follows the last expert is a group, too
    table = visits_of(jnp.append(sizes, behind), rows, tiles.rows)
    names = [(f"cotangent_{n}", f"weight_{n}") for n in range(len(weights))]
    across, steps = pl.cdiv(width, tiles.columns), depth // tiles.depth
    numbers = (tiles.rows // tiles.piece, tiles.piece)

    def of_cotangents(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del n, expert, ends
        return tile[v], k

    def of_weights(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del tile, ends
        return jnp.minimum(expert[v], local - 1), n, k

    def of_tiles(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del k, expert, ends
        return tile[v], n

    def of_factors(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del n, k, expert, ends
        return tile[v], 0

    def of_sums(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del k, expert, ends
        return n, tile[v], 0, 0

    block = pl.BlockSpec((tiles.rows, tiles.columns), of_tiles)
    beside = [block if a.shape[1] == width else pl.BlockSpec((tiles.rows, 1), of_factors) for a in extra]
    outs = results + of_rows
    references = ["tiles", "experts", "ends", *(c for c, _ in names), *(w for _, w in names)]
    references += [f"extra_{n}" for n in range(len(extra))] + [f"out_{n}" for n in range(outs)]
    scratch = [pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)] if steps > 1 else []
    return launch.call(
        functools.partial(_body, tiles=tiles, pairs=names, local=local, outs=outs, finish=finish),
        functools.partial(types.SimpleNamespace, **({} if scratch else {"total": None})),
        [*references, *(["total"] if scratch else [])],
        name=name,
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(across, table[0].shape[0], steps),
            in_specs=[pl.BlockSpec((tiles.rows, tiles.depth), of_cotangents)] * len(names)
            + [pl.BlockSpec((1, tiles.columns, tiles.depth), of_weights)] * len(names)
            + beside,
            out_specs=[block] * results + [pl.BlockSpec((1, 1, *numbers), of_sums)] * of_rows,
            scratch_shapes=scratch,
        ),
        out_shape=[((rows, width), dtype)] * results
        + [((across, rows // tiles.rows, *numbers), jnp.float32)] * of_rows,
    )(*table, *cotangents, *weights, *extra)
