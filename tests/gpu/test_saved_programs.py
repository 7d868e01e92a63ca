"""Programs that one process compiled or exported and another one runs: the latter has handlers and memory without
tracing.

Every run is a process of its own (saved_program.py), on two GPUs: of one process, or of one process each.
"""

from __future__ import annotations

import itertools
import re
import sys

import pytest

from tests.gpu import processes
from tests.support.processes import free_port

pytestmark = pytest.mark.gpu2

KINDS = ("executable", "export")
PROCESSES = (1, 2)


def run(count, action, folder, *arguments):
    """Runs `count` processes to their end; returns their output."""
    joined = ["--num-processes", str(count), "--coordinator", f"127.0.0.1:{free_port()}"] if count > 1 else []
    program = [sys.executable, "-m", "tests.gpu.saved_program", action, str(folder), *arguments, *joined]
    commands = [[*program, "--process-id", str(i)] for i in range(count)]
    environment = processes.environment(JAX_PLATFORMS="cuda,cpu", XLA_PYTHON_CLIENT_MEM_FRACTION="0.2")
    if count == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    finished = processes.run_all(commands, seconds=240, env=environment)
    processes.assert_finished(finished)
    return [one.output for one in finished]


@pytest.fixture(scope="module", params=list(itertools.product(KINDS, PROCESSES)), ids=lambda p: f"{p[0]}-{p[1]}")
def saved(request, tmp_path_factory):
    """`(kind, processes, folder)`, with a small and a large program."""
    kind, count = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{count}")
    run(count, "save", folder, "--kind", kind)
    return kind, count, folder


def generation(output: str) -> int:
    """Returns how often the memory of the loading process was made: more than once where a program made it grow."""
    return int(re.search(r"'generation': (\d+)", output)[1])


@pytest.mark.parametrize("sizes", ["small,large", "large,small"])
def test_a_process_that_traced_nothing_runs_both(saved, sizes):
    """The second program is loaded when the first has run: into larger memory, or into the old memory."""
    kind, count, folder = saved
    for output in run(count, "load", folder, "--kind", kind, "--sizes", sizes):
        assert "PASSED" in output
        assert sizes != "small,large" or generation(output) > 1


def test_a_program_larger_than_the_memory_of_one_lowered_here(saved):
    kind, count, folder = saved
    for output in run(count, "load", folder, "--kind", kind, "--sizes", "large", "--lower", "small"):
        assert "PASSED" in output and generation(output) > 1


@pytest.mark.parametrize("count", PROCESSES)
def test_the_persistent_compilation_cache(count, tmp_path):
    run(count, "cache", tmp_path)
    entries = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache"))
    assert entries
    for output in run(count, "cache", tmp_path):
        assert "PASSED" in output
    assert entries == sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache"))
