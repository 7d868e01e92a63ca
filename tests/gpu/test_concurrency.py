"""More than one program at a time: threads, meshes over the same GPUs, devices in another order, concurrent graphs."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys

import pytest

from tests.gpu import processes

SECONDS = 180.0
CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_gpu_graph_min_graph_size=1"
SCENARIOS = (
    "threads_on_channels",
    "threads_on_one_channel",
    "two_meshes",
    "permuted_devices",
    "independent_operations",
    "independent_operations_on_one_channel",
)


def child(scenario: str, flags: str = "") -> None:
    env = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.4", XLA_FLAGS=flags)
    finished = processes.run_all([[sys.executable, __file__, scenario]], seconds=SECONDS, env=env)
    processes.assert_finished(finished)
    assert "PASSED" in finished[0].output, finished[0].output[-3000:]


@pytest.mark.gpu2
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_concurrency(scenario):
    child(scenario)


@pytest.mark.gpu2
@pytest.mark.parametrize("scenario", ["independent_operations", "independent_operations_on_one_channel"])
def test_concurrent_graphs(scenario):
    child(scenario, CONCURRENT)


# -- the scenarios -----------------------------------------------------------------------------------------------------


def mesh_over(devices):
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices), ("ep",))


def check_calls(mesh, config, seed: int, calls: int) -> int:
    """Round trips that follow each other; how many came back right. The first that fails ends it."""
    import jax
    import numpy as np

    from tests.gpu import programs

    program = programs.over(mesh, programs.round_trip(config))
    x, idx, weights = programs.operands(mesh, seed=seed)
    expected = np.asarray(x)
    for done in range(calls):
        out = np.asarray(jax.block_until_ready(program(x, idx, weights)))
        poisoned = np.isnan(out).all(axis=1)  # by ranks: one may have ended this call before another failed in the next
        np.testing.assert_array_equal(out[~poisoned], expected[~poisoned])
        if poisoned.any():
            return done  # an error must have been raised or be there
    return calls


def threads(configs, meshes, calls: int, may_fail: bool) -> None:
    """Runs one thread for each program; a named error is allowed, since JAX does not order programs of two threads."""
    import jax

    import xen_moe_jax as xm

    with concurrent.futures.ThreadPoolExecutor(len(configs)) as pool:
        jobs = [pool.submit(check_calls, m, c, i, calls) for i, (c, m) in enumerate(zip(configs, meshes, strict=True))]
        errors = []
        for job in jobs:
            try:
                done = job.result()
                print(f"{done} of {calls} calls")
                if done < calls:
                    errors.append("poisoned")
            except jax.errors.JaxRuntimeError as error:
                errors.append(str(error))
    if errors:
        assert may_fail, errors
        try:
            xm.check()
        except xm.OperationFailed as error:
            print(f"named: {error}")
            return
        raise AssertionError(f"no failure is shown, but {errors}")
    xm.check()


def run(scenario: str, backend: str, calls: int) -> None:
    import jax

    import xen_moe_jax as xm

    devices = jax.devices()[: 4 if len(jax.devices()) >= 4 else 2]

    def config(channel: int) -> xm.KernelConfig:
        return xm.KernelConfig(backend=backend, channel=channel, timeout_s=10.0)

    mesh = mesh_over(devices)
    if scenario == "threads_on_channels":
        threads([config(1), config(2)], [mesh, mesh], calls, may_fail=True)
    elif scenario == "threads_on_one_channel":
        threads([config(1), config(1)], [mesh, mesh], calls, may_fail=True)
    elif scenario == "two_meshes":
        threads([config(1), config(1)], [mesh, mesh_over(devices[::-1])], calls, may_fail=True)
    elif scenario == "permuted_devices":
        for order in (devices[::-1], devices[1:] + devices[:1], devices):
            assert check_calls(mesh_over(order), config(0), 1, calls) == calls
        xm.check()
    else:
        independent(mesh, [config(1), config(1 if scenario.endswith("one_channel") else 2)], calls)


def independent(mesh, configs, calls: int) -> None:
    """Two operations of one program that nothing orders: right, or the error that says to use two channels."""
    import jax
    import numpy as np

    import xen_moe_jax as xm
    from tests.gpu import programs

    def body(x, idx, weights):
        one = programs.round_trip(configs[0])(x, idx, weights)
        another = programs.round_trip(configs[1])(2 * x, idx, weights)
        return one, another

    x, idx, weights = programs.operands(mesh)
    program = programs.over(mesh, body)
    for _ in range(calls):
        try:
            one, another = jax.block_until_ready(program(x, idx, weights))
            xm.check()
        except (xm.OperationFailed, jax.errors.JaxRuntimeError) as error:
            assert configs[0].channel == configs[1].channel and "KernelConfig.channel" in str(error), error
            print(f"named: {error}")
            return
        np.testing.assert_array_equal(np.asarray(one), np.asarray(x))
        np.testing.assert_array_equal(np.asarray(another), 2 * np.asarray(x))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    run(options.scenario, options.backend, options.calls)
    print("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
