"""The MoE layer itself, on one rank: route, dispatch, experts, combine. Placement on a mesh is in `_placement.py`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax import _validate
from xen_moe_jax._float8_weight import Float8Weight, without_codes
from xen_moe_jax._mesh import vary_over
from xen_moe_jax._placement import Placement, of_experts
from xen_moe_jax._quantized_weight import QuantizedWeight, without_gradient
from xen_moe_jax.experts import tpu_decode
from xen_moe_jax.experts.mlp import shared_expert
from xen_moe_jax.flax._balance import MoEMetrics, Sequences, measure
from xen_moe_jax.flax._chunks import Chunk, Members, through_experts, through_own_experts
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._parameters import ROUTER_PARAMETERS, parameter_table, part_of_rank
from xen_moe_jax.flax._router import as_given, route, shared_share


class Tokens(NamedTuple):
    """Inputs of an MoE layer with one entry per token; the layer splits all of them alike.

    Attributes:
      x: `[..., H]`.
      mask: bool `[...]`, False for tokens to leave out: their output is zero.
      token_ids: integer `[...]` with choice="hash", else None.
      topk_idx: integer `[..., K]`, the experts to use in place of the router's choice, or None.
      sequence: int32 `[...]`, the sequence of each token where the dimensions no longer say it, else None.
    """

    x: Any
    mask: Any
    token_ids: Any = None
    topk_idx: Any = None
    sequence: Any = None


def moe_on_rank(
    config: MoEConfig,
    metric_axes: tuple[str, ...],
    num_sequences: int | None,
    weights: dict[str, jax.Array],
    given: Tokens,
    members: Members,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs inside `shard_map`, with `config.layer_axes` manual.

    Args:
      metric_axes: mesh axes that hold different tokens; the metrics are sums over them.
      num_sequences: over all ranks, if `given.sequence` is not None.
      weights: by the names of `parameter_table`, plus the router bias if there is one; of each one this rank's part, or
        all of it.
      given: this rank's tokens.
      members: the ranks that take part, and a placement. Weights are moved to its slots, unless they are there.
    """
    dtype = config.dtype or given.x.dtype
    sequences = _sequences(config, num_sequences, given)
    x = given.x.reshape(-1, config.hidden_size)
    mask = given.mask.reshape(-1)
    # A NaN in a left-out token would reach the router's gradient: zero times NaN is NaN.
    x = jnp.where(mask[:, None], x, 0)
    token_ids = None if given.token_ids is None else given.token_ids.reshape(-1)
    topk_idx, routed, chosen_for = None, x, mask
    if given.topk_idx is not None:  # a token without a used slot is none of the router's, though shared experts see it
        topk_idx = as_given(config, given.topk_idx.reshape(-1, config.top_k))
        chosen_for = mask & jnp.any(topk_idx >= 0, axis=-1)
        routed = jnp.where(chosen_for[:, None], x, 0)
    routing = route(config, weights, routed, chosen_for, token_ids, topk_idx)

    parts = {
        name: _for_compute(part_of_rank(config, name, parameter, weights[name]), dtype)
        for name, parameter in parameter_table(config).items()
        if name not in ROUTER_PARAMETERS
    }
    tokens = Chunk(x.astype(dtype), routing.topk_idx, routing.topk_weights)
    share = shared_share(x, weights["shared_router"]) if config.shared_expert_gate else None
    if config.tensor_axis:
        parts, tokens = _one_part_each(config, parts, tokens)
        share = None if share is None else vary_over([share], (config.tensor_axis,))[0]
    shared = {name: parts.pop(name) for name in list(parts) if name.startswith("shared_")}

    if members.placement is not None:
        _validate.placement(members.placement, config.num_experts, jax.lax.axis_size(config.axis_name), "MoE")
    lost = jnp.zeros((), jnp.int32)
    if members.placement is not None and config.num_slots is None:
        if members.active is not None:
            placement, lost = _without_lost_experts(members.placement, members.active, tokens.topk_idx)
            members = members._replace(placement=placement)
        where: dict[str, Any] = {"axis_name": config.axis_name, "active": members.active, "config": config.kernel}
        parts = {name: without_codes(part) for name, part in parts.items()}
        parts = Placement.move(parts, None, members.placement, **where)
    if config.replicated_tokens:
        chosen_here = topk_idx is None and members.placement is None
        out, dropped = through_own_experts(config, parts, tokens, chosen_here=chosen_here)
        # Only a choice of the caller's can name an expert twice.
        dropped = jnp.zeros((), jnp.int32) if topk_idx is None else jax.lax.psum(dropped, config.axis_name)
    else:
        # A token of a caller who gives the experts may name one twice. More rows may come then than the worst case has,
        # and the alignment decides which ones are dropped: it must not depend on the platform.
        chosen = tpu_decode.adapted(config, x.shape[0]) if topk_idx is None else config
        out, dropped = through_experts(chosen, parts, tokens, members)
        dropped = dropped + lost
    out = out.astype(dtype)  # experts=... may have returned another one
    if config.shared_features:
        out = out + shared_expert(config, tokens.x, shared, share)
    if config.tensor_axis:
        out = jax.lax.psum(out.astype(jnp.float32), config.tensor_axis).astype(dtype)
    metrics = measure(config, routing, chosen_for, _same_over_tensor(config, dropped), sequences, metric_axes)
    if metrics.topk_idx is not None:
        shape = (*given.x.shape[:-1], config.top_k)
        metrics = dataclasses.replace(metrics, topk_idx=metrics.topk_idx.reshape(shape))
    return out.reshape(given.x.shape), metrics


