"""Without `jax.set_mesh`: the layer runs over the mesh that its inputs' types name, under `jit` too."""

import contextlib
import warnings

import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.dense_moe import dense_moe
from tests.support.layers import CONFIG, layer, make_mesh, tokens, weights_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@contextlib.contextmanager
def legacy(mesh):
    """`with mesh:`, which JAX has deprecated and people still write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def jitted(moe, x, mesh):
    return nnx.jit(lambda moe, x: moe(x)[0])(moe, x)


def inside_with_mesh(moe, x, mesh):
    with legacy(mesh):
        return jitted(moe, x, mesh)


def eager(moe, x, mesh):
    return moe(x)[0]


def gradient_too(moe, x, mesh):
    def loss(moe, x):
        y, _ = moe(x)
        return (y**2).sum(), y

    gradient, y = nnx.jit(nnx.grad(loss, argnums=1, has_aux=True))(moe, x)
    assert np.abs(np.asarray(gradient)).max() > 1e-3
    return y


def only_the_weights_are_sharded(moe, x, mesh):
    graph, state = nnx.split(moe)
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])(state, np.asarray(x))


@pytest.mark.parametrize(
    "call, kind",
    [
        (jitted, "Auto"),
        (jitted, "Explicit"),
        (inside_with_mesh, "Auto"),
        (inside_with_mesh, "Explicit"),
        (eager, "Explicit"),
        (gradient_too, "Explicit"),
        (only_the_weights_are_sharded, "Auto"),
    ],
)
def test_mesh_from_the_types(call, kind):
    mesh = make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType[kind])
    moe = layer(CONFIG)
    x = jax.device_put(tokens(8, 4), jax.NamedSharding(mesh, jax.P("dp")))
    expected = dense_moe(CONFIG, weights_of(moe), np.asarray(x))
    y = call(moe, x, mesh)
    assert len(y.sharding.device_set) == 8
    if kind == "Explicit":
        assert jax.typeof(y).sharding.spec == jax.P("dp", None, None)
    np.testing.assert_allclose(y, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_without_the_expert_axis_is_named(kind):
    mesh = make_mesh((4,), ("data",), jax.sharding.AxisType[kind])
    x = jax.device_put(tokens(8), jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match=r"axis_name='ep': the mesh has axes \('data',\).*add the axis"):
        jitted(layer(CONFIG), x, mesh)
