"""The interface to the library that moves bytes: memory, links to peers, and postings of many runs at once.

An engine moves bytes only through these protocols; `_ucx.UcxWire` implements them. All calls on one wire are made under
its engine's lock, from any thread that holds the lock.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Posting(Protocol):
    """Runs in progress. `bytes_posted` counts the bytes that the library was given; they are confirmed at the end.

    `runs_alone`: every run was handed over, and the copies need no driving. Such a posting has `spin`.
    """

    nbytes: int
    bytes_posted: int
    error: str | None
    runs_alone: bool

    def spin(self, seconds: float) -> None:
        """Waits until the posting has ended, or for `seconds`. `advance` then returns whether it has ended."""

    def advance(self) -> bool:
        """Hands over more runs and checks for completions. Returns True if nothing is in flight any more; `error` tells
        if a part failed.
        """

    def stop(self) -> None:
        """Hands over nothing more. `advance` must still be called until it returns True."""


class Repeated:
    """Runs of a write that is started again and again. Their local addresses count from the source's first byte.

    The link keeps its preparations for the runs here: `prepared`, and `lasting` if they can be started without the link
    until the link fails.
    """

    __slots__ = ("key", "lasting", "memory", "nbytes", "prepared", "template")

    def __init__(self, key: bytes, memory: str, nbytes: int, template: np.ndarray):
        self.key, self.memory, self.nbytes, self.template = key, memory, nbytes, template
        self.prepared: Any = None
        self.lasting: LastingPut | None = None


class LastingPut(Protocol):
    """Prepared runs that have arrived when `call` returns None. Otherwise `posting` takes the result of `call`."""

    def call(self, pointer: int) -> Any:
        """Puts the runs from a source that begins at `pointer`."""

    def posting(self, loop: Any) -> Posting: ...


def at_address(template: np.ndarray, pointer: int) -> np.ndarray:
    """Returns the runs of a template for a source that begins at `pointer`."""
    runs = template.copy()
    runs[:, 0] += pointer
    return runs


class Link(Protocol):
    """A link to one peer's memory. `failed` is the reason why it broke, or None."""

    failed: str | None

    def post(self, kind: str, key: bytes, memory: str, nbytes: int, runs: np.ndarray) -> Posting | None:
        """Starts `kind` ("put" or "get") of `runs`, int64 `[n, 3]`: local address, remote address, bytes (`nbytes` in
        all); no order among them. `memory` is that of the local addresses, "host" or "cuda". Returns None if all runs
        have arrived already.
        """

    def post_again(self, runs: Repeated, pointer: int) -> Posting | None:
        """Posts a "put" of prepared runs from a source that begins at `pointer`. Returns as `post` does."""

    def takes_host_memory(self, key: bytes) -> bool:
        """Returns whether the memory of `key`, on a GPU, can be written from host memory."""

    def forget(self, key: bytes) -> None:
        """Gives up the memory that `key` names. Postings in flight may end; a later posting unpacks the key anew."""

    def close(self, force: bool) -> None:
        """Closes the link. With `force`, postings in flight end with an error; without it there must be none."""


class Memory(Protocol):
    """Registered memory. A peer needs `key` to address it."""

    key: bytes

    def release(self) -> None: ...


class Wire(Protocol):
    """A library that moves bytes. A peer connects with `address`; `event_fd` becomes readable at events."""

    address: bytes
    event_fd: int

    def register(self, pointer: int, nbytes: int, memory: str) -> Memory:
        """Makes `nbytes` at `pointer` addressable by peers; `memory` is "host" or "cuda"."""

    def connect(self, address: bytes) -> Link: ...

    def progress(self) -> None:
        """Lets the library work, also on writes of peers into this process."""

    def arm(self) -> bool:
        """Arms `event_fd` for the next event. Returns False if there is work now."""

    def close(self) -> None: ...
