"""Routers: from scores to experts. Pure functions of one rank's logits; nothing is communicated.

Tokens may have several dimensions: `logits [..., E]` give `topk_idx` and `topk_weights` `[..., k]`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _layout, _validate
from xen_moe_jax._numbers import as_int, is_one_of, plain

SCORES = ("softmax", "sigmoid")
FLOOR = 1e-20
"""Added to the sum of the chosen scores before weights are divided by it (DeepSeek-V3). Softmax weights need none."""


def _of_any_tokens[Router: Callable[..., Any]](router: Router) -> Router:
    """A router of `[T, E]` for `[..., E]`: tokens of several dimensions are routed as `T` tokens, and the results get
    these dimensions.
    """
    first = next(iter(inspect.signature(router).parameters))

    @functools.wraps(router)
    def of_any_tokens(*args: Any, **kwargs: Any) -> Any:
        dims = getattr(args[0] if args else kwargs.get(first), "shape", ())[:-1]
        if len(dims) < 2:
            return router(*args, **kwargs)

        def flat(value: Any) -> Any:
            if getattr(value, "ndim", 0) < 2:
                return value
            if value.shape[:-1] != dims:
                raise ValueError(
                    f"{router.__name__}: an array has shape {value.shape}: its tokens must have the dimensions "
                    f"{dims} of those of {first}"
                )
            return value.reshape(-1, value.shape[-1])

        if "scale" in kwargs:
            scale = _validate.array(kwargs["scale"], router.__name__, "scale")
            wide = (*dims, scale.shape[-1]) if scale.ndim > 1 else scale.shape
            kwargs["scale"] = _broadcast(scale, wide, router.__name__)
        out = router(*map(flat, args), **{name: flat(value) for name, value in kwargs.items()})
        return jax.tree.map(lambda result: result.reshape(*dims, result.shape[-1]), out)

    return of_any_tokens  # type: ignore[return-value]


@_of_any_tokens
def top_k(
    logits: jax.Array,
    k: int,
    *,
    score: str = "softmax",
    bias: jax.Array | None = None,
    normalize: bool | None = None,
    scale: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The `k` best experts of each token and their weights.

    Args:
      logits: float `[T, E]`. An expert whose logit is -inf is never chosen.
      k: experts per token, `1 <= k <= E`.
      score: "softmax" over all experts (Switch Transformer, arXiv:2101.03961) or "sigmoid" (DeepSeek-V3,
        arXiv:2412.19437).
      bias: float `[E]`, added to the scores for the choice only, never to the weights. An expert whose bias is -inf (a
        pruned expert) is never chosen.
      normalize: divide the chosen weights by their sum; default only for sigmoid scores, as in DeepSeek-V3.
      scale: multiplies the weights: one real number, or an array that broadcasts to them; it may be traced.

    Returns:
      `topk_idx int32 [T, k]`, best first, ties to the lower expert; `topk_weights float32 [T, k]` as `chosen_weights`
      gives them. Where fewer than `k` experts can be chosen, the last slots are unused: -1 with weight 0.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    logits = _check(logits, "top_k", "logits")
    k = _check_int(k, "k", "top_k", logits.shape[1], "E")
    choice = _choice(logits, _check_score(score, "top_k"), bias, "top_k", whole=True)
    topk_idx = _best(choice, k)
    factor = _check_scale(scale, topk_idx.shape, "top_k")
    return topk_idx, chosen_weights(logits, topk_idx, score=score, normalize=normalize, scale=factor)


@_of_any_tokens
def group_limited_top_k(
    scores: jax.Array,
    k: int,
    *,
    num_groups: int = 8,
    topk_groups: int = 4,
    bias: jax.Array | None = None,
    normalize: bool = True,
    scale: float | jax.Array = 1.0,
    score: str | None = None,
    group_best: int = 2,
) -> tuple[jax.Array, jax.Array]:
    """The `k` best experts among the `topk_groups` best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A group's score is the sum of its `group_best` best (biased) expert scores. With one group per node this bounds the
    nodes that a token reaches.

    Args:
      scores: float `[T, E]`, non-negative (for instance `jax.nn.sigmoid(logits)`), or logits with `score`; `E` divides
        by `num_groups`.
      k: experts per token; at most `topk_groups * E / num_groups`.
      num_groups, topk_groups: groups of consecutive experts, and how many of them a token may use.
      bias: float `[E]`, added for the choice only (auxiliary-loss-free balancing). An expert whose bias is -inf (a
        pruned expert) is never chosen; a group with fewer than `group_best` experts left has the sum of theirs.
      normalize: divide the chosen scores by their sum. scale: as in `top_k`.
      score: None where `scores` are scores; "softmax" or "sigmoid" where they are logits. With logits, weights and
        gradients are right where scores leave the range of their dtype: float16 scores below 1.5e-5 have a gradient
        beyond float16.
      group_best: experts that a group's score is made of: 2 in DeepSeek-V3, 1 in DeepSeek-V2 (arXiv:2405.04434, section
        2.2.2). Groups with fewer experts are scored by all of them.

    Returns:
      `topk_idx int32 [T, k]`, best first; `topk_weights float32 [T, k]`. Where fewer than `k` experts of the chosen
      groups can be chosen, the last slots are unused: -1 with weight 0.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    caller = "group_limited_top_k"
    given = _check(scores, caller, "scores")
    num_experts = given.shape[-1]
    k = _check_int(k, "k", caller, num_experts, "E")
    factor = _check_scale(scale, (given.shape[0], k), caller)
    _validate.boolean(normalize, "normalize", caller)
    num_groups = _check_int(num_groups, "num_groups", caller, num_experts, "E")
    if num_experts % num_groups:
        raise ValueError(f"{caller}: num_groups={num_groups}: must divide the {num_experts} experts")
    topk_groups = _check_int(topk_groups, "topk_groups", caller, num_groups, "num_groups")
    group_best = _validate.integer(group_best, "group_best", caller, minimum=1)
    per_group = num_experts // num_groups
    if k > topk_groups * per_group:
        raise ValueError(
            f"{caller}: k={k}: {topk_groups} groups of {per_group} experts have only {topk_groups * per_group}"
        )
    if score is None:
        choice = _biased(given, given, bias, caller)
    else:
        choice = _choice(given, _check_score(score, caller), bias, caller, whole=topk_groups == num_groups)
    if topk_groups < num_groups:
        grouped = choice.reshape(-1, num_groups, per_group)
        best, _ = jax.lax.top_k(grouped, min(group_best, per_group))
        # Experts that a group lacks count as a score of 0; a group with none left is never chosen.
        best = jnp.where((best == -jnp.inf) & (best[..., :1] > -jnp.inf), 0.0, best)
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), topk_groups)
        allowed = jnp.any(groups[:, :, None] == jnp.arange(num_groups)[None, None], axis=1)
        choice = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
    topk_idx = _best(choice, k)
    if score is None:
        return topk_idx, _weights_of_scores(given, topk_idx, normalize) * factor
    return topk_idx, chosen_weights(given, topk_idx, score=score, normalize=normalize, scale=factor)


