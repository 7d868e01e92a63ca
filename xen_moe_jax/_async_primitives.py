"""Start and done of dispatch and combine as primitives, with their derivatives.

A done takes the operands of its start again, and the pending arrays that the start returned. With
`Backend.start_returns_results` the pending arrays are the results themselves, which only the done reads. Their
cotangents are then asynchronous operations in the other direction: the transpose of `dispatch_done` starts a combine,
and the transpose of `dispatch_start` finishes it. So work between start and done in the forward pass has its transpose
between start and done in the backward pass.

    dispatch_start -> work -> dispatch_done         combine_done <- work's transpose <- combine_start

On other backends the derivatives belong to the done, and are synchronous operations.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from xen_moe_jax import _active, _mesh, _shapes, backends
from xen_moe_jax import _moe_primitives as whole
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._moe_primitives import Dispatched
from xen_moe_jax._primitive import declare, declare_composite, in_turn
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Backend, Call


def _backend(spec: Spec, config: KernelConfig) -> Backend | None:
    return backends.for_async(_mesh.platform(), spec, config)


def runs_async(spec: Spec, config: KernelConfig) -> bool:
    """Returns True if start and done of an operation traced here are two programs. Empty operations are one."""
    return spec.capacity > 0 and _backend(spec, config) is not None


def received_by_xla(spec: Spec, config: KernelConfig) -> tuple[int, ...]:
    """Returns the places of pending arrays that a collective of XLA receives (`Backend.received_by_xla`)."""
    backend = _backend(spec, config)
    return () if backend is None else backend.received_by_xla(spec)


def _start_returns_results(params: dict[str, Any]) -> bool:
    backend = _backend(params["spec"], params["config"])
    return backend is not None and backend.start_returns_results


# -- implementations ---------------------------------------------------------------------------------------------------


def _hold_shapes(spec: Spec) -> list[ShapeDtype]:
    """Shapes of two dummy float32 results ("held arrays").

    Their cotangents carry, as raw bits, the positions and counts that the backward combine reads, which keeps those
    buffers alive.
    """
    return [
        ((spec.num_ranks, spec.num_tokens, spec.slots), jnp.float32),
        ((spec.num_ranks, spec.local_experts), jnp.float32),
    ]


def _dispatch_start_shapes(x: Any, scales: Any, *_: Any, spec: Spec, wire: Any, config: Any, **__: Any) -> Any:
    backend = _backend(spec, config)
    assert backend is not None
    if backend.dispatch_pending is None:
        return [*_shapes.dispatch(x, scales, spec=spec), *_hold_shapes(spec), (x.shape, x.dtype)]
    return backend.dispatch_pending(Call(spec, config, wire), x, scales)


def _combine_start_shapes(y: Any, *_: Any, spec: Spec, wire: Any, config: Any, **params: Any) -> Any:
    backend = _backend(spec, config)
    assert backend is not None
    if backend.combine_pending is None:
        return [((spec.num_tokens, y.shape[-1]), y.dtype), (y.shape, y.dtype)]
    return backend.combine_pending(Call(spec, config, wire), y)


def _mask_done(operands: Any, spec: Spec) -> list[Any]:
    return [*_active.mask_dispatch(operands[:5], spec), *operands[5:]]


def _mask_combine(operands: Any, spec: Spec) -> list[Any]:
    """Masks the operands of a combine. In a backward pass, positions and counts come as the bits of float32."""
    y, *handle = operands
    return _active.mask_handle([y, *_integers(handle)], spec)


def _integers(handle: Any) -> list[Any]:
    """Returns `topk_idx, positions, recv_counts, ...` with positions and counts as integers again."""
    bits = (1, 2)
    return [
        lax.bitcast_convert_type(a, jnp.int32) if i in bits and a.dtype != jnp.int32 else a
        for i, a in enumerate(handle)
    ]


dispatch_start_p = declare("dispatch_start", _dispatch_start_shapes, mask=_active.mask_dispatch)
"""Operands of a dispatch -> pending arrays. With `start_returns_results`: the results, two held arrays, and `x`."""
dispatch_done_p = declare("dispatch_done", _shapes.dispatch, mask=_mask_done)
"""Operands of the start, then the pending arrays -> results of a dispatch."""
combine_start_p = declare("combine_start", _combine_start_shapes, mask=_mask_combine)
"""Operands of a combine -> pending arrays. With `start_returns_results`: `out` and `y`."""
combine_done_p = declare("combine_done", _shapes.combine, mask=_mask_combine)
redispatch_start_p = declare("redispatch_start", _shapes.redispatch, mask=_active.mask_handle)
"""Only with `start_returns_results`, in the backward pass of an asynchronous combine."""
redispatch_done_p = declare("redispatch_done", _shapes.redispatch, mask=_active.mask_handle)


# -- order: XLA goes by data alone -------------------------------------------------------------------------------------

order_p = Primitive("xen_moe_order")
"""Returns its operands, of which the first `num_pending` are pending. An operation that uses a result runs after all
operations that make an operand. It is an optimization barrier that vanishes if no operation uses a pending result, as
in the part of a program that remat computes again: an operation that is never finished must not start."""
order_p.multiple_results = True
order_p.def_impl(lambda *a, num_pending: lax.optimization_barrier_p.bind(*a))
order_p.def_abstract_eval(lambda *avals, num_pending: list(avals))
mlir.register_lowering(
    order_p, mlir.lower_fun(lambda *a, num_pending: list(lax.optimization_barrier(list(a))), multiple_results=True)
)


def _order_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    eqn = live_and_eqn[-1]  # JAX 0.12 says before it which operands live on: that is for references, and there are none
    count = eqn.params["num_pending"]
    if not any(used):
        return [False] * len(used), None
    flies = any(used[:count])
    kept = [flies if i < count else u for i, u in enumerate(used)]
    keep = lambda items: [item for item, k in zip(items, kept, strict=True) if k]  # noqa: E731
    params = {"num_pending": count if flies else 0}
    return kept, eqn.replace(invars=keep(eqn.invars), outvars=keep(eqn.outvars), params=params)


def _order_nonzero(values: Any, count: int) -> list[Any]:
    """Orders those of `values` that are not symbolic zeros."""
    moving = [i for i, value in enumerate(values) if type(value) is not ad.Zero]
    if not moving:
        return list(values)
    results = order_p.bind(*(values[i] for i in moving), num_pending=sum(i < count for i in moving))
    out = list(values)
    for i, result in zip(moving, results, strict=True):
        out[i] = result
    return out


def _order_jvp(primals: Any, tangents: Any, *, num_pending: int) -> Any:
    return order_p.bind(*primals, num_pending=num_pending), _order_nonzero(tangents, num_pending)


pe.dce_rules[order_p] = _order_dce
ad.primitive_jvps[order_p] = _order_jvp
ad.primitive_transposes[order_p] = lambda cotangents, *_, num_pending: _order_nonzero(cotangents, num_pending)


def is_array(leaf: Any) -> bool:
    """Returns True for a leaf with data to wait for; a Python number is a constant of the program."""
    return isinstance(leaf, jax.Array | np.ndarray)


def order(pending: Any, others: Any) -> tuple[Any, Any]:
    """Returns both pytrees; operations that use a leaf of a result run after those that make the leaves of both."""
    leaves, tree = jax.tree.flatten((pending, others))
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    ordered = order_p.bind(*(leaves[i] for i in arrays), num_pending=len(jax.tree.leaves(pending)))
    for i, leaf in zip(arrays, ordered, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


# -- derivatives -------------------------------------------------------------------------------------------------------
# The linear primitives below never run asynchronously: forward mode computes the whole operation in one of them. They
# exist for their transposes, which are the starts and dones of the backward pass.


def _zeros(shapes: list[ShapeDtype]) -> list[Any]:
    return [jnp.zeros(shape, dtype) for shape, dtype in shapes]


def _linear(primitive: Primitive, count: int) -> None:
    """Declares `primitive` linear in its first `count` operands together, without a derivative in the remaining
    operands."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        moving = [ad.instantiate_zeros(t) for t in tangents[:count]]
        return primitive.bind(*primals, **params), primitive.bind(*moving, *primals[count:], **params)

    ad.primitive_jvps[primitive] = jvp


