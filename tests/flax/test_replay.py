"""Router replay: the layer uses given experts with the router's present scores, and returns the experts it used."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.dense_moe import dense_experts, router_weights
from tests.support.layers import (
    CONFIG,
    DEEPSEEK,
    GPT_OSS,
    H,
    assert_same_gradients,
    layer,
    make_mesh,
    run,
    run_with_gradients,
    tokens,
    weights_of,
)
from xen_moe_jax.flax.linen import MoE as LinenMoE

HASH = dataclasses.replace(CONFIG, choice="hash", balancing="none")
VARIANTS = {
    "softmax": CONFIG,
    "softmax as it is": dataclasses.replace(CONFIG, normalize_weights=False, sequence_loss_weight=0.1),
    "DeepSeek-V3": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "hash": HASH,
    "hash, uniform": dataclasses.replace(HASH, score="uniform"),
    "padded": dataclasses.replace(CONFIG, layout="padded"),
    "chunks": dataclasses.replace(CONFIG, num_chunks=3, remat="all"),
    "pipelined chunks": dataclasses.replace(CONFIG, num_chunks=2),
    "replicated": dataclasses.replace(CONFIG, token_axes=("dp",)),
    "weights in front": dataclasses.replace(CONFIG, apply_weights_to="activation"),
}


def asking(config):
    return dataclasses.replace(config, return_topk_idx=True)


def given_experts(shape, config, seed=5):
    """Different experts for each token, a few slots unused."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((*shape, config.num_experts)), axis=-1)[..., : config.top_k]
    ids[rng.random(ids.shape) < 0.2] = -1
    return ids.astype(np.int32)


def dense_with(config, weights, x, topk_idx):
    """The dense evaluation with the experts `topk_idx` in place of the router's choice."""
    flat, ids = x.reshape(-1, H), topk_idx.reshape(-1, config.top_k)
    share, scores, _ = router_weights(dataclasses.replace(config, normalize_weights=False), weights, flat)
    picked = (ids[..., None] == np.arange(config.num_experts)).any(1) * scores
    if config.normalize_weights:
        total = picked.sum(-1, keepdims=True)
        picked = picked / jnp.where(total > 0, total, 1)  # no slot of a token may be used
    return dense_experts(config, weights, flat, config.weight_scale * picked).reshape(x.shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_own_choice_given_again_is_the_same_layer(name):
    """The output and the metrics are the same to the bit. XLA may fuse the two backward passes differently."""
    config = asking(VARIANTS[name])
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe, x = layer(config), tokens(8, 5)
    ids = {"token_ids": np.arange(40).reshape(8, 5)} if config.choice == "hash" else {}
    mask = np.random.default_rng(0).random((8, 5)) < 0.8
    target = tokens(8, 5, seed=9)
    y, metrics, gradients = run_with_gradients(moe, x, target, mesh, mask=mask, **ids)
    chex.assert_shape(metrics.topk_idx, (8, 5, config.top_k))
    chex.assert_type(metrics.topk_idx, np.int32)
    np.testing.assert_array_equal((metrics.topk_idx >= 0).all(-1), mask)  # padding is routed to -1 and not to expert 0
    np.testing.assert_array_equal((metrics.topk_idx == -1).all(-1), ~mask)
    *again, same_gradients = run_with_gradients(moe, x, target, mesh, mask=mask, topk_idx=metrics.topk_idx)
    chex.assert_trees_all_equal(tuple(again), (y, metrics), strict=True)
    assert_same_gradients(same_gradients, gradients, rtol=1e-5, atol=2e-6)


def test_a_token_without_a_used_slot_has_no_part_in_the_routers_gradient_and_losses():
    """Such a token counts as one that the mask leaves out does: not even its NaN reaches anything."""
    config, mesh = asking(dataclasses.replace(CONFIG, z_loss_weight=0.1)), make_mesh((2, 4), ("dp", "ep"))
    moe, x, target = layer(config), tokens(8, 5), tokens(8, 5, seed=9)
    mask = np.random.default_rng(0).random((8, 5)) < 0.8
    *masked, gradients = run_with_gradients(moe, x, target, mesh, mask=mask)
    broken = np.where(mask[..., None], x, np.nan)
    *again, same_gradients = run_with_gradients(moe, broken, target, mesh, topk_idx=masked[1].topk_idx)
    chex.assert_trees_all_equal(again, masked, strict=True)
    assert_same_gradients(same_gradients, gradients, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK], ids=["softmax", "DeepSeek-V3"])
