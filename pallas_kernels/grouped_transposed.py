"""Gradient of grouped matmuls by their rows: `sum over p of cotangent_p [C, A_p] @ weights_p[expert].T`, in one kernel.

What moves: weights as they lie, `[L, B, A]`, of which both operands are contracted along their last axis, so that no
transposed copy of them is made; the cotangents of several matmuls of the same rows (gate and up), whose products are
added up in float32 before the sum is rounded once and written.

Who does it: a visit is a tile of rows and an expert with rows in it. Tiles come in order, so a tile that has rows of
two experts stays in VMEM for both. Rows past the last expert are written as zeros. Tiles of columns are the first
dimension of the grid; two cores share them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence
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
    """

    rows: int
    columns: int
    depth: int

    def vmem_bytes(self, operands: int, itemsize: int) -> int:
        """Returns the bytes of VMEM that the kernel takes for `operands` cotangents, each with a weight."""
        given = 2 * operands * (self.rows + self.columns) * self.depth * itemsize
        return given + self.rows * self.columns * (4 + 2 * itemsize)


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


def _body(refs: Any, *, tiles: Tiles, pairs: Sequence[tuple[str, str]], local: int) -> None:
    visit, step, total, out = pl.program_id(1), pl.program_id(2), refs.total, refs.out
    expert, tile = refs.experts[visit], refs.tiles[visit]
    before = refs.tiles[jnp.maximum(visit - 1, 0)]
    begins = (visit == 0) | (before != tile)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(expert < local)
    def _() -> None:
        for cotangent, weight in pairs:
            left, right = getattr(refs, cotangent)[...], getattr(refs, weight)[0]
            total[...] += lax.dot_general(
                left, right, (((1,), (1,)), ((), ())), precision(left.dtype), preferred_element_type=jnp.float32
            )

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        row = lax.broadcasted_iota(jnp.int32, total.shape, 0) + tile * tiles.rows
        begin = jnp.where(expert > 0, refs.ends[jnp.maximum(expert - 1, 0)], 0)
        mine = (row >= begin) & (row < refs.ends[jnp.minimum(expert, local)])

        @pl.when(begins)
        def _() -> None:
            out[...] = jnp.where(mine, total[...], 0.0).astype(out.dtype)

        @pl.when(jnp.logical_not(begins) & (expert < local))
        def _() -> None:
            out[...] = jnp.where(mine, total[...], out[...].astype(jnp.float32)).astype(out.dtype)


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
    (rows, depth), (local, width, _) = cotangents[0].shape, weights[0].shape
    sizes = group_sizes.astype(jnp.int32)
    behind = jnp.maximum(rows - jnp.sum(sizes, dtype=jnp.int32), 0)  # what follows the last expert is a group, too
    table = visits_of(jnp.append(sizes, behind), rows, tiles.rows)
    names = [(f"cotangent_{n}", f"weight_{n}") for n in range(len(weights))]

    def of_rows(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del n, expert, ends
        return tile[v], k

    def of_weights(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del tile, ends
        return jnp.minimum(expert[v], local - 1), n, k

    def of_out(n: Any, v: Any, k: Any, tile: Any, expert: Any, ends: Any) -> Any:
        del k, expert, ends
        return tile[v], n

    return launch.call(
        functools.partial(_body, tiles=tiles, pairs=names, local=local),
        types.SimpleNamespace,
        ["tiles", "experts", "ends", *(c for c, _ in names), *(w for _, w in names), "out", "total"],
        name="xen_moe_grouped_transposed",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(width, tiles.columns), table[0].shape[0], depth // tiles.depth),
            in_specs=[pl.BlockSpec((tiles.rows, tiles.depth), of_rows)] * len(names)
            + [pl.BlockSpec((1, tiles.columns, tiles.depth), of_weights)] * len(names),
            out_specs=pl.BlockSpec((tiles.rows, tiles.columns), of_out),
            scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)],
        ),
        out_shape=((rows, width), cotangents[0].dtype),
    )(*table, *cotangents, *weights)
