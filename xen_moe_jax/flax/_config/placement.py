"""Fields of `MoEConfig` about the placement: the mesh axes over which experts, tokens and features are split."""

from __future__ import annotations

import dataclasses
from typing import Any

from xen_moe_jax.flax._config.checks import is_int, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementFields:
    """Placement: the mesh axes over which experts, tokens and features are split.

    Attributes:
      axis_name: mesh axis, or axes with the slow one first, that the experts are split over.
      token_axes: mesh axes that the tokens are split over; None is all axes of the mesh but `tensor_axis`. Without the
        axes of `axis_name` the tokens are replicated over the experts' ranks: nothing is dispatched, each rank computes
        its experts for all tokens and one sum over the ranks follows (decode). Then nothing is dropped either.
      tensor_axis: mesh axis that the experts' features `F` are split over: each rank computes its part of every expert
        and the parts are summed. Tokens are replicated over it.
      expert_sharding: sharding names of the dimensions (expert, hidden, intermediate) of the expert weights, written
        into the parameters' metadata; None is `(axis_name, None, tensor_axis)`.
      num_slots: the experts' parameters have this many entries in place of `num_experts`, one for each slot of the
        `placement` that every call then needs: weights stay in their slots, and each slot has a gradient of its own
        (`placement.reduce`). None: weights are at home, and a call with a placement moves them to their slots.
      balance: "exact": experts are lent from their homes by each call's own counts, so that no rank gets more than
        `T * K` rows and none is dropped, as `xm.dispatch` says. Weights of lent experts travel in each call, in each of
        its chunks, and their gradients go home. Needs layout="grouped", without a capacity.
      slots_per_rank: experts of which a rank may have rows, with balance="exact"; None is `L + ceil(L / 4)`, and
        on Hopper GPUs weights are then lent one or two at a time (`xm.moe_mlp`).
    """

    axis_name: str | tuple[str, str] = "ep"
    token_axes: tuple[str, ...] | None = None
    tensor_axis: str | None = None
    expert_sharding: tuple[Any, Any, Any] | None = None
    num_slots: int | None = None
    balance: str | None = None
    slots_per_rank: int | None = None


def check_placement(config: Any) -> None:
    """Raises ValueError for the first of these fields of a `MoEConfig` that is wrong, alone or beside the experts'."""
    remedy = "must be a mesh axis name, or a tuple of one or two with the slow axis first"
    require(isinstance(config.axis_name, str | tuple), "axis_name", config.axis_name, remedy)  # a list has no hash
    axes = config.expert_axes
    names = all(isinstance(axis, str) and axis for axis in axes)
    require(names and len(set(axes)) == len(axes) in (1, 2), "axis_name", config.axis_name, remedy)
    tensor = config.tensor_axis
    require(
        tensor is None or (isinstance(tensor, str) and tensor != "" and tensor not in axes),
        "tensor_axis",
        tensor,
        f"must be None or a mesh axis other than axis_name={config.axis_name!r}",
    )
    tokens = config.token_axes
    if tokens is not None:
        remedy = (
            f"must be None or a tuple of mesh axes that includes axis_name={config.axis_name!r}, or none of its axes "
            "(tokens replicated over the experts' ranks)"
        )
        known = isinstance(tokens, tuple) and (set(axes) <= set(tokens) or not set(axes) & set(tokens))
        require(known, "token_axes", tokens, remedy)
        require(tensor is None or tensor not in tokens, "token_axes", tokens, f"tokens are replicated over {tensor!r}")
    slots, remedy = config.num_slots, f"must be None or an int >= num_experts={config.num_experts}"
    require(slots is None or (is_int(slots) and slots >= config.num_experts), "num_slots", slots, remedy)
    remedy = "tokens are replicated over the experts' ranks, where no placement is taken; use None"
    require(slots is None or not config.replicated_tokens, "num_slots", slots, remedy)
    _check_exact(config)
    if config.expert_sharding is not None:
        require(
            isinstance(config.expert_sharding, tuple) and len(config.expert_sharding) == 3,
            "expert_sharding",
            config.expert_sharding,
            "must be None or a tuple of three: names for (expert, hidden, intermediate)",
        )


def _check_exact(config: Any) -> None:
    require(config.balance in (None, "exact"), "balance", config.balance, "must be None or 'exact'")
    slots, exact = config.slots_per_rank, config.balance == "exact"
    require(slots is None or (is_int(slots) and slots > 0), "slots_per_rank", slots, "must be None or a positive int")
    require(slots is None or exact, "slots_per_rank", slots, "needs balance='exact'; leave it None")
    if not exact:
        return
    require(config.layout == "grouped", "balance", "exact", f"needs layout='grouped', not {config.layout!r}")
    for name in ("capacity", "capacity_factor", "num_slots"):
        require(getattr(config, name) is None, "balance", "exact", f"takes no {name}; leave it None")
    remedy = "tokens are replicated over the experts' ranks, where nothing is sent; use None"
    require(not config.replicated_tokens, "balance", "exact", remedy)
