"""The gradient of a grouped matmul's weights: of each group the rows, transposed, times its other rows.

A tile takes as long as its group has rows. So the tiles of the largest groups are computed first: thread blocks then
end together, above all where they claim their tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, gather, ring
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, ROW_ALIGNMENT, Tiles, largest_first, up_to_each


@functools.partial(jax.jit, static_argnames=("gathered", "tiles", "height", "num_sms"))  # equal calls are lowered once
def rows_by_rows(
    rows: jax.Array,
    others: jax.Array,
    group_sizes: jax.Array,
    index: jax.Array | None = None,
    first_row: jax.Array | None = None,
    *,
    gathered: str = "rows",
    tiles: Tiles,
    height: int | None = None,
    num_sms: int | None = None,
) -> jax.Array:
    """Returns every group's `rows [C, A]`, transposed, times its `others [C, B]`: `[L, A, B]` in their dtype, zeros for
    an empty group. Sums are float32.

    Where `A` or `B` ends within a tile, TMA loads zeros past the end and stores nothing there.

    Args:
      rows: bfloat16 or float16. `A` and `B` elements are multiples of `tiles.swizzle` bytes, and `C` one of 8.
      others: in the dtype of `rows`.
      group_sizes: int32 `[L]`.
      index: int32 `[C]`, or None. The operand that `gathered` names may then have any number of rows: its row
        `index[c]` is multiplied in place of row `c`, and zeros where it has no such row.
      first_row: int32 `[]`, the first row of the first group; None is 0.
      gathered: "rows" or "others".
      height: how many of the `A` rows of each result are stored; None for all.
      num_sms: multiprocessors that the kernel may take; None for all of the GPU.

    Raises:
      ValueError: sizes that the tiles do not take, an index of another length, or an operand that cannot be gathered.
    """
    dtype = rows.dtype
    num_groups, (columns, width) = group_sizes.shape[0], (rows.shape[1], others.shape[1])
    height, unit = columns if height is None else height, tiles.swizzle // dtype.itemsize
    capacity = (rows if index is None or gathered == "others" else others).shape[0]
    if index is not None:
        gather.check(tiles, rows if gathered == "rows" else others)
        if index.shape[0] != capacity:
            raise ValueError(f"index {list(index.shape)}: must have an entry for each of {capacity} rows")
    if columns % unit or width % unit or capacity % ROW_ALIGNMENT:
        raise ValueError(
            f"rows {list(rows.shape)}, others {list(others.shape)}, {tiles}: their columns must be multiples of {unit} "
            f"and the rows of {ROW_ALIGNMENT}"
        )
    m_tiles, n_tiles = pl.cdiv(height, tiles.m), pl.cdiv(width, tiles.n)
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = up_to_each(sizes)
    if first_row is not None:  # added to all entries but the last one, which is the counter of `claims`
        ends = ends + jnp.where(jnp.arange(num_groups + 1) < num_groups, first_row, 0)
    starts = ends[:num_groups] - sizes

    def body(rows: Any, others: Any, starts: Any, ends: Any, order: Any, *rest: Any, **s: Any) -> None:
        *index_of, out = rest
        by_rows, by_others = bool(index_of) and gathered == "rows", bool(index_of) and gathered == "others"
        if index_of:
            gather.begin(s["gathered"])
        wg = lax.axis_index("wg")
        grid = (num_groups, m_tiles, n_tiles) if tiles.band == 1 else (num_groups, m_tiles * n_tiles)

        def place(index: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
            turn, *at = index
            group = order[turn]
            m, n = at if tiles.band == 1 else tiles.at(at[0], m_tiles, n_tiles)
            start, end = starts[group], ends[group]
            first = lax.div(start, jnp.int32(ROW_ALIGNMENT)) * ROW_ALIGNMENT
            steps = lax.select(end > start, pl.cdiv(end - first, tiles.k), jnp.int32(0))
            m, n = m * tiles.m, n * tiles.n
            return group, m, n, first, (start - first, end - first), steps

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(index: Any, carry: Any) -> Any:
                _, m, n, first, (low, high), steps = place(index)

                def load(k: Any, left: Any, right: Any, barrier: Any) -> None:
                    depth_at = pl.ds(pl.multiple_of(first + k * tiles.k, ROW_ALIGNMENT), tiles.k)
                    if not by_rows:
                        plgpu.copy_gmem_to_smem(rows.at[depth_at, pl.ds(m, tiles.m)], left, barrier)
                    if not by_others:
                        plgpu.copy_gmem_to_smem(others.at[depth_at, pl.ds(n, tiles.n)], right, barrier)

                source, column = (rows, m) if by_rows else (others, n)

                def copy(k: Any, numbers: Any, left: Any, right: Any) -> None:
                    places = gather.places(numbers, source, low - k * tiles.k, high - k * tiles.k)
                    gather.copy(source, places, column, left if by_rows else right)

                by_index = gather.Gathered(copy, lambda k: gather.numbers(index_of[0], first + k * tiles.k, tiles.k))
                return ring.load_steps(tiles, s, steps, carry, load, by_index if index_of else None)

            done = claims.loads(tiles, s, ends, grid, tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else pl.ds(0, tiles.m)
            n_at = pl.ds(wg * tiles.warpgroup_n, tiles.warpgroup_n) if tiles.split == "n" else pl.ds(0, tiles.n)

            def parts(slot: Any) -> tuple[Any, Any]:
                return s["left"].at[slot].at[:, m_at], s["right"].at[slot].at[:, n_at]

            def multiply(accumulators: Any, slot: Any) -> None:
                left, right = parts(slot)
                plgpu.wgmma(accumulators[0], left.transpose((1, 0)), right)

            def tile(index: Any, carry: Any) -> Any:
                group, m, n, _, (low, high), steps = place(index)

                def at_edge(k: Any, slot: Any) -> None:
                    @pl.when((k * tiles.k < low) | ((k + 1) * tiles.k > high))
                    def _() -> None:
                        # both warpgroups zero all of these rows: neither needs to wait for the other one
                        for name, gathers in (("left", by_rows), ("right", by_others)):
                            if not gathers:
                                silence(s[name].at[slot], low - k * tiles.k, high - k * tiles.k, tiles.swizzle)
                        plgpu.commit_smem()

                (acc,), done = ring.multiply_steps(tiles, s, steps, carry, multiply, at_edge)
                if tiles.split == "m":
                    m = m + wg * tiles.warpgroup_m
                else:
                    n = n + wg * tiles.warpgroup_n

                def copy(piece_m: int, piece_n: int, buffer: Any) -> None:
                    at = (group, pl.ds(m + piece_m, ring.STORE_TILE), pl.ds(n + piece_n, ring.STORE_TILE))
                    plgpu.copy_smem_to_gmem(buffer, out.at[at], commit_group=False)

                places = ring.places(tiles, tiles.warpgroup_n)
                pieces = ((ring.piece(acc, *at).astype(dtype), functools.partial(copy, *at)) for at in places)
                ring.store(pieces, s["pieces"], wg)
                return done

            claims.multiplies(tiles, s, grid, tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    out_type = jax.ShapeDtypeStruct((num_groups, height, width), dtype)
    scratch = ring.scratch(tiles, (tiles.k, tiles.m), (tiles.k, tiles.n), dtype, gathered=index is not None)
    return ring.kernel(body, tiles, num_sms, out_type, scratch, "xen_moe_grouped_contraction")(
        rows, others, starts, ends, largest_first(sizes), *([] if index is None else [gather.padded(index)])
    )


def silence(stage: Any, low: Any, high: Any, swizzle: int) -> None:
    """Zeroes the rows of `stage [K, N]`, 16-bit numbers in shared memory, outside `[low, high)`. It writes these rows
    alone, and reads none."""
    itemsize = jnp.dtype(stage.dtype).itemsize
    count, blocks = stage.shape[0], stage.shape[1] * itemsize // swizzle
    tiling = plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiling), *[plgpu.Layout.WG_SPLAT(())] * 2))
    def store(_: Any, stage: Any, low: Any, high: Any) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        low, high = (scalar.registers.item() for scalar in (low, high))
        used = arith.subi(high, low)
        thread = utils.thread_idx()
        thread = arith.remui(thread, utils.c(gather.THREADS, thread.type))
        side_by_side = swizzle // gather.CHUNK
        row, chunk = (of(thread, utils.c(side_by_side, i32)) for of in (arith.divui, arith.remui))
        at_once = gather.THREADS // side_by_side
        # each row of a block of 8 rows lies in `swizzle` bytes, whose order does not matter for zeros
        eight, in_eight = arith.shrui(row, utils.c(3, i32)), arith.andi(row, utils.c(7, i32))
        offset = arith.addi(
            arith.muli(eight, utils.c(8 * swizzle * blocks, i32)),
            arith.addi(arith.muli(in_eight, utils.c(swizzle, i32)), arith.muli(chunk, utils.c(gather.CHUNK, i32))),
        )
        base = utils.getelementptr(utils.memref_ptr(stage), [offset], i8)
        for first in range(0, count, at_once):
            # one unsigned comparison serves both ends: rows below `low` wrap around to large numbers
            own = arith.subi(arith.addi(row, utils.c(first, i32)), low)
            outside = arith.cmpi(arith.CmpIPredicate.uge, own, used)
            for block in range(blocks):
                at = utils.getelementptr(base, [(first // 8 * blocks + block) * 8 * swizzle], i8)
                utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", at, utils.c(0, i32), predicate=outside)

    store(stage, jnp.int32(low), jnp.int32(high))
