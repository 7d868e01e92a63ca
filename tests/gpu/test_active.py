"""Inactive ranks on GPUs: every subset of four ranks in one program, and a process that dies and becomes inactive."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time

import jax
import pytest

import xen_moe_jax as xm
from tests.gpu import members, processes
from tests.gpu.bodies import Setup
from tests.gpu.chaos_jobs import START_S, Rank
from tests.support.cases import CASES

BY_NAME = {case.name: case for case in CASES}
SHORT = dataclasses.replace(BY_NAME["grouped"], name="grouped-short", capacity=24)
"""Rows are dropped for want of room too."""
CHOSEN = (*(BY_NAME[n] for n in ("grouped", "ranked", "padded", "grouped-fp8", "grouped-align8")), SHORT)
CONFIG = xm.KernelConfig(backend="cuda", timeout_s=20.0)


@pytest.mark.gpu4
@pytest.mark.parametrize("case", [*CHOSEN, BY_NAME["ranked-two-axes"]], ids=lambda case: case.name)
def test_every_subset_of_four_ranks(gpu_mesh, case):
    """All sixteen subsets give the bits of plain JAX, forward and backward, in two orders, from one trace."""
    mesh = gpu_mesh((2, 2), ("node", "gpu")) if case.axes == 2 else gpu_mesh((4,), ("ep",))
    comparison = members.Comparison(Setup(case, mesh, mesh.axis_names, 20, 256), CONFIG)
    for active in members.subsets(4) + members.subsets(4)[::-1]:
        wrong = comparison.wrong(active)
        assert not wrong, f"active={active}: elements that differ: {wrong}"
    assert comparison.traces == 1
    xm.check()


@pytest.mark.gpu1
def test_a_server_goes_on_without_a_killed_process():
    """docs/user/failures.md, "Going on without a rank": one program, lowered once. The surviving processes learn within
    ten seconds which one died, reset, and serve on, right and without a wait; each of them runs `members_rank.py`. Four
    processes, in turns where there are fewer GPUs."""
    go_on_without_a_killed_process()


@pytest.mark.gpu1
def test_replicas_serve_the_experts_of_a_killed_process():
    """Every expert has a replica: after a kill the other ranks' tokens are what they were, from the first step."""
    go_on_without_a_killed_process("--replicas")


def go_on_without_a_killed_process(*options: str, seconds_after: float = 10.0) -> None:
    count, gpus = 4, min(4, jax.device_count())
    environment = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.08")
    program = ["-m", "tests.gpu.members_rank", *options, "--coordinator", f"127.0.0.1:{processes.free_port()}"]
    command = [sys.executable, *program, "--num_processes", str(count), "--gpus", str(gpus)]
    running = [Rank([*command, "--process_id", str(p)], environment) for p in range(count)]
    try:
        for rank in running:
            assert rank.line(START_S) == "ready", rank.last_words()
        time.sleep(0.3)
        running[-1].signal(signal.SIGKILL)
        killed = time.time()
        for rank in running[:-1]:
            line = rank.line(60.0)
            assert line, rank.last_words()
            result = json.loads(line)
            assert f"rank {count - 1} (" in result["failure"] and "cuda.alive" in result["failure"], result
            assert result["named"] - killed < 10.0
            assert result["alive"] == [True] * (count - 1) + [False]
            assert result["traces"] == 1 and result["wrong"] == 0 and result["steps_before"] > 0, result
            assert result["steps_after"] == 200 and result["seconds_after"] < seconds_after, result
    finally:
        for rank in running:
            rank.end()
