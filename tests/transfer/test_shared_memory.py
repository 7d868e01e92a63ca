"""Host memory that other processes map, of which windows on CPUs are made."""

import ctypes
import errno
import gc
import os
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import transfer
from xen_moe_jax.transfer import _memory, _shared_memory

transfer.require()
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="host memory of windows on CPUs")
NBYTES = 3 << 20


def block(shape, dtype="float32", sharding=None):
    return _memory.Block(shape, dtype, sharding, shared=True)


def used():
    """Bytes of this process's file that take memory."""
    return os.fstat(_shared_memory._file_of(os.getpid()).descriptor).st_blocks * 512


def test_memory_is_zero_free_at_once_when_given_back_and_used_again():
    before = used()
    memory = _shared_memory.SharedMemory(NBYTES)
    pointer = memory.pointer
    assert used() == before + NBYTES, "the first writer would pay for the memory"
    assert not any(ctypes.string_at(pointer, NBYTES))
    ctypes.memset(pointer, 5, NBYTES)
    del memory
    assert used() == before
    again = _shared_memory.SharedMemory(NBYTES)
    assert again.pointer == pointer and not any(ctypes.string_at(pointer, NBYTES))


def test_who_opens_the_file_sees_the_same_memory():
    memory = _shared_memory.SharedMemory(NBYTES)
    place = _shared_memory.place_of(memory.pointer)
    file = _shared_memory.open_file(os.getpid(), place)
    there = _shared_memory.map_file(file, place.offset, NBYTES)
    assert there != memory.pointer
    ctypes.memset(there + NBYTES - 4, 9, 4)
    assert ctypes.string_at(memory.pointer + NBYTES - 5, 5) == bytes([0, 9, 9, 9, 9])
    _shared_memory.unmap(there, NBYTES)
    os.close(file)


def test_only_that_file_is_opened_and_only_what_is_in_it():
    memory = _shared_memory.SharedMemory(NBYTES)
    place = _shared_memory.place_of(memory.pointer)
    assert _shared_memory.place_of(memory.pointer + 4096) is None and _shared_memory.place_of(id(memory)) is None
    assert _shared_memory.open_file(os.getpid(), place._replace(inode=place.inode + 1)) is None
    assert _shared_memory.open_file(os.getpid(), place._replace(descriptor=10**6)) is None
    size = os.fstat(place.descriptor).st_size
    assert _shared_memory.holds(place.descriptor, place, size - place.offset)
    assert not _shared_memory.holds(place.descriptor, place, size - place.offset + 1)
    loose = os.memfd_create("may shrink")
    os.ftruncate(loose, 1 << 20)
    found = _shared_memory.Place(loose, os.fstat(loose).st_ino, 0)
    assert _shared_memory.open_file(os.getpid(), found) is None, "a file that may shrink"
    os.close(loose)
    with pytest.raises(OSError):
        os.ftruncate(place.descriptor, 4096)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_an_array_lies_in_it_and_keeps_it(dtype):
    made = block((64, 33), dtype)
    (shard,) = made.shards
    assert _shared_memory.place_of(shard.pointer)
    values = (np.arange(64 * 33) % 2).reshape(64, 33).astype(dtype)
    ctypes.memmove(shard.pointer, values.ctypes.data, values.nbytes)
    array = made.array()
    assert array.unsafe_buffer_pointer() == shard.pointer
    np.testing.assert_array_equal(np.asarray(array), values)
    memory = next(
        weakref.ref(owner) for *_, owner in _memory._dlpack._imported.values() if owner.pointer == shard.pointer
    )
    del made
    gc.collect()
    assert memory() is not None and (np.asarray(array) == values).all()
    seen = np.asarray(array)  # A view of it.
    del array
    gc.collect()
    np.testing.assert_array_equal(seen, values)
    del seen
    gc.collect()
    assert memory() is None


def test_what_jax_does_not_import_lies_in_its_own_memory():
    assert not block((4, 4), "float8_e4m3fn")._parts and not block((0, 4))._parts


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices; tests run on 8 virtual CPU devices")
def test_every_shard_of_a_sharded_array_lies_in_it():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    made = block((8, 6), sharding=jax.NamedSharding(mesh, jax.P("a")))  # Each row twice.
    assert len({shard.pointer for shard in made.shards}) == 8
    for shard in made.shards:
        rows = np.full((2, 6), shard.box[0][0], np.float32)
        ctypes.memmove(shard.pointer, rows.ctypes.data, rows.nbytes)
    array = made.array()
    np.testing.assert_array_equal(np.asarray(array)[:, 0], np.repeat([0, 2, 4, 6], 2))
    assert {s.data.unsafe_buffer_pointer() for s in array.addressable_shards} == {s.pointer for s in made.shards}


def test_donated_memory_is_not_used_again_too_early():
    made = block((1 << 18,))
    pointer = made.shards[0].pointer
    array = made.array()
    del made
    doubled = jax.jit(lambda x: x + 2, donate_argnums=0)(array).block_until_ready()
    del array
    gc.collect()
    free = _shared_memory._file_of(os.getpid()).free

    def given_back():
        return pointer in free.get(1 << 20, ()) or doubled.unsafe_buffer_pointer() == pointer

    for _ in range(200):  # a thread of XLA's may be the one that gives it back
        if given_back():
            break
        time.sleep(0.05)
    assert given_back()
    others = [_shared_memory.SharedMemory(1 << 20) for _ in range(4 + len(free.get(1 << 20, ())))]
    for other in others:
        ctypes.memset(other.pointer, 255, 1 << 20)
    np.testing.assert_array_equal(np.asarray(doubled), np.full(1 << 18, 2, np.float32))


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EINVAL])
def test_where_there_is_no_memory_windows_lie_in_jaxs_own(monkeypatch, error):
    """EINVAL: a kernel that cannot be asked for it."""
    library = _shared_memory._library()

    class Full:
        def __getattr__(self, name):
            return getattr(library, name)

        def madvise(self, pointer, nbytes, advice):
            if advice == _shared_memory._REMOVE:
                return library.madvise(pointer, nbytes, advice)
            ctypes.set_errno(error)
            return -1

    monkeypatch.setattr(_shared_memory, "_library", Full)
    assert bool(block((256, 1024))._parts) == (error == errno.EINVAL)


def test_many_arrays_take_one_descriptor():
    block((4,))
    before = len(os.listdir("/proc/self/fd"))
    blocks = [block((16, 16)) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1 and len({b.shards[0].pointer for b in blocks}) == 100


def test_without_such_memory_windows_lie_in_jaxs_own(monkeypatch):
    monkeypatch.setattr(_shared_memory, "_file_of", lambda process: None)
    made = block((4, 4))
    assert not made._parts
    np.testing.assert_array_equal(np.asarray(made.array()), jnp.zeros((4, 4)))
