"""Copies between host memory of this process and of another one of the machine.

Registered host memory is described beside UCX's key. A process that may look into the process named there maps the
memory if it can be mapped (windows), and stores into it. Other memory (arrays that are read) is copied by the kernel,
all pieces in one call (process_vm_readv); UCX makes one call for each piece, and a flush after them. Everything else
(other machines, other users' processes, the same process) stays with UCX. The C++ is `ffi/transfer/host_copies.cc`.
"""

from __future__ import annotations

import errno
import os
import struct

from xen_moe_jax.transfer import _posting, _process, _shared_memory

_EXPORT = struct.Struct("<16s16sQQQQqQQ")
"""Machine, the process's mark, its number, the mark's address, first address and bytes of the memory, and its place in
the process's file (descriptor -1: in none).
"""
_NO_FILE = _shared_memory.Place(-1, 0, 0)


def export(pointer: int, nbytes: int) -> bytes:
    """Returns the bytes by which another process of this machine addresses the memory."""
    mark, at = _process.mark()
    place = _shared_memory.place_of(pointer) or _NO_FILE
    return _EXPORT.pack(_process.machine_mark(), mark, os.getpid(), at, pointer, nbytes, *place)


class Memory(_posting.Key):
    """A peer's memory as a posting's key. `here` is the address at which it is mapped in this process, or 0."""

    def __init__(self, remote: int, nbytes: int, here: int):
        self._memory = _posting.native().PeerMemory(remote, nbytes, here)
        super().__init__(self._memory.address)

    def release(self) -> None:
        """Unmaps the memory once the key is forgotten and no posting uses it."""
        if self.forgotten and not self.postings and (here := self._memory.here):
            self._memory.here = 0
            _shared_memory.unmap(here, self._memory.nbytes)


class HostCopies:
    """The copies between this process and a peer's process on the same machine whose memory it may address."""

    open = True
    runs_alone = False

    def __init__(self, link: _posting.LinkState, process: int, descriptor: int):
        self._link, self._descriptor = link, descriptor
        self.starter = _posting.Starter(self)
        self.starter.link.use_process(_posting.native().PeerProcess(process, descriptor))
        self.starter.lasts = True

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
    """The copies into one peer's memory. They begin when the peer has given some."""

    def __init__(self, link: _posting.LinkState):
        self._link = link
        self._copies: HostCopies | None = None
        self._of: tuple[bytes, int] | None = None
        self._file: int | None = None

    def way(self, exported: bytes) -> tuple[_posting.Starter, Memory] | None:
        """Returns the function that starts a posting, and its key; None if the operating system cannot copy."""
        if len(exported) != _EXPORT.size:
            return None
        machine, mark, process, at, remote, nbytes, *place = _EXPORT.unpack(exported)
        if machine != _process.machine_mark() or process == os.getpid():
            return None
        if self._of is None:
            self._of = mark, process
            descriptor = _process.open_marked(process, mark, at)
            self._copies = None if descriptor is None else HostCopies(self._link, process, descriptor)
        if self._copies is None or self._of != (mark, process):
            return None
        return self._copies.starter, Memory(remote, nbytes, self._map(process, _shared_memory.Place(*place), nbytes))

    def _map(self, process: int, place: _shared_memory.Place, nbytes: int) -> int:
        """Returns the address at which the peer's memory is mapped in this process; 0 if it cannot be mapped."""
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
