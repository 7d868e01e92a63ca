"""Postings: runs of bytes that are handed to a link piece by piece, in C++ (`ffi/transfer`), and their completions."""

from __future__ import annotations

import ctypes
import functools
import importlib
from ctypes import c_void_p
from typing import Any, Protocol

import numpy as np

from xen_moe_jax.transfer import _ucp
from xen_moe_jax.transfer._errors import TransferUnavailable
from xen_moe_jax.transfer._wire import Repeated

SLICE = {"host": 16 << 20, "cuda": 1 << 30}
"""Bytes handed to the library before the engine's lock is given up, so that no peer's message waits for a whole write
of 128 MiB. Host memory is copied in the call; a GPU's is copied later, by the GPU.
"""
PIECES = 1024
"""Most pieces handed to the library before the engine's lock is given up."""
POLLS = 8
"""Polls that find nothing new before a call of the loop returns: host memory has arrived by then."""
POLLS_GPU = 256
SHORT_GPU = 2 << 20
"""The number of polls, of about half a microsecond each, for up to `SHORT_GPU` bytes between GPUs: waking the engine's
thread for a copy of some microseconds would take longer than the copy.
"""
SHORT = 256 << 10
"""Most bytes of a copy of host memory that keeps the GIL: it ends sooner than another thread could take the GIL."""

_CALLS = (
    "ucp_put_nbx",
    "ucp_get_nbx",
    "ucp_ep_flush_nbx",
    "ucp_worker_progress",
    "ucp_request_check_status",
    "ucp_request_free",
)
_MEMORIES = ("host", "cuda")
_PARAMETERS = {memory: _ucp.parameters(memory) for memory in _MEMORIES}
_FLUSH = _ucp.RequestParams()


@functools.cache
def native() -> Any:
    """Returns the compiled module. Raises `TransferUnavailable` where it was not built."""
    try:
        return importlib.import_module("xen_moe_jax.transfer._native")
    except ImportError as cause:
        raise TransferUnavailable(
            f"xen_moe_jax.transfer has a compiled part, which this installation lacks ({cause}): in a checkout, "
            "install a C++ compiler and run `make transfer`; otherwise install the package's Linux wheel"
        ) from cause


class LinkState(Protocol):
    """A link. `failed` is the reason why it broke, or None."""

    failed: str | None


class Endpoint(Protocol):
    """The part of a link that a posting uses. `runs_alone`: copies that were handed over need no driving."""

    @property
    def failed(self) -> str | None: ...

    @property
    def open(self) -> bool: ...

    @property
    def runs_alone(self) -> bool: ...

    def status_text(self, status: int) -> str: ...


class Key:
    """An unpacked key and the number of postings that use it.

    Different memory may have equal keys: on one host a key has no address. `handle` is UCX's key, or the address of a
    `PeerMemory`.
    """

    def __init__(self, handle: int):
        self.handle, self.postings, self.forgotten = handle, 0, False

    def release(self) -> None:
        """Gives the handle back once the key is forgotten and no posting uses it."""
        if self.forgotten and not self.postings and self.handle:
            _ucp.library().ucp_rkey_destroy(self.handle)
            self.handle = 0


class NativePosting:
    """A posting, with its link and its key."""

    def __init__(self, link: Endpoint, key: Key, loop: Any, nbytes: int):
        self.error: str | None = None
        self.nbytes = nbytes
        self._link, self._key = link, key
        self._loop: Any = loop
        self.bytes_posted: int = loop.bytes_posted
        self.runs_alone = link.runs_alone and self.bytes_posted == nbytes
        key.postings += 1

    def stop(self) -> None:
        """Hands over nothing more."""
        if self._loop is not None:
            self._loop.stop()

    def advance(self) -> bool:
        """Hands over more runs and checks for completions. Returns True if nothing is in flight any more."""
        loop = self._loop
        if loop is None:
            return True
        if self._link.failed:
            self.stop()
            self.error = self.error or self._link.failed
        ended = loop.advance(self._link.open, POLLS)
        self.bytes_posted = loop.bytes_posted
        if status := loop.status:
            self.error = self.error or self._link.status_text(status)
        if ended:
            self._loop = None
            self._key.postings -= 1
            self._key.release()
        return ended

    def spin(self, seconds: float) -> None:
        """Waits until the posting has ended, or for `seconds`."""
        if self._loop is not None and not self._link.failed:
            self._loop.spin(int(seconds * 1e9))


