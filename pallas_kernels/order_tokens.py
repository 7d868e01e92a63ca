"""Tables of a combine of few tokens, from positions and routing in the layout that XLA keeps: slots by tokens.

A token's partial record has a place of its own in staging: row `rank * T + token` of the token's rank, also where the
token reaches fewer ranks. So nothing is exchanged, and nothing depends on other tokens. What moves: tables in VMEM
alone, all of them in one step: blocks of pairs as `order_pairs` makes them, and the table of `reduce_ranks`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK, SUBLANES, Columns, Ordered, counted, order_block
from xen_moe_jax.pallas_kernels.record import LANES
from xen_moe_jax.pallas_kernels.reduce_ranks import Summands


@dataclasses.dataclass(frozen=True)
class _Refs:
    rank: Any
    positions: Any
    experts: Any
    table: Any
    columns: Any
    expected: Any
    zero: Any
    numbers: Any
    gathered: Any
    came: Any
    expected_row: Any
    zero_row: Any
    numbers_row: Any
    gathered_row: Any
    moved: Any


@dataclasses.dataclass(frozen=True)
class _Static:
    ranks: int
    tokens: int
    local_experts: int
    columns: Columns
    at_once: int
    block: int


def _pairs(refs: _Refs, static: _Static, block: Any) -> None:
    """Makes the table of a block: the pairs of `at_once` sources."""
    first = block * static.at_once
    given = [refs.positions[first + n] for n in range(static.at_once)]
    lane = lax.broadcasted_iota(jnp.int32, (1, given[0].shape[1]), 1)
    exist = [jnp.max((rows != -1).astype(jnp.int32), axis=0, keepdims=True) > 0 for rows in given]
    peer = [jnp.where(there, first + n, -1) for n, there in enumerate(exist)]
    address = [refs.rank[0] * static.tokens + lane] * static.at_once
    rows, peers, addresses = (jnp.concatenate(parts, axis=1) for parts in (given, peer, address))
    order_block(refs.table.at[block], refs.columns.at[block], static.columns, rows, peers, addresses)


def _tokens(refs: _Refs, static: _Static) -> None:
    """Writes the places of the partial sums that this rank's tokens receive."""
    experts = refs.experts[...]
    wide = experts.shape[1]
    ranks = -(-static.ranks // SUBLANES) * SUBLANES
    rank, token = (lax.broadcasted_iota(jnp.int32, (ranks, wide), axis) for axis in (0, 1))
    hit = rank < 0
    for s in range(experts.shape[0]):
        local = experts[s : s + 1] - rank * static.local_experts
        hit = hit | ((local >= 0) & (local < static.local_experts) & (experts[s : s + 1] >= 0))
    number = jnp.where(hit, rank * static.tokens + token, -1)
    refs.came[...] = jnp.transpose(number)[:, : static.ranks]
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    expected = gathered = jnp.zeros((1, LANES), jnp.int32)
    for r in range(static.ranks):
        refs.numbers_row[:, r * wide : (r + 1) * wide] = number[r : r + 1]
        expected = jnp.where(lane == r, counted(hit[r : r + 1]), expected)
    for step in range(-(-static.tokens // static.block)):
        here = hit & (token >= step * static.block) & (token < (step + 1) * static.block)
        count = jnp.sum(jnp.sum(here.astype(jnp.float32), axis=1, keepdims=True), axis=0, keepdims=True)
        gathered = jnp.where(lane == step, count.astype(jnp.int32), gathered)
    refs.expected_row[...] = expected
    refs.gathered_row[...] = gathered
    refs.zero_row[...] = lax.shift_right_logical(expected, 31)  # no count is negative


def _body(refs: _Refs, *, static: _Static) -> None:
    _tokens(refs, static)
    rows = ("expected", "zero", "numbers", "gathered")
    copies = [
        pltpu.make_async_copy(getattr(refs, f"{name}_row").at[0], getattr(refs, name), refs.moved.at[n])
        for n, name in enumerate(rows)
    ]
    for copy in copies:
        copy.start()

    @pl.loop(0, refs.table.shape[0])
    def _(block: Any) -> None:
        _pairs(refs, static, block)

    for copy in copies:
        copy.wait()


def order_tokens(
    positions: jax.Array,
    experts: jax.Array,
    rank: jax.Array,
    *,
    local_experts: int,
    block: int,
    group: int,
    launch: Launch,
) -> tuple[Ordered, Summands, jax.Array]:
    """Tables of a combine.

    Args:
      positions: int32 `[R, slots, T]`, as a dispatch knows them; `T` at most 256.
      experts: int32 `[K, T]`, experts of this rank's tokens, `-1` for none.
      rank: int32 `[1]`, this rank.
      local_experts: experts of each rank. block: tokens that `reduce_ranks` adds up at a time (`block_tokens`).
      group: pairs of a column (`reduce_slots.pairs_beside`).

    Returns:
      the tables of `reduce_slots` and `reduce_ranks`, and int32 `[128]`, zeros unknown to the compiler.
    """
    ranks, slots, tokens = positions.shape
    wide = -(-tokens // LANES) * LANES
    at_once = 2 if 2 * wide <= BLOCK and ranks % 2 == 0 else 1
    columns = Columns(slots, at_once * wide)
    blocks = ranks // at_once
    positions = jnp.pad(positions, ((0, 0), (0, 0), (0, wide - tokens)), constant_values=-1)
    experts = jnp.pad(experts, ((0, 0), (0, wide - tokens)), constant_values=-1)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    names = ["rank", "positions", "experts", "table", "columns", "expected", "zero", "numbers", "gathered", "came"]
    names += ["expected_row", "zero_row", "numbers_row", "gathered_row", "moved"]
    lengths = {"expected": LANES, "zero": LANES, "numbers": ranks * wide, "gathered": LANES}
    table, upright, expected, zero, numbers, gathered, came = launch.call(
        functools.partial(_body, static=_Static(ranks, tokens, local_experts, columns, at_once, block)),
        _Refs,
        names,
        name="xen_moe_order_tokens",
        remote=False,
        by_dma=False,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[vmem, vmem],
            out_specs=[vmem, vmem, *[hbm] * len(lengths), vmem],
            scratch_shapes=[pltpu.VMEM((1, n), jnp.int32) for n in lengths.values()]
            + [pltpu.SemaphoreType.DMA((len(lengths),))],
        ),
        out_shape=[
            ((blocks, 1, columns.words), jnp.int32),
            ((blocks, group, columns.block // group * slots), jnp.int32),
            *[((n,), jnp.int32) for n in lengths.values()],
            ((wide, ranks), jnp.int32),
        ],
    )(rank, positions, experts)
    came = came[: -(-tokens // block) * block]
    made = jnp.full((1,), blocks, jnp.int32)
    pairs = Ordered(columns, table, upright, made, expected, ranks * tokens)
    return pairs, Summands(numbers, gathered, came, block), zero


def vmem_bytes(ranks: int, slots: int, tokens: int) -> int:
    """VMEM of all tables."""
    wide = -(-tokens // LANES) * LANES
    columns = Columns(slots, wide)
    return 4 * wide * (ranks * (2 * columns.rows * SUBLANES + LANES) + SUBLANES * ranks + LANES)
