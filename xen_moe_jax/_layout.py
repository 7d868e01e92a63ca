"""Routing arithmetic: counts, offsets, positions. Plain JAX, written once, used by every backend that can.

Shapes: `R` ranks, `E` experts, `L = ceil(E/R)` experts per rank, `T` tokens per rank, `K` slots per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _single_ops as ops
from xen_moe_jax._spec import Spec
from xen_moe_jax._types import DispatchLayout


def sanitize(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """int32 `[T, K]` with every entry outside `[0, E)` replaced by `-1`."""
    if topk_idx.dtype.itemsize < 4:  # a narrow integer cannot be compared with a large number of experts
        topk_idx = topk_idx.astype(jnp.int32)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    return ops.where(valid, topk_idx.astype(jnp.int32), -1)


def exclusive_cumsum(x: jax.Array, axis: int) -> jax.Array:
    return lax.cumsum(x, axis=axis % x.ndim) - x


def round_up(x: jax.Array, multiple: int) -> jax.Array:
    """The next multiple of `multiple`, for integers `x >= 0`."""
    return x if multiple == 1 else ops.divide(x + (multiple - 1), multiple) * multiple


BLOCK = 128
"""Entries of a block in `order_by_blocks`."""


def order_within_bins(bins: jax.Array, num_bins: int) -> tuple[jax.Array, jax.Array]:
    """For each entry of int32 `bins [N]` the number of earlier entries that name the same bin; and `counts [num_bins]`.

    Entries outside `[0, num_bins)` get an arbitrary order. A stable sort, not a one-hot sum: O(N log N) for any
    number of bins.
    """
    n = bins.shape[0]
    keys = ops.where((bins >= 0) & (bins < num_bins), bins, num_bins)
    counts = ops.count(keys, num_bins + 1)
    sorted_keys, by_bin = ops.stable_order(keys, 0)
    within = lax.iota(jnp.int32, n) - ops.take(exclusive_cumsum(counts, axis=0), sorted_keys)
    return ops.put(lax.full((n,), 0, jnp.int32), by_bin, within), counts[:-1]


def order_by_blocks(bins: jax.Array, num_bins: int) -> tuple[jax.Array, jax.Array]:
    """What `order_within_bins` returns, without a sort: sums of comparisons in blocks of entries, and over the blocks.
    `N * (num_bins + BLOCK)` comparisons that fuse, which a GPU does in less time than a sort takes to start."""
    n = bins.shape[0]
    blocks = -(-n // BLOCK)
    keys = ops.where((bins >= 0) & (bins < num_bins), bins, num_bins)
    keys = lax.pad(keys, jnp.int32(num_bins), [(0, blocks * BLOCK - n, 0)]).reshape(blocks, BLOCK)
    names = lax.iota(jnp.int32, num_bins + 1)[None, None]
    counts = jnp.sum(keys[:, :, None] == names, axis=1, dtype=jnp.int32)  # [blocks, bins]
    places = lax.iota(jnp.int32, BLOCK)
    same = (keys[:, None, :] == keys[:, :, None]) & (places[None, None, :] < places[None, :, None])
    inside = jnp.sum(same, axis=2, dtype=jnp.int32)
    before = exclusive_cumsum(counts, axis=0)
    at = lax.broadcasted_iota(jnp.int32, keys.shape, 0) * (num_bins + 1) + keys
    order = inside + ops.take(before.reshape(-1), at)
    return order.reshape(-1)[:n], (before[-1] + counts[-1])[:num_bins]


def owners(topk_idx: jax.Array, local_experts: int) -> jax.Array:
    """Rank that owns each slot's expert, `-1` for an unused slot; `topk_idx` is sanitised."""
    return ops.where(topk_idx >= 0, ops.divide(topk_idx, local_experts), -1)


def ranks_hit(topk_idx: jax.Array, num_ranks: int, local_experts: int) -> jax.Array:
    """bool `[..., T, R]`: True where token `t` reaches rank `r`. `topk_idx [..., T, K]` is sanitised."""
    owner = owners(topk_idx, local_experts)
    ranks = jax.lax.broadcasted_iota(jnp.int32, (*owner.shape, num_ranks), owner.ndim)
    return jnp.any(owner[..., None] == ranks, axis=-2)


