"""TPU topologies to compile for without a TPU, and public figures of their links.

Bandwidths are per JAX device and one way: half of the "bidirectional" figure of Google Cloud's pages.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import sys
from typing import Any

GIGA = 1e9
TERA = 1e12


FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
"""Chips along each dimension of a two-dimensional torus; a dimension wraps around where it is 16 long."""
CUBES = {
    1: (1, 1, 1),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
}
"""Chips along each dimension of a three-dimensional torus; all dimensions wrap around where each is a multiple of 4."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attributes:
    sides: chips along each dimension. wraps: True where the ends of a dimension are joined.
    """

    sides: tuple[int, ...]
    wraps: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Attributes:
    name: generation. topology: 8 devices, as libtpu names it. options: further arguments of `get_topology_desc`.
    large: a large topology of the generation, or None.
    ici_bytes_per_s: rate at which one device can inject into ICI. hbm_bytes_per_s: HBM of one device. source: source of
      the figures.
    flops_per_s: peak of bfloat16 matmuls of one device, of the same sources.
    link_bytes_per_s: rate of one ICI link, one way. clock_hz: clock of the TensorCore, from peak FLOP/s and the number
      and size of the matrix units. flat: chips form a two-dimensional torus, not a three-dimensional one.
      devices_per_chip: JAX devices.
    """

    name: str
    topology: str
    ici_bytes_per_s: float
    hbm_bytes_per_s: float
    source: str
    flops_per_s: float
    options: tuple[tuple[str, Any], ...] = ()
    large: str | None = None
    link_bytes_per_s: float = 50 * GIGA
    clock_hz: float = 1e9
    flat: bool = False
    devices_per_chip: int = 1

    def shape(self, devices: int) -> Shape:
        """The torus that `devices` devices make."""
        chips = devices // self.devices_per_chip
        sides = FLAT[chips] if self.flat else CUBES[chips]
        cubes = all(n % 4 == 0 for n in sides)
        return Shape(sides, tuple(n == 16 if self.flat else cubes for n in sides))

    def topology_of(self, devices: int) -> str:
        """Returns libtpu's name of the topology of `devices` devices.

        Raises:
          ValueError: none of that size is known here.
        """
        table, chips = FLAT if self.flat else CUBES, devices // self.devices_per_chip
        if chips not in table or chips * self.devices_per_chip != devices:
            sizes = [n * self.devices_per_chip for n in table]
            raise ValueError(f"{self.name} with {devices} devices: no such topology is known here, there are {sizes}")
        return f"{self.name}:{'x'.join(map(str, table[chips]))}"

    def all_to_all_us(self, off_device_bytes: float, devices: int = 8) -> float:
        """Time of an all-to-all in which every device sends `off_device_bytes` to all other devices in equal parts.

        Dimension by dimension: along a line of `n` chips the link in the middle carries `n / 4` times the bytes that a
        chip sends, itself included; around a ring, where traffic goes the shorter way, `n / 8`. Dimensions overlap.
        """
        if devices == self.devices_per_chip:
            return 0.0  # nothing leaves the chip
        shape = self.shape(devices)
        per_chip = off_device_bytes * devices / (devices - 1) * self.devices_per_chip
        load = max(n / (8 if wraps else 4) for n, wraps in zip(shape.sides, shape.wraps, strict=True) if n > 1)
        return load * per_chip / self.link_bytes_per_s * 1e6

    def all_gather_us(self, off_device_bytes: float, devices: int = 8) -> float:
        """Time in which every device gets `off_device_bytes` from all other devices, each of which sends the same bytes
        to all. The links of a chip in a corner take them in (one link in each dimension, two in a ring).
        """
        if devices == self.devices_per_chip:
            return 0.0
        shape = self.shape(devices)
        links = sum(2 if wraps else 1 for n, wraps in zip(shape.sides, shape.wraps, strict=True) if n > 1)
        per_chip = off_device_bytes * (devices - self.devices_per_chip) / (devices - 1)
        return per_chip / (links * self.link_bytes_per_s) * 1e6


CLOUD = "https://docs.cloud.google.com/tpu/docs/"
TOPOLOGIES = {
    t.name: t
    for t in (
        Topology(
            "v4",
            "v4:2x2x2",
            300 * GIGA,
            1200 * GIGA,
            "arXiv:2304.01433, table 4: 6 links of 50 GB/s, 1200 GB/s HBM",
            275 * TERA,
            options=(("chip_config_name", "megacore"), ("chips_per_host_bounds", (2, 2, 1))),
            clock_hz=1.05 * GIGA,
        ),
        Topology(
            "v5e",
            "v5e:2x4",
            200 * GIGA,
            819 * GIGA,
            CLOUD + "v5e: 400 GB/s both ways, 819 GB/s HBM",
            197 * TERA,
            large="v5e:16x16",
            flat=True,
            clock_hz=1.5 * GIGA,
        ),
        Topology(
            "v5p",
            "v5p:2x2x2",
            600 * GIGA,
            2765 * GIGA,
            CLOUD + "v5p: 1200 GB/s both ways, 2765 GB/s HBM",
            459 * TERA,
            large="v5p:8x8x8",
            link_bytes_per_s=100 * GIGA,
            clock_hz=1.75 * GIGA,
        ),
        Topology(
            "v6e",
            "v6e:2x4",
            400 * GIGA,
            1638 * GIGA,
            CLOUD + "v6e: 800 GB/s both ways, 1638 GB/s HBM",
            918 * TERA,
            flat=True,
            link_bytes_per_s=100 * GIGA,
            clock_hz=1.75 * GIGA,
        ),
        Topology(
            "tpu7x",
            "tpu7x:2x2x1",
            300 * GIGA,
            3690 * GIGA,
            CLOUD + "tpu7x: 1200 GB/s both ways, 7380 GB/s HBM per chip of two devices",
            1153.5 * TERA,
            link_bytes_per_s=100 * GIGA,
            clock_hz=2.2 * GIGA,
            devices_per_chip=2,
        ),
    )
}


def prepare_environment() -> None:
    """Sets the variables that libtpu needs on a machine without a TPU; finds the libtpu that `make setup` puts beside
    the packages.

    Must run before JAX makes its devices.
    """
    beside = pathlib.Path(sys.prefix, "libtpu")
    if importlib.util.find_spec("libtpu") is None and beside.is_dir():
        sys.path.append(str(beside))
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)


def devices(generation: str, *, large: bool = False, num_slices: int = 1, topology: str | None = None) -> list[Any]:
    """Devices to compile for: the generation's 8, its large topology, or `topology`, as libtpu names it.

    Raises:
      RuntimeError: libtpu is missing.
    """
    from jax.experimental import topologies

    prepare_environment()
    known = TOPOLOGIES[generation]
    name = topology or (known.large if large else known.topology)
    if name is None:
        raise ValueError(f"{generation} has no large topology here")
    options = dict(known.options)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except Exception as error:
        if "libtpu" in str(error).lower() and "found" in str(error).lower():
            raise RuntimeError("compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'") from error
        raise


def mesh(generation: str, axes: tuple[str, ...] = ("ep",), shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    """A mesh of all devices of a topology."""
    import jax
    import numpy as np

    found = devices(generation, **options)
    return jax.sharding.Mesh(
        np.array(found).reshape(shape or (len(found),)), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
