"""Rows between every pair of ranks in equal rounds of `all_to_all`.

XLA wants static shapes, and on CPU it has no ragged all-to-all. A single padded `all_to_all` would move the worst
case, `T` rows for every pair. Here each round moves `block` rows for every pair, and the number of rounds follows the
largest pair of the given routing. So little more moves than the routing needs, and the send buffer holds one round, not
the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _ranks
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._config import KernelConfig

DEFAULT_ROUNDS = 8
"""Rounds that a full pair (`T` rows) takes. The rows moved beyond need are at most one such round."""


def block_rows(num_tokens: int, config: KernelConfig) -> int:
    """Rows of one round for each pair of ranks."""
    return config.chunk_tokens or max(1, -(-num_tokens // DEFAULT_ROUNDS))


def pad_to_blocks(x: jax.Array, axis: int, block: int, fill: int = -1) -> jax.Array:
    pad = -x.shape[axis] % block
    if not pad:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, pad)
    return jnp.pad(x, widths, constant_values=fill)


def exchange(
    produce: Callable[[jax.Array], Any],
    *,
    largest_pair: jax.Array,
    max_rows: int,
    block: int,
    axis_name: tuple[str, ...],
    axis_index_groups: Any = None,
) -> Any:
    """Runs the rounds.

    Args:
      produce: first row of a round (int32) -> pytree of `[R, block, ...]`: the rows for each rank.
      largest_pair: int32 `[]`, rows of the largest pair; the same on every rank, or the ranks would disagree on the
        rounds.
      max_rows: static bound of `largest_pair`.
      block: rows of a round.

    Returns:
      pytree of `[R, ceil(max_rows / block) * block, ...]`: row `j` from source `s` at `[s, j]`; zero where nothing
      came.
    """
    rows = -(-max_rows // block) * block
    shapes = jax.eval_shape(produce, jnp.int32(0))
    init = jax.tree.map(lambda a: jnp.zeros((a.shape[0], rows, *a.shape[2:]), a.dtype), shapes)
    num_rounds = ops.divide(largest_pair + (block - 1), block)

    def one_round(state):
        i, buffers = state
        sent = produce(i * block)
        received = jax.tree.map(lambda a: _ranks.all_to_all(a, axis_name, axis_index_groups=axis_index_groups), sent)
        buffers = jax.tree.map(
            lambda buffer, a: lax.dynamic_update_slice_in_dim(buffer, a, i * block, axis=1), buffers, received
        )
        return i + 1, buffers

    return lax.while_loop(lambda state: state[0] < num_rounds, one_round, (jnp.int32(0), init))[1]
