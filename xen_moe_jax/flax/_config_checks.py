"""Checks of a `MoEConfig`: each error names the field, its value and what to do."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import parse_wire

CHOICES = {
    "activation": ("swiglu", "geglu", "clipped_swiglu", "gelu", "relu2"),
    "choice": ("top_k", "hash"),
    "score": ("softmax", "sigmoid", "uniform"),
    "balancing": ("aux_loss", "bias", "none"),
    "remat": ("none", "experts", "all"),
    "apply_weights_to": ("rows", "activation"),
}
LAYER_LAYOUTS = ("grouped", "padded")
GROUPED_MATMULS = ("auto", "ragged_dot", "tokamax", "hopper")


def check(config: Any) -> None:
    """`config` is a `MoEConfig`, which calls this. Raises ValueError or TypeError for the first field that is wrong."""
    _check_sizes(config)
    _check_groups(config)
    for name, choices in CHOICES.items():
        _require(getattr(config, name) in choices, name, getattr(config, name), f"must be one of {choices}")
    _require(
        config.layout in LAYER_LAYOUTS,
        "layout",
        config.layout,
        f"must be one of {LAYER_LAYOUTS}; for 'ranked' call xm.dispatch and write the experts yourself",
    )
    _check_routing(config)
    _check_capacity(config)
    _check_axes(config)
    _check_callables(config)
    for name in ("wire", "combine_wire"):
        try:
            parse_wire(getattr(config, name), name)
        except ValueError as error:
            raise ValueError(f"MoEConfig.{error}") from None
    for name in ("dtype", "param_dtype"):
        value = getattr(config, name)
        if value is not None or name == "param_dtype":
            _require(_is_float_dtype(value), name, value, "must be a floating-point dtype")


def _require(ok: bool, name: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ValueError(f"MoEConfig.{name}={value!r}: {remedy}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_float_dtype(value: Any) -> bool:
    try:  # NumPy takes None for float64
        return value is not None and bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except TypeError:  # not a dtype at all
        return False


def _check_sizes(config: Any) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "topk_groups", "alignment")
    for name in (*sizes, "num_chunks"):
        value = getattr(config, name)
        _require(_is_int(value) and value > 0, name, value, "must be a positive int")
    shared = config.num_shared_experts
    _require(_is_int(shared) and shared >= 0, "num_shared_experts", shared, "must be an int >= 0")
    _require(config.top_k <= config.num_experts, "top_k", config.top_k, f"must be <= num_experts={config.num_experts}")
    for name in ("expert_bias", "logits_bias", "normalize_weights", "return_topk_idx"):
        value = getattr(config, name)
        _require(isinstance(value, bool), name, value, "must be True or False")
    numbers = ("weight_scale", "aux_loss_weight", "sequence_loss_weight", "z_loss_weight", "bias_update_rate")
    for name in numbers:
        value = getattr(config, name)
        _require(_is_number(value) and value >= 0, name, value, "must be a finite number >= 0")
    for name in ("activation_limit", "activation_alpha"):
        value = getattr(config, name)
        _require(_is_number(value) and value > 0, name, value, "must be a finite number > 0")


def _check_groups(config: Any) -> None:
    experts, groups = config.num_experts, config.num_groups
    _require(experts % groups == 0, "num_groups", groups, f"must divide num_experts={experts}")
    _require(config.topk_groups <= groups, "topk_groups", config.topk_groups, f"must be <= num_groups={groups}")
    reachable = config.topk_groups * (experts // groups)
    _require(config.top_k <= reachable, "top_k", config.top_k, f"topk_groups groups hold only {reachable} experts")


def _check_routing(config: Any) -> None:
    hashed = config.choice == "hash"
    if hashed:
        _require(config.balancing == "none", "balancing", config.balancing, "choice='hash' has no balance; use 'none'")
        _require(config.num_groups == 1, "num_groups", config.num_groups, "choice='hash' knows no groups; leave it 1")
        weight = config.sequence_loss_weight
        _require(weight == 0, "sequence_loss_weight", weight, "choice='hash' cannot be steered; leave it 0")
    if config.score == "uniform":
        _require(hashed, "score", config.score, "only choice='hash' can do without scores")
        _require(config.z_loss_weight == 0, "z_loss_weight", config.z_loss_weight, "score='uniform' has no logits")
        _require(not config.logits_bias, "logits_bias", config.logits_bias, "score='uniform' has no logits")


def _check_capacity(config: Any) -> None:
    rows, factor = config.capacity, config.capacity_factor
    _require(rows is None or (_is_int(rows) and rows >= 0), "capacity", rows, "must be None or an int >= 0")
    _require(
        factor is None or (_is_number(factor) and factor > 0),
        "capacity_factor",
        factor,
        "must be None or a finite number > 0",
    )
    _require(rows is None or factor is None, "capacity", rows, "give capacity or capacity_factor, not both")
    for name in ("capacity", "capacity_factor"):
        value = getattr(config, name)
        _require(
            value is None or config.layout == "grouped", name, value, "only layout='grouped' has one; leave it None"
        )
    _require(
        config.alignment == 1 or config.layout == "grouped",
        "alignment",
        config.alignment,
        "only layout='grouped' has one; leave it 1",
    )


def _check_axes(config: Any) -> None:
    remedy = "must be a mesh axis name, or a tuple of one or two with the slow axis first"
    _require(isinstance(config.axis_name, str | tuple), "axis_name", config.axis_name, remedy)  # a list has no hash
    axes = config.expert_axes
    names = all(isinstance(axis, str) and axis for axis in axes)
    _require(names and len(set(axes)) == len(axes) in (1, 2), "axis_name", config.axis_name, remedy)
    tensor = config.tensor_axis
    _require(
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
        _require(known, "token_axes", tokens, remedy)
        _require(tensor is None or tensor not in tokens, "token_axes", tokens, f"tokens are replicated over {tensor!r}")
    if config.expert_sharding is not None:
        _require(
            isinstance(config.expert_sharding, tuple) and len(config.expert_sharding) == 3,
            "expert_sharding",
            config.expert_sharding,
            "must be None or a tuple of three: names for (expert, hidden, intermediate)",
        )


def _check_callables(config: Any) -> None:
    if not isinstance(config.kernel, KernelConfig):
        raise TypeError(f"MoEConfig.kernel={config.kernel!r}: must be a xen_moe_jax.KernelConfig")
    if config.experts is not None and not callable(config.experts):
        raise TypeError(f"MoEConfig.experts={config.experts!r}: must be a callable (rows, group_sizes, weights)")
    where = config.apply_weights_to
    _require(
        where == "rows" or config.experts is None,
        "apply_weights_to",
        where,
        "experts=... of your own get no router weights; leave it 'rows'",
    )
    _require(
        where == "rows" or not config.replicated_tokens,
        "apply_weights_to",
        where,
        f"with token_axes={config.token_axes}, without an axis of the experts, tokens are weighted as they are added "
        "up; leave it 'rows'",
    )
    if not callable(config.grouped_matmul):
        _require(
            config.grouped_matmul in GROUPED_MATMULS,
            "grouped_matmul",
            config.grouped_matmul,
            f"must be one of {GROUPED_MATMULS} or a callable (rows, weights, group_sizes)",
        )
