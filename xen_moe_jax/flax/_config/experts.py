"""Fields of `MoEConfig` about the experts: sizes, the function that they compute, and its dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from xen_moe_jax._validate import FLOATS
from xen_moe_jax.experts.function import ACTIVATIONS, GROUPED_MATMULS, ExpertFunction
from xen_moe_jax.flax._config.checks import (
    is_float_dtype,
    is_int,
    require,
    require_booleans,
    require_choices,
    require_positive_ints,
    require_positive_numbers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFields(ExpertFunction):
    """Experts: their sizes and the function that they compute.

    Attributes:
      hidden_size: features `H` of a token.
      intermediate_size: features `F` inside one expert.
      num_experts: global number of experts `E`.
      num_shared_experts: experts that every token uses, computed locally as one of `num_shared_experts * F`.
      shared_intermediate_size: features inside the shared expert, in place of `num_shared_experts`.
      shared_expert_gate: the shared expert's output is multiplied by the sigmoid of one more logit of the token, whose
        weights are the parameter `shared_router` (Qwen2-MoE).
      activation: the function inside an expert. With `gate`, `up`, `down`: "swiglu" (arXiv:2002.05202), "geglu", or
        "clipped_swiglu" (gpt-oss: `g * sigmoid(activation_alpha * g) * (u + 1)` with `g` clipped above and `u` on both
        sides at `activation_limit`). With `up` and `down` alone: "gelu" or "relu2" (arXiv:2109.08668).
      activation_limit, activation_alpha: the numbers of "clipped_swiglu".
      expert_bias: experts have `gate_bias`, `up_bias`, `down_bias`.
      apply_weights_to: where a router weight meets its row: "rows", the expert's output, in float32 while combine adds
        up; or "activation", in front of the expert's last matmul, rounded to `dtype` with it: the backward pass then
        neither keeps nor reads the experts' outputs. Both are the same layer up to rounding. "input" is another layer
        (Llama 4): the weight multiplies the token that goes into the expert, in float32, rounded once.
      experts: in place of the built-in experts: `experts(rows, group_sizes, weights) -> rows`, with this rank's
        `weights` by name. Grouped: `rows [C, H]`, int32 `group_sizes [L]`; padded: `rows [L, M, H]` of which expert `l`
        uses the first `group_sizes[l]`. Rows outside the groups are unspecified, and the layer ignores their results.
      grouped_matmul: "auto" (the fastest one installed), "ragged_dot", "tokamax", "hopper", or a callable
        `(rows [C, A], weights [L, A, B], group_sizes [L]) -> [C, B]` (see `xen_moe_jax.experts.grouped_matmul`).
      expert_dtype: None, "float8_e4m3fn" or "int8": rows, weights and cotangents are quantized in front of each matmul
        of the experts (`xen_moe_jax.experts.float8` has every rounding). Kernels multiply fp8 on a Hopper GPU with a
        bfloat16 or float16 `dtype`. Elsewhere, with `grouped_matmul="ragged_dot"`, and in int8, plain JAX multiplies,
        slowly.
      dtype: dtype of the computation; None is that of the input. The router always computes in float32.
      param_dtype: dtype of the parameters. The router's are always float32.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    expert_dtype: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32


def check_experts(config: Any) -> None:
    """Raises ValueError or TypeError for the first of these fields of a `MoEConfig` that is wrong."""
    require_positive_ints(config, "hidden_size", "intermediate_size", "num_experts")
    shared = config.num_shared_experts
    require(is_int(shared) and shared >= 0, "num_shared_experts", shared, "must be an int >= 0")
    wide = config.shared_intermediate_size
    remedy = "must be None or a positive int"
    require(wide is None or (is_int(wide) and wide > 0), "shared_intermediate_size", wide, remedy)
    require(wide is None or not shared, "num_shared_experts", shared, f"shared_intermediate_size={wide} says it; use 0")
    require_booleans(config, "shared_expert_gate")
    gate = config.shared_expert_gate
    remedy = "needs a shared expert: num_shared_experts or shared_intermediate_size"
    require(not gate or shared > 0 or wide is not None, "shared_expert_gate", gate, remedy)
    require_choices(config, "activation", ACTIVATIONS)
    require_positive_numbers(config, "activation_limit", "activation_alpha")
    require_booleans(config, "expert_bias")
    require_choices(config, "apply_weights_to", ("rows", "activation", "input"))
    if config.experts is not None and not callable(config.experts):
        raise TypeError(f"MoEConfig.experts={config.experts!r}: must be a callable (rows, group_sizes, weights)")
    require(
        config.apply_weights_to != "activation" or config.experts is None,
        "apply_weights_to",
        config.apply_weights_to,
        "experts=... of your own get no router weights; use 'rows' or 'input'",
    )
    if not callable(config.grouped_matmul):
        require(
            config.grouped_matmul in GROUPED_MATMULS,
            "grouped_matmul",
            config.grouped_matmul,
            f"must be one of {GROUPED_MATMULS} or a callable (rows, weights, group_sizes)",
        )
    for name in ("dtype", "param_dtype"):
        value = getattr(config, name)
        if value is not None or name == "param_dtype":
            require(is_float_dtype(value), name, value, "must be a floating-point dtype of 16 bits or more")
    kind = config.dtype
    require(kind is None or jnp.dtype(kind).name in FLOATS, "dtype", kind, f"must be None or one of {FLOATS}")
