"""What a `UcxLink` has under way: runs of bytes, handed to UCX piece by piece, and their completions.

The loop over the pieces is `ffi/ucx_posting.cc`, where this package was built with a C++ compiler, and the same in
Python elsewhere (a pure Python wheel): several microseconds a piece slower, and otherwise the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from collections import deque
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from xen_moe_jax.transfer import _ucp

if TYPE_CHECKING:
    from xen_moe_jax.transfer.wire import UcxLink

SLICE = {"host": 16 << 20, "cuda": 1 << 30}
"""Bytes handed to the library before the engine's lock is given up: no peer's message waits behind a whole 128 MiB
write. Host memory is copied in the call; a GPU's is copied later, by the GPU.
"""
PIECES = 1024
"""The same limit for pieces."""
POLLS = 8
"""Looks that find nothing new before a call of the loop returns: host memory has arrived by then."""
POLLS_GPU = 256
SHORT_GPU = 2 << 20
"""So many looks, at about half a microsecond each, for up to so many bytes between GPUs: waking the engine's thread for
a copy of some microseconds would take longer than the copy.
"""
SHORT = 256 << 10
"""Bytes whose copy takes less time than another thread's turn with the GIL, which is kept for that long."""

LIBRARY = pathlib.Path(__file__).with_name("libucx_posting.so")


class Key:
    """An unpacked key and the postings that use it. Different memory may have equal keys: on one host a key names no
    address.
    """

    def __init__(self, handle: int):
        self.handle, self.postings, self.forgotten = handle, 0, False

    def release(self) -> None:
        """Gives the handle back once nothing uses it and nobody will."""
        if self.forgotten and not self.postings and self.handle:
            _ucp.library().ucp_rkey_destroy(self.handle)
            self.handle = 0


class PythonPosting:
    """A posting whose loop is in Python."""

    def __init__(self, link: UcxLink, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray):
        self.nbytes = nbytes
        self.bytes_posted = 0
        self.error: str | None = None
        self._link = link
        self._function = _ucp.library().ucp_put_nbx if kind == "put" else _ucp.library().ucp_get_nbx
        self._key = key
        self._slice, self._parameters = SLICE[memory], _PARAMETERS[memory]
        key.postings += 1
        self._runs: deque[tuple[int, int, int]] = deque(map(tuple, runs.tolist()))
        self._requests: list[int] = []
        self._flushing = False
        self._done = False

    def stop(self) -> None:
        self._runs.clear()

    def advance(self) -> bool:
        if self._done:
            return True
        if self._link.failed:
            self._runs.clear()
            self.error = self.error or self._link.failed
        budget, pieces = self._slice, PIECES
        while self._runs and budget > 0 and pieces > 0:
            budget -= self._hand_over()
            pieces -= 1
        self._collect()
        if not self._runs and not self._requests:
            if self._flushing or not self._link.open:
                self._done = True
            else:
                # A put that ended locally may still be on its way; the flush ends when all are in the peer's memory.
                self._flushing = True
                self._keep(_ucp.library().ucp_ep_flush_nbx(self._link.endpoint, _FLUSH))
                self._done = not self._requests
        if self._done:
            self._key.postings -= 1
            self._key.release()
        return self._done

    def _hand_over(self) -> int:
        local, remote, nbytes = self._runs.popleft()
        part = min(nbytes, self._slice)
        if part < nbytes:
            self._runs.appendleft((local + part, remote + part, nbytes - part))
        self._keep(self._function(self._link.endpoint, local, part, remote, self._key.handle, self._parameters))
        self.bytes_posted += part
        return part

    def _keep(self, returned: int | None) -> None:
        status = _ucp.request_status(returned)
        if status is None:
            assert returned is not None
            self._requests.append(returned)
        elif status < 0:
            self._fail(status)

    def _collect(self) -> None:
        ucp = _ucp.library()
        waiting = []
        for request in self._requests:
            status = ucp.ucp_request_check_status(request)
            if status == _ucp.IN_PROGRESS:
                waiting.append(request)
                continue
            ucp.ucp_request_free(request)
            if status < 0:
                self._fail(status)
        self._requests = waiting

    def _fail(self, status: int) -> None:
        self._runs.clear()
        self.error = self.error or _ucp.status_text(status)


