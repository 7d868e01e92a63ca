"""A transfer: its jobs, the bytes that are in flight, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import deadline
from xen_moe_jax.transfer._connection import Connection, Grant
from xen_moe_jax.transfer._core import SPIN_S, Core
from xen_moe_jax.transfer._counter import Imm
from xen_moe_jax.transfer._errors import TransferCancelled, TransferError, TransferRefused, about
from xen_moe_jax.transfer._wire import Posting


class Runs(NamedTuple):
    """Runs between local memory of one kind ("host" or "cuda") and one remote piece of memory."""

    key: bytes
    memory: str
    nbytes: int
    addresses: np.ndarray
    """int64 [n, 3]: local address, remote address, bytes."""


class Job:
    """The part of a transfer that concerns one peer.

    `plan` returns the runs of bytes, and objects to keep alive, once the sources are finished. Without a plan the
    caller posts the job itself, with `add`.
    """

    def __init__(
        self, peer: Connection, grant: Grant | None, plan: Callable[[], tuple[list[Runs], list[object]]] | None
    ):
        self.peer, self.grant, self.plan = peer, grant, plan
        self.postings: list[Posting] = []
        self.nbytes = self.bytes_ended = 0
        self.ended = False

    def post(self, kind: str, kept: list[object]) -> None:
        """Starts all runs. The objects that they need alive are added to `kept` before the first run starts."""
        assert self.plan is not None
        runs, held = self.plan()
        kept += held
        for piece in runs:
            self.add(self.peer.link.post(kind, *piece), piece.nbytes)

    def add(self, posting: Posting | None, nbytes: int) -> None:
        """Adds a posting of `nbytes`; None stands for bytes that have arrived already."""
        self.nbytes += nbytes
        if posting is None:
            self.bytes_ended += nbytes
        else:
            self.postings.append(posting)

    @property
    def bytes_posted(self) -> int:
        return self.bytes_ended + sum(posting.bytes_posted for posting in self.postings)

    def advance(self) -> tuple[bool, bool]:
        """Drives every posting. Returns two booleans: no bytes are in flight any more, and some work was done."""
        ended, moved = True, False
        for posting in self.postings:
            before = posting.bytes_posted
            ended &= posting.advance()
            moved |= posting.bytes_posted > before
        return ended, ended or moved


class Transfer:
    """Bytes that are written to, or read from, one or several peers.

    It keeps its sources alive until it has ended. Attributes: `nbytes` (None until the sources are finished),
    `bytes_done`, `imm`, `request` (its description in errors), `ended`.
    """

    _jobs: Sequence[Job] = ()
    _sources: Sequence[object] = ()
    _kept: list[object]
    _posted = False
    _error: TransferError | BaseException | None = None
    ended = False
    imm: Imm | None = None
    nbytes: int | None = None
    bytes_done = 0

    def __init__(
        self,
        core: Core,
        kind: str,
        request: str,
        jobs: Sequence[Job],
        sources: Sequence[object],
        imm: Imm | None = None,
        last: bool = False,
    ):
        self._core, self._kind, self.request, self._last = core, kind, request, last
        self._jobs, self._sources, self._kept, self.imm = jobs, sources, [], imm

    def __repr__(self) -> str:
        state = "in flight" if not self.ended else repr(self._error) if self._error else "done"
        return f"<{self.request}: {state}>"

    def done(self) -> bool:
        """Returns whether it has ended, successfully or not; never waits. `wait` raises the error of a failed one."""
        if self.ended:
            return True
        with self._core.lock:
            self._core.progress()
            return self.ended

    def wait(self, timeout: float | None = None) -> None:
        """Returns when every byte is in the peers' memory (for a read: in this process) and their counters were told.

        Raises `TransferTimeout` (the transfer is still pending then), `PeerLost`, `StaleWindow`, `TransferRefused`,
        `TransferCancelled`, or the error of the computation that made the source.
        """
        if not self.ended:
            with about(self.request, self._peer_names()):
                self._spin(timeout)
                self._core.wait(lambda: self.ended, timeout, self._progress_text, self.request, lambda: self.bytes_done)
        if self._error is not None:
            raise self._error

    def _spin(self, timeout: Any) -> None:
        """Waits up to `SPIN_S` in C++ for copies that need no driving, so that their end is seen at once."""
        core = self._core
        begun = time.monotonic()
        limit = SPIN_S if timeout is None else min(SPIN_S, deadline(timeout, self.request) - begun)
        with core.lock:
            if core.closed or not self._runs_alone():
                return
            for job in self._jobs:
                for posting in job.postings:
                    if (left := limit - (time.monotonic() - begun)) > 0:
                        posting.spin(left)
            self.advance()
            if self.ended:
                core.pending = [operation for operation in core.pending if not operation.ended]
            if not core.pending:
                core.poller.cancel_poll()
            core.poller.poll()  # A caller that calls only this must read the peers' frames too.

    def cancel(self, timeout: float | None = None) -> bool:
        """Returns when nothing more of the transfer can be written; True unless it had already ended successfully.

        The `imm` of a cancelled transfer is never counted. Bytes in flight cannot be called back: the call waits for
        them. If that takes longer than `timeout` seconds, the links to the peers concerned are cut and they are lost.
        """
        core = self._core
        with core.lock:
            if not self.ended:
                text = f"{self.request} was cancelled"
                self.stop(TransferCancelled(text, peer=self._peer_names(), request=self.request))
        try:
            core.wait(lambda: self.ended, timeout, self._progress_text, self.request)
        except TimeoutError:
            with core.lock:
                for job in self._jobs:
                    if not job.ended:
                        job.peer.lose(f"the link was cut: a cancelled transfer had not ended after {timeout} s")
            core.wait(lambda: self.ended, None, self._progress_text, self.request)
        return self._error is not None

    def _peer_names(self) -> str:
        return ", ".join(dict.fromkeys(job.peer.name for job in self._jobs))

    def _progress_text(self) -> str:
        total = "an unknown number of" if self.nbytes is None else self.nbytes
        return f"{self.request}: {self.bytes_done} of {total} bytes"

    def start(self) -> Self:
        """Takes the permissions, posts the jobs that are ready, and leaves the remaining jobs to the engine."""
        core = self._core
        core.adopt_device()
        with core.lock:
            core.check_open(self.request)
            for job in self._jobs:
                self._take(job.grant)
            self.advance()
            self._follow()
        return self

    # The methods from here on need the engine's lock.

    def start_posted(self, job: Job) -> Self:
        """Takes over a job that was posted already."""
        self._take(job.grant)
        self._jobs, self._posted, self.nbytes = [job], True, job.nbytes
        if not job.postings:
            self.advance()
        self._follow()
        return self

    def _take(self, grant: Grant | None) -> None:
        if grant is not None:
            grant.take(self)
            if self._last:  # Before a byte is posted, so that the frame of the arrival can say it.
                grant.finish()

    def _follow(self) -> None:
        """Hands a transfer that has not ended yet to the engine's thread."""
        if self.ended:  # Small writes between processes of one host have.
            return
        self._core.pending.append(self)
        if self._runs_alone():
            self._core.poller.schedule_poll(self.nbytes or 0)
        else:
            self._core.poller.wake()

    def stop(self, error: TransferError) -> None:
        """Posts nothing more; the transfer ends with `error` once the bytes in flight have arrived or failed."""
        self._error = self._error or error
        if not self._posted:
            self._end()
            return
        for job in self._jobs:
            for posting in job.postings:
                posting.stop()

    def concerns(self, peer: Connection) -> bool:
        """Returns whether a job for this peer has not ended yet."""
        return any(job.peer is peer and not job.ended for job in self._jobs)

    def lose(self, peer: Connection) -> None:
        """Ends with `PeerLost` if the transfer still has to do with this peer."""
        if self.concerns(peer):
            self.stop(peer.lost_error(self._progress_text(), self.request, self.bytes_done))

    def _runs_alone(self) -> bool:
        """Returns whether every byte was posted, and the rest needs no driving."""
        return self._posted and all(posting.runs_alone for job in self._jobs for posting in job.postings)

    def advance(self) -> bool:
        """Goes on; returns whether anything was done."""
        if self.ended:
            return False
        if not self._posted:
            return self._post()
        progressed = False
        for job in self._jobs:
            if not job.ended:
                ended, moved = job.advance()
                progressed |= moved
                if ended:
                    self._end_job(job)
        if all(job.ended for job in self._jobs):
            self._end()
        return progressed

    def _post(self) -> bool:
        """Posts all jobs if the sources are ready; returns whether anything was done."""
        try:
            self._check_sources()
            if not all(map(_memory.is_ready, self._sources)):
                return False
            for job in self._jobs:
                if job.peer.lost:
                    raise job.peer.lost_error(self.request, self.request)
                if job.grant is not None and not job.grant.open:
                    raise job.grant.stale_error(self.request)
            self._posted = True
            for job in self._jobs:
                job.post(self._kind, self._kept)
        except Exception as error:
            self._error = self._error or error
            for job in self._jobs:
                for posting in job.postings:
                    posting.stop()
        self.nbytes = sum([job.nbytes for job in self._jobs])
        if not self._posted or self._error and not any(job.postings for job in self._jobs):
            self._end()
        else:
            self.advance()
        return True

    def _check_sources(self) -> None:
        for source in self._sources:
            if isinstance(source, jax.Array) and source.is_deleted():
                raise TransferRefused(
                    f"{self.request}: its source was deleted or donated before it had ended",
                    peer=self._peer_names(),
                    request=self.request,
                    bytes_done=self.bytes_done,
                )

    def _end_job(self, job: Job) -> None:
        job.ended = True
        failed = next((p.error for p in job.postings if p.error), None)
        if self._error is None:
            try:
                self._check_sources()
            except TransferRefused as error:
                self._error = error
        if failed is None:
            self.bytes_done += job.bytes_posted
        elif self._error is None:
            if job.peer.link.failed and not job.peer.lost:
                job.peer.lose(job.peer.link.failed)
            if job.peer.lost:
                self._error = job.peer.lost_error(self._progress_text(), self.request, self.bytes_done)
            else:
                self._error = TransferError(
                    f"{self._progress_text()}, then the link to {job.peer.name!r} reported: {failed}",
                    peer=job.peer.name,
                    request=self.request,
                    bytes_done=self.bytes_done,
                )
        # The peer counts only a write that arrived whole and was not cancelled. One frame says that the write has
        # arrived and, for the last one, that the permission is given back: this process may be killed at any moment.
        grant = job.grant
        if failed is None and self._error is None and self.imm is not None and grant is not None:
            head = {"t": "imm", "w": grant.window, "g": grant.generation, "k": self.imm, "n": job.peer.next_arrival()}
            is_last = grant.finishes_with(self) and self._is_unused(grant)
            job.peer.send(head | ({"last": True} if is_last else {}))
        if grant is not None and self._is_unused(grant):
            grant.drop(self)

    def _is_unused(self, grant: Grant) -> bool:
        """Returns whether no job of this transfer writes with the permission any more."""
        return all(job.ended for job in self._jobs if job.grant is grant)

    def _end(self) -> None:
        for job in self._jobs:
            job.ended = True
            if job.grant is not None:
                job.grant.drop(self)
        self.ended = True
        self._kept, self._sources = [], []
        self._core.changed.notify_all()


class Arrived(Transfer):
    """A transfer whose bytes had all arrived when it was started, without a counter to tell."""

    ended = True

    def __init__(self, core: Core, request: str, nbytes: int):
        self._core, self.request, self.nbytes = core, request, nbytes

    @property
    def bytes_done(self) -> int:  # type: ignore[override]
        return self.nbytes or 0
