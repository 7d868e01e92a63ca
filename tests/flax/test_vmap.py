"""`vmap`, `lax.map(batch_size=)`, `jacfwd`, `jacrev` and `hessian` of the Flax layer, beside a loop of calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.layers import CONFIG, layer, make_mesh, tokens
from xen_moe_jax.flax.linen import MoE as LinenMoE

BATCH = 3
SMALL = dataclasses.replace(CONFIG, intermediate_size=8, num_experts=4, balancing="none")
CONFIGS = {
    "whole": SMALL,
    "chunks": dataclasses.replace(SMALL, num_chunks=2, remat="experts"),
    "padded": dataclasses.replace(SMALL, layout="padded", wire="int8"),
}


def on(kind):
    """Two ranks, on a mesh whose axes are of this kind."""
    return jax.set_mesh(make_mesh((2,), ("ep",), jax.sharding.AxisType[kind]))


def function_of(config):
    """`(state, x) -> y` of a layer, and its state."""
    graph, state = nnx.split(layer(config))
    return (lambda state, x: nnx.merge(graph, state)(x)[0]), state


@pytest.fixture
def auto():
    with on("Auto"):
        yield


@pytest.mark.parametrize(("kind", "name"), [("Explicit", "whole"), *(("Auto", name) for name in CONFIGS)])
def test_vmap_is_a_loop(kind, name):
    with on(kind):
        check_loop(*function_of(CONFIGS[name]))


def check_loop(f, state):
    xs = tokens(BATCH, 4, 2)
    one = jax.jit(f)
    expected = np.stack([one(state, x) for x in xs])
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(jax.jit(jax.vmap(f, (None, 0)))(state, xs), expected, rtol=1e-6, atol=1e-6)
    pieces = jax.jit(lambda state, xs: jax.lax.map(lambda x: f(state, x), xs, batch_size=2))
    np.testing.assert_allclose(pieces(state, xs), expected, rtol=1e-6, atol=1e-6)


def test_the_front_ends(auto):
    """`nnx.vmap` over the tokens, and over stacked layers with tokens of their own; `vmap` of Linen's `apply`."""
    layers, xs = [layer(SMALL, seed) for seed in range(BATCH)], tokens(BATCH, 4, 2)
    call = nnx.jit(lambda moe, x: moe(x)[0], graph_updates=False)
    expected = np.stack([call(layers[0], x) for x in xs])
    mapped = nnx.jit(nnx.vmap(lambda moe, x: moe(x)[0], in_axes=(None, 0)))
    np.testing.assert_allclose(mapped(layers[0], xs), expected, rtol=1e-6, atol=1e-6)

    weights = {name: getattr(layers[0], name)[...] for name in layers[0].weight_names}
    apply = jax.jit(jax.vmap(lambda x: LinenMoE(SMALL).apply({"params": weights}, x)[0]))
    np.testing.assert_allclose(apply(xs), expected, rtol=1e-6, atol=1e-6)

    graph = nnx.graphdef(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(moe) for moe in layers))
    expected = np.stack([call(moe, x) for moe, x in zip(layers, xs, strict=True)])
    each = jax.jit(jax.vmap(lambda state, x: nnx.merge(graph, state)(x)[0]))
    np.testing.assert_allclose(each(stacked, xs), expected, rtol=1e-6, atol=1e-6)


def loop(f, a, basis):
    """`jvp`s of `f` at `a` along the entries of `basis`, one after the other; derivatives come last."""
    return jnp.moveaxis(jax.lax.map(lambda e: jax.jvp(f, (a,), (e,))[1], basis), 0, -1)


@pytest.mark.parametrize("transform", ["jacfwd", "jacrev", "hessian"])
@pytest.mark.parametrize("what", ["tokens", "weights"])
def test_derivatives_are_a_loop(auto, transform, what):
    """In the tokens, and in the weights of a projection of the experts."""
    f, state = function_of(SMALL)
    x = tokens(2, 1)

    def of_weights(scales):  # four numbers instead of all the weights
        moved = jax.tree.map(lambda a: a, state)
        moved["up"][...] = state["up"][...] * scales[:, None, None]
        moved["down"][...] = state["down"][...] + 0.1 * jnp.sin(scales)[:, None, None]
        return f(moved, x).ravel()

    g, a = {"tokens": (lambda a: f(state, a.reshape(x.shape)).ravel(), x.ravel()), "weights": (of_weights, np.ones(4))}[
        what
    ]
    a = jnp.asarray(a, jnp.float32)
    loss = lambda a: jnp.sum(jnp.sin(3 * g(a)))  # noqa: E731
    differentiated, by_loop = (loss, jax.grad(loss)) if transform == "hessian" else (g, g)
    program = getattr(jax, transform)(differentiated)
    found, expected = jax.jit(lambda a: (program(a), loop(by_loop, a, jnp.eye(a.size))))(a)
    scale = np.abs(expected).max()
    assert scale > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)
