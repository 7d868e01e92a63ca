"""Combine on TPU: rows reduced in float32 on the expert rank, one partial record per (token, rank) back, reduced on
the token's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import all_gather_dispatch, hardware, plan, records, two_axes
from xen_moe_jax.backends.pallas.sums import Sums
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK, Ordered
from xen_moe_jax.pallas_kernels.order_tokens import order_tokens
from xen_moe_jax.pallas_kernels.order_tokens import vmem_bytes as tables_bytes
from xen_moe_jax.pallas_kernels.record import Record


def combine(
    call: Call, y: jax.Array, topk_idx: jax.Array, positions: jax.Array, recv_counts: jax.Array, weights: jax.Array
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`; numerics in docs/design/internals.md."""
    spec, config = call.spec, call.config
    records.check("combine", y.dtype, spec)
    if y.size == 0 or spec.num_tokens == 0:
        return jnp.zeros((spec.num_tokens, y.shape[-1]), y.dtype)
    sums = Sums.of(call, y)
    rows, zero = sums.prepared(y, recv_counts)
    if len(spec.axis_name) == 2:
        return two_axes.combine(sums, rows, weights, topk_idx, positions, zero)
    pairs: slots_kernel.Pairs | Ordered
    source: jax.Array | ranks_kernel.Summands
    halved, few = sums.reads_halves(rows), _few(sums.record, spec, config)
    launch = sums.slots_launch(halved=halved)
    entries = spec.num_ranks if few else min(spec.num_ranks, spec.top_k)
    ranks = sums.ranks_launch(entries, spec.num_tokens)
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
    cores, axes = launch.cores if halves else 1, plan.kernel_axes(spec)
    staged = sums.of_slots(rows, pairs, weights, zero, launch, axes=axes, cores=cores, halved=halved)
    return sums.of_ranks(staged, source, zero, ranks, tokens=spec.num_tokens)


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
