"""Rows times the weights of their groups: the forward pass of a grouped matmul, and the gradient of its rows.

One kernel has three forms: a product; the sum of two products, in one accumulator; and two projections of the same rows
side by side, with the expert's activation before they are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, ring
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, ROW_ALIGNMENT, Tiles, row_tiles

Store = Callable[[Any, int, int], Callable[[Any], None]]
"""`(output, m, n)`: how a buffer with the piece at row `m`, column `n` of a warpgroup's part gets into that output."""
Epilogue = Callable[[tuple[Any, ...], tuple[Any, ...], Any, Store], Iterator[tuple[Any, Callable[[Any], None]]]]
"""`(accumulators, outputs, row, store) -> (piece, store(output, m, n)), ...`; the warpgroup's rows begin at `row`."""


@functools.partial(jax.jit, static_argnames=("transposed", "tiles", "num_sms"))  # calls alike are lowered once
def rows_by_weights(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    also: tuple[jax.Array, jax.Array] | None = None,
    *,
    transposed: bool,
    tiles: Tiles,
    num_sms: int | None = None,
) -> jax.Array:
    """`rows [C, A]` times the weights of their groups `[L, A, B]` -> `[C, B]`; `[L, B, A]` where `transposed`.

    `also`, rows and weights of the same shapes, is multiplied and added up in the same accumulators. Rows past the last
    group come out unspecified.
    """
    columns = weights.shape[1 if transposed else 2]

    def epilogue(accumulators: tuple[Any, ...], outputs: tuple[Any, ...], row: Any, store: Store) -> Iterator[Any]:
        for at in ring.places(tiles, tiles.warpgroup_n):
            yield ring.piece(accumulators[0], *at).astype(rows.dtype), store(outputs[0], *at)

    pairs = [(rows, (weights,))] + ([] if also is None else [(also[0], (also[1],))])
    return _product(pairs, group_sizes, (), epilogue, (columns,), transposed, tiles, num_sms, "xen_moe_grouped_rows")[0]


