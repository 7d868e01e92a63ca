"""CUDA graphs: XLA's command buffers forced on, in a process of its own because the flag is read at start.

That a graph exists is shown twice: our handlers were called on streams that were capturing, for every operation on
every rank, and the device then completes thousands of operations that no host code has launched.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import pytest

from tests.gpu import processes

FORCED = "--xla_gpu_enable_command_buffer=+FUSION,+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
SCENARIOS = ("replays", "failure_in_a_replay", "close_and_reopen", "recompile")


def run(*arguments: str, seconds: float = 240.0) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FORCED}"
    finished = processes.run_all(
        [[sys.executable, *arguments]],
        seconds=seconds,
        env=processes.environment(JAX_PLATFORMS="cuda", XLA_FLAGS=flags, XLA_PYTHON_CLIENT_MEM_FRACTION="0.4"),
    )
    processes.assert_finished(finished)
    return finished[0].output


@pytest.mark.gpu2
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_graphs(scenario, nodes):
    """On one node, and between two virtual ones."""
    assert "PASSED" in run(__file__, scenario, "--nodes", str(nodes))


@pytest.mark.gpu2
def test_stress_under_graphs():
    """Epochs and flags must advance at every replay: a graph with a frozen epoch gives old rows the second time."""
    run(str(pathlib.Path(__file__).with_name("stress.py")), "--calls", "2000", "--seconds", "60")


@pytest.mark.gpu2
def test_a_loop_of_round_trips_under_graphs():
    """Calls of the same graph in a loop, each fed by the one before; the benchmark checks the loop's results."""
    sizes = "--ranks 2 --tokens 256 --hidden 1024 --inner 50 --repeats 3"
    run("-m", "benchmarks", "ops", "--backend", "cuda", "--peers", "none", *sizes.split())


# -- the scenarios -----------------------------------------------------------------------------------------------------


def counted(channel: int, what: str) -> int:
    """ "launches" by the host of all operations on all local ranks, or how many of them were "captured"."""
    from xen_moe_jax import cuda

    return sum(w[what] for w in cuda.workspaces() if w["channel"] == channel)


class InAGraph:
    """Around the first calls of a program: proof that every operation was captured into a CUDA graph on every rank.

    XLA forms command buffers out of thunks, so the compiled text does not show them. The library's handlers see a
    stream that is capturing; captured work does not run, so results that change from call to call come from the graph.
    """

    def __init__(self, channel: int, ranks: int, operations: int = 2) -> None:
        self._channel, self._least = channel, ranks * operations

    def __enter__(self) -> None:
        self._before = counted(self._channel, "captured")

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            made = counted(self._channel, "captured") - self._before
            assert made >= self._least, f"{made} operations were captured, and {self._least} are in the program"


