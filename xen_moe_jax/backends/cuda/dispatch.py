"""Dispatch and redispatch as FFI calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _active, _mesh, _shapes
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.cuda import devices, module
from xen_moe_jax.backends.cuda import schedule as schedules
from xen_moe_jax.backends.cuda.call import active_operand, attributes, ffi_call

STAND_INS = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}


def _copied(x: jax.Array) -> tuple[jax.Array, Any]:
    """Returns an array of a dtype that the kernels copy, and the dtype to cast the results back to (None: no cast)."""
    if x.dtype.name in module.compiled().dtypes:
        return x, None
    if x.dtype.itemsize not in STAND_INS or x.dtype == jnp.bool_:
        raise ValueError(f"the CUDA backend moves rows of 1, 2 or 4 bytes an element, not {x.dtype}: cast x first")
    return lax.bitcast_convert_type(x, STAND_INS[x.dtype.itemsize]), x.dtype


def dispatch(
    call: Call,
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    active: jax.Array,
    *,
    start: bool = False,
) -> tuple[jax.Array, ...]:
    """Dispatches `x [T, H]` along `topk_idx [T, K]`.

    Returns the results of `xen_moe_dispatch` with the shapes and in the order of docs/design/internals.md. With `start`
    they are pending: the done half (`start_done.py`) makes them usable.

    Raises:
      ValueError: the elements of `x` are bools, or have another size than 1, 2 or 4 bytes.
    """
    spec, config, wire = call.spec, call.config, call.wire
    mesh = _mesh.lowering_mesh()
    scaled = x.dtype.itemsize == 1
    x, original = _copied(x)
    hidden = x.shape[1]
    low_latency = schedules.use_low_latency(spec, hidden, x.dtype, config, wire=wire)
    config = schedules.for_async(config, low_latency=low_latency) if start else config
    schedule = schedules.dispatch(spec, hidden, config, devices.num_sms(mesh), wire=wire, low_latency=low_latency)
    if start:
        schedule = dataclasses.replace(schedule, bulk=schedules.bulk(spec, config, wire, low_latency=low_latency))
    attrs = attributes(
        spec, hidden, x.dtype, schedule, config, wire=wire, scaled=scaled, masked=_active.given(active), flight=start
    )
    operands = (x, scales, topk_idx, topk_weights, active_operand(active))
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _shapes.dispatch(x, scales, spec=spec)]
    out = ffi_call("xen_moe_dispatch", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    if original is not None:
        out[0] = lax.bitcast_convert_type(out[0], original)
    return tuple(out)


def redispatch(
    call: Call,
    x: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """Sends new rows `x [T, H]` along the routing of a dispatch, whose results `positions` and `recv_counts` are.

    Returns rows of the dtype of `x`, shaped as those of the dispatch (`Spec.rows_shape`).

    Raises:
      ValueError: the elements of `x` are bools, or have another size than 1, 2 or 4 bytes.
    """
    spec, config, wire = call.spec, call.config, call.wire
    mesh = _mesh.lowering_mesh()
    x, original = _copied(x)
    hidden = x.shape[1]
    schedule = schedules.dispatch(spec, hidden, config, devices.num_sms(mesh), wire=wire)
    attrs = attributes(
        spec,
        hidden,
        x.dtype,
        schedule,
        config,
        wire=wire,
        known_positions=True,
        masked=_active.given(active),
    )
    results = [jax.ShapeDtypeStruct(spec.rows_shape(hidden), x.dtype)]
    operands = (x, topk_idx, positions, recv_counts, active_operand(active))
    (rows,) = ffi_call("xen_moe_redispatch", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    return rows if original is None else lax.bitcast_convert_type(rows, original)
