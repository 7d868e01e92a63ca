"""`vmap`, `lax.map(batch_size=)`, `jacfwd`, `jacrev` and `hessian` of the operations: the bits of a loop of calls.

The loop applies the same function, its `jvp` or its `vjp` to one entry after the other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from xen_moe_jax.backends import reference

# Two programs are compared bit for bit, what the experts do included.
pytestmark = pytest.mark.optimized

RANKS, BATCH, TOKENS, TOP_K, HIDDEN, EXPERTS = 2, 3, 3, 2, 4, 4
REFERENCE = xm.KernelConfig(backend="reference")


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((RANKS,), ("ep",), axis_types=auto, devices=jax.devices()[:RANKS])


@pytest.fixture
def asynchronous(monkeypatch):
    """The plain backend's start and done are two primitives, as on GPUs."""
    monkeypatch.setattr(reference.BACKEND, "supports_async", lambda spec, config: True)


def batch():
    """`x [B, R * T, H]`, `topk_idx` with unused slots, `topk_weights`."""
    rng = np.random.default_rng(0)
    rows = BATCH, RANKS * TOKENS
    x = rng.standard_normal((*rows, HIDDEN), np.float32)
    return x, rng.integers(-1, EXPERTS, (*rows, TOP_K)).astype(np.int32), rng.random((*rows, TOP_K), np.float32)


def moe(x, idx, weights, **options):
    """Returns the combined tokens, the rows of a redispatch, and the number of dropped rows."""
    routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", **options)
    again = xm.redispatch(2 * x, routed.handle)
    rows = jnp.sin(routed.x)
    return xm.combine(rows, routed.handle), xm.combine(again, routed.handle, weighted=False), routed.num_dropped[None]


def ranked(x, idx, weights, **options):
    routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", **options)
    reduced = routed.x * jnp.sum(routed.topk_weights, axis=1, keepdims=True)
    return xm.combine(reduced, routed.handle), routed.num_dropped[None]


def in_halves(x, idx, weights):
    options = {"num_experts": EXPERTS, "axis_name": "ep", "capacity": 5, "config": REFERENCE}
    flight, beside = xm.overlap(xm.dispatch_start(x, idx, weights, **options), jnp.cos, x)
    routed = xm.dispatch_done(flight)
    flight, rows = xm.overlap(xm.combine_start(jnp.sin(routed.x), routed.handle, config=REFERENCE), jnp.cos, beside)
    return xm.combine_done(flight) + rows


def whole(x, idx, weights):
    options = {"num_experts": EXPERTS, "axis_name": "ep", "capacity": 5, "config": REFERENCE}
    routed = xm.dispatch(x, idx, weights, **options)
    return xm.combine(jnp.sin(routed.x), routed.handle, config=REFERENCE) + jnp.cos(jnp.cos(x))


RANK = P("ep")


def over(mesh, body, spec=RANK):
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)


def assert_same(actual, expected, what):
    assert np.asarray(jax.tree.leaves(expected)[0]).any(), f"{what}: the case tests nothing"
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_bits(a, np.asarray(e), what)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("grouped", {"capacity": 5, "alignment": 2}), ("ranked", {"capacity": 4}), ("padded", {"wire": "int8"})],
    ids=["grouped", "ranked", "padded"],
)
def test_vmap_is_a_loop(mesh, layout, options):
    """Inside `shard_map`, around it, and in pieces by `lax.map`, where the last piece is smaller."""
    body = functools.partial(ranked if layout == "ranked" else moe, layout=layout, **options)
    one, operands = over(mesh, body), batch()
    call = jax.jit(one)
    loop = [call(*entry) for entry in zip(*operands, strict=True)]
    expected = jax.tree.map(lambda *entries: np.stack(entries), *loop)
    batched = P(None, "ep")
    ways = {
        "vmap inside shard_map": over(mesh, jax.vmap(body), batched),
        "vmap around shard_map": jax.vmap(one),
        "lax.map": lambda *operands: jax.lax.map(lambda entry: one(*entry), operands, batch_size=2),
    }
    for what, program in ways.items():
        assert_same(jax.jit(program)(*operands), expected, what)


def test_some_operands_are_mapped_along_other_axes(mesh):
    x, idx, weights = batch()
    one = jax.jit(over(mesh, whole))
    expected = np.stack([one(x[0], i, w) for i, w in zip(idx, weights, strict=True)], axis=1)

    def body(x, idx, weights):
        return jax.vmap(whole, in_axes=(None, 2, 0), out_axes=1)(x, idx, weights)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), P("ep"), P(None, "ep")), out_specs=P("ep"))
    assert_same(jax.jit(mapped)(x[0], np.moveaxis(idx, 0, 2), weights), expected, "vmap")


