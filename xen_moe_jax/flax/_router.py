"""The router: scores, choice of experts, and what keeps the experts evenly loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import routing
from xen_moe_jax.flax._config import MoEConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEMetrics:
    """What one call of an MoE layer reports, over the tokens of all ranks.

    Attributes:
      aux_loss: float32 `[]`, add it to the training loss; `aux_loss_weight` is in it; 0 without
        balancing="aux_loss".
      tokens_per_expert: int32 `[E]`, slots routed to each expert, dropped rows included.
      num_dropped: int32 `[]`, rows that did not fit under the capacity; 0 without a capacity.
    """

    aux_loss: Any
    tokens_per_expert: Any
    num_dropped: Any

    @property
    def max_load(self) -> jax.Array:
        """float32 `[]`: rows of the busiest expert over the mean; 1 is perfect balance."""
        load = self.tokens_per_expert.astype(jnp.float32)
        return load.max() / jnp.maximum(load.mean(), 1e-9)


def scores_of(config: MoEConfig, logits: jax.Array) -> jax.Array:
    """Router scores float32 `[T, E]` of logits `[T, E]`."""
    if config.score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits)


def route(
    config: MoEConfig, kernel: jax.Array, bias: jax.Array | None, x: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses experts.

    Args:
      kernel: float32 `[H, E]`.
      bias: float32 `[E]`, added to the scores for the choice only, or None.
      x: tokens `[T, H]`.
      mask: bool `[T]`, False for tokens to leave out.

    Returns:
      `topk_idx` int32 `[T, K]` (`-1` for left-out tokens), `topk_weights` float32 `[T, K]`, `scores` float32 `[T, E]`.
    """
    # Full float32: a rounded logit flips near-ties, and the flips differ between machines.
    logits = jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    scores = scores_of(config, logits)
    topk_idx, topk_weights = routing.group_limited_top_k(
        scores,
        config.top_k,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        bias=bias,
        normalize=config.normalize_weights,
        scale=config.weight_scale,
    )
    topk_idx = jnp.where(mask[:, None], topk_idx, -1)
    return topk_idx, topk_weights, scores


def count_tokens(config: MoEConfig, topk_idx: jax.Array) -> jax.Array:
    """Slots of `topk_idx [T, K]` that name each expert, int32 `[E]`; unused slots (`-1`) count nowhere."""
    used = jnp.where(topk_idx < 0, config.num_experts, topk_idx)
    return jnp.zeros(config.num_experts, jnp.int32).at[used.reshape(-1)].add(1, mode="drop")


def load_balancing_loss(
    config: MoEConfig, scores: jax.Array, mask: jax.Array, counts: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """`E * sum_e f_e * P_e` over the tokens of all ranks (Switch Transformer, arXiv:2101.03961, eq. 4 for any top-k).

    `f_e` is the fraction of slots that name expert `e`, `P_e` the mean share of `e` in a token's scores. Perfect
    balance gives 1, one expert for everything `E`. Gradients flow through `P_e` only.

    Args:
      scores: float32 `[T, E]` of this rank.
      mask: bool `[T]`.
      counts: int32 `[E]`, already summed over `axes`.
      axes: mesh axes that hold different tokens; empty for one rank.
    """
    share = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-20)
    total = jnp.where(mask[:, None], share, 0.0).sum(0)
    if axes:
        total = jax.lax.psum(total, axes)
    slots = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    # Each used token has K slots: tokens = slots / K.
    return config.num_experts * jnp.sum(counts / slots * (total * (config.top_k / slots)))


def updated_bias(bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """The router bias after a step: up by `rate` for experts under the mean load, down for those over it.

    Auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1.

    Args:
      bias: float32 `[E]`.
      tokens_per_expert: int32 `[E]`, of the whole batch: `MoEMetrics.tokens_per_expert`.
      rate: how far to move.
    """
    load = tokens_per_expert.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean() - load)
