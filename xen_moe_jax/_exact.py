"""`balance="exact"`: from the counts of one batch, an assignment in which no rank gets more than `T * K` rows.

Every rank computes the same assignment from the counts of all ranks, integers alone. First experts keep their homes: a
rank that has too many rows lends its largest experts to the ranks with the most room, at most `S - L` to each. Where
that does not work out, because many small experts would have to move, all experts are packed anew, at most `L + 1` on
a rank, which is always possible (`_pack`). Rows of an expert are numbered by (source rank, token, slot), and each rank
that holds the expert takes consecutive ones. Inactive ranks send and get no rows, and experts whose home is inactive
have none, since their weights are out of reach.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _active, _layout, _nodes, _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._drops import gather_words_p
from xen_moe_jax._mesh import vary_over
from xen_moe_jax._moe_primitives import HANDLE
from xen_moe_jax._placement import Placement, of_experts
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._spec import Spec

AT_FIRST = 4
"""Experts that are lent before a loop, whose every turn waits for the host on a GPU."""


def assign(
    topk_idx: jax.Array, num_experts: int, active: jax.Array, spec: Spec, config: KernelConfig
) -> tuple[Any, Placement, jax.Array | None]:
    """Chooses a slot for every slot of this rank's tokens.

    Args:
      topk_idx: integer `[T, K]`, experts; any other entry is an unused slot.
      num_experts: `E`.
      active: bool `[R]`, or `_active.EVERY_RANK`.
      spec: of the dispatch, whose experts are the slots of all ranks.

    Returns:
      int32 `[T, K]`, slots, -1 for unused ones; the placement, the same on every active rank, and between nodes on
      every rank; and `_active.withheld`, None where every rank is active.
    """
    topk_idx, active = vary_over([_layout.sanitize(topk_idx, num_experts), active], spec.axis_name)
    at_home = dataclasses.replace(spec, num_experts=num_experts)
    kept = _active.entries(topk_idx, active, at_home)
    withheld = _active.withheld(topk_idx, kept, at_home) if _active.given(active) else None
    slots, experts = assign_p.bind(kept, active, spec=spec, num_experts=num_experts, config=config)
    placement = of_experts(experts, num_experts)
    return slots, jax.tree.map(lambda array: checkpoint_name(array, HANDLE), placement), withheld


def _assign(topk_idx: Any, active: Any, *, spec: Spec, num_experts: int, config: KernelConfig) -> tuple[Any, Any]:
    slots = spec.local_experts
    flat = topk_idx.reshape(-1)
    order, own = _layout.order_by_blocks(flat, num_experts)
    counts = _counts_of_all(own, active, spec, config)
    parts = divide(counts, slots, spec.num_tokens * spec.top_k, active)
    me = _ranks.index(spec.axis_name)
    before = lax.dynamic_index_in_dim(_layout.exclusive_cumsum(counts, axis=0), me, 0, keepdims=False)
    expert = jnp.maximum(flat, 0)
    number = ops.take(before, expert) + order  # of this row among all rows of its expert
    ends = ops.take(jnp.cumsum(parts, axis=0, dtype=jnp.int32).T, expert)  # [T * K, R]
    rank = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32), spec.num_ranks - 1)
    place = places(parts, slots)
    slot = rank * slots + ops.take(place.reshape(-1), rank * num_experts + expert)
    return jnp.where(flat >= 0, slot, -1).reshape(topk_idx.shape), _experts(place, slots)


def _counts_of_all(own: Any, active: Any, spec: Spec, config: KernelConfig) -> Any:
    """Returns int32 `[R, E]`, the counts `own [E]` of every rank; zeros for an inactive one.

    Where all ranks share a node, an inactive rank may get zeros alone. Between nodes it gets the same counts as the
    active ranks: weights then move by XLA's collectives (`_placement._ragged`), which every rank must call equally
    often, and the placement that is made of the counts decides how often.
    """
    if _active.given(active) and _nodes.several(spec.num_ranks, config):
        return _ranks.all_gather(own, spec.axis_name)  # an inactive rank's own counts are zeros: its routing is masked
    return gather_words_p.bind(own, active, spec=spec, config=config)[0]


assign_p = declare_composite(
    "assign_slots",
    lambda topk_idx, _, *, spec, **__: [
        (topk_idx.shape, jnp.int32),
        ((spec.num_ranks, spec.local_experts), jnp.int32),
    ],
    _assign,
)


def divide(counts: jax.Array, slots: int, most: int, active: Any = _active.EVERY_RANK) -> jax.Array:
    """int32 `[R, E]`: rows of each expert that a rank computes, at most `most` in all and of at most `slots` experts.

    Args:
      counts: int32 `[R, E]`, rows of each source for each expert; a source has at most `most`.
      slots: `S`, at least `L + 1` where there are several ranks.
      active: bool `[R]`, or `_active.EVERY_RANK`. An inactive rank sends no rows and gets none, and experts whose home
        it is have none.
    """
    ranks, num_experts = counts.shape
    local = -(-num_experts // ranks)
    active = jnp.broadcast_to(active, (ranks,))
    rows = jnp.pad(jnp.sum(counts, axis=0, dtype=jnp.int32), (0, ranks * local - num_experts))
    lent, done = _lend(rows.reshape(ranks, local), slots - local, most, active)
    parts = lax.cond(done, lambda: lent, lambda: _pack(rows, ranks, most, active))
    return parts[:, :num_experts]


def _lend(home: jax.Array, lendings: int, most: int, active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lends experts from their homes, rows `home [R, L]`, to active ranks. Returns `[R, R * L]`, and whether no rank is
    left with more than `most` rows."""
    ranks, local = home.shape
    rank = lax.broadcasted_iota(jnp.int32, (ranks, ranks, local), 0)
    owner = lax.broadcasted_iota(jnp.int32, rank.shape, 1)
    place = lax.broadcasted_iota(jnp.int32, rank.shape, 2)
    here = jnp.arange(ranks, dtype=jnp.int32)

    def loads(parts: jax.Array) -> jax.Array:
        return jnp.sum(parts, axis=(1, 2), dtype=jnp.int32)

    def one(state: Any) -> Any:
        """Lends once; changes nothing where no rank has too many rows, or no rank can take some."""
        parts, left, _ = state
        load = loads(parts)
        giver = jnp.argmax(load)
        at_home = parts[giver, giver]
        expert = jnp.argmax(at_home)
        room = jnp.where(left > 0, most - load, 0)
        taker = jnp.argmax(room)
        rows = jnp.minimum(jnp.minimum(load[giver] - most, at_home[expert]), room[taker])
        moved = rows > 0
        lent = moved & (owner == giver) & (place == expert)
        gain = jnp.where(rank == taker, rows, 0) - jnp.where(rank == giver, rows, 0)
        return parts + jnp.where(lent, gain, 0), left - (moved & (here == taker)), moved

    state = jnp.where(rank == owner, home[None], 0), jnp.where(active, jnp.int32(lendings), 0), jnp.bool_(True)
    for _ in range(AT_FIRST):
        state = one(state)
    parts, _, _ = lax.while_loop(lambda state: state[2], one, state)
    return parts.reshape(ranks, ranks * local), jnp.max(loads(parts)) <= most