def _cotangents(operands: Any, values: list[Any]) -> list[Any]:
    """Returns cotangents of the first operands: `values`, and a zero for a linear operand without one."""
    given = [*values, *[None] * (len(operands) - len(values))]
    pairs = zip(operands, given, strict=True)
    return [(ad.Zero(o.aval) if v is None else v) if ad.is_undefined_primal(o) else None for o, v in pairs]


def _no_weights(params: dict[str, Any]) -> Any:
    return jnp.zeros(params["spec"].weights_shape, jnp.float32)


def _of_combine(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "wire": params["gradient_wire"], "weighted": False}


# A dispatch. The tangent of x travels in the place of x; the tangents of pending rows and held arrays are zeros.


def _dispatch_link_start_shapes(x: Any, *_: Any, spec: Spec, **__: Any) -> list[ShapeDtype]:
    return [(spec.rows_shape(x.shape[1]), x.dtype), *_hold_shapes(spec), (x.shape, x.dtype)]


def _dispatch_link_start(x: Any, *_: Any, **params: Any) -> tuple[Any, ...]:
    return *_zeros(_dispatch_link_start_shapes(x, **params)[:3]), x


def _dispatch_link_done(rows: Any, held: Any, counts: Any, *moved: Any, **params: Any) -> Any:
    del rows, held, counts
    return _redispatch_link(*moved, **params)[0]


