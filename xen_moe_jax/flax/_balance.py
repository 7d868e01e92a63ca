"""Keeps the experts evenly loaded and the logits small: metrics, losses, the moving router bias."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xen_moe_jax._types import export_as, pytree
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._router import Routing
from xen_moe_jax.routing import FLOOR, softmax


@pytree()
class MoEMetrics:
    """Metrics of one call of an MoE layer, over the tokens of all ranks.

    Attributes:
      aux_loss: float32 `[]`, add it to the training loss: the load-balancing, per-sequence and z-losses, as far as
        the config asks for them, with their weights; 0 without any.
      tokens_per_expert: int32 `[E]`, slots routed to each expert, dropped rows included.
      num_dropped: int32 `[]`, the sum of `Routed.num_dropped` over all ranks and chunks.
      num_nonfinite: int32 `[]`, tokens with a NaN or an infinity in their router logits: their output is not to be
        trusted, and something upstream has gone wrong.
      sequence_loss: float32 `[]`, the part of the per-sequence loss in `aux_loss`.
      z_loss: float32 `[]`, the part of the z-loss in `aux_loss`.
      topk_idx: int32 `[..., K]`, one entry for each slot of the call's tokens: the expert, or -1 for an unused slot.
        None unless `MoEConfig.return_topk_idx` is True.
    """

    aux_loss: Any
    tokens_per_expert: Any
    num_dropped: Any
    num_nonfinite: Any = 0
    sequence_loss: Any = 0.0
    z_loss: Any = 0.0
    topk_idx: Any = None

    @property
    def max_load(self) -> jax.Array:
        """float32 `[]`: rows of the busiest expert over the mean; 1 is perfect balance."""
        load = self.tokens_per_expert.astype(jnp.float32)
        return load.max() / jnp.maximum(load.mean(), 1e-9)


export_as(MoEMetrics)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Maps each token of a rank to its sequence.

    Attributes:
      ids: int32 `[T]`, below `count`.
      count: number of sequences, static.
      shared: True where the tokens of one sequence may be on several ranks; `ids` then count over all of these ranks.
    """

    ids: jax.Array
    count: int
    shared: bool


def measure(
    config: MoEConfig,
    routing: Routing,
    mask: jax.Array,
    num_dropped: jax.Array,
    sequences: Sequences | None,
    axes: tuple[str, ...],
) -> MoEMetrics:
    """The metrics of one call.

    Args:
      routing: routing of this rank's tokens.
      mask: bool `[T]`.
      num_dropped: int32 `[]` of this rank.
      sequences: needed with a per-sequence loss.
      axes: mesh axes that hold different tokens; empty for one rank.
    """
    counts = _sum_over(axes, count_tokens(config, routing.topk_idx))
    nonfinite = jnp.zeros((), jnp.int32)
    if routing.logits is not None:
        bad = mask & ~jnp.all(jnp.isfinite(routing.logits), axis=-1)
        nonfinite = _sum_over(axes, jnp.sum(bad, dtype=jnp.int32))
    balance = sequence = z = jnp.zeros((), jnp.float32)
    if config.balancing == "aux_loss":
        balance = config.aux_loss_weight * load_balancing_loss(config, routing, mask, counts, axes)
    if config.sequence_loss_weight:
        assert sequences is not None
        sequence = config.sequence_loss_weight * sequence_balancing_loss(config, routing, mask, sequences, axes)
    if config.z_loss_weight:
        assert routing.logits is not None  # the config has been checked
        z = config.z_loss_weight * router_z_loss(routing.logits, mask, axes)
    return MoEMetrics(
        aux_loss=balance + sequence + z,
        tokens_per_expert=counts,
        num_dropped=_sum_over(axes, num_dropped),
        num_nonfinite=nonfinite,
        sequence_loss=sequence,
        z_loss=z,
        topk_idx=routing.topk_idx if config.return_topk_idx else None,
    )


def metric_specs(config: MoEConfig, over_tokens: PartitionSpec) -> MoEMetrics:
    """Returns how a `shard_map` over the tokens lays out the result of `measure`: sums are the same on all ranks."""
    sums = {field.name: PartitionSpec() for field in dataclasses.fields(MoEMetrics)}
    return MoEMetrics(**sums | {"topk_idx": over_tokens if config.return_topk_idx else None})


