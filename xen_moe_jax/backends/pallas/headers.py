"""Routing that rides in the records of a dispatch: ranks exchange counts, and nothing else that grows with tokens.

From the counts of all ranks a source knows which row of its destination each of its slots gets, and writes that into
the header of the record, with the expert, the weight and the number of the token. The destination reads the headers
of what has arrived (`pallas_kernels.index_rows`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import hardware, plan, tables
from xen_moe_jax.pallas_kernels import index_rows as index_kernel
from xen_moe_jax.pallas_kernels.push import Routes
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

WINDOW = 64 * 1024
"""Rows that are indexed at a time, at most."""
SMALLEST_WINDOW = 4 * 1024


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


def ride(spec: Spec) -> bool:
    """Whether the routing of a whole dispatch rides in its records; otherwise it is gathered (`tables`).

    On two axes records are forwarded by ranks that need to know them before they come, and a ranked row has no place
    of its own that its source could know.
    """
    return (
        len(spec.axis_name) == 1
        and spec.layout != "ranked"
        and spec.num_tokens > 0
        and spec.capacity > 0
        and window(spec) is not None
    )


class Riding(NamedTuple):
    """What a rank sends, and what it knows of what it gets.

    Attributes:
      routes: as `plan.SendPlan`. header: int32 `[T, 128]`, as `record.Header`.
      start: int32 `[R]`, where each source's records begin in staging. recv_counts: int32 `[R, L]`.
    """

    routes: Routes
    header: jax.Array
    start: jax.Array
    recv_counts: jax.Array


def sending(topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec) -> Riding:
    """Of this rank's tokens."""
    ranks, local, tokens = spec.num_ranks, spec.local_experts, spec.num_tokens
    rank = lax.axis_index(spec.axis_name)
    hit = _layout.ranks_hit(topk_idx, ranks, local).astype(jnp.int32)
    order = tables.Order(topk_idx.reshape(-1), spec.num_experts)
    own = jnp.concatenate([order.counts, jnp.sum(hit, axis=0, dtype=jnp.int32)])
    gathered = lax.all_gather(own, spec.axis_name)  # [R, E + R]
    counts = jnp.pad(gathered[:, : spec.num_experts], ((0, 0), (0, ranks * local - spec.num_experts)))
    recv_counts = lax.dynamic_slice_in_dim(counts, rank * local, local, axis=1)

    earlier = jnp.arange(ranks, dtype=jnp.int32)[:, None] < rank
    before = jnp.sum(jnp.where(earlier, counts, 0), axis=0, dtype=jnp.int32)
    base = before + _group_starts(jnp.sum(counts, axis=0, dtype=jnp.int32), spec)
    row = order.among(base[: spec.num_experts]).reshape(topk_idx.shape)
    last = jnp.int32(spec.capacity)
    if spec.layout == "padded":
        last = (topk_idx % local + 1) * (ranks * tokens)
    row = jnp.where(topk_idx >= 0, jnp.where(row < last, row, -2), -1)

    if plan.packs_staging(spec):
        sent = _layout.ranks_hit(jnp.where(row >= 0, topk_idx, -1), ranks, local).astype(jnp.int32)
        pairs = lax.all_gather(jnp.sum(sent, axis=0, dtype=jnp.int32), spec.axis_name)
        remote_start = jnp.sum(jnp.where(earlier, pairs, 0), axis=0, dtype=jnp.int32)
    else:
        sent, pairs = hit, gathered[:, spec.num_experts :]
        remote_start = jnp.full((ranks,), rank * tokens, jnp.int32)
    expected = lax.dynamic_slice_in_dim(pairs, rank, 1, axis=1)[:, 0]
    if plan.packs_staging(spec):
        start = _layout.exclusive_cumsum(expected, axis=0)
    else:
        start = jnp.arange(ranks, dtype=jnp.int32) * tokens
    address = remote_start + _layout.exclusive_cumsum(sent, axis=0)
    rows = plan.dispatch_staging_rows(spec) + index_kernel.records_at_once(tokens)
    routes = plan.routes_to(topk_idx, sent, address, expected, rows, spec)
    return Riding(routes, _header(topk_idx, row, topk_weights), start, recv_counts)


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
    staged: jax.Array, riding: Riding, record: Record, spec: Spec, config: KernelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Staged record of each row int32 `[rows]`, weights `spec.row_dims`, positions `[R, T, K]`."""
    local = spec.local_experts
    rows = math.prod(spec.row_dims)
    rank = lax.axis_index(spec.axis_name)
    used = jnp.int32(rows) if spec.layout == "padded" else _layout.num_rows(riding.recv_counts, spec)
    chosen = window(spec)
    assert chosen is not None
    source, weights, positions = index_kernel.index_rows(
        staged,
        riding.start,
        riding.routes.expected,
        (rank * local, jnp.int32(local), used),
        record=record,
        tokens=spec.num_tokens,
        top_k=spec.top_k,
        size=rows,
        window=chosen,
        launch=hardware.launch("index_rows", lambda block: 0, preferred=1, smallest=1, available=1, config=config),
    )
    return source, weights.reshape(spec.row_dims), positions
