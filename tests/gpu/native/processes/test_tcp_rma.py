"""The network that NCCL's device interface is tested over on one host, by itself: no GPU, no CUDA, no NCCL."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]
SOURCES = [f"tests/gpu/native/processes/{name}.cc" for name in ("tcp_rma", "driver", "meeting", "tcp_rma_test")]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> pathlib.Path:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if sys.platform != "linux":
        pytest.skip("the network needs Linux")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]} is not installed")
    out = tmp_path_factory.mktemp("tcp_rma") / "tcp_rma_test"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", "-pthread"]
    subprocess.run([*compiler, *flags, *SOURCES, "-o", out, "-ldl"], cwd=ROOT, check=True, timeout=120)
    return out


@pytest.mark.parametrize("seed", [1, 2])
def test_the_network_keeps_its_rules(program, seed):
    """Puts, order of signals, errors, throttle, a dead rank, meetings; in two of the tests a rule is broken."""
    done = subprocess.run([program, "all", str(seed)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed ") == 13, done.stdout