class SourceRouting(NamedTuple):
    """One source rank's routing, computed on that rank and sent to all.

    Attributes:
      topk_idx: int32 `[T, K]`, sanitised.
      order: int32 `[T, K]`, number of earlier (token, slot) pairs of this source that name the same expert.
      counts: int32 `[E]`, pairs per expert.
      pairs: int32 `[R]`, tokens that reach each rank.
    """

    topk_idx: jax.Array
    order: jax.Array
    counts: jax.Array
    pairs: jax.Array


def source_routing(topk_idx: jax.Array, spec: Spec) -> SourceRouting:
    order, counts = order_within_bins(topk_idx.reshape(-1), spec.num_experts)
    hit = ranks_hit(topk_idx, spec.num_ranks, spec.local_experts)
    return SourceRouting(topk_idx, order.reshape(topk_idx.shape), counts, jnp.sum(hit, axis=0, dtype=jnp.int32))


def group_starts(recv_counts: jax.Array, alignment: int) -> jax.Array:
    """int32 `[L + 1]`: first row of each local expert's group, before clipping at the capacity."""
    sizes = round_up(jnp.sum(recv_counts, axis=0, dtype=jnp.int32), alignment)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])


class RecvLayout(NamedTuple):
    """Positions (docs/design/internals.md) of the rows that this rank receives, their counts, and local expert ids.

    Attributes:
      positions: int32 `[R, T, slots]`.
      recv_counts: int32 `[R, L]`.
      local_idx: int32 `[R, T, K]`, local expert of each slot, `-1` for slots that belong elsewhere.
    """

    positions: jax.Array
    recv_counts: jax.Array
    local_idx: jax.Array


