"""Quantizes experts' weights once for several calls; `_float8_weight` has what comes out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._float8_weight import DTYPE, Float8Weight
from xen_moe_jax.experts import float8


def quantize_weights(weights: Any, dtype: str = DTYPE, *, compute_dtype: Any = None) -> Any:
    """Quantizes experts' weights once for several calls, by the rule that a call quantizes them by.

        codes = xm.quantize_weights((gate, up, down))  # once for a step of the optimizer

        def loss(weights, batch):  # differentiated by the weights, for each batch of gradient accumulation
            matrices = (code.of(weight) for code, weight in zip(codes, weights))
            return of_output(xm.moe_mlp(..., *matrices, experts="float8_e4m3fn"))

    Args:
      weights: a pytree of floating-point arrays `[L, A, B]`: inside `jax.shard_map`, this rank's.
      dtype: "float8_e4m3fn".
      compute_dtype: dtype of the tokens, to which weights are rounded first; None for that of the weights.

    Returns:
      A `Float8Weight` without a master in the place of each array. It has no gradient by the weights.

    Raises:
      ValueError, TypeError: another `dtype`, or an array that is none of floating-point numbers `[L, A, B]`.
    """
    if dtype != DTYPE:
        raise ValueError(f"quantize_weights: dtype={dtype!r}: must be {DTYPE!r}")
    return jax.tree.map(lambda weight: _codes_of(weight, compute_dtype), weights)


def _codes_of(weight: Any, compute_dtype: Any) -> Float8Weight:
    weight = jnp.asarray(weight)
    if weight.ndim != 3 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"quantize_weights: {weight.dtype}{list(weight.shape)}: must be floating point [L, A, B]")
    return float8.codes_of(weight.astype(compute_dtype or weight.dtype))
