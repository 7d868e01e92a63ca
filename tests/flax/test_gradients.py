"""Gradients of the layer against those of a dense evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.dense_moe import dense_aux_loss, dense_moe
from tests.support.layers import CONFIG, DEEPSEEK, layer, make_mesh, tokens, weights_of

CASES = {
    "softmax": dataclasses.replace(CONFIG, aux_loss_weight=0.5),
    "DeepSeek-V3": DEEPSEEK,
    "padded, uneven": dataclasses.replace(CONFIG, num_experts=10, layout="padded"),
}


def layer_gradients(moe, x, mesh, target, mask=None):
    graph, state = nnx.split(moe, nnx.Param, ...)[0], nnx.state(moe)

    def loss(state, x):
        y, metrics = nnx.merge(graph, *nnx.split_state(state, nnx.Param, ...))(x, mask=mask)
        return jnp.sum(jnp.where(jnp.isnan(target), 0, y * target)) + metrics.aux_loss

    with jax.set_mesh(mesh):
        state_gradient, x_gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, x)
    return {name: np.asarray(leaf) for name, leaf in state_gradient.to_pure_dict().items()} | {
        "x": np.asarray(x_gradient)
    }


@pytest.mark.parametrize("name", CASES)
def test_equal_dense(name):
    config = CASES[name]
    moe, x, target = layer(config), tokens(8, 4), tokens(8, 4, seed=9)
    gradients = layer_gradients(moe, x, make_mesh((2, 4), ("dp", "ep")), target)

    def dense_loss(weights, x):
        aux_loss = dense_aux_loss(config, weights, x)[0] if config.balancing == "aux_loss" else 0.0
        return jnp.sum(dense_moe(config, weights, x) * target) + aux_loss

    weights = {name: jnp.asarray(w) for name, w in weights_of(moe).items()}
    expected, x_expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(weights, x)
    for key, value in (expected | {"x": x_expected}).items():
        if key == "router_bias":
            assert not gradients[key].any(), "the bias moves by update_bias, never by a gradient"
            continue
        assert np.abs(value).max() > 1e-3, f"the case tests nothing about {key}"
        np.testing.assert_allclose(gradients[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def test_left_out_tokens_have_no_part_in_any_gradient():
    config = dataclasses.replace(CONFIG, aux_loss_weight=0.5)
    moe, x, target = layer(config), tokens(32), tokens(32, seed=9)
    mesh = make_mesh((4,), ("ep",))
    mask = np.arange(32) % 3 != 0
    some = layer_gradients(moe, x, mesh, np.where(mask[:, None], target, 0.0), jnp.asarray(mask))
    poisoned = layer_gradients(
        moe, np.where(mask[:, None], x, np.nan), mesh, np.where(mask[:, None], target, 0.0), jnp.asarray(mask)
    )
    assert not some["x"][~mask].any()
    for key, value in some.items():
        np.testing.assert_array_equal(poisoned[key], value, err_msg=key)


def test_fp8_wire_is_straight_through():
    """Same expert weights, nearly the same gradients; a wire that cut the gradient would give zeros."""
    moe, x, target = layer(CONFIG), tokens(32), tokens(32, seed=9)
    mesh = make_mesh((4,), ("ep",))
    exact = layer_gradients(moe, x, mesh, target)
    quantized = layer_gradients(layer(dataclasses.replace(CONFIG, wire="float8_e4m3fn")), x, mesh, target)
    for key, value in exact.items():
        error = np.linalg.norm(quantized[key] - value) / np.linalg.norm(value)
        assert error < 0.1, (key, error)
    # Gradients of `down` see the rounded activations.
    assert np.abs(quantized["down"] - exact["down"]).max() > 1e-4
