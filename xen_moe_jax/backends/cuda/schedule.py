"""Divides an operation into thread blocks, parts and segments. Tuning only: any schedule gives the same bits.

Every rank must choose the same schedule, so it depends on static shapes and the mesh alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from xen_moe_jax import _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.cuda import module

DEFAULT_SMS = 64
TWO_RANKS_SMS = 96
"""SMs of a large dispatch or combine on two ranks, where half of all rows never cross the link (docs/lab/layers.md)."""
QUANTIZING_SMS = 96
"""SMs of an operation that quantizes a large batch: arithmetic, not the link, limits it."""
ASYNC_SMS = 24
"""SMs of an asynchronous operation: it takes every SM from the work that runs beside it."""
SPARE_SMS = 36
"""SMs that a default leaves free. XLA's collectives take up to 32, and run beside these operations. A thread block of a
collective that finds no SM would wait for a block of this library, which waits for a rank that waits for the
collective."""
MIN_PART_ELEMENTS = 512
SMALL_TOKENS = 512
SOLO_ENTRIES = 2048
"""Most (source, token, slot) triples for which every block computes all positions itself, without a barrier between
blocks."""


SEGMENT_SLOTS, SEGMENT_SLOTS_ALONE = 32, 256
"""Least slots that a warp counts in a dispatch over several ranks, and over one. The fewer slots a warp counts, the
more sums each expert has, which a warp adds up one after the other. On one rank a dispatch of the numbers of 4096
tokens takes 13 to 23 us less with 256 than with 32 (docs/lab/layers.md)."""
CHUNKS = 64
"""Chunks into which a rank divides the tokens that it sends to another node, while a chunk has at least
`MIN_CHUNK_TOKENS` and at most `USUAL_CHUNK_TOKENS` tokens."""
MIN_CHUNK_TOKENS = 4
USUAL_CHUNK_TOKENS = 16
"""Most tokens of a chunk by default. A chunk is one block's work, a token for each of its warps; with 32 tokens,
operations took as long or longer (docs/design/nodes_kernels.md)."""
HOP_BYTES = 128 << 10
"""Most bytes that a rank may send to other nodes beyond those of the rails for mode="auto" to take the low-latency
kernels there: about as much as a card of 400 Gb/s carries while a token crosses NVLink once more and its arrival is
seen. Worked out, not measured: docs/design/nodes_kernels.md."""
LOW_LATENCY_SMS = 96
LOW_LATENCY_ASYNC_SMS = 64
"""SMs of an asynchronous operation on a small batch: the matmuls of a small batch wait for memory, and lose little with
an SM."""
LOW_LATENCY_ROWS = 1536
"""Most tokens of all ranks for which mode="auto" takes the low-latency kernels. These were faster up to 512 tokens a
rank on four H200; more rows would take more symmetric memory than `xm.buffer_size_hint` promises."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """See `struct Schedule` in cuda_kernels/core/params.h."""

    blocks: int
    push_blocks: int
    layout_blocks: int
    parts: int
    segment_tokens: int
    solo_layout: bool = False
    bulk: bool = False
    low_latency: bool = False


def chunk_tokens(spec: Spec, config: KernelConfig, *, low_latency: bool = False) -> int:
    """Tokens that cross to another node together, by the kernels across nodes; 0: all ranks share NVLink.

    `low_latency`: the low-latency kernels run the operation, which send as few messages as they can.

    Raises:
      ValueError: there are more tokens than chunks can hold.
    """
    if not _nodes.several(spec.num_ranks, config):
        return 0
    tokens, most, chunks = spec.num_tokens, module.compiled().max_chunk_tokens, module.compiled().max_chunks
    if tokens > most * chunks:
        raise ValueError(
            f"KernelConfig.ranks_per_node={config.ranks_per_node} with num_tokens={tokens}: between nodes the CUDA "
            f"backend takes at most {most * chunks} tokens a rank; split the batch"
        )
    usual = min(USUAL_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, -(-tokens // CHUNKS)))
    wanted = config.chunk_tokens or (most if low_latency else usual)
    return min(most, max(wanted, -(-tokens // chunks)))


def use_low_latency(
    spec: Spec, hidden: int, dtype: Any, config: KernelConfig, *, wire: Wire | None, combine: bool = False
) -> bool:
    """True if the low-latency kernels (cuda_kernels/low_latency/) run a dispatch or combine of rows of this dtype.

    `hidden`: elements of a row; `wire`: the format in which rows travel, None for `dtype`; `combine`: False for a
    dispatch. The low-latency kernels can run every operation that WhyNotLowLatency of plan.cc does not refuse; the
    throughput kernels can run all operations.
    """
    nodes = _nodes.several(spec.num_ranks, config)
    few = spec.num_ranks * spec.num_tokens <= LOW_LATENCY_ROWS
    few &= not nodes or direct_extra_rows(spec, config) * hidden * jnp.dtype(dtype).itemsize <= HOP_BYTES
    wanted = config.mode == "low_latency" or (config.mode == "auto" and few)
    names = module.compiled()
    return wanted and not names.no_low_latency(
        combine=combine,
        ranks=spec.num_ranks,
        ranks_per_node=_nodes.ranks_per_node(spec, config),
        num_tokens=spec.num_tokens,
        top_k=spec.top_k,
        num_experts=spec.num_experts,
        hidden=hidden,
        layout=names.layouts.index(spec.layout),
        dtype=names.dtypes.index(jnp.dtype(dtype).name),
        wire=names.wires.index(wire.dtype if wire else ""),
        chunk_tokens=chunk_tokens(spec, config, low_latency=True),
    )


def direct_extra_rows(spec: Spec, config: KernelConfig) -> float:
    """Returns how many more rows a rank sends to other nodes if it sends a token's row to each rank there that needs it
    than if it sends the row once to each such node.

    The number is the expected one for uniformly chosen experts: the choice of kernels must not depend on the routing.
    """
    ranks, per_node = spec.num_ranks, _nodes.ranks_per_node(spec, config)

    def reached(share: float) -> float:  # a rank, or a node, that has this share of the experts
        return 1 - (1 - share) ** spec.top_k

    by_rank = (ranks - per_node) * reached(1 / ranks)
    by_node = (ranks // per_node - 1) * reached(per_node / ranks)
    return spec.num_tokens * (by_rank - by_node)


def _low_latency(spec: Spec, config: KernelConfig, sms: int, *, combine: bool) -> Schedule:
    """Schedules the low-latency kernels. Four blocks send the routing; a sixth of all blocks (in a combine, half) send
    rows; the remaining blocks receive. Between nodes the blocks that send the routing send the chunks too, and they are
    up to half of all blocks."""
    count = blocks(config, sms, LOW_LATENCY_SMS)
    push = _within(count // (2 if combine else 6), count)
    routing = min(4, count // 16)
    if chunk := chunk_tokens(spec, config, low_latency=True):
        far = spec.num_ranks - _nodes.ranks_per_node(spec, config)
        routing = min(count // 2, max(routing, far * -(-spec.num_tokens // chunk)))
    routing = 1 if combine else _within(routing, count)
    return Schedule(count, push, routing, 1, max(1, spec.num_tokens), low_latency=True)


def blocks(config: KernelConfig, sms: int, default: int = DEFAULT_SMS) -> int:
    """Returns the number of thread blocks, one for each SM: `config.num_sms`, but at most all `sms`; if that is not
    given, `default`, but `SPARE_SMS` fewer than all at most."""
    return min(config.num_sms, sms) if config.num_sms else max(1, min(default, sms - SPARE_SMS))


def for_async(config: KernelConfig, *, low_latency: bool = False) -> KernelConfig:
    """Returns the configuration of an asynchronous operation. `low_latency`: the low-latency kernels run it."""
    if config.num_sms:
        return config
    return dataclasses.replace(config, num_sms=LOW_LATENCY_ASYNC_SMS if low_latency else ASYNC_SMS)


def bulk(spec: Spec, config: KernelConfig, wire: Any, *, low_latency: bool = False) -> bool:
    """True if an asynchronous dispatch places rows by bulk copies: if it is large, stays within a node, and its rows
    travel unchanged."""
    large = spec.num_tokens > SMALL_TOKENS
    return large and wire is None and not low_latency and not _nodes.several(spec.num_ranks, config)


def _parts(items: int, most_items: int, hidden: int, config: KernelConfig) -> int:
    """Returns the number of parts into which each row is cut: a power of two for which `items` rows have at most
    `most_items` parts; 1 for large batches."""
    finest = max(1, min(16, hidden // MIN_PART_ELEMENTS))
    if config.mode == "low_latency":
        most_items *= 2
    parts = 1
    while config.mode != "throughput" and parts * 2 <= finest and items * parts * 2 <= most_items:
        parts *= 2
    return parts


def _within(value: int, most: int) -> int:
    return max(1, min(value, most))


def _solo_segment(spec: Spec) -> int | None:
    """Returns the tokens of a segment if every block can compute all positions in its shared memory, None if it
    cannot."""
    per_source = max(1, module.compiled().warps // spec.num_ranks)
    segment = -(-spec.num_tokens // per_source)
    segments = spec.num_ranks * -(-spec.num_tokens // segment)
    columns = 1 if spec.layout == "ranked" else spec.local_experts
    words = spec.num_ranks * spec.num_tokens * spec.slots + columns * (segments + module.compiled().warps + 2)
    few = spec.num_ranks * spec.num_tokens * spec.slots <= SOLO_ENTRIES
    return segment if few and 4 * words <= module.compiled().solo_layout_bytes else None


def dispatch(
    spec: Spec, hidden: int, config: KernelConfig, sms: int, *, wire: Wire | None = None, low_latency: bool = False
) -> Schedule:
    """Schedules a dispatch. A few blocks that push saturate the link (8 reach 98% of it on an H200 with long rows); the
    remaining blocks place rows. On a quantized wire more blocks push, because they quantize; on MXFP4 more than on fp8,
    because its rows take half as long on the link.

    `hidden`: elements of a row; `sms`: SMs of the GPU; `wire`: the format in which rows travel, None for their own
    dtype; `low_latency`: the low-latency kernels run the dispatch (`use_low_latency`).
    """
    if low_latency:
        return _low_latency(spec, config, sms, combine=False)
    small = spec.num_tokens <= SMALL_TOKENS
    large = QUANTIZING_SMS if wire else TWO_RANKS_SMS if spec.num_ranks == 2 else DEFAULT_SMS
    count = blocks(config, sms, DEFAULT_SMS if small else large)
    if small:
        push = count // 2
    elif count >= 48:
        push = min(48 if wire.is_mxfp4 else 24, count * 3 // 8) if wire else max(12, count // 5)
    else:
        push = min(8, count // 2)
    push = _within(push, count)
    parts = _parts(spec.num_tokens, push * module.compiled().warps // 2, hidden, config)
    solo = _solo_segment(spec)
    if solo is not None:
        return Schedule(count, push, _within(-(-spec.num_tokens * spec.top_k // 512), count), parts, solo, True)
    counting = max(1, count - push)
    tokens = spec.num_ranks * spec.num_tokens
    least = SEGMENT_SLOTS_ALONE if spec.num_ranks == 1 else SEGMENT_SLOTS
    segment = max(-(-least // spec.slots), -(-tokens // (counting * module.compiled().warps)))
    segments = spec.num_ranks * -(-spec.num_tokens // segment)
    counting = _within(-(-segments // module.compiled().warps), counting)
    return Schedule(count, push, counting, parts, segment)


def combine(
    spec: Spec, hidden: int, config: KernelConfig, sms: int, *, wire: Wire | None = None, low_latency: bool = False
) -> Schedule:
    """Schedules a combine. With 4 ranks, the blocks that reduce and push read three quarters of the rows, and the
    blocks that sum read the arrived rows and the own quarter. Of a large batch on two ranks a third of the blocks push,
    which the link suffices for, and on a quantized wire half of them, because they quantize.

    The arguments are those of `dispatch`.
    """
    if low_latency:
        return _low_latency(spec, config, sms, combine=True)
    large, two = spec.num_tokens > SMALL_TOKENS, spec.num_ranks == 2
    quantizes = wire is not None and large
    count = blocks(config, sms, QUANTIZING_SMS if quantizes else TWO_RANKS_SMS if two and large else DEFAULT_SMS)
    items = (spec.num_ranks - 1) * spec.num_tokens or spec.num_tokens
    small = items <= 4 * count * module.compiled().warps
    usual = max(count * 3 // 8, min(16, count * 5 // 8))
    push = max(count // 3, min(16, count // 2)) if two and large else count // 2 if small else usual
    if quantizes:
        push = max(push, count // 2)
    push = _within(push, count)
    parts = _parts(items, 4 * push * module.compiled().warps, hidden, config)
    return Schedule(count, push, 1, parts, max(1, spec.num_tokens))
