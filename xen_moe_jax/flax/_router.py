"""The router: logits, scores, choice of experts and their weights, for one rank's tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import routing
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._logits import router_logits
from xen_moe_jax.flax._parameters import ROUTER_BIAS

TOPK_IDX = "xen_moe_topk_idx"
"""`checkpoint_name` of the chosen experts: under a policy that saves it, the backward pass does not choose again."""


class Routing(NamedTuple):
    """Choice of experts for one rank's tokens.

    Attributes:
      topk_idx: int32 `[T, K]`, `-1` for unused slots and left-out tokens.
      topk_weights: float32 `[T, K]`.
      scores: float32 `[T, E]`.
      logits: float32 `[T, E]`, or None with score="uniform".
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    scores: jax.Array
    logits: jax.Array | None


def route(
    config: MoEConfig,
    weights: dict[str, Any],
    x: jax.Array,
    mask: jax.Array,
    token_ids: jax.Array | None,
    topk_idx: jax.Array | None = None,
) -> Routing:
    """Chooses experts, or weighs the given ones.

    Args:
      weights: `router` float32 `[H, E]`; `logits_bias` and `router_bias` float32 `[E]` where the layer has them. The
        latter is added to the scores for the choice only.
      x: tokens `[T, H]`.
      mask: bool `[T]`, False for tokens to leave out.
      token_ids: integer `[T]` with choice="hash".
      topk_idx: int32 `[T, K]` of `as_given`, experts to use in place of the router's choice.
    """
    logits = None
    if config.score == "uniform":
        scores = jnp.ones((x.shape[0], config.num_experts), jnp.float32)
    else:
        logits = router_logits(x, weights["router"])
        if config.logits_bias:
            logits = logits + weights["logits_bias"][None, :]
        scores = routing.router_scores(logits, softmax_or_sigmoid(config))
    if topk_idx is None and config.choice == "hash":
        assert token_ids is not None  # apply_moe has checked
        topk_idx = hashed_experts(token_ids, config.num_experts, config.top_k)
    elif topk_idx is None:
        assert logits is not None  # the config has been checked
        topk_idx, _ = routing.group_limited_top_k(
            logits,
            config.top_k,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            bias=weights.get(ROUTER_BIAS),
            score=softmax_or_sigmoid(config),
            group_best=config.group_best,
        )
    topk_idx = checkpoint_name(topk_idx, TOPK_IDX)
    topk_weights = _weights(config, logits, topk_idx)
    return Routing(jnp.where(mask[:, None], topk_idx, -1), topk_weights, scores, logits)


def as_given(config: MoEConfig, topk_idx: jax.Array) -> jax.Array:
    """Returns int32 `topk_idx` with -1 for every entry outside `[0, E)`. The dtype can name every expert."""
    if jnp.iinfo(topk_idx.dtype).max > jnp.iinfo(jnp.int32).max:  # uint32, int64, uint64: a cast would wrap around
        known = (topk_idx >= 0) & (topk_idx < config.num_experts)
        topk_idx = jnp.where(known, topk_idx, jnp.asarray(config.num_experts, topk_idx.dtype))
    topk_idx = topk_idx.astype(jnp.int32)
    return jnp.where((topk_idx >= 0) & (topk_idx < config.num_experts), topk_idx, -1)


def _weights(config: MoEConfig, logits: jax.Array | None, topk_idx: jax.Array) -> jax.Array:
    """Returns the float32 `[T, K]` router weights of the experts `topk_idx`; zero for unused slots (-1)."""
    if config.score == "sparsemixer":
        assert logits is not None
        return routing.sparsemixer_weights(logits, topk_idx, config.sparsemixer_eps) * config.weight_scale
    if logits is not None:
        return routing.chosen_weights(
            logits,
            topk_idx,
            score=config.score,
            normalize=config.normalize_weights,
            scale=config.weight_scale,
            min_sum=config.min_score_sum,
        )
    weights = (topk_idx >= 0).astype(jnp.float32)
    if config.normalize_weights:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    return weights * config.weight_scale


def softmax_or_sigmoid(config: MoEConfig) -> str:
    """Returns the score by which experts are chosen and balanced; "sparsemixer" uses the scores of a softmax."""
    return "softmax" if config.score == "sparsemixer" else config.score


def hashed_experts(token_ids: jax.Array, num_experts: int, k: int) -> jax.Array:
    """`k` different experts of each token by its id alone (hash layers, arXiv:2106.04426).

    The same id always gets the same experts, and every set of experts is about as likely: slot `j` draws one of the
    `E - j` experts that are left, by a hash of the id and `j` (the finaliser of MurmurHash3).

    Args:
      token_ids: integer `[T]`.

    Returns:
      int32 `[T, k]`.
    """
    ids = token_ids.astype(jnp.uint32)
    chosen: list[jax.Array] = []
    for slot in range(k):
        drawn = _mixed(ids + jnp.uint32(0x9E3779B9 * (slot + 1) % 2**32)) % jnp.uint32(num_experts - slot)
        expert = drawn.astype(jnp.int32)
        # The expert is the drawn-th of the remaining ones: the loop steps over the chosen ones in ascending order.
        for taken in jnp.sort(jnp.stack(chosen), axis=0) if chosen else ():
            expert = expert + (expert >= taken)
        chosen.append(expert)
    return jnp.stack(chosen, axis=-1)


def _mixed(h: jax.Array) -> jax.Array:
    """MurmurHash3's 32-bit finaliser: every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def shared_share(x: jax.Array, shared_router: jax.Array) -> jax.Array:
    """Returns the sigmoid of one logit for each token, float32 `[T]`; `shared_router` is float32 `[H, 1]`."""
    return routing.router_scores(router_logits(x, shared_router), "sigmoid")[:, 0]
