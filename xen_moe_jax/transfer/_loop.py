"""The engine's one thread: it accepts peers, reads their frames, writes what the kernel did not take at once, and
drives the wire.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from xen_moe_jax.transfer import _channel

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine
    from xen_moe_jax.transfer._remote import Peer

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 32
"""At one time. Whoever comes then waits in the listener's queue, no longer than strangers who say nothing may stay."""
BUSY_S = 50e-6
IDLE_S = 0.5
SPIN_S, SPIN_IDLE_S = 2e-3, 300e-6
"""For so long a caller who waits drives the engine without a pause, while something is under way and while nothing is:
hand-overs between threads take longer than small transfers do.
"""
SPUN_S = 1e-3
"""How often the thread looks meanwhile."""


COPY_S, COPY_BYTES_PER_S = 50e-6, 3e11
"""When the thread looks for the end of copies that need no driving: about when a GPU's have ended."""


class _Alarm:
    """A descriptor that becomes readable after a while (Linux's timerfd, which Python has from 3.13 on)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        monotonic, flags = time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = self._library.timerfd_create(ctypes.c_int(monotonic), ctypes.c_int(flags))
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "timerfd_create")
        self._setting = (ctypes.c_long * 4)()  # `struct itimerspec`: an interval, and when it rings first.
        self._ring = ctypes.PyDLL(None).timerfd_settime
        self._arguments = ctypes.c_int(self.descriptor), ctypes.c_int(0), ctypes.byref(self._setting), None

    def set(self, seconds: float) -> None:
        """Rings once, after so long (under a second), or never (0); what was set before does not count any more."""
        self._setting[3] = int(seconds * 1e9)
        self._ring(*self._arguments)

    def on_alarm(self) -> None:
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            pass


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
        self._alarm, self._due = _Alarm(), 0.0
        self._selector.register(self._alarm.descriptor, selectors.EVENT_READ, self._alarm.on_alarm)
        self._selector.register(engine._wire.event_fd, selectors.EVENT_READ, lambda: None)
        self._handshakes, self._listening = 0, True  # Under the engine's lock.
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

    def schedule_poll(self, nbytes: int) -> None:
        """Makes the thread look again when a copy of so many bytes, which needs no driving, has ended: by then whoever
        waits for it may have seen it, and the thread was not in the way. What it is to look after already stays so.
        """
        now = time.monotonic()
        if now >= self._due:
            seconds = min(0.5, COPY_S + nbytes / COPY_BYTES_PER_S)
            self._due = now + seconds
            self._alarm.set(seconds)

    def cancel_poll(self) -> None:
        """There is nothing to look after any more."""
        if self._due:
            self._due = 0.0
            self._alarm.set(0)

    def stop(self) -> None:
        self._stopping = True
        self.wake()
        self.thread.join()
        for opened in (self._selector, self._listener):
            opened.close()
        for descriptor in (self._wake_read, self._wake_write, self._alarm.descriptor):
            os.close(descriptor)

    # Under the engine's lock.

    def add(self, peer: Peer) -> None:
        self._selector.register(peer.channel.socket, selectors.EVENT_READ, lambda: self._engine._read(peer))
        self.wake()

    def poll(self) -> None:
        """Handles what peers have sent, in the caller's thread."""
        for event, mask in self._selector.select(0):
            # A wake-up is the thread's: taken away here, it would sleep on.
            if mask & selectors.EVENT_READ and event.fd not in (self._wake_read, self._alarm.descriptor):
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
                self._watch_listener()
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

    def _watch_listener(self) -> None:
        wanted = self._handshakes < MAX_HANDSHAKES
        if wanted and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener)
        self._listening = wanted

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
        if self._handshakes >= MAX_HANDSHAKES:
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:
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
            with engine._lock:
                self._handshakes -= 1
                if not engine._closing:
                    self.wake()
