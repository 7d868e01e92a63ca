"""The end of a decode layer whose rows come back one by one: a token's rows become its sum.

What moves: blocks of rows through VMEM, by the pipeline of the grid, and blocks of tokens out. A token's rows lie in
the order of ranks, those of one rank in slot order (`decode_routing.by_rank`). Rows of one rank are multiplied by their
weights and added up, and the sum is rounded as if it had travelled; then the ranks' sums are added up. So the bits are
those of a layer whose ranks send sums.

Who does it: where there are two cores, they divide the blocks of tokens between them. Nothing reaches another rank, and
nothing waits: `decode_layer` has ended, so that all rows are there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.decode_experts import GROUP
from xen_moe_jax.pallas_kernels.decode_routing import Sizes, by_rank
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import SUBLANES, copy_now
from xen_moe_jax.pallas_kernels.record import LANES, Record, values_of
from xen_moe_jax.pallas_kernels.reduce_ranks import keep


def lines(top_k: int) -> int:
    """Returns the columns of a table of `places`, a multiple of 8."""
    return -(-3 * top_k // SUBLANES) * SUBLANES


def places(experts: jax.Array, weights: jax.Array, of_rank: int, ranks: int) -> jax.Array:
    """Returns what `decode_sums` must know of the rows of each token.

    Args:
      experts: int32 `[K, N]`, numbers of experts among those of all ranks; any other number names no expert.
      weights: int32 `[K, N]`, the bits of float32 router weights.
      of_rank: experts of a rank.

    Returns:
      float32 `[N, lines(K)]`: for each of the `K` places of a token's rows the weight of its row; then, 1 or 0, whether
      the row is of the same rank as the row before it; then whether it is the last row of its rank.
    """
    top_k = experts.shape[0]
    owner, place = by_rank(experts, of_rank, ranks)

    def at(table: jax.Array, k: int) -> jax.Array:
        return jnp.sum(jnp.where(place == k, table, 0), axis=0, keepdims=True)

    owners = [at(owner, k) for k in range(top_k)]
    never = jnp.zeros(owners[0].shape, jnp.bool_)
    goes_on = [never, *(a == b for a, b in zip(owners, owners[1:], strict=False))]
    ends = [~more & (owner < ranks) for more, owner in zip([*goes_on[1:], never], owners, strict=True)]
    table = [lax.bitcast_convert_type(at(weights, k), jnp.float32) for k in range(top_k)]
    table += [flag.astype(jnp.float32) for flag in (*goes_on, *ends)]
    table += [jnp.zeros_like(table[0])] * (lines(top_k) - len(table))
    return jnp.transpose(jnp.concatenate(table, axis=0))


def put_places(refs: Any, sizes: Sizes, rank: Any, core: Any) -> None:
    """Writes the table of `places` of this rank's tokens for `decode_sums`. Of two cores core 0 alone does: both would
    write the same."""

    @pl.when(core is None or core == 0)
    def _() -> None:
        slots, weights = (refs.routing[rank, at : at + sizes.top_k] for at in (0, sizes.half))
        refs.upright[...] = places(slots, weights, sizes.experts * sizes.cores, sizes.ranks)
        copy_now(refs.upright, refs.places, refs.moved)


def _body(refs: Any, *, record: Record, flat: bool) -> None:
    top_k, size, rows = refs.rows.shape[:3]
    count = SUBLANES if size % SUBLANES == 0 else size

    # a register of tokens in a turn: the weights and masks of their places stay in registers
    @pl.loop(0, size // count)
    def _(n: Any) -> None:
        first = n * count if count % SUBLANES else pl.multiple_of(n * count, count)

        def load(k: int, j: int) -> jax.Array:
            """Block row `j` of row `k` of the tokens."""
            if not flat:  # interpret mode does not know strided reads
                return refs.rows[k, pl.ds(first, count), j, :]
            at = pl.ds((k * size + first) * rows + j, count, stride=rows)
            return refs.rows.reshape(top_k * size * rows, LANES)[at, :]

        _add_up(refs.total, pl.ds(first, count), record, refs.table[pl.ds(first, count), :], top_k, load)

    refs.out[...] = refs.total[:, : refs.out.shape[1]].astype(refs.out.dtype)


def _add_up(
    target: Any, tokens: Any, record: Record, known: jax.Array, top_k: int, load: Callable[[int, int], jax.Array]
) -> None:
    """Writes the sums of a few `tokens` into these rows of `target`; `known` has their rows of the table, and
    `load(k, j)` is block row `j` of their rows at place `k`."""
    count = known.shape[0]

    def column(n: int) -> jax.Array:
        return jnp.broadcast_to(known[:, n : n + 1], (count, LANES))

    weights = [column(k) for k in range(top_k)]
    goes_on, ends = (
        [jnp.where(column(n * top_k + k) > 0, jnp.int32(-1), jnp.int32(0)) for k in range(top_k)] for n in (1, 2)
    )
    zero = lax.shift_right_logical(lax.bitcast_convert_type(column(top_k), jnp.int32), 31)
    nothing = jnp.zeros((count, LANES), jnp.float32)

    def masked(values: jax.Array, mask: jax.Array) -> jax.Array:
        """`values` where the mask has ones, else +0.0, in one operation."""
        return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) & mask, jnp.float32)

    for j in range(record.value_rows):
        chunks = [part * record.value_rows + j for part in range(record.per_word)]
        chunks = [c for c in chunks if c < record.chunks]
        sums, totals = ([nothing] * len(chunks) for _ in range(2))
        for k in range(top_k):
            words = load(k, j)
            for part in range(len(chunks)):
                product = keep(values_of(words, part, record.dtype) * weights[k], zero)
                sums[part] = (masked(sums[part], goes_on[k]) if k else nothing) + product
                travelled = sums[part].astype(record.dtype).astype(jnp.float32)
                totals[part] = totals[part] + masked(travelled, ends[k])
        for c, total in zip(chunks, totals, strict=True):
            target[tokens, c * LANES : (c + 1) * LANES] = total


def decode_sums(
    rows: jax.Array,
    table: jax.Array,
    *,
    record: Record,
    shape: tuple[int, int],
    dtype: Any,
    launch: Launch,
) -> jax.Array:
    """Adds up the weighted rows of each token, which lie side by side.

    Args:
      rows: int32 `[K * T, N, 128]`, records; row `k` of token `t` is number `k * T + t`. Rows of slots without an
        expert are unspecified.
      table: of `places`, for `T` tokens at least.
      record: of a row. shape: `(T, H)`; `T` is a multiple of 16, or less than 16. dtype: of the result.

    Returns:
      `[T, H]` in `dtype`.
    """
    tokens, hidden = shape
    (number, *of_row), size = rows.shape, min(tokens, GROUP)
    top_k = number // tokens
    columns = record.value_rows * record.per_word * LANES
    return launch.call(
        functools.partial(_body, record=record, flat=not launch.interpret),
        types.SimpleNamespace,
        ["table", "rows", "out", "total"],
        name="xen_moe_decode_sums",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(tokens // size,),
            in_specs=[
                pl.BlockSpec((-(-size // SUBLANES) * SUBLANES, table.shape[1]), lambda i: (i, 0)),
                pl.BlockSpec((top_k, size, *of_row), lambda i: (0, i, 0, 0)),
            ],
            out_specs=pl.BlockSpec((size, hidden), lambda i: (i, 0)),
            scratch_shapes=[pltpu.VMEM((size, columns), jnp.float32)],
        ),
        out_shape=((tokens, hidden), dtype),
    )(table, rows.reshape(top_k, tokens, *of_row))
