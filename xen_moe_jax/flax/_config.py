"""`MoEConfig`: everything that defines an MoE layer, checked once for both Flax front ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._spec import worst_case_capacity

SCORES = ("softmax", "sigmoid")
BALANCING = ("aux_loss", "bias", "none")
LAYER_LAYOUTS = ("grouped", "padded")


def _require(ok: bool, name: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ValueError(f"MoEConfig.{name}={value!r}: {remedy}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, routing and communication of one MoE layer. Frozen and hashable.

    Attributes:
      hidden_size: features `H` of a token.
      intermediate_size: features `F` inside one expert.
      num_experts: global number of experts `E`.
      top_k: experts per token `K`.
      score: router scores, "softmax" over experts or "sigmoid" of each (DeepSeek-V3).
      normalize_weights: divide the chosen scores by their sum, so that a token's weights add up to `weight_scale`.
      weight_scale: factor on the router weights (DeepSeek-V3: 2.5).
      num_groups, topk_groups: experts form `num_groups` equal groups and a token may use the best `topk_groups` only;
        1 and 1 is plain top-k.
      balancing: "aux_loss" (the load-balancing loss of the Switch Transformer, in `MoEMetrics.aux_loss`), "bias" (a
        router bias that steers the choice and not the weights, moved after each step: arXiv:2408.15664), or "none".
      aux_loss_weight: factor on the load-balancing loss; used with balancing="aux_loss".
      bias_update_rate: how far one update moves the bias; used with balancing="bias".
      num_shared_experts: experts that every token uses, computed locally as one SwiGLU of `num_shared_experts * F`.
      axis_name: mesh axis, or axes with the slow one first, that the experts are split over.
      token_axes: mesh axes that the tokens are split over, `axis_name` included; None is all axes of the mesh.
      expert_sharding: sharding names of the dimensions (expert, hidden, intermediate) of the expert weights, written
        into the parameters' metadata; None is `(axis_name, None, None)`.
      layout: "grouped" (training and prefill: `jax.lax.ragged_dot`) or "padded" (decode: masked batched matmul).
      capacity: rows per rank in the grouped layout; None with `capacity_factor=None` can never overflow.
      capacity_factor: the same relative to balanced routing: `ceil(capacity_factor * T * K)` rows, `T` tokens a rank.
      alignment: rows of each expert's group are rounded up to a multiple of this (grouped layout).
      wire: what dispatch sends: None, "float8_e4m3fn" or "int8".
      combine_wire: what combine sends.
      kernel: tuning of the communication; never changes the results.
      dtype: dtype of the computation; None is that of the input. The router always computes in float32.
      param_dtype: dtype of the parameters. The router's are always float32.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    balancing: str = "aux_loss"
    aux_loss_weight: float = 0.01
    bias_update_rate: float = 0.001
    num_shared_experts: int = 0
    axis_name: str | tuple[str, str] = "ep"
    token_axes: tuple[str, ...] | None = None
    expert_sharding: tuple[Any, Any, Any] | None = None
    layout: str = "grouped"
    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int = 1
    wire: str | None = None
    combine_wire: str | None = None
    kernel: KernelConfig = DEFAULT_CONFIG
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "topk_groups", "alignment")
        for name in sizes:
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, name, value, "must be a positive int")
        shared = self.num_shared_experts
        _require(_is_int(shared) and shared >= 0, "num_shared_experts", shared, "must be an int >= 0")
        _require(self.top_k <= self.num_experts, "top_k", self.top_k, f"must be <= num_experts={self.num_experts}")
        self._check_groups()
        _require(self.score in SCORES, "score", self.score, f"must be one of {SCORES}")
        _require(self.balancing in BALANCING, "balancing", self.balancing, f"must be one of {BALANCING}")
        _require(
            self.layout in LAYER_LAYOUTS,
            "layout",
            self.layout,
            f"must be one of {LAYER_LAYOUTS}; for 'ranked' call xm.dispatch and write the experts yourself",
        )
        for name in ("weight_scale", "aux_loss_weight", "bias_update_rate"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _require(number and value >= 0, name, value, "must be a finite number >= 0")
        self._check_capacity()
        self._check_axes()
        if not isinstance(self.kernel, KernelConfig):
            raise TypeError(f"MoEConfig.kernel={self.kernel!r}: must be a xen_moe_jax.KernelConfig")
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value is None and name == "dtype":
                continue
            _require(jnp.issubdtype(jnp.dtype(value), jnp.floating), name, value, "must be a floating-point dtype")
            object.__setattr__(self, name, jnp.dtype(value))

    def _check_groups(self) -> None:
        experts, groups = self.num_experts, self.num_groups
        _require(experts % groups == 0, "num_groups", groups, f"must divide num_experts={experts}")
        _require(self.topk_groups <= groups, "topk_groups", self.topk_groups, f"must be <= num_groups={groups}")
        reachable = self.topk_groups * (experts // groups)
        _require(self.top_k <= reachable, "top_k", self.top_k, f"topk_groups groups hold only {reachable} experts")

    def _check_capacity(self) -> None:
        rows, factor = self.capacity, self.capacity_factor
        _require(rows is None or (_is_int(rows) and rows >= 0), "capacity", rows, "must be None or an int >= 0")
        real = isinstance(factor, int | float) and not isinstance(factor, bool)
        _require(
            factor is None or (real and 0 < factor < math.inf),
            "capacity_factor",
            factor,
            "must be None or a number > 0",
        )
        _require(rows is None or factor is None, "capacity", rows, "give capacity or capacity_factor, not both")
        for name in ("capacity", "capacity_factor"):
            value = getattr(self, name)
            _require(
                value is None or self.layout == "grouped", name, value, "only layout='grouped' has one; leave it None"
            )
        _require(
            self.alignment == 1 or self.layout == "grouped",
            "alignment",
            self.alignment,
            "only layout='grouped' has one; leave it 1",
        )

    def _check_axes(self) -> None:
        axes = self.expert_axes
        names = all(isinstance(axis, str) and axis for axis in axes)
        remedy = "must be a mesh axis name, or a tuple of one or two with the slow axis first"
        _require(names and len(set(axes)) == len(axes) in (1, 2), "axis_name", self.axis_name, remedy)
        if self.token_axes is not None:
            _require(
                isinstance(self.token_axes, tuple) and set(axes) <= set(self.token_axes),
                "token_axes",
                self.token_axes,
                f"must be None or a tuple of mesh axes that includes axis_name={self.axis_name!r}",
            )
        if self.expert_sharding is not None:
            _require(
                isinstance(self.expert_sharding, tuple) and len(self.expert_sharding) == 3,
                "expert_sharding",
                self.expert_sharding,
                "must be None or a tuple of three: names for (expert, hidden, intermediate)",
            )

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """`axis_name` as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    def dispatch_capacity(self, num_tokens: int, num_ranks: int) -> int | None:
        """Rows to ask `xm.dispatch` for, with `num_tokens` tokens a rank; None is the exact worst case."""
        if self.capacity_factor is None:
            return self.capacity
        worst = worst_case_capacity(
            layout=self.layout,
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
            alignment=self.alignment,
        )
        return min(worst, math.ceil(self.capacity_factor * num_tokens * self.top_k))
