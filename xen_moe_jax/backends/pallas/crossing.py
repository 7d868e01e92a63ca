"""Start and done on two axes. What travels meanwhile is XLA's all-to-all over DCN, the slow part.

    dispatch: pack -> [DCN] -> forward over ICI, place        combine: partial sums of a slice -> [DCN] -> add slices

XLA makes a send and a receive out of that collective, each with a start and an end of its own, and schedules them as
their data allow. So `overlap` must not order what the collective brings (`received`): it would be complete before the
other work begins. It orders what the collective takes and the tables that the done half reads.
One collective moves all `T` rows of every pair of slices, because a loop of rounds cannot be under way. Where there are
no more slices than slots most of these rows are needed: a token reaches `N (1 - (1 - 1/N)^K)` of `N` slices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax import _shapes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import headers, padding, plan, two_axes
from xen_moe_jax.backends.pallas.combine import prepared, ranks_launch, slots_launch
from xen_moe_jax.backends.pallas.dispatch import (
    from_headers,
    given_scales,
    header_words,
    pack_for_slices,
    place_rows,
    push_launch,
    quantization,
    record_of,
    routing,
    rows_of,
    with_scales,
)
from xen_moe_jax.pallas_kernels.record import Record


class Crossing(NamedTuple):
    """What a start returns first: int32 `[N, T, *record.shape]` both, what XLA's collective takes and what it brings.

    `sent` comes first, for `overlap` knows a flight by its first array and gives each back as another one.
    """

    sent: jax.Array
    received: jax.Array


RECEIVED = (Crossing._fields.index("received"),)


def suits(spec: Spec) -> bool:
    """Whether most of what one collective moves is needed."""
    return spec.axis_sizes[0] <= spec.top_k


def _crossing_shapes(record: Record, spec: Spec) -> list[ShapeDtype]:
    shape = (spec.axis_sizes[0], spec.num_tokens, *record.shape)
    return [(shape, jnp.int32), (shape, jnp.int32)]


def dispatch_pending(x: Any, scales: Any, *, spec: Spec, wire: Wire | None) -> list[ShapeDtype]:
    """Of `Crossing`, then `Riding`, or without headers `Fan`, `source [rows]` and the metadata of a dispatch."""
    record = rows_of(x, wire, header=header_words(spec)).record
    if record.header:
        return [*_crossing_shapes(record, spec), *_riding_shapes(spec)]
    slices, fast = spec.axis_sizes
    table = (slices * spec.num_tokens, fast)
    fan = [(slices, spec.num_tokens), table, table, (fast,), (math.prod(spec.row_dims),)]
    return [
        *_crossing_shapes(record, spec),
        *((shape, jnp.int32) for shape in fan),
        *_shapes.dispatch(x, scales, spec=spec)[2:],
    ]


def combine_pending(y: Any, *, spec: Spec, wire: Wire | None) -> list[ShapeDtype]:
    """Of `Crossing`, `last [T, N]` and `zero [1]`."""
    record = record_of(y.shape[-1], y.dtype, False, wire)
    last = (spec.num_tokens, spec.axis_sizes[0])
    return [*_crossing_shapes(record, spec), (last, jnp.int32), ((1,), jnp.int32)]


class Riding(NamedTuple):
    """What a start of a dispatch returns after `Crossing` where routing rides in the records; as in `headers`.

    Attributes:
      came, starts: of `headers.Crossing`. expected: int32 `[R]`. start, recv_counts, dropped: of `headers.Riding`.
      topk_idx: a result.
    """

    came: jax.Array
    starts: jax.Array
    expected: jax.Array
    start: jax.Array
    recv_counts: jax.Array
    dropped: jax.Array
    topk_idx: jax.Array


def _riding_shapes(spec: Spec) -> list[ShapeDtype]:
    slices, fast = spec.axis_sizes
    ranks, local = spec.num_ranks, spec.local_experts
    dropped = headers.dropped_shape(spec)
    shapes = [(slices,), (slices, fast), (ranks,), (ranks,), (ranks, local), dropped, (spec.num_tokens, spec.top_k)]
    return [(shape, jnp.int32) for shape in shapes]


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
    given = given_scales(x, scales)
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        known = headers.sending(topk_idx, topk_weights, spec)
        assert known.crossing is not None
        sent = pack_for_slices(x, given, known, rows, spec, config)
        came, _, starts = known.crossing
        riding = Riding(came, starts, known.routes.expected, known.start, known.recv_counts, known.dropped, topk_idx)
        return (sent, two_axes.across_slices_at_once(sent, spec), *riding)
    results, todo, source = routing(topk_idx, topk_weights, spec, config)
    sent, _, fan = two_axes.pack(
        padding.pad_hidden(x),
        given,
        topk_idx,
        todo,
        results[0],
        record=rows.record,
        quantize=rows.quantize,
        spec=spec,
        launch=push_launch(rows, spec, config),
    )
    return (sent, two_axes.across_slices_at_once(sent, spec), *fan, source, *results)


def dispatch_done(
    x: jax.Array, pending: tuple[jax.Array, ...], *, spec: Spec, wire: Wire | None, config: KernelConfig
) -> tuple[jax.Array, ...]:
    received, *rest = pending[1:]
    rows = rows_of(x, wire, header=header_words(spec))
    if rows.record.header:
        riding = Riding(*rest)
        staged = two_axes.fan_out_by_headers(
            received,
            riding.came,
            riding.starts,
            riding.expected,
            record=rows.record,
            spec=spec,
            config=config,
        )
        return from_headers(
            staged,
            riding.start,
            riding.expected,
            riding.recv_counts,
            riding.dropped,
            riding.topk_idx,
            rows=rows,
            spec=spec,
            config=config,
        )
    fan, (source, *known) = rest[: len(two_axes.Fan._fields)], rest[len(two_axes.Fan._fields) :]
    staged = two_axes.fan_out(received, two_axes.Fan(*fan), plan.dispatch_staging_rows(spec), spec, config)
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
    rows, record, zero = prepared(y, recv_counts, wire)
    sent, _, last = two_axes.partial_sums(
        rows,
        weights.reshape(-1) if weighted else None,
        topk_idx,
        positions,
        zero,
        record=record,
        quantize=quantization(wire),
        dtype=y.dtype,
        spec=spec,
        slots_launch=slots_launch(record, spec, config),
        ranks_launch=lambda entries, tokens: ranks_launch(record, y.dtype, entries, tokens, config),
    )
    return sent, two_axes.across_slices_at_once(sent, spec), last, zero


def combine_done(y: jax.Array, pending: tuple[jax.Array, ...], *, wire: Wire | None, config: KernelConfig) -> jax.Array:
    _, received, last, zero = pending
    hidden = y.shape[-1]
    record = record_of(hidden, y.dtype, False, wire)
    out = two_axes.add_slices(
        received,
        last,
        zero,
        record=record,
        dtype=y.dtype,
        ranks_launch=lambda entries, tokens: ranks_launch(record, y.dtype, entries, tokens, config),
    )
    return out[:, :hidden]
