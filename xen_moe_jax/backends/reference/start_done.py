"""Start and done of operations that are traced for a GPU and lowered for another platform: start runs all of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.reference.combine import combine
from xen_moe_jax.backends.reference.dispatch import dispatch, redispatch


def dispatch_start(call: Call, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the results, the two held arrays of `_async_primitives`, and `x`."""
    results = dispatch(call, x, *operands)
    held = [jnp.zeros(results[i].shape, jnp.float32) for i in (2, 3)]
    return (*results, *held, x)


def dispatch_done(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    count = (7 if call.spec.layout == "ranked" else 6) + 3
    return operands[-count:-3]


def combine_start(call: Call, y: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `out` and `y`."""
    return combine(call, y, *operands), y


def combine_done(_: Call, *operands: jax.Array) -> jax.Array:
    return operands[-2]


redispatch_start = redispatch


def redispatch_done(_: Call, *operands: jax.Array) -> jax.Array:
    return operands[-1]
