"""Halves of operations that were traced for a GPU and are lowered for another platform: the start is all of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.backends.reference.combine import combine
from xen_moe_jax.backends.reference.dispatch import dispatch, redispatch

START_RETURNS_RESULTS = True


def dispatch_start(x: jax.Array, scales: jax.Array, *operands: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
    """Results, two held arrays, `x`."""
    results = dispatch(x, scales, *operands, **params)
    held = [jnp.zeros(results[i].shape, jnp.float32) for i in (2, 3)]
    return (*results, *held, x)


def dispatch_done(*operands: jax.Array, spec: Any, **_: Any) -> tuple[jax.Array, ...]:
    count = (7 if spec.layout == "ranked" else 6) + 3
    return operands[-count:-3]


def combine_start(y: jax.Array, *operands: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    """`out`, `y`."""
    return combine(y, *operands, **params), y


def combine_done(*operands: jax.Array, **_: Any) -> jax.Array:
    return operands[-2]


def redispatch_start(*operands: jax.Array, **params: Any) -> jax.Array:
    return redispatch(*operands, **params)


def redispatch_done(*operands: jax.Array, **_: Any) -> jax.Array:
    return operands[-1]
