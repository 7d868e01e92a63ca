"""The drop-ins in plain JAX: `all_to_all` is XLA's own; `ragged_all_to_all` runs in rounds, also where XLA has none
(CPU)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax.backends import rounds
from xen_moe_jax.backends.base import Exchange


def all_to_all(exchange: Exchange, x: jax.Array) -> jax.Array:
    """Computes `jax.lax.all_to_all`."""
    return lax.all_to_all(
        x,
        exchange.axis_name,
        exchange.split_axis,
        exchange.concat_axis,
        axis_index_groups=exchange.groups,
        tiled=exchange.tiled,
    )


def ragged_all_to_all(exchange: Exchange, operand: jax.Array, output: jax.Array, *segments: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all`; it neither reads nor writes rows outside `operand` or `output`."""
    input_offsets, send_sizes, output_offsets, recv_sizes = segments
    axis_name, groups = exchange.axis_name, exchange.groups
    ranks = send_sizes.shape[0]
    longest = operand.shape[0]
    if longest == 0 or output.shape[0] == 0:
        return output
    block = rounds.block_rows(longest, exchange.config)

    def to_peers(a):
        return _ranks.all_to_all(a.reshape(ranks, 1), axis_name, axis_index_groups=groups).reshape(ranks)

    begin, to, sizes = _inside(input_offsets, output_offsets, send_sizes, longest, output.shape[0])
    first = to_peers(to)
    count = jnp.minimum(recv_sizes, to_peers(sizes))
    largest_pair = _ranks.largest(jnp.max(sizes), axis_name)

    def produce(first_row):
        row = begin[:, None] + first_row + jnp.arange(block, dtype=jnp.int32)
        return ops.take(operand, jnp.clip(row, 0, longest - 1))

    received = rounds.exchange(
        produce,
        largest_pair=largest_pair,
        max_rows=longest,
        block=block,
        axis_name=axis_name,
        axis_index_groups=groups,
    )
    row = jnp.arange(received.shape[1], dtype=jnp.int32)
    target = first[:, None] + row
    target = jnp.where(row < count[:, None], target, output.shape[0]).reshape(-1)
    return output.at[target].set(received.reshape(-1, *received.shape[2:]), mode="drop")


def _inside(begin: jax.Array, to: jax.Array, sizes: jax.Array, rows: int, out_rows: int) -> tuple[jax.Array, ...]:
    """Leaves out the rows of each segment that lie outside the operand of `rows` rows, or would lie outside the peer's
    output. Returns the segments' offsets in both, and their sizes."""
    skipped = -jnp.clip(jnp.minimum(begin, to), -(2**31) + 1, 0)

    def moved(offset: jax.Array) -> jax.Array:  # no sum of the two is below 0 or has more than 32 bits
        return offset.astype(jnp.uint32) + skipped.astype(jnp.uint32)

    begin, to = jnp.minimum(moved(begin), rows), jnp.minimum(moved(to), out_rows)
    room = jnp.minimum(rows - begin, out_rows - to).astype(jnp.int32)
    sizes = jnp.clip(jnp.maximum(sizes, 0) - skipped, 0, room)
    return begin.astype(jnp.int32), to.astype(jnp.int32), sizes
