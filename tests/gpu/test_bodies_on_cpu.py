"""The GPU test bodies on CPU, where the reference backend stands in for the kernels: proof that the bodies run and
can fail.

The stand-in takes another number of tokens a round, so that the two sides of a comparison do not run the same program.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import xen_moe_jax as xm
from tests.gpu import bodies, chaos_jobs, members, processes, programs, random_calls, stress
from tests.gpu.bodies import Setup
from tests.support import HANG_S, quick_compiler
from tests.support.cases import CASES

STAND_IN = xm.KernelConfig(backend="reference", chunk_tokens=3)
BY_NAME = {case.name: case for case in CASES}
SMALL = tuple(s for s in stress.SHAPES if s.num_tokens * s.hidden < 10_000)

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the GPU tests themselves run on this platform")


def cpu_mesh(sizes, names, order=None) -> Mesh:
    count = int(np.prod(sizes))
    devices = np.array(jax.devices("cpu")[:count])
    return Mesh(devices[np.arange(count) if order is None else order].reshape(sizes), names)


def once(function):
    """Caches `function`: callers with the same arguments get the first caller's result."""
    results = []

    def run(*args):
        if not results:
            results.append(function(*args))
        return results[0]

    return run


@pytest.mark.parametrize(
    "name", ["grouped", "ranked", "padded-fp8-ue8m0", "grouped-scaled-fp8", "grouped-align8-capacity-one-below"]
)
def test_data_parallel_groups(name):
    mesh = cpu_mesh((2, 2), ("dp", "ep"))
    bodies.assert_same(Setup(BY_NAME[name], mesh, ("ep",), 20, 256), "zipf", STAND_IN)


def test_permuted_devices():
    bodies.assert_same(
        Setup(BY_NAME["grouped"], cpu_mesh((4,), ("ep",), [2, 0, 3, 1]), ("ep",), 20, 256), "uniform", STAND_IN
    )


def test_two_axes():
    mesh = cpu_mesh((2, 2), ("node", "gpu"))
    bodies.assert_same(Setup(BY_NAME["grouped-two-axes"], mesh, ("node", "gpu"), 20, 256), "uniform", STAND_IN)


def test_ranks_that_come_and_go_from_one_trace(monkeypatch):
    """A slice of the subsets; and one number changed on those that take part, in one subset alone, is found there.

    All by the same program: another one for the wrong number took as long again to compile.
    """
    setup = Setup(BY_NAME["grouped"], cpu_mesh((4,), ("ep",)), ("ep",), 6, 128)
    genuine, spoilt = members.outcome, np.array([True, False, False, True])

    def flip(setup, config, operands, active, idx):
        results = genuine(setup, config, operands, active, idx)
        if config == STAND_IN:
            out, keep = results["out"]
            here = jnp.all(active == spoilt) & active[jax.lax.axis_index("ep")]
            results["out"] = out.at[0, 5].set(jnp.where(here, 77, out[0, 5])), keep
        return results

    monkeypatch.setattr(members, "outcome", flip)
    comparison = members.Comparison(setup, STAND_IN)
    for active in members.subsets(4)[::5]:
        assert not np.array_equal(active, spoilt) and not comparison.wrong(active)
    assert comparison.wrong(spoilt) == {"out": 2}
    assert comparison.traces == 1


def test_a_difference_is_found(monkeypatch):
    """One bit of one row of one side flipped: counted once, and the assertion names it."""
    setup = Setup(BY_NAME["grouped"], cpu_mesh((2,), ("ep",)), ("ep",), 8, 128)
    genuine = bodies.outcome

    def flip_one_bit(setup, capacity, config, operands, gradients):
        results = genuine(setup, capacity, config, operands, gradients)
        if config == STAND_IN:
            rows, keep = results["rows 0"]
            results["rows 0"] = rows.at[0, 5].multiply(-1), keep
        return results

    monkeypatch.setattr(bodies, "outcome", flip_one_bit)
    counts = bodies.differing_elements(setup, "uniform", STAND_IN)
    assert {name: n for name, n in counts.items() if n} == {"rows 0": 2}  # one on each rank
    with pytest.raises(AssertionError, match="rows 0"):
        bodies.assert_same(setup, "uniform", STAND_IN)


def test_stress():
    result = stress.run(cpu_mesh((4,), ("ep",)), STAND_IN, calls=200, shapes=SMALL[:3])
    assert result.calls == 200 and not result.mismatches


