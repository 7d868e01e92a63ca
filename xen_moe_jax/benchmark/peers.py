"""The same MoE round trip as JAX users write it today: what the library is compared with, in the same run.

Every peer presents its rows to the experts grouped or batched by expert, brings them back and reduces them with the
router's weights; none drops a row at the capacities that the benchmark gives.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xen_moe_jax.benchmark.problem import AXIS
from xen_moe_jax.benchmark.programs import Program, RoundTrip, round_trip_program
from xen_moe_jax.benchmark.workload import Capacities, Workload


def place_in_expert(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Position of each (token, slot) among its rank's rows for the same expert: int32 `[T*K]`, by one stable sort."""
    flat = topk_idx.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=num_experts)
    starts = jnp.cumsum(counts) - counts
    place = jnp.arange(flat.size, dtype=jnp.int32) - starts[flat[order]].astype(jnp.int32)
    return jnp.zeros_like(flat).at[order].set(place, unique_indices=True)


def exchange_experts(blocks: jax.Array, work: Workload, experts: Callable) -> jax.Array:
    """`[R*L, cap, H]` by global expert: to the experts' ranks, through `experts`, and back."""
    ranks, local = work.ranks, work.local_experts
    received = jax.lax.all_to_all(blocks.reshape(ranks, local, *blocks.shape[1:]), AXIS, 0, 0)
    local_expert = jnp.broadcast_to(jnp.arange(local, dtype=jnp.int32)[None, :, None], received.shape[:3])
    return jax.lax.all_to_all(experts(received, local_expert), AXIS, 0, 0).reshape(blocks.shape)


def weighted_sum(rows: jax.Array, row_of_slot: jax.Array, topk_weights: jax.Array) -> jax.Array:
    """Gathers `rows [N,H]` by `row_of_slot [T,K]` and sums over the slots in float32, one slot at a time: no
    `[T,K,H]` array.
    """
    total = jnp.zeros((topk_weights.shape[0], rows.shape[1]), jnp.float32)
    for k in range(topk_weights.shape[1]):
        total += rows[row_of_slot[:, k]].astype(jnp.float32) * topk_weights[:, k, None]
    return total.astype(rows.dtype)


def padded_all_to_all(work: Workload, caps: Capacities) -> RoundTrip:
    """`jax.lax.all_to_all` on rows padded to a capacity per source and expert; gathers, no one-hot products."""
    padded_experts, cap = work.ranks * work.local_experts, caps.per_source_expert

    def round_trip(x, topk_idx, topk_weights, experts):
        slot = topk_idx.reshape(-1) * cap + place_in_expert(topk_idx, padded_experts)
        token = jnp.arange(slot.size, dtype=jnp.int32) // work.top_k
        source = jnp.full((padded_experts * cap,), work.tokens, jnp.int32).at[slot].set(token, unique_indices=True)
        blocks = x.at[source].get(mode="fill", fill_value=0).reshape(padded_experts, cap, work.hidden)
        back = exchange_experts(blocks, work, experts).reshape(-1, work.hidden)
        return weighted_sum(back, slot.reshape(topk_idx.shape), topk_weights)

    return round_trip


