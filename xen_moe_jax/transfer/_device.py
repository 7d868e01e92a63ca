"""The CUDA context of a thread: UCX copies GPU memory with the context that is current where it is called."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax

_current = threading.local()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def ordinal(sharding: jax.sharding.Sharding) -> int | None:
    """The CUDA device of arrays that lie on this process's GPUs (the first of them), or None."""
    devices: list[Any] = sorted(sharding.addressable_devices, key=lambda device: device.id)
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    return devices[0].local_hardware_id


def make_current(device: int) -> None:
    """Makes the device's primary context, which is JAX's, current in this thread."""
    if getattr(_current, "device", None) == device:
        return
    driver, context = _driver(), ctypes.c_void_p()
    for name, status in (
        ("cuInit", driver.cuInit(0)),
        ("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(device))),
        ("cuCtxSetCurrent", driver.cuCtxSetCurrent(context)),
    ):
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status} for device {device}")
    _current.device = device
