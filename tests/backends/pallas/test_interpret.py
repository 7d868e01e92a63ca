"""The project's conformance suite against the TPU kernels in interpret mode, each part in a process with a time limit.

CI runs a part of the table in each DMA mode, by start and done, and on eight ranks; `slow` runs all of it on four
ranks, and the rest of the other variants.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import ROOT

HERE = pathlib.Path(__file__).parent

SHORT = {  # class -> pytest -k expression; between them every kernel, every layout, each kind of case
    "TestEager": (
        "[grouped/uniform] or without_rows[grouped] or ranked/duplicates or grouped-scaled or drop-weight-align8 or "
        "grouped-drop-source/uniform"
    ),
    "TestOnWait": (
        "padded-odd-hidden-fp8 or grouped-int8-f32 or "
        "operation[grouped] or replicated_tokens[padded] or in_segments or left_out or changes_no_bit or "
        "(ragged_all_to_all and random and int8) or (test_all_to_all and bfloat16)"
    ),
    "TestGathered": "padded-fp8 or grouped-top1/zipf or padded-uneven/hammer",
    "TestTwoCores": "padded/zipf",
    "TestWithoutHeaders": "padded-fp8",
    "TestGatheredOnTwoCores": "padded/uniform",
    "TestStartAndDone": "align8-capacity-one-below or grouped-two-axes/uniform",
}


def run_suite(part: str, seconds: float, expression: str = "", **environment: str) -> None:
    """Runs a class or a function of the conformance suite, or a part of it, in a process of its own; a deadlock ends as
    `TimeoutExpired`. To collect the whole suite would take a second and a half."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"{HERE / 'interpret_conformance.py'}::{part}", "-k", expression]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.parametrize("mode", SHORT)
def test_conformance_in_interpret_mode(mode):
    run_suite(mode, 900, SHORT[mode])


OUT = [  # a program of this number of operations takes most of a minute
    "ranked-two-axes",
    pytest.param("padded-int8", marks=pytest.mark.slow),
    pytest.param("grouped-align8-uneven", marks=pytest.mark.slow),
    pytest.param("grouped", marks=pytest.mark.slow),
    pytest.param("ranked", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", OUT)
def test_inactive_ranks(case):
    run_suite("test_inactive_ranks", 900, f"[{case}]")


MAPPED = ["jacfwd", "hessian"]  # a program each


def test_more_rows_than_one_wait_covers():
    run_suite("test_more_rows_than_one_wait_covers", 600, "on_wait")


@pytest.mark.parametrize("case", ["eager-2", pytest.param("on_wait-1", marks=pytest.mark.slow)])
def test_two_cores_send(case):
    # every core of every rank takes a thread of the CPU's pool, which has one for each device
    test = "test_each_core_reduces_the_pairs_of_half_of_the_ranks"
    run_suite(test, 600, case, XLA_FLAGS="--xla_force_host_platform_device_count=16")


@pytest.mark.parametrize("transform", ["vmap", "jacrev", *[pytest.param(t, marks=pytest.mark.slow) for t in MAPPED]])
def test_mapped_calls_are_a_loop(transform):
    run_suite("test_mapped_calls_are_a_loop", 600, transform)


@pytest.mark.parametrize("axes", ["dp-ep", "ep-tp"])
def test_a_mesh_with_another_axis(axes):
    run_suite("test_ep_beside_another_axis", 600, axes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SHORT)
def test_whole_conformance_in_interpret_mode(mode):
    run_suite(mode, 3000)


def test_conformance_on_eight_ranks():
    run_suite("TestEightRanks", 900, "grouped-two-axes/uniform")


@pytest.mark.slow
def test_more_conformance_on_eight_ranks():
    run_suite("TestEightRanks", 900, "[grouped/uniform] or ranked/uniform or padded/uniform")
