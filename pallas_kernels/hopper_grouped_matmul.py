"""Grouped matmuls for Hopper GPUs, in Pallas (Mosaic GPU): one persistent kernel for rows, one for weights' gradients.

Rows `[C, A]` are sorted by group. A thread block has one warpgroup that loads with TMA, through a ring of stages which
runs on from one output tile to the next, and two that multiply with wgmma and store with TMA. Blocks may be paired in
clusters that load an operand which both need once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_BYTES = 128
STORE_TILE = 64
"""Rows, and columns, of the pieces in which a warpgroup stores its accumulators."""
ROW_ALIGNMENT = 8
"""TMA boxes of swizzled tiles begin at rows that are multiples of this."""
COMPUTE_WARPGROUPS = 2
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Of a thread; 128 * (40 + 2 * 232) fit into the 65536 of a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work.

    Attributes:
      m, n, k: a thread block's output tile, and the depth of one stage.
      stages: of the ring.
      split: the dimension of the tile that the two warpgroups share out, "m" or "n".
      cluster: the dimension along which two blocks stand side by side, or None: "m" shares the right operand, "n" the
        left one.
      delay: how many wgmma are under way when the next one begins.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    split: str = "m"
    cluster: str | None = None
    delay: int = 1

    @property
    def warpgroup_m(self) -> int:
        return self.m // COMPUTE_WARPGROUPS if self.split == "m" else self.m

    @property
    def warpgroup_n(self) -> int:
        return self.n // COMPUTE_WARPGROUPS if self.split == "n" else self.n

    @property
    def cluster_size(self) -> int:
        return 1 if self.cluster is None else 2

    @property
    def cluster_m(self) -> int:
        return self.m * (2 if self.cluster == "m" else 1)

    @property
    def cluster_n(self) -> int:
        return self.n * (2 if self.cluster == "n" else 1)


def _swizzled(rows_in_tile: int, dtype: Any) -> tuple[Any, ...]:
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((rows_in_tile, columns)), plgpu.SwizzleTransform(SWIZZLE_BYTES)


def row_tiles(group_sizes: jax.Array, capacity: int, tile_m: int) -> tuple[jax.Array, ...]:
    """Cuts the groups' rows into tiles: int32 `[N]` each group, first row (a multiple of 8), rows to leave out at the
    beginning, and end of the valid rows, counted from the tile's first; and int32 `[1]`, how many tiles there are.

    `N` is the most tiles that any groups of `capacity` rows can need.
    """
    num_groups = group_sizes.shape[0]
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    aligned = starts // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles = jnp.where(sizes > 0, pl.cdiv(ends - aligned, tile_m), 0)
    last_tile = jnp.cumsum(tiles)
    most = pl.cdiv(capacity, tile_m) + num_groups - 1
    index = jnp.arange(most, dtype=jnp.int32)
    group = (index[:, None] >= last_tile[None, :]).sum(1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    first = aligned[group] + (index - (last_tile - tiles)[group]) * tile_m
    skip = jnp.maximum(starts[group] - first, 0)
    end = ends[group] - first
    return group, first, skip, end, last_tile[-1:]


def _store(acc: Any, tiles: Tiles, scratch: Any, wg: Any, out_at: Any, valid: Any, dtype: Any) -> None:
    """Writes a warpgroup's accumulators, in pieces, through `scratch`; of each piece the rows that `valid` allows."""
    value = acc.astype(dtype)
    piece = 0
    for m in range(0, tiles.warpgroup_m, STORE_TILE):
        for n in range(0, tiles.warpgroup_n, STORE_TILE):
            buffer = scratch.at[wg, piece % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = value[m : m + STORE_TILE, n : n + STORE_TILE]
            plgpu.commit_smem()
            out_at(m, n, buffer, valid)
            plgpu.commit_smem_to_gmem_group()
            piece += 1


def _store_rows(buffer: Any, out: Any, row: Any, column: Any, low: Any, high: Any) -> None:
    """Rows `[low, high)` of a piece to `out` from `row`: whole, or in powers of two, since a TMA box is static."""
    count = jnp.maximum(high - low, 0)

    @pl.when(count == STORE_TILE)
    def _() -> None:
        plgpu.copy_smem_to_gmem(buffer, out.at[pl.ds(row, STORE_TILE), pl.ds(column, STORE_TILE)], commit_group=False)

    @pl.when(count < STORE_TILE)
    def _() -> None:
        at = low
        size = STORE_TILE // 2
        while size:

            @pl.when((count & size) != 0)
            def _(at: Any = at, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(
                    buffer.at[pl.ds(at, size)],
                    out.at[pl.ds(row + at, size), pl.ds(column, STORE_TILE)],
                    commit_group=False,
                )

            at = at + (count & size)
            size //= 2


def _ring(tiles: Tiles, left: tuple[int, int], right: tuple[int, int], dtype: Any) -> dict[str, Any]:
    """Scratch of a kernel: stages of both operands, their barriers, and two pieces of output a warpgroup."""
    released: Any = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tiles.stages)
    if tiles.cluster is not None:
        released = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tiles.stages
        )
    return {
        "left": plgpu.SMEM((tiles.stages, *left), dtype, transforms=_swizzled(8, dtype)),
        "right": plgpu.SMEM((tiles.stages, *right), dtype, transforms=_swizzled(8, dtype)),
        # rows of a piece may be stored one by one: no tile of it has more than one
        "pieces": plgpu.SMEM((COMPUTE_WARPGROUPS, 2, STORE_TILE, STORE_TILE), dtype, transforms=_swizzled(1, dtype)),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        "released": released,
    }


