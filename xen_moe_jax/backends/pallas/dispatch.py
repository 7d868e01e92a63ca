"""Dispatch and redispatch on TPU: counts by one small all-gather, rows and their routing by remote DMA, placed by local
DMA.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.metadata import gather_metadata, place_slots, place_weights
from xen_moe_jax.backends.pallas import everybody, hardware, headers, padding, plan, tables, two_axes
from xen_moe_jax.pallas_kernels import place as place_kernel
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels.launch import Launch, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

LOW_LATENCY_TOKENS = 256
"""Up to this many tokens a rank, blocks are small, so that the first rows leave early."""


def dispatch(
    x: jax.Array,
    scales: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Results in the order of docs/design/internals.md."""
    padding.check("dispatch", x.dtype, spec, quantized=is_quantized(x))
    sent_scales = given_scales(x, scales)
    if gathers(spec, config) and everybody.serves(spec):
        sent = rows_of(x, wire, header=Header(spec.top_k).words)
        if everybody.fits(sent, spec, config):
            placed, known = everybody.dispatch(x, sent_scales, topk_idx, topk_weights, sent, spec=spec, config=config)
            return (*with_scales(placed), *known)
    topk_idx = _layout.sanitize(topk_idx, spec.num_experts)
    if headers.ride(spec):
        return _ridden(x, sent_scales, topk_idx, topk_weights, spec=spec, wire=wire, config=config)
    known, todo, source = routing(topk_idx, topk_weights, spec, config)
    rows = send_rows(x, sent_scales, topk_idx, known[:2], todo, source, spec=spec, wire=wire, config=config)
    return (*with_scales(rows), *known)


