"""Runs the programs of the tests of this folder on what there is (`benchmarks.tpu.here`)."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.tpu import here as places
from benchmarks.tpu import watch
from benchmarks.tpu.here import here

COMPILED = "compiled for"
"""Begins the reason with which a test is left when its program has been compiled and nothing can run."""

_programs: dict[Any, tuple[Any, list[tuple[str, str]]]] = {}


def mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    try:
        return places.mesh(sizes, names)
    except ValueError as error:
        pytest.skip(str(error))


def run(program: Any, mesh: Mesh, spec: PartitionSpec, operands: Any) -> Any:
    """Compiles a jitted program once and runs it on arrays of the host; the results as NumPy arrays, in every process.

    Where nothing can run, the test ends here as skipped (`COMPILED`).
    """
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    sharding = NamedSharding(mesh, spec)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), operands)
    leaves, tree = jax.tree.flatten(shapes)
    key = (program, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    if key not in _programs:
        watch.compiling(name)
        _programs[key] = places.compiled(program, mesh, shapes), list(watch.traced)
    compiled, kernels = _programs[key]
    if here().kind == "topology":
        end_compiled(kernels)
    placed = jax.tree.map(lambda a: place(a, sharding), operands)
    watch.running(name, kernels)
    results = jax.block_until_ready(compiled(*placed))
    watch.finished()
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(results, tiled=True)
    return jax.tree.map(np.asarray, results)


def end_compiled(kernels: list[tuple[str, str]]) -> NoReturn:
    """Ends a test whose program has been compiled."""
    names = " ".join(name for name, _ in kernels) or "no kernel"
    pytest.skip(f"{COMPILED} {os.environ[places.COMPILE_FOR]}: {names}")


def place(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
