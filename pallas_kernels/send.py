"""Rows on their way to other ranks: announce, await, send, drain, once for every kernel that sends.

What moves: rows or runs of rows of any buffer, by one DMA each, to the same-shaped place in a peer's `target`.
Who waits: as `peers` says. At the end each rank waits for the rows that it receives by the routing, one semaphore per
source (modulo `RECV_SEMAPHORES`, so that they stay few; more than one, so that no counter overflows). Local form
(`axes=None`): the rows go into a `target` of this rank's own, without barrier and arrivals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers

RECV_SEMAPHORES = 16
SEND_BATCH = 4
"""Records that one turn of a loop sends."""
WAIT_BATCHES = (64, 8, 1)
"""Rows that one semaphore wait covers, as many as possible first: fewer scalar instructions than row by row."""


def signals_at_once(num_ranks: int) -> int:
    """Ranks that one turn of a loop signals: a turn costs more than a signal."""
    return next(n for n in (8, 4, 2, 1) if num_ranks % n == 0)


def recv_semaphores(num_ranks: int) -> int:
    return min(num_ranks, RECV_SEMAPHORES)


def scratch(axes: peers.Axes | None, num_ranks: int, buffers: int) -> list[Any]:
    """Semaphores that a `Link` needs, in the order of its fields: one of `send` for each of `buffers`."""
    shapes: list[Any] = [pltpu.SemaphoreType.DMA((buffers,))]
    if axes is not None:
        shapes += [pltpu.SemaphoreType.DMA((recv_semaphores(num_ranks),)), pltpu.SemaphoreType.REGULAR]
    return shapes


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """Records of a block on their way out of VMEM.

    Attributes:
      buffer: int32 `[N, S, 128]`, each contiguous, or with `spread` `[S, N, 128]`: cheap to write, for a register then
        holds one block row of eight records, but its DMAs cost more to start.
    """

    buffer: Any
    spread: bool

    @property
    def count(self) -> int:
        return self.buffer.shape[1 if self.spread else 0]

    @staticmethod
    def scratch(record_shape: tuple[int, int], count: int, spread: bool) -> Any:
        """Two buffers."""
        rows, lanes = record_shape
        return pltpu.VMEM((2, rows, count, lanes) if spread else (2, count, rows, lanes), jnp.int32)

    def put(self, rows: Any) -> Callable[[int, jax.Array], None]:
        """Writes block row `j` of the records `rows` (a slice)."""

        def put(j: int, words: jax.Array) -> None:
            if self.spread:
                self.buffer[j, rows, :] = words
            else:
                self.buffer[rows, j, :] = words

        return put

    def record(self, i: Any) -> Any:
        return self.buffer.at[:, i] if self.spread else self.buffer.at[i]

    def first(self, count: int) -> Any:
        rows = pl.ds(0, count)
        return self.buffer.at[:, rows] if self.spread else self.buffer.at[rows]


def _every_rank(i: Any) -> Any:
    return i


@dataclasses.dataclass(frozen=True)
class Link:
    """A kernel's traffic, in the order of its methods.

    Attributes:
      axes: the ranks that are reached; None: this rank alone.
      target: ref that rows are written into, a peer's or this rank's own.
      send, recv, credits: as `scratch` makes them.
      place: number of this rank among its peers; None: its rank along `axes`.
      ids: rank along `axes` of peer `i`. count: how many peers there are, this rank included; None: all of `axes`.
      core: number of this core, where both cores of a device run the kernel, each for itself: a core signals the core
        of its own number on each peer, and its DMAs signal that core's semaphores. None: the kernel runs on one core.
    """

    axes: peers.Axes | None
    target: Any
    send: Any
    recv: Any = None
    credits: Any = None
    place: Any = None
    ids: Callable[[Any], Any] = _every_rank
    count: int | None = None
    core: Any = None

    @property
    def num_peers(self) -> int:
        if self.count is not None:
            return self.count
        return 0 if self.axes is None else self.axes.num_ranks

    def announce(self) -> None:
        """Tells peers that this rank's buffers are ready to be written."""
        self._run(peers.ANNOUNCE)

    def await_peers(self) -> None:
        """Waits until every peer has announced itself, then sends each one exit credit."""
        self._run(peers.AWAIT)

    def leave(self) -> None:
        """Waits for every peer's exit credit: all have passed `await_peers`."""
        self._run(peers.LEAVE)

    def _run(self, phase: tuple[Any, ...]) -> None:
        if self.axes is None:
            return
        axes = self.axes
        for step in phase:
            semaphore = pltpu.get_barrier_semaphore() if step.semaphore == peers.BARRIER else self.credits
            if isinstance(step, peers.Wait):
                pl.semaphore_wait(semaphore, self.num_peers)
            else:

                @pl.loop(0, self.num_peers, unroll=signals_at_once(self.num_peers))
                def _(i: Any, semaphore: Any = semaphore) -> None:
                    pl.semaphore_signal(semaphore, 1, device_id=axes.device_id(self.ids(i)), core_index=self.core)

    def start(self, source: Any, at: Any, peer: Any, buffer: Any = 0) -> None:
        """Starts the DMA of `source` to `target[at]` of `peer`; `buffer` numbers the semaphore it leaves by."""
        if self.axes is None:
            pltpu.make_async_copy(source, self.target.at[at], self.send.at[buffer]).start()
            return
        place = lax.axis_index(self.axes.names) if self.place is None else self.place
        pltpu.make_async_remote_copy(
            source,
            self.target.at[at],
            self.send.at[buffer],
            self.recv.at[lax.rem(place, recv_semaphores(self.num_peers))],
            device_id=self.axes.device_id(self.ids(peer)),
        ).start()

    def start_block(self, records: Outgoing, peer: Any, address: Any, entries: int, buffer: Any) -> None:
        """Starts one DMA per table entry `>= 0`: record `i` to its `entries` destinations. Tables `[1, 1, N]`."""

        link = self._placed()

        @pl.loop(0, records.count)
        def _(i: Any) -> None:
            # read before the first DMA starts: the compiler does not move a read before a DMA
            known = [tuple(table[0, 0, i * entries + n] for table in (peer, address)) for n in range(entries)]
            for to, at in known:

                @pl.when(to >= 0)
                def _(to: Any = to, at: Any = at) -> None:
                    link.start(records.record(i), at, to, buffer)

    def start_records(
        self,
        records: Outgoing,
        count: Any,
        peer: Callable[[Any], Any],
        address: Callable[[Any], Any],
        buffer: Any,
    ) -> None:
        """Starts the DMAs of the first `count` records, to `peer(i)` each."""
        link = self._placed()
        whole = lax.div(count, SEND_BATCH)

        def start(first: Any, batch: int) -> None:
            # read before the first DMA starts: the compiler does not move a read before a DMA
            to = [(address(first + n), peer(first + n)) for n in range(batch)]
            for n, (at, rank) in enumerate(to):
                link.start(records.record(first + n), at, rank, buffer)

        @pl.loop(0, whole)
        def _(i: Any) -> None:
            start(i * SEND_BATCH, SEND_BATCH)

        @pl.loop(whole * SEND_BATCH, count)
        def _(i: Any) -> None:
            start(i, 1)

    def _placed(self) -> Link:
        """Returns the link with its rank, which is then read once and not for every record."""
        if self.axes is None or self.place is not None:
            return self
        return dataclasses.replace(self, place=lax.axis_index(self.axes.names))

    def await_sent(self, records: Outgoing, count: Any, buffer: Any = 0) -> None:
        """Waits until `count` records have left by a semaphore."""
        wait_rows(lambda n: [records.first(n)], records.count, count, self.send.at[buffer])

    def await_records(self, expected: Any) -> None:
        """Waits for `expected[source]` rows from every source: for those of all sources of a semaphore at once."""
        if self.axes is None:
            return
        semaphores = recv_semaphores(self.num_peers)

        @pl.loop(0, semaphores)
        def _(first: Any) -> None:
            rows = expected[first]
            for source in range(semaphores, self.num_peers, semaphores):
                at = jnp.minimum(first + source, self.num_peers - 1)
                rows = rows + jnp.where(first + source < self.num_peers, expected[at], 0)
            await_whole([self.target], rows, self.recv.at[first])

    def drain_blocks(self, records: Callable[[Any], Outgoing], sent: Any, expected: Any, step: Any) -> None:
        """Waits, at the last of the steps that send from two buffers in turn, until all rows have left and all have
        arrived.

        `sent` holds the last send of each buffer; `step` numbers the last step.
        """
        buffer = lax.rem(step, 2)

        @pl.when(step >= 1)
        def _() -> None:
            self.await_sent(records(1 - buffer), sent[1 - buffer], 1 - buffer)

        self.await_sent(records(buffer), sent[buffer], buffer)
        self.await_records(expected)
        self.leave()

    def drain_runs(self, rows: Any, sent: Any, expected: Any) -> None:
        """Waits for one run of `sent[i]` rows to each peer and of `expected[i]` rows from each."""
        _wait_runs(rows, sent, lambda i: self.send.at[0], self.num_peers)
        _wait_runs(self.target, expected, self._arrivals, self.num_peers)

    def _arrivals(self, source: Any) -> Any:
        return self.recv.at[lax.rem(source, recv_semaphores(self.num_peers))]


