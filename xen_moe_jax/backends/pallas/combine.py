"""Combine on TPU: rows reduced in float32 on the expert rank, one partial record per (token, rank) back, reduced on
the token's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._config import KernelConfig, RowsInHalves
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import all_gather_dispatch, hardware, plan, records, two_axes
from xen_moe_jax.backends.pallas.records import quantization, record_of
from xen_moe_jax.backends.rounding import runtime_zero
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch, tile_rows
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK, Ordered
from xen_moe_jax.pallas_kernels.order_tokens import order_tokens
from xen_moe_jax.pallas_kernels.order_tokens import vmem_bytes as tables_bytes
from xen_moe_jax.pallas_kernels.record import LANES, Record


def combine(
    call: Call, y: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array, weights: jax.Array
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`; numerics in docs/design/internals.md."""
    spec, wire, config = call.spec, call.wire, call.config
    records.check("combine", y.dtype, spec)
    hidden = y.shape[-1]
    if y.size == 0 or spec.num_tokens == 0:
        return jnp.zeros((spec.num_tokens, hidden), y.dtype)
    rows, record, zero = prepared(y, recv_counts, wire)
    quantize = quantization(wire)
    if len(spec.axis_name) == 2:
        out = two_axes.combine(
            rows,
            weights.reshape(-1) if call.weighted else None,
            topk_idx,
            positions,
            zero,
            record=record,
            quantize=quantize,
            dtype=y.dtype,
            spec=spec,
            config=config,
            slots_launch=slots_launch(record, spec, config),
            ranks_launch=lambda entries, tokens: ranks_launch(record, y.dtype, entries, tokens, config),
        )
        return out[:, :hidden]
    pairs: slots_kernel.Pairs | Ordered
    source: jax.Array | ranks_kernel.Summands
    halved, few = reads_halves(rows, config), _few(record, spec, config)
    launch = slots_launch(record, spec, config, halved=halved)
    entries = spec.num_ranks if few else min(spec.num_ranks, spec.top_k)
    ranks = ranks_launch(record, y.dtype, entries, spec.num_tokens, config)
    if few:
        block = ranks_kernel.block_tokens(ranks, spec.num_tokens, y.dtype)
        pairs, source, zero = order_tokens(
            positions.swapaxes(1, 2),
            topk_idx.T,
            lax.axis_index(spec.axis_name).astype(jnp.int32).reshape(1),
            local_experts=spec.local_experts,
            block=block,
            group=slots_kernel.pairs_beside(launch.block),
            launch=_order_launch(spec, config),
        )
    else:
        todo = plan.combine_plan(topk_idx, positions, spec)
        pairs, source = todo.pairs, todo.source
    halves = not few and slots_kernel.halves_of_ranks(spec.num_ranks, spec.num_tokens, launch.cores)
    staged = slots_kernel.reduce_slots(
        rows,
        pairs,
        weights.reshape(-1) if call.weighted else None,
        zero,
        record=record,
        quantize=quantize,
        axes=plan.kernel_axes(spec),
        launch=launch,
        cores=launch.cores if halves else 1,
        halved=halved,
    )
    out = ranks_kernel.reduce_ranks(
        staged, source, zero, record=record, out_dtype=y.dtype, launch=ranks, tokens=spec.num_tokens
    )
    return out[:, :hidden]


def reads_halves(rows: jax.Array, config: KernelConfig) -> bool:
    """Returns True if `reduce_slots` reads `rows [C, H]` in halves: the config allows the experts' kernel to make them
    in this form, and on the chip being compiled for it does so."""
    made = isinstance(config, RowsInHalves) and hardware.makes_halves()
    return made and rows.dtype == jnp.bfloat16 and rows.shape[1] % (2 * LANES) == 0


def _few(record: Record, spec: Spec, config: KernelConfig) -> bool:
    """Returns True if one kernel makes the tables: few tokens, each with a place for every rank's record."""
    return (
        hardware.lowers_flat_arrays(config)
        and hardware.low_latency(spec, config)
        and all_gather_dispatch.few_records(spec.num_ranks, spec.num_tokens, spec.top_k, record)
        and spec.num_tokens <= BLOCK
        and _tables_bytes(spec) <= hardware.BLOCK_BUDGET
    )


def _tables_bytes(spec: Spec) -> int:
    return tables_bytes(spec.num_ranks, spec.slots, spec.num_tokens)


def _order_launch(spec: Spec, config: KernelConfig) -> Launch:
    return hardware.launch(
        "order_tokens", lambda block: _tables_bytes(spec), preferred=1, smallest=1, available=1, config=config
    )


def prepared(y: jax.Array, recv_counts: jax.Array, wire: Wire | None) -> tuple[jax.Array, Record, jax.Array]:
    """Returns `y` as rows that the kernels take, the record of a partial sum on the wire, and `zero [1]` for
    additions."""
    rows = records.pad_rows(records.pad_hidden(y.reshape(-1, y.shape[-1])))
    zero = lax.bitcast_convert_type(runtime_zero(recv_counts), jnp.int32).reshape(1)
    return rows, record_of(rows.shape[1], y.dtype, False, wire), zero


def slots_launch(record: Record, spec: Spec, config: KernelConfig, *, halved: bool = False) -> Launch:
    """Returns the launch of `reduce_slots`, which reads rows in halves with `halved`."""
    return hardware.launch(
        "reduce_slots",
        functools.partial(slots_kernel.vmem_bytes, record, spec.slots, halved=halved),
        preferred=32,  # half of the cost of a group of 16 is the same for a group of 32
        smallest=8,
        available=spec.num_ranks * spec.num_tokens,
        config=config,
        axes=plan.kernel_axes(spec),
        budget=max(hardware.BLOCK_BUDGET, hardware.generation().vmem_bytes // 3),
    )


def ranks_launch(record: Record, dtype, entries: int, tokens: int, config: KernelConfig) -> Launch:
    return hardware.launch(
        "reduce_ranks",
        functools.partial(ranks_kernel.vmem_bytes, record, dtype, entries),
        preferred=32,
        smallest=tile_rows(dtype),
        available=tokens,
        config=config,
    )
