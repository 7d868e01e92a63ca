"""The parts of an `all_gather` that do not move anything: what travels, and where it goes in the result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._quantize import Wire, from_wire, quantize_arrays


def arranged(parts: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """`[R, ...]`, the parts of all ranks, in the form that `jax.lax.all_gather` gives them: stacked along a new `axis`,
    or concatenated along an old one."""
    parts = jnp.moveaxis(parts, 0, axis)
    if not tiled:
        return parts
    return parts.reshape(*parts.shape[:axis], parts.shape[axis] * parts.shape[axis + 1], *parts.shape[axis + 2 :])


def through_wire(gather: Callable[[jax.Array], jax.Array], x: jax.Array, wire: Wire) -> jax.Array:
    """`[R, *x.shape]`, quantized along the last dimension for the way; values and scales travel as one array of bytes.

    `gather` returns the arrays of all ranks, `[R, N]` for `[N]`. This rank's own part is rounded as the others are.
    """
    payload = quantize_arrays(x, wire)
    as_bytes = [lax.bitcast_convert_type(array, jnp.uint8).reshape(-1) for array in payload]
    came = gather(jnp.concatenate(as_bytes))
    values, scales = jnp.split(came, [as_bytes[0].size], axis=1)

    def back(found: jax.Array, like: jax.Array) -> jax.Array:
        wide = found.reshape(-1, *like.shape, *([like.dtype.itemsize] if like.dtype.itemsize > 1 else []))
        return lax.bitcast_convert_type(wide, like.dtype)

    return from_wire((back(values, payload[0]), back(scales, payload[1])), wire, x.shape[-1], x.dtype)
