"""The backward pass of an activation between fp8 matmuls: the cotangents of the projections, and the activation, which
is computed again, are quantized without a pass through the GPU's memory in 16 bits.

A pair of warpgroups has a tile of 128 x 128 of each operand in shared memory. The pair computes the results in the
place of the operands, rounded to the operands' dtype, and quantizes each result for its uses: the cotangents by rows
for the gradient of the experts' rows, and all results by columns for the gradients of weights. Each number is read from
the GPU's memory and written to it once.

Each warpgroup computes 64 rows. Then the first one quantizes the activation by columns, and the second one each
cotangent by rows. The columns of the last cotangent are quantized by the second warpgroup; those of the first
cotangent, where there are two, by the first warpgroup. Codes by columns are stored by TMA from the place of their tile,
codes by rows from registers. A thread block has two such pairs, with tiles of their own: ptxas then gives a thread 128
registers at most, so that sixteen warps fit into a multiprocessor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import float8_tile
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, DTYPE, ROWS, WGMMA, Quantized
from xen_moe_jax.pallas_kernels.hopper.ring import launch

COLUMNS = 8
"""Columns that a warpgroup computes at once: few, since a thread has few registers."""
PAIRS = 2
"""Pairs of warpgroups in a multiprocessor, each with a tile: while one waits for its tile, the other one computes."""


@functools.partial(jax.jit, static_argnames=("activation", "num_sms", "claimed"))
def gradients(
    activation: Activation,
    by_inner: jax.Array,
    projections: Sequence[jax.Array],
    row_weights: jax.Array | None,
    blocks: jax.Array,
    num_sms: int | None = None,
    claimed: bool = False,
) -> tuple[list[tuple[Quantized, Quantized]], Quantized, jax.Array | None]:
    """Returns the cotangents of the projections, and the activation, of rows that are weighted behind the activation,
    all of them quantized.

    Args:
      by_inner: cotangent of the weighted activation, bfloat16 or float16 `[C, F]`, `F` a multiple of 64.
      projections: `gate` and `up`, or `up` alone, `[C, F]` in the same dtype.
      row_weights: float32 `[C]`, factors of the activation's rows, or None for factors of one.
      blocks: int32 `[2, N]`, from `blocks_of_groups`.
      num_sms: multiprocessors that the kernel may take; None for all of the GPU. It counts for nothing if `claimed`.
      claimed: True for a thread block for each `PAIRS` tiles, which the GPU starts on any multiprocessor that is free.
        Thread blocks for all multiprocessors, as without it, would wait for those that another kernel keeps.

    Returns:
      For each projection the rows and the columns of its cotangent, as `float8_quantize.both` returns them; the columns
      of the weighted activation; the cotangent of `row_weights`, float32 `[C]`, or None. Rows past the last group are
      unspecified.
    """
    (count, width), total, kind = by_inner.shape, blocks.shape[1], by_inner.dtype
    beside, long = pl.cdiv(width, BLOCK), (pl.cdiv(count, BLOCK) + 1) * BLOCK
    operands = [by_inner, *projections]
    launched = pl.cdiv(total * beside, PAIRS) if claimed else num_sms or jax.devices()[0].core_count
    if row_weights is not None:
        row_weights = jnp.pad(row_weights, (0, long - count))  # a block's 128 rows may begin at the last row

    def body(facts: Any, *refs: Any, places: Any, loaded: Any) -> None:
        sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
        pair, mine = lax.div(wg, jnp.int32(2)), lax.rem(wg, jnp.int32(2))
        tiles = [wide.at[pair] for wide, _ in places]
        turned = [narrow.at[pair, 0] for _, narrow in places]
        sources, refs = refs[: len(operands)], refs[len(operands) :]
        weights, outputs = (None, refs) if row_weights is None else (refs[0], refs[1:])
        last = len(projections) - 1

        def tile(number: Any, carry: Any) -> Any:
            """Computes and quantizes the tile that is this pair's turn `number`, unless its block has no rows."""
            number = (number * launched + sm) * PAIRS + pair
            block, j = lax.div(number, jnp.int32(beside)), lax.rem(number, jnp.int32(beside))
            start, size = facts[0, block], facts[1, block]
            column, of_block = pl.ds(j * BLOCK, BLOCK), pl.ds(block * BLOCK, BLOCK)

            def compute(m: Any) -> None:
                """Replaces 64 rows of all tiles, from row `m` on: the cotangent by the weighted activation, a
                projection by its cotangent. Stores the rows' parts of the cotangent of `row_weights`."""
                factor = None
                if weights is not None:
                    factor = plgpu.load(weights.at[pl.ds(start + m, ROWS)], layout=WGMMA.reduce(1), optimized=False)

                def half_of_columns(half: Any, sums: Any) -> Any:
                    parts = [tile.at[half, pl.ds(m, ROWS)] for tile in tiles]
                    whole = [plgpu.load(place, layout=WGMMA, optimized=False) for place in parts]
                    results: list[list[Any]] = [[] for _ in parts]
                    for n in range(0, float8_tile.HALF, COLUMNS):
                        by, *given = (array[:, n : n + COLUMNS].astype(jnp.float32) for array in whole)
                        inner = activation(*given)
                        if factor is not None:
                            sums = sums + jnp.sum(inner * by, axis=1)
                            each = lax.broadcast_in_dim(factor, by.shape, (0,))
                            inner, by = inner * each, by * each
                        for pieces, result in zip(results, (inner, *activation.gradients(by, *given)), strict=True):
                            pieces.append(result.astype(kind))
                    for place, pieces in zip(parts, results, strict=True):
                        place[...] = jnp.concatenate(pieces, axis=1)
                    return sums

                zeros = 0 if factor is None else plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), WGMMA.reduce(1))
                sums = lax.fori_loop(0, BLOCK // float8_tile.HALF, half_of_columns, zeros)
                if factor is not None:
                    outputs[-1][j, pl.ds(start + m, ROWS)] = sums

            def by_columns(number: int, values: Any, scales: Any) -> None:
                """Quantizes the columns of tile `number` in its place, with zeros in place of rows of the next group,
                and begins to store the codes to `values`."""

                @pl.when(size < BLOCK)
                def _() -> None:
                    plgpu.commit_smem()  # all threads of the warpgroup have read the tile's rows
                    float8_tile.clear(tiles[number], None, size, None)
                    plgpu.commit_smem()

                float8_tile.quantize_columns(tiles[number], turned[number], scales.at[block, column], over=True)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(turned[number], values.at[column, of_block])

            def by_rows(number: int) -> None:
                """Quantizes the rows of the cotangent of projection `number`, and stores codes and scales. Rows of the
                next group are stored, too: the tile of that group stores the same bits."""
                values, scales = outputs[4 * number : 4 * number + 2]
                at = pl.ds(start, BLOCK)
                places = values.at[at, column], scales.at[0, j, at]
                float8_tile.store_rows(tiles[1 + number], *places, beside * BLOCK, count - start)

            def first_warpgroup() -> None:
                by_columns(0, *outputs[4 * len(projections) : 4 * len(projections) + 2])
                if last:
                    float8_tile.meet(1, wait=True)  # the other one has read the rows of the first projection's tile
                    by_columns(1, *outputs[2:4])

            def second_warpgroup() -> None:
                for number in range(len(projections)):
                    by_rows(number)
                    if number < last:
                        float8_tile.meet(1, wait=False)
                by_columns(1 + last, *outputs[4 * last + 2 : 4 * last + 4])

            @pl.when(size > 0)
            def _() -> None:
                @pl.when(mine == 0)
                def _() -> None:
                    for source, tile in zip(sources, tiles, strict=True):
                        float8_tile.load(source, start, j * BLOCK, tile, loaded.at[pair])

                plgpu.barrier_wait(loaded.at[pair])
                compute(mine * ROWS)
                float8_tile.meet(0, wait=True)
                lax.cond(mine == 0, first_warpgroup, second_warpgroup)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                float8_tile.meet(0, wait=True)  # the next tile may be loaded

            return carry

        tiles_of_pair = lax.div(
            total * beside + PAIRS * launched - 1 - (sm * PAIRS + pair), jnp.int32(PAIRS * launched)
        )
        lax.fori_loop(0, tiles_of_pair, tile, 0)
        plgpu.wait_smem_to_gmem(0)

    of_rows = [
        jax.ShapeDtypeStruct((count, beside * BLOCK), DTYPE),
        jax.ShapeDtypeStruct((1, beside, long), jnp.float32),
    ]
    of_columns = [
        jax.ShapeDtypeStruct((beside * BLOCK, total * BLOCK), DTYPE),
        jax.ShapeDtypeStruct((total, beside * BLOCK), jnp.float32),
    ]
    sums = [] if row_weights is None else [jax.ShapeDtypeStruct((beside, long), jnp.float32)]
    scratch: dict[str, Any] = {
        "places": [plgpu.RefUnion(float8_tile.wide(kind, PAIRS), float8_tile.narrow(PAIRS, 2)) for _ in operands],
        "loaded": plgpu.Barrier(num_arrivals=2 * len(operands), num_barriers=PAIRS),
    }
    shapes = [*(of_rows + of_columns) * len(projections), *of_columns, *sums]
    name = f"xen_moe_float8_gradients_of_{activation.name}"
    run = launch(body, 2 * PAIRS, launched, shapes, scratch, name)
    found = run(blocks, *operands, *([] if row_weights is None else [row_weights]))
    pairs = [Quantized(*found[at : at + 2]) for at in range(0, len(found) - 1, 2)]
    both = [(pairs[at], pairs[at + 1]) for at in range(0, 2 * len(projections), 2)]
    by_weights = None if row_weights is None else jnp.sum(found[-1][:, :count], axis=0)
    return both, pairs[2 * len(projections)], by_weights
