"""The contract of the fp8 kernels for Hopper GPUs in plain JAX: rows past the last group are not read, results there
are NaN, and so are scales that no row has."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from tests.support.plain_hopper import groups_of, only, unspecified
from xen_moe_jax._quantize import Wire, quantize_arrays
from xen_moe_jax.experts import hopper_float8
from xen_moe_jax.experts.float8 import quantize_weights
from xen_moe_jax.pallas_kernels.hopper import float8_quantize
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, Quantized
from xen_moe_jax.pallas_kernels.hopper.tiles import row_tiles

FORMAT = Wire("float8_e4m3fn")


def wide_weights(weights):
    """float32 `[L, A, B]`, as the product contracts them."""
    scales = jnp.repeat(jnp.repeat(weights.scales, BLOCK, 1), BLOCK, 2)
    return (weights.values.astype(jnp.float32) * scales).swapaxes(1, 2)


def wide_rows(rows, sizes):
    """float32 `[C, A]`."""
    scales = rows.scales[0].T[: rows.values.shape[0]]  # a tile may be longer than all rows
    if rows.scales.shape[0] > 1:
        scales = jnp.full((rows.values.shape[0] + rows.scales.shape[2], rows.scales.shape[1]), jnp.nan)
        facts, up_to = row_tiles(sizes, rows.values.shape[0], rows.scales.shape[2])
        for tile in range(rows.scales.shape[0]):
            _, first, low, high = (facts[i, tile] for i in range(4))
            row = jnp.arange(rows.scales.shape[2])
            mine = (row >= low) & (row < high) & (tile < up_to[sizes.shape[0] - 1])
            scales = scales.at[jnp.where(mine, first + row, scales.shape[0])].set(rows.scales[tile].T, mode="drop")
        scales = scales[: rows.values.shape[0]]
    return rows.values.astype(jnp.float32) * jnp.repeat(scales, BLOCK, axis=1)


def _product(rows, weights, sizes, columns):
    left, right = wide_rows(rows, sizes), wide_weights(weights)[:, :, :columns]
    mine = groups_of(sizes, left.shape[0])
    total = sum(jnp.dot(only(left, mine[e]), right[e], precision="highest") for e in range(right.shape[0]))
    return unspecified(total, sizes)


def rows_by_weights(pairs, sizes, *, columns, dtype, tiles, num_sms=None):
    return sum(_product(*pair, sizes, columns) for pair in pairs).astype(dtype)


def activated_rows(rows, weights, sizes, *, width, activation, projections, tiles, num_sms=None):
    of = [_product(rows, w, sizes, w.values.shape[1]) for w in weights]
    count = rows.values.shape[0]
    values, scales = quantize_arrays(activation(*of), FORMAT)
    facts, _ = row_tiles(sizes, count, tiles.m)
    at = jnp.minimum(facts[1][:, None] + jnp.arange(tiles.m), count - 1)
    kept = () if projections is None else tuple(a[:, :width].astype(projections) for a in of)
    return Quantized(values, scales[at].swapaxes(1, 2)), kept


def rows_by_rows(rows, others, blocks, *, height, width, dtype, tiles, num_sms=None):
    ends = jnp.cumsum(blocks)
    index = jnp.arange(rows.scales.shape[0])
    left, right = (
        (q.values.astype(jnp.float32).reshape(q.values.shape[0], -1, BLOCK) * q.scales.T[..., None])
        for q in (rows, others)
    )
    out = []
    for group in range(blocks.shape[0]):
        mine = ((index >= ends[group] - blocks[group]) & (index < ends[group]))[None, :, None]
        one, other = (jnp.where(mine, a, 0).reshape(a.shape[0], -1) for a in (left, right))
        out.append(jnp.dot(one, other.T, precision="highest")[:height, :width])
    return jnp.stack(out).astype(dtype)


class Quantizers:
    """`float8_quantize` in plain JAX.

    Attributes:
      calls: number of arrays of weights that were quantized since `in_the_kernels_place` began.
    """

    calls = 0
    blocks_of_groups = staticmethod(float8_quantize.blocks_of_groups)

    @staticmethod
    def rows(array):
        values, scales = quantize_arrays(_padded(array, 1), FORMAT)
        return Quantized(values, scales.T[None])

    @staticmethod
    def weights(array, *, product, gradient):
        Quantizers.calls += 1
        values, scales = quantize_weights(_padded(array, 1, 2))
        turned = Quantized(values.swapaxes(1, 2), scales.swapaxes(1, 2))
        return turned if product else None, Quantized(values, scales) if gradient else None

    @staticmethod
    def columns(array, blocks):
        if isinstance(array, Quantized):
            array = array.values.astype(jnp.float32) * jnp.repeat(array.scales[0].T, BLOCK, axis=1)
        at = jnp.minimum(blocks[0][:, None] + jnp.arange(BLOCK), array.shape[0] - 1)
        tiles = jnp.where((jnp.arange(BLOCK) < blocks[1][:, None])[..., None], _padded(array, 1)[at], 0).swapaxes(1, 2)
        values, scales = quantize_arrays(tiles, FORMAT)
        return Quantized(values.swapaxes(0, 1).reshape(values.shape[1], -1), scales[..., 0])

    @staticmethod
    def both(array, blocks):
        return Quantizers.rows(array), Quantizers.columns(array, blocks)


class Activations:
    """`float8_activation` in plain JAX."""

    @staticmethod
    def gradients(activation, by_inner, projections, row_weights, blocks, *, claimed=False):
        by, *wide = (a.astype(jnp.float32) for a in (by_inner, *projections))
        inner, by_row_weights = activation(*wide), None
        if row_weights is not None:
            by_row_weights = jnp.sum(inner * by, axis=1)
            inner, by = inner * row_weights[:, None], by * row_weights[:, None]
        both = [Quantizers.both(a.astype(by_inner.dtype), blocks) for a in activation.gradients(by, *wide)]
        return both, Quantizers.columns(inner.astype(by_inner.dtype), blocks), by_row_weights


def _padded(array, *axes):
    return jnp.pad(array, [(0, -size % BLOCK if axis in axes else 0) for axis, size in enumerate(array.shape)])


@contextlib.contextmanager
def in_the_kernels_place():
    """Inside this context experts in fp8 compute as on a Hopper GPU, in any dtype. They are traced anew."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rows_by_weights", "rows_by_rows", "activated_rows"):
            patch.setattr(hopper_float8, name, globals()[name])
        patch.setattr(hopper_float8, "float8_quantize", Quantizers)
        patch.setattr(hopper_float8, "float8_activation", Activations)
        patch.setattr(hopper_float8, "supports", lambda rows, weights: True)
        patch.setattr(Quantizers, "calls", 0)
        yield Quantizers
    jax.clear_caches()
