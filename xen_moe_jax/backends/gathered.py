"""The local parts of an `all_gather` and an `all_to_all`: the bytes that travel, and the arrangement of the result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._quantize import Wire, from_wire, quantize_arrays


def parts_of(x: jax.Array, axis: int, count: int, tiled: bool) -> jax.Array:
    """Returns `[count, ...]`, the parts of `x` that an `all_to_all` sends to each rank: the entries of `axis`, or, if
    `tiled`, equal chunks along it."""
    if tiled:
        x = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def arranged(parts: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Brings `[R, ...]`, the parts of all ranks, into the form of `jax.lax`: stacked along a new `axis`, or, if
    `tiled`, concatenated along an old one."""
    parts = jnp.moveaxis(parts, 0, axis)
    if not tiled:
        return parts
    return parts.reshape(*parts.shape[:axis], parts.shape[axis] * parts.shape[axis + 1], *parts.shape[axis + 2 :])


def through_wire(gather: Callable[[jax.Array], jax.Array], x: jax.Array, wire: Wire) -> jax.Array:
    """Gathers `x` as values of the wire's dtype and their scales: `[R, *x.shape]` of `x.dtype`.

    `x` is quantized in blocks along its last dimension; values and scales travel as one array of bytes. `gather`
    returns the arrays of all ranks, uint8 `[R, N]` for `[N]`. This rank's own part is rounded as the other parts are.
    """
    payload = quantize_arrays(x, wire)
    as_bytes = [lax.bitcast_convert_type(array, jnp.uint8).reshape(-1) for array in payload]
    came = gather(jnp.concatenate(as_bytes))
    values, scales = jnp.split(came, [as_bytes[0].size], axis=1)

    def back(found: jax.Array, like: jax.Array) -> jax.Array:
        """Makes arrays like `like` of their bytes, `[R, N]`."""
        wide = found.reshape(-1, *like.shape, *([like.dtype.itemsize] if like.dtype.itemsize > 1 else []))
        return lax.bitcast_convert_type(wide, like.dtype)

    return from_wire((back(values, payload[0]), back(scales, payload[1])), wire, x.shape[-1], x.dtype)
