"""Several processes as virtual nodes of one host, through JAX: memory, windows and puts come from NCCL, and between
nodes a network for tests carries them that reorders, delays and repeats (virtual_nodes.py). They are 2 x 1, 2 x 2 and
4 x 1, and share GPUs in turns where there are fewer.

Needs an NCCL with puts (`xen-moe-jax doctor`), a module that was built with its headers, and a C++ compiler.
"""

from __future__ import annotations

import jax
import pytest

from tests.gpu import chaos_jobs, processes, test_active, virtual_nodes
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import module, nccl

pytestmark = pytest.mark.gpu1
SECONDS = 300.0
LAYOUTS = [
    pytest.param(ranks, per_node, id=f"{ranks // per_node}x{per_node}") for ranks, per_node in ((2, 1), (4, 2), (4, 1))
]
"""Ranks, and ranks of a node."""


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> str:
    try:
        nccl.check_puts(module.compiled())
        return str(virtual_nodes.build(tmp_path_factory.mktemp("network")))
    except (BackendUnavailable, FileNotFoundError) as reason:
        pytest.skip(str(reason))


def environment(share: str) -> dict[str, str]:
    return processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION=share)


def run(network: str, ranks: int, per_node: int, *arguments: str, share: float = 0.3) -> None:
    """`share`: of a GPU's memory, that XLA takes for all ranks on it."""
    gpus = min(ranks, jax.device_count())
    nodes = ["--ranks_per_node", str(per_node), "--network", network, "--gpus", str(gpus)]
    finished = processes.run_ranks(
        ["--backend", "cuda", *nodes, *arguments],
        num_processes=ranks,
        seconds=SECONDS * (1 if gpus == ranks else 2),
        env=environment(str(share * gpus / ranks)),
    )
    processes.assert_finished(finished)
    assert all("PASSED" in one.output for one in finished)


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@pytest.mark.parametrize("half", ["0", "1"])
def test_every_case(network, ranks, per_node, mode, half):
    """Bit for bit as the reference backend with the same nodes. A job runs every other case of the table: to compile
    all of them takes 300 s where several jobs share the cores of a machine."""
    run(network, ranks, per_node, "--cases", "all", "--half", half, "--mode", mode)


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_start_and_done(network, ranks, per_node, mode):
    """Several operations are pending at once, in scans and under gradients: bit for bit as synchronous operations."""
    run(network, ranks, per_node, "--cases", "none", "--start_done", "--mode", mode)


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_bytes_random_operations_and_a_new_beginning(network, ranks, per_node):
    """In the opposite order of processes: a rank is not its number in NCCL."""
    several = "--count_bytes --random_calls 2000 --mode throughput --reset --buffers 2 --reverse".split()
    run(network, ranks, per_node, "--cases", "grouped", *several)


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_more_than_sixteen_processes(network, mode):
    """Three nodes of six: the kernels for groups of any size."""
    options = "--cases grouped --tokens 12 --hidden 128 --mode".split()
    run(network, 18, 6, *options, mode, share=0.15)


def test_unnamed_nodes_are_found(network):
    run(network, 4, 2, "--cases", "grouped,padded,grouped-two-axes", "--found")


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_every_subset(network, ranks, per_node, mode):
    """Every subset of active ranks agrees with plain JAX, whether rows use the rails or go from rank to rank."""
    run(network, ranks, per_node, "--cases", "none", "--subsets", "grouped,ranked,padded,grouped-fp8", "--mode", mode)


@pytest.mark.parametrize("per_node", [2, 1])
def test_a_server_goes_on_without_a_killed_process_of_another_node(network, per_node):
    """Four processes, in turns where there are fewer GPUs. Two hundred steps over the slow network of the tests."""
    options = "--ranks_per_node", str(per_node), "--network", network
    test_active.go_on_without_a_killed_process(*options, seconds_after=60.0)


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_a_stopped_process_is_waited_for_and_a_killed_one_is_named(network, ranks, per_node):
    options = "--gpus", str(min(ranks, jax.device_count())), "--network", network
    tally = chaos_jobs.run(ranks, 1, 3, 100.0, *options, environment=environment("0.1"), per_node=per_node)
    assert not tally.faults and not tally.not_started, tally
    assert tally.kills == 1 and tally.stalls >= 3 and tally.steps > 0