def test_given_experts_with_live_scores_equal_dense(config, kind):
    mesh = kind and make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType[kind])
    config = dataclasses.replace(asking(config), balancing="none")
    moe, x, target = layer(config), tokens(3, 7), tokens(3, 7, seed=9)
    ids = given_experts((3, 7), config)
    y, metrics, gradients = run_with_gradients(moe, x, target, mesh, topk_idx=ids)
    np.testing.assert_array_equal(metrics.topk_idx, ids)
    counts = np.bincount(ids[ids >= 0], minlength=config.num_experts)
    np.testing.assert_array_equal(metrics.tokens_per_expert, counts)
    weights = weights_of(moe)
    np.testing.assert_allclose(y, dense_with(config, weights, x, ids), rtol=1e-5, atol=1e-5)

    def loss(weights, x):
        return (dense_with(config, weights, x, ids) * target).sum()

    by_name, by_x = jax.grad(loss, argnums=(0, 1))(weights, x)
    assert_same_gradients(gradients, by_name | {"x": by_x})  # the router's gradient is one of them


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "uint32", "int32"])
def test_any_dtype_that_can_name_every_expert(dtype):
    config = asking(dataclasses.replace(CONFIG, num_experts=128, balancing="none"))
    moe, x = layer(config), tokens(12)
    ids = np.random.default_rng(3).integers(0, 128, (12, 2))
    ids[:, 0], ids[:, 1] = 127, np.minimum(ids[:, 1], 126)
    _, metrics = run(moe, x, topk_idx=ids.astype(dtype))
    np.testing.assert_array_equal(metrics.topk_idx, ids)
    beyond = np.asarray(ids, dtype)
    beyond[0] = np.iinfo(dtype).max  # outside of [0, E) but for int8: an unused slot
    _, metrics = run(moe, x, topk_idx=beyond)
    np.testing.assert_array_equal(metrics.topk_idx[0], [127, 127] if dtype == "int8" else [-1, -1])


def test_int64():
    config = asking(dataclasses.replace(CONFIG, balancing="none"))
    with jax.enable_x64(True):
        moe, x = layer(config), tokens(4)
        ids = np.array([[0, 1], [2, -1], [2**32, 2**32 + 1], [7, -(2**40)]])  # 2**32 would be expert 0 after a cast
        _, metrics = run(moe, x, topk_idx=ids)
    np.testing.assert_array_equal(metrics.topk_idx, [[0, 1], [2, -1], [-1, -1], [7, -1]])


def test_linen_and_loaded_weights():
    config = asking(CONFIG)
    moe, x = layer(config), tokens(16)
    ids = given_experts((16,), config)
    y, _ = run(moe, x, topk_idx=ids)
    weights = {name: jnp.asarray(w) for name, w in weights_of(moe).items()}
    linen_y, metrics = jax.jit(LinenMoE(config).apply)({"params": weights}, x, topk_idx=ids)
    np.testing.assert_array_equal(linen_y, y)
    np.testing.assert_array_equal(metrics.topk_idx, ids)
    loaded, _ = run(type(moe).from_weights(config, weights), x, topk_idx=ids)
    np.testing.assert_array_equal(loaded, y)


