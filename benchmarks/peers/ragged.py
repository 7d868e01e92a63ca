"""The peer on `jax.lax.ragged_all_to_all`, with any number of segments for each peer.

XLA's kernel for one host gives every segment one row of thread blocks, so one segment for each peer, the obvious way to
call it, leaves almost all of a GPU idle. More segments are made in two ways: a rank's rows are divided into equal
pieces, or every expert is a segment of its own (divided again where that is not enough). The latter also puts every row
in its place, so that the receiver need not sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.tuning.peer import Peer, weighted_sum
from xen_moe_jax.tuning.problem import AXIS
from xen_moe_jax.tuning.workload import Capacities, Workload


def exclusive(sizes: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.cumsum(sizes, axis) - sizes


def divide(offsets: jax.Array, sizes: jax.Array, pieces: int) -> tuple[jax.Array, jax.Array]:
    """Divides `[n]` segments into `[n * pieces]`, equal to within a row; returns their offsets and sizes."""
    bounds = sizes[:, None] * jnp.arange(pieces + 1, dtype=jnp.int32) // pieces
    starts = offsets[:, None] + bounds[:, :-1]
    return starts.reshape(-1), (bounds[:, 1:] - bounds[:, :-1]).reshape(-1)


def exchange(
    ragged: Callable[..., jax.Array],
    rows: Any,
    capacity: int,
    sent: tuple[jax.Array, jax.Array],
    target: jax.Array,
    arriving: jax.Array,
    pieces: int,
) -> Any:
    """Exchanges segments `sent` = (offsets, sizes), each in `pieces`; they arrive at `target` offsets with `arriving`
    sizes."""
    offsets, whole = sent
    starts, sizes = divide(offsets, whole, pieces)
    targets, _ = divide(target, whole, pieces)
    _, received = divide(jnp.zeros_like(arriving), arriving, pieces)

    def one(leaf):
        output = jnp.zeros((capacity, *leaf.shape[1:]), leaf.dtype)
        return ragged(leaf, output, starts, sizes, targets, received, axis_name=AXIS)

    return jax.tree.map(one, rows)


def sort_by_expert(work: Workload, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots by expert int32 `[T*K]`, and all ranks' counts int32 `[source, destination, local expert]`."""
    flat = topk_idx.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=work.ranks * work.local_experts).astype(jnp.int32)
    return order, jax.lax.all_gather(counts.reshape(work.ranks, work.local_experts), AXIS)


def inverse(order: jax.Array) -> jax.Array:
    places = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(order).at[order].set(places, unique_indices=True)


def sorted_ragged(
    work: Workload, caps: Capacities, *, segments: int = 1, ragged: Callable[..., jax.Array] | None = None
) -> Peer:
    """Peer that sorts rows by expert and sends them there and back by `ragged`, in `segments` for each peer.

    Args:
      segments: a multiple of the local experts makes every expert a segment; other numbers divide the rows of a rank.
      ragged: None is `jax.lax.ragged_all_to_all`.
    """
    ragged = ragged or jax.lax.ragged_all_to_all
    if segments % work.local_experts == 0:
        return _segment_per_expert(work, caps, segments // work.local_experts, ragged)
    return _segment_per_rank(work, caps, segments, ragged)


def _segment_per_rank(work: Workload, caps: Capacities, pieces: int, ragged: Callable[..., jax.Array]) -> Peer:
    ranks, local_experts = work.ranks, work.local_experts

    def dispatch(tokens, topk_idx):
        me = jax.lax.axis_index(AXIS)
        order, counts = sort_by_expert(work, topk_idx)
        sizes = counts.sum(2)
        rows = jax.tree.map(lambda leaf: leaf[order // work.top_k], tokens)
        sent = exclusive(sizes[me]), sizes[me]
        arrived = exchange(ragged, rows, caps.grouped, sent, exclusive(sizes)[me], sizes[:, me], pieces)
        # rows arrive by (source, expert); experts need them by expert
        of_segment = counts[:, me].reshape(-1)
        local = jnp.repeat(
            jnp.tile(jnp.arange(local_experts, dtype=jnp.int32), ranks),
            of_segment,
            total_repeat_length=caps.grouped,
        )
        filled = jnp.arange(caps.grouped) < of_segment.sum()
        by_expert = jnp.argsort(jnp.where(filled, local, local_experts), stable=True).astype(jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf[by_expert], arrived)
        return grouped, jnp.where(filled, local, 0)[by_expert], (inverse(order), by_expert, sizes)

    def combine(y, route, topk_weights):
        place, by_expert, sizes = route
        me = jax.lax.axis_index(AXIS)
        y = jnp.zeros_like(y).at[by_expert].set(y, unique_indices=True)
        sent = exclusive(sizes[:, me]), sizes[:, me]
        back = exchange(ragged, y, place.size, sent, exclusive(sizes, 1)[:, me], sizes[me], pieces)
        return weighted_sum(back, place.reshape(topk_weights.shape), topk_weights)

    return Peer(dispatch, combine)


def _segment_per_expert(work: Workload, caps: Capacities, pieces: int, ragged: Callable[..., jax.Array]) -> Peer:
    def dispatch(tokens, topk_idx):
        me = jax.lax.axis_index(AXIS)
        order, counts = sort_by_expert(work, topk_idx)
        rows = jax.tree.map(lambda leaf: leaf[order // work.top_k], tokens)
        mine = counts[me].reshape(-1)
        target = (exclusive(counts.sum(0), 1) + exclusive(counts)[me]).reshape(-1)
        sent = exclusive(mine), mine
        arrived = exchange(ragged, rows, caps.grouped, sent, target, counts[:, me].reshape(-1), pieces)
        ends = jnp.cumsum(counts[:, me].sum(0))
        local = jnp.searchsorted(ends, jnp.arange(caps.grouped), side="right").astype(jnp.int32)
        return arrived, jnp.minimum(local, work.local_experts - 1), (inverse(order), counts)

    def combine(y, route, topk_weights):
        place, counts = route
        me = jax.lax.axis_index(AXIS)
        sizes = counts[:, me]  # [source, local expert]
        starts = exclusive(sizes.sum(0)) + exclusive(sizes)
        flat = counts.reshape(work.ranks, -1)
        home = exclusive(flat, 1).reshape(counts.shape)[:, me]
        sent = starts.reshape(-1), sizes.reshape(-1)
        back = exchange(ragged, y, place.size, sent, home.reshape(-1), counts[me].reshape(-1), pieces)
        return weighted_sum(back, place.reshape(topk_weights.shape), topk_weights)

    return Peer(dispatch, combine)
