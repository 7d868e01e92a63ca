"""UCX as the wire of an engine: links, registered memory, and the choice between UCX and copies of other kinds."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterable

import numpy as np

from xen_moe_jax.transfer import _cuda_copies, _device, _host_copies, _posting, _ucp
from xen_moe_jax.transfer._wire import Posting, Repeated

_SPLIT = struct.Struct("<I")
"""In front of a key: the length of UCX's part; the rest is for the copies of the driver or of the kernel."""


class UcxLink:
    def __init__(self, worker: int, address: bytes, copies: bool, device: int | None):
        self.failed: str | None = None
        self.open = True
        self._keys: dict[bytes, _posting.Key] = {}
        self._on_error = _ucp.ErrorHandler(self._lost)
        self._closing: int | None = None
        self.endpoint = _ucp.create_endpoint(worker, address, self._on_error)
        self._starter = _posting.Starter.ucx(self, worker, self.endpoint)
        self._copies = _cuda_copies.LinkCopies(self, device) if copies else None
        self._host_copies = _host_copies.LinkCopies(self)
        self._ways: dict[bytes, tuple[_posting.Starter, _posting.Key]] = {}
        """By key of host memory that the kernel copies to or from: its starter, and the key for that."""

    status_text = staticmethod(_ucp.status_text)
    runs_alone = False

    def _lost(self, _argument: int | None, _endpoint: int | None, status: int) -> None:
        self.failed = _ucp.status_text(status)

    def post(self, kind: str, key: bytes, memory: str, nbytes: int, runs: np.ndarray) -> Posting | None:
        if self.failed:
            return _posting.FailedPosting(nbytes, self.failed)
        starter, known = self._way(kind, key, memory, int(runs[0, 0]))
        return starter.post(kind, known, memory, nbytes, runs)

    def post_again(self, runs: Repeated, pointer: int) -> Posting | None:
        if self.failed:
            return _posting.FailedPosting(runs.nbytes, self.failed)
        prepared = runs.prepared
        starter, known = self._way("put", runs.key, runs.memory, pointer)
        if prepared is None or prepared.key is not known:  # The key was forgotten and given again.
            prepared = starter.prepare(known, runs)
        return prepared.start(pointer)

    def _way(self, kind: str, key: bytes, memory: str, local: int) -> tuple[_posting.Starter, _posting.Key]:
        """Returns the function that starts postings on a key, and its key: the driver's copies, the operating system's,
        or UCX."""
        found: tuple[_posting.Starter, _posting.Key] | None = self._ways.get(key) if memory == "host" else None
        if found is None and self._copies is not None and (exported := _exported(key)):
            if memory == "host":
                if found := self._host_copies.way(exported):
                    self._ways[key] = found
                elif kind == "put":
                    found = self._copies.way(exported, None)
            else:
                found = self._copies.way(exported, local)
        return found or (self._starter, self._keys.get(key) or self._unpack(key))

    def takes_host_memory(self, key: bytes) -> bool:
        return self._copies is not None and not self.failed and self._copies.way(_exported(key), None) is not None

    def _unpack(self, key: bytes) -> _posting.Key:
        (length,) = _SPLIT.unpack_from(key)
        ours = key[_SPLIT.size : _SPLIT.size + length]
        known = self._keys[key] = _posting.Key(_ucp.unpack_key(self.endpoint, ours))
        return known

    def key(self, key: bytes) -> int:
        """Returns UCX's handle of a key."""
        return (self._keys.get(key) or self._unpack(key)).handle

    def forget(self, key: bytes) -> None:
        way = self._ways.pop(key, None)
        for known in (way and way[1], self._keys.pop(key, None)):
            if known:
                known.forgotten = True
                known.release()

    def close(self, force: bool) -> None:
        if not self.open:
            return
        self.failed = self.failed or "the link is closed"
        self.open = False
        self._closing = _ucp.close_endpoint(self.endpoint, force)

    def finish_copies(self) -> None:
        """Waits until the driver copies nothing more. Postings of such copies must not be advanced any more."""
        if self._copies is not None:
            self._copies.close()
        self._host_copies.close()

    def closed(self) -> bool:
        """Returns whether the library has given the endpoint back (after `close`)."""
        if self._closing is not None and _ucp.library().ucp_request_check_status(self._closing) != _ucp.IN_PROGRESS:
            _ucp.library().ucp_request_free(self._closing)
            self._closing = None
        if self.open or self._closing is not None:
            return False
        if self._copies is not None:
            if not self._copies.idle():
                return False
        self.finish_copies()
        # Not before: bytes that were in flight when the link broke may still need the keys.
        for key in [*self._keys, *self._ways]:
            self.forget(key)
        return True


