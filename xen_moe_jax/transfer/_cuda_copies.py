"""Copies from this process into another process's GPU memory by the driver itself (CUDA IPC, NVLink).

UCX does the same, and takes 30 us for every piece of XLA's memory, where the driver's own copy takes 2, and half of one
in a batch; from host memory UCX has no way there at all. Memory that is registered is exported beside UCX's key;
whoever can open it copies, and everything else (other machines, the same process) stays with UCX. The loop is
`ffi/cuda_copies.cc` below `ffi/ucx_posting.cc`; without it UCX carries everything.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_uint64, c_void_p
from typing import Any

from xen_moe_jax.transfer import _device, _posting, _process

_EXPORT = struct.Struct("<16s16s64sQQQ")
"""Machine, process, CUDA's handle, its buffer number, first address and bytes of the allocation."""
IDLE_MAPPINGS = 64
"""Mappings that nothing uses and that are kept: opening one takes longer than a small write."""


def export(pointer: int) -> bytes:
    """What another process of this machine needs to map the allocation at `pointer`; empty where it cannot be."""
    found = _device.export(pointer)
    return b"" if found is None else _EXPORT.pack(_process.machine_mark(), _process.mark()[0], *found)


class _Mapping(ctypes.Structure):
    """`XenMoeMapping` of cuda_copies.cc."""

    _fields_ = [("remote", c_uint64), ("bytes", c_uint64), ("here", c_uint64)]


class _Driver(ctypes.Structure):
    """`XenMoeDriver` of cuda_copies.cc."""

    _fields_ = [
        (name, c_void_p)
        for name in ("copy", "event_create", "event_record", "event_query", "event_destroy", "push", "pop", "batch")
    ] + [("context", c_void_p), ("stream", c_void_p)]


class Mapping(_posting.Key):
    """A peer's exported memory in this process. Counts its postings, as a key does; it is kept while idle."""

    def __init__(self, here: int, remote: int, nbytes: int):
        self.here = here
        self._fields = _Mapping(remote, nbytes, here)
        super().__init__(ctypes.addressof(self._fields))

    def release(self) -> None:
        """Nothing: `Copies` closes mappings."""


class Copies:
    """The copies from one GPU of this process, or from its host memory, into one peer's: a stream, and what is mapped
    in that GPU's context.
    """

    def __init__(self, loop: Any, link: _posting.LinkState, device: int, from_host: bool):
        self._loop, self._link, self._device = loop, link, device
        self._mappings: dict[bytes, Mapping | None] = {}
        _device.make_current(device)
        self._stream = _device.new_stream()
        self._driver = _Driver(*_device.copy_functions(from_host), _device.context(device), self._stream)
        self._handle = loop.library.xen_moe_copies_new(ctypes.addressof(self._driver))
        self.starter = _posting.NativeStarter(loop, self, loop.copy_calls, 0, self._handle, start=loop.start_call)

    # What a posting asks its link for.
    open = True  # An event is waited for on a closed link, too: copies that were queued cannot be called back.
    runs_alone = True

    @property
    def failed(self) -> str | None:
        return self._link.failed

    def status_text(self, _status: int) -> str:
        error = self._loop.library.xen_moe_copies_error(self._handle)
        return f"CUDA error {error} of a copy into another process's GPU memory"

    def mapping(self, exported: bytes) -> Mapping | None:
        """The exported memory in this process, or None where it cannot be mapped."""
        if exported in self._mappings:
            found = self._mappings.pop(exported)
        else:
            found = self._map(exported)
        self._mappings[exported] = found  # The last one is the one that was used last.
        return found

    def _map(self, exported: bytes) -> Mapping | None:
        machine, process, *handle, remote, nbytes = _EXPORT.unpack(exported)
        if machine != _process.machine_mark() or process == _process.mark()[0]:
            return None
        _device.make_current(self._device)
        self._close_idle(IDLE_MAPPINGS)
        here = _device.open_exported(handle[0])
        if here is None:  # What was there before may still be mapped at its place.
            self._close_idle(0)
            here = _device.open_exported(handle[0])
        return None if here is None else Mapping(here, remote, nbytes)

    def _close_idle(self, keep: int) -> None:
        idle = [e for e, mapping in self._mappings.items() if mapping is None or not mapping.postings]
        for exported in idle[: max(0, len(idle) - keep)]:
            if mapping := self._mappings.pop(exported):
                _device.close_exported(mapping.here)

    def idle(self) -> bool:
        return not any(mapping and mapping.postings for mapping in self._mappings.values())

    def close(self) -> None:
        """Returns when no copy is under way any more."""
        if self._handle:
            _device.make_current(self._device)
            _device.end_stream(self._stream)
            for mapping in self._mappings.values():
                if mapping is not None:
                    _device.close_exported(mapping.here)
            self._mappings = {}
            self._loop.library.xen_moe_copies_free(self._handle)
            self._handle = None


class LinkCopies:
    """The copies into one peer's GPU memory, from whichever GPU of this process, or from the host, then through the GPU
    `through` (None: it has none).
    """

    def __init__(self, link: _posting.LinkState, through: int | None):
        self._link, self._through, self._by_device = link, through, dict[int | None, Copies]()

    def way(self, exported: bytes, local: int | None) -> tuple[_posting.NativeStarter, Mapping] | None:
        """What starts a posting from the GPU that has `local`, or from the host (None), and its key; None where the
        driver cannot copy.
        """
        loop = _posting.native()
        if loop is None or len(exported) != _EXPORT.size:
            return None
        device = None if local is None else _device.ordinal_of(local)
        copies = self._by_device.get(device)
        if copies is None:
            through = self._through if device is None else device
            if through is None:
                return None
            copies = self._by_device[device] = Copies(loop, self._link, through, device is None)
        mapping = copies.mapping(exported)
        return None if mapping is None else (copies.starter, mapping)

    def idle(self) -> bool:
        return all(copies.idle() for copies in self._by_device.values())

    def close(self) -> None:
        """Returns when no copy is under way any more."""
        for copies in self._by_device.values():
            copies.close()
        self._by_device = {}
