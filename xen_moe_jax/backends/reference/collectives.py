"""The drop-ins in plain JAX: `all_to_all` is XLA's own; `ragged_all_to_all` runs in rounds, also where XLA has none
(CPU)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _single_ops as ops
from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends import rounds


def all_to_all(
    x: jax.Array,
    *,
    axis_name: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    split_axis: int,
    concat_axis: int,
    tiled: bool,
    axis_index_groups: Any,
    config: KernelConfig,
) -> jax.Array:
    del axis_sizes, config
    return lax.all_to_all(
        x, axis_name, split_axis, concat_axis, axis_index_groups=_lists(axis_index_groups), tiled=tiled
    )


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    axis_index_groups: Any,
    config: KernelConfig,
) -> jax.Array:
    """Rows past the end of `operand` or `output` are never read or written, whatever the offsets say."""
    del axis_sizes
    groups = _lists(axis_index_groups)
    ranks = send_sizes.shape[0]
    longest = operand.shape[0]
    if longest == 0 or output.shape[0] == 0:
        return output
    block = rounds.block_rows(longest, config)

    def to_peers(a):
        return lax.all_to_all(a.reshape(ranks, 1), axis_name, 0, 0, axis_index_groups=groups).reshape(ranks)

    first = to_peers(output_offsets)
    count = jnp.minimum(recv_sizes, to_peers(send_sizes))
    largest_pair = lax.pmax(jnp.clip(jnp.max(send_sizes), 0, longest), axis_name)

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


def _lists(groups: Any) -> Any:
    return None if groups is None else [list(g) for g in groups]
