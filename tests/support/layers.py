"""Code that the Flax tests share: a small config, a layer's weights as a dictionary, meshes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.nnx import MoE

H = 16
CONFIG = MoEConfig(hidden_size=H, intermediate_size=24, num_experts=8, top_k=2)
DEEPSEEK = dataclasses.replace(
    CONFIG,
    score="sigmoid",
    balancing="bias",
    num_groups=4,
    topk_groups=2,
    weight_scale=2.5,
    num_shared_experts=2,
)


def make_mesh(sizes, names, kind=jax.sharding.AxisType.Auto):
    need = int(np.prod(sizes))
    if jax.device_count() < need:
        pytest.skip(f"needs {need} devices, has {jax.device_count()}")
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=jax.devices()[:need])


def _normal(seed, shape):
    """Draws normal numbers by NumPy: JAX would compile a program for each shape."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def layer(config, seed=0, mesh=None):
    """An NNX layer; a router bias gets values that change the choice of experts."""
    moe = MoE(config, rngs=nnx.Rngs(seed), mesh=mesh)
    if config.balancing == "bias":
        moe.router_bias[...] = jax.numpy.asarray(0.2 * _normal(seed + 1, (config.num_experts,)))
    return moe


def weights_of(moe):
    """The layer's arrays by name, on the host."""
    names = moe.weight_names + (("router_bias",) if moe.config.balancing == "bias" else ())
    return {name: np.asarray(getattr(moe, name)[...]) for name in names}


def tokens(*shape, seed=2):
    return _normal(seed, (*shape, H))


def run(moe, x, mesh=None, **kwargs):
    """Runs a layer under jit, with `mesh` current if there is one; returns output and metrics as NumPy arrays."""
    graph, state = nnx.split(moe)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x, **kwargs))
    if mesh is None:
        return jax.tree.map(np.asarray, call(state, x))
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        return jax.tree.map(np.asarray, call(state, jax.device_put(x, jax.NamedSharding(mesh, jax.P()))))


GPT_OSS = dataclasses.replace(
    CONFIG,
    activation="clipped_swiglu",
    activation_limit=0.5,  # small enough to clip here
    expert_bias=True,
    logits_bias=True,
    balancing="none",
)


def biased(moe):
    """The layer with values in the biases that start as zeros."""
    for i, name in enumerate(moe.weight_names):
        if name.endswith("_bias"):
            bias = getattr(moe, name)
            bias[...] = jax.numpy.asarray(0.3 * _normal(100 + i, bias[...].shape))
    return moe


def run_with_gradients(moe, x, target, mesh=None, kept=None, **kwargs):
    """Output, metrics, and gradients of `sum(y * target) + aux_loss` by name ("x" too), in one program.

    `kept`: a list that gets the program, whose memory on GPUs goes with it.
    """
    graph, params, rest = nnx.split(moe, nnx.Param, ...)

    def loss(params, x):
        y, metrics = nnx.merge(graph, params, rest)(x, **kwargs)
        return (y * target).sum() + metrics.aux_loss, (y, metrics)

    call = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    if kept is not None:
        kept.append(call)
    if mesh is None:
        (by_name, x_gradient), (y, metrics) = call(params, x)
    else:
        with jax.set_mesh(mesh):
            params = jax.device_put(params, nnx.get_named_sharding(params, mesh))
            (by_name, x_gradient), (y, metrics) = call(params, jax.device_put(x, jax.NamedSharding(mesh, jax.P())))
    gradients = nnx.to_pure_dict(by_name) | {"x": x_gradient}
    return jax.tree.map(np.asarray, (y, metrics, gradients))


def assert_same_gradients(got, expected, rtol=1e-4, atol=2e-5):
    assert got.keys() >= expected.keys()
    for name, value in expected.items():
        value = np.asarray(value)
        assert np.abs(value).max() > 1e-3, f"the case tests nothing about {name}"
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)