def _redispatch_link(x: Any, *handle: Any, **params: Any) -> Any:
    return whole.redispatch_p.bind(x, *handle, **_link_params(params))


def _dispatch_link_done_shapes(rows: Any, *_: Any, **__: Any) -> list[ShapeDtype]:
    return [(rows.shape, rows.dtype)]


dispatch_link_start_p = declare_composite("dispatch_link_start", _dispatch_link_start_shapes, _dispatch_link_start)
"""`x, topk_idx, active` -> `rows, positions, counts, x`."""
dispatch_link_done_p = declare_composite("dispatch_link_done", _dispatch_link_done_shapes, _dispatch_link_done)
"""`rows, positions, counts, x, topk_idx, positions, recv_counts, active` -> `rows`."""


def _dispatch_link_done_transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    (rows,) = cotangents
    if type(rows) is ad.Zero or not ad.is_undefined_primal(operands[3]):
        return _cotangents(operands, [])
    topk_idx, positions, recv_counts, active = operands[4:]
    held = lax.bitcast_convert_type(positions, jnp.float32)
    counts = lax.bitcast_convert_type(recv_counts, jnp.float32)
    out, rows = combine_start_p.bind(rows, topk_idx, held, counts, active, _no_weights(params), **_of_combine(params))
    return _cotangents(operands, [rows, held, counts, out])


def _dispatch_link_start_transpose(cotangents: Any, x: Any, topk_idx: Any, active: Any, **params: Any) -> list[Any]:
    rows, held, counts, out = cotangents
    if type(rows) is ad.Zero:  # the done started no combine: `vmap` made a whole operation of it
        return [out, None, None]
    handle = (topk_idx, held, counts, active, _no_weights(params))
    (x_ct,) = combine_done_p.bind(rows, *handle, out, rows, **_of_combine(params))
    return [x_ct, None, None]


_linear(dispatch_link_start_p, 1)
_linear(dispatch_link_done_p, 4)
ad.primitive_transposes[dispatch_link_start_p] = _dispatch_link_start_transpose
ad.primitive_transposes[dispatch_link_done_p] = _dispatch_link_done_transpose


def _dispatch_start_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    x, _, topk_idx, _, active = primals
    results = dispatch_start_p.bind(*primals, **params)
    dots = [whole.zero(a) for a in results]
    if _start_returns_results(params) and type(tangents[0]) is not ad.Zero:
        whole.check_carries_gradient(x)
        dots[0], dots[-3], dots[-2], dots[-1] = dispatch_link_start_p.bind(
            tangents[0], topk_idx, active, **_link_params(params)
        )
    return results, dots


def _link_params(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "wire": params["gradient_wire"]}


def _dispatch_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    active = primals[4]
    out = Dispatched(*dispatch_done_p.bind(*primals, **params)).named()
    handle = (out.topk_idx, out.positions, out.recv_counts, active)
    if not _start_returns_results(params):
        rows_dot = whole.rows_tangent(out.rows, tangents[0], tangents[1], handle, params)
    elif type(tangents[-1]) is ad.Zero:
        rows_dot = whole.zero(out.rows)
    else:
        first = len(primals) - len(_dispatch_start_shapes(*primals, **params))
        link = [ad.instantiate_zeros(tangents[i]) for i in (first, -3, -2, -1)]
        (rows_dot,) = dispatch_link_done_p.bind(*link, *handle, **_link_params(params))
    results = [a for a in out if a is not None]
    dots = [whole.zero(a) for a in results]
    dots[0] = rows_dot
    dots[4] = whole.weights_tangent(results[2:], tangents[3], active, params)
    return results, dots


ad.primitive_jvps[dispatch_start_p] = _dispatch_start_jvp
ad.primitive_jvps[dispatch_done_p] = _dispatch_done_jvp


# A combine. The tangent of the pending out is the whole tangent; that of y is zero.


