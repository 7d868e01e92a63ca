"""Start and done on TPU. Records are packed for each peer, then travel as one DMA per peer while other work runs.

The synchronous operations push row by row from VMEM, which needs the TensorCore until the last row has left. Start and
done pay one more pass over the sent rows (a send buffer in HBM) for a start kernel that returns at once.

Their peculiarities:
- Semaphores live from one kernel to the next. JAX has no array type for them, so that the primitives carry int32 arrays
  of their shapes, and `operand_avals` puts the semaphore types back where the done is lowered.
- XLA may not touch the send buffer and staging in between: start and done pass them through, aliased.
- XLA schedules by data alone: without an `optimization_barrier` around other work it puts done right behind start.
- Interpret mode cannot run a kernel that leaves semaphores behind: there a start is the whole operation.

Two axes
    dispatch: pack -> [DCN] -> forward over ICI, place        combine: partial sums of a slice -> [DCN] -> add slices
The pending arrays belong to XLA's all-to-all over DCN, which is the slow part. XLA makes a send and a receive out of
that collective, each with a start and an end of its own, and schedules them as their data allow. So `overlap` must not
order the result of the collective (`PendingSlices.received`): it would be complete before the other work begins. It
orders the operand of the collective and the tables that done reads. One collective moves all `T` rows of every pair of
slices, because a loop of rounds cannot be pending. Where there are no more slices than slots, most of these rows are
needed: a token reaches `N (1 - (1 - 1/N)^K)` of `N` slices.
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
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import hardware, headers, plan, records, two_axes
from xen_moe_jax.backends.pallas.dispatch import from_headers, pack_for_slices, routing
from xen_moe_jax.backends.pallas.records import (
    given_scales,
    header_words,
    is_quantized,
    place_rows,
    push_records,
    record_of,
    rows_of,
    with_scales,
)
from xen_moe_jax.backends.pallas.sums import Sums
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import Record


class Pending(NamedTuple):
    """First results of every start on one axis: results of `exchange.start`, rows sent and rows expected per rank."""

    buffer: jax.Array
    staged: jax.Array
    send: jax.Array
    recv: jax.Array
    sizes: jax.Array
    expected: jax.Array


def _pending_shapes(record: Record, send_rows: int, staging_rows: int, spec: Spec) -> list[ShapeDtype]:
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
    launch = exchange_launch(axes, config)
    return Pending(
        *exchange.start(buffer, runs, rows=routes.staging_rows, axes=axes, launch=launch), sizes, routes.expected
    )


def _exchange_done(flight: Pending, config: KernelConfig) -> jax.Array:
    started = exchange.Started(flight.buffer, flight.staged, flight.send, flight.recv)
    return exchange.done(started, flight.sizes, flight.expected, launch=exchange_launch(None, config))[1]


def exchange_launch(axes: Axes | None, config: KernelConfig) -> Launch:
    return hardware.launch("start", lambda block: 0, preferred=1, smallest=1, available=1, config=config, axes=axes)


def dispatch_start(
    call: Call, x: jax.Array, scales: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, ...]:
    """`Pending`, then `start [R]`, `recv_counts [R, L]`, `dropped` and `topk_idx`; without headers `source [rows]`
    and the metadata of a dispatch.
    """
    spec, wire, config = call.spec, call.wire, call.config
    records.check("dispatch_start", x.dtype, spec, quantized=is_quantized(x))
    if len(spec.axis_name) == 2:
        return _slices_dispatch_start(call, x, scales, topk_idx, topk_weights)
    rows = rows_of(x, wire, header=header_words(spec))
    todo: plan.SendPlan | headers.HeaderPlan
    if rows.record.header:
        todo = headers.sending(topk_idx, topk_weights, spec)
        header = todo.header
        rest = list(todo.arrivals(topk_idx)[AT_START:])
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
    sent_scales = given_scales(x, scales)
    buffer = push_records(x, sent_scales, packing, rows, axes=None, spec=spec, config=config, header=header)
    return (*_start(buffer, sizes, todo.remote_start, todo.routes, spec, config), *rest)


def dispatch_done(
    call: Call, x: jax.Array, scales: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array, *pending: jax.Array
) -> tuple[jax.Array, ...]:
    """All results. The operands of the start are here for derivatives; only the shape and dtype of `x` are read."""
    del scales, topk_idx, topk_weights
    spec, wire, config = call.spec, call.wire, call.config
    if len(spec.axis_name) == 2:
        return _slices_dispatch_done(call, x, pending)
    flight, rest = Pending(*pending[: len(Pending._fields)]), pending[len(Pending._fields) :]
    staged = _exchange_done(flight, config)
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        return from_headers(staged, headers.Arrivals(None, None, flight.expected, *rest), rows, spec, config)
    source, *known = rest
    placed = place_rows(staged, source, known[1], rows, spec=spec, config=config)
    return (*with_scales(placed), *known)


def combine_start(
    call: Call, y: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array, weights: jax.Array
) -> tuple[jax.Array, ...]:
    """`Pending`, then `source [T, D]` and `zero [1]` for the last addition."""
    spec, config = call.spec, call.config
    records.check("combine_start", y.dtype, spec)
    if len(spec.axis_name) == 2:
        return _slices_combine_start(call, y, topk_idx, positions, recv_counts, weights)
    sums = Sums.of(call, y)
    rows, zero = sums.prepared(y, recv_counts)
    todo = plan.combine_plan(topk_idx, positions, spec, packed=plan.packs_staging(spec))
    sizes = jnp.sum(todo.came, axis=1, dtype=jnp.int32)
    starts = _layout.exclusive_cumsum(sizes, axis=0)
    local = starts[:, None] + _layout.exclusive_cumsum(todo.came.astype(jnp.int32), axis=1)
    source_rank = jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None]
    pairs = slots_kernel.Pairs(
        rows=positions.reshape(local.size, -1),
        peer=jnp.where(todo.came, source_rank, -1).reshape(-1),
        address=local.reshape(-1),
        expected=jnp.zeros((1,), jnp.int32),
        staging_rows=plan.combine_sent_rows(spec),
    )
    halved = sums.reads_halves(rows)
    launch = sums.slots_launch(halved=halved)
    buffer = sums.of_slots(rows, pairs, weights, zero, launch, axes=None, cores=launch.cores, halved=halved)
    flight = _start(buffer, sizes, todo.remote_start, todo.pairs, spec, config)
    return (*flight, todo.source, zero)


def combine_done(
    call: Call,
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    weights: jax.Array,
    *pending: jax.Array,
) -> jax.Array:
    """`[T, hidden]` from the pending arrays of `combine_start`; of the operands only the shape of `y` is read."""
    del topk_idx, positions, recv_counts, weights
    spec, sums = call.spec, Sums.of(call, y)
    if len(spec.axis_name) == 2:
        _, received, last, zero = pending
        return two_axes.add_slices(sums, received, last, zero)
    *flight, source, zero = pending
    staged = _exchange_done(Pending(*flight), call.config)
    return sums.of_ranks(staged, source, zero, sums.ranks_launch(source.shape[1], spec.num_tokens))


def supports_async(spec: Spec, config: KernelConfig) -> bool:
    """Returns True on chips for one axis, because interpret mode cannot run a kernel that leaves semaphores behind; and
    for two axes where one exchange of all rows over DCN suits them.
    """
    if len(spec.axis_name) == 2:
        return spec.num_tokens > 0 and _slices_suit(spec)
    return spec.num_tokens > 0 and not config.interpret


def received_by_xla(spec: Spec) -> tuple[int, ...]:
    """Places of pending arrays that a collective of XLA receives."""
    return RECEIVED if len(spec.axis_name) == 2 else ()


def dispatch_pending(call: Call, x: Any, scales: Any) -> list[ShapeDtype]:
    """`(shape, dtype)` of the arrays that pass from `dispatch_start` to `dispatch_done`; semaphores as int32."""
    spec, wire = call.spec, call.wire
    if len(spec.axis_name) == 2:
        return _slices_dispatch_pending(call, x, scales)
    record = rows_of(x, wire, header=header_words(spec)).record
    staging = headers.staging_rows(spec) if record.header else plan.dispatch_staging_rows(spec)
    flight = _pending_shapes(record, plan.combine_staging_rows(spec), staging, spec)
    known = _shapes.dispatch(x, scales, spec=spec)[2:]
    if record.header:
        ranks = spec.num_ranks
        rest = [(ranks,), (ranks, spec.local_experts), headers.dropped_shape(spec), (spec.num_tokens, spec.top_k)]
        return [*flight, *((shape, jnp.int32) for shape in rest)]
    return [*flight, ((math.prod(spec.row_dims),), jnp.int32), *known]


def combine_pending(call: Call, y: Any) -> list[ShapeDtype]:
    """`(shape, dtype)` of the arrays that pass from `combine_start` to `combine_done`; semaphores as int32."""
    spec, wire = call.spec, call.wire
    if len(spec.axis_name) == 2:
        return _slices_combine_pending(call, y)
    record = record_of(y.shape[-1], y.dtype, False, wire)
    flight = _pending_shapes(record, plan.combine_sent_rows(spec), plan.combine_staging_rows(spec), spec)
    return [*flight, ((spec.num_tokens, min(spec.num_ranks, spec.top_k)), jnp.int32), ((1,), jnp.int32)]


AT_START = headers.Arrivals._fields.index("start")
"""Number of the first field of `headers.Arrivals` that follows `Pending` on one axis."""
OPERANDS_BEFORE = {"dispatch_done": 5, "combine_done": 6}
"""Operands of the primitive of a done half that come before `Pending`, `active` among them."""


def operand_avals(operation: str, avals: Sequence[Any], call: Any) -> list[Any]:
    """Returns the avals with DMA semaphores instead of the int32 arrays that carry them between two kernels."""
    first = OPERANDS_BEFORE.get(operation)
    if first is None or len(call.spec.axis_name) == 2:
        return list(avals)
    semaphores = [first + Pending._fields.index(name) for name in ("send", "recv")]
    return [
        pltpu.SemaphoreType.DMA(aval.shape).get_array_aval() if i in semaphores else aval
        for i, aval in enumerate(avals)
    ]


# -- two axes ----------------------------------------------------------------------------------------------------------


class PendingSlices(NamedTuple):
    """Operand and result of XLA's collective, int32 `[N, T, *record.shape]` each: a start returns them first.

    `sent` comes first: `overlap` identifies a pending operation by its first array and returns each array as another
    one.
    """

    sent: jax.Array
    received: jax.Array


RECEIVED = (PendingSlices._fields.index("received"),)


def _slices_suit(spec: Spec) -> bool:
    """Returns True if most of the rows that one collective moves are needed."""
    return spec.axis_sizes[0] <= spec.top_k


def _pending_slices_shapes(record: Record, spec: Spec) -> list[ShapeDtype]:
    shape = (spec.axis_sizes[0], spec.num_tokens, *record.shape)
    return [(shape, jnp.int32), (shape, jnp.int32)]


def _slices_dispatch_pending(call: Call, x: Any, scales: Any) -> list[ShapeDtype]:
    """Shapes of `PendingSlices` and `headers.Arrivals`; without headers, of `FanOut`, `source [rows]` and the metadata
    of a dispatch after `PendingSlices`.
    """
    spec, wire = call.spec, call.wire
    record = rows_of(x, wire, header=header_words(spec)).record
    if record.header:
        return [*_pending_slices_shapes(record, spec), *_pending_headers_shapes(spec)]
    slices, fast = spec.axis_sizes
    table = (slices * spec.num_tokens, fast)
    fan = [(slices, spec.num_tokens), table, table, (fast,), (math.prod(spec.row_dims),)]
    return [
        *_pending_slices_shapes(record, spec),
        *((shape, jnp.int32) for shape in fan),
        *_shapes.dispatch(x, scales, spec=spec)[2:],
    ]


def _slices_combine_pending(call: Call, y: Any) -> list[ShapeDtype]:
    """Shapes of `PendingSlices`, `last [T, N]` and `zero [1]`."""
    spec, wire = call.spec, call.wire
    record = record_of(y.shape[-1], y.dtype, False, wire)
    last = (spec.num_tokens, spec.axis_sizes[0])
    return [*_pending_slices_shapes(record, spec), (last, jnp.int32), ((1,), jnp.int32)]


def _pending_headers_shapes(spec: Spec) -> list[ShapeDtype]:
    slices, fast = spec.axis_sizes
    ranks, local = spec.num_ranks, spec.local_experts
    dropped = headers.dropped_shape(spec)
    shapes = [(slices,), (slices, fast), (ranks,), (ranks,), (ranks, local), dropped, (spec.num_tokens, spec.top_k)]
    return [(shape, jnp.int32) for shape in shapes]


def _slices_dispatch_start(
    call: Call, x: jax.Array, scales: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, ...]:
    spec, wire, config = call.spec, call.wire, call.config
    given = given_scales(x, scales)
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        known = headers.sending(topk_idx, topk_weights, spec)
        sent = pack_for_slices(x, given, known, rows, spec, config)
        return (sent, two_axes.across_slices_at_once(sent, spec), *known.arrivals(topk_idx))
    results, send_plan, source = routing(topk_idx, topk_weights, spec, config)
    sent, _, fan = two_axes.pack(x, given, topk_idx, send_plan, results[0], rows, spec, config)
    return (sent, two_axes.across_slices_at_once(sent, spec), *fan, source, *results)


def _slices_dispatch_done(call: Call, x: jax.Array, pending: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    spec, wire, config = call.spec, call.wire, call.config
    received, *rest = pending[1:]
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        arrivals = headers.Arrivals(*rest)
        staged = two_axes.fan_out_by_headers(received, arrivals, rows.record, spec, config)
        return from_headers(staged, arrivals, rows, spec, config)
    fan, (source, *known) = rest[: len(two_axes.FanOut._fields)], rest[len(two_axes.FanOut._fields) :]
    staged = two_axes.fan_out(received, two_axes.FanOut(*fan), plan.dispatch_staging_rows(spec), spec, config)
    placed = place_rows(staged, source, known[1], rows, spec=spec, config=config)
    return (*with_scales(placed), *known)


def _slices_combine_start(
    call: Call, y: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array, weights: jax.Array
) -> tuple[jax.Array, ...]:
    sums = Sums.of(call, y)
    rows, zero = sums.prepared(y, recv_counts)
    sent, _, last = two_axes.partial_sums(sums, rows, weights, topk_idx, positions, zero)
    return sent, two_axes.across_slices_at_once(sent, call.spec), last, zero
