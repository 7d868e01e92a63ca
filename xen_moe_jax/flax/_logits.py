"""The router's logits, in full float32: as matmuls of bfloat16 where that is exact and the faster way.

A float32 number is the sum of three bfloat16 numbers, so bfloat16 tokens times a float32 router are three matmuls of
bfloat16 whose products float32 holds exactly. On an NVIDIA GPU these run on tensor cores; a float32 matmul does not. On
a TPU a float32 matmul is six of bfloat16, and three where one operand is a converted bfloat16 array: here the gradient
of the tokens is three, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._mesh import platform, vary_alike

PLATFORMS = ("cuda", "tpu")
"""Platforms where bfloat16 tokens take the three matmuls."""
PARTS = 3
"""bfloat16 numbers whose sum is a float32 number: 24 bits of mantissa, 8 in each."""


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Tokens `[T, H]` times the router, float32 `[H, E]` -> float32 `[T, E]`.

    A rounded logit flips near-ties, and the flips would differ between machines: no operand is rounded.
    """
    if x.dtype == jnp.bfloat16 and platform() in PLATFORMS:
        return by_parts(*vary_alike(x, router))
    return jnp.dot(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)


def parts_of(a: jax.Array) -> list[jax.Array]:
    """`a`, float32, as the sum of bfloat16 arrays, the largest first."""
    parts = []
    for _ in range(PARTS):
        # A conversion there and back would do the same, but XLA may leave it out.
        rounded = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(rounded.astype(jnp.bfloat16))
        a = a - rounded
    return parts


def _times_parts(left: jax.Array, right: jax.Array) -> jax.Array:
    """bfloat16 `[A, B]` times float32 `[B, C]` -> float32 `[A, C]`, the smallest products added first."""
    columns = right.shape[1]
    products = jnp.dot(left, jnp.concatenate(parts_of(right), axis=1), preferred_element_type=jnp.float32)
    total = products[:, -columns:]
    for part in reversed(range(PARTS - 1)):
        total = total + products[:, part * columns : (part + 1) * columns]
    return total


@jax.custom_vjp
def by_parts(x: jax.Array, router: jax.Array) -> jax.Array:
    """`router_logits` of bfloat16 tokens. The gradient of the tokens is rounded to bfloat16 in any case, after products
    that are right to 16 bits; the gradient of the router is as exact as the logits."""
    return _times_parts(x, router)


def _forward(x: jax.Array, router: jax.Array) -> tuple[jax.Array, Any]:
    return by_parts(x, router), (x, router)


def _backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, router = kept
    (high, middle, _), (router_high, router_middle, _) = parts_of(cotangent), parts_of(router)
    left = jnp.concatenate([high, high, middle], axis=1)
    right = jnp.concatenate([router_high, router_middle, router_high], axis=1)
    by_x = jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    return by_x.astype(x.dtype), _times_parts(x.T, cotangent)


by_parts.defvjp(_forward, _backward)
