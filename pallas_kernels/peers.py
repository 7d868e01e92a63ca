"""Who may write into whom, and when.

A remote DMA may start only once the target is inside the same kernel: before that, XLA may use the target's buffer for something
else. `announce` tells every peer "I am in", `await_peers` waits until all have said so.

The barrier semaphore is one counter shared by all peers, so a fast rank's announcement for the *next* operation could be taken for
a slow rank's announcement for this one. `leave` prevents that: no rank leaves a kernel before every peer has passed its
`await_peers`. Those credits arrive while rows travel, so nobody waits for them in practice.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

WAIT_BATCH = 8
"""Rows that one semaphore wait covers where possible: fewer scalar instructions than row by row."""


def announce(axis: str, num_ranks: int) -> None:
    """Tells every peer that this rank's buffers are ready to be written."""
    barrier = pltpu.get_barrier_semaphore()

    @pl.loop(0, num_ranks)
    def _(peer: Any) -> None:
        pl.semaphore_signal(barrier, 1, device_id={axis: peer})


def await_peers(axis: str, num_ranks: int, credits: Any) -> None:
    """Waits until every peer has announced itself, then sends each one exit credit."""
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), num_ranks)

    @pl.loop(0, num_ranks)
    def _(peer: Any) -> None:
        pl.semaphore_signal(credits, 1, device_id={axis: peer})


def leave(num_ranks: int, credits: Any) -> None:
    """Waits for every peer's exit credit: all have passed `await_peers`, so the barrier semaphore is at rest."""
    pl.semaphore_wait(credits, num_ranks)


def wait_rows(rows: Any, count: jax.Array, semaphore: Any) -> None:
    """Waits on a DMA semaphore for `count` DMAs of one row `rows[i]` each (`rows` only gives the size)."""
    batch = min(WAIT_BATCH, rows.shape[0])
    if batch > 1:

        @pl.loop(0, lax.div(count, batch))
        def _(_: Any) -> None:
            span = rows.at[pl.ds(0, batch)]
            pltpu.make_async_copy(span, span, semaphore).wait()

    @pl.loop(0, lax.rem(count, batch) if batch > 1 else count)
    def _(_: Any) -> None:
        pltpu.make_async_copy(rows.at[0], rows.at[0], semaphore).wait()
