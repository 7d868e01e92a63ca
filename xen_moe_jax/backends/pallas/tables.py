"""Routing arithmetic for TPU: dense comparisons and matrix products instead of scalar gathers, sorts and scatters.

The same numbers as `_layout` and `backends.metadata` give; a test compares them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.pallas_kernels import scatter as scatter_kernel

ORDER_BLOCK = 256
"""Entries that are ordered by one matrix product: counts up to this are exact in bfloat16."""
WINDOW = 64 * 1024
"""Rows that a scatter makes at a time, at most."""


class Order:
    """The order of entries within their bins: blocks of entries as one-hot rows, ordered by a triangular matrix
    product.

    Attributes:
      counts: int32 `[num_bins]`, entries of each bin.
    """

    def __init__(self, bins: jax.Array, num_bins: int) -> None:
        self._size = bins.shape[0]
        block = min(ORDER_BLOCK, self._size)
        padded = jnp.pad(bins, (0, -self._size % block), constant_values=-1).reshape(-1, block, 1)
        self._hot = padded == jnp.arange(num_bins, dtype=jnp.int32)
        earlier = jnp.tril(jnp.ones((block, block), jnp.bfloat16), -1)
        self._within = jnp.einsum(
            "ij,bje->bie", earlier, self._hot.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        self._counts = jnp.sum(self._hot, axis=1, dtype=jnp.int32)
        self.counts = jnp.sum(self._counts, axis=0, dtype=jnp.int32)

    def among(self, base: jax.Array | None = None) -> jax.Array:
        """int32 `[N]`: `base [num_bins]` of each entry's bin, and how many earlier entries name the same bin. Entries
        outside the bins get zero.
        """
        before = _layout.exclusive_cumsum(self._counts, axis=0)
        if base is not None:
            before = before + base
        chosen = jnp.where(self._hot, self._within.astype(jnp.int32) + before[:, None], 0)
        return jnp.sum(chosen, axis=2, dtype=jnp.int32).reshape(-1)[: self._size]


def order_within_bins(bins: jax.Array, num_bins: int) -> tuple[jax.Array, jax.Array]:
    """Computes `_layout.order_within_bins`."""
    order = Order(bins, num_bins)
    return order.among(), order.counts


def of_all_ranks(slots: jax.Array, spec: Spec) -> jax.Array:
    """Returns `slots [T, K]` of all ranks, `[R, T, K]`, which lie in memory with tokens side by side: other operations
    want them so, and would copy them."""
    return jnp.swapaxes(lax.all_gather(slots.T, spec.axis_name), 1, 2)


def positions_of(topk_idx: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Positions `[R, T, K]` and counts `[R, L]` of a grouped or padded dispatch (docs/design/internals.md)."""
    local, ranks = spec.local_experts, spec.num_ranks
    rank = lax.axis_index(spec.axis_name)
    order, counts = order_within_bins(topk_idx.reshape(-1), spec.num_experts)
    idx, order = (of_all_ranks(a.reshape(topk_idx.shape), spec) for a in (topk_idx, order))
    counts = jnp.pad(counts, (0, local * ranks - spec.num_experts)).reshape(ranks, local)
    recv_counts = lax.all_to_all(counts, spec.axis_name, 0, 0, tiled=True)

    mine = (idx >= 0) & (idx // local == rank)
    expert = jnp.where(mine, idx - rank * local, -1)
    hot = expert[..., None] == jnp.arange(local, dtype=jnp.int32)
    bases = _layout.expert_bases(recv_counts, spec)
    row = jnp.sum(jnp.where(hot, bases[:, None, None, :], 0), axis=-1, dtype=jnp.int32) + order
    last = (expert + 1) * (ranks * spec.num_tokens) if spec.layout == "padded" else spec.capacity
    return jnp.where(mine, jnp.where(row < last, row, -2), -1), recv_counts


def scattered(
    positions: jax.Array, values: list[tuple[jax.Array, int]], recv_counts: jax.Array, spec: Spec, config: KernelConfig
) -> tuple[jax.Array, ...]:
    """int32 `[rows]` for each of `values`: its entries, `[R, T]` or `[R, T, slots]`, at the rows that
    `positions [R, T, slots]` names, and the given number elsewhere.
    """
    rows = math.prod(spec.row_dims)
    limit = jnp.int32(rows) if spec.layout == "padded" else _layout.num_rows(recv_counts, spec)
    slots = positions.shape[2]
    wide = [v.ndim == 3 for v, _ in values]
    return scatter_kernel.scatter(
        positions.reshape(-1, slots),
        [v.reshape(-1, slots) if v.ndim == 3 else v.reshape(-1) for v, _ in values],
        [fill for _, fill in values],
        size=rows,
        limit=limit,
        window=hardware.smem_window(lambda window: scatter_kernel.smem_bytes(slots, wide, window), WINDOW),
        launch=hardware.launch("scatter", lambda block: 0, preferred=1, smallest=1, available=1, config=config),
    )
