"""The round trip as JAX users write it without this library: `jax.lax.all_to_all` on rows padded to a capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from xen_moe_jax.tuning.problem import AXIS
from xen_moe_jax.tuning.programs import RoundTrip
from xen_moe_jax.tuning.workload import BLOCK_SCALED_DTYPES, Capacities, Workload


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another way to write the round trip, as a dispatch and a combine; both run on one rank inside `shard_map`.

    Attributes:
      dispatch: `(tokens, topk_idx [T,K]) -> (rows, local expert of each row int32, route)`; `tokens` is an array or a
        `BlockScaled`, `rows` is of the same kind; `route` holds arrays of rank >= 1.
      combine: `(y, route, topk_weights [T,K]) -> [T,H]`.
      quantized: True if `dispatch` takes a `BlockScaled`; otherwise tokens travel in the compute dtype.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    quantized: bool = True


def peer_wire(work: Workload, peer: Peer) -> str | None:
    """The quantized wire of a peer's dispatch, None where rows travel in the compute dtype, as for MXFP4, which is no
    `BlockScaled`."""
    wire = work.dtype if work.block_scaled else work.wire
    return wire if peer.quantized and wire in BLOCK_SCALED_DTYPES else None


def peer_round_trip(work: Workload, peer: Peer) -> RoundTrip:
    """Returns a round trip: quantize where the workload does, dispatch, dequantize, experts, combine."""
    wire = peer_wire(work, peer)

    def round_trip(x, topk_idx, topk_weights, experts):
        tokens = x if wire is None else xm.quantize(x, dtype=wire)
        rows, local_expert, route = peer.dispatch(tokens, topk_idx)
        rows = rows if wire is None else xm.dequantize(rows, x.dtype)
        return peer.combine(experts(rows, local_expert), route, topk_weights)

    return round_trip


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
    """Sends rows back to the tokens' ranks: `[R*L, cap, H]` by global expert."""
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
    """Peer by `jax.lax.all_to_all` on rows padded to a capacity per source and expert; it gathers, without one-hot
    products."""
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
