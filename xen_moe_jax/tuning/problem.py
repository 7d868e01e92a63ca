"""`Problem`: a workload drawn and placed on a mesh. Programs, checks and timings all take one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xen_moe_jax.tuning.workload import (
    Capacities,
    Workload,
    capacities,
    draw_tokens,
    draw_topk_idx,
    draw_topk_weights,
)

AXIS = "ep"
RANK_SPEC = PartitionSpec(AXIS)
POOL_SPEC = PartitionSpec(None, AXIS)
SPECS = (RANK_SPEC, POOL_SPEC, POOL_SPEC)
"""Specs of `Inputs.arrays()`."""


def rank_spec(mesh: Mesh) -> PartitionSpec:
    """Returns the spec of arrays of all ranks, sharded over their leading axis: `RANK_SPEC`, or, where the mesh has a
    slow axis in front of `AXIS`, a spec whose axes split the ranks together."""
    return RANK_SPEC if mesh.axis_names == (AXIS,) else PartitionSpec(mesh.axis_names)


def specs(mesh: Mesh) -> tuple[PartitionSpec, ...]:
    """Returns the specs of `Inputs.arrays()` on a mesh: `SPECS`, or those of `rank_spec` where it has a slow axis."""
    return SPECS if mesh.axis_names == (AXIS,) else (rank_spec(mesh), *[PartitionSpec(None, mesh.axis_names)] * 2)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Global arrays of a workload on a mesh: `x [R*T,H]`, `topk_idx` and `topk_weights [P,R*T,K]`."""

    x: jax.Array
    topk_idx: jax.Array
    topk_weights: jax.Array

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.x, self.topk_idx, self.topk_weights


@dataclasses.dataclass(frozen=True)
class Problem:
    """A workload placed on a mesh.

    Attributes:
      mesh: one axis `AXIS` of `work.ranks` devices.
      topk_idx: int32 `[P,R,T,K]`, the routings that the timed calls cycle through, on the host.
      topk_weights: float32 `[P,R,T,K]`, on the host.
      caps: rows that every program has, from those routings.
      inputs: the same routings and the tokens, on the devices.
    """

    work: Workload
    mesh: Mesh
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    caps: Capacities
    inputs: Inputs

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu": of the devices that the problem runs on."""
        return self.mesh.devices.flat[0].platform


def make_mesh(ranks: int) -> Mesh:
    """The first `ranks` devices of all processes.

    Raises:
      ValueError: JAX sees fewer.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if len(devices) < ranks:
        platform = devices[0].platform
        virtual = "" if platform == "cpu" else ", or --platform cpu for virtual devices"
        raise ValueError(f"ranks={ranks}: JAX sees {len(devices)} {platform} device(s); use at most that many{virtual}")
    return Mesh(np.array(devices[:ranks]), (AXIS,))


def make_problem(work: Workload, mesh: Mesh | None = None) -> Problem:
    """Draws the workload and places it.

    Args:
      mesh: one axis named "ep" of `work.ranks` devices; None takes the first ones.

    Raises:
      ValueError: the mesh is another, or there are too few devices.
    """
    mesh = make_mesh(work.ranks) if mesh is None else mesh
    if mesh.axis_names != (AXIS,) or mesh.size != work.ranks:
        raise ValueError(f"mesh {dict(mesh.shape)}: must have the one axis {AXIS!r} of ranks={work.ranks} devices")
    topk_idx, topk_weights = draw_topk_idx(work), draw_topk_weights(work)
    inputs = place_inputs(work, mesh, topk_idx, topk_weights)
    return Problem(work, mesh, topk_idx, topk_weights, capacities(work, topk_idx), inputs)


def place_inputs(work: Workload, mesh: Mesh, topk_idx: np.ndarray, topk_weights: np.ndarray) -> Inputs:
    """Puts each rank's share on its device; works with one process or many."""

    of_rank, of_pool, _ = specs(mesh)

    def tokens(index):
        start = (index[0].start or 0) // work.tokens
        stop = start + (index[0].stop - index[0].start if index[0].stop else work.ranks * work.tokens) // work.tokens
        return np.concatenate([draw_tokens(work, rank) for rank in range(start, stop)])

    def pool(values):
        flat = values.reshape(work.pool, work.ranks * work.tokens, work.top_k)
        return jax.make_array_from_callback(flat.shape, NamedSharding(mesh, of_pool), lambda index: flat[index])

    x_shape = (work.ranks * work.tokens, work.hidden)
    x = jax.make_array_from_callback(x_shape, NamedSharding(mesh, of_rank), tokens)
    return Inputs(x, pool(topk_idx), pool(topk_weights))
