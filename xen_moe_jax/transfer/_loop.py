"""The engine's thread: accepts peers, reads their frames, sends queued frames, and drives the wire."""

from __future__ import annotations

import atexit
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from xen_moe_jax.transfer._connection import Connection
from xen_moe_jax.transfer._core import BUSY_S, Core

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 32
"""Handshakes at one time. Further clients stay in the listener's queue, for `HANDSHAKE_S` at most."""
IDLE_S = 0.5
SPUN_S = 1e-3
"""Interval in which the thread looks while a caller drives the engine."""


_running: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def _halt_all() -> None:
    """Ends the threads of engines that were not closed: one that copies when Python ends would abort the process."""
    for loop in list(_running):
        loop.halt()


class Loop:
    """The thread of one engine, and its listening socket.

    `greet(connection, deadline)` performs a handshake with a client, in a thread of its own. `peers()` returns the
    connected peers. `housekeeping()` is called once in a while, under the lock.
    """

    def __init__(
        self,
        core: Core,
        host: str,
        port: int,
        *,
        greet: Callable[[socket.socket, float], object],
        peers: Callable[[], Iterable[Connection]],
        housekeeping: Callable[[], object],
    ):
        self._core, self._greet, self._peers, self._housekeeping = core, greet, peers, housekeeping
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        core.poller.watch(self._listener, self._accept)
        self._handshakes, self._listening = 0, True  # Under the engine's lock.
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"transfer {core.name}", daemon=True)
        core.poller.owner = self._thread

    def start(self) -> None:
        """Starts the thread."""
        _running.add(self)
        self._thread.start()

    def halt(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._core.poller.wake()
        self._thread.join()

    def stop(self) -> None:
        """Ends the thread, and closes the listener and the poller."""
        _running.discard(self)
        self.halt()
        self._core.poller.close()
        self._listener.close()

    def _run(self) -> None:
        core = self._core
        try:
            while not self._stopping:
                self._turn()
        except BaseException as failure:
            with core.lock:
                core.failure = failure  # Wakes callers that wait; without the thread they would wait for ever.
                core.changed.notify_all()
            raise

    def _turn(self) -> None:
        core = self._core
        core.adopt_device()
        with core.lock:
            busy = False
            if core.spinning:
                timeout = SPUN_S
            else:
                moved = core.progress()
                timeout = 0.0 if moved or not core.wire.arm() else IDLE_S
                busy = bool(core.pending) and not moved
            self._watch_listener()
            for peer in list(self._peers()):
                if not peer.lost:
                    peer.flush()
        if busy:  # Sources that are being computed, or bytes in flight for which the library has no event.
            time.sleep(BUSY_S)
            timeout = 0.0
        callbacks = core.poller.select(timeout)
        with core.lock:
            for callback in callbacks:
                callback()
            self._housekeeping()

    def _watch_listener(self) -> None:
        wanted = self._handshakes < MAX_HANDSHAKES
        if wanted and not self._listening:
            self._core.poller.watch(self._listener, self._accept)
        elif self._listening and not wanted:
            self._core.poller.unwatch(self._listener)
        self._listening = wanted

    def _accept(self) -> None:
        if self._handshakes >= MAX_HANDSHAKES:
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._handshakes += 1
        threading.Thread(target=self._shake_hands, args=(connection,), daemon=True).start()

    def _shake_hands(self, connection: socket.socket) -> None:
        try:
            self._greet(connection, time.monotonic() + HANDSHAKE_S)
        except Exception:  # A client that does not speak the protocol or lacks the token. It was told the reason.
            connection.close()
        finally:
            with self._core.lock:
                self._handshakes -= 1
                if not self._core.closing:
                    self._core.poller.wake()
