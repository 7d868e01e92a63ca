"""Quantizes experts' weights once for several calls. The results are `Float8Weight`s of `_float8_weight`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._float8_weight import DTYPE, Float8Weight
from xen_moe_jax._numbers import array, is_one_of, is_wide
from xen_moe_jax.experts import float8


def quantize_weights(weights: Any, dtype: str = DTYPE, *, compute_dtype: Any = None) -> Any:
    """Quantizes experts' weights once for several calls, by the rule by which a call quantizes them: fp8 (e4m3) with a
    float32 scale for 128 x 128 elements (DeepSeek-V3, arXiv:2412.19437, section 3.3).

        codes = xm.quantize_weights((gate, up, down))  # once for a step of the optimizer

        def loss(weights, batch):  # differentiated by the weights, for each batch of gradient accumulation
            matrices = (code.of(weight) for code, weight in zip(codes, weights))
            return of_output(xm.moe_mlp(..., *matrices, experts="float8_e4m3fn"))

    Args:
      weights: a pytree of floating-point arrays `[L, A, B]`; inside `jax.shard_map` these are this rank's experts.
      dtype: "float8_e4m3fn".
      compute_dtype: dtype of the tokens, to which the weights are rounded before they are quantized; None if they have
        this dtype already.

    Returns:
      The pytree with a `Float8Weight` without a master in the place of each array. The codes have no gradient by the
      weights: gradients go to the master, which `Float8Weight.of` sets.

    Raises:
      ValueError: `dtype` is another one.
      TypeError: an array is not floating point or has no three dimensions; weights or `compute_dtype` are quantized.
    """
    if not is_one_of(dtype, (DTYPE,)):
        raise ValueError(f"quantize_weights: dtype={dtype!r}: must be {DTYPE!r}")
    return jax.tree.map(lambda weight: _codes_of(weight, compute_dtype), weights, is_leaf=float8.is_quantized)


def _codes_of(weight: Any, compute_dtype: Any) -> Float8Weight:
    if float8.is_quantized(weight):
        raise TypeError(
            f"quantize_weights: weights hold a {type(weight).__name__}, which is quantized already: leave it out, or "
            "give the array from which it was made"
        )
    weight = array(weight, "quantize_weights", "weights")
    if weight.ndim != 3 or not is_wide(weight.dtype):
        raise TypeError(
            f"quantize_weights: {weight.dtype}{list(weight.shape)}: must be floating point [L, A, B] of 16 bits or more"
        )
    try:
        dtype = weight.dtype if compute_dtype is None else jnp.dtype(compute_dtype)
    except (TypeError, ValueError):  # no dtype
        dtype = None
    if dtype is None or not is_wide(dtype):
        given = dtype or compute_dtype
        raise TypeError(f"quantize_weights: compute_dtype={given}: must be floating point of 16 bits or more")
    return float8.codes_of(weight.astype(dtype))
