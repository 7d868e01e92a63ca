"""Assigns tiles to thread blocks: a fixed share of them, or the next unclaimed tile whenever a block is ready.

With a fixed share, a block that begins late, because another kernel holds its multiprocessor, has as many tiles left as
every other block, and the kernel ends late by that time. With `Tiles(claimed=True)` a counter in the GPU's memory
numbers the tiles, and a block that begins late computes fewer. The loading warpgroup claims a tile and hands the number
on through shared memory.

The counter is the last entry of a table that the kernel reads, zero as XLA computes it. The last claim of a kernel
sets it back to zero. This restores the table, and the next kernel with the same table counts from zero too. A
semaphore of Pallas' own (`pl.get_global`) would be four bytes that XLA copies from a constant for each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, Tiles

SLOTS = 2
"""Claims that the loading warpgroup may be ahead by."""
Tile = Callable[[Sequence[Any], Any], Any]
"""`(index, carry) -> carry`."""


def scratch(tiles: Tiles) -> dict[str, Any]:
    """Returns the scratch of claims; nothing for tiles that are not claimed."""
    if not tiles.claimed:
        return {}
    return {
        "claims": plgpu.SMEM((SLOTS,), jnp.int32),
        "claimed": plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        "taken": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=SLOTS),
    }


def loads(tiles: Tiles, scratch: dict[str, Any], table: Any, grid: Sequence[Any], tile: Tile) -> Any:
    """Runs `tile` on every tile of `grid` that this block computes, in the loading warpgroup; the last carry. The
    counter is at the end of `table` (`tiles.up_to_each`).
    """
    if not tiles.claimed:
        return _dealt(grid, tile)
    counter = table.at[pl.ds(table.shape[0] - 1, 1)]
    # every block claims until it gets no tile, so that this is the number of claims
    last = _total(grid) + lax.axis_size("sm") - 1

    def claim(turn: Any) -> Any:
        slot = lax.rem(turn, jnp.int32(SLOTS))

        @pl.when(turn >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(scratch["taken"].at[slot])

        _take(counter, scratch["claims"].at[pl.ds(slot, 1)], last)
        plgpu.barrier_arrive(scratch["claimed"].at[slot])
        return scratch["claims"][slot]

    return _while(grid, tile, claim)


def multiplies(tiles: Tiles, scratch: dict[str, Any], grid: Sequence[Any], tile: Tile) -> Any:
    """Runs `tile` on the same tiles as `loads`, in a multiplying warpgroup."""
    if not tiles.claimed:
        return _dealt(grid, tile)

    def claim(turn: Any) -> Any:
        slot = lax.rem(turn, jnp.int32(SLOTS))
        plgpu.barrier_wait(scratch["claimed"].at[slot])
        number = scratch["claims"][slot]
        plgpu.barrier_arrive(scratch["taken"].at[slot])
        return number

    return _while(grid, tile, claim)


def _total(grid: Sequence[Any]) -> Any:
    total = jnp.int32(1)
    for size in grid:
        total = total * size
    return total


def _dealt(grid: Sequence[Any], tile: Tile) -> Any:
    loop = plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))
    return loop(lambda info, carry: tile(info.index, carry))


def _while(grid: Sequence[Any], tile: Tile, claim: Callable[[Any], Any]) -> Any:
    total = _total(grid)

    def go_on(state: tuple[Any, Any, Any]) -> Any:
        return state[0] < total

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        number, turn, carry = state
        index, rest = [], number
        for size in reversed(grid):
            index.append(lax.rem(rest, jnp.int32(size)))
            rest = lax.div(rest, jnp.int32(size))
        carry = tile(index[::-1], carry)
        return claim(turn + 1), turn + 1, carry

    first = jnp.int32(0)
    return lax.while_loop(go_on, step, (claim(first), first, jnp.int32(0)))[2]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
def _take(context: Any, counter: Any, place: Any, last: Any) -> None:
    """Adds one to the counter, or sets it to zero if it is `last`, in one thread; writes the old value to `place`, for
    the whole warpgroup."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import memref, scf

    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    # Not utils.single_thread: while one program is lowered within it, it chooses no thread in programs that other
    # threads lower (jax 0.11.2 and 0.12.0.1 keep in a variable of the process where they are). All 128 would claim.
    one = scf.IfOp(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP))  # type: ignore[call-arg]
    with ir.InsertionPoint(one.then_block):
        number = utils.inline_ptx(
            "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", utils.memref_ptr(counter), last.registers.item(),
            result_types=i32, has_side_effects=True,
        )  # fmt: skip
        memref.store(number, place, [utils.c(0, index)])
        scf.YieldOp([])
    utils.warpgroup_barrier()
