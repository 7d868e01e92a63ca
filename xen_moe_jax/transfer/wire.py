"""The seam to the library that moves bytes: memory, links to peers, and postings of many runs at once.

An engine talks to nothing below this file. `Wire` is what another library must offer; `UcxWire` is the one there is.
All calls on one wire come under its engine's lock, from whichever thread holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from xen_moe_jax.transfer import _device, _ucp
from xen_moe_jax.transfer.errors import TransferRefused

SLICE = {"host": 4 << 20, "cuda": 1 << 30}
"""Bytes handed to the library before the engine's lock is given up: no peer's message waits behind a whole 128 MiB
write. Host memory is copied in the call; a GPU's is copied later, by the GPU.
"""
PIECES = 256
"""The same limit for runs."""


class Posting(Protocol):
    """Runs on their way. `bytes_posted` counts what the library was given; what is confirmed is known at the end."""

    nbytes: int
    bytes_posted: int
    error: str | None

    def advance(self) -> bool:
        """Hands over more and asks for completions; True when nothing of it is in flight any more (see `error`)."""

    def stop(self) -> None:
        """Hands over nothing more. `advance` still has to say when the rest has ended."""


class Link(Protocol):
    """The way to one peer's memory."""

    failed: str | None

    def post(self, kind: str, key: bytes, memory: str, runs: np.ndarray) -> Posting:
        """Starts `kind` ("put" or "get") of `runs`, int64 `[n, 3]`: local address, remote address, bytes; no order
        among them. `memory` is where the local ones lie, "host" or "cuda".
        """

    def forget(self, key: bytes) -> None:
        """No more postings on `key`, or not before it is given again; what is in flight may end."""

    def close(self, force: bool) -> None:
        """Drops the link. With `force` what is in flight ends in an error, else there is nothing in flight."""


class Memory(Protocol):
    """Registered memory; `key` is what a peer needs to address it."""

    key: bytes

    def release(self) -> None: ...


class Wire(Protocol):
    address: bytes
    event_fd: int

    def register(self, pointer: int, nbytes: int, memory: str) -> Memory:
        """Makes `nbytes` at `pointer` addressable by peers; `memory` is "host" or "cuda"."""

    def connect(self, address: bytes) -> Link: ...

    def progress(self) -> None:
        """Lets the library work: as a target, too."""

    def arm(self) -> bool:
        """True when `event_fd` becomes readable at the next event; False when there is work now."""

    def close(self) -> None: ...


class _Key:
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


class UcxPosting:
    def __init__(self, link: UcxLink, kind: str, key: _Key, memory: str, runs: np.ndarray):
        self.nbytes = int(runs[:, 2].sum())
        self.bytes_posted = 0
        self.error: str | None = None
        self._link = link
        self._function = _ucp.library().ucp_put_nbx if kind == "put" else _ucp.library().ucp_get_nbx
        self._key = key
        self._slice, self._parameters = SLICE[memory], _ucp.parameters(memory)
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
            if self._flushing or self.error and not self._link.open:
                self._done = True
            else:
                # A put that ended locally may still be on its way; the flush ends when all are in the peer's memory.
                self._flushing = True
                self._keep(_ucp.library().ucp_ep_flush_nbx(self._link.endpoint, self._link.parameters))
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


class UcxLink:
    def __init__(self, worker: int, address: bytes):
        self.failed: str | None = None
        self.open = True
        self.parameters = _ucp.RequestParams()
        self._keys: dict[bytes, _Key] = {}
        self._on_error = _ucp.ErrorHandler(self._lost)
        self._closing: int | None = None
        self.endpoint = _ucp.create_endpoint(worker, address, self._on_error)

    def _lost(self, _argument: int | None, _endpoint: int | None, status: int) -> None:
        self.failed = _ucp.status_text(status)

    def post(self, kind: str, key: bytes, memory: str, runs: np.ndarray) -> UcxPosting:
        if key not in self._keys:
            self._keys[key] = _Key(_ucp.unpack_key(self.endpoint, key))
        return UcxPosting(self, kind, self._keys[key], memory, runs)

    def key(self, key: bytes) -> int:
        """The library's handle of a key that was used before."""
        return self._keys[key].handle

    def forget(self, key: bytes) -> None:
        if known := self._keys.pop(key, None):
            known.forgotten = True
            known.release()

    def close(self, force: bool) -> None:
        if not self.open:
            return
        self.failed = self.failed or "the link is closed"
        self.open = False
        self._closing = _ucp.close_endpoint(self.endpoint, force)

    def closed(self) -> bool:
        """Whether the library has let go of the endpoint (after `close`)."""
        if self._closing is not None and _ucp.library().ucp_request_check_status(self._closing) != _ucp.IN_PROGRESS:
            _ucp.library().ucp_request_free(self._closing)
            self._closing = None
        if self.open or self._closing is not None:
            return False
        for key in list(self._keys):  # Not before: what was in flight when the link broke may still name them.
            self.forget(key)
        return True


class UcxMemory:
    def __init__(self, context: int, pointer: int, nbytes: int, memory: str):
        self._context = context
        self._handle, self.key = _ucp.map_memory(context, pointer, nbytes, memory)

    def release(self) -> None:
        if self._handle:
            _ucp.library().ucp_mem_unmap(self._context, self._handle)
            self._handle = 0


class UcxWire:
    """UCX: memory of other processes of this host directly, NVLink by CUDA IPC, RDMA where there are cards, TCP
    elsewhere.

    `host` is the address that the engine listens on. On the loopback address UCX opens no port that another host could
    reach. `settings` are UCX's own (names without `UCX_`), for what this class does not choose.
    """

    def __init__(self, host: str, settings: dict[str, str]):
        chosen = {
            "RNDV_THRESH": "inf"
        }  # With its own threshold UCX sees no use in a lane into another process's memory.
        if host.startswith("127."):
            chosen["NET_DEVICES"] = "lo"
        self._context = _ucp.create_context(chosen | settings)
        self._worker = _ucp.create_worker(self._context)
        self._links: list[UcxLink] = []
        self.address = _ucp.worker_address(self._worker)
        self.event_fd = _ucp.worker_event_fd(self._worker)

    def register(self, pointer: int, nbytes: int, memory: str) -> UcxMemory:
        if memory == "cuda" and not _device.is_shareable(pointer):
            raise TransferRefused(
                f"GPU memory at {pointer:#x} cannot be mapped by another process: JAX's allocator gave it in a form "
                "without IPC handles; set XLA_PYTHON_CLIENT_ALLOCATOR=bfc before JAX starts"
            )
        return UcxMemory(self._context, pointer, nbytes, memory)

    def connect(self, address: bytes) -> UcxLink:
        link = UcxLink(self._worker, address)
        self._links.append(link)
        return link

    def progress(self) -> None:
        while _ucp.library().ucp_worker_progress(self._worker):
            pass
        if any(not link.open for link in self._links):
            self._links = [link for link in self._links if not link.closed()]

    def arm(self) -> bool:
        return _ucp.library().ucp_worker_arm(self._worker) != _ucp.ERR_BUSY

    def close(self) -> None:
        _close_all(self._links)
        for _ in range(
            10_000
        ):  # A forced close ends with its cancelled requests, in progress calls of this thread alone.
            if not self._links:
                break
            self.progress()
        _ucp.library().ucp_worker_destroy(self._worker)
        _ucp.library().ucp_cleanup(self._context)


def _close_all(links: Iterable[UcxLink]) -> None:
    for link in links:
        link.close(force=True)
