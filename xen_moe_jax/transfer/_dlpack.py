"""Turns memory of this package into JAX arrays by DLPack, without a copy."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np


class _Tensor(ctypes.Structure):
    """`DLManagedTensor` of DLPack 0.8."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Tensor))
_Tensor._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_OTHER_CODES = {ml_dtypes.bfloat16: 4}

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_imported: dict[int, tuple[_Tensor, Any, Any]] = {}
"""Tensors that JAX holds, by address: the structure, its shape, and the owner of the memory."""


@_Deleter
def _delete(tensor: Any) -> None:
    _imported.pop(ctypes.addressof(tensor.contents), None)


@atexit.register
def _forget_all() -> None:
    """Replaces the deleters at exit: JAX may release arrays after Python has ended, and must not call Python then."""
    nothing = ctypes.cast(ctypes.CDLL(None).labs, _Deleter)  # It computes an absolute value, which is not used.
    for tensor, shape, _ in _imported.values():
        tensor.deleter = nothing
        for kept in (tensor, shape):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class _Exporter:
    """An object that `jax.dlpack.from_dlpack` takes."""

    def __init__(self, owner: Any, pointer: int, shape: Sequence[int], dtype: np.dtype, device: tuple[int, int]):
        self._device = device
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        code = _OTHER_CODES.get(dtype.type, _CODES.get(dtype.kind))
        self._tensor = _Tensor(
            pointer, *device, len(shape), code, 8 * dtype.itemsize, 1, self._shape, None, 0, None, _delete
        )
        self._owner = owner

    def __dlpack__(self, **_: Any) -> Any:
        address = ctypes.addressof(self._tensor)
        _imported[address] = (self._tensor, self._shape, self._owner)
        return _capsule(address, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def is_imported(dtype: np.dtype) -> bool:
    """Returns whether JAX imports arrays of this dtype without a change."""
    return dtype.type in _OTHER_CODES or (dtype.kind in _CODES and dtype.isbuiltin == 1)


def as_array(owner: Any, pointer: int, shape: Sequence[int], dtype: np.dtype, device: tuple[int, int]) -> jax.Array:
    """Returns dense memory as a JAX array on `device` (DLPack's type and number). The array keeps `owner` alive.

    The array is not copied, except for dtypes that JAX does not import (float8), which are copied once on the device.
    """
    dtype = np.dtype(dtype)
    known = is_imported(dtype)
    carrier = dtype if known else np.dtype(f"u{dtype.itemsize}")
    array = jax.dlpack.from_dlpack(_Exporter(owner, pointer, shape, carrier, device))
    return array if known else jax.lax.bitcast_convert_type(array, dtype)