def _combine_link_start_shapes(y: Any, *_: Any, spec: Spec, **__: Any) -> list[ShapeDtype]:
    return [((spec.num_tokens, y.shape[-1]), y.dtype), (y.shape, y.dtype)]


def _combine_link_start(y_dot: Any, weights_dot: Any, y: Any, weights: Any, *handle: Any, **params: Any) -> Any:
    out = whole.combine_p.bind(y_dot, *handle, weights, **params)[0]
    if params["weighted"]:
        out = out + whole.combine_p.bind(y, *handle, weights_dot, **params)[0]
    return out, jnp.zeros_like(y_dot)


combine_link_start_p = declare_composite("combine_link_start", _combine_link_start_shapes, _combine_link_start)
"""`y_dot, weights_dot, y, weights, handle...` -> `out, y`."""
combine_link_done_p = declare_composite(
    "combine_link_done", lambda out, *_, **__: [(out.shape, out.dtype)], lambda out, *_, **__: out
)
"""`out, y, handle...` -> `out`."""


def _combine_link_done_transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    (out,) = cotangents
    y, *handle = operands[1:]
    if type(out) is ad.Zero or not ad.is_undefined_primal(y):
        return _cotangents(operands, [out])
    moved = {name: value for name, value in params.items() if name != "weighted"}
    (rows,) = redispatch_start_p.bind(out, *handle, **moved)
    return _cotangents(operands, [out, rows])


def _combine_link_start_transpose(
    cotangents: Any, y_dot: Any, weights_dot: Any, y: Any, weights: Any, *handle: Any, **params: Any
) -> list[Any]:
    out, rows = cotangents
    wanted = ad.is_undefined_primal(y_dot), ad.is_undefined_primal(weights_dot)
    rest = [None] * (2 + len(handle))
    if type(out) is ad.Zero:
        return [whole.zero_if(wanted[0], y_dot), whole.zero_if(wanted[1], weights_dot), *rest]
    if type(rows) is ad.Zero:
        return [*whole.combine_cotangents(out, y, weights, wanted, handle, params), *rest]
    moved = {name: value for name, value in params.items() if name != "weighted"}
    (rows,) = redispatch_done_p.bind(out, *handle, rows, **moved)
    return [*whole.row_cotangents(rows, y, weights, wanted, handle, params), *rest]


def _combine_link_start_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y_dot, weights_dot, y, weights, *handle = primals
    out, link = combine_link_start_p.bind(*primals, **params)
    parts = (
        whole.combine_tangent(tangents[0], tangents[1], y, weights, handle, params),
        whole.combine_tangent(tangents[2], tangents[3], y_dot, weights_dot, handle, params),
    )
    moving = [part for part in parts if part is not None]
    return [out, link], [sum(moving[1:], moving[0]) if moving else whole.zero(out), whole.zero(link)]


def _combine_link_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = combine_link_done_p.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero and type(tangents[1]) is ad.Zero:
        return out, [whole.zero(out[0])]
    moving = [ad.instantiate_zeros(t) for t in tangents[:2]]
    return out, combine_link_done_p.bind(*moving, *primals[2:], **params)


ad.primitive_jvps[combine_link_start_p] = _combine_link_start_jvp
ad.primitive_jvps[combine_link_done_p] = _combine_link_done_jvp
ad.primitive_transposes[combine_link_start_p] = _combine_link_start_transpose
ad.primitive_transposes[combine_link_done_p] = _combine_link_done_transpose


def _combine_start_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y, *handle, weights = primals
    results = combine_start_p.bind(*primals, **params)
    dots = [whole.zero(a) for a in results]
    given = tangents[0], tangents[-1] if params["weighted"] else ad.Zero(weights.to_tangent_aval())
    if _start_returns_results(params) and not whole.are_zero(*given):
        moving = [ad.instantiate_zeros(t) for t in given]
        dots = combine_link_start_p.bind(*moving, y, weights, *_integers(handle), **_link_params(params))
    return results, dots


def _combine_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    count = len(primals) - len(_combine_start_shapes(*primals, **params))
    y, *handle, weights = primals[:count]
    out = combine_done_p.bind(*primals, **params)
    if not _start_returns_results(params):
        out_dot = whole.combine_tangent(tangents[0], tangents[count - 1], y, weights, handle, params)
        return out, [whole.zero(out[0]) if out_dot is None else out_dot]
    if whole.are_zero(*tangents[count:]):
        return out, [whole.zero(out[0])]
    link = [ad.instantiate_zeros(t) for t in tangents[count:]]
    return out, combine_link_done_p.bind(*link, *_integers(handle), **_link_params(params))


