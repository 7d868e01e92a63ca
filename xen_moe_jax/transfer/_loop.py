"""The engine's one thread: it accepts peers, reads their frames, writes what the kernel did not take at once, and
drives the wire.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from xen_moe_jax.transfer import _channel

if TYPE_CHECKING:
    from xen_moe_jax.transfer.engine import Engine
    from xen_moe_jax.transfer.remote import Peer

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 32
BUSY_S = 50e-6
IDLE_S = 0.5
SPIN_S, SPIN_IDLE_S = 2e-3, 300e-6
"""For so long a caller who waits drives the engine without a pause, while something is under way and while nothing is:
hand-overs between threads take longer than small transfers do.
"""
SPUN_S = 1e-3
"""How often the thread looks meanwhile."""


class Loop:
    def __init__(self, engine: Engine, host: str, port: int):
        self._engine = engine
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        self._selector.register(engine._wire.event_fd, selectors.EVENT_READ, lambda: None)
        self._handshakes = 0
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=f"transfer {engine.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        """Makes the thread look again, now."""
        if threading.current_thread() is not self.thread:
            try:
                os.write(self._wake_write, b"x")
            except BlockingIOError:
                pass

    def stop(self) -> None:
        self._stopping = True
        self.wake()
        self.thread.join()
        for opened in (self._selector, self._listener):
            opened.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # Under the engine's lock.

    def add(self, peer: Peer) -> None:
        self._selector.register(peer.channel.socket, selectors.EVENT_READ, lambda: self._engine._read(peer))
        self.wake()

    def poll(self) -> None:
        """Handles what peers have sent, in the caller's thread."""
        for event, mask in self._selector.select(0):
            # A wake-up is the thread's: taken away here, it would sleep on.
            if mask & selectors.EVENT_READ and event.fd != self._wake_read:
                event.data()

    def remove(self, peer: Peer) -> None:
        self._selector.unregister(peer.channel.socket)
        peer.channel.close()

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as failure:
            with self._engine._lock:
                self._engine._failure = failure  # Who waits is told; nobody may wait for a thread that is gone.
                self._engine._changed.notify_all()
            raise

    def _serve(self) -> None:
        engine = self._engine
        while not self._stopping:
            engine._adopt_device()
            with engine._lock:
                moved = busy = False
                if engine._spinning:
                    timeout = SPUN_S
                else:
                    moved = engine._progress()
                    timeout = 0.0 if moved or not engine._wire.arm() else IDLE_S
                    busy = bool(engine._active) and not moved
                self._watch_outgoing()
            if busy:  # Sources that are being computed, or a library without events for what is in flight.
                time.sleep(BUSY_S)
                timeout = 0.0
            events = self._selector.select(timeout)
            with engine._lock:
                for event, mask in events:
                    if mask & selectors.EVENT_READ:
                        event.data()
                engine._housekeeping()

    def _watch_outgoing(self) -> None:
        for peer in list(self._engine._peers_by_number.values()):
            if peer.lost:
                continue
            if peer.channel.has_outgoing:
                try:
                    peer.channel.flush()
                except OSError as cause:
                    self._engine._lose(peer, cause.strerror or str(cause))
                    continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.has_outgoing else 0)
            registered = self._selector.get_key(peer.channel.socket)
            if registered.events != wanted:
                self._selector.modify(peer.channel.socket, wanted, registered.data)

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if self._handshakes >= MAX_HANDSHAKES:
            connection.close()
            return
        self._handshakes += 1
        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        engine = self._engine
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            channel, hello = _channel.accept_channel(
                connection, engine._key, engine._hello(), engine.identity, deadline, engine._reason_to_refuse
            )
            engine._join(channel, hello)
        except (
            Exception
        ):  # A client that does not speak the protocol or lacks the token: it was told, nothing else is owed.
            connection.close()
        finally:
            self._handshakes -= 1
