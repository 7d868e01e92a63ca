"""Symmetric memory for `xm.Buffer` and `xm.buffer_size_hint`.

The sizes are computed where they are used, in ffi/operation.cc.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._config import DEFAULT_CONFIG
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec, worst_case_capacity
from xen_moe_jax.backends.cuda import call, devices, module, schedule

SMALL_BATCH = 4096


def buffer_size_hint(
    *, num_tokens: int, hidden: int, num_ranks: int, top_k: int, num_experts: int, dtype: Any, wire: Wire | None
) -> int:
    """Bytes of symmetric memory per rank that dispatch and combine of these shapes share."""
    capacity = worst_case_capacity(
        layout="grouped", num_ranks=num_ranks, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, alignment=1
    )
    spec = Spec(("ep",), (num_ranks,), num_experts, num_tokens, top_k, "grouped", capacity)
    scaled = jnp.dtype(dtype).itemsize == 1
    parts = (
        max(1, hidden // schedule.MIN_PART_ELEMENTS) if num_tokens <= SMALL_BATCH else 1
    )  # no schedule cuts rows finer
    cut = dataclasses.replace(schedule.dispatch(spec, hidden, DEFAULT_CONFIG, 132), parts=min(16, parts))
    attrs = call.attributes(spec, hidden, dtype, cut, DEFAULT_CONFIG, wire=wire, scaled=scaled)
    return module.compiled().routing_staging_bytes(attrs)


class Memory:
    """Memory that an open `xm.Buffer` holds."""

    def __init__(self, keys: np.ndarray, channel: int) -> None:
        self._arguments = (keys.reshape(-1).tolist(), keys.shape[1], channel)

    def close(self) -> None:
        module.compiled().release(*self._arguments)


def open_buffer(mesh: jax.sharding.Mesh, axis_name: tuple[str, ...], size_bytes: int, channel: int) -> Memory:
    """Allocates on every rank. Collective when the axis spans processes."""
    keys = devices.groups(mesh, axis_name)
    devices.prepare(keys)
    module.compiled().reserve(keys.reshape(-1).tolist(), keys.shape[1], channel, size_bytes)
    return Memory(keys, channel)


def reset() -> None:
    """Restarts all workspaces of this process after a timeout, when nothing is running.

    Where an axis spans processes, every process must call it.
    """
    module.registered().reset()


def workspaces() -> list[dict[str, Any]]:
    """What is allocated: for each group and channel the devices, ranks, staging bytes and scratch bytes of a rank."""
    return module.compiled().workspaces()