def wait_rows(rows: Callable[[int], Sequence[Any]], most: int, count: jax.Array, semaphore: Any) -> None:
    """Waits on a DMA semaphore for `count` DMAs of one row of each of some refs: `rows(n)` are of the size of `n` rows,
    for `n` up to `most`.
    """
    left = count
    for size in (n for n in WAIT_BATCHES if n <= most):

        @pl.loop(0, lax.div(left, size))
        def _(_: Any, size: int = size) -> None:
            for ref in rows(size):
                pltpu.make_async_copy(ref, ref, semaphore).wait()

        left = lax.rem(left, size)


def await_whole(rows: Sequence[Any], count: jax.Array, semaphore: Any) -> None:
    """Calls `wait_rows` for row `i` of each of `rows`."""
    wait_rows(lambda n: [ref.at[pl.ds(0, n)] for ref in rows], rows[0].shape[0], count, semaphore)


def _wait_runs(rows: Any, sizes: Any, semaphore: Callable[[Any], Any], count: int) -> None:
    @pl.loop(0, count)
    def _(i: Any) -> None:
        @pl.when(sizes[i] > 0)
        def _() -> None:
            run = rows.at[pl.ds(0, sizes[i])]
            pltpu.make_async_copy(run, run, semaphore(i)).wait()
