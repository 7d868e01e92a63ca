"""Losses and the bias that keep the experts evenly loaded: closed forms, and their effect."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.layers import CONFIG, H, layer, make_mesh, run, tokens
from xen_moe_jax.flax import MoEMetrics, updated_bias
from xen_moe_jax.flax._balance import Sequences, measure
from xen_moe_jax.flax._placement import apply_moe
from xen_moe_jax.flax._router import Routing
from xen_moe_jax.routing import router_scores

E = CONFIG.num_experts


def biased_layer(config):
    """A layer whose router sends nearly every token to expert 5 first."""
    moe = layer(config)
    if config.balancing == "bias":
        moe.router_bias[...] = jnp.zeros(E).at[5].set(1.0)
    else:
        moe.router[...] = moe.router[...].at[0, 5].set(4.0)
    return moe


def test_aux_loss_closed_forms():
    config = dataclasses.replace(CONFIG, aux_loss_weight=1.0, top_k=1)
    moe, x = layer(config), tokens(32)
    moe.router[...] = jnp.zeros((H, E))
    _, metrics = run(moe, x)
    assert float(metrics.aux_loss) == pytest.approx(1.0), "uniform scores: E * sum f_e / E = 1 whatever is chosen"
    moe.router[...] = jnp.zeros((H, E)).at[0, 5].set(100.0)
    _, metrics = run(moe, np.abs(x) + 1)
    assert float(metrics.aux_loss) == pytest.approx(E), "everything to one expert: E"
    assert float(metrics.max_load) == pytest.approx(E)


def test_aux_loss_does_not_depend_on_the_mesh():
    moe, x = layer(CONFIG), tokens(64)
    values = [run(moe, x, mesh)[1].aux_loss for mesh in (None, make_mesh((2, 4), ("dp", "ep")))]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def test_following_the_aux_loss_balances():
    config = dataclasses.replace(CONFIG, aux_loss_weight=1.0)
    moe, x = biased_layer(config), jnp.asarray(tokens(128) + np.eye(1, H))
    weights = {name: getattr(moe, name)[...] for name in moe.weight_names}

    @jax.jit
    def step(router):
        def loss(router):
            _, metrics = apply_moe(config, None, weights | {"router": router}, x)
            return metrics.aux_loss, metrics.max_load

        gradient, load = jax.grad(loss, has_aux=True)(router)
        return router - 0.3 * gradient, load

    router, loads = weights["router"], []
    for _ in range(100):
        router, load = step(router)
        loads.append(float(load))
    assert loads[0] > 3 and max(loads[-5:]) < 1.3, loads


def test_moving_the_bias_balances():
    config = dataclasses.replace(CONFIG, score="sigmoid", balancing="bias", bias_update_rate=0.02)
    moe, x = biased_layer(config), tokens(128)
    call = nnx.jit(lambda moe, x: moe(x)[1])
    loads = []
    for _ in range(60):
        metrics = call(moe, x)
        loads.append(float(metrics.max_load))
        moe.update_bias(metrics)
    assert loads[0] > 3.5 and loads[-1] < 1.5, loads


def test_updated_bias():
    bias = updated_bias(jnp.asarray([0.5, 0.0, -0.5, 1.0]), jnp.asarray([10, 2, 6, 6]), 0.125)
    np.testing.assert_array_equal(bias, [0.375, 0.125, -0.5, 1.0])  # the mean is 6: down, up, stay, stay


def test_max_load_of_nothing_is_zero():
    nothing = MoEMetrics(aux_loss=jnp.zeros(()), tokens_per_expert=jnp.zeros(4, jnp.int32), num_dropped=jnp.int32(0))
    assert float(nothing.max_load) == 0.0


def numpy_scores(moe, x):
    """Softmax scores and logits, float64 `[N, E]`."""
    logits = np.asarray(x, np.float64).reshape(-1, H) @ np.asarray(moe.router[...], np.float64)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True), logits


def sequence_loss(scores, chosen):
    """DeepSeek-V3's equations 17 to 20 for one sequence: `[S, E]` scores, `[S, K]` experts."""
    length, experts = scores.shape
    fraction = np.bincount(chosen.reshape(-1), minlength=experts) * experts / (chosen.shape[1] * length)
    share = (scores / scores.sum(1, keepdims=True)).mean(0)
    return (fraction * share).sum()


