"""Finds the processes of a job that have died: the operating system tells a daemon thread, which need not infer it from
silence.

On one host a process holds a pidfd of every other: it becomes readable when that process ends, however it ends, and not
when it is stopped or busy. Processes in other PID namespaces cannot be held that way; they write a counter to the
job's store, and one whose counter stands still for `SILENCE_S` counts as dead, stopped or not.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import select
import signal
import threading
import time
from collections.abc import Callable

from xen_moe_jax.backends.cuda.agreement import Store

PREFIX = "xen_moe_jax/alive"
POLL_S = 0.5
BEAT_S = 2.0
SILENCE_S = 8.0
WAIT_S = 120.0
"""Time that another process has to start its watcher."""
ENDING_S = 30.0
"""Time that a killed process has to end. Until then the driver frees the process's memory on the GPU."""

PF_EXITING = 4
"""Flag of a process that ends (include/linux/sched.h), in the flags of `/proc/PID/stat`."""


def identity(pid: int | None = None) -> str:
    """Identifies a process for other processes: PID namespace, PID, start time in clock ticks after boot.

    Raises:
      OSError: there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    started = _stat(pid)[19]
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {namespace} {pid} {started}"


def _stat(pid: int) -> list[str]:
    """Returns the words of `/proc/PID/stat` from the third one, the state, on.

    Raises:
      OSError: there is no such process.
    """
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()  # the name may hold anything


def ending(other: str) -> bool:
    """Returns True if the process with this `identity`, in this PID namespace, is being ended by the operating system:
    it runs no more of its own instructions. Returns False where that is not known, or where there is no such process.
    """
    try:
        words = _stat(int(other.split()[2]))
    except OSError:
        return False
    return words[19] == other.split()[3] and (words[0] in "ZX" or bool(int(words[6]) & PF_EXITING))


def hold(other: str) -> int | None:
    """A pidfd of the process with this `identity`; None where it cannot be seen from here.

    Raises:
      ProcessLookupError: it can be seen that it has ended.
    """
    boot, namespace, pid, _ = other.split()
    mine = identity().split()
    if [boot, namespace] != mine[:2]:
        return None
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        raise
    except OSError:
        return None  # a kernel or a sandbox without pidfd
    try:
        same = identity(int(pid)) == other
    except PermissionError:
        same = True
    except OSError:
        same = False
    if same:
        return descriptor
    os.close(descriptor)  # another process has its number by now
    raise ProcessLookupError(int(pid))


def end(pid: int) -> bool:
    """Kills a process, which may be stopped. Returns True once it has ended, False if it has not after `ENDING_S`, or
    may not be killed from here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(ENDING_S * 1000))
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    finally:
        os.close(descriptor)


class Watcher:
    """Watches every other process of the job until it is closed; `died(process, clean)` is called once for each death.

    `clean`: the process had said that it was leaving, as it does when its interpreter ends in order.
    """

    def __init__(
        self, store: Store, process: int, count: int, died: Callable[[int, bool], None], *, use_pidfd: bool = True
    ) -> None:
        self._store, self._process, self._count, self._died = store, process, count, died
        self._use_pidfd = use_pidfd
        self._dead: set[int] = set()
        self._stop = threading.Event()
        store.set(f"{PREFIX}/{process}/identity", identity().encode())
        self._thread = threading.Thread(target=self._watch, name="xen_moe_jax liveness", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def dead(self) -> frozenset[int]:
        return frozenset(self._dead)

    def leave(self) -> None:
        """Tells the other processes that this process ends in order, and stops watching."""
        self._stop.set()
        with contextlib.suppress(Exception):  # the store may have gone before
            self._store.set(f"{PREFIX}/{self._process}/left", b"1")

    def _watch(self) -> None:
        held, beating = {}, []
        for process in range(self._count):
            if process == self._process:
                continue
            other = self._identity_of(process)
            if other is None:
                continue  # it never came: an agreement with it names it
            try:
                descriptor = hold(other) if self._use_pidfd else None
            except ProcessLookupError:
                self._report(process)
                continue
            if descriptor is None:
                beating.append(process)
            else:
                held[descriptor] = process
        poll = select.poll()
        for descriptor in held:
            poll.register(descriptor, select.POLLIN)
        if beating:
            self._store.set(f"{PREFIX}/{self._process}/beats", b"1")
        if beating or not held:
            threading.Thread(target=self._beat, name="xen_moe_jax heartbeat", daemon=True).start()
        seen = {process: (b"", time.monotonic()) for process in beating}
        while not self._stop.is_set():
            for descriptor, _ in poll.poll(POLL_S * 1000):
                poll.unregister(descriptor)
                os.close(descriptor)
                self._report(held.pop(descriptor))
            self._check_beats(seen)

    def _identity_of(self, process: int) -> str | None:
        limit = time.monotonic() + WAIT_S
        while not self._stop.is_set() and time.monotonic() < limit:
            with contextlib.suppress(Exception):
                value = self._store.get(f"{PREFIX}/{process}/identity", 1.0)
                if value is not None:
                    return value.decode()
        return None

    def _check_beats(self, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for process, (last, since) in list(seen.items()):
            try:
                value = self._store.get(f"{PREFIX}/{process}/beat", 0.001) or b""
            except Exception:  # the store itself does not answer: nothing is known about this process
                seen[process] = (last, now)
                continue
            if value != last:
                seen[process] = (value, now)
            elif now - since > SILENCE_S:
                del seen[process]
                self._report(process)

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(BEAT_S if number else 0.0):
            number += 1
            with contextlib.suppress(Exception):
                self._store.set(f"{PREFIX}/{self._process}/beat", str(number).encode())

    def _report(self, process: int) -> None:
        try:
            clean = self._store.get(f"{PREFIX}/{process}/left", 0.5) is not None
        except Exception:  # the process that kept the store is gone too
            clean = False
        if self._stop.is_set():
            return
        self._dead.add(process)
        self._died(process, clean)