def test_the_mapped_axis_is_sharded_over_another_mesh_axis():
    """`vmap(spmd_axis_name=)`: every column of ranks has entries of its own."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, RANKS), ("dp", "ep"), axis_types=auto, devices=jax.devices()[: 2 * RANKS])
    operands = tuple(np.concatenate([a, a[::-1][:1]]) for a in batch())  # four entries
    x, idx, weights = operands
    one = over(mesh, whole)
    expected = np.stack([jax.jit(one)(*entry) for entry in zip(*operands, strict=True)])
    assert_same(jax.jit(jax.vmap(one, spmd_axis_name="dp"))(*operands), expected, "vmap")
    expected = np.stack([jax.jit(one)(x[0], idx[0], w) for w in weights])
    mapped = jax.jit(jax.vmap(one, in_axes=(None, None, 0), spmd_axis_name="dp"))
    assert_same(mapped(x[0], idx[0], weights), expected, "vmap of the router's weights")


# -- derivatives -------------------------------------------------------------------------------------------------------


def basis(a):
    return jnp.eye(a.size, dtype=a.dtype).reshape(a.size, *a.shape)


def columns(f, a):
    """`jacfwd` by a loop of `jvp`s."""
    return jnp.moveaxis(jax.lax.map(lambda e: jax.jvp(f, (a,), (e,))[1], basis(a)), 0, -1)


def rows(f, a):
    """`jacrev` by a loop of `vjp`s."""
    out, pull = jax.vjp(f, a)
    return jax.lax.map(lambda e: pull(e)[0], basis(out))


TRANSFORMS = {  # transform -> itself and the same by a loop, both of the function of a flat array
    "jacfwd": (jax.jacfwd, columns),
    "jacrev": (jax.jacrev, rows),
    "hessian": (
        lambda f: jax.hessian(lambda a: jnp.sum(jnp.sin(f(a)))),
        lambda f, a: columns(jax.grad(lambda a: jnp.sum(jnp.sin(f(a)))), a),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_jacobians_are_a_loop(mesh, transform):
    """In the tokens and the router's weights together, so that the hessian has their mixed part."""
    x, idx, weights = (a[0] for a in batch())
    body = over(mesh, whole)

    def f(flat):
        return body(flat[: x.size].reshape(x.shape), idx, flat[x.size :].reshape(weights.shape)).ravel()

    ours, by_loop = TRANSFORMS[transform]
    flat = np.concatenate([x.ravel(), weights.ravel()])
    found, expected = jax.jit(lambda a: (ours(f)(a), by_loop(f, a)))(flat)
    expected = expected.reshape(found.shape)
    if transform != "hessian":
        assert_same(found, expected, transform)
    else:  # XLA may contract the multiplications and additions between the calls in one of the two
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(found[: x.size, x.size :]).max() > 1e-3, "the mixed part"


# -- start and done ----------------------------------------------------------------------------------------------------


HALVES = {
    "vmap": lambda f, x, w: jax.vmap(f)(x, w),
    "jacfwd": lambda f, x, w: jax.jacfwd(f, (0, 1))(x[0], w[0]),
    "jacrev": lambda f, x, w: jax.jacrev(f, (0, 1))(x[0], w[0]),
    "gradient of vmap": lambda f, x, w: jax.grad(lambda x, w: jnp.sum(jnp.sin(jax.vmap(f)(x, w))), (0, 1))(x, w),
    "gradient of vmap of weights": lambda f, x, w: jax.grad(
        lambda x, w: jnp.sum(jnp.sin(jax.vmap(f, (None, 0))(x, w))), (0, 1)
    )(x[0], w),
}


@pytest.mark.parametrize("transform", HALVES)
def test_start_and_done_are_whole_operations_under_vmap(mesh, asynchronous, transform):
    x, idx, weights = batch()

    def run(body):
        def f(x, weights):
            return over(mesh, body)(x, idx[0], weights)

        return jax.jit(functools.partial(HALVES[transform], f))

    text = str(jax.make_jaxpr(run(in_halves))(x, weights))
    assert ("xen_moe_dispatch_start" in text) == (transform in ("jacfwd", "jacrev")), "only values started outside"
    found, expected = (jax.tree.leaves(run(body)(x, weights)) for body in (in_halves, whole))
    for a, e in zip(found, expected, strict=True):  # the sums around the calls are fused otherwise
        assert np.abs(e).max() > 1e-2
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    if transform == "vmap":
        assert_same(found, expected, transform)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_a_flight_stays_inside_of_the_vmap_that_started_it(mesh, asynchronous, half):
    """Its start did nothing: a done outside would wait for rows that no rank sends."""
    x, idx, weights = (a[0] for a in batch())

    def start(x, idx, weights):
        flight = xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep", config=REFERENCE)
        if half == "dispatch":
            return flight
        routed = xm.dispatch_done(flight)
        return xm.combine_start(routed.x, routed.handle, config=REFERENCE)

    def body(x, idx, weights):
        flights = jax.vmap(lambda x: start(x, idx, weights))(jnp.stack([x, x]))
        return jax.tree.leaves(flights)[0]

    with pytest.raises(NotImplementedError, match=rf"vmap of {half}_start: .* call {half}_done in .*jax\.lax\.map"):
        jax.eval_shape(over(mesh, body), x, idx, weights)


def test_a_flight_from_outside_is_not_finished_for_every_entry(mesh, asynchronous):
    x, idx, weights = (a[0] for a in batch())

    def body(x, idx, weights):
        flight = xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep", config=REFERENCE)
        pending = jax.tree.map(lambda a: jnp.stack([a, a]), flight.state.pending)

        def finish(pending):
            state = dataclasses.replace(flight.state, pending=pending)
            return xm.dispatch_done(dataclasses.replace(flight, state=state)).x

        return jax.vmap(finish)(pending)

    with pytest.raises(NotImplementedError, match="vmap of dispatch_done: its start is outside of the vmap"):
        jax.eval_shape(over(mesh, body, P("ep")), x, idx, weights)
