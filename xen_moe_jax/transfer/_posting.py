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
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_size_t, c_void_p
from typing import Any, Protocol

import numpy as np

from xen_moe_jax.transfer import _ucp
from xen_moe_jax.transfer._wire import Repeated, at_address

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


class LinkState(Protocol):
    """The link that postings are on. `failed` is the reason why it broke, or None."""

    failed: str | None


class PythonPosting:
    """A posting whose loop is in Python."""

    runs_alone = False

    def __init__(self, link: Any, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray):
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

    def spin(self, seconds: float) -> None:
        raise NotImplementedError("this loop drives what it has under way")

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
        ("move", c_void_p),
        ("start", c_void_p),
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
    "posting_start": (c_void_p, [c_void_p, c_int, c_void_p, c_int, c_void_p, c_size_t, c_int]),
    "posting_advance": (c_int, [c_void_p, c_int, c_int]),
    "posting_spin": (c_int, [c_void_p, c_int64]),
    "posting_stop": (None, [c_void_p]),
    "posting_bytes": (c_int64, [c_void_p]),
    "posting_status": (c_int, [c_void_p]),
    "posting_free": (None, [c_void_p]),
    "prepared_new": (c_void_p, [c_void_p, c_void_p, c_int, c_void_p, c_size_t, c_int]),
    "prepared_start": (c_void_p, [c_void_p, c_int64]),
    "prepared_free": (None, [c_void_p]),
}


_COPIES = (None, None, "flush", "progress", "check", "release")
_COPY_PROTOTYPES = {"new": (c_void_p, [c_void_p]), "error": (c_int, [c_void_p]), "free": (None, [c_void_p])}


class _Method(ctypes.Structure):
    """`PyMethodDef` of Python."""

    _fields_ = [("name", ctypes.c_char_p), ("function", c_void_p), ("flags", c_int), ("text", ctypes.c_char_p)]


_ONE_ARGUMENT = 8  # METH_O
_PYTHON = ("PyLong_AsVoidPtr", "PyLong_AsLongLong", "PyLong_FromVoidPtr")


