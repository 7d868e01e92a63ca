"""Dispatch and redispatch: metadata by one small all-gather, rows by rounds of all-to-all, placed by a gather.

Each row crosses once per (token, destination rank), even if several experts there need it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout, _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._quantize import from_wire, quantize_arrays
from xen_moe_jax.backends import rounds
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.metadata import gather_metadata, place_slots, place_weights
from xen_moe_jax.backends.rounding import keep, runtime_zero


def dispatch(
    call: Call, x: jax.Array, scales: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the results in the order of docs/design/internals.md."""
    spec = call.spec
    topk_idx = _layout.sanitize(topk_idx, spec.num_experts)
    rank = _ranks.index(spec.axis_name)
    routing, weights, pairs = gather_metadata(topk_idx, topk_weights, spec)
    layout = _layout.recv_layout(routing.topk_idx, routing.order, routing.counts, rank, spec)
    rows = _send_rows(call, x, scales, topk_idx, layout.positions, jnp.max(pairs))
    row_weights = place_weights(weights, layout, spec)
    results = (*rows, layout.positions, layout.recv_counts, row_weights, topk_idx)
    if spec.layout == "ranked":
        local_idx = place_slots(layout.local_idx, layout.positions, spec, fill=-1)
        return (*results, local_idx)
    return results


def redispatch(
    call: Call, x: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array
) -> jax.Array:
    """Sends a new payload along a known routing: no metadata travels, but the ranks must agree on the number of
    rounds."""
    del recv_counts
    spec = call.spec
    received = jnp.sum(jnp.any(positions != -1, axis=-1), axis=1, dtype=jnp.int32)
    largest_pair = _ranks.largest(jnp.max(received), spec.axis_name)
    no_scales = jnp.zeros((spec.num_tokens, 0), jnp.float32)
    rows, _ = _send_rows(call, x, no_scales, topk_idx, positions, largest_pair)
    return rows


def _send_rows(call: Call, x, scales, topk_idx, positions, largest_pair):
    """Rows (and scales) of `routed.x`, zero wherever nothing was placed."""
    spec, wire = call.spec, call.wire
    payload = (x, scales) if scales.shape[1] else (x,)
    if x.size == 0:
        return tuple(jnp.zeros(spec.rows_shape(a.shape[1]), a.dtype) for a in (x, scales))
    hit = _layout.ranks_hit(topk_idx, spec.num_ranks, spec.local_experts)
    block = rounds.block_rows(spec.num_tokens, call.config)
    tokens = rounds.pad_to_blocks(list_members(hit.T), 1, block, fill=0)
    if wire is not None:
        payload = quantize_arrays(x, wire)

    def produce(first_row):
        chosen = lax.dynamic_slice_in_dim(tokens, first_row, block, axis=1)
        return tuple(ops.take(a, chosen) for a in payload)

    received = rounds.exchange(
        produce, largest_pair=largest_pair, max_rows=spec.num_tokens, block=block, axis_name=spec.axis_name
    )
    stride = received[0].shape[1]
    came = jnp.any(positions != -1, axis=-1)
    ordinal = _layout.exclusive_cumsum(came.astype(jnp.int32), axis=1)
    staged_row = ordinal + stride * jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None]
    source = place_slots(jnp.broadcast_to(staged_row[..., None], positions.shape), positions, spec, fill=-1, flat=True)

    def place(staged):
        staged = staged.reshape(-1, staged.shape[-1])
        rows = ops.where(source >= 0, ops.take(staged, jnp.maximum(source, 0)), 0)
        return rows.reshape(*spec.row_dims, rows.shape[-1])

    if wire is not None:
        values, row_scales = received
        zero = runtime_zero(positions + 2)
        received = (keep(from_wire((values, row_scales), wire, x.shape[1], x.dtype), zero),)
    rows, *row_scales = (place(a) for a in received)
    return rows, row_scales[0] if row_scales else jnp.zeros(spec.rows_shape(0), jnp.float32)


def list_members(hit: jax.Array) -> jax.Array:
    """int32 `[R, T]`: for each rank the tokens with `hit[r, t]`, ascending, then filler (valid token numbers)."""
    return ops.stable_order(~hit, axis=1)[1]
