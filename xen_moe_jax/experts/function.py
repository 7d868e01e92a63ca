"""The function that experts compute: its static description, shared by `moe_mlp` and by `MoEConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

ACTIVATIONS = ("swiglu", "geglu", "clipped_swiglu", "gelu", "relu2")
APPLY_WEIGHTS_TO = ("rows", "activation", "input")
GROUPED_MATMULS = ("auto", "ragged_dot", "tokamax", "hopper")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFunction:
    """The function that experts compute. `xm.moe_mlp` documents the fields; `expert_bias`: there are biases."""

    activation: str = "swiglu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    expert_bias: bool = False
    apply_weights_to: str = "rows"
    experts: Callable[..., Any] | None = None
    grouped_matmul: str | Callable[..., Any] = "auto"
    layout: str = "grouped"

    @property
    def gated(self) -> bool:
        """True where an expert multiplies two projections, `gate` and `up`; False where it has `up` alone."""
        return self.activation.endswith("glu")

    @property
    def calls_its_matmul(self) -> bool:
        """False where `grouped_matmul` asks for kernels or a function and the layout has no groups: batches of padded
        rows are multiplied by XLA."""
        return self.layout == "grouped" or self.grouped_matmul in ("auto", "ragged_dot")
