"""The files of a group in one folder: a state that is replaced as a whole under a lock, and a few words of shared
memory that tell without a lock whether the state is worth reading. A process may be killed at any instruction: the
kernel drops its lock, and neither a word nor the state is ever half written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

BOARD_BYTES = 4096
PROPOSAL, URGENT, WAITING, CHANGE = range(4)
"""Words: the newest proposal; the newest that interrupts steps under way; 1 while a process waits to be let in; the
step at whose beginning it will be let in, 0 for none."""
LEFT = 16
"""The word of slot `s` is `LEFT + s`: 1 once its process has left the group."""
MOST_SLOTS = 256


class Board:
    """The folder of a group, as one process sees it."""

    def __init__(self, folder: str | os.PathLike[str], slots: int) -> None:
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.words = map_file(self.folder / "board", BOARD_BYTES).cast("Q")
        with self.locked():
            if not (self.folder / "state.json").exists():
                self.write({"slots": slots, "proposal": 0, "members": {}, "claims": {}})
            found = self.read()["slots"]
        if found != slots:
            raise ValueError(f"elastic.Group: slots={slots}: the group in {self.folder} has {found}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the group's lock, for a moment: never while waiting for another process."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def read(self) -> dict[str, Any]:
        """The state; keys of JSON's objects are text."""
        return json.loads((self.folder / "state.json").read_text())

    def write(self, state: dict[str, Any]) -> None:
        """Replaces the state; the caller holds the lock."""
        self.put("state.json", state)

    def put(self, name: str, value: Any) -> None:
        """Writes a file that readers find whole or not at all."""
        new = self.folder / f".{name}.{os.getpid()}"
        new.write_text(json.dumps(value))
        os.replace(new, self.folder / name)

    def get(self, name: str) -> Any | None:
        """The value of a file that `put` has written; None if there is none."""
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def close(self) -> None:
        os.close(self._lock)


def map_file(path: pathlib.Path, nbytes: int) -> memoryview:
    """Shared memory of at least `nbytes` bytes, zero at first: every process that names the file has the same."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < nbytes:
            os.ftruncate(descriptor, nbytes)
        return memoryview(mmap.mmap(descriptor, nbytes))
    finally:
        os.close(descriptor)


if platform.machine() in ("x86_64", "AMD64"):

    def fence() -> None:
        """Orders what this process has stored before with what it stores after: on x86 stores become visible in
        order, and loads happen in order."""

else:
    _own = os.memfd_create("xen_moe_jax_fence") if hasattr(os, "memfd_create") else -1

    def fence() -> None:
        """Orders loads and stores before with those after: the kernel's lock of a file is a barrier."""
        fcntl.flock(_own, fcntl.LOCK_EX)
        fcntl.flock(_own, fcntl.LOCK_UN)
