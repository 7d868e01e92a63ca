"""How an operation is cut into thread blocks, parts and segments. Tuning only: any schedule gives the same bits.

Every rank must choose the same schedule, so it depends on static shapes and the mesh alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec

DEFAULT_SMS = 64
WARPS = 16
"""Warps of a thread block; `kWarps` in cuda_kernels/workspace.h."""
MIN_PART_ELEMENTS = 512
SOLO_ENTRIES = 2048
"""Up to so many (source, token, slot) triples every block computes positions for itself: no barrier between blocks."""
SOLO_BYTES = 40 * 1024
"""Shared memory of a block for positions; `kLayoutSharedBytes` in cuda_kernels/layout.cuh."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a tuning run may vary. None: the default of `dispatch` and `combine` below."""

    push_blocks: int | None = None
    layout_blocks: int | None = None
    parts: int | None = None
    solo_layout: bool | None = None


_tuning = Tuning()


@contextlib.contextmanager
def tuned(**values: Any) -> Iterator[None]:
    """For tuning scripts: programs lowered inside use these values. Not part of the public API."""
    global _tuning
    before, _tuning = _tuning, Tuning(**values)
    try:
        yield
    finally:
        _tuning = before


@dataclasses.dataclass(frozen=True)
class Schedule:
    """See `struct Schedule` in cuda_kernels/params.h."""

    blocks: int
    push_blocks: int
    layout_blocks: int
    parts: int
    segment_tokens: int
    solo_layout: bool = False


def _blocks(config: KernelConfig, sms: int) -> int:
    return min(config.num_sms or DEFAULT_SMS, sms)


def _parts(items: int, most_items: int, hidden: int, config: KernelConfig) -> int:
    """Parts of a row: a power of two that makes at most `most_items` of `items` rows; 1 for large batches."""
    if _tuning.parts is not None:
        return _tuning.parts
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
    """Tokens of a segment when every block can compute all positions in its shared memory; None when it cannot."""
    per_source = max(1, WARPS // spec.num_ranks)
    segment = -(-spec.num_tokens // per_source)
    segments = spec.num_ranks * -(-spec.num_tokens // segment)
    columns = 1 if spec.layout == "ranked" else spec.local_experts
    words = spec.num_ranks * spec.num_tokens * spec.slots + columns * (segments + WARPS + 2)
    few = spec.num_ranks * spec.num_tokens * spec.slots <= SOLO_ENTRIES
    return segment if few and 4 * words <= SOLO_BYTES else None


def dispatch(spec: Spec, hidden: int, config: KernelConfig, sms: int, quantizes: bool = False) -> Schedule:
    """A few blocks saturate the link (8 reach 98% of it on an H200); the others place rows. Quantising takes more."""
    blocks = min(config.num_sms or (sms if quantizes and spec.num_tokens > 512 else DEFAULT_SMS), sms)
    small = spec.num_tokens <= 512
    if small:
        push = blocks // 2
    else:
        push = min(24, blocks * 3 // 8) if blocks >= 48 else min(8, blocks // 2)
    push = _within(_tuning.push_blocks or push, blocks)
    parts = _parts(spec.num_tokens, push * WARPS // 2, hidden, config)
    solo = _solo_segment(spec)
    if solo is not None and _tuning.solo_layout is not False:
        return Schedule(blocks, push, _within(-(-spec.num_tokens * spec.top_k // 512), blocks), parts, solo, True)
    counting = _within(_tuning.layout_blocks or blocks - push, blocks)
    tokens = spec.num_ranks * spec.num_tokens
    segment = max(-(-32 // spec.slots), -(-tokens // (counting * WARPS)))
    segments = spec.num_ranks * -(-spec.num_tokens // segment)
    counting = _within(-(-segments // WARPS), counting)
    return Schedule(blocks, push, counting, parts, segment)


def combine(spec: Spec, hidden: int, config: KernelConfig, sms: int) -> Schedule:
    """With 4 ranks, reducing and pushing reads three quarters of the rows, summing what arrives and the own quarter."""
    blocks = _blocks(config, sms)
    items = (spec.num_ranks - 1) * spec.num_tokens or spec.num_tokens
    small = items <= 4 * blocks * WARPS
    push = blocks // 2 if small else max(blocks * 3 // 8, min(16, blocks // 2))
    push = _within(_tuning.push_blocks or push, blocks)
    parts = _parts(items, 4 * push * WARPS, hidden, config)
    return Schedule(blocks, push, 1, parts, max(1, spec.num_tokens))
