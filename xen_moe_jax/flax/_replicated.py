"""Experts for tokens that every rank of the expert axes has (decode): `xm.dispatch_replicated` around the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import xen_moe_jax as xm
from xen_moe_jax.flax._chunks import Chunk, for_experts
from xen_moe_jax.flax._config import MoEConfig


def through_own_experts(
    config: MoEConfig, experts: Callable[..., jax.Array], weights: Any, tokens: Chunk
) -> tuple[jax.Array, jax.Array]:
    """Computes the output of all experts, each rank its own ones, and adds it up over the ranks.

    Args:
      experts: `(rows, group_sizes, weights) -> rows`, with `row_weights` as a fourth argument where
        `apply_weights_to` is not "rows".
      weights: its third argument.
      tokens: the same on every rank of the expert axes.

    Returns:
      `[T, H]`, the same on every rank, and int32 `[]`, the rows that this rank had no room for: of tokens that name an
      expert twice.
    """
    routed = xm.dispatch_replicated(
        tokens.x,
        tokens.topk_idx,
        tokens.topk_weights,
        num_experts=config.num_experts,
        axis_name=config.axis_name,
        layout=config.layout,
        alignment=config.alignment,
    )
    rows, sizes, *factors = for_experts(config, routed)
    y = experts(rows, sizes, weights, *factors)
    out = xm.combine_replicated(y, routed.handle, weighted=config.apply_weights_to == "rows")
    return out, routed.num_dropped