class FailedPosting:
    """A posting on a link that had failed before: nothing was handed over."""

    runs_alone = False
    bytes_posted = 0

    def __init__(self, nbytes: int, error: str):
        self.nbytes = nbytes
        self.error: str | None = error

    def stop(self) -> None:
        """Does nothing."""

    def advance(self) -> bool:
        """Returns True: nothing is in flight."""
        return True

    def spin(self, seconds: float) -> None:
        """Does nothing."""


class Prepared:
    """Repeated runs for one key. Valid until the key is forgotten: the link then prepares them anew.

    `call` starts the runs from a source at an address. It returns None if all have arrived, otherwise the argument of
    `posting`.
    """

    __slots__ = ("_loop", "_starter", "call", "key", "nbytes")

    def __init__(self, starter: Starter, key: Key, nbytes: int, loop: Any, keeps_gil: bool):
        self._starter, self.key, self.nbytes, self._loop = starter, key, nbytes, loop
        self.call = loop.start_short if keeps_gil else loop.start

    def start(self, pointer: int) -> NativePosting | None:
        """Puts the runs from a source that begins at `pointer`. Returns None if all have arrived."""
        return None if (loop := self.call(pointer)) is None else self.posting(loop)

    def posting(self, loop: Any) -> NativePosting:
        """Returns the posting for the result of `call`."""
        return self._starter.posting(self.key, loop, self.nbytes)


class LastingPrepared(Prepared):
    """Prepared runs that may be started without the link while it works: the bytes have arrived when `call` returns.

    Other preparations do not last: UCX's keys are given back, and mappings of a GPU's memory are closed.
    """

    __slots__ = ()


class Starter:
    """Starts postings on one link."""

    def __init__(self, link: Endpoint):
        self._state = link
        self.link = native().Link(SLICE["host"], SLICE["cuda"], PIECES)
        self.lasts = False

    @classmethod
    def ucx(cls, link: Endpoint, worker: int, endpoint: int) -> Starter:
        """Returns a starter of puts and gets by UCX."""
        made, ucp = cls(link), _ucp.library()
        parameters = [ctypes.addressof(_PARAMETERS[memory]) for memory in _MEMORIES]
        calls = [address(getattr(ucp, call)) for call in _CALLS]
        made.link.use_ucx(calls, worker, endpoint, parameters, ctypes.addressof(_FLUSH))
        return made

    def post(self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray) -> NativePosting | None:
        """Starts runs. Returns None if all have arrived."""
        runs = np.ascontiguousarray(runs, np.int64)
        polls, keeps_gil = self._polls(memory, nbytes), _is_short(memory, nbytes)
        loop = self.link.start(kind == "get", key.handle, memory == "cuda", runs, polls, keeps_gil)
        return None if loop is None else self.posting(key, loop, nbytes)

    def posting(self, key: Key, loop: Any, nbytes: int) -> NativePosting:
        """Returns a posting around one of the loop's."""
        return NativePosting(self._state, key, loop, nbytes)

    def prepare(self, key: Key, runs: Repeated) -> Prepared:
        """Prepares repeated runs for one key, and notes the preparation with the runs."""
        template = np.ascontiguousarray(runs.template, np.int64)
        polls, keeps_gil = self._polls(runs.memory, runs.nbytes), _is_short(runs.memory, runs.nbytes)
        loop = native().Prepared(self.link, key.handle, runs.memory == "cuda", template, polls)
        kind = LastingPrepared if self.lasts else Prepared
        prepared = runs.prepared = kind(self, key, runs.nbytes, loop, keeps_gil)
        runs.lasting = prepared if isinstance(prepared, LastingPrepared) else None
        return prepared

    def _polls(self, memory: str, nbytes: int) -> int:
        to_gpu = memory == "cuda" or self._state.runs_alone
        return POLLS_GPU if to_gpu and nbytes <= SHORT_GPU else POLLS


def _is_short(memory: str, nbytes: int) -> bool:
    return nbytes <= SHORT and memory == "host"


def address(function: Any) -> int:
    """Returns the address of a function of a ctypes library."""
    return ctypes.cast(function, c_void_p).value or 0
