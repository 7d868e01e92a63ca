"""Weights in shipped formats, read by a kernel on a Hopper GPU: products beside float64 and beside widened weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.support.quantized import FORMATS, quantized_weight, widen_in_numpy
from xen_moe_jax._overlap import overlap_work
from xen_moe_jax.experts import hopper, quantized
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.experts.mlp import grouped_experts

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.on_hopper(), reason="needs a Hopper GPU (compute capability 9.0)"
)

SIZES = {
    "a row each": (1, 1, 1, 1, 1, 1, 1),
    "8 to 64": (8, 9, 16, 17, 33, 64, 2),
    "empty and many": (0, 0, 130, 0, 5, 65, 0),
    "all to one": (0, 0, 0, 190, 0, 0, 0),
    "none": (0, 0, 0, 0, 0, 0, 0),
}
GROUPS, CAPACITY = 7, 224
SHAPES = ((256, 512), (352, 272), (1088, 144))
"""Depth and columns: whole tiles and stages, and such that end within a tile or a stage."""


def operands(name, sizes, depth, columns):
    """Returns rows, which are NaN past the last group, the weight and the group sizes."""
    used = sum(sizes)
    rows = np.random.default_rng(used).normal(size=(CAPACITY, depth)).astype(jnp.bfloat16)
    rows[used:] = np.nan
    return rows, quantized_weight(name, GROUPS, depth, columns), np.asarray(sizes, np.int32)


def exact(rows, wide, sizes):
    """Returns the products in float64, and the products of the operands' magnitudes."""
    rows, wide = (np.asarray(a, np.float64) for a in (rows, wide))
    out = np.zeros((rows.shape[0], wide.shape[2]))
    most, start = np.zeros_like(out), 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        out[part], most[part] = rows[part] @ wide[group], np.abs(rows[part]) @ np.abs(wide[group])
        start += size
    return out, most


@jax.jit
def products(rows, weight, sizes):
    return quantized.grouped_matmuls(rows, [weight, weight], sizes)


@pytest.mark.parametrize("depth, columns", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name, depth, columns):
    """Products with two weights are near those in float64: within the rounding of the result and of float32 sums."""
    for sizes in SIZES.values():
        rows, weight, group_sizes = operands(name, sizes, depth, columns)
        assert quantized.why_not(rows, [weight]) is None
        used = sum(sizes)
        first, second = (np.asarray(out, np.float64)[:used] for out in products(rows, weight, group_sizes))
        np.testing.assert_array_equal(first, second)
        wanted, most = (a[:used] for a in exact(rows, widen_in_numpy(weight), sizes))
        error = np.abs(first - wanted)
        assert (error <= 2**-8 * np.abs(wanted) + 2**-20 * most).all(), (sizes, error.max())


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_the_widened_weights(name):
    """The kernel for bfloat16 weights multiplies and adds up the same numbers in the same order."""
    sizes = SIZES["8 to 64"]
    rows, weight, group_sizes = operands(name, sizes, 1024, 512)
    (out,) = jax.jit(lambda *given: quantized.grouped_matmuls(given[0], [given[1]], given[2]))(
        rows, weight, group_sizes
    )
    others = jax.jit(hopper.grouped_matmul)(rows, weight.widen(jnp.bfloat16), group_sizes)
    used = sum(sizes)
    np.testing.assert_array_equal(np.asarray(out[:used], np.float32), np.asarray(others[:used], np.float32))


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
def test_beside_a_pending_operation(name):
    """A thread block for each tile gives the bits of one for each multiprocessor."""
    for sizes in SIZES.values():
        given = operands(name, sizes, *SHAPES[1])
        with overlap_work():
            claimed = jax.jit(lambda rows, weight, sizes: quantized.grouped_matmuls(rows, [weight, weight], sizes))(
                *given
            )
        for one, other in zip(claimed, products(*given), strict=True):
            np.testing.assert_array_equal(one[: sum(sizes)], other[: sum(sizes)])


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
def test_a_row_that_is_not_finite_reaches_no_other(name):
    sizes = SIZES["8 to 64"]
    rows, weight, group_sizes = operands(name, sizes, 256, 512)
    broken = rows.copy()
    broken[3, 100], broken[90, 7] = np.nan, np.inf
    clean, found = (np.asarray(products(r, weight, group_sizes)[0], np.float32) for r in (rows, broken))
    others = ~np.isin(np.arange(CAPACITY), (3, 90)) & (np.arange(CAPACITY) < sum(sizes))
    np.testing.assert_array_equal(found[others], clean[others])
    assert np.isnan(found[3]).all() and not np.isfinite(found[90]).any()


