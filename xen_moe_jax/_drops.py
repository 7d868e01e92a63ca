"""Chooses the rows that find room under a capacity, for every rule but "position" (the argument `drop` of a dispatch).

The rule is applied before anything is sent. Every rank gathers the counts ("source") or the router weights ("weight")
of all ranks, and comes to the same decision from the same numbers. The entries of its `topk_idx` whose rows find no
room become -1, as if the router had left those slots unused: backends, handles and derivatives see nothing else. Under
"position" nothing is gathered: a row's position on the rank that receives it decides.

A rank takes the rows that are sent to it in the order of the rule, up to the first one that no longer fits. Rows fit
if the layout that they would have, alignment included, ends at or before the capacity; the padding behind the last row
need not fit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout, _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._primitive import declare, declare_composite
from xen_moe_jax._spec import Spec


def keep_rows(
    topk_idx: jax.Array, topk_weights: jax.Array, active: jax.Array, *, drop: str, spec: Spec, config: KernelConfig
) -> tuple[jax.Array, jax.Array] | None:
    """Applies the rule `drop`. Returns None where positions decide, because this is the rule or because the result is
    the same.

    Args:
      topk_idx: int32 `[T, K]`, sanitised, with -1 for slots that send no row.
      topk_weights: float32 `[T, K]`; no gradient passes through the decision.
      active: bool `[R]`, or `_active.EVERY_RANK`.

    Returns:
      `topk_idx` with -1 for every row that is dropped, and int32 `[]`: rows that were meant for this rank and dropped.
    """
    by_position = {"position": True, "source": spec.layout != "grouped", "weight": False}[drop]
    if by_position or _room_for_all(spec):
        return None
    operands = topk_idx, lax.stop_gradient(topk_weights), active
    kept, dropped = keep_rows_p.bind(*operands, spec=spec, drop=drop, config=config)
    return kept, dropped


def _room_for_all(spec: Spec) -> bool:
    """Returns whether no routing can overflow, not even one whose tokens name an expert several times."""
    if spec.layout == "padded":
        return spec.top_k == 1
    rows = spec.num_ranks * spec.num_tokens * spec.slots
    most = rows + min(spec.local_experts, rows) * (spec.alignment - 1)
    return spec.capacity >= most // spec.alignment * spec.alignment


# -- from all ranks to all ranks ---------------------------------------------------------------------------------------


def _all_gather(words: Any, active: Any, *, spec: Spec, **_: Any) -> Any:
    del active  # an inactive rank's routing is masked already, so that its words stand for no rows
    return _ranks.all_gather(words, spec.axis_name)


# `words int32 [N]` of every rank on every rank, `[R, N]`; zero for an inactive rank.
gather_words_p = declare(
    "gather_words",
    lambda words, *_, spec, **__: [((spec.num_ranks, *words.shape), words.dtype)],
    otherwise=_all_gather,
)


def _gather(words: jax.Array, active: Any, params: dict[str, Any]) -> jax.Array:
    return gather_words_p.bind(words, active, spec=params["spec"], config=params["config"])[0]


# -- the rules ---------------------------------------------------------------------------------------------------------


def _keep_rows(topk_idx: Any, topk_weights: Any, active: Any, *, drop: str, **params: Any) -> tuple[Any, Any]:
    if drop == "source":
        return _by_source(topk_idx, active, params)
    return _by_weight(topk_idx, topk_weights, active, params)


keep_rows_p = declare_composite(
    "keep_rows", lambda topk_idx, *_, **__: [(topk_idx.shape, jnp.int32), ((), jnp.int32)], _keep_rows
)


def _by_source(topk_idx: jax.Array, active: Any, params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Rows in the order (source rank, expert, token, slot). Counts alone decide."""
    spec: Spec = params["spec"]
    order, own = _layout.order_within_bins(topk_idx.reshape(-1), spec.num_experts)
    counts = _gather(own, active, params)
    counts = jnp.pad(counts, ((0, 0), (0, spec.num_ranks * spec.local_experts - spec.num_experts)))
    counts = counts.reshape(spec.num_ranks, spec.num_ranks, spec.local_experts)
    taken = rows_taken(counts, spec)
    me = _ranks.index(spec.axis_name)
    limit = lax.dynamic_index_in_dim(taken, me, 0, keepdims=False).reshape(-1)
    kept = order.reshape(topk_idx.shape) < ops.take(limit, jnp.maximum(topk_idx, 0))
    dropped = lax.dynamic_index_in_dim(counts - taken, me, 1, keepdims=False)
    return ops.where(kept, topk_idx, -1), jnp.sum(dropped, dtype=jnp.int32)