@pytest.mark.parametrize("shape, mesh", [((4, 6), (4,)), ((3, 5), (4,)), ((10,), (4,)), ((2, 3, 4), None)], ids=str)
def test_sequence_and_z_losses(shape, mesh):
    """Whole sequences on a rank, sequences cut by the mesh, one sequence, one device; some tokens are left out."""
    config = dataclasses.replace(CONFIG, balancing="none", sequence_loss_weight=0.5, z_loss_weight=0.25)
    moe, x = layer(config), tokens(*shape)
    mask = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.7, shape))
    _, metrics = run(moe, x, mesh and make_mesh(mesh, ("ep",)), mask=jnp.asarray(mask))
    scores, logits = numpy_scores(moe, x)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : config.top_k]
    z = np.log(np.exp(logits).sum(1))[mask.reshape(-1)]
    np.testing.assert_allclose(metrics.z_loss, 0.25 * (z**2).mean(), rtol=1e-5)
    by_sequence = [a.reshape(-1, shape[-1], a.shape[-1]) for a in (scores, chosen)]
    each = [
        sequence_loss(s[m], c[m]) for s, c, m in zip(*by_sequence, mask.reshape(-1, shape[-1]), strict=True) if m.any()
    ]
    np.testing.assert_allclose(metrics.sequence_loss, 0.5 * np.mean(each), rtol=1e-5)
    np.testing.assert_allclose(metrics.aux_loss, metrics.z_loss + metrics.sequence_loss, rtol=1e-6)


def test_losses_have_gradients():
    config = dataclasses.replace(CONFIG, balancing="none", sequence_loss_weight=0.5, z_loss_weight=0.25)
    moe, x, mesh = layer(config), jnp.asarray(tokens(4, 6)), make_mesh((2,), ("ep",))
    weights = {name: getattr(moe, name)[...] for name in moe.weight_names}

    def loss(router):
        return apply_moe(config, mesh, weights | {"router": router}, x)[1].aux_loss

    direction = jax.random.normal(jax.random.key(5), weights["router"].shape)
    slope = jnp.sum(jax.jit(jax.grad(loss))(weights["router"]) * direction)
    step = 1e-3  # no choice of experts changes on the way
    ahead, behind = (jax.jit(loss)(weights["router"] + s * direction) for s in (step, -step))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=0.05)


def test_perfect_balance_is_one_where_tokens_use_a_part_of_their_slots():
    """Given experts may leave slots unused: of `top_k=2`, every token but the last one uses one slot here."""
    config = dataclasses.replace(CONFIG, aux_loss_weight=1.0, sequence_loss_weight=2.0)
    idx = np.stack([np.arange(2 * E) % E, np.full(2 * E, -1)], axis=1)
    idx = jnp.asarray(np.concatenate([idx, [[-1, -1]]]))
    logits = jnp.zeros((2 * E + 1, E))
    routing = Routing(idx, jnp.ones(idx.shape), router_scores(logits, "softmax"), logits)
    sequences = Sequences(jnp.arange(2 * E + 1) // E, 3, shared=False)
    metrics = measure(config, routing, jnp.any(idx >= 0, axis=1), jnp.int32(0), sequences, ())
    np.testing.assert_allclose(metrics.sequence_loss, 2, rtol=1e-6)
    np.testing.assert_allclose(metrics.aux_loss, 1 + 2, rtol=1e-6)


def literal_loss(config, logits, topk_idx, mask, sequence):
    """The losses with shares as the papers write them; for float64."""
    scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
    shares = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-20)
    named = jax.nn.one_hot(topk_idx, E, dtype=logits.dtype).sum(1)
    total = config.z_loss_weight * jnp.mean(jax.nn.logsumexp(logits[mask], axis=-1) ** 2)
    if config.balancing == "aux_loss":
        total += config.aux_loss_weight * E * jnp.sum(named[mask].mean(0) / config.top_k * shares[mask].mean(0))
    parts = [mask & (sequence == n) for n in range(2)]
    each = [jnp.sum(named[p].mean(0) * E / config.top_k * shares[p].mean(0)) for p in parts]
    return total + config.sequence_loss_weight * sum(each) / 2