@_of_any_tokens
def chosen_weights(
    logits: jax.Array,
    topk_idx: jax.Array,
    *,
    score: str = "softmax",
    normalize: bool | None = None,
    scale: float | jax.Array = 1.0,
    min_sum: float = 0.0,
) -> jax.Array:
    """Router weights of experts that are chosen already: by `top_k`, by a hash, or by a rollout that is replayed.

    Normalized softmax weights are the softmax over the chosen logits alone. Normalized sigmoid weights are
    `sigmoid(l_i) / (sum_j sigmoid(l_j) + 1e-20)`. Both are computed from the logits without leaving float32's range, so
    that values and gradients are right however far the chosen logits are below the remaining logits, or below zero.

    Args:
      logits: float `[T, E]`.
      topk_idx: integer `[T, K]` of any dtype that can name every expert; an entry outside `[0, E)` is an unused slot.
      score, normalize, scale: as in `top_k`.
      min_sum: normalized softmax weights are divided by `max(sum, min_sum)` (ERNIE 4.5: 1e-12, which matters where a
        bias chooses experts whose scores are next to nothing).

    Returns:
      float32 `[T, K]`; 0 for unused slots.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    caller = "chosen_weights"
    logits = _check(logits, caller, "logits")
    _check_score(score, caller)
    topk_idx, _ = _validate.routing(topk_idx, None, logits.shape[:-1], caller)
    _validate.names_every_expert(topk_idx, logits.shape[1], caller)
    topk_idx = _layout.sanitize(topk_idx, logits.shape[1])
    factor = _check_scale(scale, topk_idx.shape, caller)
    normalize = _validate.boolean(normalize, "normalize", caller, optional=True)
    normalize = score == "sigmoid" if normalize is None else normalize
    if _check_number(min_sum, "min_sum", caller) and not (normalize and score == "softmax"):
        raise ValueError(
            f"{caller}: min_sum={min_sum!r}: only score='softmax' with normalize=True divides by a sum that it bounds"
        )
    if not normalize:
        return _take(router_scores(logits, score), topk_idx)[0] * factor
    chosen, used = _take(logits, topk_idx)
    if score == "sigmoid":
        return _shares(jax.nn.log_sigmoid(chosen), used, math.log(FLOOR)) * factor
    shares = _shares(chosen, used, None)
    return (_not_above(shares, logits, topk_idx, min_sum) if min_sum else shares) * factor


@_of_any_tokens
def sparsemixer_weights(logits: jax.Array, topk_idx: jax.Array, eps: float = 0.01) -> jax.Array:
    """Router weights of SparseMixer-v2 at inference (GRIN MoE, arXiv:2409.12136; Phi-3.5-MoE).

    The weight of a slot is the expert's softmax among the experts that the slots before it left over and whose logit is
    near the best one left: `(best - l) / max(|l|, best) <= 2 * eps`. A weight may be 1 for every slot, and 0 for an
    expert that is not near. Gradients are those of this formula, not of the estimator that trained the model.

    Args:
      logits: float `[T, E]`.
      topk_idx: integer `[T, K]`, in the order of choice, best first; an entry outside `[0, E)` is an unused slot.
      eps: half of the relative distance that counts as near ("router_jitter_noise" in Phi-3.5-MoE's config).

    Returns:
      float32 `[T, K]`; 0 for unused slots.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    caller = "sparsemixer_weights"
    logits = _check(logits, caller, "logits")
    topk_idx, _ = _validate.routing(topk_idx, None, logits.shape[:-1], caller)
    _validate.names_every_expert(topk_idx, logits.shape[1], caller)
    topk_idx = _layout.sanitize(topk_idx, logits.shape[1])
    _check_number(eps, "eps", caller)
    left, weights = logits, []
    for slot in range(topk_idx.shape[1]):
        chosen = topk_idx[:, slot : slot + 1]
        best = jnp.max(left, axis=-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * eps
        weights.append(_take(softmax(jnp.where(far, -jnp.inf, left)), chosen)[0])
        left = jnp.where(chosen == jnp.arange(logits.shape[1]), -jnp.inf, left)
    return jnp.concatenate(weights, axis=-1)


def router_scores(logits: jax.Array, score: str) -> jax.Array:
    """Returns the softmax or the sigmoid, as `score` says, of float `logits [..., E]`: float32 `[..., E]`, with
    derivatives that are right to the last digits.

    JAX's own derivatives multiply `p * (1 - p)`, which loses all digits where `p` is nearly 1.

    Raises:
      ValueError: `score` is unknown, or `logits` have no dimension. TypeError: `logits` are no floats.
    """
    logits = _check(logits, "router_scores", "logits", any_tokens=True)
    return _sigmoid(logits) if _check_score(score, "router_scores") == "sigmoid" else softmax(logits)


@jax.custom_jvp
def _sigmoid(logits: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(logits)


@_sigmoid.defjvp
def _sigmoid_jvp(primals: Any, tangents: Any) -> Any:
    (logits,), (tangent,) = primals, tangents
    scores = _sigmoid(logits)
    return scores, scores * jax.nn.sigmoid(-logits) * tangent


@jax.custom_jvp
def softmax(logits: jax.Array) -> jax.Array:
    """Softmax over the last axis; all logits -inf count as all equal."""
    some = jnp.any(logits != -jnp.inf, axis=-1, keepdims=True)
    return jax.nn.softmax(jnp.where(some, logits, 0.0), axis=-1)


@softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
    """Softmax does not change when all logits move alike: so tangents count from that of the largest logit, and its
    probability, which may be nearly 1, is multiplied by zero."""
    (logits,), (tangent,) = primals, tangents
    scores = softmax(logits)
    largest = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=bool)
    moved = tangent - jnp.sum(jnp.where(largest, tangent, 0.0), axis=-1, keepdims=True)
    moved = jnp.where(largest, 0.0, moved)
    return scores, scores * (moved - jnp.sum(scores * moved, axis=-1, keepdims=True))


def _choice(logits: jax.Array, score: str, bias: jax.Array | None, caller: str, whole: bool) -> jax.Array:
    """Returns the numbers that order the experts: scores plus `bias`. Where neither a bias nor groups (`whole`: no
    groups) make more of scores than their order, it is the logits, whose order is the same where scores are rounded to
    0 or 1.
    """
    if bias is None and whole:
        return jax.lax.stop_gradient(logits)
    return _biased(router_scores(logits, score), logits, bias, caller)


def _biased(scores: jax.Array, given: jax.Array, bias: jax.Array | None, caller: str) -> jax.Array:
    """Scores for the choice, -inf for experts that cannot be chosen; `given` are the caller's scores, -inf for these
    experts."""
    scores = jnp.where(given == -jnp.inf, -jnp.inf, jax.lax.stop_gradient(scores))
    return scores if bias is None else scores + jax.lax.stop_gradient(_check_bias(bias, scores, caller))


def _best(choice: jax.Array, k: int) -> jax.Array:
    """Chosen experts, int32 `[T, k]`, the best first; -1 for slots for which only experts at -inf are left."""
    values, idx = jax.lax.top_k(choice, k)
    return jnp.where(values == -jnp.inf, -1, idx.astype(jnp.int32))


def _take(values: jax.Array, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`values [T, E]` at sanitized `topk_idx [T, K]`, 0 for unused slots; and bool `[T, K]`, which slots are used."""
    used = topk_idx >= 0
    return jnp.where(used, jnp.take_along_axis(values, jnp.maximum(topk_idx, 0), axis=-1), 0.0), used


def _weights_of_scores(scores: jax.Array, topk_idx: jax.Array, normalize: bool) -> jax.Array:
    chosen, used = _take(scores, topk_idx)
    if not normalize:
        return chosen
    # Scores of 1e-22 are numbers like others, and so are their weights: everything is divided by the largest.
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(chosen, axis=-1, keepdims=True), FLOOR))
    return _over_sum(chosen / largest, FLOOR / largest)


def _shares(log_scores: jax.Array, used: jax.Array, log_floor: float | None) -> jax.Array:
    """`exp(a_i) / (sum_j exp(a_j) + exp(log_floor))` over the used slots of each row; 0 for unused slots."""
    lowest = -jnp.inf if log_floor is None else log_floor
    top = jnp.max(jnp.where(used, log_scores, -jnp.inf), axis=-1, keepdims=True, initial=lowest)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    parts = jnp.where(used, jnp.exp(jnp.where(used, log_scores, top) - top), 0.0)
    if log_floor is not None:
        return _over_sum(parts, jnp.exp(log_floor - top))
    return _over_sum(parts, jnp.where(jnp.any(used, axis=-1, keepdims=True), 0.0, 1.0))


def _not_above(shares: jax.Array, logits: jax.Array, topk_idx: jax.Array, min_sum: float) -> jax.Array:
    """`shares`, or `softmax(logits) / min_sum` of the chosen where their softmax adds up to less than `min_sum`."""
    some = jnp.any(logits != -jnp.inf, axis=-1, keepdims=True)
    logs, used = _take(jax.nn.log_softmax(jnp.where(some, logits, 0.0), axis=-1), topk_idx)
    total = jax.nn.logsumexp(jnp.where(used, jax.lax.stop_gradient(logs), -jnp.inf), axis=-1, keepdims=True)
    small = jnp.where(used, jnp.exp(jnp.minimum(logs - math.log(min_sum), 0.0)), 0.0)
    return jnp.where(total > math.log(min_sum), shares, small)


@jax.custom_jvp
def _over_sum(parts: jax.Array, rest: jax.Array) -> jax.Array:
    """`parts [T, K] / (sum(parts) + rest)`, `rest [T, 1]`, of which the largest is about 1. `rest` has no gradient."""
    return parts / (jnp.sum(parts, axis=-1, keepdims=True) + rest)


@_over_sum.defjvp
def _over_sum_jvp(primals: Any, tangents: Any) -> Any:
    """With `others_i` for the sum but for `parts_i`, the tangent is `(others_i * dp_i - parts_i * sum_{j != i} dp_j) /
    sum**2`: no difference of nearly equal numbers, where one weight is nearly 1."""
    parts, rest = primals
    total = jnp.sum(parts, axis=-1, keepdims=True) + rest
    self = jnp.eye(parts.shape[-1], dtype=bool)

    def of_others(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(self, 0.0, a[..., None, :]), axis=-1)

    tangent = (of_others(parts) + rest) * tangents[0] - parts * of_others(tangents[0])
    return _over_sum(parts, rest), tangent / (total * total)


def _check(scores: jax.Array, caller: str, name: str, any_tokens: bool = False) -> jax.Array:
    scores = _validate.array(scores, caller, name)
    if scores.ndim == 0 if any_tokens else scores.ndim != 2:
        raise ValueError(f"{caller}: {name} has shape {scores.shape}: must be {'[..., E]' if any_tokens else '[T, E]'}")
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"{caller}: {name} has dtype {scores.dtype}: must be a float dtype")
    return scores.astype(jnp.float32)


def _check_score(score: Any, caller: str) -> str:
    if not is_one_of(score, SCORES):
        raise ValueError(f"{caller}: score={score!r}: must be one of {SCORES}")
    return score


def _check_scale(scale: Any, weights: tuple[int, ...], caller: str) -> jax.Array:
    """Returns `scale` as a float32 array. Raises TypeError unless it holds real numbers, and ValueError unless it
    broadcasts to the shape `weights`."""
    scale = _validate.array(scale, caller, "scale")
    if not jnp.issubdtype(scale.dtype, jnp.floating) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"{caller}: scale has dtype {scale.dtype}: must be real numbers")
    _broadcast(scale, weights, caller)
    return scale.astype(jnp.float32)


def _broadcast(scale: jax.Array, shape: tuple[int, ...], caller: str) -> jax.Array:
    try:
        return jnp.broadcast_to(scale, shape)
    except ValueError:
        raise ValueError(
            f"{caller}: scale has shape {scale.shape}: must be one number, or an array that broadcasts to {shape}"
        ) from None


def _check_int(value: Any, name: str, caller: str, most: int, meaning: str) -> int:
    number = as_int(value)
    if number is None or not 1 <= number <= most:
        raise ValueError(f"{caller}: {name}={value!r}: must be an int in [1, {meaning}={most}]")
    return number


def _check_number(value: Any, name: str, caller: str) -> float:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{caller}: {name}={value!r}: must be a finite number >= 0")
    return float(value)


def _check_bias(bias: jax.Array, scores: jax.Array, caller: str) -> jax.Array:
    bias = _validate.array(bias, caller, "bias")
    if bias.shape != scores.shape[1:]:
        raise ValueError(f"{caller}: bias has shape {bias.shape}: must be {scores.shape[1:]}, one entry per expert")
    return bias.astype(jnp.float32)[None]
