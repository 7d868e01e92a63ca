"""The MoE layer itself, on one rank: route, dispatch, experts, combine. Placement on a mesh is in `_placement.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._experts import grouped_experts, padded_experts, shared_expert
from xen_moe_jax.flax._parameters import EXPERT_PARAMETERS, ROUTER_BIAS
from xen_moe_jax.flax._router import MoEMetrics, count_tokens, load_balancing_loss, route


def moe_on_rank(
    config: MoEConfig,
    metric_axes: tuple[str, ...],
    weights: dict[str, jax.Array],
    x: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs inside `shard_map`, with `config.axis_name` manual.

    Args:
      metric_axes: mesh axes that hold different tokens; the metrics are sums over them.
      weights: by the names of `parameter_table`, plus the router bias if there is one; expert weights have this rank's
        `L` experts or all `E`.
      x: this rank's tokens `[..., H]`.
      mask: bool `[...]`, False for tokens to leave out: their output is zero.
    """
    dtype = config.dtype or x.dtype
    tokens = x.reshape(-1, config.hidden_size)
    mask = mask.reshape(-1)
    # A NaN in a left-out token would reach the router's gradient: zero times NaN is NaN.
    tokens = jnp.where(mask[:, None], tokens, 0)
    topk_idx, topk_weights, scores = route(config, weights["router"], weights.get(ROUTER_BIAS), tokens, mask)

    tokens = tokens.astype(dtype)
    num_ranks = jax.lax.axis_size(config.axis_name)
    experts = [own_experts(config, weights[name], num_ranks).astype(dtype) for name in EXPERT_PARAMETERS]
    routed = xm.dispatch(
        tokens,
        topk_idx,
        topk_weights,
        num_experts=config.num_experts,
        axis_name=config.axis_name,
        layout=config.layout,
        capacity=config.dispatch_capacity(tokens.shape[0], num_ranks),
        alignment=config.alignment,
        wire=config.wire,
        config=config.kernel,
    )
    if config.layout == "grouped":
        y = grouped_experts(routed.x, routed.group_sizes, *experts)
    else:
        y = padded_experts(routed.x, routed.num_tokens_per_expert, *experts)
    out = xm.combine(y, routed.handle, weighted=True, wire=config.combine_wire, config=config.kernel)
    if config.num_shared_experts:
        shared = {name: w.astype(dtype) for name, w in weights.items() if name.startswith("shared_")}
        out = out + shared_expert(tokens, shared)

    counts, dropped = count_tokens(config, topk_idx), routed.num_dropped
    if metric_axes:
        counts, dropped = jax.lax.psum((counts, dropped), metric_axes)
    aux_loss = jnp.zeros((), jnp.float32)
    if config.balancing == "aux_loss":
        aux_loss = config.aux_loss_weight * load_balancing_loss(config, scores, mask, counts, metric_axes)
    return out.reshape(x.shape), MoEMetrics(aux_loss=aux_loss, tokens_per_expert=counts, num_dropped=dropped)


def own_experts(config: MoEConfig, weights: Any, num_ranks: int) -> jax.Array:
    """This rank's experts, `[L, ...]`, of weights that hold `L` of them already or all `E`."""
    local = -(-config.num_experts // num_ranks)
    held = weights.shape[0]
    if held == local:
        return weights
    if held != config.num_experts:
        raise ValueError(
            f"expert weights hold {held} experts on this rank: expected {local} (num_experts={config.num_experts} over "
            f"{num_ranks} ranks of axis {config.axis_name!r}) or all {config.num_experts}; check the in_specs"
        )
    weights = pad_experts(config, weights, num_ranks)
    return jax.lax.dynamic_slice_in_dim(weights, jax.lax.axis_index(config.axis_name) * local, local)


def pad_experts(config: MoEConfig, weights: jax.Array, num_ranks: int) -> jax.Array:
    """Expert weights `[E, ...]` with zeros up to `R * ceil(E / R)` experts, so that every rank owns as many."""
    extra = -config.num_experts % num_ranks
    return jnp.pad(weights, [(0, extra)] + [(0, 0)] * (weights.ndim - 1)) if extra else weights