def replays(mesh, config, calls: int) -> None:
    """Fresh data in every replay, every result checked on the device; almost none of them launched by the host."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tests.gpu import programs

    x, idx, weights = programs.operands(mesh)

    def body(x, idx, weights, wrong):
        out = programs.round_trip(config)(x, idx, weights)
        wrong = wrong + jnp.sum(out != x)
        return jnp.roll(x, 1, axis=1) + 1 - 16 * (x > 6), jnp.roll(idx, 1, axis=0), weights, wrong

    program = programs.over(mesh, body, num_operands=4)
    wrong = jax.device_put(np.zeros(mesh.size, np.int32), x.sharding)
    compiled = program.lower(x, idx, weights, wrong).compile()
    state = (x, idx, weights, wrong)
    with InAGraph(config.channel, mesh.size):
        for _ in range(20):
            state = compiled(*state)
        jax.block_until_ready(state)
    before = counted(config.channel, "launches")
    for _ in range(calls):
        state = compiled(*state)
    assert int(np.asarray(state[3]).sum()) == 0
    made = counted(config.channel, "launches") - before
    print(f"{calls} replays of 2 operations on {mesh.size} ranks: {made} launches by the host")
    assert made < calls // 10, "the host launches what a graph should replay"


def failure_in_a_replay(mesh, config, calls: int) -> None:
    """A rank leaves an operation out when the data say so, in a program that is long captured."""
    import dataclasses

    import jax
    import numpy as np

    import xen_moe_jax as xm
    from tests.gpu import programs
    from xen_moe_jax import cuda

    config = dataclasses.replace(config, timeout_s=3.0)
    apart = config.ranks_per_node == 1  # on another node only its routing or rows, which do not come, show it
    root = f"rank 1 (GPU 1) did not {'send its r' if apart else 'start it'}"
    x, idx, weights = programs.operands(mesh)
    whole = programs.over(mesh, programs.round_trip(config)).lower(x, idx, weights).compile()

    def alone(x, idx, weights):  # rank 1 takes no part
        def operation():
            return programs.dispatch(x, idx, weights, config).x

        return programs.skipped_on(1, operation, programs.zeros_like_results(operation))

    broken = programs.over(mesh, alone)
    with InAGraph(config.channel, mesh.size):
        for _ in range(20):
            jax.block_until_ready(whole(x, idx, weights))
    for _ in range(3):
        jax.block_until_ready(broken(x, idx, weights))
        refused, poisoned = 0, 0
        for _ in range(10):  # replays behind the failure
            try:
                programs.assert_poisoned(jax.block_until_ready(whole(x, idx, weights)))
                poisoned += 1
            except jax.errors.JaxRuntimeError as error:
                assert root in str(error), error
                refused += 1
        print(f"{poisoned} replays poisoned, {refused} refused")
        try:
            xm.check()
        except xm.OperationFailed as error:
            assert root in str(error), error
        else:
            raise AssertionError("no failure is shown")
        cuda.reset()
        for _ in range(10):  # the executable is not spoilt
            np.testing.assert_array_equal(np.asarray(whole(x, idx, weights)), np.asarray(x))
        xm.check()


def close_and_reopen(mesh, config, calls: int) -> None:
    """A captured program while its Buffer is closed: an error; when it is open again: right results."""
    import jax
    import numpy as np

    import xen_moe_jax as xm
    from tests.gpu import programs
    from xen_moe_jax import cuda

    sizes = {"num_tokens": 64, "hidden": 256, "top_k": 4, "num_experts": 16, "dtype": "float32"}
    sizes["ranks_per_node"] = config.ranks_per_node
    x, idx, weights = programs.operands(mesh)
    with xm.Buffer(mesh, "ep", channel=config.channel, **sizes):
        program = programs.over(mesh, programs.round_trip(config)).lower(x, idx, weights).compile()
        with InAGraph(config.channel, mesh.size):
            for _ in range(20):
                np.testing.assert_array_equal(np.asarray(program(x, idx, weights)), np.asarray(x))
    for _ in range(3):
        try:
            out = np.asarray(jax.block_until_ready(program(x, idx, weights)))
            if np.isnan(out).all():  # a replay
                try:
                    xm.check()
                    raise AssertionError("a poisoned result without an error")
                except xm.OperationFailed as error:
                    assert "released its symmetric memory" in str(error), error
            else:  # the host came by and made memory
                np.testing.assert_array_equal(out, np.asarray(x))
        except jax.errors.JaxRuntimeError as error:
            assert "released its symmetric memory" in str(error), error
    cuda.reset()
    with xm.Buffer(mesh, "ep", channel=config.channel, **sizes):
        for _ in range(20):
            out = np.asarray(program(x, idx, weights))
            if np.isnan(out).any():
                xm.check()  # says why
            np.testing.assert_array_equal(out, np.asarray(x))
    xm.check()


def recompile(mesh, config, calls: int) -> None:
    """Other programs are compiled and need more memory between the replays of the first."""
    import numpy as np

    import xen_moe_jax as xm
    from tests.gpu import programs

    x, idx, weights = programs.operands(mesh)
    program = programs.over(mesh, programs.round_trip(config)).lower(x, idx, weights).compile()
    for round_number in range(6):
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(program(x, idx, weights)), np.asarray(x))
        sizes = programs.Sizes(tokens=128 << round_number, hidden=256)
        more = programs.operands(mesh, sizes)
        other = programs.over(mesh, programs.round_trip(config, sizes))
        np.testing.assert_array_equal(np.asarray(other(*more)), np.asarray(more[0]))
    xm.check()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes")
    options = parser.parse_args()

    import jax
    import numpy as np

    import xen_moe_jax as xm

    devices = jax.devices()[: 4 if len(jax.devices()) >= 4 else 2]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    per_node = None if options.nodes == 1 else mesh.size // options.nodes
    config = xm.KernelConfig(backend="cuda", channel=5, timeout_s=30.0, ranks_per_node=per_node)
    globals()[options.scenario](mesh, config, options.calls)
    print("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
