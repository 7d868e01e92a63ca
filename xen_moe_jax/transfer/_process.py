"""Identifies processes of this machine, and tells whether one has ended."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import secrets


def _start_time(process: int) -> str | None:
    try:
        # The process's name, in parentheses, may hold spaces; state is the 3rd field, the start time the 22nd.
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def describe() -> dict:
    """Returns a description of this process by which another one of the same machine can find it."""
    return {"machine": _machine(), "id": os.getpid(), "start": _start_time(os.getpid())}


@functools.cache
def machine_mark() -> bytes:
    """Returns 16 bytes that are the same in all processes of this machine that can see one another."""
    return hashlib.blake2b(_machine().encode(), digest_size=16).digest()


@functools.cache
def _mark_of(_process: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(secrets.token_bytes(16), 16)


def mark() -> tuple[bytes, int]:
    """Returns 16 random bytes that no other process has, not even a child of the same parent, and their address."""
    buffer = _mark_of(os.getpid())
    return buffer.raw, ctypes.addressof(buffer)


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def open_marked(process: int, mark: bytes, place: int) -> int | None:
    """Returns a descriptor of the process that has this mark at `place`; None if no such process can be read."""
    try:
        descriptor = os.pidfd_open(process)
    except (AttributeError, OSError):  # A Python that was built for kernels without it; no such process.
        return None
    buffer = ctypes.create_string_buffer(len(mark))
    here, there = _Vector(ctypes.addressof(buffer), len(mark)), _Vector(place, len(mark))
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype, one = ctypes.c_ssize_t, ctypes.c_ulong(1)
    found = call(ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0))
    if found == len(mark) and buffer.raw == mark:
        return descriptor
    os.close(descriptor)
    return None


def has_ended(process: dict) -> bool:
    """Returns True only for a process of this machine that has ended; for other machines always False."""
    return process.get("machine") == _machine() and _start_time(int(process["id"])) != process["start"]