def _exported(key: bytes) -> bytes:
    (length,) = _SPLIT.unpack_from(key)
    return key[_SPLIT.size + length :]


class UcxMemory:
    def __init__(self, context: int, pointer: int, nbytes: int, memory: str, copies: bool):
        self._context = context
        self._handle, key = _ucp.map_memory(context, pointer, nbytes, memory)
        exported = b""
        if copies:
            exported = _cuda_copies.export(pointer) if memory == "cuda" else _host_copies.export(pointer, nbytes)
        self.key = _SPLIT.pack(len(key)) + key + exported

    def release(self) -> None:
        if self._handle:
            _ucp.library().ucp_mem_unmap(self._context, self._handle)
            self._handle = 0


class UcxWire:
    """UCX: memory of other processes of this host, NVLink by CUDA IPC, RDMA with network cards, and TCP elsewhere.

    `host` is the address that the engine listens on. On the loopback address UCX opens no port that another host could
    reach. `settings` are UCX's own (names without `UCX_`), for choices that this class does not make. With `copies` the
    CUDA driver copies from a GPU of this process into GPU memory that it can map, and the kernel copies between the
    host memory of two processes of one machine.
    """

    _living: list[UcxWire] = []
    """All wires of this process. `close` changes it under `_teardown`."""
    _teardown = threading.Lock()

    def __init__(self, host: str, settings: dict[str, str], copies: bool = True):
        _posting.native()  # Raises here, and not at the first peer, where it is missing.
        self._copies = copies
        # Asked for once: in a callback of XLA, JAX's default device is the CPU.
        self._device = _device.default_ordinal()
        # With its own threshold UCX does not use a lane into another process's memory.
        chosen = {"RNDV_THRESH": "inf"}
        if host.startswith("127."):
            chosen["NET_DEVICES"] = "lo"
        self._context = _ucp.create_context(chosen | settings)
        self._worker = _ucp.create_worker(self._context)
        self._links: list[UcxLink] = []
        self.address = _ucp.worker_address(self._worker)
        self.event_fd = _ucp.worker_event_fd(self._worker)
        self.progressing = threading.Lock()  # Held while the library works.
        with self._teardown:
            self._living.append(self)

    def register(self, pointer: int, nbytes: int, memory: str) -> UcxMemory:
        return UcxMemory(self._context, pointer, nbytes, memory, self._copies)

    def connect(self, address: bytes) -> UcxLink:
        link = UcxLink(self._worker, address, self._copies, self._device)
        self._links.append(link)
        return link

    def progress(self) -> None:
        with self.progressing:
            while _ucp.library().ucp_worker_progress(self._worker):
                pass
        if any(not link.open for link in self._links):
            self._links = [link for link in self._links if not link.closed()]

    def arm(self) -> bool:
        return _ucp.library().ucp_worker_arm(self._worker) != _ucp.ERR_BUSY

    def close(self) -> None:
        _close_all(self._links)
        for link in self._links:
            link.finish_copies()
        # A forced close ends with its cancelled requests, in progress calls of this thread alone.
        for _ in range(10_000):
            if not self._links:
                break
            self.progress()
        # A worker that was in progress while its peer in the same process was destroyed has crashed, once in many runs.
        with self._teardown, contextlib.ExitStack() as held:
            self._living.remove(self)
            for other in self._living:
                held.enter_context(other.progressing)
            _ucp.library().ucp_worker_destroy(self._worker)
            _ucp.library().ucp_cleanup(self._context)


def _close_all(links: Iterable[UcxLink]) -> None:
    for link in links:
        link.close(force=True)
