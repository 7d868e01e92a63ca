"""Dispatch and redispatch on TPU: counts by one small all-gather, rows and their routing by remote DMA, placed by local
DMA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig, RowsLater
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.metadata import gather_metadata, place_slots, place_weights
from xen_moe_jax.backends.pallas import all_gather_dispatch, headers, plan, records, tables, two_axes
from xen_moe_jax.backends.pallas.records import (
    Rows,
    given_scales,
    header_words,
    is_quantized,
    place_rows,
    push_records,
    rows_of,
    with_scales,
)
from xen_moe_jax.pallas_kernels.record import Header


def dispatch(
    call: Call, x: jax.Array, scales: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the results in the order of docs/design/internals.md."""
    spec, wire, config = call.spec, call.wire, call.config
    records.check("dispatch", x.dtype, spec, quantized=is_quantized(x))
    sent_scales = given_scales(x, scales)
    if all_gather_dispatch.supports(spec, config):
        sent = rows_of(x, wire, header=Header(spec.top_k).words)
        if all_gather_dispatch.fits(sent, spec, config):
            placed, known = all_gather_dispatch.dispatch(
                x, sent_scales, topk_idx, topk_weights, sent, spec=spec, config=config
            )
            return (*with_scales(placed), *known)
    topk_idx = _layout.sanitize(topk_idx, spec.num_experts)
    if isinstance(config, RowsLater):
        positions, recv_counts = tables.positions_of(topk_idx, spec)
        none = with_scales((jnp.zeros((*spec.row_dims, x.shape[1]), x.dtype),))
        return (*none, positions, recv_counts, jnp.zeros(spec.weights_shape, jnp.float32), topk_idx)
    if headers.used(spec):
        return _dispatch_with_headers(call, x, sent_scales, topk_idx, topk_weights)
    known, todo, source = routing(topk_idx, topk_weights, spec, config)
    rows = _send_rows(call, x, sent_scales, topk_idx, known[:2], todo, source)
    return (*with_scales(rows), *known)


def _dispatch_with_headers(
    call: Call, x: jax.Array, scales: jax.Array | None, topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, ...]:
    """Runs a dispatch whose records carry their routing."""
    spec, wire, config = call.spec, call.wire, call.config
    todo = headers.sending(topk_idx, topk_weights, spec)
    rows = rows_of(x, wire, header=header_words(spec))
    gathered = all_gather_dispatch.gathers(spec, config)
    if gathered:
        todo = headers.for_all_gather(todo, spec)
    known = todo.arrivals(topk_idx)
    if todo.slices is not None:
        buffer = pack_for_slices(x, scales, todo, rows, spec, config)
        received = two_axes.across_slices(buffer, todo.slices.largest, spec, config)
        staged = two_axes.fan_out_by_headers(received, known, rows.record, spec, config)
    else:
        axes = None if gathered else plan.kernel_axes(spec)
        staged = push_records(x, scales, todo.routes, rows, axes=axes, spec=spec, config=config, header=todo.header)
    if gathered:
        staged = headers.all_gathered(staged, spec)
    return from_headers(staged, known, rows, spec, config)


def from_headers(
    staged: jax.Array, known: headers.Arrivals, rows: Rows, spec: Spec, config: KernelConfig
) -> tuple[jax.Array, ...]:
    """Results of a dispatch, out of records with headers."""
    recv_counts, topk_idx = known.recv_counts, known.topk_idx
    source, weights, positions = headers.arrived(staged, known, record=rows.record, spec=spec, config=config)
    if spec.layout != "ranked":
        placed = place_rows(staged, source, recv_counts, rows, spec=spec, config=config)
        return (*with_scales(placed), positions, recv_counts, weights.reshape(spec.row_dims), topk_idx)
    placed = place_rows(staged, source, recv_counts, rows, spec=spec, config=config, keep_header=True)
    weights, local_idx = headers.slots_of_rows(placed[-1], source, spec)
    return (*with_scales(placed[:-1]), positions, recv_counts, weights, topk_idx, local_idx)


def pack_for_slices(
    x: jax.Array, scales: jax.Array | None, todo: headers.HeaderPlan, rows: Rows, spec: Spec, config: KernelConfig
) -> jax.Array:
    """int32 `[N, T, *record.shape]`: records with headers, the first for each slice."""
    own_hits = headers.slices_of(todo.sent, spec)
    return two_axes.pack_slices(x, scales, own_hits, rows, spec, config, header=todo.header)


def routing(
    topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec, config: KernelConfig
) -> tuple[tuple[jax.Array, ...], plan.SendPlan, jax.Array]:
    """Returns the results that docs/design/internals.md lists from the positions on (from sanitised `topk_idx`), the
    plan that follows from them, and the staged record of each row, int32 `[rows]`, `-1` for none.
    """
    if spec.layout == "ranked":
        return _ranked_routing(topk_idx, topk_weights, spec)
    positions, recv_counts = tables.positions_of(topk_idx, spec)
    todo = plan.dispatch_plan(topk_idx, positions, spec)
    bits = lax.bitcast_convert_type(topk_weights.astype(jnp.float32), jnp.int32)
    values = [(tables.of_all_ranks(bits, spec), 0), (todo.staged, -1)]
    weights, source = tables.scattered(positions, values, recv_counts, spec, config)
    weights = lax.bitcast_convert_type(weights, jnp.float32).reshape(spec.row_dims)
    return (positions, recv_counts, weights, topk_idx), todo, source


def _ranked_routing(
    topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec
) -> tuple[tuple[jax.Array, ...], plan.SendPlan, jax.Array]:
    rank = lax.axis_index(spec.axis_name)
    sources, weights, _pairs = gather_metadata(topk_idx, topk_weights, spec)
    layout = _layout.recv_layout(sources.topk_idx, sources.order, sources.counts, rank, spec)
    local_idx = place_slots(layout.local_idx, layout.positions, spec, fill=-1)
    known = layout.positions, layout.recv_counts, place_weights(weights, layout, spec), topk_idx, local_idx
    todo = plan.dispatch_plan(topk_idx, layout.positions, spec)
    return known, todo, place_slots(todo.staged[..., None], layout.positions, spec, fill=-1, flat=True)


def redispatch(
    call: Call, x: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array
) -> jax.Array:
    """Sends a new payload along a known routing.

    Rows keep their places even if ranks have become inactive since, so that places follow from `positions`, not from
    counts.
    """
    spec, config = call.spec, call.config
    records.check("redispatch", x.dtype, spec)
    todo = plan.dispatch_plan(topk_idx, positions, spec)
    (source,) = tables.scattered(positions, [(todo.staged, -1)], recv_counts, spec, config)
    known = positions, recv_counts
    (rows,) = _send_rows(call, x, None, topk_idx, known, todo, source)
    return rows


def _send_rows(
    call: Call,
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    known: tuple[jax.Array, ...],
    todo: plan.SendPlan,
    source: jax.Array,
) -> tuple[jax.Array, ...]:
    """Rows (and scales) of `routed.x`; rows past the last group are unspecified."""
    spec, config = call.spec, call.config
    if spec.capacity == 0 or spec.num_tokens == 0:
        return records.empty_rows(x, scales, spec)
    rows = rows_of(x, call.wire)
    positions, recv_counts = known
    if len(spec.axis_name) == 2:
        staged = two_axes.push(x, scales, topk_idx, todo, positions, rows, spec, config)
    else:
        axes = plan.kernel_axes(spec)
        staged = push_records(x, scales, todo.routes, rows, axes=axes, spec=spec, config=config)
    return place_rows(staged, source, recv_counts, rows, spec=spec, config=config)
