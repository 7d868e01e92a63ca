"""Tiles: the division of a Hopper kernel's work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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
      delay: number of stages whose wgmma are pending when the loop goes on to the next stage, 0 or 1.
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
    """Returns int32 `[L + 1]` for int32 `[L]`: the sum of the values up to each one, then a zero, with which `claims`
    count.

    XLA makes one reduction of it, a kernel of a microsecond. A cumulative sum would be several kernels.
    """
    num = values.shape[0]
    at, each = jnp.arange(num + 1, dtype=jnp.int32)[:, None], jnp.arange(num, dtype=jnp.int32)
    return jnp.sum(jnp.where((each <= at) & (at < num), values, 0), axis=1)


def row_tiles(group_sizes: jax.Array, capacity: int, tile_m: int) -> tuple[jax.Array, jax.Array]:
    """Cuts the groups' rows into tiles.

    Returns:
      int32 `[4, N]`: of each tile its group, its first row (a multiple of 8), how many rows to leave out at the
      beginning, and the end of the valid rows, counted from its first row. `N` is the most tiles that any groups of
      `capacity` rows can need. int32 `[L + 1]`: how many tiles there are up to each group, from `up_to_each`.
    """
    num_groups = group_sizes.shape[0]
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = up_to_each(sizes)[:num_groups]
    starts = ends - sizes
    aligned = starts // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles = jnp.where(sizes > 0, pl.cdiv(ends - aligned, tile_m), 0)
    up_to = up_to_each(tiles)
    last_tile = up_to[:num_groups]
    most = pl.cdiv(capacity, tile_m) + num_groups - 1
    index = jnp.arange(most, dtype=jnp.int32)[:, None]
    first_tile = jnp.pad(last_tile[:-1], (1, 0))  # not `last_tile - tiles`: `tiles` would be a kernel of its own
    first = aligned + (index - first_tile) * tile_m
    groups = jnp.broadcast_to(jnp.arange(num_groups, dtype=jnp.int32), first.shape)
    facts = jnp.stack([groups, first, jnp.maximum(starts - first, 0), ends - first])
    # A tile has facts of one group, so that a sum over the groups selects them. Gathers would be kernels of their own.
    return jnp.sum(jnp.where((index >= first_tile) & (index < last_tile), facts, 0), axis=-1), up_to