@pytest.mark.parametrize("exponent", [0, 1, 127, 128, 129, 200, 252, 255])
def test_every_exponent_of_mxfp4(exponent):
    """Rows with a single one read the weight itself: the bits of `widen`, NaN for 255."""
    depth, columns = 128, 128
    weight = quantized_weight("MXFP4", 1, depth, columns)
    codes = jnp.arange(256, dtype=jnp.uint8).repeat(weight.values.size // 256).reshape(weight.values.shape)
    weight = xm.QuantizedWeight(codes, jnp.full_like(weight.scales, exponent), weight.block)
    rows = jnp.eye(64, depth, dtype=jnp.bfloat16)
    (out,) = quantized.grouped_matmuls(rows, [weight], jnp.asarray([64], jnp.int32))
    wide = np.asarray(weight.widen(jnp.float32), np.float64)[0]
    wanted = wide.astype(jnp.bfloat16)[:64]
    if exponent == 255:  # 0 * NaN: every element of a column
        assert np.isnan(np.asarray(out, np.float32)).all()
        return
    # below the normal range sums may be flushed
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted.astype(np.float64), rtol=0, atol=2.0**-125)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_byte(dtype):
    """All 256 values of a byte have the bits of `widen`; NaN and infinity reach the products of their columns alone."""
    values = jnp.tile(jnp.arange(256, dtype=jnp.uint8)[None, None, :], (1, 64, 1))
    values = jax.lax.bitcast_convert_type(values, jnp.dtype(dtype))
    weight = xm.QuantizedWeight(values, jnp.full((1, 1, 256), 0.3, jnp.float32), (64, 1))
    rows = jnp.eye(8, 64, dtype=jnp.bfloat16)
    (out,) = quantized.grouped_matmuls(rows, [weight], jnp.asarray([8], jnp.int32))
    wide = np.asarray(weight.widen(jnp.bfloat16), np.float32)[0, :8]
    wanted = np.where(np.isfinite(wide), wide, np.nan)  # times the zeros of other rows
    np.testing.assert_array_equal(np.where(np.isfinite(np.asarray(out, np.float32)), out, np.nan), wanted)


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
def test_experts_and_gradient_of_rows(name):
    """The experts read quantized weights in both halves; value and gradient are near those of the widened weights."""
    sizes = (3, 0, 17, 40)
    rows = jax.random.normal(jax.random.key(0), (72, 256)).astype(jnp.bfloat16)
    gate, group_sizes = quantized_weight(name, len(sizes), 256, 384), jnp.asarray(sizes, jnp.int32)
    weights = {"gate": gate, "up": gate, "down": quantized_weight(name, len(sizes), 384, 256)}
    wide = {name: weight.widen(jnp.bfloat16) for name, weight in weights.items()}
    used = sum(sizes)

    def loss(rows, weights):
        return jnp.sum(grouped_experts(ExpertFunction(), rows, group_sizes, weights)[:used].astype(jnp.float32) ** 2)

    text = jax.jit(loss).lower(rows, weights).as_text()
    assert text.count(quantized.TARGET) == 2
    (value, by_rows), (wanted, by_wanted) = (jax.jit(jax.value_and_grad(loss))(rows, w) for w in (weights, wide))
    np.testing.assert_allclose(value, wanted, rtol=2e-2)
    by_rows, by_wanted = (np.asarray(a[:used], np.float64) for a in (by_rows, by_wanted))
    assert np.linalg.norm(by_rows - by_wanted) < 2e-2 * np.linalg.norm(by_wanted)
