"""Dispatch and redispatch on TPU: metadata by one small all-gather, rows by remote DMA, placed by local DMA."""

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
from xen_moe_jax.backends.pallas import hardware, padding, plan, two_axes
from xen_moe_jax.pallas_kernels import place as place_kernel
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels.launch import Launch, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Record

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
    """Results in the order of docs/internals.md."""
    padding.check("dispatch", x.dtype, spec, quantised=is_quantised(x))
    positions, recv_counts, *rest = metadata(topk_idx, topk_weights, spec)
    rows = send_rows(x, given_scales(x, scales), topk_idx, positions, recv_counts, spec=spec, wire=wire, config=config)
    return (*with_scales(rows), positions, recv_counts, *rest)


def is_quantised(x: Any) -> bool:
    """Whether the payload is a `BlockScaled`'s values."""
    return x.dtype.itemsize == 1


def given_scales(x: jax.Array, scales: jax.Array) -> jax.Array | None:
    """The payload's scales; None where it has none (the operand then has no columns)."""
    return scales if is_quantised(x) else None


def with_scales(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Rows and their scales: an array without columns where there are none."""
    return rows if len(rows) == 2 else (*rows, jnp.zeros((*rows[0].shape[:-1], 0), jnp.float32))


def metadata(topk_idx: jax.Array, topk_weights: jax.Array, spec: Spec) -> tuple[jax.Array, ...]:
    """Positions, counts, row weights and (ranked) local ids, as docs/internals.md lists them."""
    rank = lax.axis_index(spec.axis_name)
    routing, weights, _pairs = gather_metadata(topk_idx, topk_weights, spec)
    layout = _layout.recv_layout(routing.topk_idx, routing.order, routing.counts, rank, spec)
    results = (layout.positions, layout.recv_counts, place_weights(weights, layout, spec))
    if spec.layout == "ranked":
        return (*results, place_slots(layout.local_idx, layout.positions, spec, fill=-1))
    return results


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
    """A new payload on a known routing."""
    padding.check("redispatch", x.dtype, spec)
    (rows,) = send_rows(x, None, topk_idx, positions, recv_counts, spec=spec, wire=wire, config=config)
    return rows


def record_of(hidden: int, dtype, scaled: bool, wire: Wire | None) -> Record:
    """What a row of `hidden` elements, rounded up to whole blocks, looks like on the wire."""
    hidden = -(-hidden // LANES) * LANES
    if wire is not None:
        return Record(hidden, wire.dtype, scaled=True)
    return Record(hidden, jnp.dtype(dtype).name, scaled=scaled)


class Rows(NamedTuple):
    """What the rows of a dispatch are, before and after they travel.

    Attributes:
      hidden, dtype: as given. scaled: scales travel with them, and arrive.
      record: a row on the wire. quantise: (dtype, scale format) to quantise to, or None.
    """

    hidden: int
    dtype: Any
    scaled: bool
    record: Record
    quantise: tuple[str, str] | None


def rows_of(x: Any, wire: Wire | None) -> Rows:
    """Of `x [T, H]`, an array or its aval."""
    scaled = is_quantised(x)
    return Rows(x.shape[1], x.dtype, scaled, record_of(x.shape[1], x.dtype, scaled, wire), quantisation(wire))


def quantisation(wire: Wire | None) -> tuple[str, str] | None:
    return None if wire is None else (wire.dtype, wire.scale_format)


def send_rows(x, scales, topk_idx, positions, recv_counts, *, spec: Spec, wire: Wire | None, config: KernelConfig):
    """Rows (and scales) of `routed.x`; those past the last group are unspecified."""
    if spec.capacity == 0 or spec.num_tokens == 0:
        return padding.empty_rows(x, scales, spec)
    rows = rows_of(x, wire)
    x = padding.pad_hidden(x)
    todo = plan.dispatch_plan(topk_idx, positions, spec)
    launch = push_launch(rows, spec, config)
    if len(spec.axis_name) == 2:
        staged = two_axes.push(
            x,
            scales,
            topk_idx,
            todo,
            positions,
            record=rows.record,
            quantise=rows.quantise,
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
            quantise=rows.quantise,
            axes=plan.kernel_axes(spec),
            launch=launch,
        )
    return place_rows(staged, todo.staged, positions, recv_counts, rows, spec=spec, config=config)


def low_latency(spec: Spec, config: KernelConfig) -> bool:
    if config.mode == "auto":
        return spec.num_tokens <= LOW_LATENCY_TOKENS
    return config.mode == "low_latency"


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
    staged_row: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    like: Rows,
    *,
    spec: Spec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Staged records -> rows of `routed.x`, in its shape."""
    pairs = jnp.broadcast_to(staged_row[..., None], positions.shape)
    source = place_slots(pairs, positions, spec, fill=-1, flat=True)
    rows = place_kernel.place(
        staged,
        source,
        _layout.used_rows(recv_counts, spec).reshape(-1),
        record=like.record,
        out_dtype=like.dtype,
        keep_scales=like.scaled,
        launch=hardware.launch(
            "place",
            functools.partial(place_kernel.vmem_bytes, like.record, like.dtype, like.scaled),
            preferred=128,
            smallest=tile_rows(like.dtype),
            available=source.shape[0],
            config=config,
        ),
    )
    return tuple(r[:, : like.hidden if i == 0 else None].reshape(*spec.row_dims, -1) for i, r in enumerate(rows))
