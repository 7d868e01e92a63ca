"""Routers against NumPy written from the papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm

T, E = 40, 16


def logits(seed=0):
    return np.random.default_rng(seed).standard_normal((T, E)).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, E])
def test_top_k(score, k):
    """The k largest, best first; sigmoid weights are normalised, softmax weights are not, unless told."""
    x = logits()
    scores = softmax(x) if score == "softmax" else sigmoid(x)
    idx, weights = xm.routing.top_k(x, k, score=score)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(idx, order)
    expected = np.take_along_axis(scores, order, 1)
    if score == "sigmoid":
        expected = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert idx.dtype == jnp.int32 and weights.dtype == jnp.float32


def test_ties_go_to_the_lower_expert():
    idx, _ = xm.routing.top_k(jnp.zeros((2, E)), 3)
    np.testing.assert_array_equal(idx, [[0, 1, 2]] * 2)


def test_bias_chooses_but_does_not_weigh():
    x = logits(1)
    bias = np.zeros(E, np.float32)
    bias[5] = 10
    idx, weights = xm.routing.top_k(x, 2, score="sigmoid", bias=bias, normalize=False, scale=2.5)
    assert (np.asarray(idx)[:, 0] == 5).all()
    np.testing.assert_allclose(weights[:, 0], 2.5 * sigmoid(x)[:, 5], rtol=1e-5)
    gradient = jax.grad(lambda b: jnp.sum(xm.routing.top_k(x, 2, score="sigmoid", bias=b)[1]))(bias)
    assert not np.asarray(gradient).any(), "the bias is not trained by gradient"


def test_group_limited_top_k():
    """DeepSeek-V3: groups ranked by the sum of their two best biased scores, then top-k inside the best groups."""
    num_groups, topk_groups, k = 4, 2, 3
    scores = sigmoid(logits(2))
    bias = np.random.default_rng(3).standard_normal(E).astype(np.float32) * 0.2
    idx, weights = xm.routing.group_limited_top_k(
        scores, k, num_groups=num_groups, topk_groups=topk_groups, bias=bias, scale=2.0
    )
    for token in range(T):
        biased = scores[token] + bias
        per_group = biased.reshape(num_groups, -1)
        best = np.argsort(-np.sort(per_group, axis=1)[:, -2:].sum(1), kind="stable")[:topk_groups]
        allowed = [e for e in range(E) if e // (E // num_groups) in best]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:k]
        assert np.asarray(idx)[token].tolist() == chosen
        share = scores[token][chosen]
        np.testing.assert_allclose(weights[token], 2.0 * share / share.sum(), rtol=1e-5)


def test_group_limit_bounds_the_nodes_of_a_token():
    scores = sigmoid(logits(4))
    idx, _ = xm.routing.group_limited_top_k(scores, 4, num_groups=8, topk_groups=2, normalize=False)
    nodes = {tuple(sorted(set((row // 2).tolist()))) for row in np.asarray(idx)}
    assert max(map(len, nodes)) == 2


def test_router_gradient_reaches_the_logits():
    gradient = jax.grad(lambda x: jnp.sum(xm.routing.top_k(x, 2)[1] ** 2))(logits(5))
    assert np.isfinite(gradient).all() and np.asarray(gradient).any(axis=1).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int16, jnp.uint32])
def test_weights_at_indices_of_any_dtype_that_names_every_expert(dtype):
    """uint8 names 256 experts, and 256 itself is no number of it."""
    x = np.random.default_rng(6).standard_normal((4, 256)).astype(np.float32)
    idx = jnp.asarray([[0, 255], [17, 3], [254, 128], [127, 1]], dtype)
    expected = np.take_along_axis(softmax(x), np.asarray(idx, int), 1)
    np.testing.assert_allclose(xm.routing.chosen_weights(x, idx), expected, rtol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_choice_where_scores_are_all_0_or_1(score, groups):
    """float32 has one sigmoid for 30 and 40, and one softmax for -200 and -300: the logits still have an order."""
    x = np.stack([30 + np.arange(E), -20.0 * np.arange(E)]).astype(np.float32)
    idx, _ = xm.routing.group_limited_top_k(x, 3, num_groups=groups, topk_groups=groups, score=score)
    np.testing.assert_array_equal(idx, [[E - 1, E - 2, E - 3], [0, 1, 2]])
    np.testing.assert_array_equal(xm.routing.top_k(x, 3, score=score)[0], idx)


def test_groups_by_their_best_expert():
    """DeepSeek-V2: groups ranked by their best expert, where DeepSeek-V3 ranks by the sum of two."""
    x = logits(6)
    grouped = softmax(x).reshape(T, 4, 4)
    choices = {}
    for best in (1, 2):
        idx, weights = xm.routing.group_limited_top_k(
            x, 2, num_groups=4, topk_groups=1, group_best=best, score="softmax", normalize=False, scale=16.0
        )
        group = np.sort(grouped, axis=-1)[..., -best:].sum(-1).argmax(-1)
        inside = np.argsort(-grouped[np.arange(T), group], axis=-1)[:, :2]
        np.testing.assert_array_equal(idx, 4 * group[:, None] + inside)
        np.testing.assert_allclose(weights, 16 * np.take_along_axis(softmax(x), np.asarray(idx), 1), rtol=1e-5)
        choices[best] = np.asarray(idx)
    assert (choices[1] != choices[2]).any()


def test_a_least_sum_of_softmax_scores():
    """ERNIE 4.5 divides by `max(sum, 1e-12)`: of scores that a bias chose, far below, little is left."""
    x = np.zeros((3, E), np.float32)
    x[:, 0] = [0.0, 25.0, 60.0]
    chosen = np.tile([[4, 5, -1]], (3, 1))
    scores = softmax(x.astype(np.float64))[:, 4]
    expected = scores / np.maximum(2 * scores, 1e-12)

    @jax.jit
    def weights(x):
        return xm.routing.chosen_weights(x, chosen, normalize=True, min_sum=1e-12)

    got = np.asarray(weights(x))
    np.testing.assert_allclose(got[:, :2], np.stack([expected, expected], 1), rtol=1e-5)
    np.testing.assert_array_equal(got[:, 2], 0)
    assert got[0, 0] == 0.5 and got[1, 0] == 0.5 and 0 < got[2, 0] < 1e-13
    gradient = np.asarray(jax.jit(jax.grad(lambda x: weights(x)[:, 0].sum()))(x))
    np.testing.assert_allclose(gradient[:, 4], [0.25, 0.25, expected[2]], rtol=1e-5)
    np.testing.assert_allclose(gradient[:, 0], [0.0, 0.0, -expected[2]], rtol=1e-5, atol=1e-30)


def test_sparsemixer():
    """Slot by slot: the softmax over the remaining experts within 2 * eps of the best, as torch has it for
    Phi-3.5-MoE."""
    x, eps = logits(8) + np.where(np.arange(T) % 2, 2.0, -2.0).astype(np.float32)[:, None], 0.2
    idx = np.argsort(-x, axis=1)[:, :2]
    expected = np.zeros((T, 2))
    for t in range(T):
        left = x[t].astype(np.float64)
        for slot in range(2):
            best = left.max()
            near = (best - x[t]) / np.maximum(np.abs(x[t]), best) <= 2 * eps
            shares = np.where(near & (left > -np.inf), np.exp(left - best), 0)
            expected[t, slot] = shares[idx[t, slot]] / shares.sum()
            left[idx[t, slot]] = -np.inf
    weights = xm.routing.sparsemixer_weights(x, idx, eps)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert 0.1 < (expected < 0.999).mean() < 0.9, "some have rivals, some have none"
    # another choice than the best: weights of experts that are too far are 0, and so are those of unused slots
    given = np.stack([np.argmin(x, axis=1), np.full(T, -1)], axis=1)
    np.testing.assert_array_equal(xm.routing.sparsemixer_weights(x, given, eps), 0)
    assert np.isfinite(jax.grad(lambda x: xm.routing.sparsemixer_weights(x, idx, eps).sum())(x)).all()
