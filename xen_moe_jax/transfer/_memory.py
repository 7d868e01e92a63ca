"""The memory of JAX arrays: addressed in place where possible, otherwise copied through the host.

On CPU and CUDA devices an array's shards stay where they are as long as the array is referenced: they are addressed in
place if they are row-major, as all arrays are without a `jax.experimental.layout`. Elsewhere (TPU) a shard is copied to
or from the host.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from xen_moe_jax.transfer import _cuda_memory, _device, _dlpack, _shared_memory
from xen_moe_jax.transfer._errors import TransferRefused
from xen_moe_jax.transfer._layout import Box, Shard, box_of

_SUB_BYTE = re.compile(r"[a-z]+[1-7](_|$)")  # int4, float4_e2m1fn, float6_e3m2fn
_CHECKED: set[np.dtype] = set()
_IN_PLACE = {"cpu": "host", "gpu": "cuda", "cuda": "cuda"}


def check_array(value: Any, what: str) -> None:
    """Raises `TransferRefused` for a value that is not an array, or whose memory is gone."""
    if isinstance(value, jax.core.Tracer):
        raise TransferRefused(f"{what} is being traced: transfers start outside of jit; xt.tick hands arrays out of it")
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TransferRefused(f"{what} is a {type(value).__name__}: must be a jax.Array or a NumPy array")
    if isinstance(value, jax.Array) and value.is_deleted():
        raise TransferRefused(f"{what} was deleted or donated")


def part_of(src: Any, index: Any) -> Any:
    """Returns `src[index]`. Raises `TransferRefused` if an array has no such part: JAX would return the nearest one."""
    try:
        if isinstance(src, jax.Array):
            check_array(src, "the source")
            np.broadcast_to(np.False_, src.shape)[index]
        return src[index]
    except (IndexError, KeyError) as cause:
        raise TransferRefused(f"the source has no part [{index!r}]: {cause}") from None


def check_dtype(dtype, what: str) -> np.dtype:
    """Returns the NumPy dtype. Raises `TransferRefused` for dtypes whose elements are not whole bytes, which JAX does
    not have, or whose bytes are in the other order: only the dtype's name travels."""
    if isinstance(dtype, np.dtype) and dtype in _CHECKED:
        return dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TransferRefused(f"{what} has dtype {dtype}: transfer its data instead (for keys: jax.random.key_data)")
    given = np.dtype(dtype)
    of_numbers = given.kind in "biufcV" and not issubclass(given.type, np.void)  # V: those of ml_dtypes
    if not (of_numbers and given.isnative and hasattr(jnp, given.name)):
        raise TransferRefused(
            f"{what} has dtype {given}: must be numbers or bools in this machine's byte order, of a dtype that JAX has"
        )
    if _SUB_BYTE.match(given.name):
        raise TransferRefused(
            f"{what} has dtype {given.name}: elements below one byte are not transferred; bitcast to uint8"
        )
    _CHECKED.add(given)
    return given


def _default_kind(sharding: jax.sharding.Sharding) -> str | None:
    """Returns the kind of memory in which arrays without a memory kind lie on the sharding's devices."""
    devices: Any = sharding.addressable_devices
    return next((device.default_memory().kind for device in devices), sharding.memory_kind)


def check_sharding(sharding: jax.sharding.Sharding, what: str) -> None:
    """Raises `TransferRefused` for a sharding without devices, or whose arrays lie in another memory than JAX's own."""
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise TransferRefused(f"{what} has {sharding}: names no devices; give a sharding over a jax.sharding.Mesh")
    if sharding.memory_kind not in (None, kind := _default_kind(sharding)):
        raise TransferRefused(f"{what} has memory_kind={sharding.memory_kind!r}: must be {kind!r}; move it afterwards")


def is_row_major(array: Any) -> bool:
    if array.ndim < 2 or (layout := array.format.layout) is None:  # None: a plugin that has one layout.
        return True
    return layout.major_to_minor == tuple(range(array.ndim))


def row_major(array: Any) -> Any:
    """Returns the array, or a copy of it that can be addressed in place: row-major, and in its devices' own memory."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return array
    sharding: Any = array.sharding
    if not all(device.platform in _IN_PLACE for device in sharding.addressable_devices):
        return array
    if sharding.memory_kind in (None, kind := _default_kind(sharding)) and is_row_major(array):
        return array
    layout = Layout(tuple(range(array.ndim)))
    parts = [
        jax.device_put(shard.data, Format(layout, jax.sharding.SingleDeviceSharding(shard.device)))
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding.with_memory_kind(kind), parts)


def is_ready(array: Any) -> bool:
    return not hasattr(array, "is_ready") or array.is_ready()


def is_on_gpu(array: Any) -> bool:
    if not isinstance(array, jax.Array):
        return False
    devices: Any = array.sharding.addressable_devices
    return all(_IN_PLACE.get(device.platform) == "cuda" for device in devices)


def on_gpu(array: Any, device: Any) -> Any:
    """Returns a copy on the device if that is a GPU, otherwise the array."""
    return jax.device_put(array, device) if _IN_PLACE.get(device.platform) == "cuda" else array


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, extent) for extent in shape)


def is_in_place(array: Any) -> bool:
    """Returns whether it is an array of JAX's on one device, whose memory is addressed where it is."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        return False
    device: Any = array.device
    return device.platform in _IN_PLACE


def held(data: jax.Array, memory: str) -> list[object]:
    """Returns what keeps the memory of an array on one device where it is. While NumPy looks at memory of a CPU, JAX
    frees it after no `delete` and does not donate it; a GPU's may be given to another array, and stays mapped."""
    return [data, np.asarray(data)] if memory == "host" else [data]


