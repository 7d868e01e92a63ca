"""The CUDA driver as far as transfers need it: the current context, and memory that other processes can map."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_BUFFER_ID, _DEVICE_ORDINAL, _LEGACY_IPC_CAPABLE, _ALLOWED_HANDLE_TYPES = 7, 9, 10, 14  # CUpointer_attribute
_LAZY_PEER_ACCESS = 1  # CUipcMem_flags
_NON_BLOCKING = 1  # CUstream_flags
_FABRIC = 8  # CUmemAllocationHandleType
_OUT_OF_MEMORY = 2


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def default() -> Any:
    """Returns JAX's device for arrays that name none: `jax_default_device`, or the first local one."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def default_ordinal() -> int | None:
    """Returns the CUDA ordinal of the default device, or None if that is no NVIDIA GPU."""
    device: Any = default()
    if device.platform not in ("gpu", "cuda") or "rocm" in device.client.platform_version.lower():
        return None
    return ordinal(device)


@functools.cache
def ordinal(device: Any) -> int:
    """Returns the CUDA ordinal of a JAX device, found by its memory: JAX may count only some of the devices."""
    array = jax.block_until_ready(jax.device_put(np.zeros(1, np.uint8), device))
    make_current(device.local_hardware_id)
    return ordinal_of(array.unsafe_buffer_pointer())


def _attribute(pointer: int, attribute: int) -> int:
    found = ctypes.c_uint64()
    status = driver().cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(pointer))
    _check(f"cuPointerGetAttribute({attribute}) of {pointer:#x}", status)
    return found.value


def is_shareable(pointer: int) -> bool:
    """Returns whether another process can map this GPU memory: from `cuMemAlloc`, or created with a fabric handle."""
    return bool(_attribute(pointer, _LEGACY_IPC_CAPABLE)) or bool(_attribute(pointer, _ALLOWED_HANDLE_TYPES) & _FABRIC)


def handle_types(pointer: int) -> int:
    """Returns the kinds of handles that the memory can be exported as (`CUmemAllocationHandleType`), for a report."""
    return _attribute(pointer, _ALLOWED_HANDLE_TYPES)


def ordinal_of(pointer: int) -> int:
    """Returns the CUDA ordinal of the device that the memory is on."""
    return _attribute(pointer, _DEVICE_ORDINAL)


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} failed with CUDA error {status}")


def allocate(nbytes: int) -> int | None:
    """Allocates memory on the current device that other processes can map. Returns None if there is not enough."""
    pointer = ctypes.c_uint64()
    status = driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    if status == _OUT_OF_MEMORY:
        return None
    _check(f"cuMemAlloc of {nbytes} bytes", status)
    return pointer.value


def free(pointer: int) -> None:
    _check("cuMemFree", driver().cuMemFree_v2(ctypes.c_uint64(pointer)))


def zero(pointer: int, nbytes: int) -> None:
    """Sets the bytes to zero, after all work that was queued on the device before; waits for both."""
    _check("cuCtxSynchronize", driver().cuCtxSynchronize())
    _check("cuMemsetD8", driver().cuMemsetD8_v2(ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)))
    _check("cuCtxSynchronize", driver().cuCtxSynchronize())


def copy(to: int, origin: int, nbytes: int) -> None:
    """Copies within the current device; waits for the end."""
    to_, origin_ = ctypes.c_uint64(to), ctypes.c_uint64(origin)
    _check("cuMemcpyDtoD", driver().cuMemcpyDtoD_v2(to_, origin_, ctypes.c_size_t(nbytes)))
    _check("cuCtxSynchronize", driver().cuCtxSynchronize())


@functools.cache
def context(device: int) -> int:
    """Returns the device's primary context, which JAX uses too."""
    cuda, found = driver(), ctypes.c_void_p()
    _check("cuInit", cuda.cuInit(0))
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(found), ctypes.c_int(device))
    _check(f"cuDevicePrimaryCtxRetain of device {device}", status)
    return found.value or 0


def make_current(device: int) -> None:
    """Makes the device's primary context current in this thread. Call it every time, because XLA leaves the context of
    the device that it used last.
    """
    _check(f"cuCtxSetCurrent of device {device}", driver().cuCtxSetCurrent(ctypes.c_void_p(context(device))))


@contextlib.contextmanager
def context_kept() -> Iterator[None]:
    """Restores this thread's current context at the end: a callback runs in the middle of XLA's work on some device."""
    if not driver.cache_info().currsize:  # Nothing here has touched CUDA.
        yield
        return
    found = ctypes.c_void_p()
    _check("cuCtxGetCurrent", driver().cuCtxGetCurrent(ctypes.byref(found)))
    try:
        yield
    finally:
        driver().cuCtxSetCurrent(found)


class _IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def export(pointer: int) -> tuple[bytes, int, int, int] | None:
    """Returns (handle, number, first address, bytes) of the allocation that has the address, for `open_exported` in
    another process; None if such memory cannot be exported. A number is never used twice.
    """
    if not _attribute(pointer, _LEGACY_IPC_CAPABLE):
        return None
    handle, base, nbytes = _IpcHandle(), ctypes.c_uint64(), ctypes.c_size_t()
    status = driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer))
    _check(f"cuMemGetAddressRange of {pointer:#x}", status)
    if driver().cuIpcGetMemHandle(ctypes.byref(handle), base):
        return None
    return ctypes.string_at(ctypes.byref(handle), 64), _attribute(pointer, _BUFFER_ID), base.value, nbytes.value


def open_exported(handle: bytes) -> int | None:
    """Maps another process's memory in the current context. Returns its address, or None if it cannot be mapped."""
    pointer = ctypes.c_uint64()
    by_value = _IpcHandle.from_buffer_copy(handle)
    failed = driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return None if failed else pointer.value


def close_exported(pointer: int) -> None:
    """Unmaps another process's memory. Never raises: if the context is broken, the next copy reports it."""
    driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))


def new_stream() -> int:
    """Creates a stream of the current context that waits for no other stream."""
    stream = ctypes.c_void_p()
    _check("cuStreamCreate", driver().cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING)))
    return stream.value or 0


def end_stream(stream: int) -> None:
    """Waits for all work on the stream, and destroys it. Never raises."""
    driver().cuStreamSynchronize(ctypes.c_void_p(stream))
    driver().cuStreamDestroy_v2(ctypes.c_void_p(stream))


_COPY_CALLS = (
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)


def copy_functions(from_host: bool) -> list[int | None]:
    """Returns the addresses of the driver's functions in the order of `Driver` in ffi/transfer/posting.h. The batch
    function is None if this driver lacks it, and for copies from the host.
    """
    copy = "cuMemcpyHtoDAsync_v2" if from_host else "cuMemcpyDtoDAsync_v2"
    batch = None if from_host else getattr(driver(), "cuMemcpyBatchAsync_v2", None)
    functions = [getattr(driver(), call) for call in (copy, *_COPY_CALLS)]
    return [ctypes.cast(function, ctypes.c_void_p).value for function in functions] + [
        None if batch is None else ctypes.cast(batch, ctypes.c_void_p).value
    ]
