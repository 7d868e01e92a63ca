"""Activations, biases, tensor axis, replicated tokens and hash routing: outputs and gradients of a dense evaluation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.dense_moe import dense_experts, dense_moe
from tests.support.layers import (
    CONFIG,
    GPT_OSS,
    H,
    assert_same_gradients,
    biased,
    layer,
    make_mesh,
    run,
    run_with_gradients,
    tokens,
    weights_of,
)
from xen_moe_jax.flax._router import hashed_experts

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PLAIN = dataclasses.replace(CONFIG, balancing="none")
SHARED = dataclasses.replace(PLAIN, num_shared_experts=1)
hashed = jax.jit(hashed_experts, static_argnums=(1, 2))


def assert_equals_dense(config, moe, x, target, got):
    """`got` is the result of `run_with_gradients`; the dense evaluation is on one device."""
    weights = {name: jnp.asarray(w) for name, w in weights_of(moe).items()}

    def dense_loss(weights, x):
        y = dense_moe(config, weights, x)
        return (y * target).sum(), y

    (expected, x_gradient), y = jax.jit(jax.grad(dense_loss, argnums=(0, 1), has_aux=True))(weights, x)
    np.testing.assert_allclose(got[0], y, **CLOSE)
    assert_same_gradients(got[2], expected | {"x": x_gradient})


LLAMA4 = dataclasses.replace(
    PLAIN, apply_weights_to="input", score="sigmoid", normalize_weights=False, num_shared_experts=1
)
QWEN2 = dataclasses.replace(
    PLAIN, normalize_weights=False, shared_intermediate_size=36, shared_expert_gate=True, layout="padded"
)
PHIMOE = dataclasses.replace(
    CONFIG, score="sparsemixer", sparsemixer_eps=0.3, normalize_weights=False, aux_loss_weight=0.0
)
DEEPSEEK_V2 = dataclasses.replace(
    PLAIN, num_groups=4, topk_groups=2, group_best=1, normalize_weights=False, weight_scale=16.0
)
VARIANTS = {
    "geglu": dataclasses.replace(SHARED, activation="geglu"),
    "gelu with biases": dataclasses.replace(PLAIN, activation="gelu", expert_bias=True),
    "relu2": dataclasses.replace(SHARED, activation="relu2"),
    "gpt-oss, padded": dataclasses.replace(GPT_OSS, layout="padded"),
    "gpt-oss, uneven and aligned": dataclasses.replace(GPT_OSS, num_experts=7, alignment=8),
    "Llama 4": LLAMA4,
    "Llama 4, padded, biases": dataclasses.replace(LLAMA4, layout="padded", expert_bias=True),
    "Llama 4, overlapping chunks": dataclasses.replace(LLAMA4, num_chunks=2, remat="experts"),
    "Llama 4, chunks in a loop": dataclasses.replace(LLAMA4, num_chunks=2, remat="all"),
    "Qwen2": QWEN2,
    "PhiMoE": PHIMOE,
    "DeepSeek-V2": DEEPSEEK_V2,
    "one expert": dataclasses.replace(LLAMA4, num_experts=1, top_k=1),
    "ERNIE": dataclasses.replace(PLAIN, min_score_sum=0.4),  # of softmax scores: it matters for some tokens
}


@pytest.mark.parametrize("name", VARIANTS)
def test_activations_and_biases(name):
    config, mesh = VARIANTS[name], make_mesh((2,), ("ep",))
    with jax.set_mesh(mesh):
        moe = biased(layer(config))
    x, target = tokens(6, 4), tokens(6, 4, seed=9)
    assert_equals_dense(config, moe, x, target, run_with_gradients(moe, x, target, mesh))


def test_parameters_follow_the_activation():
    names = {name: layer(VARIANTS[name]).weight_names for name in ("geglu", "relu2", "gpt-oss, padded")}
    assert names["geglu"] == ("router", "gate", "shared_gate", "up", "shared_up", "down", "shared_down")
    assert names["relu2"] == ("router", "up", "shared_up", "down", "shared_down")
    assert set(names["gpt-oss, padded"]) >= {"logits_bias", "gate_bias", "up_bias", "down_bias"}


@pytest.mark.parametrize(
    "config, kind",
    [
        (dataclasses.replace(GPT_OSS, num_shared_experts=1, tensor_axis="tp"), "Auto"),
        (
            dataclasses.replace(
                GPT_OSS, num_shared_experts=1, shared_expert_gate=True, tensor_axis="tp", layout="padded"
            ),
            "Explicit",
        ),
    ],
    ids=["grouped", "padded, explicit, gate"],
)
def test_expert_width_over_a_tensor_axis(config, kind):
    """Three mesh axes: data, experts, features inside an expert."""
    mesh = make_mesh((2, 2, 2), ("dp", "ep", "tp"), jax.sharding.AxisType[kind])
    with jax.set_mesh(mesh):
        moe = biased(layer(config))
    assert {s.data.shape for s in moe.gate[...].addressable_shards} == {(4, H, 12)}
    assert {s.data.shape for s in moe.down[...].addressable_shards} == {(4, 12, H)}
    assert {s.data.shape for s in moe.up_bias[...].addressable_shards} == {(4, 12)}
    assert {s.data.shape for s in moe.shared_down[...].addressable_shards} == {(12, H)}
    x, target = tokens(6, 4), tokens(6, 4, seed=9)
    assert_equals_dense(config, moe, x, target, run_with_gradients(moe, x, target, mesh))


def test_tensor_parallel_weights_are_computed_with_and_not_gathered():
    config = dataclasses.replace(PLAIN, tensor_axis="tp")
    mesh = make_mesh((2, 2), ("ep", "tp"))
    graph, state = nnx.split(layer(config))
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        x = jax.device_put(tokens(8), jax.NamedSharding(mesh, jax.P("ep")))
        text = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x).compile().as_text()
    gathered = [shape for shape, _ in re.findall(r" = (.*?) (all-gather)\(", text)]
    assert not [shape for shape in gathered if "f32" in shape], gathered


def test_inside_the_callers_shard_map_with_a_tensor_axis():
    config = dataclasses.replace(GPT_OSS, tensor_axis="tp")
    mesh = make_mesh((2, 2), ("ep", "tp"))
    moe, x = biased(layer(config)), tokens(8)
    graph, state = nnx.split(moe)
    specs = jax.tree.map(lambda _: jax.P(), state)
    specs["gate"] = specs["gate"].replace(jax.P("ep", None, "tp"))  # all other leaves come whole
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0], mesh=mesh, in_specs=(specs, jax.P("ep")), out_specs=jax.P("ep")
    )
    np.testing.assert_allclose(jax.jit(call)(state, x), dense_moe(config, weights_of(moe), x), **CLOSE)
    half = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0],
        mesh=mesh,
        in_specs=(jax.P(), jax.P("ep")),
        out_specs=jax.P("ep"),
        axis_names={"ep"},
    )
    with pytest.raises(ValueError, match=r"tensor_axis='tp'.*manual over \['ep'\] only; make all of \['ep', 'tp'\]"):
        jax.jit(half)(state, x)


def test_features_that_the_tensor_axis_does_not_divide():
    config = dataclasses.replace(CONFIG, intermediate_size=25, tensor_axis="tp")
    mesh = make_mesh((2, 2), ("ep", "tp"))
    with pytest.raises(ValueError, match="intermediate_size=25: the 2 ranks of tensor_axis='tp' must divide it"):
        layer(config, mesh=mesh)
    moe = layer(config)  # without a mesh any width will do
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="intermediate_size=25"):
        moe(jnp.asarray(tokens(8)))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(GPT_OSS, token_axes=("dp",)),
        dataclasses.replace(GPT_OSS, token_axes=("dp",), layout="padded", num_experts=7, num_shared_experts=1),
        dataclasses.replace(GPT_OSS, token_axes=("dp",), apply_weights_to="input"),
        dataclasses.replace(GPT_OSS, token_axes=("dp",), apply_weights_to="input", layout="padded"),
    ],
    ids=["grouped", "padded, uneven, shared", "grouped, weighted input", "padded, weighted input"],
)
def test_tokens_replicated_over_the_expert_axis(config):
    mesh = make_mesh((2, 4), ("dp", "ep"))
    with jax.set_mesh(mesh):
        moe = biased(layer(config))
    x, target = tokens(6, 2), tokens(6, 2, seed=9)
    y, metrics, gradients = run_with_gradients(moe, x, target, mesh)
    assert_equals_dense(config, moe, x, target, (y, metrics, gradients))
    assert metrics.tokens_per_expert.sum() == 12 * config.top_k, "each token counts once, not once per rank"


def test_replicated_tokens_are_not_dispatched():
    config = dataclasses.replace(PLAIN, token_axes=(), tensor_axis="tp", layout="padded")
    moe, x, mesh = layer(config), tokens(3), make_mesh((2, 2), ("ep", "tp"))
    graph, state = nnx.split(moe)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        program = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x).compile()
    kinds = set(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)\(", program.as_text()))
    assert kinds == {"all-reduce"}
    np.testing.assert_allclose(program(state, x), dense_moe(config, weights_of(moe), x), **CLOSE)


def test_replicated_tokens_must_not_vary():
    config = dataclasses.replace(CONFIG, token_axes=())
    graph, state = nnx.split(layer(config))
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0],
        mesh=make_mesh((4,), ("ep",)),
        in_specs=(jax.P(), jax.P("ep")),
        out_specs=jax.P("ep"),
    )
    with pytest.raises(ValueError, match=r"token_axes=\(\).*x varies over \['ep'\]; check the in_specs"):
        jax.jit(call)(state, tokens(8))


@pytest.mark.parametrize("score", ["softmax", "uniform"])
def test_hash_routing(score):
    config = dataclasses.replace(PLAIN, choice="hash", score=score, top_k=3)
    moe, x, mesh = layer(config), tokens(5, 3), make_mesh((4,), ("ep",))
    ids = np.asarray(jax.random.randint(jax.random.key(4), (5, 3), 0, 1000))
    y, metrics = run(moe, x, mesh, token_ids=jnp.asarray(ids))
    weights = weights_of(moe)
    assert ("router" in weights) == (score == "softmax")
    chosen = np.asarray(hashed(jnp.asarray(ids.reshape(-1)), 8, 3))
    flat = x.reshape(-1, H)
    scores = np.ones((15, 8)) if score == "uniform" else np.exp(flat @ weights["router"])
    share = np.zeros((15, 8))
    for t, experts in enumerate(chosen):
        share[t, experts] = scores[t, experts] / scores[t, experts].sum()
    np.testing.assert_allclose(y, dense_experts(config, weights, flat, share).reshape(x.shape), **CLOSE)
    np.testing.assert_array_equal(metrics.tokens_per_expert, np.bincount(chosen.reshape(-1), minlength=8))
    with pytest.raises(ValueError, match=r"token_ids is None with MoEConfig.choice='hash'"):
        moe(x)
    with pytest.raises(ValueError, match=r"token_ids is int32\[5\]: must be integers of shape \[5, 3\]"):
        moe(x, token_ids=np.zeros(5, np.int32))


def test_hashed_experts_are_different_stable_and_even():
    ids = jnp.arange(20_000)
    experts = np.asarray(hashed(ids, 10, 4))
    assert experts.min() == 0 and experts.max() == 9
    assert all(len(set(row)) == 4 for row in experts[:2000])
    np.testing.assert_array_equal(experts[::7], hashed(ids[::7], 10, 4))
    # 20000 draws with probability 1/10: standard deviation 42; and no pair of slots goes together
    for slot in range(4):
        assert np.abs(np.bincount(experts[:, slot], minlength=10) - 2000).max() < 5 * 42
    together = np.zeros((10, 10))
    np.add.at(together, (experts[:, 0], experts[:, 3]), 1)
    off_diagonal = together[~np.eye(10, dtype=bool)]
    assert together.trace() == 0 and off_diagonal.min() > 150 and off_diagonal.max() < 300  # mean 222
