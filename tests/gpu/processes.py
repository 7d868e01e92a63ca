"""One process per rank: their environment, and the program that each of them runs."""

from __future__ import annotations

import os
import sys

from tests.support import processes
from tests.support.processes import Finished, assert_finished, free_port, run_all

__all__ = ["assert_finished", "environment", "run_all", "run_ranks"]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the tests and the library importable, and `changes`."""
    # Multicast over NVLink and NICs are not needed on one host; GPU memory is shared with the symmetric heap.
    defaults = {
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }
    return processes.environment(**{k: v for k, v in defaults.items() if k not in os.environ} | changes)


def run_ranks(arguments: list[str], *, num_processes: int, seconds: float, env: dict[str, str]) -> list[Finished]:
    """`tests.gpu.rank_program` once per process, joined through `jax.distributed` on a free port."""
    coordinator = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", "tests.gpu.rank_program", "--coordinator", coordinator]
    commands = [
        [*program, "--num_processes", str(num_processes), "--process_id", str(i), *arguments]
        for i in range(num_processes)
    ]
    return run_all(commands, seconds=seconds, env=env)
