"""Peers whose collectives move arrays of fixed size: padded `all_to_all`, `all_gather`, and the einsum formulation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.tuning.peer import Peer, from_experts, place_in_expert, to_experts, weighted_sum
from xen_moe_jax.tuning.problem import AXIS
from xen_moe_jax.tuning.workload import Capacities, Workload


def from_all_ranks(tree: Any) -> Any:
    """Gathers every rank's rows, in the order of the ranks."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), tree)


def gather_and_scatter(work: Workload, caps: Capacities, *, by_token: bool = False) -> Peer:
    """Peer that all-gathers every token, keeps the rows of the local experts, and psum_scatters the weighted results.

    Args:
      by_token: the weighted results of a token are gathered and summed, slot by slot, where else they are added up
        by a scatter.
    """

    def dispatch(tokens, topk_idx):
        gathered, idx = from_all_ranks(tokens), from_all_ranks(topk_idx)
        local = idx.reshape(-1) - jax.lax.axis_index(AXIS) * work.local_experts
        key = jnp.where((local >= 0) & (local < work.local_experts), local, work.local_experts)
        order = jnp.argsort(key, stable=True)[: caps.grouped].astype(jnp.int32)
        here = key[order]
        rows = jax.tree.map(lambda leaf: leaf[order // work.top_k], gathered)
        return rows, jnp.minimum(here, work.local_experts - 1), (order, here)

    def combine(y, route, topk_weights):
        order, here = route
        weights = from_all_ranks(topk_weights)
        mine = here < work.local_experts
        if by_token:
            row = jnp.full((weights.size,), -1, jnp.int32)
            row = row.at[order].set(jnp.where(mine, jnp.arange(order.size, dtype=jnp.int32), -1), unique_indices=True)
            row = row.reshape(weights.shape)
            partial = weighted_sum(y, jnp.maximum(row, 0), jnp.where(row >= 0, weights, 0.0))
        else:
            weight = jnp.where(mine, weights.reshape(-1)[order], 0.0)
            partial = jnp.zeros((work.ranks * work.tokens, work.hidden), jnp.float32)
            partial = partial.at[order // work.top_k].add(y.astype(jnp.float32) * weight[:, None])
        return jax.lax.psum_scatter(partial.astype(y.dtype), AXIS, tiled=True)

    return Peer(dispatch, combine)


def one_hot_einsum(work: Workload, caps: Capacities) -> Peer:
    """The einsum formulation of GShard and Switch: one-hot dispatch and combine masks `[T, E, capacity]`."""
    padded_experts, cap = work.ranks * work.local_experts, caps.per_source_expert

    def masks(topk_idx, place, dtype):
        """Masks `[T, E, capacity]` for every slot: one at the place of the slot's row."""
        for slot in range(work.top_k):
            expert = jax.nn.one_hot(topk_idx[:, slot], padded_experts, dtype=dtype)
            yield expert[:, :, None] * jax.nn.one_hot(place[:, slot], cap, dtype=dtype)[:, None, :]

    def dispatch(x, topk_idx):
        place = place_in_expert(topk_idx, padded_experts).reshape(topk_idx.shape)
        blocks = jnp.einsum("tec,th->ech", sum(masks(topk_idx, place, x.dtype)), x)
        return *to_experts(blocks, work), (topk_idx, place)

    def combine(y, route, topk_weights):
        weighted = jnp.zeros((work.tokens, padded_experts, cap), jnp.float32)
        topk_idx, place = route
        for slot, chosen in enumerate(masks(topk_idx, place, y.dtype)):
            weighted += topk_weights[:, slot, None, None] * chosen.astype(jnp.float32)
        back = from_experts(y, work)
        out = jnp.einsum("tec,ech->th", weighted.astype(y.dtype), back, preferred_element_type=jnp.float32)
        return out.astype(y.dtype)

    return Peer(dispatch, combine, quantized=False)