def local_shards(array: Any) -> tuple[list[Shard], list[object]]:
    """Returns (this process's shards of a finished array, each box once; the objects that keep their memory alive)."""
    if not isinstance(array, jax.Array):
        host = np.asarray(array, order="C")
        return [Shard(tuple((0, extent) for extent in host.shape), host.ctypes.data, "host")], [host]
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding) and array.size:  # The usual array of small writes.
        device: Any = array.device
        if memory := _IN_PLACE.get(device.platform):
            return [Shard(_whole(array.shape), array.unsafe_buffer_pointer(), memory)], held(array, memory)
    shards: dict[Box, Shard] = {}
    kept: list[object] = [array]
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if box in shards:
            continue
        memory = _IN_PLACE.get(shard.device.platform)
        if memory is None or shard.data.size == 0:
            host = np.asarray(shard.data, order="C")
            kept.append(host)
            shards[box] = Shard(box, host.ctypes.data, "host")
        else:
            kept += held(shard.data, memory)
            shards[box] = Shard(box, shard.data.unsafe_buffer_pointer(), memory)
    return list(shards.values()), kept


@functools.lru_cache(maxsize=4096)
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding):
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)


class Block:
    """Writable memory of one array that is not a JAX array yet.

    `shards` covers every addressable shard, replicas too. `array()` returns the array, which is immutable from then on.
    Host memory needs no copy: it is JAX's or, if `shared` with other processes, this package's. GPU memory is copied on
    the GPU into JAX's memory unless `in_place`, because programs that run as CUDA graphs do not take both kinds. With
    `on_host` the memory is on the host until `array()`, for reads from a peer's host memory: UCX would write it to a
    GPU by answers of the peer, and would abort the peer if this process died before it had them.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype,
        sharding: jax.sharding.Sharding | None,
        in_place: bool = False,
        shared: bool = False,
        on_host: bool = False,
    ):
        self.shape, self.dtype = tuple(shape), check_dtype(dtype, "an array")
        if (made := jax.dtypes.canonicalize_dtype(self.dtype)) != self.dtype:  # JAX's array would hold half the bytes.
            raise TransferRefused(
                f"an array of {self.dtype} would be one of {made} here: set jax_enable_x64, or send {made}"
            )
        self.sharding = sharding or jax.sharding.SingleDeviceSharding(_device.default())
        check_sharding(self.sharding, "an array")
        try:
            self.sharding.shard_shape(self.shape)
        except ValueError as cause:
            raise ValueError(f"sharding: an array of shape {self.shape} cannot be split so: {cause}") from None
        self._in_place = in_place
        self._array: jax.Array | None = None
        self._parts: list[tuple[Any, Any, tuple[int, ...]]] = []
        devices: Any = self.sharding.addressable_devices
        memories = {_IN_PLACE.get(device.platform) for device in devices}
        self.shards: list[Shard] = []
        if memories == {"host"} and not (shared and self._share()):
            self._array = _zeros(self.shape, self.dtype, self.sharding)().block_until_ready()
            self.shards = [
                Shard(box_of(s.index, self.shape), s.data.unsafe_buffer_pointer(), "host")
                for s in self._array.addressable_shards
                if s.data.size
            ]
        if memories == {"host"}:
            return
        for device, box, extents, nbytes in self._places():
            if memories == {"cuda"} and nbytes and not on_host:
                memory = _cuda_memory.DeviceMemory(_device.ordinal(device), nbytes)
                self.shards.append(Shard(box, memory.pointer, "cuda"))
                self._parts.append((device, memory, extents))
            else:
                host = np.zeros(extents, self.dtype)
                self._parts.append((device, host, extents))
                if nbytes:
                    self.shards.append(Shard(box, host.ctypes.data, "host"))

    def _places(self) -> Iterator[tuple[Any, Box, tuple[int, ...], int]]:
        """Yields (device, box, extents, bytes) for every addressable shard."""
        places: Any = self.sharding.addressable_devices_indices_map(self.shape)
        for device, index in places.items():
            box = box_of(index or (), self.shape)
            extents = tuple(stop - start for start, stop in box)
            yield device, box, extents, math.prod(extents) * self.dtype.itemsize

    def _share(self) -> bool:
        """Takes host memory that other processes can map. Returns False if there is none, or if JAX would copy it."""
        if not _dlpack.is_imported(self.dtype):
            return False
        places = list(self._places())
        if not all(nbytes for *_, nbytes in places):
            return False
        try:
            parts = [(device, _shared_memory.SharedMemory(nbytes), extents) for device, _, extents, nbytes in places]
        except MemoryError:
            return False
        self._parts += parts
        self.shards = [Shard(box, part.pointer, "host") for (_, part, _), (_, box, _, _) in zip(parts, places)]
        return True

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards) * self.dtype.itemsize

    def array(self) -> jax.Array:
        if self._array is None:
            parts = [self._part(device, part, extents) for device, part, extents in self._parts]
            self._array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts).block_until_ready()
            self._parts = []
        return self._array

    def _part(self, device: Any, part: Any, extents: tuple[int, ...]) -> jax.Array:
        if isinstance(part, _shared_memory.SharedMemory):
            return part.array(extents, self.dtype, device)
        if not isinstance(part, _cuda_memory.DeviceMemory):
            return jax.device_put(part, device)
        array = part.array(extents, self.dtype, device)
        if self._in_place or array.unsafe_buffer_pointer() != part.pointer:  # Dtypes that JAX does not import.
            return array
        return jnp.array(array, copy=True)


def shard_bytes(shard: Shard, itemsize: int) -> int:
    return math.prod(stop - start for start, stop in shard.box) * itemsize
