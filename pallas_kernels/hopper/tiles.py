"""Tiles: the division of a Hopper kernel's work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

ROW_ALIGNMENT = 8
"""TMA boxes of swizzled tiles begin at rows that are multiples of this."""
COMPUTE_WARPGROUPS = 2
"""Multiplying warpgroups of a thread block, beside the loading one."""


COLUMN_ALIGNMENT = 32
"""Hidden sizes and widths are multiples of this: 64 bytes, the narrowest swizzle that these kernels lower with."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The division of a kernel's work.

    Attributes:
      m, n, k: a thread block's output tile, and the depth of one stage.
      stages: number of stages of the ring.
      split: the dimension of the tile that the two warpgroups share out, "m" or "n".
      cluster: the dimension along which two blocks stand side by side, or None: "m" shares the right operand, "n" the
        left one.
      delay: number of wgmma that are pending when the next one begins.
      claimed: thread blocks take the next tile when they are ready (`claims`), instead of a fixed share from the start.
      band: number of tiles, one below the other, that are computed before those to the right of them. With 1 every
        row of tiles is computed from left to right. A band reads the right operand once for all its tiles, where one
        row of tiles would read more of it than the L2 cache holds.
      swizzle: bytes of a row of shared memory, 128 or 64. Rows of all operands are multiples of it.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    split: str = "m"
    cluster: str | None = None
    delay: int = 1
    claimed: bool = False
    band: int = 1
    swizzle: int = 128

    @property
    def warpgroup_m(self) -> int:
        return self.m // COMPUTE_WARPGROUPS if self.split == "m" else self.m

    @property
    def warpgroup_n(self) -> int:
        return self.n // COMPUTE_WARPGROUPS if self.split == "n" else self.n

    def at(self, number: Any, height: Any, width: int) -> tuple[Any, Any]:
        """Row and column, in tiles, of tile `number` of `height` by `width` tiles."""
        if self.band == 1:
            return lax.div(number, jnp.int32(width)), lax.rem(number, jnp.int32(width))
        band = lax.div(number, jnp.int32(self.band * width))
        within = number - band * (self.band * width)
        rows = jnp.minimum(height - band * self.band, self.band)
        return band * self.band + lax.rem(within, rows), lax.div(within, rows)

    @property
    def cluster_size(self) -> int:
        return 1 if self.cluster is None else 2

    @property
    def cluster_m(self) -> int:
        return self.m * (2 if self.cluster == "m" else 1)

    @property
    def cluster_n(self) -> int:
        return self.n * (2 if self.cluster == "n" else 1)


def up_to_each(values: jax.Array) -> jax.Array:
    """int32 `[L]` -> `[L + 1]`: the sum of the values up to each one, then a zero, with which `claims` count.

    By one reduction, a kernel of a microsecond. A cumulative sum would be several.
    """
    num = values.shape[0]
    at, each = jnp.arange(num + 1, dtype=jnp.int32)[:, None], jnp.arange(num, dtype=jnp.int32)
    return jnp.sum(jnp.where((each <= at) & (at < num), values, 0), axis=1)


def in_one_kernel() -> bool:
    """True if programs that are traced here run on a GPU, where a table is one small kernel instead of XLA's three."""
    return jax.default_backend() == "gpu"


def row_tiles(group_sizes: jax.Array, capacity: int, tile_m: int) -> tuple[jax.Array, jax.Array]:
    """Cuts the groups' rows into tiles.

    Returns:
      int32 `[4, N]`: of each tile its group, its first row (a multiple of 8), how many rows to leave out at the
      beginning, and the end of the valid rows, counted from its first. `N` is the most tiles that any groups of
      `capacity` rows can need. And int32 `[L + 1]`: for each group how many tiles there are up to it, then a zero, with
      which `claims` count.
    """
    num_groups = group_sizes.shape[0]
    most = pl.cdiv(capacity, tile_m) + num_groups - 1
    width = max(16, pl.next_power_of_2(num_groups))
    at_once = max(16, min(64, 8192 // width))
    sizes = group_sizes.astype(jnp.int32)

    def kernel(sizes_ref: Any, facts_ref: Any, up_to_ref: Any) -> None:
        each = jnp.arange(width, dtype=jnp.int32)
        sizes = plt.load(sizes_ref.at[pl.ds(0, width)], mask=each < num_groups, other=0)
        tiles, up_to, of_group = _tiles_of(sizes, tile_m)
        index = pl.program_id(0) * at_once + jnp.arange(at_once, dtype=jnp.int32)
        for number, fact in enumerate(_facts(index[:, None], each, tiles, up_to, of_group, tile_m)):
            at = facts_ref.at[pl.ds(number, 1), pl.ds(pl.program_id(0) * at_once, at_once)]
            plt.store(at, fact[None, :], mask=(index < most)[None, :])

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            plt.store(up_to_ref.at[pl.ds(0, width)], up_to, mask=each < num_groups)
            plt.store(up_to_ref.at[pl.ds(num_groups, 1)], jnp.zeros(1, jnp.int32))

    if in_one_kernel():
        facts, up_to = pl.pallas_call(
            kernel,
            out_shape=[
                jax.ShapeDtypeStruct((4, most), jnp.int32, manual_axis_type=jax.typeof(sizes).manual_axis_type),
                jax.ShapeDtypeStruct((num_groups + 1,), jnp.int32, manual_axis_type=jax.typeof(sizes).manual_axis_type),
            ],
            grid=(pl.cdiv(most, at_once),),
            compiler_params=plt.CompilerParams(num_warps=4),
            name="xen_moe_row_tiles",
        )(sizes)
        return facts, up_to
    each, index = jnp.arange(num_groups, dtype=jnp.int32), jnp.arange(most, dtype=jnp.int32)
    tiles, up_to, of_group = _tiles_of(sizes, tile_m)
    return jnp.stack(_facts(index[:, None], each, tiles, up_to, of_group, tile_m)), jnp.append(up_to, 0)


def _tiles_of(sizes: jax.Array, tile_m: int) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns each group's tiles, those up to and including it, and its first row, the same rounded down, its end."""
    sizes = jnp.maximum(sizes, 0)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    aligned = starts // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles = jnp.where(sizes > 0, (ends - aligned + tile_m - 1) // tile_m, 0)
    return tiles, jnp.cumsum(tiles, dtype=jnp.int32), (starts, aligned, ends)


def _facts(index: jax.Array, each: Any, tiles: Any, up_to: Any, of_group: Any, tile_m: int) -> list[jax.Array]:
    """Returns four facts of the tiles of `index [n, 1]`, each a sum over the groups of which one has the tile."""
    starts, aligned, ends = of_group
    first = aligned + (index - (up_to - tiles)) * tile_m
    has = (index >= up_to - tiles) & (index < up_to)
    facts = (each + 0 * index, first, jnp.maximum(starts - first, 0), ends - first)
    return [jnp.sum(jnp.where(has, fact, 0), axis=1, dtype=jnp.int32) for fact in facts]
