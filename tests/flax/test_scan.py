"""Layers in a loop: `nn.scan` and `nnx.vmap` add a dimension to each parameter and its name to the sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import flax.linen as nn
from flax import nnx

from tests.support.dense_moe import dense_moe
from tests.support.layers import CONFIG, GPT_OSS, layer, make_mesh, tokens, weights_of
from xen_moe_jax.flax.linen import MoE as LinenMoE
from xen_moe_jax.flax.linen import variables_of
from xen_moe_jax.flax.nnx import MoE

LAYERS = 3
CONFIGS = {
    "bias": dataclasses.replace(CONFIG, balancing="bias", score="sigmoid", bias_update_rate=0.01),
    "gpt-oss, tensor axis": dataclasses.replace(GPT_OSS, tensor_axis="tp"),
}


def dense_stack(config, stacked, x):
    for i in range(LAYERS):
        x = x + dense_moe(config, jax.tree.map(lambda w, i=i: w[i], stacked), x)
    return x


class Block(nn.Module):
    config: object

    @nn.compact
    def __call__(self, x, _):
        y, metrics = LinenMoE(self.config)(x)
        return x + y, metrics


@pytest.mark.parametrize(
    "name, kind", [("bias", "Auto"), ("gpt-oss, tensor axis", "Auto"), ("gpt-oss, tensor axis", "Explicit")]
)
def test_linen_scan(name, kind):
    config = CONFIGS[name]
    # On explicit axes Flax asserts the stacked sharding, and jax.lax.scan stacks along no mesh axis.
    layers = "layers" if kind == "Auto" else None
    stack = nn.scan(
        Block,
        variable_axes={"params": 0, "router_state": 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: layers},
    )(config)
    x = tokens(8)
    mesh = make_mesh((1, 2, 2), ("layers", "ep", "tp"), jax.sharding.AxisType[kind])
    with jax.set_mesh(mesh):
        boxed = jax.jit(stack.init)(jax.random.key(0), x, None)
        specs = nn.get_partition_spec(boxed)["params"]["MoE_0"]
        inner = "tp" if config.tensor_axis else None
        assert specs["gate"] == jax.P(layers, "ep", None, inner)
        assert specs["down"] == jax.P(layers, "ep", inner, None)
        assert specs["router"] == jax.P(layers, None, None)
        variables = nn.unbox(boxed)
        (y, metrics), moved = jax.jit(lambda v, x: stack.apply(v, x, None, mutable=["router_state"]))(variables, x)
    params = jax.tree.map(np.asarray, variables["params"]["MoE_0"])
    np.testing.assert_allclose(y, dense_stack(config, params, x), rtol=2e-5, atol=2e-5)
    assert metrics.tokens_per_expert.shape == (LAYERS, config.num_experts)
    if config.balancing == "bias":
        bias = moved["router_state"]["MoE_0"]["router_bias"]
        assert bias.shape == (LAYERS, config.num_experts) and np.abs(bias).max(1).min() > 0, "each layer's own moves"


@pytest.mark.parametrize("remat, balance", [("all", None), ("experts", "exact")])
def test_gradients_with_chunks_and_remat(remat, balance):
    """Compares them with those of layers without either. JAX takes the constants of a layer out of the scan, and XLA's
    compiler ended the process on one that had no elements."""
    mesh, x = make_mesh((4,), ("ep",)), tokens(8)
    stacked = {name: jnp.stack([jnp.asarray(w)] * 2) for name, w in weights_of(layer(CONFIG)).items()}

    def loss(config, stacked):
        def step(x, weights):
            return x + LinenMoE(config).apply(variables_of(weights), x)[0], None

        return jnp.sum(jax.lax.scan(step, x, stacked)[0] ** 2)

    with jax.set_mesh(mesh):
        chunked = dataclasses.replace(CONFIG, num_chunks=2, remat=remat, balance=balance)
        got, expected = (jax.jit(jax.grad(loss, 1), static_argnums=0)(c, stacked) for c in (chunked, CONFIG))
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-4, atol=1e-4 * np.abs(gradient).max(), err_msg=name)


def test_nnx_vmap_and_scan():
    config = dataclasses.replace(CONFIG, balancing="none")
    mesh, x = make_mesh((1, 4), ("layers", "ep")), tokens(8)
    with jax.set_mesh(mesh):

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def build(rngs):
            return MoE(config, rngs=rngs)

        moe = build(nnx.Rngs(0))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(moe)))
        assert specs["gate"] == jax.P("layers", "ep", None, None) and specs["router"] == jax.P("layers", None, None)

        @nnx.jit
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(moe, x):
            return x + moe(x)[0]

        y = stack(moe, jnp.asarray(x))
    stacked = {name: np.asarray(getattr(moe, name)[...]) for name in moe.weight_names}
    np.testing.assert_allclose(y, dense_stack(config, stacked, x), rtol=2e-5, atol=2e-5)
