"""Groups of devices, from the mesh that the program is lowered for, never from device numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _mesh
from xen_moe_jax.backends.cuda import job, module, processes

HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 (SXM) or H200: what schedules assume where no GPU is at hand."""


def groups(mesh: Any, axis_name: Sequence[str], axis_index_groups: Any = None) -> np.ndarray:
    """Returns int64 `[groups, ranks]`: the device keys of every group of `axis_name`, in rank order.

    A negative key `-1 - i` is the `i`-th device of the job that runs the program. Programs that run elsewhere have such
    keys: for an export, `i` is the device's place in the mesh; for a program that is compiled ahead of time, `i` is the
    device's id, by which XLA places the program, too.

    Raises:
      ValueError: the program is lowered for GPUs of this job and no mesh with devices is known.
    """
    group = _mesh.group_of(tuple(axis_name))
    if group is not None:
        if axis_index_groups is not None:
            raise NotImplementedError("axis_index_groups inside an elastic.Group: its ranks exchange all together")
        return group.device_keys()
    sizes = dict(mesh.shape)
    keys = -1 - np.arange(mesh.size, dtype=np.int64).reshape(tuple(sizes.values()))
    if _mesh.lowering_exported():
        pass
    elif _has_gpus(mesh):
        keys = np.vectorize(_key, otypes=[np.int64])(mesh.devices)
    elif job.has_gpus():
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


def _has_gpus(mesh: Any) -> bool:
    return _has_devices(mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda")


def _key(device: Any) -> int:
    if job.has_gpus() and device in _job_devices():
        return job.device_key(module.compiled(), device)
    return -1 - device.id


@functools.cache
def _job_devices() -> frozenset[Any]:
    return frozenset(jax.devices())


def prepare(keys: np.ndarray, per_node: int, between_nodes: bool = True) -> None:
    """Registers the FFI targets, and tells the module about this job. If a group spans several processes, it also
    starts memory between them, and checks that neighbours share NVLink.

    A program that was lowered elsewhere does without: once the targets are registered and it is loaded, its handlers
    tell the module about the job and start memory, and refuse the memory of a neighbour that is not mapped. Here, an
    error has the type and the traceback that belong to the caller's line.

    Args:
      keys: int64 `[groups, ranks]`, from `groups`.
      per_node: number of consecutive ranks of a group that the operation takes as neighbours.
      between_nodes: as in `processes.check_neighbours`.

    Raises:
      ValueError, BackendUnavailable: as `processes.start`. ValueError: as `processes.check_neighbours`.
    """
    compiled = module.registered()
    job.describe(compiled)
    owner = keys // compiled.devices_per_process
    if keys.min() >= 0 and (owner != owner[:, :1]).any():
        processes.start(compiled)
        processes.check_neighbours(owner, per_node, between_nodes)


def num_sms(mesh: Any) -> int:
    """Returns the fewest streaming multiprocessors of any GPU of the mesh; `HOPPER_SMS` where the mesh has no GPUs."""
    counts = [getattr(d, "core_count", None) for d in mesh.devices.flat] if _has_devices(mesh) else []
    return min([c for c in counts if c and c > 1], default=HOPPER_SMS)