def _sum_over(axes: tuple[str, ...], x: Any) -> Any:
    return jax.lax.psum(x, axes) if axes else x


def count_tokens(config: MoEConfig, topk_idx: jax.Array) -> jax.Array:
    """Slots of `topk_idx [T, K]` that name each expert, int32 `[E]`; unused slots (`-1`) count nowhere."""
    used = jnp.where(topk_idx < 0, config.num_experts, topk_idx)
    return jnp.zeros(config.num_experts, jnp.int32).at[used.reshape(-1)].add(1, mode="drop")


def _shares(routing: Routing, mask: jax.Array, score: str) -> jax.Array:
    """Returns each token's scores divided by their sum, zero for left-out tokens: float32 `[T, E]`.

    Sigmoid scores are divided by `max(sum, 1e-20)`, by way of their logarithms: a token whose logits are far below zero
    has shares and gradients like any other.
    """
    share = routing.scores
    if score == "sigmoid":
        assert routing.logits is not None
        logs, log_floor = jax.nn.log_sigmoid(routing.logits), math.log(FLOOR)
        above = jax.nn.logsumexp(logs, axis=-1, keepdims=True) > log_floor
        share = jnp.where(above, softmax(logs), jnp.exp(logs - log_floor))
    return jnp.where(mask[:, None], share, 0.0)


def load_balancing_loss(
    config: MoEConfig, routing: Routing, mask: jax.Array, counts: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """`E * sum_e f_e * P_e` over the tokens of all ranks (Switch Transformer, arXiv:2101.03961, eq. 4 for any top-k).

    `f_e` is the fraction of slots that name expert `e`, `P_e` the mean share of `e` in a token's scores. Perfect
    balance gives 1, one expert for everything `E`. Gradients flow through `P_e` only.

    Args:
      routing: routing of this rank's tokens.
      mask: bool `[T]`.
      counts: int32 `[E]`, already summed over `axes`.
      axes: mesh axes that hold different tokens; empty for one rank.
    """
    shares = _shares(routing, mask, config.score)
    total, tokens = _sum_over(axes, (shares.sum(0), jnp.sum(mask, dtype=jnp.float32)))
    slots = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    return config.num_experts * jnp.sum(counts / slots * (total / jnp.maximum(tokens, 1.0)))


def sequence_balancing_loss(
    config: MoEConfig, routing: Routing, mask: jax.Array, sequences: Sequences, axes: tuple[str, ...]
) -> jax.Array:
    """The loss above of each sequence by itself, averaged over the sequences (arXiv:2412.19437, eqs. 17 to 20).

    Left-out tokens count nowhere; a sequence without tokens is not averaged.
    """

    def per_sequence(values: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(values, sequences.ids, num_segments=sequences.count)
        return _sum_over(axes, total) if sequences.shared else total

    one_hot = jax.nn.one_hot(routing.topk_idx, config.num_experts, dtype=jnp.float32).sum(1)  # -1: a row of zeros
    tokens, counts = per_sequence(mask.astype(jnp.float32)), per_sequence(one_hot)
    fraction = counts * config.num_experts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    mean_share = per_sequence(_shares(routing, mask, config.score)) / jnp.maximum(tokens, 1.0)[:, None]
    loss = jnp.sum(fraction * mean_share)
    used = jnp.sum(tokens > 0).astype(jnp.float32)
    if not sequences.shared:
        loss, used = _sum_over(axes, loss), _sum_over(axes, used)
    return loss / jnp.maximum(used, 1.0)


def router_z_loss(logits: jax.Array, mask: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mean over the tokens of all ranks of `logsumexp(logits) ** 2` (ST-MoE, arXiv:2202.08906, eq. 5)."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    total = _sum_over(axes, jnp.sum(jnp.where(mask, squares, 0.0)))
    tokens = _sum_over(axes, jnp.sum(mask, dtype=jnp.int32))
    return total / jnp.maximum(tokens, 1).astype(jnp.float32)


def updated_bias(bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """The router bias after a step: up by `rate` for experts under the mean load, down for experts over it.

    Auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1.

    Args:
      bias: float32 `[E]`.
      tokens_per_expert: int32 `[E]`, of the whole batch: `MoEMetrics.tokens_per_expert`.
      rate: size of the step.
    """
    load = tokens_per_expert.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean() - load)
