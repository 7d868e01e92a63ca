"""Places that a TPU program can run on: TPUs, virtual CPU devices with the kernels interpreted, or a topology.

The environment says which, so that tests and measurements serve all three (`tools/tpu_check.py` sets it):
- nothing: the TPUs that JAX sees, on one host or, with `XEN_MOE_TPU_COORDINATOR`, several.
- `XEN_MOE_TPU_REHEARSE=N`: N virtual CPU devices and Pallas's interpreter. Interpret mode is of one process: where
  there are several, plain JAX takes the place of the kernels, and what is rehearsed is how processes work together.
- `XEN_MOE_TPU_COMPILE_FOR=v5e:2x4`: nothing runs; each program is compiled for that topology by libtpu; with
  `v5e:2x4/2`, for two slices of it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import xen_moe_jax as xm

COORDINATOR, PROCESSES, PROCESS = (f"XEN_MOE_TPU_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS"))
REHEARSE, COMPILE_FOR = "XEN_MOE_TPU_REHEARSE", "XEN_MOE_TPU_COMPILE_FOR"


@dataclasses.dataclass(frozen=True)
class Here:
    """Attributes:
    kind: "chips", "rehearsal", "topology", or "none" where there is no TPU and nothing else was asked for.
    devices: of all processes, slice by slice.
    """

    kind: str
    devices: tuple[Any, ...]

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def slices(self) -> int:
        return len({slice_of(d) for d in self.devices})

    @property
    def interpreted(self) -> bool:
        return self.kind == "rehearsal" and jax.process_count() == 1


def slice_of(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0


def join() -> None:
    """Prepares JAX, and joins the other processes where there are some, before JAX makes its devices."""
    coordinator, rehearse = os.environ.get(COORDINATOR), os.environ.get(REHEARSE)
    if rehearse or os.environ.get(COMPILE_FOR):
        jax.config.update("jax_platforms", "cpu")
    if rehearse and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", int(rehearse))
    if coordinator == "auto":
        jax.distributed.initialize()
    elif coordinator:
        jax.distributed.initialize(coordinator, int(os.environ[PROCESSES]), int(os.environ[PROCESS]))


@functools.cache
def here() -> Here:
    """Returns the place and the devices that this process runs its programs on."""
    if topology := os.environ.get(COMPILE_FOR):
        from benchmarks.tpu import topologies

        generation, (name, _, slices) = topology.partition(":")[0], topology.partition("/")
        found = topologies.devices(generation, topology=name, num_slices=int(slices or 1))
        return Here("topology", tuple(sorted(found, key=slice_of)))
    devices = tuple(sorted(jax.devices(), key=lambda d: (slice_of(d), d.process_index, d.id)))
    if os.environ.get(REHEARSE):
        return Here("rehearsal", devices)
    return Here("chips" if devices[0].platform == "tpu" else "none", devices)


def config(**options: Any) -> xm.KernelConfig:
    """A config of the Pallas backend for `here()`."""
    if here().kind == "rehearsal" and not here().interpreted:
        return xm.KernelConfig(backend="reference")
    if here().interpreted:
        from jax.experimental.pallas import tpu as pltpu

        options |= {"interpret": pltpu.InterpretParams(dma_execution_mode="eager")}
    return xm.KernelConfig(backend="pallas", **options)


def mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """The first devices, in their order; a slow axis is of slices where there are several.

    Raises:
      ValueError: there are fewer.
    """
    need = int(np.prod(sizes))
    if here().count < need:
        raise ValueError(f"a mesh of {sizes} needs {need} devices, there are {here().count}")
    kind = (jax.sharding.AxisType.Auto,) * len(names)
    return Mesh(np.array(here().devices[:need]).reshape(sizes), names, axis_types=kind)


def compiled(program: Any, mesh: Mesh, operands: Any) -> Any:
    """A jitted program compiled for the platform of the mesh. `operands`: arrays, or their shapes with shardings."""
    platform = mesh.devices.flat[0].platform
    return program.trace(*operands).lower(lowering_platforms=(platform,)).compile()
