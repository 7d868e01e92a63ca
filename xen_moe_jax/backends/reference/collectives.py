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
    """Computes `jax.lax.ragged_all_to_all`. No offset makes it read or write past the end of `operand` or `output`."""
    input_offsets, send_sizes, output_offsets, recv_sizes = segments
    axis_name, groups = exchange.axis_name, exchange.groups
    ranks = send_sizes.shape[0]
    longest = operand.shape[0]
    if longest == 0 or output.shape[0] == 0:
        return output
    block = rounds.block_rows(longest, exchange.config)

    def to_peers(a):
        return _ranks.all_to_all(a.reshape(ranks, 1), axis_name, axis_index_groups=groups).reshape(ranks)

    first = to_peers(output_offsets)
    count = jnp.minimum(recv_sizes, to_peers(send_sizes))
    largest_pair = _ranks.largest(jnp.clip(jnp.max(send_sizes), 0, longest), axis_name)

    def produce(first_row):
        row = input_offsets[:, None] + first_row + jnp.arange(block, dtype=jnp.int32)
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
    valid = (row < count[:, None]) & (target >= 0) & (target < output.shape[0])
    target = jnp.where(valid, target, output.shape[0]).reshape(-1)
    return output.at[target].set(received.reshape(-1, *received.shape[2:]), mode="drop")