def rows_taken(counts: jax.Array, spec: Spec) -> jax.Array:
    """The part of `counts int32 [source, receiver, L]` that each receiver takes, in the order (source, expert).

    For each cell (source, expert) the layout of all cells before it is known, so that the number of its rows that still
    fit is too. Behind a cell that does not fit as a whole this number may be wrong, and is never read.
    """
    size = spec.alignment
    before = _layout.exclusive_cumsum(counts, axis=0)  # rows of earlier sources for the same expert
    aligned = _layout.round_up(before, size)
    lower = _layout.exclusive_cumsum(_layout.round_up(before + counts, size), axis=2)
    upper = jnp.sum(aligned, axis=2, keepdims=True, dtype=jnp.int32) - jnp.cumsum(aligned, axis=2, dtype=jnp.int32)
    experts = lax.broadcasted_iota(jnp.int32, counts.shape, 2)
    last = jnp.max(jnp.where(before > 0, experts, -1), axis=2, keepdims=True)
    unneeded = jnp.sum(jnp.where(experts == last, aligned - before, 0), axis=2, keepdims=True, dtype=jnp.int32)
    room = spec.capacity - lower
    between = ops.divide(jnp.maximum(room - upper + unneeded, 0), size) * size  # another group follows
    room = jnp.where(last > experts, between, room)
    taken = jnp.clip(room - before, 0, counts)
    in_order = jnp.swapaxes(taken < counts, 0, 1).reshape(spec.num_ranks, -1).astype(jnp.int32)
    full = _layout.exclusive_cumsum(in_order, axis=1) > 0
    full = jnp.swapaxes(full.reshape(spec.num_ranks, spec.num_ranks, -1), 0, 1)
    return jnp.where(full, 0, taken)


def _by_weight(
    topk_idx: jax.Array, topk_weights: jax.Array, active: Any, params: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Rows by router weight, the largest first; equal ones in the order (source rank, token, slot)."""
    spec: Spec = params["spec"]
    if spec.layout == "ranked":
        owner = _layout.owners(topk_idx, spec.local_experts)
        names, weights, same = _first_slots(owner, topk_weights)
    else:
        names, weights, same = topk_idx, topk_weights, None
    words = jnp.concatenate([(names + 1).reshape(-1), _descending(weights).reshape(-1)])
    names, keys = jnp.split(_gather(words, active, params), 2, axis=1)
    names, keys = names.reshape(-1) - 1, keys.reshape(-1)

    # A bin has a capacity of its own: all rows of a rank, or those of one expert in the padded layout.
    per_bin = spec.local_experts if spec.layout == "grouped" else 1
    num_bins = -(-spec.num_experts // per_bin) if spec.layout != "ranked" else spec.num_ranks
    bins = ops.where(names >= 0, ops.divide(names, per_bin), num_bins)
    bins, _, names, places = lax.sort((bins, keys, names, lax.iota(jnp.int32, keys.size)), num_keys=2, is_stable=True)
    fits = _rows_needed(bins, names, num_bins, spec) <= _bin_capacity(spec)
    me = _ranks.index(spec.axis_name)
    receiver = ops.divide(names, spec.local_experts) if spec.layout == "padded" else bins
    dropped = jnp.sum((names >= 0) & (receiver == me) & ~fits, dtype=jnp.int32)
    kept = ops.put(lax.full(fits.shape, 0, jnp.int32), places, fits.astype(jnp.int32))
    kept = lax.dynamic_index_in_dim(kept.reshape(spec.num_ranks, *topk_idx.shape), me, 0, keepdims=False) > 0
    if same is not None:
        kept = jnp.any(same & kept[:, None, :], axis=-1)
    return ops.where(kept & (topk_idx >= 0), topk_idx, -1), dropped


def _bin_capacity(spec: Spec) -> int:
    return spec.num_ranks * spec.num_tokens if spec.layout == "padded" else spec.capacity


def _first_slots(owner: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ranked layout: a row for each (token, rank), in the place of the token's first slot there.

    Returns:
      the rank in that place and -1 in all others; there the sum of the row's router weights, added in slot order; bool
      `[T, K, K]`: slot `[1]` has its row in the place of slot `[2]`.
    """
    slots = range(owner.shape[1])
    first = jnp.stack([jnp.all(owner[:, :k] != owner[:, k : k + 1], axis=1) for k in slots], axis=1)
    first &= owner >= 0
    total = jnp.zeros_like(weights)
    for k in slots:  # one addition after another: the same bits everywhere
        total = jnp.where(owner == owner[:, k : k + 1], total + weights[:, k : k + 1], total)
    same = (owner[:, :, None] == owner[:, None, :]) & first[:, None, :]
    return jnp.where(first, owner, -1), total, same


def _descending(weights: jax.Array) -> jax.Array:
    """int32 keys that sort float32 `weights` downwards: both zeros are equal, and a NaN comes last.

    Integers alone are compared, because processors differ in their treatment of denormal numbers.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    ascending = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > 0x7F800000, 0x7FFFFFFF, -ascending)


def _rows_needed(bins: jax.Array, names: jax.Array, num_bins: int, spec: Spec) -> jax.Array:
    """int32 `[N]`, for rows that are sorted by bin: rows of the layout that ends with this row and has all rows of its
    bin before it."""
    counts = ops.count(bins, num_bins + 1)
    start = ops.take(_layout.exclusive_cumsum(counts, axis=0), bins)
    places = lax.iota(jnp.int32, bins.size)
    if spec.alignment == 1:
        return places - start + 1
    order, _ = _layout.order_within_bins(names, spec.num_experts)
    opened = ops.where(order % spec.alignment == 0, jnp.full_like(order, spec.alignment), 0)
    until = jnp.cumsum(opened, dtype=jnp.int32)
    total = until - ops.take(until - opened, start)
    # The padding of the last group need not fit. Bins hold ascending experts: the largest name so far is its expert,
    # and the last row that has this name says how many rows it has.
    largest = lax.cummax(names)
    latest = lax.cummax(jnp.where(names == largest, places, 0))
    rows = ops.take(order, latest) + 1
    return total - (_layout.round_up(rows, spec.alignment) - rows)
