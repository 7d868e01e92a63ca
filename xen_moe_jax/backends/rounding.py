"""Float32 arithmetic that a compiler may not fuse or skip.

LLVM contracts `a * b + c` into one fused operation, and XLA drops a round trip through a narrower type. Both change
bits that the contract fixes. Passing a value through an exclusive-or with an integer zero that only the run time
knows stops both, at the price of one integer operation an element.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_INTEGER = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def runtime_zero(counts: jax.Array) -> jax.Array:
    """uint32 `[]`, zero: the sign bit of the smallest of `counts`, which are never negative."""
    return lax.bitcast_convert_type(jnp.min(counts).astype(jnp.int32), jnp.uint32) >> 31


def keep(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns `x`, opaque to the compiler, which then rounds it to its dtype here and not later."""
    integer = _INTEGER[x.dtype.itemsize]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) ^ zero.astype(integer), x.dtype)


def multiply_rounded(a: jax.Array, b: jax.Array, zero: jax.Array) -> jax.Array:
    """`a * b` rounded to float32 before anything is added to it."""
    return keep(a * b, zero)


def round_to(x: jax.Array, dtype: Any, zero: jax.Array) -> jax.Array:
    """float32 `x` rounded to `dtype`, and not widened again behind our back."""
    return keep(x.astype(dtype), zero)
