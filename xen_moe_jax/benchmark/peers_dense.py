"""Peers whose collectives move arrays of fixed size: padded `all_to_all`, `all_gather`, and the einsum formulation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.benchmark.problem import AXIS
from xen_moe_jax.benchmark.programs import Peer
from xen_moe_jax.benchmark.workload import Capacities, Workload


def place_in_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Position of each (token, slot) among its rank's rows for the same expert: int32 `[T*K]`, by one stable sort."""
    flat = topk_idx.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=num_experts)
    starts = jnp.cumsum(counts) - counts
    place = jnp.arange(flat.size, dtype=jnp.int32) - starts[flat[order]].astype(jnp.int32)
    return jnp.zeros_like(flat).at[order].set(place, unique_indices=True)


def to_experts(blocks: Any, work: Workload) -> tuple[Any, jax.Array]:
    """`[R*L, cap, ...]` by global expert to the experts' ranks: `[R, L, cap, ...]`, and each row's local expert."""
    ranks, local = work.ranks, work.local_experts

    def send(leaf):
        return jax.lax.all_to_all(leaf.reshape(ranks, local, *leaf.shape[1:]), AXIS, 0, 0)

    received = jax.tree.map(send, blocks)
    shape = jax.tree.leaves(received)[0].shape[:3]
    return received, jnp.broadcast_to(jnp.arange(local, dtype=jnp.int32)[None, :, None], shape)


def from_experts(y: jax.Array, work: Workload) -> jax.Array:
    """Back to the tokens' ranks: `[R*L, cap, H]` by global expert."""
    return jax.lax.all_to_all(y, AXIS, 0, 0).reshape(work.ranks * work.local_experts, *y.shape[2:])


def weighted_sum(rows: jax.Array, row_of_slot: jax.Array, topk_weights: jax.Array) -> jax.Array:
    """Gathers `rows [N,H]` by `row_of_slot [T,K]` and sums over the slots in float32, one slot at a time: no
    `[T,K,H]` array.
    """
    total = jnp.zeros((topk_weights.shape[0], rows.shape[1]), jnp.float32)
    for k in range(topk_weights.shape[1]):
        total += rows[row_of_slot[:, k]].astype(jnp.float32) * topk_weights[:, k, None]
    return total.astype(rows.dtype)


def padded_all_to_all(work: Workload, caps: Capacities) -> Peer:
    """`jax.lax.all_to_all` on rows padded to a capacity per source and expert; gathers, no one-hot products."""
    padded_experts, cap = work.ranks * work.local_experts, caps.per_source_expert

    def dispatch(tokens, topk_idx):
        slot = topk_idx.reshape(-1) * cap + place_in_expert(topk_idx, padded_experts)
        token = jnp.arange(slot.size, dtype=jnp.int32) // work.top_k
        source = jnp.full((padded_experts * cap,), work.tokens, jnp.int32).at[slot].set(token, unique_indices=True)

        def block(leaf):
            rows = leaf.at[source].get(mode="fill", fill_value=0)
            return rows.reshape(padded_experts, cap, *leaf.shape[1:])

        return *to_experts(jax.tree.map(block, tokens), work), slot.reshape(topk_idx.shape)

    def combine(y, slot, topk_weights):
        return weighted_sum(from_experts(y, work).reshape(-1, work.hidden), slot, topk_weights)

    return Peer(dispatch, combine)


def everyone(tree: Any) -> Any:
    """Every rank's rows, in the order of the ranks."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), tree)


def gather_and_scatter(work: Workload, caps: Capacities, *, by_token: bool = False) -> Peer:
    """all-gather every token, keep the rows of the local experts, and psum_scatter the weighted results.

    Args:
      by_token: the weighted results of a token are gathered and summed, slot by slot, where else they are added up
        by a scatter.
    """

    def dispatch(tokens, topk_idx):
        gathered, idx = everyone(tokens), everyone(topk_idx)
        local = idx.reshape(-1) - jax.lax.axis_index(AXIS) * work.local_experts
        key = jnp.where((local >= 0) & (local < work.local_experts), local, work.local_experts)
        order = jnp.argsort(key, stable=True)[: caps.grouped].astype(jnp.int32)
        here = key[order]
        rows = jax.tree.map(lambda leaf: leaf[order // work.top_k], gathered)
        return rows, jnp.minimum(here, work.local_experts - 1), (order, here)

    def combine(y, route, topk_weights):
        order, here = route
        weights = everyone(topk_weights)
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
        """For every slot, `[T, E, capacity]`: one where the slot's row is."""
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
