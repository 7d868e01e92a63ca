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

On two axes other things are under way: `crossing`.
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
from xen_moe_jax.backends.pallas import crossing, hardware, headers, padding, plan
from xen_moe_jax.backends.pallas.combine import prepared, ranks_launch, slots_launch
from xen_moe_jax.backends.pallas.dispatch import (
    from_headers,
    given_scales,
    header_words,
    is_quantized,
    place_rows,
    push_launch,
    quantization,
    record_of,
    routing,
    rows_of,
    with_scales,
)
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import Record


class Pending(NamedTuple):
    """What every start returns first: what the exchange left (`exchange.Started`), rows sent and rows expected."""

    buffer: jax.Array
    staged: jax.Array
    send: jax.Array
    recv: jax.Array
    sizes: jax.Array
    expected: jax.Array


def _pending_shapes(record: Record, send_rows: int, staging_rows: int, spec: Spec) -> list[tuple]:
    """(shape, dtype) of `Pending`, with int32 for the semaphores."""
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
    buffer: jax.Array,
    sizes: jax.Array,
    remote_start: jax.Array,
    routes: push_kernel.Routes | slots_kernel.Pairs,
    spec: Spec,
    config: KernelConfig,
) -> Pending:
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
    return Pending(
        *exchange.start(buffer, runs, rows=routes.staging_rows, axes=axes, launch=launch), sizes, routes.expected
    )


def _landed(flight: Pending, config: KernelConfig) -> jax.Array:
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
    """`Pending`, then `start [R]`, `recv_counts [R, L]`, `dropped` and `topk_idx`; without headers `source [rows]`
    and the metadata of a dispatch.
    """
    padding.check("dispatch_start", x.dtype, spec, quantized=is_quantized(x))
    if len(spec.axis_name) == 2:
        return crossing.dispatch_start(x, scales, topk_idx, topk_weights, spec=spec, wire=wire, config=config)
    rows = rows_of(x, wire, header=header_words(spec))
    todo: plan.SendPlan | headers.Riding
    if rows.record.header:
        todo = headers.sending(topk_idx, topk_weights, spec)
        header = todo.header
        rest = [todo.start, todo.recv_counts, todo.dropped, topk_idx]
    else:
        known, todo, source = routing(topk_idx, topk_weights, spec, config)
        header = None
        rest = [source, *known]
    sizes = jnp.sum(todo.sent, axis=0, dtype=jnp.int32)
    place = _layout.exclusive_cumsum(sizes, axis=0) + _layout.exclusive_cumsum(todo.sent, axis=0)
    peer = todo.routes.peer
    packing = push_kernel.Routes(
        peer, plan.pick(place, peer), jnp.zeros((1,), jnp.int32), plan.combine_staging_rows(spec)
    )
    buffer = push_kernel.push(
        padding.pad_hidden(x),
        given_scales(x, scales),
        packing,
        record=rows.record,
        quantize=rows.quantize,
        axes=None,
        launch=push_launch(rows, spec, config),
        header=header,
    )
    return (*_start(buffer, sizes, todo.remote_start, todo.routes, spec, config), *rest)


