"""Values to the rows that (source, token) pairs name: `out[index[s, n]] = value[s, n]`, in SMEM.

What moves: the pairs' rows and values, block by block through VMEM. Most pairs name no place, or few: pairs that do are
brought together there, most rows first (`order_pairs.ordered`), go to SMEM as a table while the next block is ordered,
and are written one by one into windows of the results, which fit SMEM. So only rows that exist cost scalar work. Every
window looks at all pairs: results are few windows large. Where a device has two cores, each takes one half of the
blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch, divided
from xen_moe_jax.pallas_kernels.order_pairs import (
    BLOCK,
    SUBLANES,
    copy_now,
    counted_by_depth,
    for_each_entry,
    ordered,
    packed,
)
from xen_moe_jax.pallas_kernels.record import LANES

MOST_SLOTS = 32
"""Rows of one pair that are brought together at most; a pair with more slots is several pairs."""


@dataclasses.dataclass(frozen=True)
class _Refs:
    limit: Any
    given: Any
    fill: tuple[Any, ...]
    out: tuple[Any, ...]
    windows: tuple[Any, ...]
    lines: Any
    table: Any
    copied: Any
    moved: Any


LISTS = ("fill", "out", "windows")


def _refs(count: int, **named: Any) -> _Refs:
    lists = {name: tuple(named.pop(f"{name}{i}") for i in range(count)) for name in LISTS}
    return _Refs(**named, **lists)


@dataclasses.dataclass(frozen=True)
class _Static:
    """Attributes:
    slots, block, blocks, window: sizes. wide: for each result True if it has a value for each slot, False if for each
      pair.
    """

    slots: int
    block: int
    blocks: int
    window: int
    wide: tuple[bool, ...]

    def first_line(self, value: int) -> int:
        """Line of a table, and of the operands, at which a value begins; the rows come first."""
        return self.slots + sum(self.slots if wide else 1 for wide in self.wide[:value])

    @property
    def counts(self) -> int:
        return self.first_line(len(self.wide))

    @property
    def lines(self) -> int:
        """Lines of a table: rows and values; and for each number of rows the pairs that have more."""
        return -(-(self.counts + 1) // SUBLANES) * SUBLANES


def _table(refs: _Refs, static: _Static, first: Any, there: Any, slot: Any) -> None:
    """Makes the table of a block, of rows that lie in this window."""
    given = refs.given[...]
    rows = given[: static.slots] - first
    used = (rows >= 0) & (rows < static.window) & there
    wide = [n for n, is_wide in enumerate(static.wide) if is_wide]
    at = [static.first_line(n) for n in range(len(static.wide))]
    slotted, depth = packed(used, rows, *(given[at[n] : at[n] + static.slots] for n in wide))
    of_slots = dict(zip(wide, slotted[1:], strict=True))
    values = [of_slots.get(n, given[at[n] : at[n] + 1]) for n in range(len(static.wide))]
    empty = jnp.zeros((static.lines - static.counts, static.block), jnp.int32)
    lines = ordered(static.slots - depth, static.slots + 1, jnp.concatenate([slotted[0], *values, empty], axis=0))
    counts = counted_by_depth(depth, static.slots)
    for n in range(static.counts + 1):
        line = counts if n == static.counts else lines[n : n + 1]
        refs.lines[slot, :, n * static.block : (n + 1) * static.block] = line


def _write(refs: _Refs, static: _Static, slot: Any) -> None:
    """Writes the entries of a table into the windows."""

    def known(line: Any, n: Any) -> Any:
        return refs.table[slot, line * static.block + n]

    def put(s: Any, n: Any, _: int) -> None:
        at = known(s, n)
        for value, (rows, wide) in enumerate(zip(refs.windows, static.wide, strict=True)):
            line = static.first_line(value)
            rows[0, at] = known(line + s if wide else line, n)

    for_each_entry(lambda s: known(static.counts, s), static.slots, put)


def _body(refs: _Refs, *, static: _Static) -> None:
    """Body of the kernel. There is one step more than blocks: each step makes a table and writes the entries of the
    previous table."""
    core, part, turn = (pl.program_id(n) for n in range(3))
    turns = pl.num_programs(2) - 1
    first = part * static.window
    wanted = first < refs.limit[0]

    def copy(slot: Any) -> Any:
        return pltpu.make_async_copy(refs.lines.at[slot, 0], refs.table.at[slot], refs.copied.at[slot])

    @pl.when(turn == 0)
    def _() -> None:
        for fill, rows in zip(refs.fill, refs.windows, strict=True):
            copy_now(fill.at[0], rows, refs.moved)

    @pl.when(wanted & (turn < turns))
    def _() -> None:
        slot = lax.rem(turn, 2)
        _table(refs, static, first, core * turns + turn < static.blocks, slot)
        copy(slot).start()

    @pl.when(wanted & (turn > 0))
    def _() -> None:
        slot = lax.rem(turn + 1, 2)
        copy(slot).wait()
        _write(refs, static, slot)

    @pl.when(turn == turns)
    def _() -> None:
        for rows, out in zip(refs.windows, refs.out, strict=True):
            copy_now(rows, out.at[core, part], refs.moved)


def smem_bytes(slots: int, wide: Sequence[bool], window: int) -> int:
    """SMEM of the windows and of two tables."""
    static = _Static(min(slots, MOST_SLOTS), BLOCK, 0, window, tuple(wide))
    return 4 * (len(static.wide) * window + 2 * static.lines * static.block)


def scatter(
    index: jax.Array,
    values: Sequence[jax.Array],
    fill: Sequence[int],
    *,
    size: int,
    limit: jax.Array,
    window: int,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Scatters each of `values` into a result of its own.

    Args:
      index: int32 `[N, slots]`, place of each entry; outside `[0, size)` for none. No place is named twice.
      values: int32 each, `[N, slots]`, or `[N]` where all slots of a pair have the same value.
      fill: the value of each result elsewhere.
      limit: int32 `[]`, no place at or after it is named.
      window: rows that the kernel makes at a time, a multiple of 128.

    Returns:
      int32 `[size]` each.
    """
    index = jnp.where(index < size, index, -1)
    if index.shape[1] > MOST_SLOTS:
        index, values = _divided_pairs(index, values)
    pairs, slots = index.shape
    window = min(window, -(-size // LANES) * LANES)
    windows = -(-size // window)
    block = min(BLOCK, -(-pairs // LANES) * LANES)
    blocks = -(-pairs // block)
    turns = divided(blocks, launch.cores)
    static = _Static(slots, block, blocks, window, tuple(v.ndim == 2 for v in values))
    given = jnp.concatenate([index.T, *(v.T if v.ndim == 2 else v[None] for v in values)], axis=0)
    pad = (0, -given.shape[0] % SUBLANES), (0, blocks * block - pairs)
    given = jnp.pad(given, pad, constant_values=-1)

    def block_of(core: Any, part: Any, turn: Any, *_: Any) -> Any:
        return 0, jnp.minimum(core * turns + jnp.minimum(turn, turns - 1), blocks - 1)

    count, words = len(values), static.lines * block
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    numbered = functools.partial(lambda name: [f"{name}{i}" for i in range(count)])
    out = launch.call(
        functools.partial(_body, static=static),
        functools.partial(_refs, count),
        ["limit", "given", *(n for name in LISTS for n in numbered(name)), "lines", "table", "copied", "moved"],
        name="xen_moe_scatter",
        remote=False,
        by_dma=True,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(launch.cores, windows, turns + 1),
            in_specs=[pl.BlockSpec((given.shape[0], block), block_of), *[hbm] * count],
            out_specs=[hbm] * count,
            scratch_shapes=[
                *[pltpu.SMEM((1, window), jnp.int32)] * count,
                pltpu.VMEM((2, 1, words), jnp.int32),
                pltpu.SMEM((2, words), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[((launch.cores, windows, 1, window), jnp.int32)] * count,
    )(limit.reshape(1), given, *(jnp.full((1, 1, window), f, jnp.int32) for f in fill))
    return tuple(_merged(a, f).reshape(-1)[:size] for a, f in zip(out, fill, strict=True))


def _merged(parts: jax.Array, fill: int) -> jax.Array:
    """Merges the cores' results: one core writes a place; every other core has `fill` there."""
    merged = parts[0]
    for part in parts[1:]:
        merged = jnp.where(part != fill, part, merged)
    return merged


def _divided_pairs(index: jax.Array, values: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Divides pairs of many slots into several of `MOST_SLOTS` each."""
    parts = -(-index.shape[1] // MOST_SLOTS)

    def divide(a: jax.Array) -> jax.Array:
        if a.ndim == 1:
            return jnp.repeat(a, parts)
        padded = jnp.pad(a, ((0, 0), (0, parts * MOST_SLOTS - a.shape[1])), constant_values=-1)
        return padded.reshape(-1, MOST_SLOTS)

    return divide(index), [divide(v) for v in values]
