"""A transfer on its way: what it still needs, what is in flight, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import deadline
from xen_moe_jax.transfer._counter import Imm
from xen_moe_jax.transfer._errors import StaleWindow, TransferCancelled, TransferError, TransferRefused, about
from xen_moe_jax.transfer._loop import SPIN_S

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine
    from xen_moe_jax.transfer._remote import Grant, Peer
    from xen_moe_jax.transfer._wire import Posting


class Runs(NamedTuple):
    """Runs between local memory of one kind ("host" or "cuda") and one remote piece of memory."""

    key: bytes
    memory: str
    nbytes: int
    addresses: np.ndarray
    """int64 [n, 3]: local address, remote address, bytes."""


class Job:
    """The part of a transfer that concerns one peer. `plan` gives its runs once the sources are finished, and what to
    keep alive; without it the job is posted by whoever makes it.
    """

    def __init__(self, peer: Peer, grant: Grant | None, plan: Callable[[], tuple[list[Runs], list[object]]] | None):
        self.peer, self.grant, self.plan = peer, grant, plan
        self.postings: list[Posting] = []
        self.nbytes = self.bytes_ended = 0
        self.ended = False

    def post(self, kind: str, kept: list[object]) -> None:
        """Starts all runs. What they need alive goes to `kept` before the first of them."""
        assert self.plan is not None
        runs, held = self.plan()
        kept += held
        for piece in runs:
            self.add(self.peer.link.post(kind, *piece), piece.nbytes)

    def add(self, posting: Posting | None, nbytes: int) -> None:
        """A posting of so many bytes, or None where they have arrived."""
        self.nbytes += nbytes
        if posting is None:
            self.bytes_ended += nbytes
        else:
            self.postings.append(posting)

    @property
    def bytes_posted(self) -> int:
        return self.bytes_ended + sum(posting.bytes_posted for posting in self.postings)

    def advance(self) -> tuple[bool, bool]:
        """(nothing in flight any more, whether this call got something done)."""
        ended, moved = True, False
        for posting in self.postings:  # Each of them, also after one that has not ended.
            before = posting.bytes_posted
            ended &= posting.advance()
            moved |= posting.bytes_posted > before
        return ended, ended or moved


class Transfer:
    """Bytes on their way to or from one or several peers.

    It keeps its sources alive until it has ended. Attributes: `nbytes` (None until the sources are finished),
    `bytes_done`, `imm`.
    """

    _kind = "put"
    _jobs: Sequence[Job] = ()
    _sources: Sequence[object] = ()
    _kept: list[object]
    _posted = _ended = False
    _error: TransferError | BaseException | None = None
    _after: Callable[[], None] | None = None
    imm: Imm | None = None
    nbytes: int | None = None
    bytes_done = 0

    def __init__(
        self,
        engine: Engine,
        kind: str,
        request: str,
        jobs: Sequence[Job],
        sources: Sequence[object],
        imm: Imm | None = None,
    ):
        self._engine, self._kind, self._request = engine, kind, request
        self._jobs, self._sources, self._kept, self.imm = jobs, sources, [], imm

    def __repr__(self) -> str:
        state = "in flight" if not self._ended else repr(self._error) if self._error else "done"
        return f"<{self._request}: {state}>"

    def done(self) -> bool:
        """True when it has ended, well or not; never waits. `wait` says which."""
        if self._ended:
            return True
        with self._engine._lock:
            self._engine._progress()
            return self._ended

    def wait(self, timeout: float | None = None) -> None:
        """Returns when every byte is in the peers' memory (or, of a read, here) and the counters there have been told.

        Raises `TransferTimeout` (it is still in flight then), `PeerLost`, `StaleWindow`, `TransferRefused`,
        `TransferCancelled`, or the error of the computation that made the source.
        """
        if not self._ended:
            with about(self._request, self._peer_names()):
                self._spin(timeout)
                self._engine._wait(
                    lambda: self._ended, timeout, self._progress_text, self._request, lambda: self.bytes_done
                )
        if self._error is not None:
            raise self._error

    def _spin(self, timeout: Any) -> None:
        """Waits for copies that go on by themselves in the loop in C++, for a while: it sees their end at once."""
        engine = self._engine
        begun = time.monotonic()
        limit = SPIN_S if timeout is None else min(SPIN_S, deadline(timeout, self._request) - begun)
        with engine._lock:
            if engine._closed or not self._runs_alone():
                return
            for job in self._jobs:
                for posting in job.postings:
                    if (left := limit - (time.monotonic() - begun)) > 0:
                        posting.spin(left)
            self._advance()
            if self._ended:
                engine._active = [transfer for transfer in engine._active if not transfer._ended]
            if not engine._active:
                engine._loop.cancel_poll()
            engine._loop.poll()  # Peers are heard also by whoever does nothing but this.

    def cancel(self, timeout: float | None = None) -> bool:
        """Returns when nothing of it can land any more; True unless it had already ended well.

        Its `imm` is never counted then. What is in flight cannot be called back, and is waited for; where that takes
        longer than `timeout` seconds, the link to the peers in question is cut, and they are lost.
        """
        with self._engine._lock:
            if not self._ended:
                text = f"{self._request} was cancelled"
                self._stop(TransferCancelled(text, peer=self._peer_names(), request=self._request))
        try:
            self._engine._wait(lambda: self._ended, timeout, self._progress_text, self._request)
        except TimeoutError:
            with self._engine._lock:
                for job in self._jobs:
                    if not job.ended:
                        self._engine._lose(
                            job.peer, f"the link was cut: a cancelled transfer had not ended after {timeout} s"
                        )
            self._engine._wait(lambda: self._ended, None, self._progress_text, self._request)
        return self._error is not None

    def _peer_names(self) -> str:
        return ", ".join(dict.fromkeys(job.peer.name for job in self._jobs))

    def _progress_text(self) -> str:
        total = "an unknown number of" if self.nbytes is None else self.nbytes
        return f"{self._request}: {self.bytes_done} of {total} bytes"

    # From here on: under the engine's lock.

    def _stop(self, error: TransferError) -> None:
        """Hands over nothing more, and ends with `error` once what is in flight has ended."""
        self._error = self._error or error
        if not self._posted:
            self._end()
            return
        for job in self._jobs:
            for posting in job.postings:
                posting.stop()

    def _runs_alone(self) -> bool:
        """Whether all of it is under way, and goes on without being driven."""
        return self._posted and all(posting.runs_alone for job in self._jobs for posting in job.postings)

    def _follow(self) -> None:
        """The engine's thread looks after it from now on."""
        self._engine._active.append(self)
        if self._runs_alone():
            self._engine._loop.schedule_poll(self.nbytes or 0)
        else:
            self._engine._loop.wake()

    def _begun(self, job: Job) -> Transfer:
        """Its one job has been posted by somebody else, who holds its sources ready."""
        self._jobs, self._posted, self.nbytes = [job], True, job.nbytes
        if not job.postings:
            self._advance()
        return self

    def _concerns(self, peer: Peer) -> bool:
        return any(job.peer is peer and not job.ended for job in self._jobs)

    def _advance(self) -> bool:
        """Whether something was done."""
        if self._ended:
            return False
        if not self._posted:
            return self._start()
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

    def _start(self) -> bool:
        try:
            self._check_sources()
            if not all(map(_memory.is_ready, self._sources)):
                return False
            for job in self._jobs:
                if job.peer.lost:
                    raise job.peer.lost_error(self._request, self._request)
                if job.grant is not None and not job.grant.open:
                    raise job.grant.stale_error(self._request)
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
            self._advance()
        return True

    def _check_sources(self) -> None:
        for source in self._sources:
            if isinstance(source, jax.Array) and source.is_deleted():
                raise TransferRefused(
                    f"{self._request}: its source was deleted or donated before it had ended",
                    peer=self._peer_names(),
                    request=self._request,
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
                self._engine._lose(job.peer, job.peer.link.failed)
            if job.peer.lost:
                self._error = job.peer.lost_error(self._progress_text(), self._request, self.bytes_done)
            else:
                self._error = TransferError(
                    f"{self._progress_text()}, then the link to {job.peer.name!r} reported: {failed}",
                    peer=job.peer.name,
                    request=self._request,
                    bytes_done=self.bytes_done,
                )
        # A peer counts only what arrived whole, and only what nobody has called back.
        if failed is None and self._error is None and self.imm is not None and job.grant is not None:
            head = {
                "t": "imm",
                "w": job.grant.window,
                "g": job.grant.generation,
                "k": self.imm,
                "n": job.peer.next_number(),
            }
            job.peer.send(head)

    def _end(self) -> None:
        for job in self._jobs:
            job.ended = True
            if job.grant is not None:
                job.grant.drop(self)
        self._ended = True
        self._kept, self._sources = [], []
        if self._after is not None:
            self._after()
        self._engine._changed.notify_all()


class Arrived(Transfer):
    """One whose bytes were all there when it was started, and of which nobody had to be told."""

    _ended = True

    def __init__(self, engine: Engine, request: str, nbytes: int):
        self._engine, self._request, self.nbytes = engine, request, nbytes

    @property
    def bytes_done(self) -> int:  # type: ignore[override]
        return self.nbytes or 0


def stale(request: str, peer: str, window: str, generation: int) -> StaleWindow:
    return StaleWindow(
        f"{request}: generation {generation} of window {window!r} of {peer!r} was closed; take peer[{window!r}] again",
        peer=peer,
        request=request,
    )
