"""Start and done halves on TPU. Records are packed for each peer, then travel as one DMA per peer while other work
runs.

The fused operations push row by row from VMEM, which needs the TensorCore until the last row has left. The halves pay
one more pass over what is sent (a send buffer in HBM) for a start kernel that returns at once.

What is odd about them:
- Semaphores live from one kernel to the next. JAX has no array type for them, so that the primitives carry int32 arrays
  of their shapes, and `operand_avals` puts the semaphore types back where the done half is lowered.
- XLA may not touch the send buffer and staging in between: both halves pass them through, aliased.
- XLA schedules by data alone: without an `optimization_barrier` around other work it puts done right behind start.
- Interpret mode cannot run a kernel that leaves semaphores behind: there a start is the whole operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax import _layout, _shapes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import hardware, padding, plan
from xen_moe_jax.backends.pallas.combine import ranks_launch, slots_launch
from xen_moe_jax.backends.pallas.dispatch import (
    given_scales,
    is_quantised,
    place_rows,
    push_launch,
    quantisation,
    record_of,
    routing,
    rows_of,
    with_scales,
)
from xen_moe_jax.backends.rounding import runtime_zero
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import Record


class InFlight(NamedTuple):
    """What every start returns first: what the exchange left (`exchange.Started`), rows sent and rows expected."""

    buffer: jax.Array
    staged: jax.Array
    send: jax.Array
    recv: jax.Array
    sizes: jax.Array
    expected: jax.Array


def _in_flight_shapes(record: Record, send_rows: int, staging_rows: int, spec: Spec) -> list[tuple]:
    """(shape, dtype) of `InFlight`, with int32 for the semaphores."""
    send, recv = exchange.semaphore_counts(spec.num_ranks)
    return [
        ((send_rows, *record.shape), jnp.int32),
        ((staging_rows, *record.shape), jnp.int32),
        ((send,), jnp.int32),
        ((recv,), jnp.int32),
        ((spec.num_ranks,), jnp.int32),
        ((spec.num_ranks,), jnp.int32),
    ]


def _start(
    buffer: jax.Array, sizes: jax.Array, remote_start: jax.Array, routes: Any, spec: Spec, config: KernelConfig
) -> InFlight:
    """Sends `sizes[r]` rows of the buffer to each rank, to row `remote_start[r]` of its staging."""
    runs = exchange.Runs(
        ids=jnp.arange(spec.num_ranks, dtype=jnp.int32),
        place=lax.axis_index(spec.axis_name).astype(jnp.int32).reshape(1),
        input_offsets=_layout.exclusive_cumsum(sizes, axis=0),
        sizes=sizes,
        output_offsets=remote_start,
        expected=routes.expected,
    )
    axes = plan.kernel_axes(spec)
    launch = _exchange_launch(axes, config)
    return InFlight(
        *exchange.start(buffer, runs, rows=routes.staging_rows, axes=axes, launch=launch), sizes, routes.expected
    )


def _landed(flight: InFlight, config: KernelConfig) -> jax.Array:
    started = exchange.Started(flight.buffer, flight.staged, flight.send, flight.recv)
    return exchange.done(started, flight.sizes, flight.expected, launch=_exchange_launch(None, config))


def _exchange_launch(axes: Axes | None, config: KernelConfig) -> Launch:
    return hardware.launch("start", lambda block: 0, preferred=1, smallest=1, available=1, config=config, axes=axes)


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
    """The metadata of a dispatch, then `InFlight` and `source [rows]`."""
    padding.check("dispatch_start", x.dtype, spec, quantised=is_quantised(x))
    sent_scales = given_scales(x, scales)
    known, todo, source = routing(topk_idx, topk_weights, spec, config)
    rows = rows_of(x, wire)
    sizes = jnp.sum(todo.sent, axis=0, dtype=jnp.int32)
    place = _layout.exclusive_cumsum(sizes, axis=0) + _layout.exclusive_cumsum(todo.sent, axis=0)
    peer = todo.routes.peer
    packing = push_kernel.Routes(
        peer, plan.pick(place, peer), jnp.zeros((1,), jnp.int32), plan.combine_staging_rows(spec)
    )
    buffer = push_kernel.push(
        padding.pad_hidden(x),
        sent_scales,
        packing,
        record=rows.record,
        quantise=rows.quantise,
        axes=None,
        launch=push_launch(rows, spec, config),
    )
    flight = _start(buffer, sizes, todo.remote_start, todo.routes, spec, config)
    return (*flight, source, *known)


def dispatch_done(
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *under_way: jax.Array,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """All results. The operands of the start are here for derivatives; only the shape and dtype of `x` are read."""
    del topk_idx, topk_weights
    flight, (source, *known) = under_way[: len(InFlight._fields)], under_way[len(InFlight._fields) :]
    staged = _landed(InFlight(*flight), config)
    rows = place_rows(staged, source, known[1], rows_of(x, wire), spec=spec, config=config)
    return (*with_scales(rows), *known)


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
    record = record_of(rows.shape[1], y.dtype, False, wire)
    zero = lax.bitcast_convert_type(runtime_zero(recv_counts), jnp.int32).reshape(1)
    todo = plan.combine_plan(topk_idx, positions, spec)
    sizes = jnp.sum(todo.came, axis=1, dtype=jnp.int32)
    starts = _layout.exclusive_cumsum(sizes, axis=0)
    local = starts[:, None] + _layout.exclusive_cumsum(todo.came.astype(jnp.int32), axis=1)
    source_rank = jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None]
    pairs = slots_kernel.Pairs(
        rows=positions.reshape(local.size, -1),
        peer=jnp.where(todo.came, source_rank, -1).reshape(-1),
        address=local.reshape(-1),
        expected=jnp.zeros((1,), jnp.int32),
        staging_rows=spec.num_ranks * spec.num_tokens,
    )
    buffer = slots_kernel.reduce_slots(
        rows,
        pairs,
        weights.reshape(-1) if weighted else None,
        zero,
        record=record,
        quantise=quantisation(wire),
        axes=None,
        launch=slots_launch(record, spec, config),
    )
    flight = _start(buffer, sizes, todo.remote_start, todo.pairs, spec, config)
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
    *flight, source, zero = under_way
    staged = _landed(InFlight(*flight), config)
    hidden = y.shape[-1]
    record = record_of(hidden, y.dtype, False, wire)
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
    record = rows_of(x, wire).record
    flight = _in_flight_shapes(record, plan.combine_staging_rows(spec), plan.dispatch_staging_rows(spec), spec)
    return [*flight, ((math.prod(spec.row_dims),), jnp.int32), *_shapes.dispatch(x, scales, spec=spec)[2:]]


def combine_in_flight(y: Any, *, spec: Spec, wire: Wire | None) -> list[tuple]:
    """`(shape, dtype)` of what travels from `combine_start` to `combine_done`; semaphores as int32."""
    record = record_of(y.shape[-1], y.dtype, False, wire)
    flight = _in_flight_shapes(record, spec.num_ranks * spec.num_tokens, plan.combine_staging_rows(spec), spec)
    return [*flight, ((spec.num_tokens, min(spec.num_ranks, spec.top_k)), jnp.int32), ((1,), jnp.int32)]


OPERANDS_BEFORE = {"dispatch_done": 5, "combine_done": 6}
"""Operands of the primitive of a done half that come before `InFlight`, `active` among them."""


def operand_avals(operation: str, avals: Sequence[Any]) -> list[Any]:
    """DMA semaphores instead of the int32 arrays that carry them between two kernels."""
    first = OPERANDS_BEFORE.get(operation)
    semaphores = [] if first is None else [first + InFlight._fields.index(name) for name in ("send", "recv")]
    return [
        pltpu.SemaphoreType.DMA(aval.shape).get_array_aval() if i in semaphores else aval
        for i, aval in enumerate(avals)
    ]
