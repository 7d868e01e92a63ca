"""Groups whose ranks exchange by kernels: a kill and a newcomer, and many kills. Ranks may share a GPU.

A program of its own for each case: its ranks need GPUs that this process has not filled.
"""

import sys

import pytest

from tests.gpu import processes


def chaos(*arguments: str) -> str:
    env = processes.environment(
        JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1"
    )
    command = [sys.executable, "-m", "tests.elastic.serve_chaos", "--kernels", *arguments]
    finished = processes.run_all([command], seconds=300.0, env=env)
    processes.assert_finished(finished)
    return finished[0].output


@pytest.mark.gpu1
def test_ranks_of_one_gpu_are_killed_and_come_back():
    assert "'wrong': []" in chaos("--kills", "4")


@pytest.mark.gpu2
def test_ranks_of_two_gpus_are_killed_and_come_back():
    assert "'wrong': []" in chaos("--gpus", "2", "--kills", "8", "--seed", "2")
