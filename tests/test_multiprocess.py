"""Two processes of four devices, joined by `jax.distributed` on loopback, give the bytes of one process of eight."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import multiprocess_worker
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(count: int, folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """Starts the workers, waits for them under one hard limit, and never leaves one behind."""
    coordinator = f"127.0.0.1:{free_port()}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // count}",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    logs = [open(folder / f"log{i}", "w+") for i in range(count)]
    outputs = [folder / f"shards{i}.npz" for i in range(count)]
    workers = [
        subprocess.Popen(
            [sys.executable, HERE / "multiprocess_worker.py", coordinator, str(count), str(i), str(outputs[i])],
            env=environment,
            stdout=logs[i],
            stderr=subprocess.STDOUT,
        )
        for i in range(count)
    ]
    try:
        codes = [worker.wait(TIMEOUT_S) for worker in workers]
    except subprocess.TimeoutExpired:
        codes = ["timeout"]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read()[-3000:])
            log.close()
    assert codes == [0] * count, f"exit codes {codes}\n" + "\n----\n".join(texts)
    return [dict(np.load(output)) for output in outputs]


def test_two_processes_equal_one(tmp_path):
    if jax.device_count() != 8:
        pytest.skip(f"the process to compare with needs 8 devices, has {jax.device_count()}")
    shards = run_processes(2, tmp_path)
    expected = multiprocess_worker.results(jax.devices())
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
    assert compared == 8 * len(expected) and len(expected) == 32
