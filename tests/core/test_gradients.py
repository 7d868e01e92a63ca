"""Gradients: against a dense MoE without ranks, closed forms, and through JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from tests.support.gradient_model import (
    EXPERTS,
    LAYOUTS,
    assert_close,
    assert_gradients_close,
    dense_moe,
    ep_moe,
    model,
    place,
    sharded,
)
from tests.support.ragged import ragged_operands


@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_dense_moe(mesh4, layout):
    x, idx, weights, w_in, w_out = model()
    target = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    ep = sharded(functools.partial(ep_moe, layout), mesh4)

    def ep_loss(x, weights, w_in, w_out, idx, target):
        return jnp.sum(jnp.sin(ep(x, idx, weights, w_in, w_out)) * target)

    def dense_loss(x, weights, w_in, w_out):
        return jnp.sum(jnp.sin(dense_moe(x, idx, weights, w_in, w_out)) * target)

    with jax.default_matmul_precision("highest"):
        out = ep(*place(mesh4, x, idx, weights, w_in, w_out))
        assert_close(out, dense_moe(x, idx, weights, w_in, w_out), "forward")
        assert (np.asarray(out)[1] == 0).all()  # a token with no expert
        actual = jax.jit(jax.grad(ep_loss, (0, 1, 2, 3)))(*place(mesh4, x, weights, w_in, w_out, idx, target))
        expected = jax.grad(dense_loss, (0, 1, 2, 3))(x, weights, w_in, w_out)
    assert_gradients_close(actual, expected)
    assert np.asarray(actual[1])[2, 0] == 0  # the weight of an out-of-range slot


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_layers_under_scan_and_remat(mesh4, remat):
    """Three layers in a `lax.scan`, with and without `jax.checkpoint`, inside `jit`, inputs donated."""
    layers = [model(seed) for seed in range(3)]
    x = layers[0][0]
    stacks = [np.stack([layer[i] for layer in layers]) for i in range(1, 5)]  # idx, weights, w_in, w_out: [3, ...]

    def stack_of(layer):
        def forward(x, idx, weights, w_in, w_out):
            step = jax.checkpoint(layer) if remat else layer
            return jax.lax.scan(lambda h, p: (h + step(h, *p), None), x, (idx, weights, w_in, w_out))[0]

        return forward

    specs = (P("ep"), *[P(None, "ep")] * 4)
    ep = jax.shard_map(stack_of(functools.partial(ep_moe, "grouped")), mesh=mesh4, in_specs=specs, out_specs=P("ep"))
    step = jax.jit(
        jax.grad(lambda x, idx, *rest: jnp.sum(jnp.cos(ep(x, idx, *rest))), (0, 2, 3, 4)), donate_argnums=(0, 2, 3, 4)
    )
    with jax.default_matmul_precision("highest"):
        placed = [jax.device_put(a, jax.NamedSharding(mesh4, s)) for a, s in zip((x, *stacks), specs, strict=True)]
        actual = step(*placed)
        dense = stack_of(dense_moe)
        expected = jax.grad(lambda x, idx, *rest: jnp.sum(jnp.cos(dense(x, idx, *rest))), (0, 2, 3, 4))(x, *stacks)
    assert placed[0].is_deleted()
    assert_gradients_close(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_closed_form_identity_experts(mesh4, layout):
    """With identity experts the output is `sum_k w_k * x`, so the gradients are known without a model."""
    x, idx, weights, *_ = model(3)
    used = (idx >= 0) & (idx < EXPERTS)

    def loss(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", layout=layout)
        y = routed.x
        if layout == "ranked":
            y = y * jnp.sum(routed.topk_weights, axis=1)[:, None]
        return jnp.sum(xm.combine(y, routed.handle))

    grad = sharded(jax.grad(loss, (0, 2)), mesh4)
    dx, dweights = grad(*place(mesh4, x, idx, weights))
    np.testing.assert_allclose(dx, np.broadcast_to((weights * used).sum(1)[:, None], x.shape), rtol=1e-6)
    np.testing.assert_allclose(dweights, used * x.sum(1)[:, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["grouped", "ranked"])
def test_dropped_rows_have_no_gradient(mesh4, layout):
    """`grad == number of rows that survived`, and the counts agree with `num_dropped`."""
    x, idx, *_ = model(4)
    capacity = 7

    def f(x, idx):
        def loss(x):
            routed = xm.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep", layout=layout, capacity=capacity)
            return jnp.sum(xm.combine(routed.x, routed.handle, weighted=False)), (routed.num_dropped, routed.handle)

        grad, (dropped, handle) = jax.grad(loss, has_aux=True)(x)
        return grad, dropped[None], handle.positions[None]

    dx, dropped, positions = sharded(f, mesh4)(*place(mesh4, x, idx))
    survived = (np.asarray(positions) >= 0).sum(axis=(0, 3)).reshape(-1)
    assert_bits(dx, np.broadcast_to(survived[:, None], x.shape).astype(np.float32), "gradient of x")
    assert (np.asarray(dropped) > 0).all() and np.asarray(dropped).sum() == (np.asarray(positions) == -2).sum()


@pytest.mark.parametrize(
    ("layout", "hidden", "capacity"), [("grouped", 0, None), ("padded", 0, None), ("grouped", 4, 0)]
)
def test_nothing_to_combine_has_zero_gradients(layout, hidden, capacity):
    """Hidden size 0, or no room for a row. Differentiated outside `shard_map`: arrays that leave it have elements, or
    XLA's compiler crashes.
    """

    # JAX gives an array without elements no sharding, which a mesh of explicit axes would refuse
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def layer(x, weights, idx):
        routed = xm.dispatch(x, idx, weights, num_experts=8, axis_name="ep", layout=layout, capacity=capacity)
        return xm.combine(routed.x, routed.handle)

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    gradient = jax.jit(jax.grad(lambda *operands: jnp.sum(mapped(*operands)), argnums=(0, 1)))
    idx = np.arange(16, dtype=np.int32).reshape(8, 2) % 8
    x, weights = np.ones((8, hidden), np.float32), np.ones((8, 2), np.float32)
    by_rows, by_weights = gradient(x, weights, idx)
    np.testing.assert_array_equal(by_rows, np.zeros_like(x))
    np.testing.assert_array_equal(by_weights, np.zeros_like(weights))


def test_a_rank_that_leaves_before_the_combine_reaches_no_gradient(mesh4):
    """The handle knows its rows. Their router weights and outputs may be NaN, which a cotangent of zero would not
    silence."""
    active = jnp.arange(4) != 1
    idx, leaves = np.arange(64, dtype=np.int32).reshape(32, 2) % 8, np.arange(32)[:, None] // 8 == 1

    def layer(x, weights, scale, idx):
        routed = xm.dispatch(x, idx, weights, num_experts=8, axis_name="ep")
        return jnp.sum(xm.combine(routed.x * scale, routed.handle, active=active))

    def gradients(x, weights):
        x, weights = (np.where(leaves, value, np.ones((32, n), np.float32)) for value, n in ((x, 8), (weights, 2)))
        given = place(mesh4, x.astype(np.float32), weights.astype(np.float32), np.ones(4, np.float32), idx)
        return [np.asarray(a) for a in mapped(*given)]

    mapped = sharded(jax.grad(layer, (0, 1, 2)), mesh4)
    clean = gradients(1, 1)
    assert clean[2].any() and not any(np.where(leaves, a, 0).any() for a in clean[:2])
    for name, a, b in zip(("x", "weights", "scale"), gradients(1, np.nan), clean, strict=True):
        assert_bits(a, b, f"gradient of {name}, NaN in router weights")
    for name, a, b in zip(("x", "weights"), gradients(np.nan, 1), clean):
        assert_bits(a, b, f"gradient of {name}, NaN in tokens")


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8:ue8m0"])
def test_quantized_wire_is_straight_through(mesh4, wire):
    """The forward pass is quantized, the gradient is that of the unquantized program: bit for bit."""
    x, idx, weights, *_ = model(5)
    rng = np.random.default_rng(6)
    target = rng.standard_normal(x.shape).astype(np.float32)

    def loss(x, idx, weights, target, wire):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", wire=wire)
        out = xm.combine(jax.lax.stop_gradient(routed.x) * 0 + routed.x, routed.handle, wire=wire, weighted=False)
        return jnp.sum(out * target), out

    def f(x, idx, weights, target, wire=None):
        return jax.grad(loss, has_aux=True)(x, idx, weights, target, wire)

    operands = place(mesh4, x, idx, weights, target)
    plain, exact = sharded(f, mesh4)(*operands)
    through, rounded = sharded(functools.partial(f, wire=wire), mesh4)(*operands)
    assert_bits(through, np.asarray(plain), "gradient")
    assert not np.array_equal(exact, rounded)
    np.testing.assert_allclose(rounded, exact, atol=0.15 * float(np.abs(exact).max()))


def test_gradient_wire_quantizes_the_cotangent(mesh4):
    x, idx, weights, *_ = model(6)
    target = np.random.default_rng(6).standard_normal(x.shape).astype(np.float32)

    def f(x, idx, weights, target, gradient_wire=None):
        def loss(x):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", gradient_wire=gradient_wire)
            return jnp.sum(xm.combine(routed.x, routed.handle, gradient_wire=gradient_wire) * target)

        return jax.grad(loss)(x)

    operands = place(mesh4, x, idx, weights, target)
    exact = np.asarray(sharded(f, mesh4)(*operands))
    rounded = np.asarray(sharded(functools.partial(f, gradient_wire="float8_e4m3fn"), mesh4)(*operands))
    assert not np.array_equal(exact, rounded)
    np.testing.assert_allclose(rounded, exact, atol=0.15 * float(np.abs(exact).max()))


def test_redispatch_gradient(mesh4):
    """`redispatch` is linear: its gradient is the count of rows of a token, weighted by the cotangent of each."""
    x, idx, *_ = model(7)
    used = ((idx >= 0) & (idx < EXPERTS)).sum(1)

    def f(x, idx):
        handle = xm.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep").handle
        return jax.grad(lambda x2: jnp.sum(xm.redispatch(x2, handle) * 3))(x)

    dx = sharded(f, mesh4)(*place(mesh4, x, idx))
    assert_bits(dx, np.broadcast_to(3 * used[:, None], x.shape).astype(np.float32), "gradient")


def test_bfloat16_gradients_keep_the_dtype(mesh4):
    x, idx, weights, *_ = model(8)
    x = x.astype(jnp.bfloat16)

    def loss(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
        return jnp.sum(xm.combine(routed.x, routed.handle).astype(jnp.float32))

    dx, dweights = sharded(jax.grad(loss, (0, 2)), mesh4)(*place(mesh4, x, idx, weights))
    assert dx.dtype == jnp.bfloat16 and dweights.dtype == jnp.float32
    used = (idx >= 0) & (idx < EXPERTS)
    np.testing.assert_allclose(dx.astype(np.float32)[:, 0], (weights * used).sum(1), rtol=2e-2)


# -- ragged_all_to_all ------------------------------
def transpose_by_hand(cotangent, operand_shape, input_offsets, send_sizes, output_offsets):
    """Cotangents of operand and output, slice by slice."""
    d_operand = np.zeros(operand_shape, np.float32)
    d_output = cotangent.copy()
    ranks = cotangent.shape[0]
    for source in range(ranks):
        for dest in range(ranks):
            size = send_sizes[source, dest]
            at, to = input_offsets[source, dest], output_offsets[source, dest]
            d_operand[source, at : at + size] += cotangent[dest, to : to + size]
            d_output[dest, to : to + size] = 0
    return d_operand, d_output


@pytest.mark.parametrize("trailing", [(8,), ()], ids=["rows", "scalars"])
@pytest.mark.parametrize("kind", ["random", "empty", "one_pair", "overlap"])
def test_ragged_all_to_all_gradient(mesh4, kind, trailing):
    """Empty segments, gaps, and slices of the operand that several ranks get."""
    rng = np.random.default_rng(17)
    operands = list(ragged_operands(rng, 4, "random" if kind == "overlap" else kind, trailing, "float32"))
    if kind == "overlap":
        operands[2] = np.zeros_like(operands[2])  # every peer gets a prefix of the same rows
    cotangent = rng.standard_normal(operands[1].shape).astype(np.float32)

    def f(*args):
        *args, cotangent = [a[0] for a in args]
        _, pull = jax.vjp(lambda a, b: xm.ragged_all_to_all(a, b, *args[2:], axis_name="ep"), *args[:2])
        return jax.tree.map(lambda a: a[None], pull(cotangent))

    d_operand, d_output = sharded(f, mesh4)(*place(mesh4, *operands, cotangent))
    expected = transpose_by_hand(cotangent, operands[0].shape, operands[2], operands[3], operands[4])
    np.testing.assert_allclose(d_operand, expected[0], rtol=1e-6, atol=1e-6)
    assert_bits(d_output, expected[1], "gradient of output")


def test_ragged_all_to_all_offset_of_an_empty_segment_does_not_matter(mesh4):
    """An empty segment may carry any offset, in range or not: the gradient of `output` ignores it."""
    rng = np.random.default_rng(19)
    operands = list(ragged_operands(rng, 4, "one_pair", (8,), "float32"))
    empty = operands[3] == 0
    operands[2] = np.where(empty, rng.integers(-50, 50, empty.shape), operands[2]).astype(np.int32)
    operands[4] = np.where(empty, rng.integers(-50, 50, empty.shape), operands[4]).astype(np.int32)

    def f(*args):
        args = [a[0] for a in args]
        grad = jax.grad(lambda a, b: jnp.sum(xm.ragged_all_to_all(a, b, *args[2:], axis_name="ep")), (0, 1))
        return jax.tree.map(lambda a: a[None], grad(*args[:2]))

    d_operand, d_output = map(np.asarray, sharded(f, mesh4)(*place(mesh4, *operands)))
    sent = int(operands[3].sum())
    assert d_operand.sum() == sent * 8 and (d_operand[0, operands[2][0, 3] :][:sent] == 1).all()
    assert d_output.size - d_output.sum() == sent * 8


def test_all_to_all_gradient_equals_that_of_jax(mesh4):
    x = np.random.default_rng(23).standard_normal((16, 8, 3)).astype(np.float32)

    def f(x):
        def loss(exchange):
            return lambda x: jnp.sum(jnp.sin(exchange(x, "ep", 1, 0, tiled=True)) * (1 + jax.lax.axis_index("ep")))

        return jax.grad(loss(xm.all_to_all))(x), jax.grad(loss(jax.lax.all_to_all))(x)

    ours, theirs = sharded(f, mesh4)(*place(mesh4, x))
    assert_bits(ours, np.asarray(theirs), "gradient")