@functools.partial(jax.jit, static_argnames=("projections", "tiles", "num_sms"))
def swiglu_rows(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    row_weights: jax.Array | None = None,
    *,
    projections: bool,
    tiles: Tiles,
    num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
    """`silu(rows @ gate) * (rows @ up)` of each group, in float32 and rounded once -> `[C, F]`.

    Args:
      rows: `[C, A]`.
      gate, up: `[L, A, F]`.
      group_sizes: int32 `[L]`.
      row_weights: float32 `[C]`, factors of the result's rows.
      projections: True if the two products are results too, without `row_weights`.

    Returns:
      The activation, and with `projections` the products `[C, F]` of `gate` and `up`; rows past the last group are
      unspecified.
    """
    # a tile's rows may be past the last one: a load is not cut off there as a store is
    extra = () if row_weights is None else (jnp.pad(row_weights.astype(jnp.float32), (0, tiles.cluster_m)),)

    def epilogue(accumulators: tuple[Any, ...], outputs: tuple[Any, ...], row: Any, store: Store) -> Iterator[Any]:
        *factors, out = outputs[: len(extra) + 1]
        for m, n in ring.places(tiles, tiles.warpgroup_n // 2):
            g, u = (ring.piece(acc, m, n) for acc in accumulators)
            h = g * lax.logistic(g) * u
            if factors:
                of_rows = factors[0].at[pl.ds(row + m, ring.STORE_TILE)]
                of_rows = plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                h = h * lax.broadcast_in_dim(of_rows, h.shape, (0,))
            for value, output in zip((h, g, u), (out, *outputs[len(extra) + 1 :]), strict=False):
                yield value.astype(rows.dtype), store(output, m, n)

    columns = (gate.shape[2],) * (3 if projections else 1)
    pairs = [(rows, (gate, up))]
    return _product(pairs, group_sizes, extra, epilogue, columns, False, tiles, num_sms, "xen_moe_grouped_swiglu")


def _product(
    pairs: Sequence[tuple[jax.Array, tuple[jax.Array, ...]]],
    group_sizes: jax.Array,
    extra: tuple[jax.Array, ...],
    epilogue: Epilogue,
    columns: tuple[int, ...],
    transposed: bool,
    tiles: Tiles,
    num_sms: int | None,
    name: str,
) -> tuple[jax.Array, ...]:
    """The kernel: multiplies the rows of each of `pairs` by its weights, whose columns stand side by side in a tile,
    and adds all products up.

    `columns` are those of the outputs; `epilogue` gets `extra` as the first of its outputs.
    """
    (capacity, depth), dtype = pairs[0][0].shape, pairs[0][0].dtype
    beside = len(pairs[0][1])
    width, tile_width, own_width = (n // beside for n in (tiles.n, tiles.cluster_n, tiles.warpgroup_n))
    if columns[0] % tile_width or own_width % ring.STORE_TILE or depth % tiles.k or capacity % ROW_ALIGNMENT:
        raise ValueError(
            f"rows {[capacity, depth]}, weights {[list(w.shape) for w in pairs[0][1]]}, {tiles}: columns must be a "
            f"multiple of {tile_width}, the contracted dimension of {tiles.k}, and the rows of {ROW_ALIGNMENT}"
        )
    for rows, weights in pairs:
        shapes = rows.shape, {w.shape for w in weights}
        if shapes != (pairs[0][0].shape, {pairs[0][1][0].shape}):
            raise ValueError(f"rows and weights of two products: {shapes} must be {pairs[0][0].shape} and the same")
    n_tiles, k_steps = columns[0] // tile_width, depth // tiles.k
    tables = row_tiles(group_sizes, capacity, tiles.cluster_m)
    operands = [a for rows, weights in pairs for a in (rows, *weights)]

    def body(*refs: Any, **s: Any) -> None:
        given, (facts, up_to), outputs = (
            refs[: len(operands)],
            refs[len(operands) : len(operands) + 2],
            refs[len(operands) + 2 :],
        )
        wg, peer = lax.axis_index("wg"), lax.axis_index("cluster")
        grid = (up_to[group_sizes.shape[0] - 1] * n_tiles,)

        def place(index: Any) -> tuple[Any, Any, Any]:
            (number,) = index
            m, n = lax.div(number, jnp.int32(n_tiles)), lax.rem(number, jnp.int32(n_tiles))
            row = pl.multiple_of(facts[1, m], ROW_ALIGNMENT)
            column = n * tile_width
            if tiles.cluster == "m":
                row = pl.multiple_of(row + peer * tiles.m, ROW_ALIGNMENT)
            if tiles.cluster == "n":
                column = column + peer * width
            return m, row, column

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                group = facts[0, m]

                def load_of(rows: Any, *weights: Any) -> Callable[..., None]:
                    matrices = [w.at[group] for w in weights]

                    def load(k: Any, left: Any, right: Any, barrier: Any) -> None:
                        depth_at = pl.ds(k * tiles.k, tiles.k)
                        at = pl.ds(column, width)
                        plgpu.copy_gmem_to_smem(
                            rows.at[pl.ds(row, tiles.m), depth_at],
                            left,
                            barrier,
                            collective_axes="cluster" if tiles.cluster == "n" else None,
                        )
                        for number, matrix in enumerate(matrices):
                            plgpu.copy_gmem_to_smem(
                                matrix.at[at, depth_at] if transposed else matrix.at[depth_at, at],
                                right if beside == 1 else right.at[number],
                                barrier,
                                collective_axes="cluster" if tiles.cluster == "m" else None,
                            )

                    return load

                for number in range(len(pairs)):
                    pair = given[number * (1 + beside) : (number + 1) * (1 + beside)]
                    carry = ring.load_steps(tiles, s, k_steps, carry, load_of(*pair))
                return carry

            done = claims.loads(tiles, s, up_to, grid, tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else slice(None)
            n_at = pl.ds(wg * own_width, own_width) if tiles.split == "n" else slice(None)

            def multiply(accumulators: tuple[Any, ...], slot: Any) -> None:
                for number, acc in enumerate(accumulators):
                    right = s["right"].at[slot] if beside == 1 else s["right"].at[slot, number]
                    right = right.at[n_at] if transposed else right.at[:, n_at]
                    plgpu.wgmma(acc, s["left"].at[slot, m_at], right.transpose((1, 0)) if transposed else right)

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                # read now: a load from memory takes as long as half a piece of the store that needs it
                low, high, offset = facts[2, m], facts[3, m], row - facts[1, m]
                steps = len(pairs) * k_steps
                accumulators, done = ring.multiply_steps(tiles, s, steps, carry, multiply, beside=beside)
                if tiles.split == "m":
                    offset, row = offset + wg * tiles.warpgroup_m, row + wg * tiles.warpgroup_m
                else:
                    column = column + wg * own_width

                def store(out: Any, m: int, n: int) -> Callable[[Any], None]:
                    def copy(buffer: Any) -> None:
                        piece_low = jnp.clip(low - (offset + m), 0, ring.STORE_TILE)
                        piece_high = jnp.clip(high - (offset + m), 0, ring.STORE_TILE)
                        ring.store_rows(buffer, out, row + m, column + n, piece_low, piece_high)

                    return copy

                ring.store(epilogue(accumulators, outputs, row, store), s["pieces"], wg)
                return done

            claims.multiplies(tiles, s, grid, tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    right: tuple[int, ...] = (width, tiles.k) if transposed else (tiles.k, width)
    right = right if beside == 1 else (beside, *right)
    out_type = [jax.ShapeDtypeStruct((capacity, count), dtype) for count in columns]
    scratch = ring.scratch(tiles, (tiles.m, tiles.k), right, dtype, loads=1 + beside)
    return tuple(ring.kernel(body, tiles, num_sms, out_type, scratch, name)(*operands, *tables, *extra))
