"""Host memory that other processes of the machine can map. Windows on CPUs are made of it.

All of it is in one file without a name (memfd), so that many windows take one descriptor. A process that may look into
this one opens the file through /proc, and writes into a window by plain stores, without the kernel. Memory that is
given back is punched out of the file: it is free at once, in all processes that map it, and reads as zeros then.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xen_moe_jax.transfer import _dlpack

_HOST = 1  # DLPack's kDLCPU
_READ_WRITE, _SHARED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
_REMOVE, _POPULATE_WRITE = 9, 23  # MADV_
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    c_int, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    library.mmap.restype = pointer
    library.mmap.argtypes = [pointer, size, c_int, c_int, c_int, ctypes.c_int64]
    library.munmap.argtypes = [pointer, size]
    library.madvise.argtypes = [pointer, size, c_int]
    return library


def map_file(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Maps `nbytes` of the file. Returns their address, or None if that is not possible."""
    # Not `mmap.mmap`: that keeps a descriptor for each mapping.
    pointer = _library().mmap(None, nbytes, _READ_WRITE, _SHARED, descriptor, offset)
    return None if pointer in (None, _FAILED) else pointer


def unmap(pointer: int, nbytes: int) -> None:
    _library().munmap(pointer, nbytes)


class Place(NamedTuple):
    """The place of memory in a process's file."""

    descriptor: int
    inode: int
    offset: int


class _File:
    """This process's file. It only grows, so that a process that has mapped a part of it can rely on that part."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("xen_moe_jax.transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.inode, self.nbytes = os.fstat(self.descriptor).st_ino, 0
        self.offsets: dict[int, int] = {}
        """Offsets in the file of all memory that was ever mapped, by address."""
        self.free: dict[int, list[int]] = {}
        """Addresses of unused memory, by bytes."""

    def take(self, nbytes: int) -> int | None:
        if free := self.free.get(nbytes):
            return free.pop()
        try:
            os.ftruncate(self.descriptor, self.nbytes + nbytes)
        except OSError:  # More than a file may have here.
            return None
        pointer = map_file(self.descriptor, self.nbytes, nbytes)
        if pointer is not None:
            self.offsets[pointer] = self.nbytes
            self.nbytes += nbytes
        return pointer


_lock = threading.RLock()  # Memory is given back by the collector, too, which may run in the middle of anything.


@functools.cache
def _file_of(_process: int) -> _File | None:
    try:
        return _File()
    except (AttributeError, OSError):  # No Linux, or memory without a name is not allowed here.
        return None


class SharedMemory:
    """`nbytes` of zeros on the host. Given back when this object and the JAX arrays made of it are gone."""

    def __init__(self, nbytes: int):
        self._process, self._nbytes, self.pointer = os.getpid(), -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        with _lock:
            file = _file_of(self._process)
            pointer = None if file is None else file.take(self._nbytes)
        if pointer is None:
            raise MemoryError(f"{nbytes} bytes of a file without a name: {os.strerror(ctypes.get_errno())}")
        self.pointer = pointer
        # The memory is populated here, so that this process gets the error, and not a sender by its store.
        if _library().madvise(pointer, self._nbytes, _POPULATE_WRITE):
            if (error := ctypes.get_errno()) != errno.EINVAL:
                raise MemoryError(f"{nbytes} bytes of a file without a name: {os.strerror(error)}")
            ctypes.memset(pointer, 0, self._nbytes)  # Linux before 5.14.

    def array(self, shape: Sequence[int], dtype: np.dtype, device: Any) -> jax.Array:
        """Returns the memory as an array on a CPU device of JAX."""
        return _dlpack.as_array(self, self.pointer, shape, dtype, (_HOST, device.local_hardware_id))

    def __del__(
        self, lock: Any = _lock, file_of: Any = _file_of, library: Any = _library, getpid: Any = os.getpid
    ) -> None:
        # A child has its parent's objects, but the memory is the parent's.
        if self.pointer and getpid() == self._process and not library().madvise(self.pointer, self._nbytes, _REMOVE):
            with lock:
                file_of(self._process).free.setdefault(self._nbytes, []).append(self.pointer)


def place_of(pointer: int) -> Place | None:
    """Returns the place of the `SharedMemory` that begins at `pointer`; None for other memory."""
    with _lock:
        file = _file_of(os.getpid())
        offset = None if file is None else file.offsets.get(pointer)
    return None if file is None or offset is None else Place(file.descriptor, file.inode, offset)


def open_file(process: int, place: Place) -> int | None:
    """Opens another process's file. Returns a descriptor, or None if it may not be opened or is not that file."""
    try:
        descriptor = os.open(f"/proc/{process}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if holds(descriptor, place, 0):
        return descriptor
    os.close(descriptor)
    return None


def holds(descriptor: int, place: Place, nbytes: int) -> bool:
    """Returns whether it is that file, the bytes are in it, and it cannot shrink: a store behind the file's end would
    kill the process that makes it.
    """
    status = os.fstat(descriptor)
    if status.st_ino != place.inode or status.st_size < place.offset + nbytes:
        return False
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # No file of memory.
        return False
