"""The network that NCCL's device interface is tested over on one host, by itself: no GPU, no CUDA, no NCCL."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support import HANG_S, ROOT

PROGRAMS = {
    "tcp_rma_test": ("tcp_rma", "copier", "driver", "rendezvous", "tcp_rma_test"),
    "xen_moe_rma_copier": ("copier_main", "copier", "driver"),
    "fake_driver.so": ("fake_driver",),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> pathlib.Path:
    """The folder of `PROGRAMS`."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if sys.platform != "linux":
        pytest.skip("the network needs Linux")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]} is not installed")
    folder = tmp_path_factory.mktemp("tcp_rma")
    for name, parts in PROGRAMS.items():
        sources = [f"tests/native/processes/{part}.cc" for part in parts]
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", "-pthread"]
        flags += ["-fPIC", "-shared"] if name.endswith(".so") else []
        subprocess.run([*compiler, *flags, *sources, "-o", folder / name, "-ldl"], cwd=ROOT, check=True, timeout=HANG_S)
    return folder


@pytest.mark.parametrize("memory", ["host", "gpu"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_network_keeps_its_rules(programs, seed, memory):
    """Puts, order of signals, errors, throttle, a dead rank, rendezvous; in two of the tests a rule is broken. With
    "gpu", a process of its own copies, and a driver of the tests ends any other process that does."""
    environment = dict(os.environ)
    if memory == "gpu":
        environment["XEN_MOE_RMA_DRIVER"] = str(programs / "fake_driver.so")
    command = [programs / "tcp_rma_test", "all", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed ") == 15, done.stdout
