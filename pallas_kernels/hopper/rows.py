"""Rows times the weights of their groups: the forward pass of a grouped matmul, and the gradient of its rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import ring
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, ROW_ALIGNMENT, Tiles, row_tiles


@functools.partial(jax.jit, static_argnames=("transposed", "tiles", "num_sms"))  # calls alike are lowered once
def rows_by_weights(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    tiles: Tiles,
    num_sms: int | None = None,
) -> jax.Array:
    """`rows [C, A]` times the weights of their groups `[L, A, B]` -> `[C, B]`; `[L, B, A]` where `transposed`.

    Rows past the last group come out unspecified.
    """
    capacity, depth = rows.shape
    columns = weights.shape[1 if transposed else 2]
    dtype = rows.dtype
    if columns % tiles.cluster_n or depth % tiles.k or capacity % ROW_ALIGNMENT:
        raise ValueError(
            f"rows {list(rows.shape)}, weights {list(weights.shape)}, {tiles}: columns must be a multiple of "
            f"{tiles.cluster_n}, the contracted dimension of {tiles.k}, and the rows of {ROW_ALIGNMENT}"
        )
    n_tiles, k_steps = columns // tiles.cluster_n, depth // tiles.k
    meta = row_tiles(group_sizes, capacity, tiles.cluster_m)

    def body(rows: Any, weights: Any, group: Any, first: Any, skip: Any, end: Any, total: Any, out: Any, **s: Any):
        wg, peer = lax.axis_index("wg"), lax.axis_index("cluster")
        grid = (total[0] * n_tiles,)

        def place(info: Any) -> tuple[Any, Any, Any]:
            (index,) = info.index
            m, n = lax.div(index, jnp.int32(n_tiles)), lax.rem(index, jnp.int32(n_tiles))
            row = pl.multiple_of(first[m], ROW_ALIGNMENT)
            column = n * tiles.cluster_n
            if tiles.cluster == "m":
                row = pl.multiple_of(row + peer * tiles.m, ROW_ALIGNMENT)
            if tiles.cluster == "n":
                column = column + peer * tiles.n
            return m, row, column

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(info: Any, carry: Any) -> Any:
                m, row, column = place(info)
                matrix = weights.at[group[m]]

                def load(k: Any, left: Any, right: Any, barrier: Any) -> None:
                    depth_at = pl.ds(k * tiles.k, tiles.k)
                    at = pl.ds(column, tiles.n)
                    plgpu.copy_gmem_to_smem(
                        rows.at[pl.ds(row, tiles.m), depth_at],
                        left,
                        barrier,
                        collective_axes="cluster" if tiles.cluster == "n" else None,
                    )
                    plgpu.copy_gmem_to_smem(
                        matrix.at[at, depth_at] if transposed else matrix.at[depth_at, at],
                        right,
                        barrier,
                        collective_axes="cluster" if tiles.cluster == "m" else None,
                    )

                return ring.load_steps(tiles, s, k_steps, carry, load)

            done = plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else slice(None)
            n_at = pl.ds(wg * tiles.warpgroup_n, tiles.warpgroup_n) if tiles.split == "n" else slice(None)

            def multiply(acc: Any, slot: Any) -> None:
                right = s["right"].at[slot]
                right = right.at[n_at].transpose((1, 0)) if transposed else right.at[:, n_at]
                plgpu.wgmma(acc, s["left"].at[slot, m_at], right)

            def tile(info: Any, carry: Any) -> Any:
                m, row, column = place(info)
                # read now: a load from memory takes as long as half a piece of the store that needs it
                low, high, offset = skip[m], end[m], row - first[m]
                acc, done = ring.multiply_steps(tiles, s, k_steps, carry, multiply)
                if tiles.split == "m":
                    offset, row = offset + wg * tiles.warpgroup_m, row + wg * tiles.warpgroup_m
                else:
                    column = column + wg * tiles.warpgroup_n

                def out_at(m: int, n: int, buffer: Any, valid: Any) -> None:
                    piece_low = jnp.clip(low - (offset + m), 0, ring.STORE_TILE)
                    piece_high = jnp.clip(high - (offset + m), 0, ring.STORE_TILE)
                    ring.store_rows(buffer, out, row + m, column + n, piece_low, piece_high)

                ring.store(acc, tiles, s["pieces"], wg, out_at, None, dtype)
                return done

            plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    right = (tiles.n, tiles.k) if transposed else (tiles.k, tiles.n)
    out_type = jax.ShapeDtypeStruct((capacity, columns), dtype)
    scratch = ring.scratch(tiles, (tiles.m, tiles.k), right, dtype)
    return ring.kernel(body, tiles, num_sms, out_type, scratch, "xen_moe_grouped_rows")(rows, weights, *meta)