def _without_lost_experts(placement: Placement, active: jax.Array, topk_idx: jax.Array) -> tuple[Placement, jax.Array]:
    """Empties the slots of experts that are at home on an inactive rank: their weights cannot be moved to any slot.

    Returns the placement, and int32 `[]`, the slots of this rank's tokens that name such an expert: rows that it drops.
    """
    local = -(-placement.num_experts // placement.num_ranks)
    there = jnp.repeat(jnp.asarray(active), local)[: placement.num_experts]
    experts = jnp.asarray(placement.experts)
    experts = jnp.where(there[jnp.maximum(experts, 0)], experts, -1)
    lost = jnp.sum((topk_idx >= 0) & ~there[jnp.maximum(topk_idx, 0)], dtype=jnp.int32)
    return of_experts(experts, placement.num_experts, placement.sums), lost


def _for_compute(weight: Any, dtype: Any) -> Any:
    """Casts an array, or the master of a `Float8Weight`, to the dtype of the computation; a `QuantizedWeight` is
    widened where it is multiplied by."""
    if isinstance(weight, Float8Weight):
        return weight.with_master(lambda master: master.astype(dtype))
    return without_gradient(weight) if isinstance(weight, QuantizedWeight) else weight.astype(dtype)


def _one_part_each(config: MoEConfig, parts: dict[str, jax.Array], tokens: Chunk) -> tuple[dict[str, jax.Array], Chunk]:
    """Keeps the output's bias on the first rank of `tensor_axis` alone, so that the sum over the axis holds it once.
    Tokens vary from here on, so that their cotangents are summed over the axis once per token and not once per row."""
    assert config.tensor_axis is not None
    axis = (config.tensor_axis,)
    if config.expert_bias:
        bias = vary_over([parts["down_bias"]], axis)[0]
        first = jax.lax.axis_index(config.tensor_axis) == 0
        parts = parts | {"down_bias": jnp.where(first, bias, jnp.zeros((), bias.dtype))}
    x, topk_weights = vary_over([tokens.x, tokens.topk_weights], axis)
    return parts, tokens._replace(x=x, topk_weights=topk_weights)


def _same_over_tensor(config: MoEConfig, dropped: jax.Array) -> jax.Array:
    """The ranks of `tensor_axis` drop the same rows: returns one value, whose type does not vary over the axis."""
    return jax.lax.pmax(dropped, config.tensor_axis) if config.tensor_axis else dropped


def _sequences(config: MoEConfig, num_sequences: int | None, given: Tokens) -> Sequences | None:
    if not config.sequence_loss_weight:
        return None
    if given.sequence is not None:
        assert num_sequences is not None
        return Sequences(given.sequence.reshape(-1), num_sequences, shared=True)
    length = given.x.shape[-2] if given.x.ndim > 1 else 1
    count = given.x.size // (length * config.hidden_size) if length else 0
    return Sequences(jnp.repeat(jnp.arange(count, dtype=jnp.int32), length), count, shared=False)
