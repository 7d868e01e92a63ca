"""Finds `_memory_test`, which `make memory-test` builds into build/memory, and runs its handlers."""

import functools
import importlib.util
import pathlib
import time
import types

import pytest

from tests.support import ROOT

FOLDER = ROOT / "build" / "memory"
RANKS = 2
SMALL, LARGE = (1024, 8192, 512), (4096, 65536, 2048)
HOME = 2 * (16384 + 16384)
"""More bytes than a workspace of two ranks holds besides staging and scratch: mailboxes, controls, error records."""


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


def staging(needs, ranks=RANKS):
    flags, data, scratch = needs
    return ranks * (2 * (flags + data) + scratch)


def run(memory, workspace, needs=SMALL, times=1):
    return all(all(memory.run(workspace, *needs, 7)) for _ in range(times))


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def fail_first_growths(memory, *group):
    """Makes a group's first growth fail at every call in turn, until it needs no more: how often, and the workspace."""
    failures = 0
    while True:
        workspace = memory.workspace(*group)
        memory.fail_after(failures)
        try:
            memory.serve(workspace, *SMALL, 1.0)
            break
        except RuntimeError as error:
            assert "told to fail" in str(error)
        failures += 1
        memory.fail_after(-1)
        assert not memory.serves(workspace, *SMALL)
        memory.serve(workspace, *SMALL, 1.0)  # nothing is left over that stands in the way
        assert run(memory, workspace, times=3)
        del workspace
        wait_until(lambda: memory.held() == 0)
    memory.fail_after(-1)
    return failures, workspace
