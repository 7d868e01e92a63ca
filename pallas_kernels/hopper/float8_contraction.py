"""The gradient of weights in fp8: of each group the rows, transposed, times its other rows.

Both operands are quantized by `float8_quantize`, with a scale for 128 rows of a column. They lie transposed, with rows
innermost, and every group begins at a multiple of 128 rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, ring
from xen_moe_jax.pallas_kernels.hopper.float8_rows import (
    BLOCK,
    WGMMA,
    Quantized,
    load_steps,
    multiply,
    ring_store,
    scratch_of,
)
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, Tiles, up_to_each


@functools.partial(jax.jit, static_argnames=("height", "width", "dtype", "tiles", "num_sms"))
def rows_by_rows(
    rows: Quantized,
    others: Quantized,
    blocks: jax.Array,
    *,
    height: int,
    width: int,
    dtype: Any,
    tiles: Tiles,
    num_sms: int | None = None,
) -> jax.Array:
    """Returns every group's rows, transposed, times its other rows: `[L, height, width]` in `dtype`, zeros for an empty
    group. Sums are float32.

    Args:
      rows: values e4m3 `[A, N * 128]`, scales float32 `[N, A]`, of `N` blocks of 128 rows; `A` is at least `height`.
      others: `[B, N * 128]` and `[N, B]`; `B` is at least `width`.
      blocks: int32 `[L]`, how many blocks each group has.
      height: rows of each result.
      width: columns of each result.
      dtype: bfloat16 or float16.
      tiles: 128 deep, and a multiple of 128 wide.
      num_sms: multiprocessors that the kernel may take; None for all of the GPU.
    """
    num_groups, parts = blocks.shape[0], tiles.n // BLOCK
    m_tiles, n_tiles = pl.cdiv(height, tiles.m), pl.cdiv(width, tiles.n)
    ends = up_to_each(blocks)
    starts = ends[:num_groups] - blocks

    def body(rows: Any, others: Any, of_row: Any, of_other: Any, starts: Any, ends: Any, out: Any, **s: Any):
        wg = lax.axis_index("wg")
        grid = (num_groups, m_tiles, n_tiles) if tiles.band == 1 else (num_groups, m_tiles * n_tiles)

        def place(index: Any) -> tuple[Any, Any, Any, Any, Any]:
            group, *at = index
            m, n = at if tiles.band == 1 else tiles.at(at[0], m_tiles, n_tiles)
            m, n = m * tiles.m, n * tiles.n
            return group, m, n, starts[group], ends[group] - starts[group]

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(index: Any, carry: Any) -> Any:
                _, m, n, first, steps = place(index)

                def load(k: Any, left: Any, right: Any, barrier: Any, slot: Any) -> None:
                    block = first + k
                    depth_at = pl.ds(block * BLOCK, BLOCK)
                    m_at, n_at = pl.ds(m, tiles.m), pl.ds(n, tiles.n)
                    plgpu.copy_gmem_to_smem(rows.at[m_at, depth_at], left, barrier)
                    plgpu.copy_gmem_to_smem(others.at[n_at, depth_at], right, barrier)
                    plgpu.copy_gmem_to_smem(of_row.at[block, m_at], s["row_scales"].at[slot], barrier)
                    plgpu.copy_gmem_to_smem(of_other.at[block, n_at], s["other_scales"].at[slot], barrier)

                return load_steps(tiles, s, steps, carry, load)

            done = claims.loads(tiles, s, ends, grid, tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m)

            def tile(index: Any, carry: Any) -> Any:
                group, m, n, _, steps = place(index)
                zero = plgpu.layout_cast(jnp.zeros((tiles.warpgroup_m, BLOCK), jnp.float32), WGMMA)
                never = (steps < 0).astype(jnp.int32)

                def step(k: Any, carry: Any) -> Any:
                    count, product, *totals = carry
                    slot = lax.rem(count, jnp.int32(tiles.stages))
                    plgpu.barrier_wait(s["loaded"].at[slot])
                    of_rows = plgpu.load(s["row_scales"].at[slot, m_at], layout=WGMMA.reduce(1), optimized=False)
                    left, right, columns = s["left"].at[slot, m_at], s["right"].at[slot], s["other_scales"].at[slot]
                    product, totals = multiply(left, right, product, totals, (of_rows,) * parts, columns, never)
                    plgpu.barrier_arrive(s["released"].at[slot])
                    return count + 1, product, *totals

                carry, _, *totals = lax.fori_loop(0, steps, step, (carry, zero, *(zero,) * parts))
                row = m + wg * tiles.warpgroup_m

                def pieces() -> Any:
                    for number, total in enumerate(totals):
                        for column in range(0, BLOCK, ring.STORE_TILE):

                            def copy(buffer: Any, column: int = number * BLOCK + column) -> None:
                                at = (group, pl.ds(row, ring.STORE_TILE), pl.ds(n + column, ring.STORE_TILE))
                                plgpu.copy_smem_to_gmem(buffer, out.at[at], commit_group=False)

                            yield total[:, column : column + ring.STORE_TILE].astype(dtype), copy

                ring_store(pieces(), s, wg)
                return carry

            claims.multiplies(tiles, s, grid, tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    scratch = scratch_of(tiles, (tiles.m, BLOCK), (tiles.n, BLOCK), dtype, loads=4, scales=tiles.m + tiles.n)
    scratch["row_scales"] = plgpu.SMEM((tiles.stages, tiles.m), jnp.float32)
    scratch["other_scales"] = plgpu.SMEM((tiles.stages, tiles.n), jnp.float32)
    out = jax.ShapeDtypeStruct((num_groups, height, width), dtype)
    run = ring.kernel(body, tiles, num_sms, out, scratch, "xen_moe_float8_contraction")
    return run(rows.values, others.values, rows.scales, others.scales, starts, ends)
