"""Combine as an FFI call."""

from __future__ import annotations

import jax

from xen_moe_jax import _active, _mesh
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.cuda import devices
from xen_moe_jax.backends.cuda import schedule as schedules
from xen_moe_jax.backends.cuda.call import active_operand, attributes, ffi_call


def combine(
    call: Call,
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    active: jax.Array,
    weights: jax.Array,
    *,
    start: bool = False,
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`; with `start`, pending.

    Raises:
      ValueError: `y` is not bfloat16, float16 or float32.
    """
    if y.dtype.name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"combine on CUDA: y.dtype={y.dtype}: must be bfloat16, float16 or float32; cast y first")
    spec, config, wire, weighted = call.spec, call.config, call.wire, call.weighted
    mesh = _mesh.lowering_mesh()
    hidden = y.shape[-1]
    low_latency = schedules.use_low_latency(spec, hidden, y.dtype, config, wire=wire, combine=True)
    config = schedules.for_async(config, low_latency=low_latency) if start else config
    schedule = schedules.combine(spec, hidden, config, devices.num_sms(mesh), low_latency=low_latency)
    attrs = attributes(
        spec,
        hidden,
        y.dtype,
        schedule,
        config,
        wire=wire,
        weighted=weighted,
        masked=_active.given(active),
        flight=start,
    )
    results = [jax.ShapeDtypeStruct((spec.num_tokens, hidden), y.dtype)]
    operands = (y, topk_idx, positions, recv_counts, active_operand(active), weights)
    (out,) = ffi_call("xen_moe_combine", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    return out
