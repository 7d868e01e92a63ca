"""`python -m benchmarks.tpu.devices FILE`: what JAX sees, for a process that must not open the chips itself."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy", "ml_dtypes", "xen-moe-jax")


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def described() -> dict[str, Any]:
    """Devices of all processes, where they lie, and versions.

    Raises:
      RuntimeError: JAX sees no TPU, and this is no rehearsal.
    """
    import jax

    from benchmarks.tpu import here as places

    places.join()
    here = places.here()
    if here.kind == "none":
        raise RuntimeError(f"JAX sees no TPU, only {here.count} {here.devices[0].platform} device(s)")
    first = here.devices[0]
    by_process = collections.Counter(d.process_index for d in here.devices)
    summary = (
        f"{here.count} x {first.device_kind}, {jax.process_count()} process(es), {here.slices} slice(s), "
        f"jax {jax.__version__}"
    )
    return {
        "summary": summary,
        "kind": here.kind,
        "device_kind": first.device_kind,
        "devices": here.count,
        "processes": jax.process_count(),
        "slices": here.slices,
        "devices_of_processes": sorted(by_process.values()),
        "coordinates": [list(getattr(d, "coords", ())) for d in here.devices],
        "cores_on_chip": [getattr(d, "core_on_chip", 0) for d in here.devices],
        "slice_indices": [places.slice_of(d) for d in here.devices],
        "runtime": getattr(first.client, "platform_version", "").strip(),
        "versions": versions(),
    }


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps(described(), indent=1) + "\n")
