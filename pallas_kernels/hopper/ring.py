"""Parts of the Hopper kernels: a ring of stages between a loading and two multiplying warpgroups, and stores.

The ring runs on from one output tile to the next, so that the loads of a tile begin during the stores of the tile in
front of it. `claims` chooses the tiles of a thread block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, gather
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, Tiles

STORE_TILE = 64
"""Rows and columns of the pieces in which a warpgroup stores its accumulators."""
FITTED_ROWS = 48
"""Most rows of a piece of a fitted tile: higher pieces would not fit into shared memory beside four stages."""
PAIR = "pair"
"""The axis of a pair of thread blocks."""
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers of a thread; 128 * (40 + 2 * 232) fit into the 65536 of a multiprocessor."""


def _swizzled(tiles: Tiles, rows_in_tile: int, dtype: Any) -> tuple[Any, ...]:
    """Returns the layout of a swizzled operand in shared memory."""
    columns = tiles.swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((rows_in_tile, columns)), plgpu.SwizzleTransform(tiles.swizzle)  # type: ignore[abstract]


def scratch(
    tiles: Tiles,
    left: tuple[int, ...],
    right: tuple[int, ...],
    dtype: Any,
    loads: int = 2,
    gathered: bool = False,
    anywhere: bool = False,
) -> dict[str, Any]:
    """Returns the scratch of a kernel: `tiles.stages` stages of both operands, of the shapes `left` and `right`, each
    filled by `loads` copies, their barriers, and two pieces of output for each warpgroup. With `gathered`, one of the
    copies is made by threads, with barriers of its own. With `anywhere`, rows of the left operand are copied from any
    row on, and "left" is for `views`."""
    own = gather.scratch(tiles) if gathered else {}
    barrier: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=(PAIR,)) if tiles.pair else plgpu.Barrier

    def memory(shape: tuple[int, ...], rows_in_tile: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(tiles, rows_in_tile, dtype))

    of_left = tiles.stages, *left
    return (
        claims.scratch(tiles)
        | own
        | {
            "left": two_views(memory(of_left, 1), memory(of_left, 8)) if anywhere else memory(of_left, 8),
            "right": memory((tiles.stages, *right), 8),
            # rows of a piece may be stored one by one: no tile of its layout has more than one row
            "pieces": memory((COMPUTE_WARPGROUPS, 2, piece_rows(tiles), STORE_TILE), 1),
            "loaded": plgpu.Barrier(num_arrivals=loads - gathered, num_barriers=tiles.stages),
            "released": barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tiles.stages),
        }
    )


def two_views(by_rows: Any, in_tiles: Any) -> Any:
    """Returns memory for stages whose rows TMA copies from any row on. It counts rows in tiles of the stage's layout,
    and wgmma reads tiles of eight rows. Where a stage is one swizzle wide, tiles of one row are the same layout."""
    return plgpu.RefUnion(by_rows, in_tiles)


def views(memory: Any) -> tuple[Any, Any]:
    """Returns the references to memory of `two_views`: for TMA and for wgmma."""
    by_rows, in_tiles = memory
    return by_rows, in_tiles


