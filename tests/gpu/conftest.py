"""Skips tests that need more GPUs than JAX sees, by the marks gpu1 to gpu8; the reason gives both numbers.

Run with `JAX_PLATFORMS=cuda python -m pytest tests/gpu`; without it the suite's default, eight virtual CPU devices,
holds.
"""

from __future__ import annotations

import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

# Before JAX makes its client: leave memory for the processes that some tests start, and for symmetric memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

MARKS = {"gpu1": 1, "gpu2": 2, "gpu4": 4, "gpu8": 8}


def gpus() -> list[jax.Device]:
    return [d for d in jax.devices() if d.platform in ("gpu", "cuda")]


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    for item in items:
        if here not in pathlib.Path(item.path).parents:
            continue
        for mark, need in MARKS.items():
            if item.get_closest_marker(mark) and len(gpus()) < need:
                found = f"JAX sees {len(gpus())} GPU(s) and {jax.device_count()} {jax.default_backend()} device(s)"
                item.add_marker(pytest.mark.skip(reason=f"needs {need} GPU(s) of one host; {found}"))


@pytest.fixture
def gpu_mesh():
    """`gpu_mesh(sizes, names, order=None)`: a mesh over the first GPUs, in the given order."""

    def make(sizes: tuple[int, ...], names: tuple[str, ...], order: list[int] | None = None) -> Mesh:
        count = int(np.prod(sizes))
        devices = np.array(gpus()[:count])
        return Mesh(devices[np.arange(count) if order is None else order].reshape(sizes), names)

    return make