def _ridden(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Routing rides in the records."""
    riding = headers.sending(topk_idx, topk_weights, spec)
    rows = rows_of(x, wire, header=header_words(spec))
    gathered = gathers(spec, config)
    if gathered:
        riding = headers.to_everybody(riding, spec)
    if riding.crossing is not None:
        buffer = pack_for_slices(x, scales, riding, rows, spec, config)
        received = two_axes.across_slices(buffer, riding.crossing.largest, spec, config)
        staged = two_axes.fan_out_by_headers(
            received,
            riding.crossing.came,
            riding.crossing.starts,
            riding.routes.expected,
            record=rows.record,
            spec=spec,
            config=config,
        )
    else:
        staged = push_kernel.push(
            padding.pad_hidden(x),
            scales,
            riding.routes,
            record=rows.record,
            quantize=rows.quantize,
            axes=None if gathered else plan.kernel_axes(spec),
            launch=push_launch(rows, spec, config),
            header=riding.header,
        )
    if gathered:
        staged = headers.gathered(staged, spec)
    return from_headers(
        staged,
        riding.start,
        riding.routes.expected,
        riding.recv_counts,
        riding.dropped,
        topk_idx,
        rows=rows,
        spec=spec,
        config=config,
    )


def from_headers(
    staged: jax.Array,
    start: jax.Array,
    expected: jax.Array,
    recv_counts: jax.Array,
    dropped: jax.Array,
    topk_idx: jax.Array,
    *,
    rows: Rows,
    spec: Spec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Results of a dispatch, out of records with headers: `expected [R]` of each source, from `start [R]` on.

    `dropped` as in `headers.Riding`.
    """
    source, weights, positions = headers.arrived(
        staged, start, expected, recv_counts, dropped, record=rows.record, spec=spec, config=config
    )
    if spec.layout != "ranked":
        placed = place_rows(staged, source, recv_counts, rows, spec=spec, config=config)
        return (*with_scales(placed), positions, recv_counts, weights.reshape(spec.row_dims), topk_idx)
    placed = place_rows(staged, source, recv_counts, rows, spec=spec, config=config, keep_header=True)
    weights, local_idx = headers.slots_of_rows(placed[-1], source, spec)
    return (*with_scales(placed[:-1]), positions, recv_counts, weights, topk_idx, local_idx)


def pack_for_slices(
    x: jax.Array, scales: jax.Array | None, riding: headers.Riding, rows: Rows, spec: Spec, config: KernelConfig
) -> jax.Array:
    """int32 `[N, T, *record.shape]`: records with headers, the first for each slice."""
    return two_axes.pack_slices(
        padding.pad_hidden(x),
        scales,
        headers.slices_of(riding.sent, spec),
        record=rows.record,
        quantize=rows.quantize,
        spec=spec,
        launch=push_launch(rows, spec, config),
        header=riding.header,
    )


def is_quantized(x: Any) -> bool:
    """Whether the payload is a `BlockScaled`'s values."""
    return x.dtype.itemsize == 1


def given_scales(x: jax.Array, scales: jax.Array) -> jax.Array | None:
    """The payload's scales; None where it has none (the operand then has no columns)."""
    return scales if is_quantized(x) else None


def with_scales(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Rows and their scales: an array without columns where there are none."""
    return rows if len(rows) == 2 else (*rows, jnp.zeros((*rows[0].shape[:-1], 0), jnp.float32))


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
    bits = lax.all_gather(bits, spec.axis_name)
    source, weights = tables.scattered(positions, [(todo.staged, -1), (bits, 0)], recv_counts, spec, config)
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
    x: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> jax.Array:
    """A new payload on a known routing: rows keep their places also where ranks have gone out since, so that they
    follow from `positions`, not from counts.
    """
    padding.check("redispatch", x.dtype, spec)
    todo = plan.dispatch_plan(topk_idx, positions, spec)
    (source,) = tables.scattered(positions, [(todo.staged, -1)], recv_counts, spec, config)
    known = positions, recv_counts
    (rows,) = send_rows(x, None, topk_idx, known, todo, source, spec=spec, wire=wire, config=config)
    return rows


def record_of(hidden: int, dtype, scaled: bool, wire: Wire | None, header: int = 0) -> Record:
    """What a row of `hidden` elements, rounded up to whole blocks, looks like on the wire, with `header` words."""
    hidden = -(-hidden // LANES) * LANES
    if wire is not None:
        return Record(hidden, wire.dtype, scaled=True, header=header)
    return Record(hidden, jnp.dtype(dtype).name, scaled=scaled, header=header)


def header_words(spec: Spec) -> int:
    """Words of routing that travel in each record of a dispatch."""
    return Header(spec.top_k).words if headers.ride(spec) else 0


class Rows(NamedTuple):
    """What the rows of a dispatch are, before and after they travel.

    Attributes:
      hidden, dtype: as given. scaled: scales travel with them, and arrive.
      record: a row on the wire. quantize: (dtype, scale format) to quantize to, or None.
    """

    hidden: int
    dtype: Any
    scaled: bool
    record: Record
    quantize: tuple[str, str] | None


def rows_of(x: Any, wire: Wire | None, header: int = 0) -> Rows:
    """Of `x [T, H]`, an array or its aval; `header` words travel with each."""
    scaled = is_quantized(x)
    return Rows(x.shape[1], x.dtype, scaled, record_of(x.shape[1], x.dtype, scaled, wire, header), quantization(wire))


def quantization(wire: Wire | None) -> tuple[str, str] | None:
    return None if wire is None else (wire.dtype, wire.scale_format)


def send_rows(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    known: tuple[jax.Array, ...],
    todo: plan.SendPlan,
    source: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Rows (and scales) of `routed.x`; those past the last group are unspecified."""
    if spec.capacity == 0 or spec.num_tokens == 0:
        return padding.empty_rows(x, scales, spec)
    rows = rows_of(x, wire)
    x = padding.pad_hidden(x)
    positions, recv_counts = known
    launch = push_launch(rows, spec, config)
    if len(spec.axis_name) == 2:
        staged = two_axes.push(
            x,
            scales,
            topk_idx,
            todo,
            positions,
            record=rows.record,
            quantize=rows.quantize,
            spec=spec,
            config=config,
            launch=launch,
        )
    else:
        staged = push_kernel.push(
            x,
            scales,
            todo.routes,
            record=rows.record,
            quantize=rows.quantize,
            axes=plan.kernel_axes(spec),
            launch=launch,
        )
    return place_rows(staged, source, recv_counts, rows, spec=spec, config=config)


def low_latency(spec: Spec, config: KernelConfig) -> bool:
    if config.mode == "auto":
        return spec.num_tokens <= LOW_LATENCY_TOKENS
    return config.mode == "low_latency"


def gathers(spec: Spec, config: KernelConfig) -> bool:
    """Whether every rank gets every record, by XLA's all-gather: few tokens, of which each reaches most ranks anyway.

    With at most as many ranks as slots a token reaches `R (1 - (1 - 1/R)^K)` of them, more than `0.63 R`; an all-gather
    sends each record over each link once, an all-to-all once for every destination behind it.
    """
    return len(spec.axis_name) == 1 and low_latency(spec, config) and spec.num_ranks <= spec.top_k


def push_launch(rows: Rows, spec: Spec, config: KernelConfig) -> Launch:
    smallest = tile_rows(rows.dtype)
    return hardware.launch(
        "push",
        functools.partial(push_kernel.vmem_bytes, rows.record, rows.dtype, rows.scaled),
        preferred=smallest if low_latency(spec, config) else 64,
        smallest=smallest,
        available=spec.num_tokens,
        config=config,
        axes=plan.kernel_axes(spec),
    )


def place_rows(
    staged: jax.Array,
    source: jax.Array,
    recv_counts: jax.Array,
    like: Rows,
    *,
    spec: Spec,
    config: KernelConfig,
    keep_header: bool = False,
) -> tuple[jax.Array, ...]:
    """Staged records -> rows of `routed.x`, in its shape; then their scales, and their headers, where asked."""
    launch = hardware.launch(
        "place",
        functools.partial(place_kernel.vmem_bytes, like.record, like.dtype, like.scaled, keep_header),
        preferred=16 if low_latency(spec, config) else 128,  # an expert's few rows are decoded with their whole block
        smallest=tile_rows(like.dtype),
        available=source.shape[0],
        config=config,
    )
    blocks = -(-source.shape[0] // launch.block)
    hardware.check_smem("place", place_kernel.smem_bytes(blocks, launch.block), "pass a smaller capacity")
    rows = place_kernel.place(
        staged,
        source,
        _layout.used_rows(recv_counts, spec).reshape(-1),
        record=like.record,
        out_dtype=like.dtype,
        keep_scales=like.scaled,
        padding_rows=spec.alignment > 1,
        launch=launch,
        keep_header=keep_header,
    )
    return tuple(r[:, : like.hidden if i == 0 else None].reshape(*spec.row_dims, -1) for i, r in enumerate(rows))
