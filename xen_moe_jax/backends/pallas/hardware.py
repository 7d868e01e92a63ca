"""Sizes of each TPU generation, and the policy that chooses block sizes by them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _mesh
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import barriers
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Generation:
    """Attributes:
    name: as in TPU topology names.
    vmem_bytes: VMEM of one TensorCore. cores: TensorCores that share a device.
    multiplies_float8: the matrix units multiply bfloat16 by float8_e4m3fn; elsewhere fp8 is converted first.
    multiplies_two_float8: they multiply float8_e4m3fn by float8_e4m3fn, with half as many instructions as bfloat16.
    """

    name: str
    vmem_bytes: int
    cores: int = 1
    multiplies_float8: bool = True
    multiplies_two_float8: bool = False


GENERATIONS = {
    "TPU v4": Generation("v4", 16 * MIB, cores=2, multiplies_float8=False),
    "TPU v5e": Generation("v5e", 128 * MIB),
    "TPU v5 lite": Generation("v5e", 128 * MIB),
    "TPU v5": Generation("v5p", 64 * MIB, cores=2),
    "TPU v5p": Generation("v5p", 64 * MIB, cores=2),
    "TPU v6e": Generation("v6e", 128 * MIB),
    "TPU v6 lite": Generation("v6e", 128 * MIB),
    "TPU7x": Generation("tpu7x", 64 * MIB, multiplies_two_float8=True),
}
"""Generations by JAX's `device_kind`."""
SMALLEST = Generation("unknown TPU", 16 * MIB, multiplies_float8=False)
"""Assumed where the generation cannot be told: every known generation has at least this."""

SMEM_BYTES = 1 * MIB
"""SMEM of one TensorCore, on every generation here."""
SMEM_BUDGET = SMEM_BYTES * 3 // 4
"""The part of SMEM that our tables may take: XLA and Mosaic keep the rest for themselves."""

BLOCK_BUDGET = 10 * MIB
"""VMEM that default block sizes stay under: it fits every generation beside the compiler's own needs."""
COMPILER_DEFAULT = 12 * MIB
"""A kernel that needs more than this gets an explicit `vmem_limit_bytes`."""


LOW_LATENCY_TOKENS = 256
"""Most tokens a rank for which mode "auto" makes blocks small, so that the first rows leave early."""


HALVES = ("v5e",)
"""Names of generations on which the experts' kernels make rows in halves (`experts.on_tpu.product_in_halves`), because
there the bandwidth of HBM limits a combine of whole rows. On v5p both combines of a layer would save 121 us, and the
kernel of the gradient by the rows, whose tiles would be smaller, would lose 224 us (docs/design/tpu.md)."""


def makes_halves() -> bool:
    """Returns True if the experts' kernels make rows in halves, where their caller asks for it, on the generation being
    compiled for."""
    return generation().name in HALVES


def generation() -> Generation:
    """The generation being compiled for, as far as the mesh tells."""
    mesh = _mesh.lowering_mesh()
    devices = _devices(mesh)
    kind = devices.flat[0].device_kind if devices is not None else getattr(_abstract(mesh), "device_kind", None)
    return GENERATIONS.get(kind or "", SMALLEST)


def traced_for() -> Generation:
    """The generation that the code being traced will most likely run on: that of the mesh where the mesh knows it, and
    else that of JAX's default backend."""
    kind = getattr(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None), "device_kind", None)
    return GENERATIONS.get(kind or jax.devices()[0].device_kind, SMALLEST)


def lowers_flat_arrays(config: KernelConfig) -> bool:
    """Returns True if kernels may take arrays of one axis. Pallas asks the chip about their tiles when it lowers them,
    which needs a mesh that tells the generation, or interpret mode.
    """
    return bool(config.interpret) or generation() is not SMALLEST


def low_latency(spec: Spec, config: KernelConfig) -> bool:
    """Returns True if blocks are small, so that the first rows leave early."""
    if config.mode == "auto":
        return spec.num_tokens <= LOW_LATENCY_TOKENS
    return config.mode == "low_latency"


def _devices(mesh: Any) -> np.ndarray | None:
    return None if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices


def _abstract(mesh: Any) -> Any:
    return getattr(mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh, "abstract_device", None)