def test_stress_finds_a_wrong_call():
    """After one program's weights are changed, the run reports the calls of that program and no others."""
    shapes = SMALL[:2]
    wrong = stress.Shape(dataclasses.replace(shapes[0].case, weights=False), shapes[0].num_tokens, shapes[0].hidden)
    mesh = cpu_mesh((2,), ("ep",))
    setups = [Setup(s.case, mesh, ("ep",), s.num_tokens, s.hidden) for s in (*shapes, wrong)]
    choices = np.arange(len(stress.POOL))
    logs = []
    for setup in setups:
        program, state = stress.Program(setup, STAND_IN), stress.start_state(setup, choices)
        program.compile(state)
        for _ in choices:
            state = jax.block_until_ready(program(state))
        logs.append(stress.local_rows(state[0]))
    order = np.zeros(len(choices), int)
    assert not stress.mismatches(logs[0], logs[:2], order, choices, len(choices), shapes)
    found = stress.mismatches(logs[2], logs[:2], order, choices, len(choices), shapes)
    assert found and all(shapes[0].case.name in line for line in found)


@pytest.mark.slow
def test_two_processes():
    """The rank program with two processes of two CPU devices."""
    finished = processes.run_ranks(
        [
            "--backend",
            "reference",
            "--chunk_tokens",
            "3",
            "--cpu_devices",
            "2",
            "--cases",
            "grouped,ranked",
            "--stress_calls",
            "20",
        ],
        num_processes=2,
        seconds=HANG_S,
        env=processes.environment(JAX_PLATFORMS="cpu", XLA_FLAGS=quick_compiler.flags()),
    )
    processes.assert_finished(finished)
    assert all("PASSED" in f.output for f in finished)


def test_a_hanging_process_is_killed_and_reported():
    hang = "import time, subprocess; subprocess.Popen(['sleep', '600']); print('started', flush=True); time.sleep(600)"
    finished = processes.run_all([[sys.executable, "-c", hang]], seconds=5.0)
    assert finished[0].returncode is None and "started" in finished[0].output and finished[0].seconds < 60
    with pytest.raises(AssertionError, match="killed at the time limit"):
        processes.assert_finished(finished)


def test_a_failing_process_ends_the_others():
    finished = processes.run_all(
        [[sys.executable, "-c", "raise SystemExit(3)"], [sys.executable, "-c", "import time; time.sleep(600)"]],
        seconds=300.0,
    )
    assert finished[0].returncode == 3 and finished[1].returncode is None and finished[1].seconds < 200


def test_random_calls_agree_and_a_wrong_one_is_found(monkeypatch):
    steps = random_calls.STEPS
    mesh = cpu_mesh((2,), ("ep",))
    some = tuple(s for s in steps if s.name in ("grouped", "gradient", "ragged"))
    monkeypatch.setattr(random_calls, "tables", once(random_calls.tables))  # the wrong step is right in the table, too
    result = random_calls.run(mesh, STAND_IN, calls=60, length=30, steps=some)
    assert result.operations >= 60 and not result.wrong

    def off_by_one(config, *args):
        found = some[0].run(config, *args)
        return found + (config == STAND_IN)

    broken = (dataclasses.replace(some[0], run=off_by_one), *some[1:])
    result = random_calls.run(mesh, STAND_IN, calls=60, length=30, steps=broken)
    assert result.wrong and "grouped" in result.first


def test_layers_are_close_to_the_dense_one_and_a_wrong_number_is_found(monkeypatch):
    pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
    from tests.gpu import layers

    config = layers.CASES["tokens on every rank"]
    sizes, names = layers.axes_of(config, 2)
    mesh = cpu_mesh(sizes, names)
    monkeypatch.setattr(layers.layers, "run_with_gradients", once(layers.layers.run_with_gradients))
    layers.assert_close(config, mesh)
    exact = layers.dense_moe

    def of_other_weights(config, weights, x):
        return exact(config, weights | {"down": weights["down"].at[3, 5].multiply(-1)}, x)

    monkeypatch.setattr(layers, "dense_moe", of_other_weights)
    with pytest.raises(AssertionError, match="'y'"):
        layers.assert_close(config, mesh)


def test_programs_of_the_failure_tests_give_back_what_they_got():
    mesh = cpu_mesh((2,), ("ep",))
    x, idx, weights = programs.operands(mesh)
    out = programs.over(mesh, programs.round_trip(STAND_IN))(x, idx, weights)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
    with pytest.raises(AssertionError, match="are not NaN"):
        programs.assert_poisoned((out, jnp.full(3, jnp.nan)))
    programs.assert_poisoned((jnp.full(3, jnp.nan), jnp.zeros(2, jnp.int32)))


@pytest.mark.slow
def test_chaos_on_cpu_stops_ranks_and_finds_an_unnamed_death():
    """The plain backend has no liveness: stalls pass, and the kill is reported as the fault that it is here."""
    environment = processes.environment(JAX_PLATFORMS="cpu", XLA_FLAGS=quick_compiler.flags())
    extra = ("--cpu_devices", "1", "--backend", "reference")
    tally = chaos_jobs.run(2, 1, 2, 60.0, *extra, environment=environment)
    assert tally.kills == 1 and tally.stalls == 2 and tally.faults
