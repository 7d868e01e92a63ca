"""A connection to one peer, and the permissions to write into that peer's windows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from xen_moe_jax.transfer import _process
from xen_moe_jax.transfer._channel import Channel
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import PeerLost, StaleWindow, TransferError, about, stale_window
from xen_moe_jax.transfer._layout import Leaf
from xen_moe_jax.transfer._wire import Link

LINGER_S = 2.0
"""Memory that a dead process could write into is reused only after its process has been gone for this long."""
MAX_MISSING = 1 << 20
"""Arrival numbers that may be missing below the highest one: a peer that skips more breaks the protocol."""

Template = tuple[int, bytes, str, np.ndarray]
"""(number of a local shard, remote key, local memory, runs whose local addresses count from the shard's first byte)."""


class SeenNumbers:
    """The numbers 0, 1, 2, ... that have been seen, in any order. Each counts once."""

    def __init__(self) -> None:
        self._below = 0
        self._beyond: set[int] = set()

    def add(self, number: int) -> bool:
        """Returns False for a number that was seen before."""
        if number < self._below or number in self._beyond:
            return False
        if number - self._below > MAX_MISSING:
            raise ValueError(f"arrival number {number} while {self._below} is missing")
        self._beyond.add(number)
        while self._below in self._beyond:
            self._beyond.remove(self._below)
            self._below += 1
        return True


class Writer(Protocol):
    """A transfer that writes with a permission."""

    request: str

    def stop(self, error: TransferError) -> None: ...


class Grant:
    """Permission to write into one generation of one window, until the owner or this process ends it."""

    def __init__(self, peer: Connection, name: str, window: int, generation: int, leaves: dict[str, Leaf]):
        self.peer, self.name, self.window, self.generation, self.leaves = peer, name, window, generation, leaves
        self.open = True
        self.memory = {path: leaf.shards[0].memory if leaf.shards else "host" for path, leaf in leaves.items()}
        self.templates: dict[tuple, list[Template]] = {}
        self._finishing = False
        self._writers: set[Writer] = set()

    def stale_error(self, request: str) -> StaleWindow:
        """Returns the error for a write into a generation that is not open any more."""
        return stale_window(request, self.peer.name, self.name, self.generation)

    def take(self, writer: Writer) -> None:
        """Registers a transfer that writes with this permission."""
        self._writers.add(writer)

    def drop(self, writer: Writer) -> None:
        """Unregisters a transfer that has ended."""
        self._writers.discard(writer)
        if self._finishing:
            self.finish()
        self._confirm()

    def finish(self) -> None:
        """Gives the permission back now, or when the last registered transfer ends.

        The death of this process afterwards does not spoil the generation.
        """
        self._finishing = True
        if not self._writers:
            self.open = False
            self._confirm()

    def finishes_with(self, writer: Writer) -> bool:
        """Returns whether the permission is given back when this transfer ends."""
        return self._finishing and self._writers == {writer}

    def revoke(self) -> None:
        """Stops the transfers that use the permission; tells the owner when none of them can write any more."""
        self.open = False
        for writer in list(self._writers):
            writer.stop(self.stale_error(writer.request))
        self._confirm()

    def _confirm(self) -> None:
        place = self.window, self.generation
        if not self.open and not self._writers and self.peer.grants.get(place) is self:
            del self.peer.grants[place]
            if not self.peer.lost:
                for leaf in self.leaves.values():
                    for shard in leaf.shards:
                        self.peer.link.forget(shard.key)
                self.peer.send({"t": "revoked", "w": self.window, "g": self.generation})


class Connection:
    """The channel and the link to one peer. Its methods need the engine's lock, except `ask`.

    Attributes: `number` (of this connection), `name`, `identity` and `process` (of the peer), `lost` (the reason why
    the peer is lost, or None), `left` (whether the peer has said goodbye), `grants` (by window's number and
    generation), `arrivals_seen`.
    """

    def __init__(
        self,
        core: Core,
        number: int,
        channel: Channel,
        link: Link,
        hello: dict[str, Any],
        on_lost: Callable[[Any], None],
    ):
        self.core, self.number, self.channel, self.link = core, number, channel, link
        self.name = str(hello["name"])
        self.identity = str(hello["identity"])
        self.process = dict(hello["process"])
        self.lost: str | None = None
        self.left = False
        self.grants: dict[tuple[int, int], Grant] = {}
        self.arrivals_seen = SeenNumbers()
        self._on_lost = on_lost
        self._arrival_numbers = itertools.count()
        self._question_numbers = itertools.count(1)
        self._answers: dict[int, dict | TransferError | None] = {}
        self._gone_since: float | None = None

    def next_arrival(self) -> int:
        """Returns the number of the next arrival to announce to the peer."""
        return next(self._arrival_numbers)

    def send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame, or queues the part that the operating system does not take now. Does nothing for a peer that
        is lost."""
        if self.lost:
            return
        try:
            self.channel.send(head, payload)
        except OSError as cause:
            self.lose(cause.strerror or str(cause))
            return
        if self.channel.has_outgoing:
            self.core.poller.wake()

    def flush(self) -> None:
        """Sends queued bytes, as far as the operating system takes them."""
        if self.channel.has_outgoing:
            try:
                self.channel.flush()
            except OSError as cause:
                self.lose(cause.strerror or str(cause))
                return
        self.core.poller.watch_writes(self.channel.socket, self.channel.has_outgoing)

    def ask(self, head: dict, timeout: float, request: str) -> dict:
        """Sends a question and returns the peer's answer. Call it without the lock.

        Raises `PeerLost`, `TransferTimeout`, or the error that the peer answers with.
        """
        number = next(self._question_numbers)
        with self.core.lock:
            self._answers[number] = None
            self.send(head | {"q": number})

        def answered() -> bool:
            if self._answers[number] is None and self.lost:
                raise self.lost_error(request, request)
            return self._answers[number] is not None

        try:
            with about(request, self.name):
                self.core.wait(answered, timeout, lambda: f"{request}: {self.name!r} did not answer", request)
            reply = self._answers[number]
        finally:
            with self.core.lock:
                del self._answers[number]
        if isinstance(reply, TransferError):
            with about(request):
                raise reply
        assert reply is not None
        return reply

    def answer(self, number: int, reply: dict | TransferError) -> None:
        """Hands an answer to the caller of `ask`; an answer that comes too late is dropped."""
        if number in self._answers:
            self._answers[number] = reply

    def lose(self, reason: str) -> None:
        """Gives the peer up: closes channel and link, and ends this peer's operations with `PeerLost`."""
        if self.lost:
            return
        self.lost = reason
        self.core.poller.unwatch(self.channel.socket)
        self.channel.close()
        self.link.close(force=True)
        self._on_lost(self)
        self.core.changed.notify_all()
        self.core.poller.wake()

    def lost_error(self, text: str, request: str, bytes_done: int = 0) -> PeerLost:
        """Returns the error for a request to this peer, which is lost."""
        text = f"{text}: peer {self.name!r} is lost ({self.lost})"
        return PeerLost(text, peer=self.name, request=request, bytes_done=bytes_done)

    def has_ended(self) -> bool:
        """Returns whether the peer's process has ended at least `LINGER_S` ago: nothing that it sent can arrive."""
        if self._gone_since is None and _process.has_ended(self.process):
            self._gone_since = time.monotonic()
        return self._gone_since is not None and time.monotonic() - self._gone_since >= LINGER_S