def dispatch_done(
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *pending: jax.Array,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """All results. The operands of the start are here for derivatives; only the shape and dtype of `x` are read."""
    del scales, topk_idx, topk_weights
    if len(spec.axis_name) == 2:
        return crossing.dispatch_done(x, pending, spec=spec, wire=wire, config=config)
    flight, rest = Pending(*pending[: len(Pending._fields)]), pending[len(Pending._fields) :]
    staged = _landed(flight, config)
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        start, recv_counts, dropped, topk_idx = rest
        return from_headers(
            staged, start, flight.expected, recv_counts, dropped, topk_idx, rows=rows, spec=spec, config=config
        )
    source, *known = rest
    placed = place_rows(staged, source, known[1], rows, spec=spec, config=config)
    return (*with_scales(placed), *known)


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
    """`Pending`, then `source [T, D]` and `zero [1]` for the last addition."""
    padding.check("combine_start", y.dtype, spec)
    if len(spec.axis_name) == 2:
        return crossing.combine_start(
            y,
            topk_idx,
            positions,
            recv_counts,
            weights,
            spec=spec,
            weighted=weighted,
            wire=wire,
            config=config,
        )
    rows, record, zero = prepared(y, recv_counts, wire)
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
        quantize=quantization(wire),
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
    *pending: jax.Array,
    spec: Spec,
    weighted: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> jax.Array:
    """`[T, hidden]` from what `combine_start` left under way; of the operands only the shape of `y` is read."""
    del topk_idx, positions, recv_counts, weights, weighted
    if len(spec.axis_name) == 2:
        return crossing.combine_done(y, pending, wire=wire, config=config)
    *flight, source, zero = pending
    staged = _landed(Pending(*flight), config)
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


def supports_async(spec: Spec, config: KernelConfig) -> bool:
    """One axis: on chips, for interpret mode cannot run a kernel that leaves semaphores behind. Two: where one exchange
    of all rows over DCN suits them.
    """
    if len(spec.axis_name) == 2:
        return spec.num_tokens > 0 and crossing.suits(spec)
    return spec.num_tokens > 0 and not config.interpret


def received_by_xla(spec: Spec) -> tuple[int, ...]:
    """Places of arrays in what is under way that a collective of XLA brings."""
    return crossing.RECEIVED if len(spec.axis_name) == 2 else ()


def dispatch_pending(x: Any, scales: Any, *, spec: Spec, wire: Wire | None) -> list[tuple]:
    """`(shape, dtype)` of what travels from `dispatch_start` to `dispatch_done`; semaphores as int32."""
    if len(spec.axis_name) == 2:
        return crossing.dispatch_pending(x, scales, spec=spec, wire=wire)
    record = rows_of(x, wire, header=header_words(spec)).record
    staging = headers.staging_rows(spec) if record.header else plan.dispatch_staging_rows(spec)
    flight = _pending_shapes(record, plan.combine_staging_rows(spec), staging, spec)
    known = _shapes.dispatch(x, scales, spec=spec)[2:]
    if record.header:
        ranks = spec.num_ranks
        rest = [(ranks,), (ranks, spec.local_experts), headers.dropped_shape(spec), (spec.num_tokens, spec.top_k)]
        return [*flight, *((shape, jnp.int32) for shape in rest)]
    return [*flight, ((math.prod(spec.row_dims),), jnp.int32), *known]


def combine_pending(y: Any, *, spec: Spec, wire: Wire | None) -> list[tuple]:
    """`(shape, dtype)` of what travels from `combine_start` to `combine_done`; semaphores as int32."""
    if len(spec.axis_name) == 2:
        return crossing.combine_pending(y, spec=spec, wire=wire)
    record = record_of(y.shape[-1], y.dtype, False, wire)
    flight = _pending_shapes(record, spec.num_ranks * spec.num_tokens, plan.combine_staging_rows(spec), spec)
    return [*flight, ((spec.num_tokens, min(spec.num_ranks, spec.top_k)), jnp.int32), ((1,), jnp.int32)]


OPERANDS_BEFORE = {"dispatch_done": 5, "combine_done": 6}
"""Operands of the primitive of a done half that come before `Pending`, `active` among them."""


def operand_avals(operation: str, avals: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """DMA semaphores instead of the int32 arrays that carry them between two kernels."""
    first = OPERANDS_BEFORE.get(operation)
    if first is None or len(params["spec"].axis_name) == 2:
        return list(avals)
    semaphores = [first + Pending._fields.index(name) for name in ("send", "recv")]
    return [
        pltpu.SemaphoreType.DMA(aval.shape).get_array_aval() if i in semaphores else aval
        for i, aval in enumerate(avals)
    ]
