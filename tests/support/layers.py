"""What the Flax tests share: a small config, a layer's weights as a dictionary, meshes."""

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


def layer(config, seed=0, mesh=None):
    """An NNX layer; a router bias gets values that change the choice of experts."""
    moe = MoE(config, rngs=nnx.Rngs(seed), mesh=mesh)
    if config.balancing == "bias":
        moe.router_bias[...] = 0.2 * jax.random.normal(jax.random.key(seed + 1), (config.num_experts,))
    return moe


def weights_of(moe):
    """The layer's arrays by name, on the host."""
    names = moe.weight_names + (("router_bias",) if moe.config.balancing == "bias" else ())
    return {name: np.asarray(getattr(moe, name)[...]) for name in names}


def tokens(*shape, seed=2):
    return np.asarray(jax.random.normal(jax.random.key(seed), (*shape, H)))


def run(moe, x, mesh=None, **kwargs):
    """Output and metrics as NumPy, under jit, with `mesh` current if there is one."""
    graph, state = nnx.split(moe)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x, **kwargs))
    if mesh is None:
        return jax.tree.map(np.asarray, call(state, x))
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        return jax.tree.map(np.asarray, call(state, jax.device_put(x, jax.NamedSharding(mesh, jax.P()))))
