"""Start and done halves as primitives of their own, on TPU. Elsewhere a start is the whole operation (`_api`).

XLA sees two custom calls that share semaphores; between them it may schedule whatever does not depend on the rows.
Gradients belong to the done half: its `custom_vjp` takes the float operands of the start along, unread, so that
cotangents reach them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _gradients, _primitives
from xen_moe_jax._spec import Spec
from xen_moe_jax._types import _pytree

SEMAPHORES = (2, 3)
"""Results of a start, and operands of a done, that are semaphores."""


def available(static: _gradients.Static) -> bool:
    """Whether the halves of this operation are kernels of their own: TPU, one axis, something to send."""
    config, spec = static.config, static.spec
    if config.interpret or config.backend not in (None, "pallas") or len(spec.axis_name) != 1:
        return False
    if spec.capacity == 0 or spec.num_tokens == 0:
        return False
    if config.backend == "pallas":
        return True
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() == "tpu" or str(getattr(device, "device_kind", "")).startswith("TPU")


def _backend() -> tuple[Any, Any]:
    names = ("halves", "plan")
    halves, plan = (importlib.import_module(f"xen_moe_jax._pallas_backend.{name}") for name in names)
    return halves, plan


# -- primitives -------------------------------------------------------------------------------------------------------


def _dispatch_start_shapes(*operands: Any, spec: Spec, wire: Any, config: Any) -> list[Any]:
    halves, plan = _backend()
    x, scaled = operands[0], len(operands) == 4
    record = halves.record_of(x.shape[1], x.dtype, scaled, wire)
    flight = halves.in_flight_shapes(
        record, plan.combine_staging_rows(spec), plan.dispatch_staging_rows(spec), spec.num_ranks
    )
    whole = _primitives.dispatch_shapes(*operands, spec=spec, wire=wire, config=config)
    return [*flight, ((spec.num_ranks, spec.num_tokens), jnp.int32), *whole[2 if scaled else 1 :]]


def _dispatch_done_shapes(*_: Any, spec: Spec, hidden: int, dtype: Any, scaled: bool, **__: Any) -> list[Any]:
    rows = [(spec.rows_shape(hidden), dtype)]
    return rows if not scaled else [*rows, (spec.rows_shape(_primitives.scale_blocks(hidden)), jnp.float32)]


def _combine_start_shapes(y: Any, *_: Any, spec: Spec, weighted: bool, wire: Any, config: Any) -> list[Any]:
    halves, plan = _backend()
    record = halves.record_of(y.shape[-1], y.dtype, False, wire)
    flight = halves.in_flight_shapes(
        record, spec.num_ranks * spec.num_tokens, plan.combine_staging_rows(spec), spec.num_ranks
    )
    return [*flight, ((spec.num_tokens, min(spec.num_ranks, spec.top_k)), jnp.int32), ((1,), jnp.int32)]


def _combine_done_shapes(*_: Any, spec: Spec, hidden: int, dtype: Any, **__: Any) -> list[Any]:
    return [((spec.num_tokens, hidden), dtype)]


dispatch_start_p = _primitives._primitive("dispatch_start", _dispatch_start_shapes)
dispatch_done_p = _primitives._primitive("dispatch_done", _dispatch_done_shapes, SEMAPHORES)
combine_start_p = _primitives._primitive("combine_start", _combine_start_shapes)
combine_done_p = _primitives._primitive("combine_done", _combine_done_shapes, SEMAPHORES)


# -- dispatch ---------------------------------------------------------------------------------------------------------


@_pytree(static=("static", "scaled"))
class DispatchInFlight:
    """Rows under way, the metadata that is known already, and the operands that gradients go to."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    results: Any
    static: _gradients.Static
    scaled: bool


def start_dispatch(static: _gradients.Static, x, scales, topk_idx, topk_weights) -> DispatchInFlight:
    operands = [x, topk_idx, topk_weights] if scales is None else [x, scales, topk_idx, topk_weights]
    operands = [jax.lax.stop_gradient(a) for a in operands]
    results = dispatch_start_p.bind(*operands, spec=static.spec, wire=static.wire, config=static.config)
    return DispatchInFlight(x, topk_idx, topk_weights, tuple(results), static, scales is not None)


def finish_dispatch(flight: DispatchInFlight) -> _gradients.Dispatched:
    return _finish_dispatch(
        flight.static, flight.scaled, flight.x, flight.topk_idx, flight.topk_weights, flight.results
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _finish_dispatch(static: _gradients.Static, scaled: bool, x, topk_idx, topk_weights, results):
    spec = static.spec
    rows, *scales = dispatch_done_p.bind(
        *results[:9],
        spec=spec,
        wire=static.wire,
        config=static.config,
        hidden=x.shape[1],
        dtype=jnp.dtype(x.dtype).name,
        scaled=scaled,
    )
    positions, recv_counts, weights, *local_idx = results[7:]
    return _gradients.Dispatched(
        rows, scales[0] if scaled else None, positions, recv_counts, weights, local_idx[0] if local_idx else None
    )


def _finish_dispatch_forward(static, scaled, x, topk_idx, topk_weights, results):
    out = _finish_dispatch(static, scaled, x, topk_idx, topk_weights, results)
    return out, (topk_idx, out.positions, out.recv_counts, out.weights)


def _finish_dispatch_backward(static, scaled, residuals, cotangent):
    dx, _, _, dweights = _gradients._dispatch_backward(static, residuals, cotangent)
    return dx, None, dweights, None


_finish_dispatch.defvjp(_finish_dispatch_forward, _finish_dispatch_backward)


# -- combine ----------------------------------------------------------------------------------------------------------


@_pytree(static=("static",))
class CombineInFlight:
    """Partial sums under way, and the operands that gradients go to."""

    y: Any
    topk_idx: Any
    positions: Any
    recv_counts: Any
    weights: Any
    results: Any
    static: _gradients.Static


def start_combine(static: _gradients.Static, *operands: jax.Array) -> CombineInFlight:
    results = combine_start_p.bind(
        *(jax.lax.stop_gradient(a) for a in operands),
        spec=static.spec,
        weighted=static.weighted,
        wire=static.wire,
        config=static.config,
    )
    y, topk_idx, positions, recv_counts, weights = operands
    return CombineInFlight(y, topk_idx, positions, recv_counts, weights, tuple(results), static)


def finish_combine(flight: CombineInFlight) -> jax.Array:
    fields = [getattr(flight, f.name) for f in dataclasses.fields(flight)]
    return _finish_combine(flight.static, *fields[:-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish_combine(static: _gradients.Static, y, topk_idx, positions, recv_counts, weights, results):
    (out,) = combine_done_p.bind(
        *results,
        spec=static.spec,
        wire=static.wire,
        config=static.config,
        hidden=y.shape[-1],
        dtype=jnp.dtype(y.dtype).name,
    )
    return out


def _finish_combine_forward(static, y, topk_idx, positions, recv_counts, weights, results):
    out = _finish_combine(static, y, topk_idx, positions, recv_counts, weights, results)
    return out, (y if static.weighted else None, topk_idx, positions, recv_counts, weights)


def _finish_combine_backward(static, residuals, cotangent):
    return (*_gradients._combine_backward(static, residuals, cotangent), None)


_finish_combine.defvjp(_finish_combine_forward, _finish_combine_backward)
