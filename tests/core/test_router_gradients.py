"""Router weights and their gradients against float64, far from where scores are comfortable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm

T, E, K = 24, 8, 3
TINY = float(np.finfo(np.float32).tiny)
# Distances of the logits from zero, and from each other.
LOGITS = {
    "usual": (0.0, 1.0),
    "around -30": (-30.0, 3.0),
    "around -46": (-46.0, 1.0),
    "around -50": (-50.0, 2.0),
    "around -80": (-80.0, 5.0),
    "around -100": (-100.0, 2.0),
    "far apart": (0.0, 30.0),
    "one 46 above": (0.0, 1.0),
    "one 95 above": (0.0, 1.0),
    "around 60": (60.0, 3.0),
}
CHOICES = ("top_k", "bias", "groups", "pruned", "given")


def make_logits(name, dtype):
    mean, spread = LOGITS[name]
    x = mean + spread * np.random.default_rng(len(name)).standard_normal((T, E))
    if "above" in name:
        x[:, -1] += float(name.split()[1])
    return jnp.asarray(x, dtype)


def choose(choice, score, normalize, logits):
    """`(topk_idx, topk_weights)` by the public functions."""
    options = {"score": score, "normalize": normalize, "scale": 2.5}
    bias = jnp.where(jnp.arange(E) == E - 1, -9.0, 0.0)  # never the best
    if choice == "top_k":
        return xm.routing.top_k(logits, K, **options)
    if choice == "bias":
        return xm.routing.top_k(logits, K, bias=bias, **options)
    if choice == "groups":
        return xm.routing.group_limited_top_k(logits, K, num_groups=4, topk_groups=2, bias=bias, **options)
    if choice == "pruned":
        return xm.routing.top_k(logits, K, bias=jnp.where(jnp.arange(E) < E - 2, -jnp.inf, 0.0), **options)
    idx = jnp.asarray(np.random.default_rng(7).permuted(np.tile(np.arange(E - 1), (T, 1)), axis=1)[:, :K])
    return idx, xm.routing.chosen_weights(logits, idx, **options)


def exact(logits, idx, score, normalize, cotangent):
    """The formulas in float64, and the gradient of the logits in closed form."""
    x = np.asarray(logits, np.float64)
    idx = np.asarray(idx)
    used = idx >= 0
    at = np.where(used, idx, 0)
    chosen = np.take_along_axis(x, at, 1)
    cotangent = 2.5 * np.where(used, cotangent, 0.0).astype(np.float64)
    gradient = np.zeros_like(x)
    if score == "softmax" and not normalize:
        scores = np.exp(x - x.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        weights = np.where(used, np.take_along_axis(scores, at, 1), 0.0)
        np.put_along_axis(gradient, at, cotangent, 1)
        for row in range(T):  # sums over pairs: no difference of nearly equal numbers
            p, g = scores[row], gradient[row].copy()
            gradient[row] = [p[i] * np.sum(p * (g[i] - g)) for i in range(E)]
        return 2.5 * weights, gradient
    if score == "sigmoid":
        scores = np.where(used, 1 / (1 + np.exp(-chosen)), 0.0)
        slope, rest = 1 / (1 + np.exp(chosen)), 1e-20  # of the score's logarithm
    else:
        scores = np.where(used, np.exp(chosen - np.where(used, chosen, -np.inf).max(1, keepdims=True)), 0.0)
        slope, rest = np.ones_like(chosen), 0.0
    if normalize:
        total = scores.sum(1, keepdims=True) + rest
        weights = scores / total
        differences = cotangent[:, :, None] - cotangent[:, None, :]
        by_score = weights * ((differences * weights[:, None, :]).sum(-1) + cotangent * rest / total)
    else:
        weights, by_score = scores, cotangent * scores
    for row, slot in np.argwhere(used):
        gradient[row, idx[row, slot]] += by_score[row, slot] * slope[row, slot]
    return 2.5 * weights, gradient


def assert_close(got, wanted, loose=0.0):
    """To 1e-5 of each number, but for those that are, or come from, numbers below float32's smallest normal one."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    error = np.abs(got - wanted) - (1e-5 * np.abs(wanted) + 10 * TINY + loose)
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= 0, f"{got[worst]} where {wanted[worst]} is right, at {worst}"


def pulled(choice, score, normalize, cotangent):
    """`logits -> (idx, weights, gradient of the logits)`, compiled."""

    @jax.jit
    def run(logits):
        weights, pull, idx = jax.vjp(lambda x: choose(choice, score, normalize, x)[::-1], logits, has_aux=True)
        return idx, weights, pull(jnp.asarray(cotangent))[0]

    return run


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("choice", CHOICES)
def test_weights_and_gradients_are_those_of_float64(choice, score, normalize):
    cotangent = np.random.default_rng(11).standard_normal((T, K)).astype(np.float32)
    run = pulled(choice, score, normalize, cotangent)
    for name in LOGITS:
        logits = make_logits(name, jnp.float32)
        idx, weights, gradient = run(logits)
        wanted_weights, wanted_gradient = exact(logits, idx, score, normalize, cotangent)
        assert_close(weights, wanted_weights)
        # cotangents that nearly cancel leave the rounding of the largest
        assert_close(gradient, wanted_gradient, 1e-5 * np.abs(wanted_gradient).max(1, keepdims=True))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("choice", CHOICES)
