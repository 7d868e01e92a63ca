"""`jax.lax.ragged_dot`, with what JAX lacks for it: explicit axes, `vmap` of some of its operands, and the transpose of
its weights' gradient, which a reverse-mode derivative of that gradient needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from xen_moe_jax._jax_internals import RAGGED_DOT
from xen_moe_jax._primitive import in_turn


def ragged_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, **options: Any) -> jax.Array:
    """`jax.lax.ragged_dot`. JAX has none for explicit axes of a mesh: over these XLA divides the work, and the result
    is whole on every device."""
    multiply: Callable[..., jax.Array] = functools.partial(jax.lax.ragged_dot, **options)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
        multiply = jax.sharding.auto_axes(multiply, axes=explicit, out_sharding=jax.P(None, None))
    return multiply(rows, weights, group_sizes)


_mapped_in_front = batching.fancy_primitive_batchers[RAGGED_DOT]
_transposed_product = ad.primitive_transposes[RAGGED_DOT]


def _vmap_of_ragged_dot(axis_data: Any, operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    """Batching rule of a ragged dot. JAX has one only where every operand is mapped along its first axis, and refuses
    the other cases, such as tokens mapped alone, or the cotangents of one call. In these the calls run in turn."""
    if all(dim == 0 for dim in dims):
        return _mapped_in_front(axis_data, operands, dims, **params)
    if all(dim is None for dim in dims):
        return RAGGED_DOT.bind(*operands, **params), None
    (out,), (dim,) = in_turn(lambda *given: [RAGGED_DOT.bind(*given, **params)], operands, dims)
    return out, dim


def _transpose_of_ragged_dot(ct: Any, x: Any, y: Any, group_sizes: Any, **params: Any) -> tuple[Any, Any, None]:
    """Transposition rule of a ragged dot. JAX has one for the product of rows and weights alone. This one is for the
    gradient of its weights, too: `out[g] = x[rows of g].T @ y[rows of g]`, with both operands `[C, ...]`. Others are
    left to JAX, which says what is missing."""
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batched = numbers.dot_dimension_numbers
    rows_by_rows = all(tuple(axes) == (0,) for axes in (numbers.lhs_ragged_dimensions, *contracted))
    if not rows_by_rows or any(batched) or ct.ndim != 3:
        return _transposed_product(ct, x, y, group_sizes, **params)
    other, weights, operand = (y, jnp.swapaxes(ct, 1, 2), x) if ad.is_undefined_primal(x) else (x, ct, y)
    out = jax.lax.ragged_dot(other, weights.astype(other.dtype), group_sizes, precision=params["precision"])
    out = out.astype(operand.aval.dtype)
    return (out, None, None) if operand is x else (None, out, None)


batching.fancy_primitive_batchers[RAGGED_DOT] = _vmap_of_ragged_dot
ad.primitive_transposes[RAGGED_DOT] = _transpose_of_ragged_dot
