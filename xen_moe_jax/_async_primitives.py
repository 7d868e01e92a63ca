"""Start and done of dispatch and combine as primitives, with their derivatives.

A done takes the operands of its start again, and the pending arrays that the start returned. What these arrays are is
the backend's business: semaphores and receive buffers, or the buffers of the results (`Backend.dispatch_pending`).

Derivatives belong to the done, and are whole operations. A start has none: its operands reach the done as well.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from xen_moe_jax import _active, _mesh, _shapes, backends
from xen_moe_jax import _moe_primitives as whole
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._moe_primitives import Dispatched
from xen_moe_jax._primitive import batch_done, batch_start, declare
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


# -- implementations ---------------------------------------------------------------------------------------------------


def _dispatch_start_shapes(x: Any, scales: Any, *_: Any, spec: Spec, wire: Any, config: Any, **__: Any) -> Any:
    backend = _backend(spec, config)
    assert backend is not None
    backend.check_wire(wire)
    if backend.dispatch_pending is None:
        return _shapes.dispatch(x, scales, spec=spec)
    return backend.dispatch_pending(Call(spec, config, wire), x, scales)


def _combine_start_shapes(y: Any, *_: Any, spec: Spec, wire: Any, config: Any, **params: Any) -> Any:
    backend = _backend(spec, config)
    assert backend is not None
    backend.check_wire(wire)
    if backend.combine_pending is None:
        return _shapes.combine(y, spec=spec)
    return backend.combine_pending(Call(spec, config, wire), y)


def _mask_done(operands: Any, spec: Spec) -> list[Any]:
    return [*_active.mask_dispatch(operands[:5], spec), *operands[5:]]


dispatch_start_p = declare("dispatch_start", _dispatch_start_shapes, mask=_active.mask_dispatch)
"""Operands of a dispatch -> pending arrays."""
dispatch_done_p = declare("dispatch_done", _shapes.dispatch, mask=_mask_done)
"""Operands of the start, then the pending arrays -> results of a dispatch."""
combine_start_p = declare("combine_start", _combine_start_shapes, mask=_active.mask_handle)
"""Operands of a combine -> pending arrays."""
combine_done_p = declare("combine_done", _shapes.combine, mask=_active.mask_handle)
"""Operands of the start, then the pending arrays -> result of a combine."""


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


def _start_jvp(primitive: Primitive) -> Any:
    """The pending arrays have no tangents: the done gets those of the operands."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        results = primitive.bind(*primals, **params)
        return results, [whole.zero(a) for a in results]

    return rule


def _dispatch_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    active = primals[4]
    out = Dispatched(*dispatch_done_p.bind(*primals, **params)).named()
    handle = (out.topk_idx, out.positions, out.recv_counts, active)
    results = [a for a in out if a is not None]
    dots = [whole.zero(a) for a in results]
    dots[0] = whole.rows_tangent(out.rows, tangents[0], tangents[1], handle, params)
    dots[4] = whole.weights_tangent(results[2:], tangents[3], active, params)
    return results, dots


def _combine_done_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    count = len(primals) - len(_combine_start_shapes(*primals, **params))
    y, *handle, weights = primals[:count]
    out = combine_done_p.bind(*primals, **params)
    out_dot = whole.combine_tangent(tangents[0], tangents[count - 1], y, weights, handle, params)
    return out, [whole.zero(out[0]) if out_dot is None else out_dot]


for _start in (dispatch_start_p, combine_start_p):
    ad.primitive_jvps[_start] = _start_jvp(_start)
ad.primitive_jvps[dispatch_done_p] = _dispatch_done_jvp
ad.primitive_jvps[combine_done_p] = _combine_done_jvp


# -- vmap --------------------------------------------------------------------------------------------------------------
_batchers = {
    dispatch_start_p: batch_start(_dispatch_start_shapes),
    dispatch_done_p: batch_done("dispatch_done", whole.dispatch_p.bind, 5),
    combine_start_p: batch_start(_combine_start_shapes),
    combine_done_p: batch_done("combine_done", whole.combine_p.bind, 6),
    order_p: lambda operands, dims, num_pending: (order_p.bind(*operands, num_pending=num_pending), dims),
}
for _primitive, _rule in _batchers.items():
    batching.primitive_batchers[_primitive] = _rule
