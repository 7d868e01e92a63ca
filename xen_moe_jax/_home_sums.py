"""Combine of rows that lie on other ranks than their experts' homes, bit for bit as if they lay at home.

A combine rounds the sum of a token's rows on each rank that holds them. Which rows are added before a rounding then
depends on the placement, and so would the result. Here every row travels by itself, in its own dtype, and the token's
rank does what the homes would have done: it adds the rows of each home in slot order, rounds, and adds these sums in
ascending order of the homes. The CUDA backend has a kernel for it (cuda_kernels/combine/home.cuh). Elsewhere rows by
themselves are a combine of `T * K` tokens with one slot each, which every backend has, or one after another for each
slot (`AT_ONCE`). Derivatives are those of the usual combine.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from xen_moe_jax import _moe_primitives as primitives
from xen_moe_jax import _nodes, _shapes
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._primitive import declare
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.rounding import multiply_rounded, round_to, runtime_zero

AT_ONCE = 4096
"""Up to this many rows `T * K` travel in one combine. Memory for a combine grows with ranks times tokens, so that more
rows take a combine for each slot, one after another."""


def slots_at_once(num_tokens: int, top_k: int) -> int:
    """Slots of a token whose rows travel in the same combine: all of them, or one."""
    return top_k if num_tokens * top_k <= AT_ONCE else 1


def homes(topk_idx: jax.Array, experts: jax.Array, num_experts: int) -> jax.Array:
    """int32 `[T, K]`: the home of each slot's expert, -1 for an unused slot. `topk_idx` has slots of a placement whose
    `experts` are `[R, S]`."""
    expert = ops.take(experts.reshape(-1), jnp.maximum(topk_idx, 0))
    local = -(-num_experts // experts.shape[0])
    return jnp.where((topk_idx >= 0) & (expert >= 0), expert // local, -1)


def _combine(y: Any, *operands: Any, spec: Spec, **params: Any) -> Any:
    topk_idx, positions, recv_counts, active, weights, home, topk_weights = operands
    rows, slots = math.prod(spec.row_dims), slots_at_once(spec.num_tokens, spec.top_k)
    tokens = slots * spec.num_tokens
    single = dataclasses.replace(
        spec, num_tokens=tokens, top_k=1, layout="grouped", capacity=rows, alignment=1, token_dims=()
    )
    flat, flat_weights = y.reshape(rows, y.shape[-1]), weights.reshape(rows)

    def alone(some: Any) -> Any:
        idx, places = some
        handle = idx[:, None], places[..., None], recv_counts, active, flat_weights
        return primitives.combine_p.bind(flat, *handle, spec=single, **{**params, "weighted": False})[0]

    # The slots come first, then the tokens.
    idx, places = topk_idx.T.reshape(-1, tokens), jnp.moveaxis(positions, 2, 1).reshape(spec.num_ranks, -1, tokens)
    returned = lax.map(alone, (idx, jnp.moveaxis(places, 1, 0))) if len(idx) > 1 else alone((idx[0], places[:, 0]))
    factors = topk_weights if params["weighted"] else None
    per_node = _nodes.ranks_per_node(spec, params["config"])
    return _add_up(returned.reshape(-1, y.shape[-1]), home, factors, per_node, runtime_zero(recv_counts))


def _add_up(rows: jax.Array, home: jax.Array, weights: jax.Array | None, per_node: int, zero: jax.Array) -> jax.Array:
    """`[T, H]` from `rows [K * T, H]`, slots first: a token's rows by ascending home, those of one home in slot order.
    A sum is rounded where the home ends, and again where its node ends if there are several."""
    num_tokens, top_k = home.shape
    last = jnp.iinfo(jnp.int32).max
    keys, order = ops.stable_order(jnp.where(home >= 0, home, last), 1)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    flat_weights = None if weights is None else weights.T.reshape(-1)

    def rounded(x: jax.Array) -> jax.Array:
        return round_to(x, rows.dtype, zero).astype(jnp.float32)

    def add(j: Any, state: Any) -> Any:
        home_sum, node_sum, total, before = state
        here = lax.dynamic_index_in_dim(keys, j, 1, keepdims=False)
        at = lax.dynamic_index_in_dim(order, j, 1, keepdims=False) * num_tokens + tokens
        row = ops.take(rows, at).astype(jnp.float32)
        if flat_weights is not None:
            row = multiply_rounded(row, ops.take(flat_weights, at)[:, None], zero)
        left, left_node = here != before, here // per_node != before // per_node
        node_sum = ops.where(left, node_sum + rounded(home_sum), node_sum)
        home_sum = ops.where(left, jnp.zeros_like(home_sum), home_sum)
        total = ops.where(left_node, total + rounded(node_sum), total)
        node_sum = ops.where(left_node, jnp.zeros_like(node_sum), node_sum)
        return ops.where(here < last, home_sum + row, home_sum), node_sum, total, here

    zeros = jnp.zeros((num_tokens, rows.shape[-1]), jnp.float32)
    state = zeros, zeros, zeros, keys[:, 0]
    home_sum, node_sum, total, _ = lax.fori_loop(0, top_k, add, state)
    return (total + rounded(node_sum + rounded(home_sum))).astype(rows.dtype)


# Operands: those of a combine, then `home int32 [T, K]` (`homes`) and the router weights `[T, K]` of the rank's tokens.
# No derivative is taken by these router weights: the rows' weights, which the dispatch has sent, have it.
combine_at_home_p = declare("combine_at_home", _shapes.combine, otherwise=_combine)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y, *handle, weights = primals[:6]
    out = combine_at_home_p.bind(*primals, **params)
    out_dot = primitives.combine_tangent(tangents[0], tangents[5], y, weights, handle, params)
    return out, [primitives.zero(out[0]) if out_dot is None else out_dot]


def _transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    return [*primitives.combine_transpose(cotangents, *operands[:6], **params), None, None]


ad.primitive_jvps[combine_at_home_p] = _jvp
ad.primitive_transposes[combine_at_home_p] = _transpose