def _kernel(body: Any, tiles: Tiles, num_sms: int | None, out_type: Any, scratch: dict[str, Any], name: str) -> Any:
    if num_sms is None:
        num_sms = jax.devices()[0].core_count
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_sms // tiles.cluster_size,),
        grid_names=("sm",),
        cluster=(tiles.cluster_size,),
        cluster_names=("cluster",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=name,
    )


def _load_steps(tiles: Tiles, scratch: dict[str, Any], steps: Any, done: Any, load: Any) -> Any:
    """Loads `steps` stages, `done` after those of earlier tiles; returns how many have been loaded in all."""

    def step(k: Any, count: Any) -> Any:
        slot = lax.rem(count, jnp.int32(tiles.stages))

        @pl.when(count >= tiles.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["released"].at[slot])

        load(k, scratch["left"].at[slot], scratch["right"].at[slot], scratch["loaded"].at[slot])
        return count + 1

    return lax.fori_loop(0, steps, step, done)


def _drain(tiles: Tiles, scratch: dict[str, Any], done: Any) -> None:
    """Waits until every stage that was loaded has been read: barriers and clusters are left in a good state."""

    def step(count: Any, _: Any) -> Any:
        plgpu.barrier_wait(scratch["released"].at[lax.rem(count, jnp.int32(tiles.stages))])
        return _

    lax.fori_loop(jnp.maximum(done - tiles.stages, 0), done, step, None)


