"""Start and done halves on TPU. Records are packed for each peer, then travel as one DMA per peer while other work
runs.

The fused operations push row by row from VMEM, which needs the TensorCore until the last row has left. The halves pay
one more pass over what is sent (a send buffer in HBM) for a start kernel that returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import hardware, padding, plan
from xen_moe_jax.backends.pallas.combine import ranks_launch, row_weights, slots_launch
from xen_moe_jax.backends.pallas.dispatch import (
    given_scales,
    is_quantised,
    metadata,
    place_rows,
    push_launch,
    record_of,
    with_scales,
)
from xen_moe_jax.backends.rounding import runtime_zero
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import LANES, Record

InFlight = tuple[jax.Array, ...]
"""What every start returns first: send buffer, staging, send semaphore, receive semaphores, rows sent, rows expected.
"""
NUM_IN_FLIGHT = 6


def padded_record(hidden: int, dtype, scaled: bool, wire: Wire | None) -> Record:
    return record_of(-(-hidden // LANES) * LANES, dtype, scaled, wire)


def _in_flight_shapes(record: Record, send_rows: int, staging_rows: int, spec: Spec) -> list[tuple]:
    """(shape, dtype) of `InFlight`, with int32 for the semaphores."""
    return [
        ((send_rows, *record.shape), jnp.int32),
        ((staging_rows, *record.shape), jnp.int32),
        ((1,), jnp.int32),
        ((exchange.num_semaphores(spec.num_ranks),), jnp.int32),
        ((spec.num_ranks,), jnp.int32),
        ((spec.num_ranks,), jnp.int32),
    ]


def _start(
    buffer, starts, sizes, remote_start, expected, staging_rows: int, spec: Spec, config: KernelConfig
) -> InFlight:
    ranks = jnp.arange(spec.num_ranks, dtype=jnp.int32)
    rank = lax.axis_index(spec.axis_name).astype(jnp.int32).reshape(1)
    buffer, staged, send, recv = exchange.start(
        buffer,
        ranks,
        rank,
        starts,
        sizes,
        remote_start,
        rows=staging_rows,
        axes=Axes(spec.axis_name, spec.axis_sizes),
        launch=_exchange_launch(config),
    )
    return buffer, staged, send, recv, sizes, expected


def _exchange_launch(config: KernelConfig) -> Launch:
    return hardware.launch("start", lambda block: 0, preferred=1, smallest=1, available=1, config=config)


def dispatch_start(
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """The metadata of a dispatch, then `InFlight` and `staged [R, T]`."""
    padding.check("dispatch_start", x.dtype, spec, quantised=is_quantised(x))
    sent_scales = given_scales(x, scales)
    meta = metadata(topk_idx, topk_weights, spec)
    todo = plan.dispatch_plan(topk_idx, meta[0], spec)
    x = padding.pad_hidden(x)
    record = padded_record(x.shape[1], x.dtype, sent_scales is not None, wire)
    sizes = jnp.sum(todo.sent, axis=0, dtype=jnp.int32)
    starts = _layout.exclusive_cumsum(sizes, axis=0)
    local = plan.pick(starts + _layout.exclusive_cumsum(todo.sent, axis=0), todo.peer)
    buffer = push_kernel.push(
        x,
        sent_scales,
        todo.peer,
        local,
        jnp.zeros((1,), jnp.int32),
        record=record,
        quantise=None if wire is None else (wire.dtype, wire.scale_format),
        staging_rows=plan.combine_staging_rows(spec),
        axes=None,
        launch=push_launch(x, sent_scales is not None, record, spec, config),
    )
    flight = _start(buffer, starts, sizes, todo.remote_start, todo.expected, todo.staging_rows, spec, config)
    return (*meta, *flight, todo.staged)


def dispatch_done(
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *under_way: jax.Array,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Rows and scales. `x` and `topk_idx` are here for derivatives; only the shape and dtype of `x` are read."""
    del topk_idx
    flight, staged_row = under_way[:NUM_IN_FLIGHT], under_way[NUM_IN_FLIGHT]
    staged = exchange.done(*flight)
    scaled = is_quantised(x)
    record = padded_record(x.shape[1], x.dtype, scaled, wire)
    rows = place_rows(staged, staged_row, positions, recv_counts, record, x.dtype, scaled, x.shape[1], spec, config)
    return with_scales(rows)