ad.primitive_jvps[combine_start_p] = _combine_start_jvp
ad.primitive_jvps[combine_done_p] = _combine_done_jvp


# A redispatch: only in a backward pass. Its own derivatives belong to the done.


def _redispatch_start_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    results = redispatch_start_p.bind(*primals, **params)
    return results, [whole.zero(a) for a in results]


def _redispatch_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (rows,) = redispatch_done_p.bind(*primals, **params)
    return [rows], [whole.rows_tangent(rows, tangents[0], tangents[0], primals[1:-1], params)]


ad.primitive_jvps[redispatch_start_p] = _redispatch_start_jvp
ad.primitive_jvps[redispatch_done_p] = _redispatch_done_jvp


# -- vmap --------------------------------------------------------------------------------------------------------------
# The operations of all entries of a batch would be pending at once, in the same buffers. So under vmap a start does
# nothing, and its done runs the whole operation for one entry after the other: the same bits, without overlap.


def _entry(a: Any, dim: int | None) -> Any:
    return a if dim is None else jax.ShapeDtypeStruct((*a.shape[:dim], *a.shape[dim + 1 :]), a.dtype)


def _batch_start(shapes: Any) -> Any:
    """Batches a start: zeros, the same for every entry, stand for the pending arrays that `shapes` describes."""

    def rule(operands: Any, dims: Any, **params: Any) -> Any:
        entry = [_entry(a, dim) for a, dim in zip(operands, dims, strict=True)]
        zeros = _mesh.vary_alike(*_zeros(shapes(*entry, **params)), *operands)[: -len(operands)]
        return list(zeros), [None] * len(zeros)

    return rule


def _batch_done(operation: str, run: Any, first: int, last: int) -> Any:
    """Batches a done: `run(*operands[first:last], **params)` is the whole operation, and nothing is pending."""

    def rule(operands: Any, dims: Any, **params: Any) -> Any:
        if all(dim is None for dim in dims[first:last]):
            raise NotImplementedError(
                f"vmap of {operation}: its start is outside of the vmap, and what is pending inside: finish the flight "
                "before the vmap"
            )
        return in_turn(functools.partial(run, **params), operands[first:last], dims[first:last])

    return rule


def _combine(y: Any, *rest: Any, **params: Any) -> Any:
    return whole.combine_p.bind(y, *_integers(rest), **params)


def _combine_link(y_dot: Any, weights_dot: Any, y: Any, weights: Any, *handle: Any, **params: Any) -> list[Any]:
    return [whole.combine_tangent(y_dot, weights_dot, y, weights, handle, params)]


def _batch_combine_start(operands: Any, dims: Any, **params: Any) -> Any:
    zeros, unmapped = _batch_start(_combine_start_shapes)(operands, dims, **params)
    if not _start_returns_results(params):
        return zeros, unmapped
    return [zeros[0], operands[0]], [unmapped[0], dims[0]]  # `y` is passed on, and is what a backward pass sends


def _batch_dispatch_link_start(operands: Any, dims: Any, **params: Any) -> Any:
    zeros, unmapped = _batch_start(_dispatch_link_start_shapes)(operands, dims, **params)
    return [*zeros[:3], operands[0]], [*unmapped[:3], dims[0]]


def _batch_combine_link_start(operands: Any, dims: Any, **params: Any) -> Any:
    (_, link), unmapped = _batch_start(_combine_link_start_shapes)(operands, dims, **params)
    out, mapped = in_turn(functools.partial(_combine_link, **params), operands, dims)
    return [*out, link], [*mapped, *unmapped[1:]]


_batchers = {
    dispatch_start_p: _batch_start(_dispatch_start_shapes),
    dispatch_done_p: _batch_done("dispatch_done", whole.dispatch_p.bind, 0, 5),
    combine_start_p: _batch_combine_start,
    combine_done_p: _batch_done("combine_done", _combine, 0, 6),
    redispatch_start_p: _batch_start(_shapes.redispatch),
    redispatch_done_p: _batch_done("combine_done", whole.redispatch_p.bind, 0, 5),
    dispatch_link_start_p: _batch_dispatch_link_start,
    dispatch_link_done_p: _batch_done("dispatch_done", _redispatch_link, 3, 8),
    combine_link_start_p: _batch_combine_link_start,
    combine_link_done_p: lambda operands, dims, **params: (operands[:1], dims[:1]),
    order_p: lambda operands, dims, num_pending: (order_p.bind(*operands, num_pending=num_pending), dims),
}
for _primitive, _rule in _batchers.items():
    batching.primitive_batchers[_primitive] = _rule
