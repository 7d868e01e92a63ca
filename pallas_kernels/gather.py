"""Rows named by a table, from HBM into a double buffer in VMEM: the next block's rows travel while this block is
worked on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def start_rows(table: Any, staged: Any, buffer: Any, semaphore: Any) -> None:
    """Starts one DMA per entry `>= 0` of `table [1, 1, N]`: `staged[entry] -> buffer[n]`; zeroes `buffer[n]` for the
    others.
    """

    @pl.loop(0, buffer.shape[0])
    def _(n: Any) -> None:
        row = table[0, 0, n]

        @pl.when(row >= 0)
        def _() -> None:
            pltpu.make_async_copy(staged.at[row], buffer.at[n], semaphore).start()

        @pl.when(row < 0)
        def _() -> None:
            buffer[n] = jnp.zeros(buffer.shape[1:], buffer.dtype)


def double_buffered(
    start: Callable[[Any, jax.Array], None], wait: Callable[[jax.Array], None], now: Any, following: Any
) -> jax.Array:
    """Fills the other buffer from table `following`, then waits for this step's; returns this step's buffer number.

    Args:
      start: (table, buffer number) starts the DMAs.
      wait: (buffer number) waits for this step's.
    """
    step, steps = pl.program_id(0), pl.num_programs(0)
    slot = lax.rem(step, 2)

    @pl.when(step == 0)
    def _() -> None:
        start(now, slot)

    @pl.when(step + 1 < steps)
    def _() -> None:
        start(following, 1 - slot)

    wait(slot)
    return slot
