"""Who may write into whom, and when.

A remote DMA may start only once the target is inside the same kernel: before that, XLA may use the target's buffer
for something else. `announce` tells every peer "I am in", `await_peers` waits until all have said so.

The barrier semaphore is one counter shared by all peers, so a fast rank's announcement for the *next* operation could
be taken for a slow rank's announcement for this one. `leave` prevents that: no rank leaves a kernel before every peer
has passed its `await_peers`. Those credits arrive while rows travel, so nobody waits for them in practice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

WAIT_BATCH = 8
"""Rows that one semaphore wait covers where possible: fewer scalar instructions than row by row."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The ranks that a kernel spans: mesh axes inside one slice, slowest first, and their sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def device_id(self, rank: Any) -> Any:
        """Mesh coordinates of a rank; the other mesh axes stay this rank's own."""
        ids = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            ids[name] = rank if name == self.names[0] else lax.rem(rank, size)
            rank = rank if name == self.names[0] else lax.div(rank, size)
        return ids


def announce(axes: Axes, peers: Callable[[Any], Any] = lambda i: i, count: int | None = None) -> None:
    """Tells peers that this rank's buffers are ready to be written: all, or the `count` ranks `peers(i)`."""
    barrier = pltpu.get_barrier_semaphore()

    @pl.loop(0, axes.num_ranks if count is None else count)
    def _(i: Any) -> None:
        pl.semaphore_signal(barrier, 1, device_id=axes.device_id(peers(i)))


def await_peers(axes: Axes, credits: Any, peers: Callable[[Any], Any] = lambda i: i, count: int | None = None) -> None:
    """Waits until every peer has announced itself, then sends each one exit credit."""
    count = axes.num_ranks if count is None else count
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), count)

    @pl.loop(0, count)
    def _(i: Any) -> None:
        pl.semaphore_signal(credits, 1, device_id=axes.device_id(peers(i)))


def leave(credits: Any, count: int) -> None:
    """Waits for every peer's exit credit: all have passed `await_peers`, so the barrier semaphore is at rest."""
    pl.semaphore_wait(credits, count)


def wait_rows(rows: Any, count: jax.Array, semaphore: Any) -> None:
    """Waits on a DMA semaphore for `count` DMAs of one row `rows[i]` each (`rows` only gives the size)."""
    batch = min(WAIT_BATCH, rows.shape[0])
    if batch > 1:

        @pl.loop(0, lax.div(count, batch))
        def _(_: Any) -> None:
            span = rows.at[pl.ds(0, batch)]
            pltpu.make_async_copy(span, span, semaphore).wait()

    rest = lax.rem(count, batch) if batch > 1 else count

    @pl.loop(0, rest)
    def _(_: Any) -> None:
        pltpu.make_async_copy(rows.at[0], rows.at[0], semaphore).wait()
