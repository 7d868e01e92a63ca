"""Routers: from scores to experts. Pure functions of one rank's logits; nothing is communicated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._numbers import as_int

SCORES = ("softmax", "sigmoid")


def top_k(
    logits: jax.Array,
    k: int,
    *,
    score: str = "softmax",
    bias: jax.Array | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The `k` best experts of each token and their weights.

    Args:
      logits: float `[T, E]`.
      k: experts per token, `1 <= k <= E`.
      score: "softmax" over all experts (Switch Transformer, arXiv:2101.03961) or "sigmoid" (DeepSeek-V3,
        arXiv:2412.19437).
      bias: float `[E]`, added to the scores for the choice only, never to the weights.
      normalize: divide the chosen weights by their sum; default only for sigmoid scores, as in DeepSeek-V3.
      scale: multiplies the weights.

    Returns:
      `topk_idx int32 [T, k]`, best first, ties to the lower expert; `topk_weights float32 [T, k]`.
    """
    if score not in SCORES:
        raise ValueError(f"top_k: score={score!r}: must be one of {SCORES}")
    logits = _check(logits, "top_k", "logits")
    k = _check_int(k, "k", "top_k", logits.shape[1], "E")
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + jax.lax.stop_gradient(_check_bias(bias, scores, "top_k"))
    _, idx = jax.lax.top_k(choice, k)
    return _weights(scores, idx, score == "sigmoid" if normalize is None else normalize, scale)


def group_limited_top_k(
    scores: jax.Array,
    k: int,
    *,
    num_groups: int = 8,
    topk_groups: int = 4,
    bias: jax.Array | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The `k` best experts among the `topk_groups` best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A group's score is the sum of its two best (biased) expert scores. With one group per node this bounds the nodes
    that a token reaches.

    Args:
      scores: float `[T, E]`, non-negative (for instance `jax.nn.sigmoid(logits)`); `E` divides by `num_groups`.
      k: experts per token; at most `topk_groups * E / num_groups`.
      num_groups, topk_groups: groups of consecutive experts, and how many of them a token may use.
      bias: float `[E]`, added for the choice only (auxiliary-loss-free balancing).
      normalize: divide the chosen scores by their sum. scale: multiplies the weights.

    Returns:
      `topk_idx int32 [T, k]`, best first; `topk_weights float32 [T, k]`.
    """
    caller = "group_limited_top_k"
    scores = _check(scores, caller, "scores")
    num_experts = scores.shape[-1]
    k = _check_int(k, "k", caller, num_experts, "E")
    num_groups = _check_int(num_groups, "num_groups", caller, num_experts, "E")
    if num_experts % num_groups:
        raise ValueError(f"{caller}: num_groups={num_groups}: must divide the {num_experts} experts")
    topk_groups = _check_int(topk_groups, "topk_groups", caller, num_groups, "num_groups")
    per_group = num_experts // num_groups
    if k > topk_groups * per_group:
        raise ValueError(
            f"{caller}: k={k}: {topk_groups} groups of {per_group} experts have only {topk_groups * per_group}"
        )
    choice = scores if bias is None else scores + jax.lax.stop_gradient(_check_bias(bias, scores, caller))
    grouped = choice.reshape(-1, num_groups, per_group)
    best_two, _ = jax.lax.top_k(grouped, min(2, per_group))
    _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), topk_groups)
    allowed = jnp.any(groups[:, :, None] == jnp.arange(num_groups)[None, None], axis=1)
    masked = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
    _, idx = jax.lax.top_k(masked, k)
    return _weights(scores, idx, normalize, scale)


def _weights(scores: jax.Array, idx: jax.Array, normalize: bool, scale: float) -> tuple[jax.Array, jax.Array]:
    weights = jnp.take_along_axis(scores, idx, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return idx.astype(jnp.int32), weights * scale


def _check(scores: jax.Array, caller: str, name: str) -> jax.Array:
    scores = jnp.asarray(scores)
    if scores.ndim != 2:
        raise ValueError(f"{caller}: {name} has shape {scores.shape}: must be [T, E]")
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"{caller}: {name} has dtype {scores.dtype}: must be a float dtype")
    return scores.astype(jnp.float32)


def _check_int(value: Any, name: str, caller: str, most: int, meaning: str) -> int:
    number = as_int(value)
    if number is None or not 1 <= number <= most:
        raise ValueError(f"{caller}: {name}={value!r}: must be an int in [1, {meaning}={most}]")
    return number


def _check_bias(bias: jax.Array, scores: jax.Array, caller: str) -> jax.Array:
    bias = jnp.asarray(bias)
    if bias.shape != scores.shape[1:]:
        raise ValueError(f"{caller}: bias has shape {bias.shape}: must be {scores.shape[1:]}, one entry per expert")
    return bias.astype(jnp.float32)[None]
