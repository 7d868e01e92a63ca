"""Memory of this package's own as JAX arrays, of which windows on GPUs are made, tried on the host."""

import ctypes
import functools
import gc
import os
import pathlib
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.support import HANG_S, transfer
from xen_moe_jax.transfer import _device, _dlpack

transfer.require()
ON_CPU = (1, 0)  # DLPack's device
IMPORTED = ["float32", "float16", "bfloat16", "complex64", "bool", "int8", "uint8", "int16", "int32", "uint32"]
COPIED = ["float8_e4m3fn", "float8_e5m2"]


class Memory:
    def __init__(self, nbytes):
        self._bytes = np.zeros(nbytes + 256, np.uint8)
        self.view = self._bytes[-self._bytes.ctypes.data % 256 :][:nbytes]


@pytest.mark.parametrize("shape", [(), (4, 6), (2, 1, 3)])
@pytest.mark.parametrize("dtype", IMPORTED + COPIED)
def test_memory_becomes_an_array_that_keeps_it(dtype, shape):
    dtype = jnp.dtype(dtype)
    values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
    memory = Memory(values.nbytes)
    memory.view[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    pointer, owner = memory.view.ctypes.data, weakref.ref(memory)
    array = _dlpack.as_array(memory, pointer, shape, dtype, ON_CPU)
    del memory
    assert (array.shape, array.dtype, array.device) == (shape, dtype, jax.local_devices(backend="cpu")[0])
    np.testing.assert_array_equal(np.asarray(array), values)
    assert (array.unsafe_buffer_pointer() == pointer) == (dtype.name in IMPORTED)
    gc.collect()
    assert dtype.name in COPIED or owner() is not None, "the memory of a living array was given back"
    del array
    gc.collect()
    assert owner() is None and not _dlpack._imported


def test_a_context_is_set_again_after_other_code_has_set_another(monkeypatch):
    current = []

    class Driver:
        def cuCtxSetCurrent(self, context):
            current.append(context.value)
            return 0

    monkeypatch.setattr(_device, "driver", Driver)
    monkeypatch.setattr(_device, "context", lambda device: 100 + device)
    _device.make_current(1)
    current.append(100)  # XLA, which leaves the context of the device that it used last.
    _device.make_current(1)
    assert current == [101, 100, 101]


def test_a_tick_leaves_the_context_of_its_thread(monkeypatch):
    """XLA calls back in the middle of its work on one device; a write may use the context of another."""
    current = [105]

    class Driver:
        def cuCtxSetCurrent(self, context):
            current[0] = context.value
            return 0

        def cuCtxGetCurrent(self, found):
            ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0] = current[0]
            return 0

    monkeypatch.setattr(_device, "driver", functools.cache(Driver))
    monkeypatch.setattr(_device, "context", lambda device: 100 + device)
    seen = []

    def callback(index, data):
        _device.make_current(1)
        seen.append((index, current[0]))

    xt.Watcher().on_tick(np.int32(3), None, None)
    assert not _device.driver.cache_info().currsize, "the driver was loaded for nothing"
    _device.driver()
    xt.Watcher(callback).on_tick(np.int32(4), None, None)
    assert (seen[-1], current) == ((4, 101), [105])


def test_windows_in_device_memory():
    """The whole way of GPU windows, over a driver that is made of host memory: in one process, and between two."""
    program = pathlib.Path(__file__).with_name("fake_driver.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0 and done.stdout.strip() == "whole", done.stderr
