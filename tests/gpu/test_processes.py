"""One process per GPU, joined by `jax.distributed`: the whole conformance table, large shapes and a short stress run.
Processes that share one GPU in turns: some of the table, with up to 18 of them.

XEN_MOE_MEMORY (`tools/gpu_check.py --memory`) chooses the memory between processes, and each rank checks that it has
this kind. This process holds half of each GPU's memory (see conftest.py); each rank takes less than a third of its own.
"""

import jax
import pytest

from tests.gpu import chaos_jobs, processes

SECONDS = 240.0
"""Time limit of one multi-process run: start, compilation of every case for two backends, and the runs."""


def run(num_processes: int, *arguments: str, share: float = 0.3) -> None:
    """`share`: of its GPU's memory, that a process takes for XLA."""
    finished = processes.run_ranks(
        [*arguments, "--backend", "cuda"],
        num_processes=num_processes,
        seconds=SECONDS,
        env=processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION=str(share)),
    )
    processes.assert_finished(finished)
    assert all("PASSED" in f.output for f in finished)


@pytest.mark.gpu2
def test_two_processes():
    run(2, "--cases", "grouped,ranked,padded,grouped-fp8,grouped-scaled-fp8")


@pytest.mark.gpu1
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_a_gpu(ranks, mode):
    """In turns: a kernel runs while those that it waits for do not."""
    cases = "grouped,ranked,padded,grouped-fp8,grouped-scaled-fp8"
    run(ranks, "--cases", cases, "--gpus", "1", "--mode", mode, share=0.4 / ranks)


@pytest.mark.gpu1
def test_more_than_sixteen_processes():
    """The kernels for groups of any size."""
    run(18, "--cases", "grouped", "--tokens", "12", "--hidden", "128", "--gpus", "1", share=0.02)


@pytest.mark.gpu2
def test_two_processes_grow_and_give_back():
    run(2, "--cases", "grouped", "--tokens", "1024", "--hidden", "7168", "--reverse", "--buffers", "3")


@pytest.mark.gpu2
def test_processes_that_see_one_gpu_each():
    """GPU 0 in every process, as schedulers start them."""
    run(2, "--cases", "grouped", "--hide", "--buffers", "1")


@pytest.mark.gpu4
def test_four_processes_every_case():
    run(4, "--cases", "all")


@pytest.mark.gpu4
def test_four_processes_in_the_opposite_order():
    run(4, "--cases", "grouped,padded", "--reverse")


@pytest.mark.gpu4
def test_four_processes_large():
    run(4, "--cases", "grouped,ranked,grouped-scaled-fp8", "--tokens", "1024", "--hidden", "7168")


@pytest.mark.gpu4
def test_four_processes_stress():
    run(4, "--cases", "grouped", "--stress_calls", "2000")


@pytest.mark.gpu8
def test_eight_processes_every_case():
    run(8, "--cases", "all")


@pytest.mark.gpu1
def test_a_late_process_is_waited_for_and_a_killed_one_is_named():
    """Stopped a few times for longer than a step takes, then killed: see chaos.py. Four processes, in turns where there
    are fewer GPUs."""
    environment = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.08")
    gpus = str(min(4, jax.device_count()))
    tally = chaos_jobs.run(4, 2, 6, 100.0, "--gpus", gpus, environment=environment)
    assert not tally.faults and not tally.not_started, tally
    assert tally.kills == 2 and tally.stalls >= 6 and tally.steps > 0
