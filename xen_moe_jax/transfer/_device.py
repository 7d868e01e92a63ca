"""The CUDA driver, as far as transfers need it: a thread's current context, and what memory other processes can map."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax

_current = threading.local()
_LEGACY_IPC_CAPABLE, _ALLOWED_HANDLE_TYPES = 10, 14  # CUpointer_attribute
_FABRIC = 8  # CUmemAllocationHandleType


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def first_ordinal() -> int | None:
    """The CUDA device of JAX's first local device, or None where JAX does not run on NVIDIA GPUs."""
    device: Any = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda") or "rocm" in device.client.platform_version.lower():
        return None
    return device.local_hardware_id


def is_shareable(pointer: int) -> bool:
    """Whether another process can map this GPU memory: `cudaMalloc`ed, or created with a fabric handle."""
    legacy, handles = ctypes.c_int(), ctypes.c_uint64()
    address = ctypes.c_uint64(pointer)
    for found, attribute in ((legacy, _LEGACY_IPC_CAPABLE), (handles, _ALLOWED_HANDLE_TYPES)):
        if status := driver().cuPointerGetAttribute(ctypes.byref(found), attribute, address):
            raise RuntimeError(f"cuPointerGetAttribute({attribute}) failed with CUDA error {status} for {pointer:#x}")
    return bool(legacy.value) or bool(handles.value & _FABRIC)


def make_current(device: int) -> None:
    """Makes the device's primary context, which is JAX's, current in this thread."""
    if getattr(_current, "device", None) == device:
        return
    cuda, context = driver(), ctypes.c_void_p()
    for name, status in (
        ("cuInit", cuda.cuInit(0)),
        ("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(device))),
        ("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context)),
    ):
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status} for device {device}")
    _current.device = device