class _Native:
    """The functions of ucx_posting.cc, cuda_copies.cc and host_copies.cc. Those with `_short` keep the GIL.

    `copy_calls` and `start_call` are addresses of those that stand in for UCX's where the driver copies, `move_call`
    that of the one that does where the kernel copies.
    """

    def __init__(self, path: pathlib.Path):
        library = self.library = ctypes.CDLL(str(path))
        for call, prototype in _COPY_PROTOTYPES.items():
            function: Any = getattr(library, f"xen_moe_copies_{call}")
            function.restype, function.argtypes = prototype
        self.copy_calls = [_address(getattr(library, f"xen_moe_copies_{name}")) if name else 0 for name in _COPIES]
        self.start_call = _address(library.xen_moe_copies_start)
        self.move_call = _address(library.xen_moe_host_move)
        holding = ctypes.PyDLL(str(path), handle=library._handle)  # noqa: SLF001
        for name, (result, arguments) in _PROTOTYPES.items():
            for functions, suffix in ((library, ""), (holding, "_short")):
                function = getattr(functions, f"xen_moe_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name + suffix, function)
        library.xen_moe_prepared_python((c_void_p * 3)(*(_address(getattr(ctypes.pythonapi, n)) for n in _PYTHON)))
        self._method = _Method(b"start", _address(library.xen_moe_prepared_call), _ONE_ARGUMENT, None)

    def prepared_call(self, handle: int) -> Callable[[int], int]:
        """`prepared_start` of one prepared put, which keeps the GIL, as a function of the source's address."""
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, [ctypes.POINTER(_Method), ctypes.py_object, c_void_p]
        return make(self._method, handle, None)

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
    if chosen is not None and not path.is_file():
        raise ValueError(
            f"XEN_MOE_TRANSFER_POSTING={chosen!r} in the environment: must be 'python' or a file, the loop as it was "
            "built; unset it"
        )
    return _Native(path)


class Endpoint(Protocol):
    """What a posting asks of the link that it is on."""

    @property
    def failed(self) -> str | None: ...

    @property
    def open(self) -> bool: ...

    @property
    def runs_alone(self) -> bool:
        """Whether what was handed over goes on without being driven."""

    def status_text(self, status: int) -> str: ...


class NativePosting:
    """A posting whose loop is in C++: `handle` is what that gave."""

    def __init__(self, loop: _Native, link: Endpoint, key: Key, handle: int, nbytes: int):
        self.error: str | None = None
        self.nbytes = nbytes
        self._loop, self._link, self._key = loop, link, key
        self._handle: int | None = handle
        self.bytes_posted = loop.posting_bytes_short(handle)
        self.runs_alone = link.runs_alone and self.bytes_posted == nbytes
        key.postings += 1

    def stop(self) -> None:
        if self._handle:
            self._loop.posting_stop_short(self._handle)

    def advance(self) -> bool:
        if not self._handle:
            return True
        if self._link.failed:
            self.stop()
            self.error = self.error or self._link.failed
        ended = self._loop.posting_advance(self._handle, self._link.open, POLLS)
        self.bytes_posted = self._loop.posting_bytes_short(self._handle)
        if status := self._loop.posting_status_short(self._handle):
            self.error = self.error or self._link.status_text(status)
        if ended:
            self._loop.posting_free_short(self._handle)
            self._handle = None
            self._key.postings -= 1
            self._key.release()
        return bool(ended)

    def spin(self, seconds: float) -> None:
        """Returns when it has ended, as `advance` is to say, or after so long."""
        if self._handle and not self._link.failed:
            self._loop.posting_spin(self._handle, int(seconds * 1e9))

    def __del__(self) -> None:
        if self._handle:  # The engine is gone, and the worker with it: nothing is in flight.
            self._loop.posting_free_short(self._handle)


class Prepared(Protocol):
    """What a starter has made of repeated runs and one key. It holds while the key is not forgotten: the link asks for
    it anew then.
    """

    key: Key

    def start(self, pointer: int) -> PythonPosting | NativePosting | None:
        """Puts them from a source that begins there; None where all has ended well."""


class Starter(Protocol):
    """Starts postings on a link."""

    def post(
        self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray
    ) -> PythonPosting | NativePosting | None:
        """None where all has ended well."""

    def prepare(self, key: Key, runs: Repeated) -> Prepared: ...


def prepare(starter: Starter, key: Key, runs: Repeated) -> Prepared:
    """Prepares repeated runs for one key, and notes with the runs what was prepared."""
    prepared = runs.prepared = starter.prepare(key, runs)
    runs.lasting = prepared if isinstance(prepared, LastingPrepared) else None
    return prepared


class PythonPrepared:
    def __init__(self, starter: PythonStarter, key: Key, runs: Repeated):
        self._starter, self.key, self._runs = starter, key, runs

    def start(self, pointer: int) -> PythonPosting | NativePosting | None:
        runs = self._runs
        return self._starter.post("put", self.key, runs.memory, runs.nbytes, at_address(runs.template, pointer))


class PythonStarter:
    """Starts postings whose loop is in Python."""

    def __init__(self, link: Any):
        self._link = link

    def post(
        self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray
    ) -> PythonPosting | NativePosting | None:
        return PythonPosting(self._link, kind, key, memory, nbytes, runs)

    def prepare(self, key: Key, runs: Repeated) -> Prepared:
        return PythonPrepared(self, key, runs)


class NativePrepared:
    """`call` starts the runs from a source at an address, and gives 0 where all has ended well, or what `posting`
    takes.
    """

    __slots__ = ("_handle", "_loop", "_starter", "call", "key", "nbytes")

    def __init__(self, loop: _Native, starter: NativeStarter, key: Key, nbytes: int, handle: int, is_short: bool):
        self._loop, self._starter, self.key, self.nbytes, self._handle = loop, starter, key, nbytes, handle
        self.call = loop.prepared_call(handle) if is_short else functools.partial(loop.prepared_start, handle)

    def start(self, pointer: int) -> NativePosting | None:
        return self.posting(handle) if (handle := self.call(pointer)) else None

    def posting(self, handle: int) -> NativePosting:
        return self._starter.posting(self.key, handle, self.nbytes)

    def __del__(self) -> None:
        self._loop.prepared_free_short(self._handle)


class LastingPrepared(NativePrepared):
    """One that holds for as long as the link does, and may be started without asking it: what it moves has arrived when
    `call` returns. Others do not last: UCX gives handles of keys back, and mappings of a GPU's memory are closed.
    """

    __slots__ = ()


class NativeStarter:
    """Starts postings whose loop is in C++. `calls` are the addresses of the functions that it calls in place of
    `_CALLS`, `move` that of the one that moves bytes at once, where no other is needed, `start` that of the one that
    takes many runs in place of the first two.
    """

    def __init__(
        self,
        loop: _Native,
        link: Endpoint,
        calls: Sequence[int],
        worker: int,
        endpoint: int,
        *,
        move: int = 0,
        start: int = 0,
    ):
        self._loop, self._link, self._moves = loop, link, bool(move)
        self._fields = _LinkFields(
            *calls,
            worker,
            endpoint,
            (c_void_p * 2)(*(ctypes.addressof(_PARAMETERS[memory]) for memory in _MEMORIES)),
            ctypes.addressof(_FLUSH),
            (c_int64 * 2)(*(SLICE[memory] for memory in _MEMORIES)),
            PIECES,
            move,
            start,
        )
        self._address = ctypes.addressof(self._fields)

    def post(self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray) -> NativePosting | None:
        runs = np.ascontiguousarray(runs, np.int64)
        start = self._loop.posting_start_short if self._is_short(memory, nbytes) else self._loop.posting_start
        place = runs.ctypes.data, len(runs)
        handle = start(self._address, kind == "get", key.handle, memory == "cuda", *place, self._polls(memory, nbytes))
        return self.posting(key, handle, nbytes) if handle else None

    def posting(self, key: Key, handle: int, nbytes: int) -> NativePosting:
        return NativePosting(self._loop, self._link, key, handle, nbytes)

    def prepare(self, key: Key, runs: Repeated) -> Prepared:
        template = np.ascontiguousarray(runs.template, np.int64)
        place = template.ctypes.data, len(template), self._polls(runs.memory, runs.nbytes)
        handle = self._loop.prepared_new_short(self._address, key.handle, runs.memory == "cuda", *place)
        kind = LastingPrepared if self._moves else NativePrepared
        return kind(self._loop, self, key, runs.nbytes, handle, self._is_short(runs.memory, runs.nbytes))

    @staticmethod
    def _is_short(memory: str, nbytes: int) -> bool:
        return nbytes <= SHORT and memory == "host"

    def _polls(self, memory: str, nbytes: int) -> int:
        to_gpu = memory == "cuda" or self._link.runs_alone
        return POLLS_GPU if to_gpu and nbytes <= SHORT_GPU else POLLS


class UcxStarter:
    """What starts postings on a UCX link: the loop in C++, or the one in Python where that was not built, or where the
    link has failed and only the error is left to be told.
    """

    def __init__(self, link: Any, worker: int):
        loop, ucp = native(), _ucp.library()
        self._link, self._python = link, PythonStarter(link)
        calls = [_address(getattr(ucp, call)) for call in _CALLS]
        self._native = None if loop is None else NativeStarter(loop, link, calls, worker, link.endpoint)

    def post(
        self, kind: str, key: Key, memory: str, nbytes: int, runs: np.ndarray
    ) -> PythonPosting | NativePosting | None:
        starter = self._python if self._native is None or self._link.failed else self._native
        return starter.post(kind, key, memory, nbytes, runs)

    def prepare(self, key: Key, runs: Repeated) -> Prepared:
        return (self._native or self._python).prepare(key, runs)
