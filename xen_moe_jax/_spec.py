"""The static half of every operation: mesh axis, sizes, layout. Hashable, so that it can be a primitive's parameter."""

from __future__ import annotations

import dataclasses
import math

LAYOUTS = ("grouped", "ranked", "padded")
DROPS = ("position", "source", "weight")
"""Rules by which rows are dropped when a capacity is exceeded: `_drops.py`."""
SCALE_BLOCK = 128
"""Consecutive elements of the hidden dimension that share one scale."""


def scale_blocks(hidden: int) -> int:
    """Number of scales of a row of `hidden` elements."""
    return -(-hidden // SCALE_BLOCK)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static description that a dispatch, its handle, and every operation on that handle share.

    Attributes:
      axis_name: mesh axis names, slowest link first.
      axis_sizes: their sizes.
      num_experts: global number of experts `E`.
      num_tokens: tokens per rank `T`.
      top_k: slots per token `K`.
      layout: "grouped", "ranked" or "padded".
      capacity: rows of `routed.x`.
      alignment: every group's row count is rounded up to a multiple of this (grouped layout only).
      token_dims: dimensions of the tokens where `x` has several, `()` for `x [T, H]`; their product is `num_tokens`.
        Primitives and backends know `[T, H]` alone.
    """

    axis_name: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    num_experts: int
    num_tokens: int
    top_k: int
    layout: str
    capacity: int
    alignment: int = 1
    token_dims: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def local_experts(self) -> int:
        """`L = ceil(E / R)`; the last ranks may own fewer, or none."""
        return -(-self.num_experts // self.num_ranks)

    @property
    def slots(self) -> int:
        """Rows that one token may have on one rank, as counted in `positions`."""
        return 1 if self.layout == "ranked" else self.top_k

    def rows_shape(self, hidden: int) -> tuple[int, ...]:
        """Shape of `routed.x`."""
        return (*self.row_dims, hidden)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """Shape of the router weights of the rows: one per row, or one per row and slot in the ranked layout."""
        return (self.capacity, self.top_k) if self.layout == "ranked" else self.row_dims

    def tokens_shape(self, width: int) -> tuple[int, ...]:
        """Returns the shape of an array with `width` numbers for each token of the caller."""
        return (*(self.token_dims or (self.num_tokens,)), width)

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Leading dimensions of `routed.x`."""
        if self.layout == "padded":
            return (self.local_experts, self.num_ranks * self.num_tokens)
        return (self.capacity,)


def worst_case_capacity(
    *, layout: str, num_ranks: int, num_tokens: int, top_k: int, num_experts: int, alignment: int
) -> int:
    """Rows that can never overflow while no token names one expert twice.

    Grouped: a token has at most `min(K, L)` rows on one rank; alignment adds at most `alignment - 1` rows to each group
    that is not empty.
    """
    local = -(-num_experts // num_ranks)
    if layout == "ranked":
        return num_ranks * num_tokens
    if layout == "padded":
        return local * num_ranks * num_tokens
    rows = num_ranks * num_tokens * min(top_k, local)
    return (rows + min(local, rows) * (alignment - 1)) // alignment * alignment


def exact_capacity(*, num_tokens: int, top_k: int, slots: int, alignment: int) -> int:
    """Rows of a rank with balance="exact" and `slots` slots: `T * K`, and `alignment - 1` for each group with a row."""
    rows = num_tokens * top_k
    return (rows + min(slots, rows) * (alignment - 1)) // alignment * alignment
