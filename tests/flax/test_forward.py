"""The layer against a dense evaluation, on one device, on meshes of all kinds, and inside the caller's shard_map."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support import oracle
from tests.support.dense_moe import dense_aux_loss, dense_experts, dense_moe, router_weights
from tests.support.layers import CONFIG, DEEPSEEK, H, layer, make_mesh, run, tokens, weights_of

# Float32 sums of at most 24 products in different orders, outputs of size 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

CONFIGS = {
    "softmax": CONFIG,
    "softmax weights as they are": dataclasses.replace(CONFIG, normalize_weights=False, top_k=3),
    "DeepSeek-V3": DEEPSEEK,
    "padded": dataclasses.replace(DEEPSEEK, layout="padded"),
    "uneven": dataclasses.replace(CONFIG, num_experts=10),
    "uneven and padded": dataclasses.replace(CONFIG, num_experts=10, layout="padded"),
    "fewer experts than ranks": dataclasses.replace(CONFIG, num_experts=3, top_k=3),
    "aligned": dataclasses.replace(CONFIG, alignment=8),
    "no balancing": dataclasses.replace(CONFIG, balancing="none"),
}
MESHES = {
    "one device": None,
    "dp x ep": ((2, 4), ("dp", "ep"), "Auto"),
    "explicit": ((2, 4), ("dp", "ep"), "Explicit"),
}
ELSEWHERE = [("softmax", "one device"), ("padded", "one device"), ("DeepSeek-V3", "explicit"), ("uneven", "explicit")]


@pytest.mark.parametrize("name, where", [(name, "dp x ep") for name in CONFIGS] + ELSEWHERE)
def test_equals_dense(name, where):
    config = CONFIGS[name]
    if MESHES[where] is None:
        mesh, moe = None, layer(config)
    else:
        sizes, names, kind = MESHES[where]
        mesh = make_mesh(sizes, names, jax.sharding.AxisType[kind])
        with jax.set_mesh(mesh):  # the mesh decides the shardings: uneven experts are replicated
            moe = layer(config)
    x = tokens(8, 5)
    y, metrics = run(moe, x, mesh)
    weights = weights_of(moe)
    np.testing.assert_allclose(y, dense_moe(config, weights, x), **CLOSE)
    aux_loss, counts = dense_aux_loss(config, weights, x)
    np.testing.assert_array_equal(metrics.tokens_per_expert, counts)
    expected = aux_loss if config.balancing == "aux_loss" else 0.0
    np.testing.assert_allclose(metrics.aux_loss, expected, rtol=1e-5)
    assert metrics.num_dropped == 0


@pytest.mark.parametrize(
    "sizes, names, changes",
    [
        ((8,), ("ep",), {}),
        ((2, 2, 2), ("dp", "ep", "tp"), {}),
        ((2, 2, 2), ("dp", "ep", "tp"), {"token_axes": ("dp", "ep")}),
        ((2, 2, 2), ("dp", "ep", "tp"), {"token_axes": ("dp", "ep"), "expert_sharding": ("ep", None, "tp")}),
        ((2, 4), ("node", "gpu"), {"axis_name": ("node", "gpu")}),
        ((1, 8), ("ep", "dp"), {}),
    ],
)
def test_meshes(sizes, names, changes):
    config = dataclasses.replace(CONFIG, **changes)
    moe = layer(config)
    x = tokens(8, 4)
    y, metrics = run(moe, x, make_mesh(sizes, names))
    np.testing.assert_allclose(y, dense_moe(config, weights_of(moe), x), **CLOSE)
    aux_loss, counts = dense_aux_loss(config, weights_of(moe), x)
    np.testing.assert_allclose(metrics.aux_loss, aux_loss, rtol=1e-5)
    np.testing.assert_array_equal(metrics.tokens_per_expert, counts)


@pytest.mark.parametrize(
    "shape, kind",
    [((5,), "Auto"), ((3, 7), "Explicit"), ((1, 1, 2), "Auto"), ((), "Auto"), ((0,), "Auto"), ((8, 0), "Explicit")],
)
def test_token_counts_that_the_mesh_does_not_divide(shape, kind):
    moe = layer(DEEPSEEK)
    x = tokens(*shape)
    y, metrics = run(moe, x, make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType[kind]))
    assert y.shape == x.shape
    if x.size:
        np.testing.assert_allclose(y, dense_moe(DEEPSEEK, weights_of(moe), x), **CLOSE)
    assert metrics.tokens_per_expert.sum() == 2 * x.size // H


def test_mesh_argument_needs_no_context():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe = layer(CONFIG, mesh=mesh)
    assert moe.gate[...].sharding.spec == jax.P("ep", None, None)
    x = tokens(8, 4)
    expected = dense_moe(CONFIG, weights_of(moe), x)
    np.testing.assert_allclose(moe(jnp.asarray(x))[0], expected, **CLOSE)
    np.testing.assert_allclose(nnx.jit(lambda moe, x: moe(x)[0])(moe, x), expected, **CLOSE)


def test_takes_the_mesh_of_x():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe = layer(CONFIG)
    x = jax.device_put(tokens(8, 4), jax.NamedSharding(mesh, jax.P("dp")))
    y, _ = moe(x)
    assert len(y.sharding.device_set) == 8
    np.testing.assert_allclose(y, dense_moe(CONFIG, weights_of(moe), np.asarray(x)), **CLOSE)


def test_explicit_axes_give_the_output_the_sharding_of_x():
    mesh = make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        moe = layer(CONFIG)
        for spec in (jax.P("dp", None, None), jax.P(None, "ep", None)):
            x = jax.device_put(tokens(8, 4), jax.NamedSharding(mesh, spec))
            y, _ = nnx.jit(lambda moe, x: moe(x))(moe, x)
            assert jax.typeof(y).sharding.spec == spec
            np.testing.assert_allclose(y, dense_moe(CONFIG, weights_of(moe), np.asarray(x)), **CLOSE)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("experts", ["own", "all"])
def test_inside_the_callers_shard_map(experts, check_vma):
    mesh = make_mesh((2, 4), ("dp", "ep"))
    config = CONFIG if check_vma else dataclasses.replace(CONFIG, token_axes=("dp", "ep"))
    moe = layer(config)
    graph, state = nnx.split(moe)
    specs = nnx.get_partition_spec(state) if experts == "own" else jax.tree.map(lambda _: jax.P(), state)
    over_tokens = jax.P(("dp", "ep"))
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(specs, over_tokens),
        out_specs=(over_tokens, jax.P()),
        check_vma=check_vma,
    )
    x = tokens(16, 3)
    y, metrics = jax.jit(call)(state, x)
    np.testing.assert_allclose(y, dense_moe(config, weights_of(moe), x), **CLOSE)
    aux_loss, counts = dense_aux_loss(config, weights_of(moe), x)
    np.testing.assert_allclose(metrics.aux_loss, aux_loss, rtol=1e-5)
    np.testing.assert_array_equal(metrics.tokens_per_expert, counts)


def test_inside_a_shard_map_over_other_axes():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe = layer(CONFIG)
    graph, state = nnx.split(moe)
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0],
        mesh=mesh,
        in_specs=(jax.P(), jax.P("dp")),
        out_specs=jax.P("dp"),
        axis_names={"dp"},
    )
    x = tokens(8, 4)
    y = jax.jit(call)(state, x)
    np.testing.assert_allclose(y, dense_moe(CONFIG, weights_of(moe), x), **CLOSE)


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_left_out_tokens(layout):
    config = dataclasses.replace(CONFIG, layout=layout)
    moe = layer(config)
    x = tokens(8, 4)
    mask = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.6, (8, 4)))
    x = np.where(mask[..., None], x, np.nan)  # the values of masked tokens must not matter
    y, metrics = run(moe, x, make_mesh((2, 4), ("dp", "ep")), mask=jnp.asarray(mask))
    np.testing.assert_allclose(y[mask], dense_moe(config, weights_of(moe), x[mask]), **CLOSE)
    np.testing.assert_array_equal(y[~mask], 0.0)
    aux_loss, counts = dense_aux_loss(config, weights_of(moe), x[mask])
    np.testing.assert_array_equal(metrics.tokens_per_expert, counts)
    np.testing.assert_allclose(metrics.aux_loss, aux_loss, rtol=1e-5)


def test_capacity_drops_are_counted_and_contribute_nothing():
    config = dataclasses.replace(CONFIG, capacity=3)
    moe = layer(config)
    x = tokens(64)
    mesh = make_mesh((4,), ("ep",))
    y, metrics = run(moe, x, mesh)
    received = metrics.tokens_per_expert.reshape(4, 2).sum(1)
    assert metrics.num_dropped == np.maximum(received - 3, 0).sum() > 0
    full, _ = run(layer(CONFIG), x, mesh)
    untouched = np.isclose(y, full, **CLOSE).all(1)
    assert 0 < untouched.sum() < 64
    assert (np.abs(y).sum(1) == 0).any(), "tokens whose rows were all dropped are zero"


@pytest.mark.parametrize("drop", ["source", "weight"])
def test_the_rows_that_a_rule_drops_are_missing_from_the_dense_layer(drop):
    config = dataclasses.replace(CONFIG, capacity=8, alignment=2, drop=drop, return_topk_idx=True)
    moe = layer(config)
    x, weights = tokens(48), weights_of(moe)
    y, metrics = run(moe, x, make_mesh((4,), ("ep",)))
    share, _, _ = router_weights(config, weights, x)
    idx = metrics.topk_idx
    chosen = np.take_along_axis(np.asarray(share), idx, axis=1)
    kept, lost = oracle.keep_rows(idx.reshape(4, 12, 2), chosen.reshape(4, 12, 2), 8, "grouped", 8, 2, drop)
    assert metrics.num_dropped == lost.sum() > 0
    left = np.zeros(share.shape, np.float32)
    token, slot = np.nonzero(kept.reshape(48, 2) >= 0)
    left[token, idx[token, slot]] = chosen[token, slot]
    np.testing.assert_allclose(y, dense_experts(config, weights, x, left), **CLOSE)


def test_capacity_factor_is_relative_to_balanced_routing():
    x = tokens(64)
    mesh = make_mesh((4,), ("ep",))
    factor, rows = (dataclasses.replace(CONFIG, **{k: v}) for k, v in (("capacity_factor", 0.75), ("capacity", 24)))
    (y_factor, m_factor), (y_rows, m_rows) = (run(layer(config), x, mesh) for config in (factor, rows))
    np.testing.assert_array_equal(y_factor, y_rows)  # 0.75 * 16 tokens * top-2 = 24 rows
    assert m_factor.num_dropped == m_rows.num_dropped > 0
    assert dataclasses.replace(CONFIG, capacity_factor=1e6).chunk_capacity(16, 4) == 4 * 16 * 2


def test_bfloat16():
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    moe = layer(config)
    assert moe.gate.dtype == jnp.bfloat16 and moe.router.dtype == jnp.float32
    x = tokens(8, 4)
    y, _ = run(moe, x, make_mesh((2, 4), ("dp", "ep")))
    assert y.dtype == jnp.bfloat16
    weights = {name: w.astype(np.float32) for name, w in weights_of(moe).items()}
    # Four roundings to 8 bits, on values of size 1 to 2.
    np.testing.assert_allclose(y.astype(np.float32), dense_moe(config, weights, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8"])
def test_quantized_wire(wire):
    mesh = make_mesh((2, 4), ("dp", "ep"))
    x = tokens(8, 16)
    exact, _ = run(layer(CONFIG), x, mesh)
    y, _ = run(layer(dataclasses.replace(CONFIG, wire=wire, combine_wire=wire)), x, mesh)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.08, "the wire rounds, and by no more than its mantissa says"


def test_nothing_but_the_dispatched_rows_travels():
    """The compiled program gathers no tokens and no weights: it exchanges rows, and sums the metrics."""
    mesh = make_mesh((8,), ("ep",))
    moe = layer(CONFIG)
    graph, state = nnx.split(moe)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        x = jax.device_put(tokens(64), jax.NamedSharding(mesh, jax.P("ep")))
        text = jax.jit(lambda s, x: nnx.merge(graph, s)(x)).lower(state, x).compile().as_text()
    collectives = re.findall(r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\(", text)
    assert {kind for _, kind in collectives} >= {"all-to-all", "all-reduce"}
    for shape, kind in collectives:
        if kind in ("all-gather", "collective-permute"):
            assert "f32" not in shape and "bf16" not in shape, f"{kind} of {shape}"


def test_scan_and_remat():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe = layer(CONFIG)
    graph, state = nnx.split(moe)

    @jax.checkpoint
    def block(x, state):
        return x + nnx.merge(graph, state)(x)[0]

    def stack(state, x):
        return jax.lax.scan(lambda x, _: (block(x, state), None), x, length=2)[0]

    x = tokens(8, 4)
    with jax.set_mesh(mesh):
        y, gradient = jax.jit(lambda s, x: (stack(s, x), jax.grad(lambda x: (stack(s, x) ** 2).mean())(x)))(state, x)
    weights = weights_of(moe)

    def dense_stack(x):
        for _ in range(2):
            x = x + dense_moe(CONFIG, weights, x)
        return x

    np.testing.assert_allclose(y, dense_stack(x), **CLOSE)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: (dense_stack(x) ** 2).mean())(x), **CLOSE)
