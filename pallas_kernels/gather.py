"""Rows named by a table, from HBM into a double buffer in VMEM: the next block's rows travel while this block is
worked on.

A buffer is `[S, rows, 128]` for records of `S` block rows: the DMA that brings a record spreads its block rows, so that
a vector register is filled by one block row of eight records. With `[rows, S, 128]` it would hold one record, an eighth
full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.record import LANES, Record
from xen_moe_jax.pallas_kernels.send import wait_rows

AT_ONCE = 4
"""DMAs that one turn of the loop starts. A turn itself costs as much as a DMA."""


def buffers(record: Record, rows: int) -> list[Any]:
    """Scratch: two buffers of records, and a semaphore for each."""
    return [pltpu.VMEM((2, record.shape[0], rows, LANES), jnp.int32), pltpu.SemaphoreType.DMA((2,))]


def rows_in(buffer: Any, first: Any, count: int) -> Callable[[int], jax.Array]:
    """`load(j)`: block row `j` of `count` records of a buffer, int32 `[count, 128]`."""
    return lambda j: buffer[j, pl.ds(first, count), :]


def start_rows(
    number: Callable[[Any], Any],
    count: int,
    record: Callable[[Any], Any],
    buffer: Any,
    semaphore: Any,
    *,
    zero_others: bool,
) -> None:
    """Starts one DMA per entry: `record(number(n))` -> record `n` of the buffer, for `n` below `count` where `number(n)
    >= 0`. All other records become zero with `zero_others`, or keep their values.
    """
    at_once = next(n for n in (AT_ONCE, 2, 1) if count % n == 0)

    @pl.loop(0, count // at_once)
    def _(i: Any) -> None:
        for n in range(at_once):
            n = i * at_once + n
            row = number(n)

            @pl.when(row >= 0)
            def _(row: Any = row, n: Any = n) -> None:
                pltpu.make_async_copy(record(row), buffer.at[:, n], semaphore).start()

            if zero_others:

                @pl.when(row < 0)
                def _(n: Any = n) -> None:
                    buffer[:, pl.ds(n, 1), :] = jnp.zeros((buffer.shape[0], 1, LANES), jnp.int32)


def await_rows(buffer: Any, count: Any, semaphore: Any) -> None:
    """Waits for `count` records."""
    wait_rows(lambda n: [buffer.at[:, pl.ds(0, n)]], buffer.shape[1], count, semaphore)


def double_buffered(start: Callable[[Any, Any], None], wait: Callable[[Any], None], now: Any, following: Any) -> Any:
    """Fills the other buffer from table `following`, then waits for this step's; returns this step's buffer number.

    The steps are those of the grid's second dimension; the first are cores.

    Args:
      start: (table, buffer number) starts the DMAs.
      wait: (buffer number) waits for this step's.
    """
    step, steps = pl.program_id(1), pl.num_programs(1)
    slot = lax.rem(step, 2)

    @pl.when(step == 0)
    def _() -> None:
        start(now, slot)

    @pl.when(step + 1 < steps)
    def _() -> None:
        start(following, 1 - slot)

    wait(slot)
    return slot
