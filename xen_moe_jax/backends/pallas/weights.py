"""Sends one number for each slot of a token to the token's rows, and back: gradients by router weights are made of
these.

There: the headers of a dispatch without rows carry them. Back: the rows of a (source, expert) pair lie side by side, in
the order of the source's slots, so that they return as runs and need no addresses: a source counts its slots of each
expert. Each round moves as many numbers as a source has slots; a balanced routing needs about two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import tables
from xen_moe_jax.backends.pallas.combine import combine
from xen_moe_jax.backends.pallas.dispatch import dispatch
from xen_moe_jax.pallas_kernels.record import LANES


def weights_to_rows(
    call: Call,
    values: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *local_idx: jax.Array,
) -> jax.Array:
    """`values [T, K]` -> `spec.weights_shape`: the weights of a dispatch whose rows are not used."""
    del positions, recv_counts, local_idx
    spec = call.spec
    x, scales = jnp.zeros((spec.num_tokens, LANES), jnp.bfloat16), jnp.zeros((spec.num_tokens, 0), jnp.float32)
    return dispatch(call, x, scales, topk_idx, values)[4]


def weights_from_rows(
    call: Call,
    values: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *local_idx: jax.Array,
) -> jax.Array:
    """`values`, `spec.weights_shape` -> `[T, K]`; 0 for slots without a row."""
    spec = call.spec
    if spec.layout == "ranked":
        rows = jnp.where(local_idx[0] >= 0, values, 0.0)
        none = jnp.zeros(spec.weights_shape, jnp.float32)
        return combine(call, rows, topk_idx, positions, recv_counts, none)
    return _runs_back(values.reshape(-1), topk_idx, recv_counts, spec)


def _runs_back(values: jax.Array, topk_idx: jax.Array, recv_counts: jax.Array, spec: Spec) -> jax.Array:
    ranks, local = spec.num_ranks, spec.local_experts
    block = max(1, topk_idx.size // (ranks * local))
    base = _layout.expert_bases(recv_counts, spec)  # [R, L]
    last = jnp.int32(spec.capacity)
    if spec.layout == "padded":
        last = (jnp.arange(local, dtype=jnp.int32) + 1) * (ranks * spec.num_tokens)
    kept = jnp.clip(last - base, 0, recv_counts)
    padded = jnp.pad(values, (0, block))
    expert = topk_idx.reshape(-1)
    order, _ = tables.order_within_bins(expert, ranks * local)
    place = jnp.arange(block, dtype=jnp.int32)
    largest = lax.pmax(jnp.max(kept), spec.axis_name)

    def one_round(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, out = state
        run = jax.vmap(lambda start: lax.dynamic_slice_in_dim(padded, start, block))
        sent = run((base + first).reshape(-1)).reshape(ranks, local, block)
        sent = jnp.where(first + place < kept[..., None], sent, 0)
        came = lax.all_to_all(sent, spec.axis_name, 0, 0, tiled=True).reshape(-1)
        here = (expert >= 0) & (order >= first) & (order < first + block)
        at = jnp.where(here, expert * block + order - first, 0)
        return first + block, jnp.where(here, came[at], out)

    start = jnp.int32(0), jnp.zeros(expert.shape, values.dtype)
    return lax.while_loop(lambda state: state[0] < largest, one_round, start)[1].reshape(topk_idx.shape)