def check_one_slice(axis_name: tuple[str, ...], remedy: str) -> None:
    """Raises ValueError if these mesh axes join devices of several slices: a Pallas remote DMA cannot leave its slice.

    A kernel that is aimed across slices compiles: no other check would find it.
    """
    mesh = _mesh.lowering_mesh()
    _check_manual(mesh)
    devices = _devices(mesh)
    if devices is None:
        return
    others = [i for i, name in enumerate(mesh.axis_names) if name not in axis_name]
    along = [i for i, name in enumerate(mesh.axis_names) if name in axis_name]
    groups = devices.transpose(others + along).reshape(math.prod(devices.shape[i] for i in others), -1)
    for group in groups:
        slices = sorted({getattr(d, "slice_index", 0) or 0 for d in group})
        if len(slices) > 1:
            raise ValueError(
                f"mesh axis {' x '.join(axis_name)} joins devices of slices {slices}: remote DMA over ICI reaches "
                f"one slice only; {remedy}"
            )


def _check_manual(mesh: Any) -> None:
    """Raises ValueError where another mesh axis is left to XLA: it does not partition Mosaic kernels."""
    automatic = []
    for name in mesh.axis_names:
        try:
            jax.lax.axis_index(name)
        except NameError:
            automatic.append(name)
    if automatic:
        raise ValueError(
            f"mesh axes {automatic} are automatic here: TPU kernels need every axis of the mesh to be manual. Leave "
            "axis_names out of jax.shard_map (and give in_specs and out_specs for those axes), or use "
            "KernelConfig(backend='reference')"
        )


def launch(
    kernel: str,
    vmem_bytes: Callable[[int], int],
    *,
    preferred: int,
    smallest: int,
    available: int,
    config: KernelConfig,
    axes: Axes | None = None,
    groups: Any = None,
    budget: int | None = None,
) -> Launch:
    """Chooses a block size, and a barrier semaphore for a kernel that reaches other ranks.

    Args:
      vmem_bytes: block size -> VMEM bytes that the kernel needs.
      preferred: block size where VMEM allows it.
      smallest: granularity; every block is a multiple of it, unless all there is is less.
      available: rows or tokens that there are.
      axes, groups: ranks that the kernel reaches (`groups` are `axis_index_groups` of them); None: it stays at home.
      budget: VMEM bytes that a default block stays under; None is `BLOCK_BUDGET`.

    Raises:
      ValueError: the smallest block, or the one that `config.block_tokens` asks for, does not fit.
    """
    chip = generation()
    limit = config.vmem_limit_bytes or chip.vmem_bytes
    if config.vmem_limit_bytes is not None and config.interpret is None and limit > chip.vmem_bytes:
        raise ValueError(
            f"KernelConfig.vmem_limit_bytes={limit}: {chip.name} has {chip.vmem_bytes} bytes of VMEM; pass at most that"
        )
    if config.block_tokens is not None:
        block = min(-(-config.block_tokens // smallest) * smallest, max(available, 1))
        need = vmem_bytes(block)
        if need > limit:
            raise ValueError(
                f"KernelConfig.block_tokens={config.block_tokens}: the {kernel} kernel needs {need} bytes of VMEM, "
                f"the limit is {limit} ({chip.name}); pass a smaller block_tokens, or None for the default"
            )
    else:
        block = max(preferred, smallest)
        budget = min(budget or BLOCK_BUDGET, limit)
        while block > smallest and vmem_bytes(block) > budget:
            block = max(smallest, block // 2 // smallest * smallest)
        block = min(block, max(available, 1))
        need = vmem_bytes(block)
        if need > limit:
            raise ValueError(
                f"the {kernel} kernel needs {need} bytes of VMEM for its smallest block of {block} rows, and "
                f"{chip.name} allows {limit}: use a smaller hidden size or top-k, or KernelConfig(backend='reference')"
            )
    explicit = config.vmem_limit_bytes
    if explicit is None and need > COMPILER_DEFAULT:
        explicit = min(chip.vmem_bytes, need + need // 4 + 2 * MIB)
    collective_id = 0 if axes is None else barriers.collective_id(axes, groups, config)
    return Launch(block, explicit, collective_id, interpret(config), chip.cores)


def check_smem(kernel: str, need: int, remedy: str) -> None:
    """Raises ValueError where tables that a kernel needs as a whole do not fit SMEM."""
    if need > SMEM_BUDGET:
        raise ValueError(
            f"the {kernel} kernel needs {need} bytes of SMEM for its tables, of {SMEM_BYTES} they may take at most "
            f"{SMEM_BUDGET}: {remedy}, or use KernelConfig(backend='reference')"
        )


def smem_window(smem_bytes: Callable[[int], int], preferred: int) -> int:
    """Rows of tables that fit SMEM at a time, at most `preferred`."""
    window = preferred
    while smem_bytes(window) > SMEM_BUDGET:
        window //= 2
    return window


def interpret(config: KernelConfig) -> Any:
    if config.interpret is True:
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams()
    return config.interpret or False
