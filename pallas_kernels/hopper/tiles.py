"""Tiles: the division of a Hopper kernel's work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ROW_ALIGNMENT = 8
"""TMA boxes of stages that are wider than a swizzle begin at rows that are multiples of this."""
COMPUTE_WARPGROUPS = 2
"""Multiplying warpgroups of a thread block, beside the loading one."""


HEIGHT_UNIT = 16
"""Heights of fitted tiles are multiples of this many rows, and so are the distances between the tiles of a group."""
HEIGHTS = (112, 128, 144)
"""Heights of fitted tiles in rows: the kernel has code for each of them."""
COLUMN_ALIGNMENT = 32
"""Hidden sizes and widths are multiples of this: 64 bytes, the narrowest swizzle that these kernels lower with."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The division of a kernel's work.

    Attributes:
      m, n, k: a thread block's output tile, and the depth of one stage.
      stages: number of stages of the ring.
      split: the dimension of the tile that the two warpgroups share out, "m" or "n".
      claimed: thread blocks take the next tile when they are ready (`claims`), instead of a fixed share from the start.
      band: number of tiles, one below the other, that are computed before those to the right of them, in matmuls of
        rows the most of them, as a band ends with its group. With 1 every row of tiles is computed from left to right.
        A band reads the right operand once for all its tiles, where one row of tiles would read more of it than the L2
        cache holds.
      swizzle: bytes of a row of shared memory, 128 or 64. Rows of all operands are multiples of it.
      fitted: tiles of rows are as high as their groups need, one of `HEIGHTS`, of which `m` is the last. The weights
        are the left operand of wgmma then, whose height is always 64, and the rows are the right one, whose width is
        any multiple of 8. `split` must be "n".
      pair: two thread blocks side by side compute two tiles of rows with the same weights, and each loads half of these
        for both, in matmuls of rows with an even number of columns of tiles, and not `claimed`.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    split: str = "m"
    claimed: bool = False
    band: int = 1
    swizzle: int = 128
    fitted: bool = False
    pair: bool = False

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


def up_to_each(values: jax.Array) -> jax.Array:
    """Returns int32 `[L + 1]` for int32 `[L]`: the sum of the values up to each one, then a zero, with which `claims`
    count.

    XLA makes one reduction of it, a kernel of a microsecond. A cumulative sum would be several kernels.
    """
    num = values.shape[0]
    at, each = jnp.arange(num + 1, dtype=jnp.int32)[:, None], jnp.arange(num, dtype=jnp.int32)
    return jnp.sum(jnp.where((each <= at) & (at < num), values, 0), axis=1)


def largest_first(sizes: jax.Array) -> jax.Array:
    """Returns int32 `[L]`: the groups of int32 `sizes [L]`, the largest one first, equal ones in their order."""
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    one, other = sizes[:, None], sizes[None, :]
    before = (other > one) | ((other == one) & (number[None, :] < number[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None, :] == number[:, None], number[None, :], 0), axis=1)


def row_tiles(
    group_sizes: jax.Array,
    capacity: int,
    tile_m: int,
    fitted: bool = False,
    first_row: jax.Array | None = None,
    alignment: int = ROW_ALIGNMENT,
    band: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Cuts the groups' rows into tiles. The first group begins at `first_row`, int32 `[]`; None is 0.

    Args:
      group_sizes: int32 `[L]`.
      capacity: the number of rows.
      tile_m: height of a tile in rows.
      fitted: `tile_m` is the greatest height: the rows of each group are shared out to as few tiles as possible, as
        evenly as `HEIGHT_UNIT` allows.
      alignment: tiles begin at multiples of this, 1, 2 or 8.
      band: a group's tiles are shared out to as few bands of at most this many tiles as possible.

    Returns:
      int32 `[6, N]`: of each tile its group, its first row, how many rows to leave out at the beginning, the end of the
      valid rows, counted from its first row, the first tile of its band, and the number of tiles in it; with `fitted` a
      seventh row, the number of its height in `HEIGHTS`. `N` tiles suffice for any groups of `capacity` rows. int32
      `[L + 1]`: how many tiles there are up to each group, from `up_to_each`.
    """
    num_groups = group_sizes.shape[0]
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = up_to_each(sizes)[:num_groups] + (0 if first_row is None else first_row)
    starts = ends - sizes
    aligned = starts // alignment * alignment
    unit = HEIGHT_UNIT if fitted else tile_m
    units = jnp.where(sizes > 0, pl.cdiv(ends - aligned, unit), 0)
    tiles = pl.cdiv(units, tile_m // unit)
    up_to = up_to_each(tiles)
    last_tile = up_to[:num_groups]
    # For fitted tiles this bound counts the rows by which a group's first tile begins in front of the group.
    most = pl.cdiv(capacity + (alignment - 1) * num_groups * fitted, tile_m) + num_groups - (not fitted)
    index = jnp.arange(most, dtype=jnp.int32)[:, None]
    first_tile = jnp.pad(last_tile[:-1], (1, 0))  # not `last_tile - tiles`: `tiles` would be a kernel of its own
    number = index - first_tile
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    if fitted:
        count = jnp.maximum(last_tile - first_tile, 1)
        # The higher tiles are others in each group. Thread blocks that take every 132nd tile could otherwise meet the
        # higher tile of every group.
        first_unit, height = _shared_out(units, count, groups % count, number)
        first, chosen = aligned + first_unit * unit, sum(jnp.where(height > step // unit, 1, 0) for step in HEIGHTS)
        end = jnp.minimum(ends - first, height * unit)
    else:
        first, chosen = aligned + number * tile_m, None
        end = ends - first
    in_band = jnp.maximum(pl.cdiv(tiles, jnp.maximum(pl.cdiv(tiles, band), 1)), 1)
    down = number // in_band * in_band
    each = [jnp.broadcast_to(groups, first.shape), first, jnp.maximum(starts - first, 0), end]
    each += [first_tile + down, jnp.minimum(in_band, tiles - down)]
    facts = jnp.stack(each if chosen is None else [*each, chosen])
    # A tile has facts of one group, so that a sum over the groups selects them. Gathers would be kernels of their own.
    return jnp.sum(jnp.where((index >= first_tile) & (index < last_tile), facts, 0), axis=-1), up_to


def _shared_out(units: jax.Array, count: jax.Array, turn: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shares the `units` of a group out to its `count` tiles, some of which are one unit higher than the others. These
    are the first ones in a cyclic order of the tiles, in which the tile at the group's beginning has number `turn`.
    Returns the first unit and the number of units of tile `number`, counted from the group's beginning."""
    least = units // count
    higher = units - least * count

    def higher_before(number: jax.Array) -> jax.Array:
        return number // count * higher + jnp.minimum(number % count, higher)

    before = higher_before(turn + number)
    return number * least + before - higher_before(turn), least + higher_before(turn + number + 1) - before
