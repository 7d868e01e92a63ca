"""Routing in the headers of a dispatch's records: ranks exchange counts, and nothing else that grows with tokens.

From the counts of all ranks a source knows which row of its destination each of its slots gets, and writes that into
the header of the record, with the expert, the weight and the number of the token. The destination reads the headers of
arrived records (`pallas_kernels.index_rows`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import rounds
from xen_moe_jax.backends.pallas import hardware, plan, tables
from xen_moe_jax.pallas_kernels import index_rows as index_kernel
from xen_moe_jax.pallas_kernels.push import Routes
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

WINDOW = 64 * 1024
"""Rows that are indexed at a time, at most."""
SMALLEST_WINDOW = 4 * 1024
DROPPED_AT_ONCE = 16 * 1024
"""Number of words in one round of an exchange of dropped slots."""


def window(spec: Spec) -> int | None:
    """Rows that can be indexed at a time; None where a token's slots or a rank's tokens are too many for SMEM."""
    if Header(spec.top_k).words > LANES:
        return None
    rows = WINDOW
    while index_kernel.smem_bytes(spec.num_tokens, spec.top_k, rows) > hardware.SMEM_BUDGET:
        rows //= 2
        if rows < SMALLEST_WINDOW:
            return None
    return rows


def used(spec: Spec) -> bool:
    """Returns True if the records of a dispatch carry its routing; otherwise ranks gather the routing (`tables`)."""
    return spec.num_tokens > 0 and spec.capacity > 0 and window(spec) is not None


class SlicePlan(NamedTuple):
    """Counts and places of the records of this chip's rail, before they cross DCN (`two_axes`).

    Attributes:
      came: int32 `[N]`, number of records from each slice. largest: int32 `[]`, largest number of any chip, equal
        everywhere.
      starts: int32 `[N, M]`, place where each rank of this slice wants the records of each slice.
    """

    came: jax.Array
    largest: jax.Array
    starts: jax.Array


class Arrivals(NamedTuple):
    """Counts and places by which the headers of arrived records are read.

    Attributes:
      came, starts: fields of `SlicePlan`; None on one axis. expected: int32 `[R]`, number of records from each source.
      start, recv_counts, dropped: fields of `HeaderPlan`.
      topk_idx: a result of the dispatch.
    """

    came: Any
    starts: Any
    expected: jax.Array
    start: jax.Array
    recv_counts: jax.Array
    dropped: jax.Array
    topk_idx: jax.Array


class HeaderPlan(NamedTuple):
    """The records that a rank sends, and the counts and places of the records that it receives.

    Attributes:
      routes, sent, remote_start: as `plan.SendPlan`. header: int32 `[T, 128]`, as `record.Header`.
      start: int32 `[R]`, where each source's records begin in staging. recv_counts: int32 `[R, L]`.
      dropped: int32 `dropped_shape`, result of `_dropped` for every source; meaningless where staging is not packed.
      slices: None on one axis.
    """

    routes: Routes
    sent: jax.Array
    remote_start: jax.Array
    header: jax.Array
    start: jax.Array
    recv_counts: jax.Array
    dropped: jax.Array
    slices: SlicePlan | None

    def arrivals(self, topk_idx: jax.Array) -> Arrivals:
        """Returns the part that is read when the records have arrived."""
        came, starts = (None, None) if self.slices is None else (self.slices.came, self.slices.starts)
        return Arrivals(came, starts, self.routes.expected, self.start, self.recv_counts, self.dropped, topk_idx)


def sending(topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec) -> HeaderPlan:
    """Plans the records of this rank's tokens."""
    ranks, local, tokens = spec.num_ranks, spec.local_experts, spec.num_tokens
    rank = lax.axis_index(spec.axis_name)
    hit = _layout.ranks_hit(topk_idx, ranks, local).astype(jnp.int32)
    earlier = jnp.arange(ranks, dtype=jnp.int32)[:, None] < rank
    if spec.layout == "ranked":
        records = lax.all_gather(_records(hit, spec), spec.axis_name)
        row, recv_counts = _ranked_rows(topk_idx, hit, records[:, :ranks], earlier, spec)
        ends = jnp.sum(records[:, :ranks], axis=0, dtype=jnp.int32)
    else:
        order = tables.Order(topk_idx.reshape(-1), spec.num_experts)
        own = jnp.concatenate([order.counts, _records(hit, spec)])
        gathered = lax.all_gather(own, spec.axis_name)  # [R, E + R], on two axes [R, E + R + N]
        records = gathered[:, spec.num_experts :]
        counts = jnp.pad(gathered[:, : spec.num_experts], ((0, 0), (0, ranks * local - spec.num_experts)))
        recv_counts = lax.dynamic_slice_in_dim(counts, rank * local, local, axis=1)
        before = jnp.sum(jnp.where(earlier, counts, 0), axis=0, dtype=jnp.int32)
        totals = jnp.sum(counts, axis=0, dtype=jnp.int32)
        starts = _group_starts(totals, spec)
        base, ends = before + starts, jnp.where(totals > 0, starts + totals, 0)
        row = order.among(base[: spec.num_experts]).reshape(topk_idx.shape)
    last = jnp.int32(spec.capacity)
    if spec.layout == "padded":
        last = (topk_idx % local + 1) * (ranks * tokens)
    row = jnp.where(topk_idx >= 0, jnp.where(row < last, row, -2), -1)

    if plan.packs_staging(spec):
        sent = _layout.ranks_hit(jnp.where(row >= 0, topk_idx, -1), ranks, local).astype(jnp.int32)
        records = lax.all_gather(_records(sent, spec), spec.axis_name)
        starts = _layout.exclusive_cumsum(records[:, :ranks], axis=0)
        dropped = _dropped(topk_idx, row, jnp.any(ends > spec.capacity), spec)
    else:
        sent = hit
        dropped = jnp.zeros(dropped_shape(spec), jnp.int32)
        starts = jnp.broadcast_to(jnp.arange(ranks, dtype=jnp.int32)[:, None] * tokens, (ranks, ranks))
    expected, start = (lax.dynamic_slice_in_dim(a[:, :ranks], rank, 1, axis=1)[:, 0] for a in (records, starts))
    remote_start = lax.dynamic_slice_in_dim(starts, rank, 1, axis=0)[0]
    address = remote_start + _layout.exclusive_cumsum(sent, axis=0)
    routes = plan.routes_to(topk_idx, sent, address, expected, staging_rows(spec), spec)
    header = _header(topk_idx, row, topk_weights)
    slices = _slice_plan(records[:, ranks:], starts, spec) if len(spec.axis_name) == 2 else None
    return HeaderPlan(routes, sent, remote_start, header, start, recv_counts, dropped, slices)


