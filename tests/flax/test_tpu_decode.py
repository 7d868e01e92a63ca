"""Which layers take the decode kernels on TPU, and that they compute the same as grouped matmuls do."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax layers: pip install 'xen-moe-jax[flax]'")

import flax.linen as nn

import xen_moe_jax as xm
from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax.experts import tpu_decode, tpu_decode_layer
from xen_moe_jax.flax import MoEConfig, linen

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
        pytest.param({"token_axes": ()}, id="replicated tokens"),
    ],
    ids=str,
)
def test_the_same_layer_as_with_grouped_matmuls(changes):
    """Gradients are those of the grouped matmuls. The kernel adds up slabs of 128 of the 144 products of a sum."""
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 144)), jnp.float32)
    plain = replaced(kernel=xm.KernelConfig(), **changes)
    variables = jax.jit(linen.MoE(plain, mesh=mesh).init)(jax.random.key(0), x)
    keys = iter(jax.random.split(jax.random.key(1), 20))
    variables = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape), variables)  # biases too

    def run(config):
        def loss(variables, x):
            y, _ = linen.MoE(config, mesh=mesh).apply(variables, x)
            return jnp.sum(jnp.square(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, x)

    with interpreter.of_layers_alone():
        (_, y), gradients = run(replaced(**changes))
        # a layer in chunks is not one kernel
        kernel = "xen_moe_decode_experts" if "num_chunks" in changes else "xen_moe_decode_layer"
        assert kernel in str(
            jax.make_jaxpr(lambda v, x: linen.MoE(replaced(**changes), mesh=mesh).apply(v, x)[0])(variables, x)
        )
    (_, expected), expected_gradients = run(plain)

    def assert_close(value, wanted):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()

    assert_close(y, expected)
    jax.tree.map(assert_close, gradients, expected_gradients)


def test_bits_are_those_of_dispatch_experts_and_combine(monkeypatch):
    """Sums of the experts are exact here, in whichever order; router weights are any number."""
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    config = replaced(activation="relu2", top_k=3, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.integers(-2, 3, (4, 6, 144)), jnp.bfloat16)
    variables = nn.unbox(jax.eval_shape(linen.MoE(config, mesh=mesh).init, jax.random.key(0), x))

    def whole(path, leaf):
        values = rng.standard_normal(leaf.shape) if "router" in str(path) else rng.integers(-2, 3, leaf.shape) / 64
        return jnp.asarray(values, leaf.dtype)

    variables = jax.tree_util.tree_map_with_path(whole, variables)

    def run():
        return jax.jit(lambda variables, x: linen.MoE(config, mesh=mesh).apply(variables, x)[0])

    with interpreter.of_layers_alone():
        together = run().lower(variables, x)
        assert "decode_layer" in str(jax.make_jaxpr(run())(variables, x))
        y = together.compile()(variables, x)
        monkeypatch.setattr(tpu_decode_layer, "takes_layer", lambda *_: False)
        jax.clear_caches()  # of what was traced with the kernel
        assert "decode_layer" not in str(jax.make_jaxpr(run())(variables, x))
        expected = run()(variables, x)
    assert_bits(np.asarray(y.astype(jnp.float32)), np.asarray(expected.astype(jnp.float32)), "one kernel")
    assert np.abs(np.asarray(y, np.float32)).max() > 0.01, "the case tests nothing"


def test_experts_that_are_given_keep_grouped_matmuls():
    """A token may name one expert twice then, and rows past the capacity are dropped, the same on every platform."""
    x = jnp.zeros((8, 144))
    layer = linen.MoE(CONFIG, mesh=jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2]))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    for given, taken in (({}, True), ({"topk_idx": jnp.zeros((8, 2), jnp.int32)}, False)):
        program = str(jax.make_jaxpr(lambda v, x, given=given: layer.apply(v, x, **given)[0])(variables, x))
        assert ("xen_moe_decode_layer" in program) == taken


def quantized(shape, key, block):
    """Random fp8 weights with scales of blocks or channels, which are powers of two: widened, they are exact."""
    local, rows, columns = shape
    a, b = block or (rows, 1)
    of_values, of_scales = jax.random.split(key)
    values = jax.random.normal(of_values, shape).astype(jnp.float8_e4m3fn)
    exponents = jax.random.randint(of_scales, (local, -(-rows // a), -(-columns // b)), -6, -3)
    return xm.QuantizedWeight(values, jnp.exp2(exponents.astype(jnp.float32)), (a, b))


@pytest.mark.parametrize("block", [(128, 128), None], ids=["blocks", "channels"])
def test_weights_of_one_byte_are_read_as_they_are(block):
    """The layer, and its gradient by the tokens, are those of grouped matmuls with widened weights."""
    changes = {"hidden_size": 256, "intermediate_size": 160, "num_experts": 8}
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 256)), jnp.float32)
    plain = replaced(kernel=xm.KernelConfig(), **changes)
    params = nn.unbox(jax.jit(linen.MoE(plain, mesh=mesh).init)(jax.random.key(0), x))["params"]
    kept = {n: quantized(params[n].shape, jax.random.key(i), block) for i, n in enumerate(("gate", "up", "down"))}
    weights = {"router": params["router"]} | kept
    widened = {n: w.widen(jnp.float32) if n in kept else w for n, w in weights.items()}

    def run(config, weights):
        def loss(x, weights):
            y, _ = linen.MoE(config, mesh=mesh).apply(linen.variables_of(weights), x)
            return jnp.sum(jnp.square(y)), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True)), (x, weights)

    function, given = run(replaced(**changes), weights)
    program = str(jax.make_jaxpr(lambda *given: function(*given))(*given))
    assert "xen_moe_decode_layer" in program and "blocks=((" in program
    with interpreter.of_layers_alone():
        (_, y), by_x = function(*given)
    by_grouped_matmuls, given = run(plain, widened)
    (_, expected), expected_by_x = by_grouped_matmuls(*given)
    for value, wanted in ((y, expected), (by_x, expected_by_x)):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()
    with pytest.raises(TypeError, match="a gradient by a quantized weight"):
        jax.eval_shape(jax.grad(lambda weights: jnp.sum(function(x, weights)[0][0])), weights)


def test_weights_that_are_widened_instead():
    """MXFP4 and small blocks are the grouped matmuls' business; a layer that asks for low latency says so."""
    config = low_latency(hidden_size=256, intermediate_size=128, num_experts=2)
    experts = tpu_decode.adapted(config, 8).experts
    rows, received = jnp.zeros((64, 256), jnp.bfloat16), jnp.zeros((1, 2), jnp.int32)
    shapes = {"gate": (2, 256, 128), "up": (2, 256, 128), "down": (2, 128, 256)}
    key = jax.random.key(0)
    small = {n: quantized(shape, key, (64, 128)) for n, shape in shapes.items()}
    with pytest.warns(
        UserWarning, match=r"gate is float8_e4m3fn\[2, 256, 128\] .*\(64, 128\), and is widened: the kernel"
    ):
        assert experts(rows, received, small).shape == rows.shape
    mixed = {n: quantized(shape, key, (128, 128)) for n, shape in shapes.items()}
    mixed["down"] = mixed["down"].widen(jnp.bfloat16)
    with pytest.warns(UserWarning, match="quantized in several ways, or some are not"):
        assert experts(rows, received, mixed).shape == rows.shape


def test_rows_of_a_product():
    assert [tpu_decode.rows_of_product(mean) for mean in (0, 9, 10, 22, 23, 36, 37)] == [16, 16, 32, 32, 48, 48, 64]