def _multiply_steps(
    tiles: Tiles, scratch: dict[str, Any], steps: Any, done: Any, multiply: Any, at_edge: Any = None
) -> tuple[Any, Any]:
    """The accumulators after `steps` stages, and how many have been multiplied in all.

    `at_edge(k, slot)`, if any, runs before the first and the last stage are multiplied. They are loops of their own,
    since ptxas runs every wgmma of a loop to its end if it sees a branch between them.
    """

    def slot_of(count: Any) -> Any:
        return lax.rem(count, jnp.int32(tiles.stages))

    def scope(acc: Any) -> Any:
        def edge(k: Any, count: Any) -> Any:
            slot = slot_of(count)
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            at_edge(k, slot)
            multiply(acc, slot)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["released"].at[slot])
            return count + 1

        def step(k: Any, count: Any) -> Any:
            slot = slot_of(count)
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            multiply(acc, slot)
            plgpu.wgmma_wait(tiles.delay)
            if tiles.delay:  # the wgmma before this one has read its stage
                plgpu.barrier_arrive(scratch["released"].at[slot_of(count + tiles.stages - 1)], predicate=k > first)
            else:
                plgpu.barrier_arrive(scratch["released"].at[slot])
            return count + 1

        first, last = (0, steps) if at_edge is None else (1, steps - 1)
        count = done
        if at_edge is not None:
            count = lax.fori_loop(0, jnp.minimum(steps, 1), edge, count)
        count = lax.fori_loop(first, last, step, count)
        if tiles.delay:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["released"].at[slot_of(count + tiles.stages - 1)], predicate=last > first)
        if at_edge is not None:
            count = lax.fori_loop(jnp.maximum(last, first), steps, edge, count)
        return acc[...], count

    return pl.run_scoped(scope, plgpu.ACC((tiles.warpgroup_m, tiles.warpgroup_n)))


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
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

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

                return _load_steps(tiles, s, k_steps, carry, load)

            done = plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            _drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else slice(None)
            n_at = pl.ds(wg * tiles.warpgroup_n, tiles.warpgroup_n) if tiles.split == "n" else slice(None)

            def multiply(acc: Any, slot: Any) -> None:
                right = s["right"].at[slot]
                right = plgpu.transpose_ref(right.at[n_at], (1, 0)) if transposed else right.at[:, n_at]
                plgpu.wgmma(acc, s["left"].at[slot, m_at], right)

            def tile(info: Any, carry: Any) -> Any:
                m, row, column = place(info)
                acc, done = _multiply_steps(tiles, s, k_steps, carry, multiply)
                low, high = skip[m], end[m]
                offset = row - first[m]
                if tiles.split == "m":
                    offset, row = offset + wg * tiles.warpgroup_m, row + wg * tiles.warpgroup_m
                else:
                    column = column + wg * tiles.warpgroup_n

                def out_at(m: int, n: int, buffer: Any, valid: Any) -> None:
                    piece_low = jnp.clip(low - (offset + m), 0, STORE_TILE)
                    piece_high = jnp.clip(high - (offset + m), 0, STORE_TILE)
                    _store_rows(buffer, out, row + m, column + n, piece_low, piece_high)

                _store(acc, tiles, s["pieces"], wg, out_at, None, dtype)
                return done

            plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    right = (tiles.n, tiles.k) if transposed else (tiles.k, tiles.n)
    out_type = jax.ShapeDtypeStruct((capacity, columns), dtype)
    scratch = _ring(tiles, (tiles.m, tiles.k), right, dtype)
    return _kernel(body, tiles, num_sms, out_type, scratch, "xen_moe_grouped_rows")(rows, weights, *meta)