@pytest.mark.parametrize("loss", ["aux", "sequence", "z"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_of_collapsed_tokens_are_those_of_float64(score, loss):
    """Logits from around -100 to around 10, one logit far above the rest: each loss and its gradient."""
    config = dataclasses.replace(
        CONFIG,
        score=score,
        balancing="aux_loss" if loss == "aux" else "none",
        aux_loss_weight=1.0,
        sequence_loss_weight=float(loss == "sequence"),
        z_loss_weight=float(loss == "z"),
    )
    rng = np.random.default_rng(4)
    logits = (np.linspace(-100, 10, 16)[:, None] + 3 * rng.standard_normal((16, E))).astype(np.float32)
    logits[5, 2] += 20
    mask, sequence = np.arange(16) != 9, np.arange(16) % 2
    idx = jnp.asarray(np.where(mask[:, None], np.argsort(-logits, axis=1)[:, : config.top_k], -1))

    def of_library(logits):
        routing = Routing(idx, jnp.zeros(idx.shape), router_scores(logits, score), logits)
        sequences = Sequences(jnp.asarray(sequence), 2, shared=False)
        return measure(config, routing, jnp.asarray(mask), jnp.int32(0), sequences, ()).aux_loss

    value, gradient = jax.jit(jax.value_and_grad(of_library))(jnp.asarray(logits))
    with jax.enable_x64(True):
        exact = jax.jit(jax.value_and_grad(lambda x: literal_loss(config, x, np.asarray(idx), mask, sequence)))
        wanted_value, wanted_gradient = jax.tree.map(np.asarray, exact(jnp.asarray(logits, jnp.float64)))
    assert wanted_gradient.dtype == np.float64
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert np.isfinite(gradient).all()
    largest = np.abs(wanted_gradient).max(1, keepdims=True)
    assert (np.abs(gradient - wanted_gradient) <= 1e-5 * np.abs(wanted_gradient) + 1e-5 * largest + 1e-37).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_one_collapsed_token_spoils_no_gradient(score, dtype):
    """The output and all losses of a layer in which every logit of one token is about -60."""
    config = dataclasses.replace(
        CONFIG, score=score, sequence_loss_weight=0.1, z_loss_weight=0.01, dtype=dtype, num_groups=4, topk_groups=2
    )
    moe, x = layer(config), tokens(2, 8)
    weights = {name: getattr(moe, name)[...] for name in moe.weight_names}
    weights["router"] = weights["router"].at[0].set(-60.0)
    x[..., 0], x[1, 3, 0] = 0, 1

    def loss(weights):
        out, metrics = apply_moe(config, None, weights, jnp.asarray(x, dtype))
        return jnp.sum(out.astype(jnp.float32) ** 2) + metrics.aux_loss, metrics.num_nonfinite

    gradients, nonfinite = jax.jit(jax.grad(loss, has_aux=True))(weights)
    assert nonfinite == 0
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
    assert np.asarray(gradients["router"])[0].any()


def test_a_nan_in_the_router_is_seen():
    moe, x = layer(CONFIG), tokens(8).copy()
    x[3, 0], x[5, 1] = np.nan, np.inf
    _, metrics = run(moe, x, make_mesh((2,), ("ep",)))
    assert metrics.num_nonfinite == 2
    mask = jnp.asarray(np.arange(8) != 3)
    assert run(moe, x, make_mesh((2,), ("ep",)), mask=mask)[1].num_nonfinite == 1