class _LinkFields(ctypes.Structure):
    """`XenMoeLink` of ucx_posting.cc."""

    _fields_ = [
        *((name, c_void_p) for name in ("put", "get", "flush", "progress", "check", "release", "worker", "endpoint")),
        ("parameters", c_void_p * 2),
        ("flush_parameters", c_void_p),
        ("slice", c_int64 * 2),
        ("pieces", c_int64),
    ]


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
_PROTOTYPES = {
    "start": (c_void_p, [c_void_p, c_int, c_void_p, c_int, c_void_p, c_size_t, c_int]),
    "start_one": (c_void_p, [c_void_p, c_int, c_void_p, c_int, c_int64, c_int64, c_int64, c_int]),
    "advance": (c_int, [c_void_p, c_int, c_int]),
    "stop": (None, [c_void_p]),
    "bytes": (c_int64, [c_void_p]),
    "status": (c_int, [c_void_p]),
    "free": (None, [c_void_p]),
}


_COPIES = ("put", "get", "flush", "progress", "check", "release")
_COPY_PROTOTYPES = {"new": (c_void_p, [c_void_p]), "error": (c_int, [c_void_p]), "free": (None, [c_void_p])}


class _Native:
    """The functions of ucx_posting.cc and of cuda_copies.cc. Those with `_short` keep the GIL.

    `copy_calls` are addresses of those that stand in for UCX's where the driver copies.
    """

    def __init__(self, path: pathlib.Path):
        library = self.library = ctypes.CDLL(str(path))
        for call, prototype in _COPY_PROTOTYPES.items():
            function: Any = getattr(library, f"xen_moe_copies_{call}")
            function.restype, function.argtypes = prototype
        self.copy_calls = [_address(getattr(library, f"xen_moe_copies_{name}")) for name in _COPIES]
        holding = ctypes.PyDLL(str(path), handle=library._handle)
        for name, (result, arguments) in _PROTOTYPES.items():
            for functions, suffix in ((library, ""), (holding, "_short")):
                function = getattr(functions, f"xen_moe_posting_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name + suffix, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


@functools.cache
def native() -> _Native | None:
    """The loop in C++, or None where it was not built. `XEN_MOE_TRANSFER_POSTING` names another file or "python"."""
    chosen = os.environ.get("XEN_MOE_TRANSFER_POSTING")
    path = LIBRARY if chosen is None else pathlib.Path(chosen)
    if chosen == "python" or (chosen is None and not path.exists()):
        return None
    return _Native(path)


class Endpoint(Protocol):
    """What a posting asks of the link that it is on."""

    @property
    def failed(self) -> str | None: ...

    @property
    def open(self) -> bool: ...

    def status_text(self, status: int) -> str: ...


class NativePosting:
    """A posting whose loop is in C++: `handle` is what that gave."""

    def __init__(self, loop: _Native, link: Endpoint, key: Key, handle: int, nbytes: int):
        self.error: str | None = None
        self.nbytes = nbytes
        self._loop, self._link, self._key = loop, link, key
        self._handle: int | None = handle
        self.bytes_posted = loop.bytes_short(handle)
        key.postings += 1

    def stop(self) -> None:
        if self._handle:
            self._loop.stop_short(self._handle)

    def advance(self) -> bool:
        if not self._handle:
            return True
        if self._link.failed:
            self.stop()
            self.error = self.error or self._link.failed
        ended = self._loop.advance(self._handle, self._link.open, POLLS)
        self.bytes_posted = self._loop.bytes_short(self._handle)
        if status := self._loop.status_short(self._handle):
            self.error = self.error or self._link.status_text(status)
        if ended:
            self._loop.free_short(self._handle)
            self._handle = None
            self._key.postings -= 1
            self._key.release()
        return bool(ended)

    def __del__(self) -> None:
        if self._handle:  # The engine is gone, and the worker with it: nothing is in flight.
            self._loop.free_short(self._handle)


class PythonStarter:
    """Starts postings on a link: `post`, and `post_one` for one run, which gives None where it has ended well."""

    def __init__(self, link: UcxLink):
        self._link = link

    def post(
        self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray
    ) -> PythonPosting | NativePosting | None:
        return PythonPosting(self._link, kind, key, memory, nbytes, runs)

    def post_one(
        self, kind: str, key: Key, memory: str, local: int, remote: int, nbytes: int
    ) -> PythonPosting | NativePosting | None:
        return self.post(kind, key, memory, nbytes, np.array([[local, remote, nbytes]], np.int64))


class NativeStarter:
    """The same by the loop in C++. `calls` are the addresses of the functions that it calls in place of `_CALLS`."""

    def __init__(self, loop: _Native, link: Endpoint, calls: Sequence[int], worker: int, endpoint: int):
        self._loop, self._link = loop, link
        self._fields = _LinkFields(
            *calls,
            worker,
            endpoint,
            (c_void_p * 2)(*(ctypes.addressof(_PARAMETERS[memory]) for memory in _MEMORIES)),
            ctypes.addressof(_FLUSH),
            (c_int64 * 2)(*(SLICE[memory] for memory in _MEMORIES)),
            PIECES,
        )
        self._address = ctypes.addressof(self._fields)

    def post(self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray) -> NativePosting | None:
        runs = np.ascontiguousarray(runs, np.int64)
        start = self._loop.start_short if self._is_short(memory, nbytes) else self._loop.start
        place = runs.ctypes.data, len(runs)
        handle = start(self._address, kind == "get", key.handle, memory == "cuda", *place, self._polls(memory, nbytes))
        return NativePosting(self._loop, self._link, key, handle, nbytes) if handle else None

    def post_one(self, kind: str, key: Key, memory: str, local: int, remote: int, nbytes: int) -> NativePosting | None:
        start = self._loop.start_one_short if self._is_short(memory, nbytes) else self._loop.start_one
        place = local, remote, nbytes
        handle = start(self._address, kind == "get", key.handle, memory == "cuda", *place, self._polls(memory, nbytes))
        return NativePosting(self._loop, self._link, key, handle, nbytes) if handle else None

    @staticmethod
    def _is_short(memory: str, nbytes: int) -> bool:
        return nbytes <= SHORT and memory == "host"

    @staticmethod
    def _polls(memory: str, nbytes: int) -> int:
        return POLLS_GPU if memory == "cuda" and nbytes <= SHORT_GPU else POLLS


class UcxStarter:
    """What starts postings on a UCX link: the loop in C++, or the one in Python where that was not built, or where the
    link has failed and only the error is left to be told.
    """

    def __init__(self, link: UcxLink, worker: int):
        loop, ucp = native(), _ucp.library()
        self._link, self._python = link, PythonStarter(link)
        calls = [_address(getattr(ucp, call)) for call in _CALLS]
        self._native = None if loop is None else NativeStarter(loop, link, calls, worker, link.endpoint)

    def post(
        self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray
    ) -> PythonPosting | NativePosting | None:
        starter = self._python if self._native is None or self._link.failed else self._native
        return starter.post(kind, key, memory, nbytes, runs)

    def post_one(
        self, kind: str, key: Key, memory: str, local: int, remote: int, nbytes: int
    ) -> PythonPosting | NativePosting | None:
        starter = self._python if self._native is None or self._link.failed else self._native
        return starter.post_one(kind, key, memory, local, remote, nbytes)
