"""Layers whose experts multiply in fp8: near the layer in float32, the same in both front ends, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import flax.linen as nn

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from tests.support.layers import make_mesh
from xen_moe_jax.experts.float8 import quantize_weights
from xen_moe_jax.flax import MoEConfig, linen, nnx

CONFIG = MoEConfig(
    hidden_size=160, intermediate_size=96, num_experts=6, top_k=2, num_shared_experts=1, expert_dtype="float8_e4m3fn"
)
PLAIN = dataclasses.replace(CONFIG, expert_dtype=None, grouped_matmul="auto")


def test_a_layer_and_its_gradients():
    mesh = make_mesh((4,), ("ep",))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 40, 160)), jnp.float32)
    params = nn.unbox(jax.jit(linen.MoE(CONFIG, mesh=mesh).init)(jax.random.key(0), x))["params"]

    def run(config, params, x, codes=None):
        def loss(params, x):
            y, _ = linen.MoE(config, mesh=mesh).apply({"params": params}, x, quantized=codes)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    gradients, y = run(CONFIG, params, x)
    exact_gradients, exact = run(PLAIN, params, x)
    ours, others = (jax.tree.leaves_with_path(t) for t in ((gradients, y), (exact_gradients, exact)))
    for (path, one), (_, other) in zip(ours, others, strict=True):
        one, other = (np.asarray(a, np.float64).ravel() for a in (one, other))
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > 0.995, f"{jax.tree_util.keystr(path)}: {cosine}"
    assert not np.array_equal(y, exact)

    in_linen = jax.jit(lambda p: linen.MoE(CONFIG, mesh=mesh).apply({"params": p}, method="quantized_weights"))
    in_nnx = jax.jit(lambda p: nnx.MoE.from_weights(CONFIG, p, mesh=mesh).quantized_weights())
    codes = in_linen(params)
    for one, other in zip(jax.tree.leaves(in_nnx(params)), jax.tree.leaves(codes), strict=True):
        assert_bits(one, other, "codes")
    for one, other in zip(jax.tree.leaves(run(CONFIG, params, x, codes)), jax.tree.leaves((gradients, y)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="quantized weights with MoEConfig.expert_dtype=None: set 'float8_e4m3fn'"):
        run(PLAIN, params, x, codes)

    values = {n: xm.QuantizedWeight(*jax.jit(quantize_weights)(params[n]), (128, 128)) for n in ("gate", "up", "down")}
    as_they_are, quantized_here = (
        jax.jit(lambda layer, x: layer(x)[0])(nnx.MoE.from_weights(CONFIG, weights, mesh=mesh), x)
        for weights in (params | values, params)
    )
    assert_bits(as_they_are, quantized_here, "weights as they are")
    np.testing.assert_allclose(quantized_here, y, rtol=1e-4, atol=1e-5)  # XLA fuses another program otherwise


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_dtype": "int8"}, r"MoEConfig.expert_dtype='int8': must be None or 'float8_e4m3fn'"),
        ({"layout": "padded"}, r"expert_dtype='float8_e4m3fn' with layout='padded': .*use 'grouped'"),
        ({"grouped_matmul": "tokamax"}, r"with grouped_matmul='tokamax': it has a matmul of its own; use 'auto'"),
        ({"experts": lambda rows, sizes, weights: rows}, r"with experts=<function.*use None"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
    assert hash(dataclasses.replace(CONFIG, top_k=1)) != hash(CONFIG)
