"""Two processes of four devices, joined by `jax.distributed` on loopback, give the bytes of one process of eight."""

import pathlib
import sys

import jax
import numpy as np
import pytest

from tests.support import multiprocess_worker, processes, quick_compiler

TIMEOUT_S = 240


def run_processes(count: int, folder: pathlib.Path, numbers: str) -> list[dict[str, np.ndarray]]:
    """The shards that each of `count` workers saved."""
    coordinator = f"127.0.0.1:{processes.free_port()}"
    env = processes.environment(JAX_PLATFORMS="cpu", XLA_FLAGS=quick_compiler.flags(8 // count))
    outputs = [folder / f"shards{i}.npz" for i in range(count)]
    worker = [sys.executable, "-m", "tests.support.multiprocess_worker", "--coordinator", coordinator]
    worker += ["--num_processes", str(count), "--programs", numbers]
    commands = [[*worker, "--process_id", str(i), "--output", str(output)] for i, output in enumerate(outputs)]
    processes.assert_finished(processes.run_all(commands, seconds=TIMEOUT_S, env=env))
    return [dict(np.load(output)) for output in outputs]


PROGRAMS = {"two axes": "3", "one axis": "0,1,2"}


@pytest.mark.parametrize("axes", PROGRAMS)
def test_two_processes_equal_one(tmp_path, axes):
    numbers = PROGRAMS[axes]
    if jax.device_count() != 8:
        pytest.skip(f"the process to compare with needs 8 devices, has {jax.device_count()}")
    shards = run_processes(2, tmp_path, numbers)
    expected = multiprocess_worker.results(jax.devices(), numbers)
    compared = 0
    for process in shards:
        for name, value in process.items():
            if "@" not in name:
                continue
            array, device = name.split("@")
            whole = np.asarray(expected[array])
            start = int(process[f"{array}#{device}"][0])
            part = np.ascontiguousarray(whole[start : start + whole.shape[0] // 8]).view(np.uint8)
            assert part.tobytes() == value.tobytes(), f"{array} differs at row {start}"
            compared += 1
    assert compared == 8 * len(expected) and len(expected) == 8 * len(numbers.split(","))
