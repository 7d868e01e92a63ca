"""Which devices form a group: from the mesh that the program is lowered for, never from device numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xen_moe_jax.backends.cuda import module, processes


def device_key(device: Any) -> int:
    """`process * devices_per_process + CUDA ordinal`, as in ffi/symmetric_memory.h.

    JAX does not tell the ordinal of another process's device, which may be 0 in every process. Its number in the job
    stands for it, and nothing but the words of an error depends on it.
    """
    ordinal = device.local_hardware_id
    return device.process_index * module.compiled().devices_per_process + (device.id if ordinal is None else ordinal)


def groups(mesh: Any, axis_name: Sequence[str], axis_index_groups: Any = None) -> np.ndarray:
    """int64 `[groups, ranks]`: the device keys of every group of `axis_name`, in rank order.

    Without GPUs here (lowering for another machine, export) a device is a negative number, `-1 - i` for the `i`-th
    device of the mesh, and means the `i`-th of the job that runs the program.

    Raises:
      ValueError: the program is lowered for GPUs of this job and no mesh with devices is known.
    """
    sizes = dict(mesh.shape)
    keys = -1 - np.arange(mesh.size, dtype=np.int64).reshape(tuple(sizes.values()))
    if _has_devices(mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda"):
        keys = np.vectorize(device_key, otypes=[np.int64])(mesh.devices)
    elif _job_has_gpus():
        raise ValueError(
            "xen_moe_jax on CUDA needs to know the mesh's devices: give jax.shard_map the mesh (mesh=...), or enter "
            "jax.set_mesh(mesh) around the call"
        )
    names = list(sizes)
    last = [names.index(name) for name in axis_name]
    first = [i for i in range(len(names)) if i not in last]
    ranks = int(np.prod([sizes[name] for name in axis_name]))
    keys = keys.transpose(first + last).reshape(-1, ranks)
    if axis_index_groups is not None:
        keys = keys[:, np.asarray(axis_index_groups)].reshape(-1, len(axis_index_groups[0]))
    return keys


def _has_devices(mesh: Any) -> bool:
    return isinstance(mesh, jax.sharding.Mesh)  # an AbstractMesh has the attribute, and it raises


def prepare(keys: np.ndarray) -> None:
    """Registers the FFI targets, tells the module about this job, and starts memory between processes if a group spans
    several.
    """
    compiled = module.registered()
    _configure()
    owner = keys // compiled.devices_per_process
    if keys.min() >= 0 and (owner != owner[:, :1]).any():
        processes.start(compiled)


@functools.cache
def _configure() -> None:
    if _job_has_gpus():
        keys = [device_key(d) for d in jax.devices()]
        module.compiled().configure(jax.process_index(), jax.process_count(), keys)


@functools.cache
def _job_has_gpus() -> bool:
    return jax.default_backend() == "gpu"


def num_sms(mesh: Any) -> int:
    """Streaming multiprocessors of the mesh's GPUs, the fewest; an H200's where there is none."""
    counts = [getattr(d, "core_count", None) for d in mesh.devices.flat] if _has_devices(mesh) else []
    return min([c for c in counts if c and c > 1], default=132)