def combine_start(
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    weights: jax.Array,
    *,
    spec: Spec,
    weighted: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """`InFlight`, then `source [T, D]` and `zero [1]` for the last addition."""
    padding.check("combine_start", y.dtype, spec)
    rows = padding.pad_rows(padding.pad_hidden(y.reshape(-1, y.shape[-1])))
    record = padded_record(rows.shape[1], y.dtype, False, wire)
    zero = lax.bitcast_convert_type(runtime_zero(recv_counts), jnp.int32).reshape(1)
    todo = plan.combine_plan(topk_idx, positions, spec)
    sizes = jnp.sum(todo.came, axis=1, dtype=jnp.int32)
    starts = _layout.exclusive_cumsum(sizes, axis=0)
    local = starts[:, None] + _layout.exclusive_cumsum(todo.came.astype(jnp.int32), axis=1)
    source_rank = jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None]
    pairs = plan.listed(
        jnp.where(todo.came, source_rank, -1).reshape(-1),
        local.reshape(-1),
        plan.first_used(positions).reshape(local.size, -1),
        spec.num_ranks > spec.top_k,
    )
    buffer = slots_kernel.reduce_slots(
        rows,
        pairs.rows,
        row_weights(weights, pairs.rows) if weighted else None,
        pairs.peer,
        pairs.address,
        pairs.count,
        jnp.zeros((1,), jnp.int32),
        zero,
        record=record,
        quantise=None if wire is None else (wire.dtype, wire.scale_format),
        staging_rows=spec.num_ranks * spec.num_tokens,
        axes=None,
        launch=slots_launch(record, spec, config),
    )
    flight = _start(buffer, starts, sizes, todo.remote_start, todo.expected, todo.staging_rows, spec, config)
    return (*flight, todo.source, zero)


def combine_done(
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    weights: jax.Array,
    *under_way: jax.Array,
    spec: Spec,
    weighted: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> jax.Array:
    """`[T, hidden]` from what `combine_start` left under way; of the operands only the shape of `y` is read."""
    del topk_idx, positions, recv_counts, weights, weighted
    flight, (source, zero) = under_way[:NUM_IN_FLIGHT], under_way[NUM_IN_FLIGHT:]
    staged = exchange.done(*flight)
    hidden = y.shape[-1]
    record = padded_record(hidden, y.dtype, False, wire)
    out = ranks_kernel.reduce_ranks(
        staged,
        source,
        zero,
        record=record,
        out_dtype=y.dtype,
        launch=ranks_launch(record, y.dtype, source.shape[1], spec.num_tokens, config),
    )
    return out[:, :hidden]


def can_split(spec: Spec, config: KernelConfig) -> bool:
    """On chips and one axis: interpret mode cannot run a kernel that leaves semaphores behind."""
    return not config.interpret and len(spec.axis_name) == 1 and spec.num_tokens > 0


def dispatch_in_flight(x: Any, scales: Any, *, spec: Spec, wire: Wire | None) -> list[tuple]:
    """`(shape, dtype)` of what travels from `dispatch_start` to `dispatch_done`; semaphores as int32."""
    del scales
    record = padded_record(x.shape[1], x.dtype, is_quantised(x), wire)
    flight = _in_flight_shapes(record, plan.combine_staging_rows(spec), plan.dispatch_staging_rows(spec), spec)
    return [*flight, ((spec.num_ranks, spec.num_tokens), jnp.int32)]


def combine_in_flight(y: Any, *, spec: Spec, wire: Wire | None) -> list[tuple]:
    """`(shape, dtype)` of what travels from `combine_start` to `combine_done`; semaphores as int32."""
    record = padded_record(y.shape[-1], y.dtype, False, wire)
    flight = _in_flight_shapes(record, spec.num_ranks * spec.num_tokens, plan.combine_staging_rows(spec), spec)
    return [*flight, ((spec.num_tokens, min(spec.num_ranks, spec.top_k)), jnp.int32), ((1,), jnp.int32)]


SEMAPHORES = {"dispatch_done": (7, 8), "combine_done": (7, 8)}
"""Operands of a done half that are semaphores: the third and fourth of `InFlight`, behind five others."""


def operand_avals(operation: str, avals: Sequence[Any]) -> list[Any]:
    """DMA semaphores instead of the int32 arrays that carry them between two kernels."""
    semaphores = SEMAPHORES.get(operation, ())
    return [
        pltpu.SemaphoreType.DMA(aval.shape).get_array_aval() if i in semaphores else aval
        for i, aval in enumerate(avals)
    ]