def test_narrow_logits(choice, score, dtype):
    """The computation is in float32, and only the gradient is rounded to the logits' dtype."""
    cotangent = np.random.default_rng(12).standard_normal((T, K)).astype(np.float32)
    run = pulled(choice, score, True, cotangent)
    for name in ("around -50", "one 46 above"):
        logits = make_logits(name, dtype)
        idx, weights, gradient = run(logits)
        wanted_weights, wanted_gradient = exact(logits, idx, score, True, cotangent)
        assert_close(weights, wanted_weights)
        assert gradient.dtype == dtype and np.isfinite(np.asarray(gradient, np.float32)).all()
        half_ulp = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted_gradient, rtol=half_ulp, atol=1e-6)


@pytest.mark.parametrize("logit", [-20.0, -46.0, -50.0, -80.0])
def test_scores_that_the_caller_made(logit):
    """`group_limited_top_k` of `jax.nn.sigmoid(logits)`, the gradient down to the logits."""
    logits = jnp.asarray(logit + np.random.default_rng(1).standard_normal((T, E)), jnp.float32)
    cotangent = np.random.default_rng(2).standard_normal((T, K)).astype(np.float32)

    def weights_of(logits):
        idx, weights = xm.routing.group_limited_top_k(jax.nn.sigmoid(logits), K, num_groups=4, topk_groups=2, scale=2.5)
        return weights, idx

    weights, pull, idx = jax.vjp(jax.jit(weights_of), logits, has_aux=True)
    wanted_weights, wanted_gradient = exact(logits, idx, "sigmoid", True, cotangent)
    assert_close(weights, wanted_weights)
    largest = np.abs(wanted_gradient).max(1, keepdims=True)
    assert_close(pull(jnp.asarray(cotangent))[0], wanted_gradient, 1e-5 * largest)


def test_forward_mode_and_second_derivatives():
    logits = make_logits("around -50", jnp.float32)[:2]
    f = lambda x: jnp.sum(xm.routing.top_k(x, 2, score="sigmoid")[1] ** 2)  # noqa: E731
    forward, backward = (jax.jit(derivative(f))(logits) for derivative in (jax.jacfwd, jax.grad))
    np.testing.assert_allclose(forward, backward, rtol=1e-5)
    second = jax.jit(jax.hessian(f))(logits)
    assert np.isfinite(second).all() and np.asarray(second).any()


def choices_of_pruned(bias, scores, k, **groups):
    if groups:
        return xm.routing.group_limited_top_k(scores, k, bias=bias, **groups)
    return xm.routing.top_k(scores, k, score="sigmoid", bias=bias)


@pytest.mark.parametrize(
    "groups", [{}, {"num_groups": 4, "topk_groups": 2}, {"num_groups": 8, "topk_groups": 3}], ids=str
)
@pytest.mark.parametrize("left", [(), (5,), (0, 7), (1, 2, 3), (0, 2, 4, 6)], ids=str)
def test_a_pruned_expert_is_never_chosen(left, groups):
    """A bias of -inf: groups by the experts that are left, and unused slots where too few are."""
    scores = np.random.default_rng(3).random((T, E)).astype(np.float32)
    bias = np.full(E, -np.inf, np.float32)
    bias[list(left)] = 0.0
    idx, weights = map(np.asarray, choices_of_pruned(bias, scores, K, **groups))
    size = E // groups.get("num_groups", 1)
    for token in range(T):
        totals = {}
        for group in range(E // size):
            alive = sorted((scores[token, e] for e in left if e // size == group), reverse=True)
            if alive:
                totals[group] = sum(alive[:2])
        best = sorted(totals, key=lambda group: -totals[group])[: groups.get("topk_groups", 1)]
        wanted = sorted((e for e in left if e // size in best), key=lambda e: -scores[token, e])[:K]
        assert idx[token].tolist() == wanted + [-1] * (K - len(wanted))
        assert (weights[token, len(wanted) :] == 0).all()
        if wanted:
            assert weights[token].sum() == pytest.approx(1.0, rel=1e-6)


def test_nothing_to_choose_from_is_no_nan():
    """All logits of a token -inf: unused slots, no weight, no gradient."""
    logits = jnp.full((2, E), -jnp.inf).at[1, 3].set(1.0)
    for score in ("softmax", "sigmoid"):
        for normalize in (True, False):
            total = lambda x: jnp.sum(xm.routing.top_k(x, 2, score=score, normalize=normalize)[1])  # noqa: B023, E731
            route = functools.partial(xm.routing.top_k, k=2, score=score, normalize=normalize)
            idx, weights = jax.jit(route)(logits)
            assert idx.tolist() == [[-1, -1], [3, -1]]
            assert weights[0].tolist() == [0, 0] and weights[1, 0] > 0.5
            assert np.isfinite(jax.jit(jax.grad(total))(logits)).all()
