"""Finds `_memory_test`, which `make memory-test` builds into build/memory."""

import functools
import importlib.util
import pathlib
import types

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "build" / "memory"


def find() -> pathlib.Path | None:
    return next(iter(FOLDER.glob("_memory_test*.so")), None)


def load() -> types.ModuleType:
    """Skips the test where the module has not been built."""
    path = find()
    if path is None:
        pytest.skip(f"{FOLDER}/_memory_test is not built: make memory-test")
    return _load(path)


@functools.cache
def _load(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("_memory_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
