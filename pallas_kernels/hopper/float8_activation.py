"""The backward pass of an activation between fp8 matmuls: the cotangents of the projections, and the activation, which
is computed again, are quantized without a pass through the GPU's memory in 16 bits.

A thread block has a tile of 128 x 128 of all operands in shared memory. It computes its results in place, rounded to
the operands' dtype, and quantizes each for its uses: the cotangents by rows for the gradient of the experts' rows, and
all results by columns for the gradients of weights. It reads and writes each number once. Two blocks fit into a
multiprocessor, since the codes that are about to be stored lie in the place of the first operand.
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
from xen_moe_jax.pallas_kernels.hopper.float8_quantize import launch
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, DTYPE, ROWS, WGMMA, Quantized


@functools.partial(jax.jit, static_argnames=("activation",))
def gradients(
    activation: Activation,
    by_inner: jax.Array,
    projections: Sequence[jax.Array],
    row_weights: jax.Array | None,
    blocks: jax.Array,
) -> tuple[list[tuple[Quantized, Quantized]], Quantized, jax.Array | None]:
    """Returns the cotangents of the projections, and the activation, of rows that are weighted behind the activation,
    all of them quantized.

    Args:
      by_inner: cotangent of the weighted activation, bfloat16 or float16 `[C, F]`, `F` a multiple of 64.
      projections: `gate` and `up`, or `up` alone, `[C, F]` in the same dtype.
      row_weights: float32 `[C]`, factors of the activation's rows, or None for factors of one.
      blocks: int32 `[2, N]`, from `blocks_of_groups`.

    Returns:
      For each projection the rows and the columns of its cotangent, as `float8_quantize.both` returns them; the columns
      of the weighted activation; the cotangent of `row_weights`, float32 `[C]`, or None. Rows past the last group are
      unspecified.
    """
    (count, width), total, kind = by_inner.shape, blocks.shape[1], by_inner.dtype
    beside, long = pl.cdiv(width, BLOCK), (pl.cdiv(count, BLOCK) + 1) * BLOCK
    operands = [by_inner, *projections]
    if row_weights is not None:
        row_weights = jnp.pad(row_weights, (0, long - count))  # a block's 128 rows may begin at the last row

    def body(facts: Any, *refs: Any, first: Any, others: Any, loaded: Any) -> None:
        inner_tile, (turned, staged) = first
        tiles = [inner_tile, *others]
        block, j = (lax.axis_index(name) for name in "xy")
        start, size = facts[0, block], facts[1, block]
        sources, refs = refs[: len(operands)], refs[len(operands) :]
        weights, outputs = (None, refs) if row_weights is None else (refs[0], refs[1:])
        column, of_block = pl.ds(j * BLOCK, BLOCK), pl.ds(block * BLOCK, BLOCK)

        def compute(m: int) -> None:
            """Replaces 64 rows of all tiles, from row `m` on: the cotangent by the weighted activation, a projection by
            its cotangent. Stores the rows' parts of the cotangent of `row_weights`."""
            factor = sums = None
            if weights is not None:
                factor = plgpu.load(weights.at[pl.ds(start + m, ROWS)], layout=WGMMA.reduce(1), optimized=False)
            for half in range(BLOCK // float8_tile.HALF):
                places = [tile.at[half, pl.ds(m, ROWS)] for tile in tiles]
                by, *given = (plgpu.load(p, layout=WGMMA, optimized=False).astype(jnp.float32) for p in places)
                inner = activation(*given)
                if factor is not None:
                    part = jnp.sum(inner * by, axis=1)
                    sums = part if sums is None else sums + part
                    each = lax.broadcast_in_dim(factor, by.shape, (0,))
                    inner, by = inner * each, by * each
                for place, result in zip(places, (inner, *activation.gradients(by, *given)), strict=True):
                    place[...] = result.astype(kind)
            if sums is not None:
                outputs[-1][j, pl.ds(start + m, ROWS)] = sums

        def store(tile: Any, out: Any, at: Any) -> None:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out.at[at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def clear(tiles: Any) -> None:
            @pl.when(size < BLOCK)
            def _() -> None:
                for tile in tiles:
                    float8_tile.clear(tile, None, size, None)
                plgpu.commit_smem()

        @pl.when(size > 0)
        def _() -> None:
            for source, tile in zip(sources, tiles, strict=True):
                float8_tile.load(source, start, j * BLOCK, tile, loaded)
            plgpu.barrier_wait(loaded)
            for m in range(0, BLOCK, ROWS):
                compute(m)
            plgpu.commit_smem()
            clear(tiles[:1])
            values, scales = outputs[4 * len(others) : 4 * len(others) + 2]
            float8_tile.quantize_columns(inner_tile, turned, scales.at[block, column], over=True)
            store(turned, values, (column, of_block))
            # `turned` is one half of the first tile. The other half, `staged`, holds each tile of codes on its way out.
            for number, tile in enumerate(others):
                values, scales = outputs[4 * number : 4 * number + 2]
                float8_tile.quantize_rows(tile, staged, scales.at[0, j, pl.ds(start, BLOCK)])
                store(staged, values, (pl.ds(start, BLOCK), column))
            clear(others)
            for number, tile in enumerate(others):
                values, scales = outputs[4 * number + 2 : 4 * number + 4]
                float8_tile.quantize_columns(tile, staged, scales.at[block, column])
                store(staged, values, (column, of_block))
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
    scratch = {
        "first": plgpu.RefUnion(float8_tile.wide(kind), [float8_tile.narrow(), float8_tile.narrow()]),
        "others": [float8_tile.wide(kind) for _ in projections],
        "loaded": plgpu.Barrier(num_arrivals=2 * len(operands)),
    }
    shapes = [*(of_rows + of_columns) * len(projections), *of_columns, *sums]
    run = launch(body, shapes, scratch, (total, beside), f"gradients_of_{activation.name}")
    found = run(blocks, *operands, *([] if row_weights is None else [row_weights]))
    pairs = [Quantized(*found[at : at + 2]) for at in range(0, len(found) - 1, 2)]
    both = [(pairs[at], pairs[at + 1]) for at in range(0, 2 * len(projections), 2)]
    by_weights = None if row_weights is None else jnp.sum(found[-1][:, :count], axis=0)
    return both, pairs[2 * len(projections)], by_weights
