"""Start and done halves on TPU. Records are packed for each peer, then travel as one DMA per peer while other work
runs.

The fused operations push row by row from VMEM, which needs the TensorCore until the last row has left. The halves pay
one more pass over what is sent (a send buffer in HBM) for a start kernel that returns at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._pallas_backend import dispatch as whole_dispatch
from xen_moe_jax._pallas_backend import hardware, plan, support
from xen_moe_jax._pallas_backend.combine import ranks_launch, row_weights, slots_launch
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import LANES, Record
from xen_moe_jax.reference.rounding import runtime_zero

InFlight = tuple[jax.Array, ...]
"""What every start returns first: send buffer, staging, send semaphore, receive semaphores, rows sent, rows expected.
"""
NUM_IN_FLIGHT = 6


def record_of(hidden: int, dtype, scaled: bool, wire: Wire | None) -> Record:
    return whole_dispatch.record_of(-(-hidden // LANES) * LANES, dtype, scaled, wire)


def in_flight_shapes(record: Record, send_rows: int, staging_rows: int, num_ranks: int) -> list[tuple]:
    """(shape, dtype) of `InFlight`, with int32 for the semaphores."""
    return [
        ((send_rows, *record.shape), jnp.int32),
        ((staging_rows, *record.shape), jnp.int32),
        ((1,), jnp.int32),
        ((exchange.num_semaphores(num_ranks),), jnp.int32),
        ((num_ranks,), jnp.int32),
        ((num_ranks,), jnp.int32),
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
    scales: jax.Array | None,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """`InFlight`, `staged [R, T]`, then the metadata of a dispatch."""
    support.check("dispatch_start", x.dtype, spec, quantised=scales is not None)
    meta = whole_dispatch.metadata(topk_idx, topk_weights, spec)
    todo = plan.dispatch_plan(topk_idx, meta[0], spec)
    x = support.pad_hidden(x)
    record = record_of(x.shape[1], x.dtype, scales is not None, wire)
    sizes = jnp.sum(todo.sent, axis=0, dtype=jnp.int32)
    starts = _layout.exclusive_cumsum(sizes, axis=0)
    local = plan.pick(starts + _layout.exclusive_cumsum(todo.sent, axis=0), todo.peer)
    buffer = push_kernel.push(
        x,
        scales,
        todo.peer,
        local,
        jnp.zeros((1,), jnp.int32),
        record=record,
        quantise=None if wire is None else (wire.dtype, wire.scale_format),
        staging_rows=plan.combine_staging_rows(spec),
        axes=None,
        launch=whole_dispatch.push_launch(x, scales is not None, record, spec, config),
    )
    flight = _start(buffer, starts, sizes, todo.remote_start, todo.expected, todo.staging_rows, spec, config)
    return (*flight, todo.staged, *meta)


def dispatch_done(
    *operands: jax.Array, spec: Spec, wire: Wire | None, config: KernelConfig, hidden: int, dtype, scaled: bool
):
    """Rows (and scales) from what `dispatch_start` returned up to and including `recv_counts`."""
    flight, (staged_row, positions, recv_counts) = operands[:NUM_IN_FLIGHT], operands[NUM_IN_FLIGHT:]
    staged = exchange.done(*flight)
    record = record_of(hidden, dtype, scaled, wire)
    return whole_dispatch.place_rows(
        staged, staged_row, positions, recv_counts, record, jnp.dtype(dtype), scaled, hidden, spec, config
    )


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
    support.check("combine_start", y.dtype, spec)
    rows = support.pad_rows(support.pad_hidden(y.reshape(-1, y.shape[-1])))
    record = record_of(rows.shape[1], y.dtype, False, wire)
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


def combine_done(*operands: jax.Array, spec: Spec, wire: Wire | None, config: KernelConfig, hidden: int, dtype):
    """`[T, hidden]` from what `combine_start` returned."""
    flight, (source, zero) = operands[:NUM_IN_FLIGHT], operands[NUM_IN_FLIGHT:]
    staged = exchange.done(*flight)
    record = record_of(hidden, dtype, False, wire)
    out = ranks_kernel.reduce_ranks(
        staged,
        source,
        zero,
        record=record,
        out_dtype=jnp.dtype(dtype),
        launch=ranks_launch(record, dtype, source.shape[1], spec.num_tokens, config),
    )
    return out[:, :hidden]
