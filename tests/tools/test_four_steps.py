"""`tools/gpu_check.py --steps four` without GPUs: turns of checks and timings, and that every step finds its tests."""

import pathlib
import subprocess
import sys
import threading
import time

import pytest
from _pytest.mark.expression import Expression

from tests.support import ROOT

pytest.importorskip("tools.four_steps", reason="tools are part of a checkout alone")

from benchmarks.lib import turns
from tools import four_steps, gpu_check, steps


def context(tmp_path: pathlib.Path, small: bool = False) -> gpu_check.Context:
    return gpu_check.Context(tmp_path, 1 if small else 4, "never", tmp_path, small)


def test_a_timing_runs_while_no_check_runs(tmp_path):
    """Checks run side by side. Timings, which lock the file themselves or are locked by `side_by_side`, run after all
    checks and one after the other."""
    lock, at, mutex = str(tmp_path / "lock"), {}, threading.Lock()
    both = threading.Barrier(2)

    def run(step: steps.Step, seconds: float) -> None:
        if step.turn == "shared":
            both.wait(10)  # raises unless both checks run side by side
        with turns.alone(lock if step.turn in ("early", "own") else None):
            began = time.monotonic()
            time.sleep(0.1)
            with mutex:
                at[step.name] = (began, time.monotonic(), seconds)

    kinds = {"own": "own", "a": "shared", "alone": "alone", "b": "shared", "first": "first", "early": "early"}
    made = [steps.Step(name, 50.0, lambda _: [], turn=turn) for name, turn in kinds.items()]
    steps.side_by_side(made, 60.0, run, lock)
    assert at.keys() == kinds.keys() and all(0 < seconds <= 50 for *_, seconds in at.values())
    assert at["first"][1] < min(at["a"][0], at["b"][0])
    in_turn = sorted(at[name] for name in ("own", "alone", "early"))
    assert in_turn[0] == at["early"]
    assert in_turn[0][0] >= max(at["a"][1], at["b"][1])
    assert all(one[1] <= other[0] for one, other in zip(in_turn, in_turn[1:], strict=False))


def test_commands_side_by_side_all_run_to_their_end(tmp_path):
    commands = [[sys.executable, "-c", "raise SystemExit(3)"], [sys.executable, "-c", "print('t::x PASSED')"]]
    with open(tmp_path / "log", "w") as log:
        outcome = steps.run_step(steps.Step("s", 60, lambda _: commands, together=True), None, 60.0, log, {})
    assert (outcome.status, outcome.passed) == ("exit status 3", 1)
    assert "status 0" in (tmp_path / "log").read_text()


def test_a_rehearsal_is_of_the_four_parts_alone(tmp_path, capsys):
    for words in (["--steps", "smoke"], ["--nodes", "--steps", "start"], []):
        with pytest.raises(SystemExit):
            gpu_check.main([str(tmp_path / "out"), "--small", *words])
        assert "--small rehearses --steps four alone; given: --steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_steps_are_chosen_by_part_and_by_name():
    assert four_steps.chosen("four") == list(four_steps.STEPS)
    assert {step.name for step in four_steps.chosen("four2,four5-elastic")} > {"four2-link", "four5-elastic"}
    assert [step.name for step in four_steps.chosen("four4-slow-link")] == ["four2-native", "four4-slow-link"]
    with pytest.raises(SystemExit, match="--steps four6: there are four, four1 to four5"):
        four_steps.chosen("four6")


def test_every_selection_finds_tests(tmp_path):
    """Every expression that a step gives to -k finds a name among those of the GPU tests in its file."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    names = [line.lower() for line in listed.splitlines() if line.startswith("tests/gpu/")]
    assert len(names) > 1000
    for small in (False, True):
        for step in four_steps.STEPS:
            for command in step.commands(context(tmp_path, small)):
                path = next((word for word in command if word.startswith("tests/gpu/")), None)
                if path is None:
                    continue
                words = Expression.compile(command[command.index("-k") + 1] if "-k" in command else "test")
                ids = [name.removeprefix(path) for name in names if name.startswith(path)]
                found = [i for i in ids if words.evaluate(lambda word, i=i: word.lower() in i)]
                assert found, f"{step.name}: {command}"