def expert_bases(counts: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[R, L]` from `counts [R, L]` (this rank's experts): flat row at which each source's run for each expert
    starts."""
    before = exclusive_cumsum(counts, axis=0)
    if spec.layout == "padded":
        stride = spec.num_ranks * spec.num_tokens
        return before + jnp.arange(spec.local_experts, dtype=jnp.int32) * stride
    return before + group_starts(counts, spec.alignment)[:-1]


def recv_layout(topk_idx: jax.Array, order: jax.Array, counts: jax.Array, rank: jax.Array, spec: Spec) -> RecvLayout:
    """Receiver's view of every source: `topk_idx`, `order` `[R, T, K]`, `counts [R, E]`, `rank` this rank's number."""
    local = spec.local_experts
    mine = (topk_idx >= 0) & (ops.divide(topk_idx, local) == rank)
    local_idx = ops.where(mine, topk_idx - rank * local, -1)
    if spec.layout == "ranked":
        hit = jnp.any(local_idx >= 0, axis=-1)
        flat = hit.reshape(-1).astype(jnp.int32)
        row = exclusive_cumsum(flat, axis=0).reshape(hit.shape)
        positions = ops.where(hit, ops.where(row < spec.capacity, row, -2), -1)[..., None]
        recv_counts = jnp.zeros((spec.num_ranks, local), jnp.int32)
        recv_counts = recv_counts.at[:, 0].set(jnp.sum(hit, axis=1, dtype=jnp.int32))
        return RecvLayout(positions, recv_counts, local_idx)
    padded_counts = jnp.pad(counts, ((0, 0), (0, local * spec.num_ranks - spec.num_experts)))
    recv_counts = jax.lax.dynamic_slice_in_dim(padded_counts, rank * local, local, axis=1)
    bases = expert_bases(recv_counts, spec)
    expert = jnp.maximum(local_idx, 0)
    source = lax.broadcasted_iota(jnp.int32, expert.shape, 0)
    row = ops.take(bases.reshape(-1), source * local + expert) + order
    if spec.layout == "padded":
        stride = spec.num_ranks * spec.num_tokens
        fits = row < (expert + 1) * stride
    else:
        fits = row < spec.capacity
    positions = ops.where(local_idx >= 0, ops.where(fits, row, -2), -1)
    return RecvLayout(positions, recv_counts, local_idx)


class GroupCounts(NamedTuple):
    """Public counts of a dispatch: `group_sizes [L] | None`, `num_tokens_per_expert [L]`, `num_dropped []`."""

    group_sizes: jax.Array | None
    num_tokens_per_expert: jax.Array
    num_dropped: jax.Array


def group_counts(recv_counts: jax.Array, spec: Spec) -> GroupCounts:
    """Counts after clipping at the capacity, for the grouped and padded layouts."""
    totals = jnp.sum(recv_counts, axis=0, dtype=jnp.int32)
    if spec.layout == "padded":
        kept = jnp.minimum(totals, spec.num_ranks * spec.num_tokens)
        return GroupCounts(None, kept, jnp.sum(totals - kept, dtype=jnp.int32))
    most = spec.num_ranks * spec.num_tokens * spec.top_k + spec.local_experts * (spec.alignment - 1)
    if spec.capacity >= most:  # also where tokens name experts twice: nothing is clipped, and no cumulative sum needed
        dropped = jnp.sum(totals - totals, dtype=jnp.int32)  # zero, which varies over the ranks as the counts do
        return GroupCounts(round_up(totals, spec.alignment), totals, dropped)
    starts = group_starts(recv_counts, spec.alignment)
    bounds = jnp.minimum(starts, spec.capacity)
    kept = jnp.minimum(starts[:-1] + totals, spec.capacity) - bounds[:-1]
    return GroupCounts(jnp.diff(bounds), kept, jnp.sum(totals - kept, dtype=jnp.int32))


def ranked_counts(recv_counts: jax.Array, local_idx: jax.Array, spec: Spec) -> GroupCounts:
    """Counts of the ranked layout; `local_idx [C, K]` counts slots per local expert among the rows that were kept."""
    rows = jnp.sum(recv_counts, dtype=jnp.int32)
    bins = jnp.where(local_idx >= 0, local_idx, spec.local_experts).reshape(-1)
    per_expert = jnp.zeros(spec.local_experts + 1, jnp.int32).at[bins].add(1)[:-1]
    return GroupCounts(None, per_expert, rows - jnp.minimum(rows, spec.capacity))


def num_rows(recv_counts: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[]`: rows in use, alignment padding included (grouped and ranked layouts)."""
    if spec.layout == "ranked":
        return jnp.minimum(jnp.sum(recv_counts, dtype=jnp.int32), spec.capacity)
    return jnp.minimum(group_starts(recv_counts, spec.alignment)[-1], spec.capacity)


def used_rows(recv_counts: jax.Array, spec: Spec) -> jax.Array:
    """Mask, bool `spec.row_dims`: rows that hold data or alignment padding; all other rows are unspecified."""
    if spec.layout == "padded":
        kept = group_counts(recv_counts, spec).num_tokens_per_expert
        return jnp.arange(spec.num_ranks * spec.num_tokens, dtype=jnp.int32)[None] < kept[:, None]
    return jnp.arange(spec.capacity, dtype=jnp.int32) < num_rows(recv_counts, spec)


def dispatch_layout(
    topk_idx: jax.Array, *, num_experts: int, num_ranks: int, ranks_per_node: int | None
) -> DispatchLayout:
    """See `xen_moe_jax.get_dispatch_layout`."""
    idx = sanitize(topk_idx, num_experts)
    local = -(-num_experts // num_ranks)
    hit = ranks_hit(idx, num_ranks, local)
    flat = jnp.where(idx >= 0, idx, num_experts).reshape(-1)
    per_expert = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)[:num_experts]
    per_node = None
    if ranks_per_node is not None:
        node_hit = jnp.any(hit.reshape(hit.shape[0], num_ranks // ranks_per_node, ranks_per_node), axis=-1)
        per_node = jnp.sum(node_hit, axis=0, dtype=jnp.int32)
    return DispatchLayout(jnp.sum(hit, axis=0, dtype=jnp.int32), per_node, per_expert, hit)