def gather_and_scatter(work: Workload, caps: Capacities) -> RoundTrip:
    """all-gather every token, keep the rows of the local experts, and psum_scatter the weighted results."""

    def round_trip(x, topk_idx, topk_weights, experts):
        everyone = lambda a: jax.lax.all_gather(a, AXIS, tiled=True)  # noqa: E731
        tokens, idx, weights = everyone(x), everyone(topk_idx), everyone(topk_weights)
        local = idx.reshape(-1) - jax.lax.axis_index(AXIS) * work.local_experts
        key = jnp.where((local >= 0) & (local < work.local_experts), local, work.local_experts)
        order = jnp.argsort(key, stable=True)[: caps.grouped]
        rows, here = tokens[order // work.top_k], key[order]
        y = experts(rows, jnp.minimum(here, work.local_experts - 1))
        weight = jnp.where(here < work.local_experts, weights.reshape(-1)[order], 0.0)
        partial = jnp.zeros(tokens.shape, jnp.float32)
        partial = partial.at[order // work.top_k].add(y.astype(jnp.float32) * weight[:, None])
        return jax.lax.psum_scatter(partial.astype(x.dtype), AXIS, tiled=True)

    return round_trip


def one_hot_einsum(work: Workload, caps: Capacities) -> RoundTrip:
    """The einsum formulation of GShard and Switch: one-hot dispatch and combine masks `[T, E, capacity]`."""
    padded_experts, cap = work.ranks * work.local_experts, caps.per_source_expert

    def round_trip(x, topk_idx, topk_weights, experts):
        place = place_in_expert(topk_idx, padded_experts).reshape(topk_idx.shape)
        mask = jnp.zeros((work.tokens, padded_experts, cap), x.dtype)
        combine_mask = jnp.zeros((work.tokens, padded_experts, cap), jnp.float32)
        for slot in range(work.top_k):
            expert = jax.nn.one_hot(topk_idx[:, slot], padded_experts, dtype=x.dtype)
            chosen = expert[:, :, None] * jax.nn.one_hot(place[:, slot], cap, dtype=x.dtype)[:, None, :]
            mask += chosen
            combine_mask += topk_weights[:, slot, None, None] * chosen.astype(jnp.float32)
        blocks = jnp.einsum("tec,th->ech", mask, x)
        back = exchange_experts(blocks, work, experts)
        out = jnp.einsum("tec,ech->th", combine_mask.astype(x.dtype), back, preferred_element_type=jnp.float32)
        return out.astype(x.dtype)

    return round_trip


def sorted_ragged_all_to_all(work: Workload, caps: Capacities) -> RoundTrip:
    """`jax.lax.ragged_all_to_all` on rows sorted by expert, one segment per rank, with a local regrouping."""
    ranks, local_experts = work.ranks, work.local_experts

    def offsets(sizes):
        """Where each source's segment starts on each destination, from `sizes [source, destination]`."""
        return jnp.cumsum(sizes, axis=0) - sizes

    def exclusive(sizes):
        return jnp.cumsum(sizes) - sizes

    def round_trip(x, topk_idx, topk_weights, experts):
        me = jax.lax.axis_index(AXIS)
        flat = topk_idx.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=ranks * local_experts).astype(jnp.int32).reshape(ranks, local_experts)
        per_expert = jax.lax.all_gather(counts, AXIS)  # [source, destination, local expert]
        sizes = per_expert.sum(2)
        start, landing = exclusive(sizes[me]), offsets(sizes)[me]
        arrived = jax.lax.ragged_all_to_all(
            x[order // work.top_k],
            jnp.zeros((caps.grouped, work.hidden), x.dtype),
            start, sizes[me], landing, sizes[:, me], axis_name=AXIS,
        )  # fmt: skip
        # rows arrive by (source, expert); experts need them by expert
        segment = per_expert[:, me].reshape(-1)
        local = jnp.repeat(
            jnp.tile(jnp.arange(local_experts + 1, dtype=jnp.int32)[:local_experts], ranks),
            segment,
            total_repeat_length=caps.grouped,
        )
        filled = jnp.arange(caps.grouped) < segment.sum()
        by_expert = jnp.argsort(jnp.where(filled, local, local_experts), stable=True)
        y = experts(arrived[by_expert], jnp.where(filled, local, 0)[by_expert])
        y = jnp.zeros_like(y).at[by_expert].set(y, unique_indices=True)
        back = jax.lax.ragged_all_to_all(
            y,
            jnp.zeros((flat.size, work.hidden), x.dtype),
            exclusive(sizes[:, me]), sizes[:, me], (jnp.cumsum(sizes, 1) - sizes)[:, me], sizes[me], axis_name=AXIS,
        )  # fmt: skip
        place = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
        return weighted_sum(back, place.reshape(topk_idx.shape), topk_weights)

    return round_trip


PEERS: dict[str, tuple[Callable[[Workload, Capacities], RoundTrip], tuple[str, ...], int]] = {
    "padded all_to_all": (padded_all_to_all, ("cpu", "gpu", "tpu"), 1),
    "all_gather + psum_scatter": (gather_and_scatter, ("cpu", "gpu", "tpu"), 1),
    "one-hot einsum": (one_hot_einsum, ("cpu", "gpu", "tpu"), 4),
    "ragged_all_to_all": (sorted_ragged_all_to_all, ("gpu", "tpu"), 10),  # XLA has none for CPU
}
"""Name -> (maker, platforms that can run it, relative cost of a call)."""


def peer_programs(
    work: Workload, caps: Capacities, platform: str, names: tuple[str, ...] | None = None
) -> list[Program]:
    """Round trips of the peers that `platform` can run; `names` chooses among them."""
    unknown = set(names or ()) - set(PEERS)
    if unknown:
        raise ValueError(f"peers {sorted(unknown)}: must be among {tuple(PEERS)}")
    return [
        round_trip_program(name, make(work, caps), cost)
        for name, (make, platforms, cost) in PEERS.items()
        if platform in platforms and (names is None or name in names)
    ]
