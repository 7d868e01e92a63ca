"""GPU memory of this package, which other processes can map, and which becomes a JAX array without a copy.

XLA allocates its memory by the driver's virtual memory calls, in a form that UCX cannot give to another process. Memory
for peers is therefore allocated here by `cuMemAlloc`, beside XLA's pool, and imported into JAX by DLPack.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xen_moe_jax.transfer import _device, _dlpack
from xen_moe_jax.transfer._errors import TransferRefused

_CUDA = 2  # DLPack's kDLCUDA

_pool: dict[tuple[int, int], list[int]] = {}
"""Unused memory, by (device, bytes). It is used again rather than freed, because peers have it mapped."""
_pool_lock = threading.RLock()  # Memory is given back by the collector, too, which may run in the middle of anything.


class DeviceMemory:
    """`nbytes` of zeros on a GPU. Given back to the pool when this object and the JAX arrays made of it are gone."""

    def __init__(self, ordinal: int, nbytes: int):
        self.ordinal, self.nbytes, self.pointer = ordinal, nbytes, 0
        _device.make_current(self.ordinal)
        with _pool_lock:
            free = _pool.get((self.ordinal, nbytes))
            pointer = free.pop() if free else None
        if pointer is None:
            pointer = _device.allocate(nbytes)
        if pointer is None:
            _drain(self.ordinal)
            pointer = _device.allocate(nbytes)
        if pointer is None:
            raise TransferRefused(
                f"{nbytes} bytes for peers on GPU {ordinal}: there is no room for them beside JAX's own memory; "
                "lower XLA_CLIENT_MEM_FRACTION (three quarters of the GPU by default)"
            )
        self.pointer = pointer
        _device.zero(pointer, nbytes)  # Runs after all work that reads the old contents of this memory.

    def array(self, shape: Sequence[int], dtype: np.dtype, device: Any) -> jax.Array:
        """Returns the memory as an array on the JAX device that it belongs to."""
        return _dlpack.as_array(self, self.pointer, shape, dtype, (_CUDA, device.local_hardware_id))

    def __del__(self, lock: Any = _pool_lock, pool: Any = _pool) -> None:
        if self.pointer:
            with lock:
                pool.setdefault((self.ordinal, self.nbytes), []).append(self.pointer)


def _drain(ordinal: int) -> None:
    with _pool_lock:
        found = [pointer for key in list(_pool) if key[0] == ordinal for pointer in _pool.pop(key)]
    for pointer in found:
        _device.free(pointer)


def shareable_copy(pointer: int, nbytes: int) -> DeviceMemory | None:
    """Returns a copy of a JAX array's memory that other processes can map; None if they can map the memory itself."""
    if _device.is_shareable(pointer):
        return None
    memory = DeviceMemory(_device.ordinal_of(pointer), nbytes)
    _device.copy(memory.pointer, pointer, nbytes)
    return memory