def launch(
    body: Any,
    warpgroups: int,
    num_sms: int | None,
    out_type: Any,
    scratch: dict[str, Any],
    name: str,
    pair: bool = False,
) -> Any:
    """Returns the function that launches `body` with `num_sms` thread blocks (axis "sm") of `warpgroups` warpgroups
    (axis "wg"): with one for each multiprocessor of the GPU where `num_sms` is None. With `pair` the axis "sm" counts
    pairs of blocks, which have an axis `PAIR`. A kernel with more blocks than the
    GPU has multiprocessors must not let one block wait for another."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=((num_sms or jax.devices()[0].core_count) // (1 + pair),),
        grid_names=("sm",),
        cluster=(2,) if pair else (),
        cluster_names=(PAIR,) if pair else (),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=name,
    )


def kernel(body: Any, tiles: Tiles, num_sms: int | None, out_type: Any, scratch: dict[str, Any], name: str) -> Any:
    """Returns the function that launches `body`: a thread block on each of `num_sms` multiprocessors (None: all of the
    GPU), with two multiplying warpgroups and one loading warpgroup, the last one. Under `vmap`, kernels whose tiles are
    claimed run one after the other: in one launch they would share a counter."""
    run = launch(body, COMPUTE_WARPGROUPS + 1, num_sms, out_type, scratch, name, tiles.pair)
    return jax.custom_batching.sequential_vmap(run) if tiles.claimed else run


def load_steps(
    tiles: Tiles, scratch: dict[str, Any], steps: Any, done: Any, load: Any, gathered: gather.Gathered | None = None
) -> Any:
    """Loads the `steps` stages of a tile, after `done` stages of the tiles in front of it; returns how many have been
    loaded in all.

    `load(k, left, right, barrier)` begins to copy the operands of step `k` by TMA, but for the one that is `gathered`.
    """

    numbers = None if gathered is None else gathered.numbers

    def step(k: Any, carry: Any) -> Any:
        count, of_stage = carry
        slot = lax.rem(count, jnp.int32(tiles.stages))
        of_next = None if numbers is None else numbers(k + 1)

        @pl.when(count >= tiles.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["released"].at[slot])

        load(k, scratch["left"].at[slot], scratch["right"].at[slot], scratch["loaded"].at[slot])
        if gathered is not None:
            gathered.copy(k, of_stage, scratch["left"].at[slot], scratch["right"].at[slot])
            gather.announce(scratch["gathered"], slot)
        return count + 1, of_next

    return lax.fori_loop(0, steps, step, (done, None if numbers is None else numbers(0)))[0]


def drain(tiles: Tiles, scratch: dict[str, Any], done: Any) -> None:
    """Waits until the last of the `done` stages, one for each slot of the ring, have been read. The loading warpgroup
    has then waited for each phase of the barriers "released"."""

    def step(count: Any, _: Any) -> Any:
        plgpu.barrier_wait(scratch["released"].at[lax.rem(count, jnp.int32(tiles.stages))])
        return _

    lax.fori_loop(jnp.maximum(done - tiles.stages, 0), done, step, None)


def multiply_steps(
    tiles: Tiles,
    scratch: dict[str, Any],
    steps: Any,
    done: Any,
    multiply: Any,
    at_edge: Any = None,
    beside: int = 1,
    height: int | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """Multiplies the `steps` stages of a tile; returns its accumulators, and how many stages have been multiplied in
    all, with `done` of the tiles in front of it. The accumulators of a fitted tile of `height` rows are turned:
    `[columns, height]`.

    There are `beside` accumulators, which share the columns of the warpgroup's part of the tile. `multiply` of the
    accumulators and a stage's slot starts one wgmma for each of them. `at_edge(k, slot)`, if given, runs before the
    first and the last stage are multiplied, while the wgmma of the stage in front goes on. These two stages are loops
    of their own, since ptxas lets every wgmma of a loop end before the next one if there is a branch between them.
    """

    def slot_of(count: Any) -> Any:
        return lax.rem(count, jnp.int32(tiles.stages))

    def scope(*accumulators: Any) -> Any:
        def step(k: Any, count: Any, edge: bool = False) -> Any:
            slot = slot_of(count)
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            if "gathered" in scratch:
                gather.wait(scratch["gathered"], slot, lax.div(count, jnp.int32(tiles.stages)))
            if edge:
                at_edge(k, slot)
            multiply(accumulators, slot)
            plgpu.wgmma_wait(beside)  # then the wgmma of the stage in front of this one have read that stage
            plgpu.barrier_arrive(scratch["released"].at[slot_of(count + tiles.stages - 1)], predicate=k > 0)
            return count + 1

        at_an_edge = functools.partial(step, edge=True)
        first, last = (0, steps) if at_edge is None else (1, steps - 1)
        count = done
        if at_edge is not None:
            count = lax.fori_loop(0, jnp.minimum(steps, 1), at_an_edge, count)
        count = lax.fori_loop(first, last, step, count)
        if at_edge is not None:
            count = lax.fori_loop(jnp.maximum(last, first), steps, at_an_edge, count)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch["released"].at[slot_of(count + tiles.stages - 1)], predicate=steps > 0)
        return tuple(acc[...] for acc in accumulators), count

    columns = tiles.warpgroup_n // beside
    accumulator = plgpu.ACC((tiles.warpgroup_m, columns) if height is None else (columns, height))
    return pl.run_scoped(scope, *[accumulator] * beside)


def store(pieces: Any, scratch: Any, wg: Any, fitted: bool = False) -> None:
    """Stores pieces of output through the buffers of `scratch`, two for warpgroup `wg`. A piece is a pair: its values,
    `[rows, 64]`, or with `fitted` turned, `[64, rows]`; and a function that copies a buffer `[rows, 64]` to their place
    in the GPU's memory."""
    for number, (value, copy) in enumerate(pieces):
        buffer = scratch.at[wg, number % 2]
        # a tile may have an odd number of pieces: its last one is then in the buffer of the next tile's first
        plgpu.wait_smem_to_gmem(1 if number else 0, wait_read_only=True)
        if fitted:
            buffer = buffer.at[pl.ds(0, value.shape[1])]
            buffer.transpose((1, 0))[...] = value
        else:
            buffer[...] = value
        plgpu.commit_smem()
        copy(buffer)
        plgpu.commit_smem_to_gmem_group()


