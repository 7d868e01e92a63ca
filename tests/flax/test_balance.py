"""What keeps the experts evenly loaded: closed forms, and that it works."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.layers import CONFIG, H, layer, make_mesh, run, tokens
from xen_moe_jax.flax import MoEMetrics, updated_bias
from xen_moe_jax.flax._placement import apply_moe

E = CONFIG.num_experts


def biased_layer(config):
    """A layer whose router sends nearly every token to expert 5 first."""
    moe = layer(config)
    if config.balancing == "bias":
        moe.router_bias[...] = jnp.zeros(E).at[5].set(1.0)
    else:
        moe.router[...] = moe.router[...].at[0, 5].set(4.0)
    return moe


def test_aux_loss_closed_forms():
    config = dataclasses.replace(CONFIG, aux_loss_weight=1.0, top_k=1)
    moe, x = layer(config), tokens(32)
    moe.router[...] = jnp.zeros((H, E))
    _, metrics = run(moe, x)
    assert float(metrics.aux_loss) == pytest.approx(1.0), "uniform scores: E * sum f_e / E = 1 whatever is chosen"
    moe.router[...] = jnp.zeros((H, E)).at[0, 5].set(100.0)
    _, metrics = run(moe, np.abs(x) + 1)
    assert float(metrics.aux_loss) == pytest.approx(E), "everything to one expert: E"
    assert float(metrics.max_load) == pytest.approx(E)


def test_aux_loss_does_not_depend_on_the_mesh():
    moe, x = layer(CONFIG), tokens(64)
    values = [run(moe, x, mesh)[1].aux_loss for mesh in (None, make_mesh((2, 4), ("dp", "ep")))]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def test_following_the_aux_loss_balances():
    config = dataclasses.replace(CONFIG, aux_loss_weight=1.0)
    moe, x = biased_layer(config), jnp.asarray(tokens(128) + np.eye(1, H))
    weights = {name: getattr(moe, name)[...] for name in moe.weight_names}

    @jax.jit
    def step(router):
        def loss(router):
            _, metrics = apply_moe(config, None, weights | {"router": router}, x)
            return metrics.aux_loss, metrics.max_load

        gradient, load = jax.grad(loss, has_aux=True)(router)
        return router - 0.3 * gradient, load

    router, loads = weights["router"], []
    for _ in range(100):
        router, load = step(router)
        loads.append(float(load))
    assert loads[0] > 3 and max(loads[-5:]) < 1.3, loads


def test_moving_the_bias_balances():
    config = dataclasses.replace(CONFIG, score="sigmoid", balancing="bias", bias_update_rate=0.02)
    moe, x = biased_layer(config), tokens(128)
    call = nnx.jit(lambda moe, x: moe(x)[1])
    loads = []
    for _ in range(60):
        metrics = call(moe, x)
        loads.append(float(metrics.max_load))
        moe.update_bias(metrics)
    assert loads[0] > 3.5 and loads[-1] < 1.5, loads


def test_updated_bias():
    bias = updated_bias(jnp.asarray([0.5, 0.0, -0.5, 1.0]), jnp.asarray([10, 2, 6, 6]), 0.125)
    np.testing.assert_array_equal(bias, [0.375, 0.125, -0.5, 1.0])  # the mean is 6: down, up, stay, stay


def test_max_load_of_nothing_is_zero():
    nothing = MoEMetrics(aux_loss=jnp.zeros(()), tokens_per_expert=jnp.zeros(4, jnp.int32), num_dropped=jnp.int32(0))
    assert float(nothing.max_load) == 0.0
