"""`all_gather_matmul`: rows of all ranks times this rank's weights, multiplied while they travel."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from xen_moe_jax import _mesh, _shapes, _validate, backends
from xen_moe_jax._collective_primitives import all_gather_p
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._primitive import declare


@jax.named_scope("xen_moe_all_gather_matmul")
def all_gather_matmul(x: jax.Array, w: jax.Array, axis_name: Any, *, config: KernelConfig | None = None) -> jax.Array:
    """`all_gather(x, axis_name, tiled=True) @ w`. Call it inside `jax.shard_map`.

    The CUDA backend multiplies large operands (with `KernelConfig.mode="throughput"`: all) rank by rank: this rank's
    rows while the other ranks' rows travel, and each other rank's rows when they have arrived. The gradient of `x` is a
    matmul whose result is reduced and scattered (`jax.lax.psum_scatter`); the gradient of `w` is a matmul of the rows,
    which are gathered again.

    Args:
      x: `[T, ..., H]`, this rank's rows; `T` is the same on every rank.
      w: `[H, N]`, this rank's weights. Operands of two dtypes are promoted to one dtype.
      axis_name: mesh axis, or axes, whose ranks' rows are gathered, in the order of the ranks.
      config: tuning; never changes the meaning.

    Returns:
      `[R * T, ..., N]` of the promoted dtype. It has the bits of the composition where a matmul adds up the products of
      a row in the same order for any number of rows, as cuBLAS does for large operands.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    caller = "all_gather_matmul"
    config = _validate.config(config, caller)
    x, w = _validate.array(x, caller, "x"), _validate.array(w, caller, "w")
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{caller}: x has shape {x.shape} and w {w.shape}: must be [T, ..., H] and [H, N] with the same H"
        )
    try:
        dtype = jnp.promote_types(x.dtype, w.dtype)
    except ValueError:
        raise TypeError(f"{caller}: x is {x.dtype} and w {w.dtype}: no dtype has both; cast one of them") from None
    for name, operand in (("x", x), ("w", w)):
        _validate.known_shape(operand, caller, name)
    x, w = x.astype(dtype), w.astype(dtype)
    if _mesh.vmapped(axis_name):
        return jnp.matmul(lax.all_gather(x, axis_name, tiled=True), w)
    names, sizes = _validate.axes(axis_name, caller, most=8)
    config = backends.with_nodes(sizes, config)
    x, w = _mesh.vary_over([x, w], names)
    if x.size == 0 or w.size == 0:  # XLA refuses to gather along an empty dimension
        shape = (math.prod(sizes) * x.shape[0], *x.shape[1:-1], w.shape[1])
        return _mesh.vary(jnp.zeros(shape, dtype), varying_axes(x))
    rows = x.reshape(-1, x.shape[-1])
    (out,) = all_gather_matmul_p.bind(rows, w, axis_name=names, axis_sizes=sizes, axis_index_groups=None, config=config)
    return out.reshape(-1, *x.shape[1:-1], w.shape[1])


def _gathered(x: jax.Array, **params: Any) -> jax.Array:
    """`x [T, H]` of every rank -> `[R * T, H]`."""
    (rows,) = all_gather_p.bind(x, concat_axis=0, tiled=True, wire=None, **params)
    return rows


def composed(x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
    """The operation as an all_gather and a matmul, for backends without it: `x [T, H]`, `w [H, N]` -> `[R * T, N]`."""
    return jnp.matmul(_gathered(x, **params), w)


all_gather_matmul_p = declare("all_gather_matmul", _shapes.all_gather_matmul, otherwise=composed, multiplies=True)
"""`x [T, H]`, `w [H, N]` -> `[R * T, N]`."""


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, w), (x_dot, w_dot) = primals, tangents
    bind = functools.partial(all_gather_matmul_p.bind, **params)
    out = bind(x, w)
    terms = [bind(x_dot, w)[0]] if type(x_dot) is not ad.Zero else []
    terms += [bind(x, w_dot)[0]] if type(w_dot) is not ad.Zero else []
    if not terms:
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    return out, [sum(terms[1:], terms[0])]


def _transpose(cotangents: Any, x: Any, w: Any, *, precision: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    multiply = functools.partial(lax.dot_general, precision=precision, preferred_element_type=cotangent.dtype)
    moved = [ad.is_undefined_primal(x), ad.is_undefined_primal(w)]
    if type(cotangent) is ad.Zero:
        return [ad.Zero(a.aval) if is_moved else None for a, is_moved in zip((x, w), moved, strict=True)]
    if moved[0]:
        product = multiply(cotangent, w, (((1,), (1,)), ((), ())))
        return [lax.psum_scatter(product, params["axis_name"], scatter_dimension=0, tiled=True), None]
    rows = _gathered(x, **params)
    return [None, multiply(cotangent, rows, (((0,), (0,)), ((), ()))).T]


ad.primitive_jvps[all_gather_matmul_p] = _jvp
ad.primitive_transposes[all_gather_matmul_p] = _transpose