def piece_rows(tiles: Tiles) -> int:
    """Returns the most rows that a piece of such a tile has."""
    return FITTED_ROWS if tiles.fitted else STORE_TILE


def places(tiles: Tiles, columns: int, height: int | None = None) -> list[tuple[int, int]]:
    """Returns the rows and columns at which the pieces of a warpgroup's part of the tile begin; the part has `columns`
    columns, and `height` rows if the tile is fitted."""
    rows = range(0, height or tiles.warpgroup_m, piece_rows(tiles))
    return [(m, n) for m in rows for n in range(0, columns, STORE_TILE)]


def piece(acc: Any, m: int, n: int, fitted: bool = False) -> Any:
    """Returns the accumulators of the piece at row `m` and column `n`: float32 `[64, 64]`, or of a fitted tile turned,
    `[64, rows]`."""
    if fitted:
        return acc[n : n + STORE_TILE, m : min(m + FITTED_ROWS, acc.shape[1])]
    return acc[m : m + STORE_TILE, n : n + STORE_TILE]


def store_rows(buffer: Any, out: Any, row: Any, column: Any, low: Any, high: Any) -> None:
    """Stores rows `[low, high)` of a piece to the same rows of `out`, counted from `row`, from `column` on.

    A TMA box is static. So all rows of the piece are stored as a whole, or fewer in boxes of powers of two.
    `buffer [rows, width]` holds the piece.
    """
    rows, width = buffer.shape
    count = jnp.maximum(high - low, 0)

    @pl.when(count == rows)
    def _() -> None:
        plgpu.copy_smem_to_gmem(buffer, out.at[pl.ds(row, rows), pl.ds(column, width)], commit_group=False)

    @pl.when(count < rows)
    def _() -> None:
        at = low
        size = 1 << ((rows - 1).bit_length() - 1)
        while size:

            @pl.when((count & size) != 0)
            def _(at: Any = at, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(
                    buffer.at[pl.ds(at, size)],
                    out.at[pl.ds(row + at, size), pl.ds(column, width)],
                    commit_group=False,
                )

            at = at + (count & size)
            size //= 2
