"""CUDA graphs: the same calls with XLA's command buffers forced on, in a process of its own because the flag is read
at start.
"""

import os
import sys

import pytest

from tests.gpu import processes

FORCED = "--xla_gpu_enable_command_buffer=+FUSION,+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


def run(*arguments: str, seconds: float = 240.0) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FORCED}"
    finished = processes.run_all(
        [[sys.executable, *arguments]],
        seconds=seconds,
        env=processes.environment(JAX_PLATFORMS="cuda", XLA_FLAGS=flags, XLA_PYTHON_CLIENT_MEM_FRACTION="0.4"),
    )
    processes.assert_finished(finished)
    return finished[0].output


@pytest.mark.gpu4
def test_stress_under_graphs():
    """Epochs and flags must advance at every replay: a graph with a frozen epoch gives old rows the second time."""
    run("-m", "tests.gpu.stress", "--calls", "2000", "--ranks", "4", "--seconds", "60")


@pytest.mark.gpu4
def test_a_loop_of_round_trips_under_graphs():
    """Calls of the same graph in a loop, each fed by the one before; the benchmark checks what the loop leaves
    behind.
    """
    sizes = "--ranks 4 --tokens 256 --hidden 1024 --inner 50 --repeats 3"
    run("-m", "xen_moe_jax.benchmark", "--backend", "cuda", "--peers", "none", *sizes.split())