def test_inside_your_own_shard_map():
    config = asking(CONFIG)
    mesh, moe, x = make_mesh((4,), ("ep",)), layer(config), tokens(16)
    ids = given_experts((16,), config)
    graph, state = nnx.split(moe)

    def on_rank(state, x, ids):
        y, metrics = nnx.merge(graph, state)(x, topk_idx=ids)
        return y, metrics.topk_idx

    specs = (jax.P(), jax.P("ep"), jax.P("ep"))
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=jax.P("ep"))
    y, used = jax.jit(mapped)(state, x, ids)
    np.testing.assert_array_equal(used, ids)
    np.testing.assert_allclose(y, dense_with(config, weights_of(moe), x, ids), rtol=1e-5, atol=1e-5)


def count(jaxpr, primitive):
    """Equations of `primitive` in a jaxpr and everything inside it."""
    inner = [sub for eqn in jaxpr.eqns for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)]
    nested = [sub.jaxpr if hasattr(sub, "jaxpr") else sub for sub in inner if _is_jaxpr(sub)]
    return sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns) + sum(count(sub, primitive) for sub in nested)


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def test_under_remat_the_choice_is_not_made_twice():
    moe, x = layer(CONFIG), tokens(16)
    graph, state = nnx.split(moe)

    def choices(policy=None, remat="none", **given):
        config = dataclasses.replace(CONFIG, remat=remat, num_chunks=2)

        def loss(state, x):
            layer = nnx.merge(graph, state)
            layer.config = config
            return (layer(x, **given)[0] ** 2).sum()

        remade = jax.checkpoint(loss, policy=policy) if remat == "none" else loss
        return count(jax.make_jaxpr(jax.grad(remade))(state, x).jaxpr, "top_k")

    once = choices(jax.checkpoint_policies.everything_saveable)
    assert choices() == 2 * once > 0  # the program that the rest is about: it chooses again
    assert choices(jax.checkpoint_policies.save_only_these_names("xen_moe_topk_idx")) == once
    assert choices(remat="experts") == choices(remat="all") == once
    assert choices(topk_idx=given_experts((16,), CONFIG)) == 0


def test_nothing_comes_back_unless_asked_for():
    _, metrics = run(layer(CONFIG), tokens(4))
    assert metrics.topk_idx is None


@pytest.mark.parametrize(
    "ids, error, words",
    [
        (np.zeros((4, 2), np.float32), TypeError, "topk_idx is float32[4, 2]: must be integers"),
        (np.zeros((4, 3), np.int32), ValueError, "topk_idx is int32[4, 3]: must have shape [4, 2], top_k=2"),
        (np.zeros((2,), np.int32), ValueError, "must have shape [4, 2]"),
        (np.zeros((4, 2), np.int8), ValueError, "int8[4, 2]: this dtype cannot name all num_experts=300"),
        (np.zeros((4, 2), np.uint8), ValueError, "uint8[4, 2]: this dtype cannot name all num_experts=300"),
    ],
)
def test_errors(ids, error, words):
    moe = layer(dataclasses.replace(CONFIG, num_experts=300))
    with pytest.raises(error) as raised:
        moe(jnp.asarray(tokens(4)), topk_idx=ids)
    assert words in str(raised.value)


def test_hash_needs_no_ids_with_given_experts_and_the_others_take_none():
    ids = given_experts((4,), HASH)
    layer(HASH)(jnp.asarray(tokens(4)), topk_idx=ids)
    with pytest.raises(ValueError, match="token_ids is None"):
        layer(HASH)(jnp.asarray(tokens(4)))
    with pytest.raises(ValueError, match="token_ids is an array"):
        layer(CONFIG)(jnp.asarray(tokens(4)), topk_idx=ids, token_ids=np.zeros(4, np.int32))


def test_return_topk_idx_is_checked():
    with pytest.raises(ValueError, match="return_topk_idx=1"):
        dataclasses.replace(CONFIG, return_topk_idx=1)
