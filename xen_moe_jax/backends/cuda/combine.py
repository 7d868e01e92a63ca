"""Combine, and combine by home, as FFI calls."""

from __future__ import annotations

from typing import Any

import jax

from xen_moe_jax import _active, _mesh, _nodes
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.cuda import devices, module
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
    schedule = schedules.combine(spec, hidden, config, devices.num_sms(mesh), wire=wire, low_latency=low_latency)
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


def combines_at_home(call: Call, y: Any) -> bool:
    """Returns whether a kernel runs `combine_at_home` of rows of the length of those of `y`."""
    names, spec = module.compiled(), call.spec
    return not names.no_home_combine(
        ranks=spec.num_ranks,
        ranks_per_node=_nodes.ranks_per_node(spec, call.config),
        hidden=y.shape[-1],
        layout=names.layouts.index(spec.layout),
    )


def combine_at_home(
    call: Call,
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    active: jax.Array,
    weights: jax.Array,
    home: jax.Array,
    topk_weights: jax.Array,
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`: the rows of each home are added, then these sums.

    `home int32 [T, K]`: the rank at which a slot's expert has its home; -1 where the slot is not used. See
    cuda_kernels/combine/home.cuh.
    """
    del weights  # rows are multiplied on their token's rank
    spec, config = call.spec, call.config
    mesh, hidden = _mesh.lowering_mesh(), y.shape[-1]
    schedule = schedules.combine(spec, hidden, config, devices.num_sms(mesh))
    masked = _active.given(active)
    attrs = attributes(spec, hidden, y.dtype, schedule, config, weighted=call.weighted, masked=masked)
    operands = (y, topk_idx, positions, recv_counts, active_operand(active), home, topk_weights)
    results = [jax.ShapeDtypeStruct((spec.num_tokens, hidden), y.dtype)]
    (out,) = ffi_call("xen_moe_combine_at_home", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    return out
