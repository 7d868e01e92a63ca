"""Inactive ranks on the plain-JAX backend: every subset of four, arguments, transformations, gradients, layers."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.members import CASES, Members, subsets

CONFIG = xm.KernelConfig(backend="reference", chunk_tokens=3)
T, H, K, E = 5, 16, 3, 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_subset_of_four_ranks(case):
    """One trace serves all sixteen subsets; the number of dropped rows is the number of missing ones."""
    members = Members(case, CONFIG, num_tokens=4, hidden=128)
    for active in subsets(4):
        members.check(active)
    assert members.traces == 1


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))


def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    return (
        rng.standard_normal((4 * T, H)).astype(np.float32),
        rng.integers(0, E, (4 * T, K)).astype(np.int32),
        rng.random((4 * T, K)).astype(np.float32),
    )


def layer(x, idx, weights, active=None, *, layout="grouped", start_done=False):
    """The experts square, so that the result tells two rows of a group apart."""
    options = {"num_experts": E, "axis_name": "ep", "layout": layout, "active": active}
    if start_done:
        routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, **options))
    else:
        routed = xm.dispatch(x, idx, weights, **options)
    y = routed.x**2
    if layout == "ranked":
        y = y * jnp.sum(routed.topk_weights, axis=-1, keepdims=True)
    return xm.combine(y, routed.handle)


def masked(idx: np.ndarray, active: np.ndarray) -> np.ndarray:
    """The meaning of `active`, written out."""
    source = np.repeat(np.arange(4), T)[:, None]
    return np.where(active[idx // (E // 4)] & active[source], idx, -1)


@pytest.mark.parametrize(
    ("layout", "start_done"),
    [
        pytest.param("grouped", False, id="grouped-whole"),
        pytest.param("ranked", False, id="ranked-whole"),
        pytest.param("padded", False, id="padded-whole"),
        pytest.param("grouped", True, id="grouped-start-done"),
        pytest.param("ranked", True, id="ranked-start-done", marks=pytest.mark.slow),
        pytest.param("padded", True, id="padded-start-done", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_a_routing_without_these_ranks(mesh, layout, start_done):
    """Gradients of tokens and of router weights, first and second order, under remat and scan; nothing is traced
    again."""
    chex.clear_trace_counter()  # it counts by the source of the function, over all cases

    @chex.assert_max_traces(n=2)  # with a mask and without
    def loss(x, weights, idx, active):
        def body(x, idx, weights, active):
            def step(x, _):
                return jax.checkpoint(lambda x: layer(x, idx, weights, active, layout=layout, start_done=start_done))(
                    x
                ), None

            out, _ = jax.lax.scan(step, x, length=2)
            return jax.lax.psum(jnp.sum(jnp.sin(out)), "ep")

        specs = (P("ep"), P("ep"), P("ep"), P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())(x, idx, weights, active)

    x, idx, weights = operands()
    program = jax.jit(jax.grad(loss, argnums=(0, 1)))
    plain = jax.jit(jax.grad(lambda x, w, i: loss(x, w, i, None), argnums=(0, 1)))
    plain(x, weights, idx)
    program(x, weights, idx, np.ones(4, bool))
    for active in subsets(4)[::3]:
        got = program(x, weights, idx, active)
        want = plain(x, weights, masked(idx, active).astype(np.int32))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)
        for g in got:
            assert not np.asarray(g).reshape(4, T, -1)[~active].any()


def over(mesh, body):
    return jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3, out_specs=P("ep"), check_vma=False)


@pytest.mark.parametrize(
    ("active", "error", "message"),
    [
        (np.ones(4, np.int32), TypeError, "active has dtype int32: must be bool"),
        (np.ones(3, bool), ValueError, r"active has shape \(3,\): must be \(4,\)"),
        (np.ones((4, 1), bool), ValueError, r"active has shape \(4, 1\)"),
        ("all", TypeError, "active is a str: must be an array"),
    ],
)
def test_wrong_masks_are_refused_by_every_operation(mesh, active, error, message):
    calls = {
        "dispatch": lambda x, i, w: xm.dispatch(x, i, w, num_experts=E, axis_name="ep", active=active).num_dropped,
        "dispatch_start": lambda x, i, w: xm.dispatch_start(x, i, w, num_experts=E, axis_name="ep", active=active),
        "combine": lambda x, i, w: xm.combine(*rows_and_handle(x, i, w), active=active),
        "combine_start": lambda x, i, w: xm.combine_start(*rows_and_handle(x, i, w), active=active),
        "redispatch": lambda x, i, w: xm.redispatch(x, rows_and_handle(x, i, w)[1], active=active),
    }
    for name, call in calls.items():
        with pytest.raises(error, match=f"{name}: {message}"):
            jax.eval_shape(over(mesh, call), *operands())


def rows_and_handle(x, idx, weights):
    routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name="ep")
    return routed.x, routed.handle


@pytest.mark.parametrize("loop", [jax.lax.map, lambda f, masks: jax.vmap(f)(masks)], ids=["map", "vmap"])
def test_a_loop_over_masks_is_one_dispatch(mesh, loop):
    def body(x, idx, weights):
        return loop(lambda m: layer(x, idx, weights, m), jnp.array(subsets(4)))[:, None]

    out = jax.jit(over(mesh, body))(*operands())
    x, idx, weights = operands()
    plain = jax.jit(over(mesh, layer))
    for i, active in enumerate(subsets(4)):
        want = plain(x, masked(idx, active).astype(np.int32), weights)
        np.testing.assert_array_equal(np.asarray(out).reshape(4, 16, T, H)[:, i].reshape(4 * T, H), want)


def test_without_a_mask_nothing_is_added(mesh):
    """A program without `active` is shorter, and its handle has no further leaf."""
    routed = jax.eval_shape(over(mesh, lambda *a: rows_and_handle(*a)[1]), *operands())
    assert routed.active is None and len(jax.tree.leaves(routed)) == 4

    def length(active):
        return jax.jit(over(mesh, lambda *a: layer(*a, active))).lower(*operands()).as_text().count("\n")

    assert length(None) < length(np.ones(4, bool))
