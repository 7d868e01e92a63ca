"""Single operations in place of functions of `jnp` that are several operations and a call: they keep every compiled
program small.

`jnp.where`, `x[index]` and `//` promote, broadcast, wrap negative numbers and round towards minus infinity. The routing
arithmetic needs none of that, and would pay for it whenever a program is traced and compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def where(mask: jax.Array, x: jax.Array, otherwise: jax.Array | float) -> jax.Array:
    """`x` where `mask` holds, else `otherwise` (an array like `x`, or one value). `mask` has the first dimensions of
    `x`, or all of them."""
    if mask.ndim < x.ndim:
        mask = lax.broadcast_in_dim(mask, x.shape, range(mask.ndim))
    other = otherwise if isinstance(otherwise, jax.Array) and otherwise.ndim else lax.full_like(x, otherwise)
    return lax.select(mask, x, other)


def divide(x: jax.Array, divisor: int) -> jax.Array:
    """`x // divisor` for integers `x >= 0`; negative ones are rounded towards zero."""
    return lax.div(x, jnp.array(divisor, x.dtype)) if divisor != 1 else x


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]` along the first dimension, for an `index` of any shape whose entries are all in `[0, x.shape[0])`."""
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + x.ndim - 1)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, lax.expand_dims(index, (index.ndim,)), dimensions, (1, *x.shape[1:]), mode=mode)


def _at(x: jax.Array) -> lax.ScatterDimensionNumbers:
    return lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )


def put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values[i]` in row `index[i]`; `index [N]` names no row twice, and rows past the end are dropped."""
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, lax.expand_dims(index, (1,)), values, _at(x), unique_indices=True, mode=mode)


def count(bins: jax.Array, num_bins: int) -> jax.Array:
    """int32 `[num_bins]`: how many entries of `bins [N]`, all in `[0, num_bins)`, name each bin."""
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    ones = lax.full(bins.shape, 1, jnp.int32)
    none = lax.full((num_bins,), 0, jnp.int32)
    return lax.scatter_add(none, lax.expand_dims(bins, (1,)), ones, _at(none), mode=mode)


def stable_order(keys: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The sorted keys, and `jnp.argsort(keys, axis, stable=True)` as int32."""
    axis %= keys.ndim
    places = lax.broadcasted_iota(jnp.int32, keys.shape, axis)
    ordered, order = lax.sort((keys, places), dimension=axis, num_keys=1)
    return ordered, order