def rows_by_rows(
    rows: jax.Array, others: jax.Array, group_sizes: jax.Array, *, tiles: Tiles, num_sms: int | None = None
) -> jax.Array:
    """Every group's `rows [C, A]` transposed times its `others [C, B]` -> `[L, A, B]`; zeros for an empty group."""
    dtype = rows.dtype
    num_groups, (height, width) = group_sizes.shape[0], (rows.shape[1], others.shape[1])
    m_tiles, n_tiles = height // tiles.cluster_m, width // tiles.cluster_n
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes

    def body(rows: Any, others: Any, starts: Any, ends: Any, out: Any, **s: Any) -> None:
        wg, peer = lax.axis_index("wg"), lax.axis_index("cluster")
        grid = (num_groups, m_tiles, n_tiles)

        def place(info: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
            group, m, n = info.index
            start, end = starts[group], ends[group]
            first = lax.div(start, jnp.int32(ROW_ALIGNMENT)) * ROW_ALIGNMENT
            steps = lax.select(end > start, pl.cdiv(end - first, tiles.k), jnp.int32(0))
            m, n = m * tiles.cluster_m, n * tiles.cluster_n
            if tiles.cluster == "m":
                m = m + peer * tiles.m
            if tiles.cluster == "n":
                n = n + peer * tiles.n
            return group, m, n, first, (start - first, end - first), steps

        def load_all() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

            def tile(info: Any, carry: Any) -> Any:
                _, m, n, first, _, steps = place(info)

                def load(k: Any, left: Any, right: Any, barrier: Any) -> None:
                    depth_at = pl.ds(pl.multiple_of(first + k * tiles.k, ROW_ALIGNMENT), tiles.k)
                    plgpu.copy_gmem_to_smem(
                        rows.at[depth_at, pl.ds(m, tiles.m)],
                        left,
                        barrier,
                        collective_axes="cluster" if tiles.cluster == "n" else None,
                    )
                    plgpu.copy_gmem_to_smem(
                        others.at[depth_at, pl.ds(n, tiles.n)],
                        right,
                        barrier,
                        collective_axes="cluster" if tiles.cluster == "m" else None,
                    )

                return _load_steps(tiles, s, steps, carry, load)

            done = plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            _drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else pl.ds(0, tiles.m)
            n_at = pl.ds(wg * tiles.warpgroup_n, tiles.warpgroup_n) if tiles.split == "n" else pl.ds(0, tiles.n)

            def parts(slot: Any) -> tuple[Any, Any]:
                return s["left"].at[slot].at[:, m_at], s["right"].at[slot].at[:, n_at]

            def multiply(acc: Any, slot: Any) -> None:
                left, right = parts(slot)
                plgpu.wgmma(acc, plgpu.transpose_ref(left, (1, 0)), right)

            def silence(ref: Any, columns: int, low: Any, high: Any) -> None:
                """Zeroes the rows of a stage outside `[low, high)`: the other warpgroup may do so too, alike."""
                row = plgpu.broadcasted_iota(jnp.int32, (tiles.k, STORE_TILE), 0, layout=plgpu.Layout.WGMMA)
                keep = (row >= low) & (row < high)
                for column in range(0, columns, STORE_TILE):
                    part = ref.at[:, pl.ds(column, STORE_TILE)]
                    value = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
                    part[...] = jnp.where(keep, value, jnp.zeros((), dtype))

            def tile(info: Any, carry: Any) -> Any:
                group, m, n, _, (low, high), steps = place(info)

                def at_edge(k: Any, slot: Any) -> None:
                    @pl.when((k * tiles.k < low) | ((k + 1) * tiles.k > high))
                    def _() -> None:
                        for ref, columns in zip(parts(slot), (tiles.warpgroup_m, tiles.warpgroup_n), strict=True):
                            silence(ref, columns, low - k * tiles.k, high - k * tiles.k)
                        plgpu.commit_smem()

                acc, done = _multiply_steps(tiles, s, steps, carry, multiply, at_edge)
                if tiles.split == "m":
                    m = m + wg * tiles.warpgroup_m
                else:
                    n = n + wg * tiles.warpgroup_n

                def out_at(piece_m: int, piece_n: int, buffer: Any, valid: Any) -> None:
                    at = (group, pl.ds(m + piece_m, STORE_TILE), pl.ds(n + piece_n, STORE_TILE))
                    plgpu.copy_smem_to_gmem(buffer, out.at[at], commit_group=False)

                _store(acc, tiles, s["pieces"], wg, out_at, None, dtype)
                return done

            plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    out_type = jax.ShapeDtypeStruct((num_groups, height, width), dtype)
    scratch = _ring(tiles, (tiles.k, tiles.m), (tiles.k, tiles.n), dtype)
    return _kernel(body, tiles, num_sms, out_type, scratch, "xen_moe_grouped_contraction")(rows, others, starts, ends)
