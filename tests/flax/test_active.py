"""Layers whose ranks come and go: against a dense evaluation in which the experts of inactive ranks give zero."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.dense_moe import dense_moe
from tests.support.layers import CONFIG, H, layer, make_mesh, tokens, weights_of
from xen_moe_jax.flax.linen import MoE as LinenMoE
from xen_moe_jax.flax.linen import variables_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SUBSETS = [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 0, 0)]


def expected(config, weights, x, active):
    """Tokens of dimension 0 are split over (dp, ep): entry `i` belongs to rank `i % 4` of its group."""
    active = np.array(active, bool)
    per_rank = config.num_experts // 4
    down = weights["down"] * np.repeat(active, per_rank)[:, None, None]
    return dense_moe(config, weights | {"down": down}, x) * np.tile(active, 2)[:, None, None]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, layout="padded"),
        dataclasses.replace(CONFIG, num_chunks=3, remat="experts"),
    ],
    ids=["grouped", "padded", "chunks and remat"],
)
def test_one_program_serves_every_subset(config, kind):
    mesh = make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType[kind])
    with jax.set_mesh(mesh):
        moe = layer(config)
    x, weights = tokens(8, 5), weights_of(moe)
    graph, state = nnx.split(moe)

    chex.clear_trace_counter()  # it counts by the source of the function, over all cases

    @chex.assert_max_traces(n=1)
    def loss(state, x, active):
        y, metrics = nnx.merge(graph, state)(x, active=active)
        return (y**2).sum(), (y, metrics.num_dropped)

    program = jax.jit(jax.grad(loss, argnums=1, has_aux=True))
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
        for active in SUBSETS:
            dx, (y, dropped) = program(state, placed, np.array(active, bool))
            np.testing.assert_allclose(y, expected(config, weights, x, active), **CLOSE)
            out = ~np.tile(np.array(active, bool), 2)
            assert not np.asarray(dx)[out].any()
            assert dropped == (0 if all(active) else dropped) and (all(active) or dropped > 0)


def test_linen_takes_it_too():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    with jax.set_mesh(mesh):
        weights = weights_of(layer(CONFIG))
        x = tokens(8, 5)
        moe = LinenMoE(CONFIG)
        program = jax.jit(lambda weights, x, active: moe.apply(variables_of(weights), x, active=active)[0])
        for active in SUBSETS:
            y = program(weights, x, np.array(active, bool))
            np.testing.assert_allclose(y, expected(CONFIG, weights, x, active), **CLOSE)


def test_on_one_device_there_is_one_rank():
    moe, x = layer(CONFIG), tokens(3)
    y, _ = moe(x, active=np.array([True]))
    np.testing.assert_allclose(y, moe(x)[0], **CLOSE)
    assert not np.asarray(moe(x, active=np.array([False]))[0]).any()
    with pytest.raises(ValueError, match=r"active has shape \(2,\): must be \(1,\)"):
        moe(x, active=np.array([True, False]))


def test_replicated_tokens_refuse_it():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    with jax.set_mesh(mesh):
        moe = layer(dataclasses.replace(CONFIG, token_axes=()))
        with pytest.raises(ValueError, match="waits for every rank; split the tokens"):
            moe(np.ones((4, H), np.float32), active=np.ones(4, bool))
