"""The files of a group in one folder: a state that is replaced as a whole under a lock, and a few words of shared
memory, which a process reads without the lock to learn whether the state has changed. A process may be killed at any
instruction: the operating system then drops the lock that the process held, and neither a word nor the state is ever
half written. A process that is stopped while it holds the lock is killed by the next one that has waited for too long.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import pathlib
import platform
import time
from collections.abc import Iterator
from typing import Any

from xen_moe_jax.backends.cuda import liveness

BOARD_BYTES = 4096
PROPOSAL, URGENT, WAITING, CHANGE = range(4)
"""Indices of the board's words, each a uint64. `PROPOSAL`: number of the newest proposal. `URGENT`: number of the
newest proposal that interrupts steps under way. `WAITING`: 1 while a process waits to be let in, or a member wants
another placement. `CHANGE`: the view, modulo 2**24, and in the lowest `STEP_BITS` the step at whose beginning the view
changes; 0 where no change is planned."""
STEP_BITS = 40
LAST_STEP = 2**STEP_BITS - 2
"""The largest number of a step. The number of the step behind it fits into `STEP_BITS`, too."""
LEFT = 16
"""Index `LEFT + s` is the word of slot `s`: the number of the newest claim of this slot whose process has left."""
MOST_SLOTS = 256
LOCK_PAUSE_S = 0.0002
"""Seconds between two attempts to take the lock."""
LOOKS = 8
"""A waiting process looks this many times in the group's time limit at which process holds the lock. It ends a
process that it then finds with the lock again more than this many times, with no other process in between."""


class Board:
    """The folder of a group, as one process sees it. The first process makes its files.

    Attributes:
      folder: the path.
      words: the board's words, uint64, shared by all processes.
    """

    def __init__(self, folder: str | os.PathLike[str], slots: int, timeout_s: float) -> None:
        self.folder, self._timeout_s = pathlib.Path(folder), timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.words = map_file(self.folder / "board", BOARD_BYTES).cast("Q")
            with self.locked():
                if not (self.folder / "state.json").exists():
                    self.write({"slots": slots, "proposal": 0, "urgent": 0, "claimed": 0, "members": {}, "claims": {}})
            undo.pop_all()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the group's lock. The caller holds it for a moment, and never while it waits for another process. A
        process that has held it for `timeout_s` is ended.

        Raises:
          TimeoutError: that process cannot be found or ended.
        """
        look, seen = time.monotonic(), 0
        suspect: int | None = -1
        ended: int | None = None
        while not self._take():
            if time.monotonic() >= look:
                look, holder = time.monotonic() + self._timeout_s / LOOKS, _holder(self._lock)
                suspect, seen = holder, seen + 1 if holder == suspect else 0
                if seen > LOOKS:  # else another process has got the lock between two looks
                    self._end(holder, ended)
                    ended, seen = holder, 0
            time.sleep(LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _take(self) -> bool:
        """Takes the lock if no other process holds it. Returns True if this process holds it then."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _end(self, holder: int | None, ended: int | None) -> None:
        """Ends the process that holds the lock. `ended`: the process that was ended before, if any.

        Raises:
          TimeoutError: as `locked`.
        """
        if holder is None or holder == ended or not liveness.end(holder):
            raise TimeoutError(
                f"elastic.Group: process {holder or 'unknown'}, or a child of it, has held the lock of {self.folder} "
                f"for more than {self._timeout_s:g} s, and cannot be ended from here: end it, or let it go on"
            )

    def read(self) -> dict[str, Any]:
        """Returns the state. Slots are text in it, because the keys of JSON's objects are."""
        return self._load("state.json")

    def _load(self, name: str) -> Any:
        """Returns the value in file `name`.

        Raises:
          RuntimeError: the file is not what `put` writes, as after a crash of the machine, or where it was changed.
        """
        try:
            return json.loads((self.folder / name).read_text())
        except ValueError:
            raise RuntimeError(
                f"elastic.Group: {self.folder / name} is damaged: end the group's processes, and remove the folder or "
                "use another one"
            ) from None

    def write(self, state: dict[str, Any]) -> None:
        """Replaces the state; the caller holds the lock."""
        self.put("state.json", state)

    def put(self, name: str, value: Any) -> None:
        """Writes `value` as JSON into file `name`, which readers find whole or not at all.

        Raises:
          OSError: the file system has no room for it; file `name` is as it was.
        """
        new = self.folder / f".{name}.{os.getpid()}"
        try:
            with _room_in(self.folder, name):
                new.write_text(json.dumps(value))
            os.replace(new, self.folder / name)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> Any | None:
        """Returns the value that `put` has written into file `name`; None if there is no such file."""
        try:
            return self._load(name)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Closes the lock's file; the words stay readable."""
        os.close(self._lock)


def _holder(descriptor: int) -> int | None:
    """Returns the PID of the process that holds the lock of this file; None where the operating system names none."""
    file = os.fstat(descriptor)
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        held = [line.split() for line in pathlib.Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    except OSError:
        return None
    return next((int(words[4]) for words in held if words[1] != "->" and words[5] == name and int(words[4]) > 0), None)


def map_file(path: pathlib.Path, nbytes: int) -> memoryview:
    """Returns the first `nbytes` bytes of a file as shared memory: all processes that map the file see the same bytes.
    The file is made, or made longer, where it is shorter; new bytes are zero.

    Raises:
      OSError: the file system has no room for them. A file without that room would end the process at a later store.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _room_in(path.parent, f"{nbytes} bytes"):
            if os.fstat(descriptor).st_size < nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
            return memoryview(mmap.mmap(descriptor, nbytes))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _room_in(folder: pathlib.Path, what: str) -> Iterator[None]:
    """Raises an OSError that names the folder and the remedy where the file system has no room for `what`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"elastic.Group: no room for {what} in {folder}: free or enlarge it (Docker: --shm-size)"
        raise OSError(error.errno, text) from error


if platform.machine() in ("x86_64", "AMD64"):

    def fence() -> None:
        """Orders this process's loads and stores before the call with those after it. It does nothing on x86, where
        stores become visible in program order and loads happen in program order."""

else:
    _own = os.memfd_create("xen_moe_jax_fence") if hasattr(os, "memfd_create") else -1

    def fence() -> None:
        """Orders this process's loads and stores before the call with those after it: taking a file's lock is a memory
        barrier in the operating system."""
        fcntl.flock(_own, fcntl.LOCK_EX)
        fcntl.flock(_own, fcntl.LOCK_UN)
