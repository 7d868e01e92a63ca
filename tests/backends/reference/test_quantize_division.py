"""Scales must have the same bits on every backend: their divisions, done in integers, equal IEEE division."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xen_moe_jax import _quantize

pytestmark = pytest.mark.optimized
divide = jax.jit(_quantize._divide)


def assert_equals_division(a, b):
    got, want = np.asarray(divide(a, b)), (a / b).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("qmax", sorted(_quantize.QMAX.values()))
def test_scales_and_inverses_over_the_whole_range(qmax):
    amax = np.exp2(np.random.default_rng(0).uniform(-96, 127.9, 500_000)).astype(np.float32)
    amax[:4] = [2.0**-96, np.finfo(np.float32).max, qmax, 1.0]
    assert_equals_division(amax, np.full_like(amax, qmax))
    assert_equals_division(np.full_like(amax, qmax), amax)


def test_any_mantissas():
    rng = np.random.default_rng(1)
    bits = rng.integers(0x3F800000, 0x40800000, (2, 500_000)).astype(np.uint32)
    bits[:, :4] = [[0x3F800000, 0x3FFFFFFF, 0x3F800000, 0x3FFFFFFF], [0x3FFFFFFF, 0x3F800000, 0x3F800001, 0x3FFFFFFE]]
    assert_equals_division(*bits.view(np.float32))


def test_no_division_of_floats_is_left():
    """XLA divides approximately on GPU; a lowered program must not contain such a division."""
    for scale_format in _quantize.SCALE_FORMATS:
        wire = _quantize.Wire("float8_e4m3fn", scale_format)
        text = jax.jit(lambda x, w=wire: _quantize.quantize_arrays(x, w)).lower(jnp.ones((2, 256))).as_text()
        assert not [line for line in text.splitlines() if "divide" in line and "f32" in line]
