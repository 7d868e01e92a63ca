"""Router weights in front of the last matmul, and the experts as a Hopper GPU computes them: outputs and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import xen_moe_jax as xm
from tests.support import plain_hopper
from tests.support.layers import (
    CONFIG,
    GPT_OSS,
    assert_same_gradients,
    biased,
    layer,
    make_mesh,
    run_with_gradients,
    tokens,
)
from xen_moe_jax.experts import combined
from xen_moe_jax.flax import MoEConfig, _chunks

PLAIN = dataclasses.replace(CONFIG, balancing="none")
CASES = {
    "swiglu": dataclasses.replace(PLAIN, capacity_factor=0.6),
    "relu2, padded": dataclasses.replace(PLAIN, activation="relu2", layout="padded"),
    "biases, aligned": dataclasses.replace(GPT_OSS, alignment=8),
    "biases, padded": dataclasses.replace(GPT_OSS, layout="padded"),
    "tokens on every rank": dataclasses.replace(GPT_OSS, token_axes=(), alignment=4),
    "overlapping chunks": dataclasses.replace(PLAIN, num_chunks=2, remat="experts"),
}
ON_HOPPER = {
    "swiglu": CASES["swiglu"],
    "biases": GPT_OSS,
    "chunks in a loop": dataclasses.replace(PLAIN, num_chunks=2, remat="all"),
}


def result(config, where="rows"):
    mesh, x, target = make_mesh((2,), ("ep",)), tokens(8, 3), tokens(8, 3, seed=9)
    return run_with_gradients(biased(layer(dataclasses.replace(config, apply_weights_to=where))), x, target, mesh)


def assert_equal(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1].num_dropped, expected[1].num_dropped)
    assert_same_gradients(got[2], expected[2])


@pytest.mark.parametrize("name", CASES)
def test_the_same_layer(name):
    assert_equal(result(CASES[name], "activation"), result(CASES[name]))


@pytest.mark.parametrize("name", ON_HOPPER)
def test_on_hopper(name, monkeypatch):
    """Two projections at once, and a combine whose gradient leaves unused rows as they are: here they are NaN."""
    expected = result(ON_HOPPER[name])
    on_input = result(ON_HOPPER[name], "input")
    monkeypatch.setattr(_chunks, "OVERLAPPING", ())
    with plain_hopper.in_the_kernels_place():
        for where in ("rows", "activation"):
            assert_equal(result(ON_HOPPER[name], where), expected)
        assert_equal(result(ON_HOPPER[name], "input"), on_input)


def test_replicated_tokens_on_hopper():
    """No gradient of rows past the last group, here NaN, reaches a token."""
    config = dataclasses.replace(PLAIN, token_axes=())
    for where in ("rows", "input"):
        expected = result(config, where)
        with plain_hopper.in_the_kernels_place():
            assert_equal(result(config, where), expected)


def test_no_rows_of_experts_are_kept():
    """The backward pass keeps no array of the experts' outputs: there are fewer arrays `[rows, hidden]`."""
    from xen_moe_jax.flax import memory

    def kept(where):
        config = MoEConfig(hidden_size=64, intermediate_size=48, num_experts=8, top_k=2, apply_weights_to=where)
        buffers = memory.kept_buffers(config, 16, 2)
        return sum(b.count for b in buffers if b.shape == (memory.chunk_rows(config, 16, 2), 64))

    assert kept("activation") == kept("rows") - 1


def test_the_gradient_of_the_unweighted_combine():
    """On used rows that of `xm.combine`, bit for bit."""
    mesh = make_mesh((2,), ("ep",))
    x, cotangent = (jnp.asarray(tokens(16, seed=seed)) for seed in (1, 2))
    idx = jax.random.randint(jax.random.key(3), (16, 2), 0, 8)

    def on_rank(x, idx, cotangent):
        options = {"num_experts": 8, "axis_name": "ep", "capacity": 13}
        routed = xm.dispatch(x, idx, jnp.ones(idx.shape), **options)
        used = (jnp.arange(13) < routed.group_sizes.sum())[:, None]
        results, back = [], combined.Return()
        for combine in (functools.partial(back, weighted=False), functools.partial(combined._plain_combine, back)):
            out, pull = jax.vjp(lambda y, combine=combine: combine(y, routed.handle), routed.x)
            results.append((out, jnp.where(used, pull(cotangent)[0], 0)))
        return results

    spec = jax.P("ep")
    plain, own = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))(x, idx, cotangent)
    for one, other in zip(plain, own, strict=True):
        assert np.asarray(one).any()
        np.testing.assert_array_equal(one, other)
