"""The network that the kernels across nodes are tested over, by itself: no GPU, no CUDA, seconds."""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.gpu.native.emulator import build

SECONDS = 120


def built(program: str) -> pathlib.Path:
    """The program of tests/gpu/native/emulator/build.py, or a skip that says what is missing."""
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


@pytest.fixture(scope="session")
def network_test() -> pathlib.Path:
    return built("network_test")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_network_keeps_its_rules_and_each_rule_is_needed(network_test, seed):
    done = subprocess.run([network_test, "all", str(seed)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed ") == 18 and done.stdout.count("a rule is broken") == 7, done.stdout
