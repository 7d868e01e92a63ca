"""This process in its job: the devices, their keys, and telling the compiled module about them."""

from __future__ import annotations

import threading
from typing import Any

import jax

_described: set[Any] = set()
_lock = threading.Lock()


def has_gpus() -> bool:
    """Returns whether JAX runs on GPUs in this process. Without them the backend can compile, but not run."""
    return jax.default_backend() == "gpu"


def device_key(compiled: Any, device: Any) -> int:
    """Returns `process * devices_per_process + CUDA ordinal`, as in ffi/job.h.

    JAX does not tell the ordinal of another process's device, which may be 0 in every process. The device's number in
    the job stands for it, and only the words of an error depend on it.
    """
    ordinal = device.local_hardware_id
    return device.process_index * compiled.devices_per_process + (device.id if ordinal is None else ordinal)


def describe_as(compiled: Any, process: int, count: int, keys: list[int]) -> None:
    """Tells the compiled module that this is process `process` of `count`, with these devices: not those of JAX's job.

    Raises:
      ValueError: it has been told of a job already.
    """
    with _lock:
        if compiled in _described:
            raise ValueError(
                "elastic.Group: this process has run operations on its GPU outside the group: open it before"
            )
        compiled.configure(process, count, keys)
        _described.add(compiled)


def describe(compiled: Any) -> bool:
    """Tells the compiled module which devices the job has, once. Returns False where this process has no GPUs."""
    if not has_gpus():
        return False
    with _lock:
        if compiled not in _described:
            keys = [device_key(compiled, device) for device in jax.devices()]
            compiled.configure(jax.process_index(), jax.process_count(), keys)
            _described.add(compiled)
    return True
