"""`all_to_all`, `ragged_all_to_all` and `all_gather` as primitives: jvp, transpose and vmap as `jax.lax` has them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from xen_moe_jax import _jax_internals, _mesh, _ragged_gradient, _shapes
from xen_moe_jax._primitive import declare, in_turn
from xen_moe_jax.backends import gathered
from xen_moe_jax.backends.base import Exchange

all_to_all_p = declare("all_to_all", _shapes.all_to_all)
ragged_all_to_all_p = declare("ragged_all_to_all", _shapes.ragged_all_to_all)


def _all_gather_by_xla(x: jax.Array, **params: Any) -> jax.Array:
    """The operation by `jax.lax.all_gather`, for backends without one of their own."""
    call = Exchange(**params)
    gather = functools.partial(lax.all_gather, axis_name=call.axis_name, axis_index_groups=call.groups)
    if call.wire is None:
        return gather(x, axis=call.concat_axis, tiled=call.tiled)
    return gathered.arranged(gathered.through_wire(gather, x, call.wire), call.concat_axis, call.tiled)


all_gather_p = declare("all_gather", _shapes.all_gather, otherwise=_all_gather_by_xla)
"""`concat_axis` is the argument `axis`. A wire is straight-through: tangents and cotangents are not quantized."""


def _all_gather_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = all_gather_p.bind(*primals, **params)
    (tangent,) = tangents
    if type(tangent) is ad.Zero:
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    return out, all_gather_p.bind(tangent, **params | {"wire": None})


def _all_gather_transpose(cotangents: Any, x: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    call = Exchange(**params)
    scatter = functools.partial(lax.psum_scatter, axis_name=call.axis_name, axis_index_groups=call.groups)
    return [scatter(cotangent, scatter_dimension=call.concat_axis, tiled=call.tiled)]


def _all_gather_batcher(operands: Any, dims: Any, *, concat_axis: int, **params: Any) -> Any:
    (x,), (dim,) = operands, dims
    x, params = jnp.moveaxis(x, dim, 0), params | {"concat_axis": concat_axis + 1}
    if x.shape[0]:
        return all_gather_p.bind(x, **params), [0]
    ((shape, dtype),) = _shapes.all_gather(x, **params)  # backends gather no empty arrays
    return [_mesh.vary(jnp.zeros(shape, dtype), _jax_internals.varying_axes(x))], [0]


ad.primitive_jvps[all_gather_p] = _all_gather_jvp
ad.primitive_transposes[all_gather_p] = _all_gather_transpose
batching.primitive_batchers[all_gather_p] = _all_gather_batcher


def _all_to_all_transpose(cotangents: Any, x: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    swapped = {**params, "split_axis": params["concat_axis"], "concat_axis": params["split_axis"]}
    return all_to_all_p.bind(cotangent, **swapped)


def _all_to_all_batcher(operands: Any, dims: Any, *, split_axis: int, concat_axis: int, **params: Any) -> Any:
    (x,), (dim,) = operands, dims
    x = jnp.moveaxis(x, dim, 0)
    return all_to_all_p.bind(x, split_axis=split_axis + 1, concat_axis=concat_axis + 1, **params), [0]


ad.deflinear2(all_to_all_p, _all_to_all_transpose)
batching.primitive_batchers[all_to_all_p] = _all_to_all_batcher


def _ragged_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = ragged_all_to_all_p.bind(*primals, **params)
    operand_dot, output_dot, *_ = tangents
    if type(operand_dot) is ad.Zero and type(output_dot) is ad.Zero:
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    moved = [ad.instantiate_zeros(operand_dot), ad.instantiate_zeros(output_dot), *primals[2:]]
    return out, ragged_all_to_all_p.bind(*moved, **params)


def _ragged_transpose(cotangents: Any, operand: Any, output: Any, *offsets: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        zeros = [ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in (operand, output)]
        return [*zeros, None, None, None, None]
    shape = operand.aval.shape if ad.is_undefined_primal(operand) else operand.shape
    bind = functools.partial(ragged_all_to_all_p.bind, **params)
    exchange = functools.partial(
        all_to_all_p.bind,
        split_axis=0,
        concat_axis=0,
        tiled=True,
        **{k: params[k] for k in ("axis_name", "axis_sizes", "axis_index_groups", "config")},
    )
    operand_ct, output_ct = _ragged_gradient.transpose(
        cotangent,
        shape,
        *offsets,
        ragged=lambda *a: bind(*a)[0],
        exchange=lambda a: exchange(a)[0],
        axis_name=params["axis_name"],
    )
    wanted = [ad.is_undefined_primal(operand), ad.is_undefined_primal(output)]
    return [operand_ct if wanted[0] else None, output_ct if wanted[1] else None, None, None, None, None]


def _ragged_batcher(operands: Any, dims: Any, **params: Any) -> Any:
    """Batches a ragged exchange: if all entries share their segments, the batch becomes a part of each row. Otherwise
    the entries are exchanged one after another."""
    bind = functools.partial(ragged_all_to_all_p.bind, **params)
    if all(dim is None for dim in dims[2:]):
        size = next(a.shape[dim] for a, dim in zip(operands[:2], dims[:2], strict=True) if dim is not None)
        rows = [
            jnp.moveaxis(a, dim, 1) if dim is not None else jnp.repeat(a[:, None], size, axis=1)
            for a, dim in zip(operands[:2], dims[:2], strict=True)
        ]
        if not size:  # backends exchange no empty rows
            return [_mesh.vary_alike(rows[1], *operands)[0]], [1]
        return bind(*rows, *operands[2:]), [1]
    return in_turn(bind, operands, dims)


batching.primitive_batchers[ragged_all_to_all_p] = _ragged_batcher
ad.primitive_jvps[ragged_all_to_all_p] = _ragged_jvp
ad.primitive_transposes[ragged_all_to_all_p] = _ragged_transpose
