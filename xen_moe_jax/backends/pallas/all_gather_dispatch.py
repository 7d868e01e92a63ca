"""A dispatch of few tokens on TPU: one all-gather sends all records to every rank, and each rank finds its own slots.

Nothing is exchanged before the records: a rank counts in the headers of all of them, and knows rows, positions and
counts like after any dispatch.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import hardware, records
from xen_moe_jax.backends.pallas.records import Rows
from xen_moe_jax.pallas_kernels import index_tokens as index_kernel
from xen_moe_jax.pallas_kernels import pack_tokens as pack_kernel
from xen_moe_jax.pallas_kernels import place as place_kernel
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, tile_rows
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK
from xen_moe_jax.pallas_kernels.record import LANES, Header, Record

GATHERED_BYTES = 8 * hardware.MIB
"""Records of all ranks where there are more ranks than slots. At the 100 GB/s of a corner of a v5e they take 84 us, an
estimate, and the tables of XLA that they save take 74 to 143."""
GATHERED_RANKS = 32
"""Most ranks where there are more of them than slots: the kernels' programs grow with the ranks."""


def gathers(spec: Spec, config: KernelConfig) -> bool:
    """Returns True if XLA's all-gather brings every record to every rank: few tokens, each of which reaches most ranks.

    With at most as many ranks as slots a token reaches `R (1 - (1 - 1/R)^K)` of them, more than `0.63 R`; an all-gather
    sends each record over each link once, an all-to-all once for every destination behind it.
    """
    return len(spec.axis_name) == 1 and hardware.low_latency(spec, config) and spec.num_ranks <= spec.top_k


def few_records(num_ranks: int, num_tokens: int, top_k: int, record: Record) -> bool:
    """Returns True if every rank can have a place for a record of every token of all ranks: there are no more ranks
    than slots, or the records are few.

    A token that reaches few of the ranks then costs more bytes, but no rank has to know how many records the others
    send: counts and addresses would take some fifty operations of XLA, each of more than a microsecond.
    """
    if num_ranks <= top_k:
        return True
    return num_ranks <= GATHERED_RANKS and num_ranks * num_tokens * record.bytes <= GATHERED_BYTES


def supports(spec: Spec, config: KernelConfig) -> bool:
    """Returns True if this module can run the dispatch: few tokens, and a row for every slot."""
    return (
        len(spec.axis_name) == 1
        and hardware.low_latency(spec, config)
        and spec.layout != "ranked"
        and 0 < spec.num_tokens <= BLOCK
        and spec.capacity > 0
        and Header(spec.top_k).words <= LANES
    )


def fits(rows: Rows, spec: Spec, config: KernelConfig) -> bool:
    """Returns True if the kernels can be lowered, and records and tables of all tokens of all ranks are few enough."""
    if not hardware.lowers_flat_arrays(config):
        return False
    if not few_records(spec.num_ranks, spec.num_tokens, spec.top_k, rows.record):
        return False
    slabs = _slabs(_place_launch(rows, spec, config), rows, spec)
    sizes = rows.record, spec.top_k, spec.num_ranks, spec.num_tokens, slabs
    return (
        index_kernel.smem_bytes(*sizes) <= hardware.SMEM_BUDGET
        and index_kernel.vmem_bytes(*sizes) <= hardware.BLOCK_BUDGET
    )


def dispatch(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    rows: Rows,
    *,
    spec: Spec,
    config: KernelConfig,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns rows (and scales), then positions, counts, weights and sanitised `topk_idx`: docs/design/internals.md."""
    # The tables are slots by tokens, as XLA keeps narrow ones: nothing is turned over outside of the kernels.
    experts = _layout.sanitize(topk_idx.T, spec.num_experts)
    packed = pack_kernel.pack_tokens(
        records.pad_hidden(x),
        scales,
        experts,
        topk_weights.T.astype(jnp.float32),
        record=rows.record,
        quantize=rows.quantize,
        launch=_pack_launch(rows, spec, config),
    )
    staged = lax.all_gather(packed, spec.axis_name)
    launch = _place_launch(rows, spec, config)
    slabs = _slabs(launch, rows, spec)
    first_expert = (lax.axis_index(spec.axis_name) * spec.local_experts).astype(jnp.int32).reshape(1)
    visits, weights, positions, recv_counts = index_kernel.index_tokens(
        staged,
        first_expert,
        record=rows.record,
        top_k=spec.top_k,
        slabs=slabs,
        launch=_index_launch(rows, spec, slabs, config),
    )
    placed = place_kernel.place_visits(
        staged,
        visits,
        rows=slabs.rows,
        record=rows.record,
        out_dtype=rows.dtype,
        keep_scales=rows.scaled,
        padding_rows=spec.alignment > 1,
        launch=launch,
    )
    placed = tuple(r[:, : rows.hidden if i == 0 else None].reshape(*spec.row_dims, -1) for i, r in enumerate(placed))
    return placed, (positions.swapaxes(1, 2), recv_counts, weights.reshape(spec.row_dims), experts.T)


def _slabs(launch: Launch, rows: Rows, spec: Spec) -> index_kernel.Slabs:
    slab = spec.num_ranks * spec.num_tokens if spec.layout == "padded" else 0
    count = math.prod(spec.row_dims)
    block = block_rows(launch.block, count, tile_rows(rows.dtype))
    return index_kernel.Slabs(spec.local_experts, block, count, slab, spec.alignment)


def _pack_launch(rows: Rows, spec: Spec, config: KernelConfig) -> Launch:
    smallest = tile_rows(rows.dtype)
    return hardware.launch(
        "pack_tokens",
        functools.partial(pack_kernel.vmem_bytes, rows.record, rows.dtype, rows.scaled, spec.num_tokens),
        preferred=smallest,
        smallest=smallest,
        available=spec.num_tokens,
        config=config,
    )


def _index_launch(rows: Rows, spec: Spec, slabs: index_kernel.Slabs, config: KernelConfig) -> Launch:
    need = index_kernel.vmem_bytes(rows.record, spec.top_k, spec.num_ranks, spec.num_tokens, slabs)
    return hardware.launch("index_tokens", lambda block: need, preferred=1, smallest=1, available=1, config=config)


def _place_launch(rows: Rows, spec: Spec, config: KernelConfig) -> Launch:
    """Launch of `place` that decodes an expert's few rows with their whole block."""
    return hardware.launch(
        "place",
        functools.partial(place_kernel.vmem_bytes, rows.record, rows.dtype, rows.scaled, False),
        preferred=16,
        smallest=tile_rows(rows.dtype),
        available=math.prod(spec.row_dims),
        config=config,
    )
