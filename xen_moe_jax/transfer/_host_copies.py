"""Copies between host memory of this process and of another one of the machine by the kernel (process_vm_writev).

UCX makes the same system call, one for each piece and a flush behind them, which takes longer than a small write. Host
memory that is registered is described beside UCX's key; who can look into the process that it names moves all pieces in
one call, and everything else (other machines, other users' processes, the same process) stays with UCX. The loop is
`ffi/host_copies.cc` below `ffi/ucx_posting.cc`; without it UCX carries everything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING, Any

from xen_moe_jax.transfer import _posting, _process

if TYPE_CHECKING:
    from xen_moe_jax.transfer.wire import UcxLink

_EXPORT = struct.Struct("<16s16sQQQQ")
"""Machine, process's mark, its number, where the mark lies, first address and bytes of the memory."""


def export(pointer: int, nbytes: int) -> bytes:
    """What another process of this machine needs to address the memory."""
    mark, place = _process.mark()
    return _EXPORT.pack(_process.machine_mark(), mark, os.getpid(), place, pointer, nbytes)


class _Fields(ctypes.Structure):
    """`XenMoeProcess` of host_copies.cc."""

    _fields_ = [("id", ctypes.c_int32), ("descriptor", ctypes.c_int32), ("looked", ctypes.c_int64)]


class Memory(_posting.Key):
    """A peer's memory as a posting's key."""

    def __init__(self, remote: int, nbytes: int):
        self._fields = (ctypes.c_uint64 * 2)(remote, nbytes)  # `XenMoeHostMemory`
        super().__init__(ctypes.addressof(self._fields))

    def release(self) -> None:
        """Nothing: the memory is the peer's."""


class HostCopies:
    """The copies between this process and one peer's, which is of this machine, and which this one may address."""

    open = True
    runs_alone = False

    def __init__(self, loop: Any, link: UcxLink, process: int, descriptor: int):
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

    def __init__(self, link: UcxLink):
        self._link = link
        self._copies: HostCopies | None = None
        self._of: tuple[bytes, int] | None = None

    def way(self, exported: bytes) -> tuple[_posting.NativeStarter, Memory] | None:
        """What starts a posting, and its key; None where the kernel does not copy."""
        loop = _posting.native()
        if loop is None or len(exported) != _EXPORT.size:
            return None
        machine, mark, process, place, remote, nbytes = _EXPORT.unpack(exported)
        if machine != _process.machine_mark() or process == os.getpid():
            return None
        if self._of is None:
            self._of = mark, process
            descriptor = _process.open_marked(process, mark, place)
            self._copies = None if descriptor is None else HostCopies(loop, self._link, process, descriptor)
        if self._copies is None or self._of != (mark, process):
            return None
        return self._copies.starter, Memory(remote, nbytes)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
