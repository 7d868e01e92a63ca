"""Activations between the matmuls of an expert, element by element, and their derivatives.

Kernels call them in their epilogues, and JAX outside of kernels. They take and return float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

GATED = ("swiglu", "geglu", "clipped_swiglu")
NAMES = (*GATED, "gelu", "relu2")


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation by its name in `MoEConfig.activation`; `limit` and `alpha` are those of "clipped_swiglu"."""

    name: str = "swiglu"
    limit: float = 7.0
    alpha: float = 1.702

    @property
    def gated(self) -> bool:
        """Returns True if the activation takes two projections, `gate` and `up`."""
        return self.name in GATED

    def __call__(self, *projections: Any) -> Any:
        """The activation of `gate` and `up`, or of `up` alone."""
        *gate, u = projections
        if self.name == "relu2":
            return jnp.square(jnp.maximum(u, 0.0))
        if self.name == "gelu":
            return u * _normal_cdf(u)
        (g,) = gate
        if self.name == "geglu":
            return g * _normal_cdf(g) * u
        if self.name == "swiglu":
            return g * lax.logistic(g) * u
        g, u = jnp.minimum(g, self.limit), self._clipped(u)
        return g * lax.logistic(self.alpha * g) * (u + 1.0)

    def gradients(self, cotangent: Any, *projections: Any) -> tuple[Any, ...]:
        """The cotangents of the projections. At a limit of "clipped_swiglu" the derivative is that of its inside."""
        *gate, u = projections
        if self.name == "relu2":
            return (cotangent * 2.0 * jnp.maximum(u, 0.0),)
        if self.name == "gelu":
            return (cotangent * _gelu_slope(u),)
        (g,) = gate
        if self.name == "geglu":
            return cotangent * u * _gelu_slope(g), cotangent * g * _normal_cdf(g)
        if self.name == "swiglu":
            sigmoid = lax.logistic(g)
            return cotangent * u * sigmoid * (1 + g * (1 - sigmoid)), cotangent * g * sigmoid
        inside, clipped = jnp.minimum(g, self.limit), self._clipped(u)
        sigmoid = lax.logistic(self.alpha * inside)
        by_gate = cotangent * (clipped + 1.0) * sigmoid * (1 + self.alpha * inside * (1 - sigmoid))
        by_up = cotangent * inside * sigmoid
        return jnp.where(g <= self.limit, by_gate, 0.0), jnp.where(jnp.abs(u) <= self.limit, by_up, 0.0)

    def _clipped(self, u: Any) -> Any:
        return jnp.minimum(jnp.maximum(u, -self.limit), self.limit)


def _normal_cdf(x: Any) -> Any:
    """Returns the standard normal distribution's function at `x`, within 1e-7 (Abramowitz and Stegun, Handbook of
    Mathematical Functions, 7.1.26): Mosaic GPU does not lower `lax.erf`.
    """
    magnitude = jnp.maximum(x, -x)
    t = 1.0 / (1.0 + 0.3275911 * math.sqrt(0.5) * magnitude)
    series: Any = 0.0
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + coefficient) * t
    tail = 0.5 * series * jnp.exp(-0.5 * x * x)
    return jnp.where(x < 0.0, tail, 1.0 - tail)


def _gelu_slope(x: Any) -> Any:
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
