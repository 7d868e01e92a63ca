"""The descriptors that an engine waits for, a pipe that wakes its thread, and an alarm."""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

COPY_S, COPY_BYTES_PER_S = 50e-6, 3e11
"""Expected time of a copy that needs no driving: this many seconds, and its bytes at this rate."""


class _Alarm:
    """A descriptor that becomes readable after a while (Linux's timerfd, which Python has from 3.13 on)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        monotonic, flags = time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = self._library.timerfd_create(ctypes.c_int(monotonic), ctypes.c_int(flags))
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "timerfd_create")
        self._setting = (ctypes.c_long * 4)()  # `struct itimerspec`: an interval, and the first expiry.
        self._settime = ctypes.PyDLL(None).timerfd_settime
        self._arguments = ctypes.c_int(self.descriptor), ctypes.c_int(0), ctypes.byref(self._setting), None

    def set(self, seconds: float) -> None:
        """Fires once after `seconds` (under a second), or never for 0. Replaces the earlier setting."""
        self._setting[3] = int(seconds * 1e9)
        self._settime(*self._arguments)

    def on_alarm(self) -> None:
        """Clears the alarm after it has fired."""
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            pass


class Poller:
    """A selector with one callback for each descriptor. Apart from `wake`, its methods need the engine's lock.

    Attributes: `owner` (the thread that calls `select`; a wake-up from this thread is not needed), `alarm`.
    """

    def __init__(self, wire_events: int):
        self.owner: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.selector = selectors.DefaultSelector()
        self.alarm, self._due = _Alarm(), 0.0
        self.watch(self._wake_read, self._drain_wake)
        self.watch(self.alarm.descriptor, self.alarm.on_alarm)
        self.watch(wire_events, lambda: None)

    def watch(self, descriptor: int | socket.socket, on_readable: Callable[[], object]) -> None:
        """Calls `on_readable` whenever the descriptor is readable."""
        self.selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def unwatch(self, descriptor: int | socket.socket) -> None:
        """Ends a `watch`."""
        self.selector.unregister(descriptor)

    def watch_writes(self, connection: socket.socket, wanted: bool) -> None:
        """Makes `select` return also when a watched socket is writable, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        registered = self.selector.get_key(connection)
        if registered.events != events:
            self.selector.modify(connection, events, registered.data)

    def wake(self) -> None:
        """Makes the engine's thread return from `select` now. Any thread may call this."""
        if threading.current_thread() is not self.owner:
            try:
                os.write(self._wake_write, b"x")
            except BlockingIOError:
                pass

    def schedule_poll(self, nbytes: int) -> None:
        """Wakes the engine's thread when a copy of `nbytes`, which needs no driving, is expected to have ended.

        A caller that waits for the copy has usually seen its end by then, without competing with the thread. A poll
        that is scheduled already is not put off.
        """
        now = time.monotonic()
        if now >= self._due:
            seconds = min(0.5, COPY_S + nbytes / COPY_BYTES_PER_S)
            self._due = now + seconds
            self.alarm.set(seconds)

    def cancel_poll(self) -> None:
        """Cancels the scheduled poll: no copy is in progress any more."""
        if self._due:
            self._due = 0.0
            self.alarm.set(0)

    def poll(self) -> None:
        """Runs the callbacks of readable descriptors in the caller's thread; does not wait."""
        for event, mask in self.selector.select(0):
            # Wake-ups are for the thread: if a caller consumed one, the thread would sleep on.
            if mask & selectors.EVENT_READ and event.fd not in (self._wake_read, self.alarm.descriptor):
                event.data()

    def select(self, timeout: float) -> list[Callable[[], object]]:
        """Waits for at most `timeout` seconds, without the lock; returns the callbacks of readable descriptors."""
        return [event.data for event, mask in self.selector.select(timeout) if mask & selectors.EVENT_READ]

    def close(self) -> None:
        """Closes the selector, the pipe and the alarm."""
        self.selector.close()
        for descriptor in (self._wake_read, self._wake_write, self.alarm.descriptor):
            os.close(descriptor)

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
