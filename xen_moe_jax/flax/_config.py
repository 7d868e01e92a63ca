"""`MoEConfig`: everything that defines an MoE layer, checked once for both Flax front ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._numbers import plain
from xen_moe_jax._spec import worst_case_capacity
from xen_moe_jax.flax._config_checks import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, routing and communication of one MoE layer. Frozen and hashable.

    Attributes:
      hidden_size: features `H` of a token.
      intermediate_size: features `F` inside one expert.
      num_experts: global number of experts `E`.
      top_k: experts per token `K`.
      activation: inside an expert, with `gate`, `up`, `down`: "swiglu" (arXiv:2002.05202), "geglu", or
        "clipped_swiglu" (gpt-oss: `g * sigmoid(activation_alpha * g) * (u + 1)` with `g` clipped above and `u` on both
        sides at `activation_limit`); with `up` and `down` alone: "gelu" or "relu2" (arXiv:2109.08668).
      activation_limit, activation_alpha: of "clipped_swiglu".
      expert_bias: experts have `gate_bias`, `up_bias`, `down_bias`.
      logits_bias: the router's logits have a bias (a parameter; the "bias" of `balancing` is another thing).
      choice: how experts are chosen: "top_k" of the scores, or "hash" of `token_ids` (arXiv:2106.04426), which the call
        must then be given. Weights are the scores of the chosen in both.
      score: router scores, "softmax" over experts, "sigmoid" of each (DeepSeek-V3), or, with choice="hash",
        "uniform": no router at all.
      normalize_weights: divide the chosen scores by their sum, so that a token's weights add up to `weight_scale`.
      weight_scale: factor on the router weights (DeepSeek-V3: 2.5).
      return_topk_idx: `MoEMetrics.topk_idx` holds the experts that each token used (router replay).
      apply_weights_to: where a router weight meets its row: "rows", the expert's output, in float32 while combine adds
        up; or "activation", in front of the expert's last matmul, rounded to `dtype` with it: the backward pass then
        neither keeps nor reads the experts' outputs. The same layer up to rounding.
      num_groups, topk_groups: experts form `num_groups` equal groups and a token may use the best `topk_groups` only;
        1 and 1 is plain top-k.
      balancing: "aux_loss" (the load-balancing loss of the Switch Transformer, in `MoEMetrics.aux_loss`), "bias" (a
        router bias that steers the choice and not the weights, moved after each step: arXiv:2408.15664), or "none".
      aux_loss_weight: factor on the load-balancing loss; used with balancing="aux_loss".
      sequence_loss_weight: factor on the balancing loss of each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17); a
        sequence is the dimension before the features, `x [..., S, H]`.
      z_loss_weight: factor on the mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, eq. 5).
      bias_update_rate: how far one update moves the bias; used with balancing="bias".
      num_shared_experts: experts that every token uses, computed locally as one of `num_shared_experts * F`.
      axis_name: mesh axis, or axes with the slow one first, that the experts are split over.
      token_axes: mesh axes that the tokens are split over; None is all axes of the mesh but `tensor_axis`. Without the
        axes of `axis_name` the tokens are replicated over the experts' ranks: nothing is dispatched, each rank computes
        its experts for all tokens and one sum over the ranks follows (decode). Then nothing is dropped either.
      tensor_axis: mesh axis that the experts' features `F` are split over: each rank computes its part of every expert
        and the parts are summed. Tokens are replicated over it.
      expert_sharding: sharding names of the dimensions (expert, hidden, intermediate) of the expert weights, written
        into the parameters' metadata; None is `(axis_name, None, tensor_axis)`.
      layout: "grouped" (a grouped matmul; on a TPU for decode too) or "padded" (decode: masked batched matmul).
      capacity: rows per rank in the grouped layout; None with `capacity_factor=None` can never overflow.
      capacity_factor: the same relative to balanced routing: `ceil(capacity_factor * T * K)` rows, `T` tokens a rank,
        and room for the padding of `alignment`.
      alignment: rows of each expert's group are rounded up to a multiple of this (grouped layout).
      num_chunks: a rank's tokens are sent in this many parts, one after the other: buffers shrink by it, and on a
        backend with halves the wire works under the experts. A capacity is divided by it too.
      remat: what the backward pass computes again instead of keeping it: "none", "experts" (the experts from the
        received rows: nothing is dispatched again), or "all" (each chunk, its dispatch included).
      experts: in place of the built-in experts: `experts(rows, group_sizes, weights) -> rows`, with this rank's
        `weights` by name. Grouped: `rows [C, H]`, int32 `group_sizes [L]`; padded: `rows [L, M, H]` of which expert `l`
        uses the first `group_sizes[l]`. Rows outside the groups are unspecified, and what comes out of them is ignored.
      grouped_matmul: "auto" (the fastest that is here), "ragged_dot", "tokamax", "hopper", or a callable
        `(rows [C, A], weights [L, A, B], group_sizes [L]) -> [C, B]` (see `xen_moe_jax.flax.grouped_matmul`).
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
    activation: str = "swiglu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    expert_bias: bool = False
    logits_bias: bool = False
    choice: str = "top_k"
    score: str = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    return_topk_idx: bool = False
    apply_weights_to: str = "rows"
    num_groups: int = 1
    topk_groups: int = 1
    balancing: str = "aux_loss"
    aux_loss_weight: float = 0.01
    sequence_loss_weight: float = 0.0
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.001
    num_shared_experts: int = 0
    axis_name: str | tuple[str, str] = "ep"
    token_axes: tuple[str, ...] | None = None
    tensor_axis: str | None = None
    expert_sharding: tuple[Any, Any, Any] | None = None
    layout: str = "grouped"
    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int = 1
    num_chunks: int = 1
    remat: str = "none"
    experts: Callable[..., Any] | None = None
    grouped_matmul: str | Callable[..., Any] = "auto"
    wire: str | None = None
    combine_wire: str | None = None
    kernel: KernelConfig = DEFAULT_CONFIG
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # a NumPy number is a number, and narrow ones would overflow
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check(self)
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, jnp.dtype(getattr(self, name)))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """`axis_name` as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Mesh axes that the layer cannot do without: the experts' and the tensor axis."""
        return self.expert_axes + ((self.tensor_axis,) if self.tensor_axis else ())

    @property
    def replicated_tokens(self) -> bool:
        """Whether every rank of the expert axes has the same tokens."""
        return self.token_axes is not None and not set(self.expert_axes) & set(self.token_axes)

    @property
    def gated(self) -> bool:
        """Whether an expert multiplies two projections, `gate` and `up`, or has `up` alone."""
        return self.activation.endswith("glu")

    def chunk_capacity(self, num_tokens: int, num_ranks: int) -> int | None:
        """Rows to ask `xm.dispatch` for, one chunk of `num_tokens` tokens a rank; None is the exact worst case."""
        if self.capacity_factor is None:
            return None if self.capacity is None else -(-self.capacity // self.num_chunks)
        worst = worst_case_capacity(
            layout=self.layout,
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
            alignment=self.alignment,
        )
        padding = -(-self.num_experts // num_ranks) * (self.alignment - 1)
        return min(worst, math.ceil(self.capacity_factor * num_tokens * self.top_k) + padding)
