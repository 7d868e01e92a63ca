"""The router's logits as matmuls of bfloat16: as exact as in float32, gradients too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from tests.support.layers import CONFIG, layer, make_mesh, run_with_gradients, tokens
from xen_moe_jax.flax import _logits


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def test_a_float32_number_is_three_bfloat16_numbers():
    a = draw(0, 1000) * jnp.exp2(jnp.arange(1000) % 60 - 30)
    parts = jax.jit(_logits.parts_of)(a)
    assert {part.dtype.name for part in parts} == {"bfloat16"}
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), np.asarray(a, np.float64))


def test_logits_and_gradients_are_those_of_float32():
    x, router, cotangent = draw(0, 64, 512, dtype=jnp.bfloat16), draw(1, 512, 24), draw(2, 64, 24)
    out, pull = jax.vjp(jax.jit(_logits.by_parts), x, router)
    by_x, by_router = pull(cotangent)
    exact = [np.asarray(a, np.float64) for a in (x, router, cotangent)]
    for name, got, expected in (
        ("logits", out, exact[0] @ exact[1]),
        ("router", by_router, exact[0].T @ exact[2]),
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=name)
    expected = exact[2] @ exact[1].T
    rounded = np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float64)
    assert by_x.dtype == jnp.bfloat16
    assert np.mean(np.asarray(by_x, np.float64) != rounded) < 0.01, "but for ties it is rounded once"
    np.testing.assert_allclose(np.asarray(by_x, np.float64), expected, rtol=2**-7, atol=1e-3)


def test_a_layer_chooses_the_same_experts(monkeypatch):
    config = dataclasses.replace(CONFIG, balancing="none", dtype=jnp.float32)
    mesh, target = make_mesh((2,), ("ep",)), tokens(16)
    x = jnp.asarray(tokens(16, seed=4), jnp.bfloat16)
    expected = run_with_gradients(layer(config), x, target, mesh)
    monkeypatch.setattr(_logits, "PLATFORMS", ("cpu",))
    got = run_with_gradients(layer(config), x, target, mesh)
    np.testing.assert_array_equal(got[1].tokens_per_expert, expected[1].tokens_per_expert)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got[0], expected[0])), rtol=1e-5, atol=1e-5)
    for name, value in expected[2].items():
        one, other = (np.asarray(a, np.float32) for a in (got[2][name], value))
        np.testing.assert_allclose(one, other, rtol=2e-2 if name == "x" else 1e-4, atol=1e-2 if name == "x" else 1e-5)
