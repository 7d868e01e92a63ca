"""TPU topologies to compile for without a TPU, and what public sheets say of their links.

Bandwidths are per JAX device and one way: half of the "bidirectional" figure of Google Cloud's pages.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class Topology:
    """Attributes:
    name: generation. topology: 8 devices, as libtpu names it. options: further arguments of `get_topology_desc`.
    large: a large topology of the generation, or None.
    ici_bytes_per_s: what one device can inject into ICI. hbm_bytes_per_s: HBM of one device. source: where they are
      from.
    link_bytes_per_s: of one ICI link, one way. clock_hz: of the TensorCore, from peak FLOP/s and the number and size of
      the matrix units. torus: chips along each dimension. devices_per_chip: JAX devices.
    """

    name: str
    topology: str
    ici_bytes_per_s: float
    hbm_bytes_per_s: float
    source: str
    options: tuple[tuple[str, Any], ...] = ()
    large: str | None = None
    link_bytes_per_s: float = 50 * GIGA
    clock_hz: float = 1e9
    torus: tuple[int, ...] = (2, 4)
    devices_per_chip: int = 1

    def all_to_all_us(self, off_device_bytes: float) -> float:
        """Time of an all-to-all in which every device sends `off_device_bytes` to the seven others in equal parts.

        Dimension by dimension; along a line of `n` chips (without wrap: these topologies are smaller than a cube of 4)
        the link in the middle carries `n / 4` of what a chip sends, itself included. Dimensions overlap.
        """
        devices = math.prod(self.torus) * self.devices_per_chip
        per_chip = off_device_bytes * devices / (devices - 1) * self.devices_per_chip
        return max(n / 4 * per_chip for n in self.torus if n > 1) / self.link_bytes_per_s * 1e6


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
            options=(("chip_config_name", "megacore"), ("chips_per_host_bounds", (2, 2, 1))),
            clock_hz=1.05 * GIGA,
            torus=(2, 2, 2),
        ),
        Topology(
            "v5e",
            "v5e:2x4",
            200 * GIGA,
            819 * GIGA,
            CLOUD + "v5e: 400 GB/s both ways, 819 GB/s HBM",
            large="v5e:16x16",
            clock_hz=1.5 * GIGA,
        ),
        Topology(
            "v5p",
            "v5p:2x2x2",
            600 * GIGA,
            2765 * GIGA,
            CLOUD + "v5p: 1200 GB/s both ways, 2765 GB/s HBM",
            large="v5p:8x8x8",
            link_bytes_per_s=100 * GIGA,
            clock_hz=1.75 * GIGA,
            torus=(2, 2, 2),
        ),
        Topology(
            "v6e",
            "v6e:2x4",
            400 * GIGA,
            1638 * GIGA,
            CLOUD + "v6e: 800 GB/s both ways, 1638 GB/s HBM",
            link_bytes_per_s=100 * GIGA,
            clock_hz=1.75 * GIGA,
        ),
        Topology(
            "tpu7x",
            "tpu7x:2x2x1",
            300 * GIGA,
            3690 * GIGA,
            CLOUD + "tpu7x: 1200 GB/s both ways, 7380 GB/s HBM per chip of two devices",
            link_bytes_per_s=100 * GIGA,
            clock_hz=2.2 * GIGA,
            torus=(2, 2),
            devices_per_chip=2,
        ),
    )
}


def prepare_environment() -> None:
    """What libtpu needs on a machine without a TPU; before JAX makes its devices."""
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)


def devices(generation: str, *, large: bool = False, num_slices: int = 1) -> list[Any]:
    """Devices to compile for.

    Raises:
      RuntimeError: libtpu is missing.
    """
    from jax.experimental import topologies

    prepare_environment()
    topology = TOPOLOGIES[generation]
    name = topology.large if large else topology.topology
    if name is None:
        raise ValueError(f"{generation} has no large topology here")
    options = dict(topology.options)
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
