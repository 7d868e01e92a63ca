"""Which layers take the decode kernel on TPU, and that they compute the same as grouped matmuls do."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax layers: pip install 'xen-moe-jax[flax]'")

import xen_moe_jax as xm
from tests.support import interpreter
from xen_moe_jax.flax import MoEConfig, linen, tpu_decode

KERNEL = xm.KernelConfig(backend="pallas", interpret=True)
CONFIG = MoEConfig(hidden_size=144, intermediate_size=96, num_experts=10, top_k=2, kernel=KERNEL)
"""A hidden size that is no multiple of 128, and experts that do not divide by the ranks."""


def replaced(**changes):
    return dataclasses.replace(CONFIG, **changes)


def low_latency(**changes):
    return replaced(kernel=dataclasses.replace(KERNEL, mode="low_latency"), **changes)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (replaced(kernel=xm.KernelConfig()), 8),
        (CONFIG, 257),
        (replaced(kernel=dataclasses.replace(KERNEL, mode="throughput")), 8),
        (replaced(grouped_matmul="ragged_dot"), 8),
        (replaced(layout="padded"), 8),
        (replaced(capacity_factor=2.0), 8),
        (replaced(experts=lambda rows, sizes, weights: rows), 8),
    ],
    ids=["another platform", "many tokens", "throughput", "a grouped matmul", "padded", "a capacity", "own experts"],
)
def test_other_layers_are_left_as_they_are(config, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tpu_decode.adapted(config, tokens) is config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (low_latency(capacity=64), "a capacity"),
        (low_latency(apply_weights_to="activation"), "apply_weights_to='activation'"),
        (low_latency(hidden_size=136), "hidden_size=136: must be a multiple of 16"),
        (low_latency(intermediate_size=100), "intermediate_size=100: must be a multiple of 16"),
    ],
)
def test_a_layer_that_asks_for_low_latency_is_told_why_it_cannot_have_the_kernel(config, reason):
    with pytest.warns(UserWarning, match=reason):
        assert tpu_decode.adapted(config, 8) is config


def test_groups_begin_at_multiples_of_16():
    assert tpu_decode.adapted(CONFIG, 256).alignment == 16
    assert tpu_decode.adapted(replaced(alignment=32), 8).alignment == 32
    assert tpu_decode.adapted(replaced(alignment=6), 8).alignment % 6 == 0
    assert tpu_decode.adapted(low_latency(), 1000).experts is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "clipped_swiglu", "expert_bias": True},
        pytest.param({"activation": "relu2", "num_chunks": 2}, id="relu2 in chunks"),
    ],
    ids=str,
)
def test_the_same_layer_as_with_grouped_matmuls(changes):
    """Gradients are those of the grouped matmuls. The kernel adds up slabs of 128 of the 144 products of a sum."""
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 144)), jnp.float32)
    plain = replaced(kernel=xm.KernelConfig(), **changes)
    variables = linen.MoE(plain, mesh=mesh).init(jax.random.key(0), x)
    keys = iter(jax.random.split(jax.random.key(1), 20))
    variables = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape), variables)  # biases too

    def run(config):
        def loss(variables, x):
            y, _ = linen.MoE(config, mesh=mesh).apply(variables, x)
            return jnp.sum(jnp.square(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, x)

    with interpreter.quick():
        (_, y), gradients = run(replaced(**changes))
        assert "xen_moe_decode_experts" in str(
            jax.make_jaxpr(lambda v, x: linen.MoE(replaced(**changes), mesh=mesh).apply(v, x)[0])(variables, x)
        )
    (_, expected), expected_gradients = run(plain)

    def assert_close(value, wanted):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()

    assert_close(y, expected)
    jax.tree.map(assert_close, gradients, expected_gradients)


def test_experts_that_are_given_keep_grouped_matmuls():
    """A token may name one expert twice then, and rows past the capacity are dropped, the same on every platform."""
    x = jnp.zeros((8, 144))
    layer = linen.MoE(CONFIG, mesh=jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2]))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    for given, taken in (({}, True), ({"topk_idx": jnp.zeros((8, 2), jnp.int32)}, False)):
        program = str(jax.make_jaxpr(lambda v, x, given=given: layer.apply(v, x, **given)[0])(variables, x))
        assert ("xen_moe_decode_experts" in program) == taken