def _pack(rows: jax.Array, ranks: int, most: int, active: jax.Array) -> jax.Array:
    """`[R, R * L]`: one active rank after another gets `L` experts that are neighbours in the order of their rows, and
    as much of the next larger one as fits.

    Of `n * L` experts with at most `n * most` rows, the `L` smallest have at most `most`. The last run of `L`
    neighbours that has at most `most` rows is taken: then the next larger expert does not fit as a whole, or there is
    none and no run has more. In both cases `(n - 1) * L` experts are left, with at most `(n - 1) * most` rows. The
    first `n` is the number of active ranks, and experts at home elsewhere take no part.
    """
    local = rows.shape[0] // ranks
    numbers = jnp.arange(rows.shape[0], dtype=jnp.int32)
    gone = jnp.iinfo(jnp.int32).max
    num_active = jnp.sum(active, dtype=jnp.int32)

    def one(step: Any, state: Any) -> Any:
        rows, used, parts = state
        values, order = ops.stable_order(rows, 0)
        known = jnp.where(values < gone, values, 0)
        total = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(known, dtype=jnp.int32)])
        runs = total[local:] - total[:-local]
        count = (num_active - step) * local  # experts that are left
        fits = (runs <= most) & (numbers[: runs.shape[0]] <= count - local)
        first = jnp.max(jnp.where(fits, numbers[: runs.shape[0]], 0))
        whole = (numbers >= first) & (numbers < first + local)
        rest = jnp.where((numbers == first + local) & (numbers < count), most - runs[first], 0)
        part = jnp.zeros_like(rows).at[order].set(jnp.where(whole, known, rest))
        taken = jnp.zeros_like(rows, bool).at[order].set(whole)
        # The rank that is the home of most of these rows gets them.
        at_home = jnp.where(used, -1, jnp.sum(part.reshape(ranks, local), axis=1))
        rank = jnp.argmax(at_home)
        rows = jnp.where(taken, gone, rows - jnp.where(taken, 0, part))
        return rows, used.at[rank].set(True), parts.at[rank].set(part)

    known = jnp.where(jnp.repeat(active, local), rows, gone)
    state = known, ~active, jnp.zeros((ranks, rows.shape[0]), jnp.int32)
    return lax.fori_loop(0, num_active, one, state)[2]


def slots_at_home(num_experts: int, num_ranks: int) -> int:
    """Slots `S` of a rank with which every expert of a rank has a slot of its own, and every one that it borrows."""
    local = -(-num_experts // num_ranks)
    return 2 * local + (num_ranks > 1)


def places(parts: jax.Array, slots: int) -> jax.Array:
    """int32 `[R, E]`: the slot on each rank of each expert that it holds, -1 for others.

    A rank's experts are those of which it has rows, in ascending order. From `slots_at_home` on they are its own
    experts, each at its place without a placement, whether it has rows or not, and then those that the rank borrows.
    """
    ranks, num_experts = parts.shape
    held = parts > 0
    if slots < slots_at_home(num_experts, ranks):
        return jnp.where(held, jnp.cumsum(held, axis=1, dtype=jnp.int32) - 1, -1)
    local = -(-num_experts // ranks)
    expert = lax.broadcasted_iota(jnp.int32, parts.shape, 1)
    own = expert // local == lax.broadcasted_iota(jnp.int32, parts.shape, 0)
    borrowed = held & ~own
    behind = local - 1 + jnp.cumsum(borrowed, axis=1, dtype=jnp.int32)
    return jnp.where(own, expert % local, jnp.where(borrowed, behind, -1))


def _experts(places: jax.Array, slots: int) -> jax.Array:
    """int32 `[R, S]`: the expert in each slot of each rank, -1 for an empty one."""
    ranks = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    numbers = lax.broadcasted_iota(jnp.int32, places.shape, 1)
    at = jnp.where(places >= 0, places, slots)
    return jnp.full((places.shape[0], slots), -1, jnp.int32).at[ranks, at].set(numbers, mode="drop")
