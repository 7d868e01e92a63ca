"""Tables that the kernels follow: which ranks get the record of a token, and at which row of staging.

Staging of a dispatch: one region per source rank, records in token order inside it. Regions are `T` rows each
(nothing to agree on) unless the capacity is smaller than that: then they are packed, so that staging is never larger
than `routed.x`, and each rank tells every source which of its records the rank keeps and where its region starts.
Staging of a combine, on the token's rank: one region per expert rank, records in token order; regions are `T` rows each
while there are at most `K` ranks, else packed. A combine of few tokens has no plan: `order_tokens` makes its tables.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import rounds
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.push import Routes
from xen_moe_jax.pallas_kernels.reduce_slots import Pairs

FLAG_BITS = 32
"""Tokens in a word of flags."""
FLAG_WORDS_AT_ONCE = 8 * 1024
"""Number of words in one round of an exchange."""


class SendPlan(NamedTuple):
    """Routes of the records that one rank sends, and places of the records that it receives.

    Attributes:
      routes: where each token's record goes; at most `D = min(K, R)` ranks per token.
      staged: int32 `[R, T]`, row of own staging that holds each (source, token); arbitrary where nothing came.
      sent: int32 `[T, R]`, 1 where a token's record goes to a rank. remote_start: int32 `[R]`, where this rank's
        region starts in each destination's staging.
    """

    routes: Routes
    staged: jax.Array
    sent: jax.Array
    remote_start: jax.Array


def kernel_axes(spec: Spec) -> Axes:
    """The ranks that kernels reach: all ranks on one axis, the ranks of this slice on two axes."""
    return Axes(spec.axis_name[-1:], spec.axis_sizes[-1:])


def to_peers(x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """`x [R, ...]`, element `r` for rank `r` -> element `s` from rank `s`."""
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def distinct_ranks(topk_idx: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[T, min(K, R)]`: the ranks that a token reaches, ascending, `-1` in unused places."""
    num_ranks = spec.num_ranks
    if num_ranks <= spec.top_k:
        hit = _layout.ranks_hit(topk_idx, num_ranks, spec.local_experts)
        return jnp.where(hit, jnp.arange(num_ranks, dtype=jnp.int32), -1)
    owner = jnp.sort(jnp.where(topk_idx >= 0, topk_idx // spec.local_experts, num_ranks), axis=1)
    repeated = jnp.concatenate([jnp.zeros((owner.shape[0], 1), bool), owner[:, 1:] == owner[:, :-1]], axis=1)
    return jnp.where(repeated | (owner == num_ranks), -1, owner).astype(jnp.int32)


def pick(table: jax.Array, ranks: jax.Array) -> jax.Array:
    """`table [T, R]` at `ranks [T, D]`; 0 where the rank is `-1`. A masked sum: a TPU gathers scalars slowly."""
    chosen = ranks[:, :, None] == jnp.arange(table.shape[1], dtype=jnp.int32)
    return jnp.sum(jnp.where(chosen, table[:, None, :], 0), axis=2, dtype=table.dtype)


def any_dropped(positions: jax.Array, spec: Spec) -> jax.Array:
    """bool `[]`: True if a rank dropped a slot; if no rank did, `topk_idx` describes the whole routing."""
    return lax.pmax(jnp.any(positions == -2).astype(jnp.int32), spec.axis_name) > 0


def dispatch_plan(topk_idx: jax.Array, positions: jax.Array, spec: Spec) -> SendPlan:
    """Plan of a dispatch or redispatch, the same on both sides of every link."""
    num_ranks, tokens = spec.num_ranks, spec.num_tokens
    rank = lax.axis_index(spec.axis_name)
    if packs_staging(spec):
        came = jnp.any(positions >= 0, axis=-1)
        hit = _layout.ranks_hit(topk_idx, num_ranks, spec.local_experts).astype(jnp.int32)
        sent = flags_to_peers_if(any_dropped(positions, spec), came, hit.T, spec.axis_name).T
        start = _layout.exclusive_cumsum(jnp.sum(came, axis=1, dtype=jnp.int32), axis=0)
        remote_start = to_peers(start, spec.axis_name)
    else:
        came = jnp.any(positions != -1, axis=-1)
        sent = _layout.ranks_hit(topk_idx, num_ranks, spec.local_experts).astype(jnp.int32)
        start = jnp.arange(num_ranks, dtype=jnp.int32) * tokens
        remote_start = jnp.full((num_ranks,), rank * tokens, jnp.int32)
    address = remote_start + _layout.exclusive_cumsum(sent, axis=0)
    staged = start[:, None] + _layout.exclusive_cumsum(came.astype(jnp.int32), axis=1)
    expected = jnp.sum(came, axis=1, dtype=jnp.int32)
    routes = routes_to(topk_idx, sent, address, expected, dispatch_staging_rows(spec), spec)
    return SendPlan(routes, staged, sent, remote_start)


def routes_to(
    topk_idx: jax.Array, sent: jax.Array, address: jax.Array, expected: jax.Array, staging_rows: int, spec: Spec
) -> Routes:
    """Routes of records that go to the ranks that `sent [T, R]` names, to rows `address [T, R]` there."""
    rank = lax.axis_index(spec.axis_name)
    peer = distinct_ranks(topk_idx, spec)
    if packs_staging(spec):
        peer = jnp.where(pick(sent, peer) > 0, peer, -1)
    return Routes(_rotated(peer, rank), _rotated(pick(address, peer), rank), expected, staging_rows)


def dispatch_staging_rows(spec: Spec) -> int:
    """Records that staging of a dispatch has room for."""
    if packs_staging(spec):
        return spec.capacity
    return spec.num_ranks * spec.num_tokens


def combine_staging_rows(spec: Spec) -> int:
    """Records that staging of a combine has room for; one rank also sends at most this number in a dispatch."""
    return spec.num_tokens * min(spec.num_ranks, spec.top_k)


def combine_sent_rows(spec: Spec) -> int:
    """Sums that a start of a combine has room for: one for each row at most where there may be fewer rows than (source,
    token) pairs."""
    return spec.capacity if packs_staging(spec) else spec.num_ranks * spec.num_tokens


def packs_staging(spec: Spec) -> bool:
    return spec.layout != "padded" and spec.capacity < spec.num_ranks * spec.num_tokens


def _rotated(table: jax.Array, rank: jax.Array) -> jax.Array:
    """Columns rotated by the rank, so that the ranks do not all begin with the same destination."""
    return jnp.roll(table, -rank, axis=1)


class CombinePlan(NamedTuple):
    """Rows that one rank reduces and sends, and places of the partial sums that it receives.

    Attributes:
      came: bool `[R, T]`, (source, token) pairs that this rank reduces. remote_start: int32 `[R]`, where this rank's
        region starts in each source's staging.
      pairs: the work of `reduce_slots`.
      source: int32 `[T, D]`, staged record of each summand in ascending rank order, `-1` for none.
    """

    came: jax.Array
    remote_start: jax.Array
    pairs: Pairs
    source: jax.Array


def combine_plan(topk_idx: jax.Array, positions: jax.Array, spec: Spec, *, packed: bool = False) -> CombinePlan:
    """Plan of a combine.

    A pair whose rows were all dropped sends zeros, because the token's rank does not know of the drop. With `packed`
    such a pair sends nothing, and a rank sends at most as many sums as it has rows: ranks then tell each other which
    pairs have rows, if any rank dropped a row.
    """
    num_ranks, tokens = spec.num_ranks, spec.num_tokens
    rank = lax.axis_index(spec.axis_name)
    came = jnp.any(positions >= 0 if packed else positions != -1, axis=-1)
    hit = _layout.ranks_hit(topk_idx, num_ranks, spec.local_experts).astype(jnp.int32)
    if packed:
        hit = flags_to_peers_if(any_dropped(positions, spec), came, hit.T, spec.axis_name).T
    counts = jnp.sum(hit, axis=0, dtype=jnp.int32)
    few_ranks = num_ranks <= spec.top_k
    if few_ranks:
        start = jnp.arange(num_ranks, dtype=jnp.int32) * tokens
        remote_start = jnp.full((num_ranks,), rank * tokens, jnp.int32)
    else:
        start = _layout.exclusive_cumsum(counts, axis=0)
        remote_start = to_peers(start, spec.axis_name)
    ranks = distinct_ranks(topk_idx, spec)
    if packed:
        ranks = jnp.where(pick(hit, ranks) > 0, ranks, -1)
    source = jnp.where(ranks >= 0, pick(start + _layout.exclusive_cumsum(hit, axis=0), ranks), -1)

    address = (remote_start[:, None] + _layout.exclusive_cumsum(came.astype(jnp.int32), axis=1)).reshape(-1)
    peer = jnp.where(came, jnp.arange(num_ranks, dtype=jnp.int32)[:, None], -1).reshape(-1)
    pairs = Pairs(positions.reshape(num_ranks * tokens, -1), peer, address, counts, combine_staging_rows(spec))
    return CombinePlan(came, remote_start, pairs, source)


# -- one bit for each (rank, token), exchanged between ranks -----------------------------------------------------------


def packed_flags(flags: jax.Array) -> jax.Array:
    """bool `[P, T, ...]` -> int32 `[P, ceil(T / 32), ...]`."""
    peers, tokens, *rest = flags.shape
    padded = jnp.pad(flags, ((0, 0), (0, -tokens % FLAG_BITS), *((0, 0) for _ in rest)))
    bits = padded.reshape(peers, -1, FLAG_BITS, *rest)
    values = (jnp.int32(1) << jnp.arange(FLAG_BITS, dtype=jnp.int32)).reshape(FLAG_BITS, *(1 for _ in rest))
    return jnp.sum(jnp.where(bits, values, 0), axis=2, dtype=jnp.int32)  # no bit twice: a sum is an or


def unpacked_flags(words: jax.Array, tokens: int) -> jax.Array:
    """int32 `[P, tokens, ...]`, zeros and ones, of `packed` words."""
    peers, count, *rest = words.shape
    shift = jnp.arange(FLAG_BITS, dtype=jnp.int32).reshape(FLAG_BITS, *(1 for _ in rest))
    return ((words[:, :, None] >> shift) & 1).reshape(peers, count * FLAG_BITS, *rest)[:, :tokens]


def flags_to_peers(flags: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """bool `[P, T, ...]`, element `p` for rank `p` -> int32 zeros and ones, element `s` from rank `s`."""
    return unpacked_flags(lax.all_to_all(packed_flags(flags), axis_name, 0, 0, tiled=True), flags.shape[1])


def flags_to_peers_if(
    wanted: jax.Array, flags: jax.Array, otherwise: jax.Array, axis_name: tuple[str, ...]
) -> jax.Array:
    """`flags_to_peers` if `wanted` (bool `[]`, equal on every rank); else `otherwise`, and nothing travels."""
    words = packed_flags(flags)
    peers, count = words.shape[:2]
    block = max(1, min(count, FLAG_WORDS_AT_ONCE * count // words.size))
    padded = rounds.pad_to_blocks(words, 1, block, fill=0)
    came = rounds.exchange(
        lambda first: lax.dynamic_slice_in_dim(padded, first, block, axis=1),
        largest_pair=jnp.where(wanted, jnp.int32(count), 0),
        max_rows=count,
        block=block,
        axis_name=axis_name,
    )
    return jnp.where(wanted, unpacked_flags(came, flags.shape[1]), otherwise)
