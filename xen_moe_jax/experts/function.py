"""The function that experts compute: its static description."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

ACTIVATIONS = ("swiglu", "geglu", "clipped_swiglu", "gelu", "relu2")
GROUPED_MATMULS = ("auto", "ragged_dot", "tokamax", "hopper")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFunction:
    """The function that experts compute. `MoEConfig` inherits it, and documents its fields."""

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
