"""The emulator's programs for tests: built once, by one of the test processes, or a skip; and run."""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.native.emulator import build


def built(program: str) -> pathlib.Path:
    """Returns `program` of build.py, or skips the test and names the missing part."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if sys.platform != "linux":
        pytest.skip("the emulator needs Linux")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not installed")
    if not (build.ROOT / "cuda_kernels").is_dir():
        pytest.skip("the kernels' sources are not part of this installation")
    folder = build.ROOT / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # test processes side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(folder, program=program)


def with_fault(
    program: pathlib.Path, name: str, faults: dict[str, tuple[str, str]], *, units: str = ""
) -> pathlib.Path:
    """A `built` program again, with `faults` (of `build.build`) put in: in the folder `name` beside it."""
    with open(program.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(program.parent / name, faults, program=program.name, units=units)


def emulate(command: Sequence[Any], *, seconds: float, multiprocessors: int = 64) -> subprocess.CompletedProcess[str]:
    """Runs one of the programs on GPUs with `multiprocessors` multiprocessors."""
    environment = {**os.environ, "EMULATOR_SMS": str(multiprocessors)}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=seconds)
