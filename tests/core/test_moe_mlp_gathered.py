"""`xm.moe_mlp` on an axis of one rank, whose matmuls read the tokens where they lie, against dispatch and combine.

The kernels' contract in plain JAX takes the place of the Hopper kernels: rows past the last group are NaN there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import plain_hopper
from tests.support.checks import assert_bits
from xen_moe_jax import _overlap
from xen_moe_jax.experts import gathered, hopper

TOKENS, HIDDEN, WIDE, EXPERTS, TOP_K = 10, 128, 192, 5, 3
CASES = {
    "no capacity": {},
    "rows are no multiple of 8": {"capacity": 27, "alignment": 3},
    "drops, alignment": {"capacity": 24, "drop": "weight", "alignment": 4},
    "biases": {"activation": "clipped_swiglu"},
    "one projection": {"activation": "relu2"},
    "[B, S, H]": {"token_dims": (2, 5)},
    "everything is dropped": {"capacity": 0},
}


def operands(activation="swiglu", token_dims=(TOKENS,)):
    """x, idx (unused slots and a duplicate among them), weights, and the experts' arrays."""
    rng = np.random.default_rng(0)
    idx = rng.integers(-1, EXPERTS + 1, (*token_dims, TOP_K)).astype(np.int32)
    idx.reshape(-1, TOP_K)[0] = 2

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    arrays = [normal(EXPERTS, HIDDEN, WIDE), normal(EXPERTS, HIDDEN, WIDE), normal(EXPERTS, WIDE, HIDDEN)]
    biases = tuple(normal(EXPERTS, size) for size in (WIDE, WIDE, HIDDEN)) if activation == "clipped_swiglu" else None
    if activation == "relu2":
        arrays[0] = None
    weights = rng.uniform(0.1, 1, idx.shape).astype(np.float32)
    return idx, (normal(*token_dims, HIDDEN) * 3, weights, *arrays, biases)


def results(mesh, idx, given, **options):
    """Value, counts and gradients."""

    def body(x, weights, gate, up, down, biases):
        call = functools.partial(xm.moe_mlp, num_experts=EXPERTS, axis_name="ep", return_info=True, **options)
        out, info = call(x, idx, weights, gate, up, down, biases=biases)
        return out, jax.tree.map(jnp.atleast_1d, info)

    def loss(given):
        out, info = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(*given)
        return jnp.sum(jnp.sin(out)), (out, info)

    (_, value), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return value, gradients


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])


@pytest.mark.parametrize("name", CASES)
def test_is_the_composition(name, mesh, monkeypatch):
    """Bit for bit, and gradients too but for the sums that are taken in another order: biases'."""
    options = dict(CASES[name])
    shape = {key: options.pop(key) for key in ("token_dims",) if key in options}
    idx, given = operands(options.get("activation", "swiglu"), **shape)
    with plain_hopper.in_the_kernels_place():
        ours, by_ours = results(mesh, idx, given, **options)
        dispatched = str(jax.make_jaxpr(functools.partial(results, mesh, idx, **options))(given))
        monkeypatch.setattr(gathered, "takes", lambda *_: False)
        theirs, by_theirs = results(mesh, idx, given, **options)
    empty = options.get("capacity") == 0
    assert (f",{gathered.NUMBERS}]" in dispatched) != empty and np.asarray(ours[0]).any() != empty
    assert (int(ours[1].num_dropped.sum()) > 0) == ("drop" in name)
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), name), ours, theirs)
    for ours, theirs in zip(jax.tree.leaves(by_ours), jax.tree.leaves(by_theirs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
        assert np.asarray(theirs).any() != empty


@pytest.mark.parametrize("way", ["gathered", "dispatched"])
@pytest.mark.parametrize("within", [False, True])
def test_backward_is_traced_as_work_of_an_overlap_where_forward_was(way, within, mesh):
    """By that the kernels' tiles are claimed or not; JAX traces the backward pass when the overlap has returned."""
    idx, (*arrays, _) = operands()
    seen, in_forward = [], []

    def layer(x, weights, gate, up, down):
        return xm.moe_mlp(x, idx, weights, gate, up, down, num_experts=EXPERTS, axis_name="ep")

    def body(*arrays):
        if not within:
            return layer(*arrays)
        with _overlap.overlap_work():
            return layer(*arrays)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with plain_hopper.in_the_kernels_place(), pytest.MonkeyPatch.context() as monkeypatch:
        plan = hopper.plan
        monkeypatch.setattr(hopper, "plan", lambda *shape: seen.append(_overlap.in_overlap()) or plan(*shape))
        if way == "dispatched":
            monkeypatch.setattr(gathered, "takes", lambda *_: False)

        def both(*arrays):
            out, pull = jax.vjp(mapped, *arrays)
            in_forward.append(len(seen))
            return pull(out)

        jax.eval_shape(both, *arrays)
    assert set(seen) == {within} and 0 < in_forward[0] < len(seen)
    assert not _overlap.in_overlap()


def test_no_second_derivative(mesh):
    idx, given = operands()

    def first(given):
        _, gradients = results(mesh, idx, given)
        return sum(jnp.sum(jnp.sin(gradient)) for gradient in jax.tree.leaves(gradients))

    with plain_hopper.in_the_kernels_place(), pytest.raises(NotImplementedError, match="grouped_matmul='ragged_dot'"):
        jax.eval_shape(jax.grad(first), given)


def test_remat_by_name_does_not_dispatch_again(mesh):
    idx, given = operands()

    def layer(x, weights, gate, up, down, _):
        return xm.moe_mlp(x, idx, weights, gate, up, down, num_experts=EXPERTS, axis_name="ep")

    def dispatches(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        mapped = jax.shard_map(jax.checkpoint(layer, policy=policy), mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        text = str(jax.make_jaxpr(jax.grad(lambda given: jnp.sum(mapped(*given))))(given))
        return text.count("xen_moe_dispatch[")

    with plain_hopper.in_the_kernels_place():
        assert [dispatches(()), dispatches(("xen_moe_rows", "xen_moe_handle"))] == [2, 1]
