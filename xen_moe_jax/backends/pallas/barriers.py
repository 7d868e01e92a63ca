"""Choice of a kernel's barrier semaphore: one for every partition of the devices into groups, and channel.

Two kernels over different groups that share a barrier semaphore take each other's announcements for their own, and
write into buffers of ranks that have not entered (tests/backends/pallas/test_barriers.py shows how). XLA gives every
`collective_id` of a program a semaphore of its own; the number here is a hash of the groups, so that it does not depend
on earlier programs or on the process.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _mesh
from xen_moe_jax._config import KernelConfig
from xen_moe_jax.pallas_kernels.peers import Axes

FIRST, LAST = 256, 2**15 - 1
"""The library's own ids: above the numbers that people pick by hand, and within 16 bits with a sign, to which interpret
mode truncates them."""

_owners: dict[int, tuple[Any, ...]] = {}


def collective_id(axes: Axes, groups: Any, config: KernelConfig) -> int:
    """Id of the barrier semaphore of a kernel over `axes`, divided into `groups` (`axis_index_groups`, or None).

    Raises:
      ValueError: two different groups of this process hash to the same id.
    """
    if config.collective_id is not None:
        return config.collective_id
    key = (_partition(axes, groups), config.channel)
    digest = hashlib.blake2s(repr(key).encode(), digest_size=8).digest()
    number = FIRST + int.from_bytes(digest, "big") % (LAST - FIRST + 1)
    if _owners.setdefault(number, key) != key:
        raise ValueError(
            f"the barrier semaphore {number} of kernels over mesh axes {axes.names} (channel {config.channel}) is "
            "that of kernels over other devices: pass a KernelConfig with another channel or with a collective_id"
        )
    return number


def _partition(axes: Axes, groups: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that talk to each other: by device id, or by place in a mesh without devices."""
    mesh = _mesh.lowering_mesh()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        numbers = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    else:
        numbers = np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
    names = list(mesh.axis_names)
    others = [i for i, name in enumerate(names) if name not in axes.names]
    along = [names.index(name) for name in axes.names]
    rows = numbers.transpose(others + along).reshape(math.prod(numbers.shape[i] for i in others), -1)
    if groups is not None:
        rows = np.concatenate([rows[:, list(group)] for group in groups])
    return tuple(sorted(tuple(sorted(int(n) for n in row)) for row in rows))
