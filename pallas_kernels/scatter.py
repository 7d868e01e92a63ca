"""Scalars to the places that a table names: `out[index[i]] = value[i]`, in SMEM.

XLA scatters scalars at 6 to 12 bundles each; here one costs its loads and stores. The result is made in
windows that fit SMEM, and every window looks at all entries: results are few windows large, entries are many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch

UNROLLED = 16
NOBODYS = 128
"""Places behind a window, for entries that belong elsewhere."""


@dataclasses.dataclass(frozen=True)
class _Refs:
    limit: Any
    index: Any
    values: tuple[Any, ...]
    fill: tuple[Any, ...]
    out: tuple[Any, ...]
    windows: tuple[Any, ...]
    semaphore: Any


LISTS = ("values", "fill", "out", "windows")


def _refs(count: int, **named: Any) -> _Refs:
    lists = {name: tuple(named.pop(f"{name}{i}") for i in range(count)) for name in LISTS}
    return _Refs(**named, **lists)


def _body(refs: _Refs, *, window: int, several: bool) -> None:
    step, steps = pl.program_id(1), pl.num_programs(1)
    first = pl.program_id(0) * window

    def copy(source: Any, target: Any) -> None:
        dma = pltpu.make_async_copy(source, target, refs.semaphore)
        dma.start()
        dma.wait()

    @pl.when(step == 0)
    def _() -> None:
        for fill, rows in zip(refs.fill, refs.windows, strict=True):
            copy(fill.at[0], rows)

    @pl.when(first < refs.limit[0])
    def _() -> None:
        @pl.loop(0, refs.index.shape[2] // UNROLLED)
        def _(i: Any) -> None:
            for n in range(UNROLLED):
                at = refs.index[0, 0, i * UNROLLED + n]
                if several:
                    at = at - first
                    at = jnp.where((at >= 0) & (at < window), at, window)
                for values, rows in zip(refs.values, refs.windows, strict=True):
                    rows[0, at] = values[0, 0, i * UNROLLED + n]

    @pl.when(step == steps - 1)
    def _() -> None:
        for rows, out in zip(refs.windows, refs.out, strict=True):
            copy(rows, out.at[pl.program_id(0)])


def smem_bytes(count: int, window: int, block: int) -> int:
    """SMEM of `count` results: their windows, and two blocks of entries of each and of the index."""
    return 4 * (count * (window + NOBODYS) + 2 * (count + 1) * block)


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
    """One result for each of `values`.

    Args:
      index: int32 `[N]`, place of each entry; outside `[0, size)` for none. No place is named twice.
      values: int32 `[N]` each.
      fill: what each result holds elsewhere.
      limit: int32 `[]`, no place at or after it is named.
      window: rows that are made at a time, a multiple of 128.

    Returns:
      int32 `[size]` each.
    """
    count, n = len(values), index.shape[0]
    window = min(window, -(-size // NOBODYS) * NOBODYS)
    windows = -(-size // window)
    if windows == 1:  # what is outside goes to the place behind the window, which is nobody's
        index = jnp.where((index >= 0) & (index < size), index, window)
    block = min(launch.block, -(-n // UNROLLED) * UNROLLED)
    steps = -(-n // block)
    pad = steps * block - n
    tables = [jnp.pad(a, (0, pad), constant_values=windows * window).reshape(steps, 1, block) for a in (index, *values)]
    smem = pl.BlockSpec((1, 1, block), lambda w, i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    numbered = functools.partial(lambda name: [f"{name}{i}" for i in range(count)])
    out = launch.call(
        functools.partial(_body, window=window, several=windows > 1),
        functools.partial(_refs, count),
        ["limit", "index", *(n for name in LISTS for n in numbered(name)), "semaphore"],
        name="xen_moe_scatter",
        remote=False,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(windows, steps),
            in_specs=[smem] * (1 + count) + [hbm] * count,
            out_specs=[hbm] * count,
            scratch_shapes=[*[pltpu.SMEM((1, window + NOBODYS), jnp.int32)] * count, pltpu.SemaphoreType.DMA],
        ),
        out_shape=[((windows, 1, window + NOBODYS), jnp.int32)] * count,
    )(limit.reshape(1), *tables, *(jnp.full((1, 1, window + NOBODYS), f, jnp.int32) for f in fill))
    return tuple(a[:, 0, :window].reshape(-1)[:size] for a in out)
