"""Experts for tokens that every rank of the expert axes has (decode): nothing is dispatched.

Each rank computes its own experts for all tokens, and one sum over the ranks gives every token its output: one
collective of `[T, H]` instead of a dispatch, a combine and a gather, and no row can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _layout
from xen_moe_jax._mesh import vary_over
from xen_moe_jax.flax._chunks import Chunk
from xen_moe_jax.flax._config import MoEConfig


def through_own_experts(config: MoEConfig, experts: Callable[..., jax.Array], weights: Any, tokens: Chunk) -> jax.Array:
    """This rank's part of the output, float32 `[T, H]`; the sum over the ranks of `axis_name` is the whole.

    Args:
      experts: `(rows, group_sizes, weights) -> rows`, with `row_weights` as a fourth argument where
        `apply_weights_to="input"`.
      weights: its third argument.
      tokens: the same on every rank of the expert axes.
    """
    # as varying, so that a cotangent is summed over the ranks once per token and not once per row
    x, topk_weights = vary_over([tokens.x, tokens.topk_weights], config.expert_axes)
    num_ranks = jax.lax.axis_size(config.axis_name)
    num_local = -(-config.num_experts // num_ranks)
    local = tokens.topk_idx - jax.lax.axis_index(config.axis_name) * num_local
    mine = (tokens.topk_idx >= 0) & (local >= 0) & (local < num_local)
    local = jnp.where(mine, local, -1)
    apply = _grouped if config.layout == "grouped" else _padded
    return apply(config, experts, weights, Chunk(x, local, jnp.where(mine, topk_weights, 0.0)), num_local)


def _grouped(config: MoEConfig, experts: Callable[..., jax.Array], weights: Any, own: Chunk, num_local: int) -> Any:
    """Computes the grouped layout: rows sorted by expert. `own.topk_idx` has local experts, `-1` for experts of other
    ranks."""
    num_tokens, top_k = own.topk_idx.shape
    rows = num_tokens * min(top_k, num_local)
    order, counts = _layout.order_within_bins(own.topk_idx.reshape(-1), num_local)
    starts = _layout.exclusive_cumsum(counts, axis=0)
    position = starts[jnp.maximum(own.topk_idx, 0)] + order.reshape(own.topk_idx.shape)
    position = jnp.where(own.topk_idx >= 0, position, rows)
    token = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], position.shape)
    # Rows past the last group are no token's. Their results and gradients are unspecified: no token may get them, and
    # not even a weight of zero may meet them.
    token_of_row = jnp.full(rows, num_tokens, jnp.int32).at[position].set(token, mode="drop")
    x = own.x.at[token_of_row].get(mode="fill", fill_value=0)
    if config.apply_weights_to == "input":
        of_row = jnp.zeros(rows, jnp.float32).at[position].set(own.topk_weights, mode="drop")
        y = experts(x, counts, weights, of_row)
        return jnp.sum(y.at[position].get(mode="fill", fill_value=0).astype(jnp.float32), axis=1)
    y = experts(x, counts, weights)
    slots = y.at[position].get(mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(slots * own.topk_weights[..., None], axis=1)


def _padded(config: MoEConfig, experts: Callable[..., jax.Array], weights: Any, own: Chunk, num_local: int) -> Any:
    """Computes the padded layout: every local expert computes every token, and the weights choose. With few tokens the
    time is that of reading the weights."""
    num_tokens, top_k = own.topk_idx.shape
    chosen = jax.nn.one_hot(own.topk_idx, num_local, dtype=jnp.float32)  # -1: a row of zeros
    each = (
        top_k if config.apply_weights_to == "input" else 1
    )  # a token's slots have other inputs, and rows of their own
    x = jnp.repeat(own.x, each, axis=0)
    every = jnp.broadcast_to(x[None], (num_local, *x.shape))
    sizes = vary_over([jnp.full((num_local,), num_tokens * each, jnp.int32)], config.expert_axes)[0]
    if config.apply_weights_to == "input":
        y = experts(every, sizes, weights, jnp.broadcast_to(own.topk_weights.reshape(-1), every.shape[:2]))
        slots = y.reshape(num_local, num_tokens, top_k, -1).astype(jnp.float32)
        return jnp.einsum("ltkm,tkl->tm", slots, chosen, precision=jax.lax.Precision.HIGHEST)
    y = experts(every, sizes, weights)
    share = jnp.einsum("tkl,tk->lt", chosen, own.topk_weights)
    return jnp.einsum("ltm,lt->tm", y.astype(jnp.float32), share, precision=jax.lax.Precision.HIGHEST)
