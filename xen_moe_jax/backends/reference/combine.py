"""Combine: each expert rank reduces a token's rows in slot order, one partial row travels back, the token's rank adds
them up.

Tokens travel in the order "most rows first", which both sides can compute: then a round's blocks need the same number
of slots almost everywhere, and slots beyond the largest in a block are never visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _nodes, _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._layout import owners
from xen_moe_jax._quantize import Wire, from_wire, quantize_arrays
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import rounds
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.rounding import keep, multiply_rounded, round_to, runtime_zero


def combine(
    call: Call, y: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array, weights: jax.Array
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`; numerics in docs/design/internals.md."""
    spec, wire = call.spec, call.wire
    if spec.num_tokens == 0 or y.size == 0:
        return jnp.zeros((spec.num_tokens, y.shape[-1]), y.dtype)
    zero = runtime_zero(recv_counts)
    rows = y.reshape(-1, y.shape[-1])
    flat_weights = weights.reshape(-1) if call.weighted else None
    block = rounds.block_rows(spec.num_tokens, call.config)

    positions = ops.where(positions < rows.shape[0], positions, -2)  # a row that does not exist counts as dropped
    came = positions != -1
    slots = jnp.sum(came, axis=-1, dtype=jnp.int32)
    order = rounds.pad_to_blocks(most_rows_first(slots), 1, block, fill=-1)
    packed = lax.sort((~came, positions), dimension=2, num_keys=1)[1].reshape(-1, positions.shape[-1])
    largest_pair = _ranks.largest(jnp.max(jnp.sum(slots > 0, axis=1, dtype=jnp.int32)), spec.axis_name)
    first = jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None] * spec.num_tokens

    def produce(first_row):
        token = lax.dynamic_slice_in_dim(order, first_row, block, axis=1)
        position = ops.where(token >= 0, ops.take(packed, first + jnp.maximum(token, 0)), -1)
        partial = _reduce_slots(rows, flat_weights, position, zero)
        return _to_wire(partial, y.dtype, wire, zero)

    received = rounds.exchange(
        produce, largest_pair=largest_pair, max_rows=spec.num_tokens, block=block, axis_name=spec.axis_name
    )
    hidden = rows.shape[-1]
    return _reduce_ranks(
        received, topk_idx, hidden, y.dtype, wire, zero, spec, _nodes.ranks_per_node(spec, call.config)
    )


def most_rows_first(slots: jax.Array) -> jax.Array:
    """int32 `[R, T]`: each source's tokens by falling number of rows, ties in token order."""
    return ops.stable_order(-slots, axis=1)[1]


def _reduce_slots(rows, weights, position, zero):
    """float32 `[R, B, H]`: a token's rows added in slot order; `position [R, B, slots]` has its valid entries first."""
    deepest = jnp.max(jnp.sum(position != -1, axis=-1, dtype=jnp.int32))

    def add_slot(state):
        j, acc = state
        at = lax.dynamic_index_in_dim(position, j, axis=2, keepdims=False)
        place = jnp.maximum(at, 0)
        row = ops.take(rows, place).astype(jnp.float32)
        if weights is not None:
            row = multiply_rounded(row, ops.take(weights, place)[..., None], zero)
        return j + 1, ops.where(at >= 0, acc + row, acc)

    acc = jnp.zeros((*position.shape[:2], rows.shape[-1]), jnp.float32)
    return lax.while_loop(lambda state: state[0] < deepest, add_slot, (jnp.int32(0), acc))[1]


def _to_wire(partial, dtype, wire: Wire | None, zero):
    if wire is None:
        return (round_to(partial, dtype, zero),)
    values, scales = quantize_arrays(partial, wire)
    return keep(values, zero), scales  # where nothing travels in between, XLA would drop the rounding (seen on GPU)


def _from_wire(payload, wire: Wire | None, hidden: int, zero):
    if wire is None:
        return payload[0].astype(jnp.float32)
    return keep(from_wire(payload, wire, hidden, jnp.float32), zero)


def _reduce_ranks(
    received, topk_idx, hidden: int, dtype, wire: Wire | None, zero, spec: Spec, ranks_per_node: int
) -> jax.Array:
    """Adds the partial rows on the token's own rank: ranks ascending, or inside each node first where there are
    several nodes."""
    owner = owners(topk_idx, spec.local_experts)
    counts = jnp.sum(
        owner[:, :, None] == jnp.arange(spec.num_ranks, dtype=jnp.int32), axis=1, dtype=jnp.int32
    ).T  # [R, T]: slots of each token on each rank
    counts = jnp.minimum(counts, spec.slots)  # as many rows as `positions` shows the expert rank
    place = ops.stable_order(most_rows_first(counts), axis=1)[1]
    stride = received[0].shape[1]
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in received)

    def add_rank(rank, acc):
        hit = lax.dynamic_index_in_dim(counts, rank, axis=0, keepdims=False) > 0
        at = lax.dynamic_index_in_dim(place, rank, axis=0, keepdims=False) + rank * stride
        partial = _from_wire(tuple(ops.take(a, at) for a in flat), wire, hidden, zero)
        return ops.where(hit, acc + partial, acc)

    start = jnp.zeros((spec.num_tokens, hidden), jnp.float32)
    if ranks_per_node == spec.num_ranks:
        return lax.fori_loop(0, spec.num_ranks, add_rank, start).astype(dtype)

    def add_node(node, acc):
        inside = lax.fori_loop(node * ranks_per_node, (node + 1) * ranks_per_node, add_rank, start)
        partial = _from_wire(_to_wire(inside, dtype, wire, zero), wire, hidden, zero)
        return acc + partial

    return lax.fori_loop(0, spec.num_ranks // ranks_per_node, add_node, start).astype(dtype)
