"""Symmetric memory for `xm.Buffer` and `xm.buffer_size_hint`.

The sizes are computed where they are used, in ffi/operation.cc.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._config import DEFAULT_CONFIG
from xen_moe_jax._numbers import positive_seconds
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec, worst_case_capacity
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import call, devices, module, processes
from xen_moe_jax.backends.cuda import schedule as schedules
from xen_moe_jax.backends.cuda.members import Alone

SMALL_BATCH = 4096
CHANGE_S = 600.0
"""Seconds that the other processes have to come when memory changes: they may be compiling."""
CLOSE_S = 30.0
RESET_S = 60.0


def buffer_size_hint(
    *,
    num_tokens: int,
    hidden: int,
    num_ranks: int,
    top_k: int,
    num_experts: int,
    dtype: Any,
    wire: Wire | None,
    ranks_per_node: int,
    rows_at_once: int | None = None,
) -> int:
    """Bytes of symmetric memory per rank that dispatch and combine of these shapes share.

    `rows_at_once`: given for a combine at home (`_home_sums.py`), the rows that travel in one combine by themselves
    where no kernel does it.
    """
    capacity = worst_case_capacity(
        layout="grouped", num_ranks=num_ranks, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, alignment=1
    )
    spec = Spec(("ep",), (num_ranks,), num_experts, num_tokens, top_k, "grouped", capacity)
    config = DEFAULT_CONFIG
    if ranks_per_node < num_ranks:
        config = dataclasses.replace(config, ranks_per_node=ranks_per_node)
    scaled = jnp.dtype(dtype).itemsize == 1
    # No schedule cuts rows into smaller parts.
    parts = max(1, hidden // schedules.MIN_PART_ELEMENTS) if num_tokens <= SMALL_BATCH else 1
    # A combine may have no wire format although the dispatch has one.
    low_latency = any(schedules.use_low_latency(spec, hidden, dtype, config, wire=w) for w in (wire, None))
    # The bytes of staging memory depend on the parts of a row, but not on how many SMs share the work.
    any_sms = schedules.dispatch(spec, hidden, config, devices.HOPPER_SMS)
    schedule = dataclasses.replace(any_sms, parts=min(16, parts), low_latency=low_latency)
    attrs = call.attributes(spec, hidden, dtype, schedule, config, wire=wire, scaled=scaled)
    attrs["chunk_tokens"] = schedules.chunk_tokens(spec, config)  # of the throughput kernels: they may run too
    compiled = module.compiled()
    most = compiled.dispatch_staging_bytes(attrs)
    if rows_at_once is None:
        return most
    if compiled.no_home_combine(ranks=num_ranks, ranks_per_node=ranks_per_node, hidden=hidden, layout=attrs["layout"]):
        alone = {"num_tokens": rows_at_once, "top_k": 1, "num_experts": num_experts, "ranks_per_node": ranks_per_node}
        return max(most, buffer_size_hint(hidden=hidden, num_ranks=num_ranks, dtype=dtype, wire=None, **alone))
    values = compiled.dtypes.index("bfloat16" if scaled else jnp.dtype(dtype).name)
    home = {"low_latency": 0, "wire": 0, "dtype": values, "scaled": 0}
    return max(most, compiled.home_combine_staging_bytes(attrs | home))


class Memory:
    """Memory that an open `xm.Buffer` holds."""

    def __init__(self, keys: np.ndarray, channel: int, size_bytes: int, ranks_per_node: int) -> None:
        self._workspace = module.compiled().workspace(keys.reshape(-1).tolist(), keys.shape[1], channel, ranks_per_node)
        self._workspace.reserve(size_bytes, CHANGE_S)

    def close(self) -> None:
        """Returns within `CLOSE_S`; memory that is still in use then is freed after its last use.

        Raises:
          RuntimeError: the process is a member of an `elastic.Group`, whose memory stays as it is.
        """
        if Alone.here is not None:
            Alone.here.check()
        try:
            self._workspace.release(CLOSE_S)
        except RuntimeError as error:  # another process did not close: its share keeps until the next change of memory
            warnings.warn(str(error), stacklevel=4)


def open_buffer(
    mesh: jax.sharding.Mesh, axis_name: tuple[str, ...], size_bytes: int, channel: int, ranks_per_node: int
) -> Memory:
    """Allocates on every rank. Collective when the axis spans processes."""
    keys = devices.groups(mesh, axis_name)
    devices.prepare(keys, ranks_per_node or keys.shape[1])
    return Memory(keys, channel, size_bytes, ranks_per_node)


def ranks_per_node(num_ranks: int) -> int | None:
    """Implements `Backend.ranks_per_node`."""
    try:
        return processes.ranks_per_node(module.registered, num_ranks)
    except BackendUnavailable:
        return None  # plain JAX runs in its place, or raises with the reason


def failure() -> str:
    """Returns the error of a failed group of this process; "" while none has failed. Reads host memory alone."""
    loaded = module.loaded()
    return loaded.failure() if loaded is not None else ""


def alive(mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...]) -> np.ndarray:
    """Returns a bool array, the sizes of the mesh's other axes and then `[R]`: False for ranks whose process the last
    `reset` has left out. It is the same in every process that is left. Pass it as `active`.

    Raises:
      ValueError: an axis is not in the mesh.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"alive: axis_name={axis_name!r}: the mesh has axes {mesh.axis_names}")
    others = [size for name, size in mesh.shape.items() if name not in names]
    loaded = module.loaded()
    processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    order = [mesh.axis_names.index(name) for name in mesh.axis_names if name not in names]
    by_group = processes.transpose(order + [mesh.axis_names.index(name) for name in names]).reshape(*others, -1)
    return ~np.isin(by_group, loaded.gone() if loaded is not None else [])


def reset(timeout_s: float = RESET_S) -> None:
    """Makes every group of this process usable again after a failure. No program may be running.

    Ends operations of this library that still wait. Where an axis spans processes, every process must call
    it; one that has died is left out where the programs of a group take `active` (see `alive`), else it is an error.

    Args:
      timeout_s: seconds to wait for GPUs to become idle, and for the other processes.

    Raises:
      RuntimeError: a GPU was still busy, or a process did not come. Failed groups stay failed; call it again.
      ValueError: `timeout_s` is not positive. BackendUnavailable: the CUDA backend cannot run here.
    """
    seconds = positive_seconds(timeout_s, "timeout_s", "reset")
    module.registered().reset(seconds)


def workspaces() -> list[dict[str, Any]]:
    """Lists the allocated memory, for each group and channel.

    Keys: devices, ranks, ranks_per_node, channel; memory, where it comes from ("peer access", "NVSHMEM", "NCCL");
    staging_bytes and scratch_bytes of a rank; generation, how often it was made anew; generations_held, how many of
    them still hold memory; launches by the host, and captured, how many of them went into a CUDA graph; the replay of a
    graph is neither.

    Raises:
      BackendUnavailable: there is no CUDA module.
    """
    return module.compiled().workspaces()