def dropped_shape(spec: Spec) -> tuple[int, int, int]:
    """`[R, T, words]` where staging is packed; elsewhere every record comes, and one word keeps the place."""
    if plan.packs_staging(spec):
        return spec.num_ranks, spec.num_tokens, -(-spec.top_k // 32)
    return 1, 1, 1


def _dropped(topk_idx: jax.Array, row: jax.Array, any_anywhere: jax.Array, spec: Spec) -> jax.Array:
    """A bit for each slot of every source's tokens that belongs to this rank and was dropped: a record that is dropped
    as a whole does not arrive, and its token's rank waits for its partial sum in combine. Nothing travels where
    `any_anywhere`, the same on every rank, is false.
    """
    owner = jnp.where(row == -2, _layout.owners(topk_idx, spec.local_experts), -1)
    _, tokens, words = dropped_shape(spec)
    place = jnp.arange(words * 32, dtype=jnp.int32).reshape(words, 32)
    owner = jnp.pad(owner, ((0, 0), (0, words * 32 - spec.top_k)), constant_values=-1).reshape(tokens, words, 32)
    block = max(1, min(tokens, DROPPED_AT_ONCE // (spec.num_ranks * words)))
    owner = rounds.pad_to_blocks(owner, 0, block)

    def for_all_ranks(first: jax.Array) -> jax.Array:
        now = lax.dynamic_slice_in_dim(owner, first, block, axis=0)
        mine = now == jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None, None, None]
        return jnp.bitwise_or.reduce(jnp.where(mine, 1 << (place % 32), 0), axis=3)

    came = rounds.exchange(
        for_all_ranks,
        largest_pair=jnp.where(any_anywhere, jnp.int32(tokens), 0),
        max_rows=tokens,
        block=block,
        axis_name=spec.axis_name,
    )
    return came[:, :tokens]


def _records(sent: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[R]`, number of records for each rank, by `sent [T, R]`; on two axes `[R + N]`, then the numbers for each
    slice."""
    if len(spec.axis_name) == 2:
        sent = jnp.concatenate([sent, slices_of(sent, spec)], axis=1)
    return jnp.sum(sent, axis=0, dtype=jnp.int32)


def slices_of(sent: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[T, N]`, 1 for each slice with a rank that `sent [T, R]` names."""
    return jnp.max(sent.reshape(-1, *spec.axis_sizes), axis=2)


def _ranked_rows(
    topk_idx: jax.Array, hit: jax.Array, pairs: jax.Array, earlier: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """Row `[T, K]` of a token on the rank of each of its slots, and `recv_counts [R, L]`: sources in their order."""
    rank = lax.axis_index(spec.axis_name)
    before = jnp.sum(jnp.where(earlier, pairs, 0), axis=0, dtype=jnp.int32)
    row = plan.pick(before + _layout.exclusive_cumsum(hit, axis=0), _layout.owners(topk_idx, spec.local_experts))
    came = lax.dynamic_slice_in_dim(pairs, rank, 1, axis=1)
    return row, jnp.pad(came, ((0, 0), (0, spec.local_experts - 1)))


def _slice_plan(records: jax.Array, starts: jax.Array, spec: Spec) -> SlicePlan:
    """Takes `records [R, N]` of every rank for every slice, and `starts [R, R]` of every source on every rank."""
    slices, fast = spec.axis_sizes
    here, index = (lax.axis_index(name) for name in spec.axis_name)
    count = lax.dynamic_index_in_dim(records.reshape(slices, fast, slices), index, axis=1, keepdims=False)
    starts = lax.dynamic_index_in_dim(starts.reshape(slices, fast, slices, fast), index, axis=1, keepdims=False)
    return SlicePlan(
        lax.dynamic_index_in_dim(count, here, axis=1, keepdims=False),
        jnp.max(records),
        lax.dynamic_index_in_dim(starts, here, axis=1, keepdims=False),
    )


def staging_rows(spec: Spec) -> int:
    """Records that staging has room for. No record arrives in the last ones. With them the staging of a dispatch is
    larger than that of a combine, and only then XLA puts the second where the first was: 254 MiB less for 4096 fp8
    tokens."""
    return plan.dispatch_staging_rows(spec) + index_kernel.records_at_once(spec.num_tokens)


def for_all_gather(todo: HeaderPlan, spec: Spec) -> HeaderPlan:
    """Changes the routes so that records stay on this rank, token by token, for `all_gathered`."""
    tokens, ranks = spec.num_tokens, spec.num_ranks
    number = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    routes = Routes(jnp.zeros_like(number), number, jnp.full((ranks,), tokens, jnp.int32), tokens)
    return todo._replace(routes=routes, start=jnp.arange(ranks, dtype=jnp.int32) * tokens)


def all_gathered(records: jax.Array, spec: Spec) -> jax.Array:
    """Staging with every rank's records; a rank finds its own slots in their headers."""
    return lax.all_gather(records, spec.axis_name, tiled=True)


def _group_starts(totals: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[R * L]`: first row of every expert's group on its rank, from the rows of all experts."""
    ranks, local = spec.num_ranks, spec.local_experts
    if spec.layout == "padded":
        return jnp.tile(jnp.arange(local, dtype=jnp.int32) * (ranks * spec.num_tokens), ranks)
    sizes = _layout.round_up(totals, spec.alignment).reshape(ranks, local)
    return _layout.exclusive_cumsum(sizes, axis=1).reshape(-1)


def _header(topk_idx: jax.Array, row: jax.Array, topk_weights: jax.Array) -> jax.Array:
    tokens, top_k = topk_idx.shape
    weights = lax.bitcast_convert_type(topk_weights.astype(jnp.float32), jnp.int32)
    number = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    words = jnp.concatenate([topk_idx, row, weights, number], axis=1)
    return jnp.pad(words, ((0, 0), (Header(top_k).experts, 0)))


def arrived(
    staged: jax.Array, known: Arrivals, *, record: Record, spec: Spec, config: KernelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the staged record of each row int32 `[rows]`, weights float32 `[rows]` and positions `[R, T, slots]`.
    They come from the headers of the arrived records, and from the dropped slots. Ranked rows have several weights
    each.
    """
    dropped = known.dropped
    local = spec.local_experts
    rows = math.prod(spec.row_dims)
    rank = lax.axis_index(spec.axis_name)
    used = jnp.int32(rows) if spec.layout == "padded" else _layout.num_rows(known.recv_counts, spec)
    chosen = window(spec)
    assert chosen is not None
    source, weights, positions = index_kernel.index_rows(
        staged,
        known.start,
        known.expected,
        (rank * local, jnp.int32(local), used),
        record=record,
        tokens=spec.num_tokens,
        top_k=spec.top_k,
        size=rows,
        window=chosen,
        launch=hardware.launch("index_rows", lambda block: 0, preferred=1, smallest=1, available=1, config=config),
    )
    if plan.packs_staging(spec):
        bits = (dropped[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        bits = bits.reshape(*dropped.shape[:2], -1)[..., : spec.top_k]
        positions = jnp.where(bits > 0, -2, positions)
    if spec.layout == "ranked":  # all of a token's slots here name its one row, or say that it was dropped
        row, dropped = jnp.max(positions, axis=2), jnp.min(positions, axis=2)
        positions = jnp.where(row >= 0, row, dropped)[..., None]
    return source, weights, positions


def slots_of_rows(words: jax.Array, source: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Weights and local experts `[rows, K]` of ranked rows, from their headers `[rows, 128]`: 0 and `-1` for slots that
    belong elsewhere, and for rows without a record.
    """
    header, top_k = Header(spec.top_k), spec.top_k
    first = lax.axis_index(spec.axis_name) * spec.local_experts
    experts = words[:, header.experts : header.experts + top_k] - first
    weights = words[:, header.weights : header.weights + top_k]
    here = (source >= 0)[:, None] & (experts >= 0) & (experts < spec.local_experts)
    weights = lax.bitcast_convert_type(weights, jnp.float32)
    return jnp.where(here, weights, 0.0), jnp.where(here, experts, -1)
