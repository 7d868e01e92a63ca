"""Copies between host memory of this process and of another one of the machine.

Host memory that is registered is described beside UCX's key. Who can look into the process that it names maps the
memory where it can be mapped (windows), and stores into it; other memory (arrays that are read) the kernel copies, all
pieces in one call (process_vm_readv), where UCX makes one call for each and a flush behind them. Everything else (other
machines, other users' processes, the same process) stays with UCX. The loop is `ffi/host_copies.cc` below
`ffi/ucx_posting.cc`; without it UCX carries everything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

from xen_moe_jax.transfer import _posting, _process, _shared_memory

_EXPORT = struct.Struct("<16s16sQQQQqQQ")
"""Machine, process's mark, its number, where the mark lies, first address and bytes of the memory; where it lies in the
process's file, with descriptor -1 for what is in none.
"""
_NO_FILE = _shared_memory.Place(-1, 0, 0)


def export(pointer: int, nbytes: int) -> bytes:
    """What another process of this machine needs to address the memory."""
    mark, at = _process.mark()
    place = _shared_memory.place_of(pointer) or _NO_FILE
    return _EXPORT.pack(_process.machine_mark(), mark, os.getpid(), at, pointer, nbytes, *place)


class _Fields(ctypes.Structure):
    """`XenMoeProcess` of host_copies.cc."""

    _fields_ = [("id", ctypes.c_int32), ("descriptor", ctypes.c_int32), ("looked", ctypes.c_int64)]


class Memory(_posting.Key):
    """A peer's memory as a posting's key; `here` is where it is mapped in this process, 0 for what is not."""

    def __init__(self, remote: int, nbytes: int, here: int):
        self._fields = (ctypes.c_uint64 * 3)(remote, nbytes, here)  # `XenMoeHostMemory`
        super().__init__(ctypes.addressof(self._fields))

    def release(self) -> None:
        if self.forgotten and not self.postings and (here := self._fields[2]):
            self._fields[2] = 0
            _shared_memory.unmap(here, self._fields[1])


class HostCopies:
    """The copies between this process and one peer's, which is of this machine, and which this one may address."""

    open = True
    runs_alone = False

    def __init__(self, loop: Any, link: _posting.LinkState, process: int, descriptor: int):
        self._link, self._descriptor = link, descriptor
        self._fields = _Fields(process, descriptor, 0)
        self.starter = _posting.NativeStarter(
            loop, self, [0] * 6, 0, ctypes.addressof(self._fields), move=loop.move_call
        )

    @property
    def failed(self) -> str | None:
        return self._link.failed

    def status_text(self, status: int) -> str:
        if -status == errno.ESRCH:
            self._link.failed = self._link.failed or "its process has ended"
        return f"{os.strerror(-status)}: a copy between two processes' memory"

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LinkCopies:
    """The copies into one peer's memory, as soon as it has given some."""

    def __init__(self, link: _posting.LinkState):
        self._link = link
        self._copies: HostCopies | None = None
        self._of: tuple[bytes, int] | None = None
        self._file: int | None = None

    def way(self, exported: bytes) -> tuple[_posting.NativeStarter, Memory] | None:
        """What starts a posting, and its key; None where the kernel does not copy."""
        loop = _posting.native()
        if loop is None or len(exported) != _EXPORT.size:
            return None
        machine, mark, process, at, remote, nbytes, *place = _EXPORT.unpack(exported)
        if machine != _process.machine_mark() or process == os.getpid():
            return None
        if self._of is None:
            self._of = mark, process
            descriptor = _process.open_marked(process, mark, at)
            self._copies = None if descriptor is None else HostCopies(loop, self._link, process, descriptor)
        if self._copies is None or self._of != (mark, process):
            return None
        return self._copies.starter, Memory(remote, nbytes, self._map(process, _shared_memory.Place(*place), nbytes))

    def _map(self, process: int, place: _shared_memory.Place, nbytes: int) -> int:
        """Where the peer's memory lies in this process; 0 where it cannot be mapped."""
        if place.descriptor < 0:
            return 0
        if self._file is None:
            self._file = _shared_memory.open_file(process, place)
        if self._file is None or not _shared_memory.holds(self._file, place, nbytes):
            return 0
        return _shared_memory.map_file(self._file, place.offset, nbytes) or 0

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
