"""Steps of a check: commands with a time limit, in process groups of their own, and the table of how they ended."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from tests.support import processes


@dataclasses.dataclass(frozen=True)
class Step:
    """Commands with a time limit in seconds. `default`: part of a run that names no steps."""

    name: str
    seconds: float
    commands: Callable[[Any], list[list[str]]]
    default: bool = True
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""


@dataclasses.dataclass
class Outcome:
    """The outcome of a step. `passed`, `failed` and `skipped` count its tests where it ran any."""

    step: str
    status: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    output_end: str = ""


TEST_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
KILLED = "killed at its limit"
HUNG = "hung"
"""Killed before its limit, because the program that ran did not end."""


def run_step(
    step: Step,
    context: Any,
    seconds: float,
    log: TextIO,
    environment: dict[str, str],
    hangs: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs the step's commands one after another within `seconds`; `hangs()` becoming true ends them at once."""
    began = time.monotonic()
    status, text = "passed", ""
    for command in step.commands(context):
        left = seconds - (time.monotonic() - began)
        if left <= 1:
            status = "out of time"
            break
        (done,) = processes.run_all([command], seconds=left, env=environment | step.environment, give_up=hangs)
        text += done.output
        log.write(f"\n===== {step.name}: {' '.join(command)}\n{done.output}\n")
        log.write(f"===== status {done.returncode} after {done.seconds:.1f} s\n")
        log.flush()
        if not done.ok:
            status = f"exit status {done.returncode}"
            if done.returncode is None:
                status = HUNG if hangs() else KILLED
            break
    tests = TEST_LINE.findall(text)
    count = {kind: sum(result == kind for _, result in tests) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failures = [name for name, result in tests if result in ("FAILED", "ERROR")]
    if status == "passed" and tests and not count["PASSED"]:
        status = "every test was skipped"
    return Outcome(
        step.name,
        status,
        round(time.monotonic() - began, 1),
        count["PASSED"],
        count["FAILED"] + count["ERROR"],
        count["SKIPPED"],
        failures[:40],
        text[-6000:],
    )


def choose(steps: Iterable[Step], names: str | None) -> list[Step]:
    """Returns the steps that `names` lists, between commas; None is those of a default run.

    Raises:
      SystemExit: a name is unknown.
    """
    steps = list(steps)
    if not names:
        return [step for step in steps if step.default]
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in {step.name for step in steps}]
    if unknown:
        raise SystemExit(f"--steps: unknown {unknown}; there are {[step.name for step in steps]}")
    return [step for step in steps if step.name in wanted]


def listing(steps: Iterable[Step]) -> str:
    """Names of the steps, for a help text."""
    return ", ".join(f"{step.name}{'' if step.default else ' (not by default)'}" for step in steps)


def table(outcomes: Iterable[Outcome]) -> str:
    """A line for each step, and the names of failed tests below."""
    outcomes = list(outcomes)
    lines = [f"{'step':<14}{'status':<24}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>8}"]
    for o in outcomes:
        lines.append(f"{o.step:<14}{o.status:<24}{o.seconds:>8.1f}{o.passed:>8}{o.failed:>8}{o.skipped:>8}")
    failures = [name for o in outcomes for name in o.failures]
    return "\n".join([*lines, *(f"failed: {name}" for name in failures[:20])])
