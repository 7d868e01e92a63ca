"""Steps of a check: commands with a time limit, in process groups of their own, and the table of how they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, TextIO

from tests.support import processes

PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--durations=5", "-rN"]
"""Command by which a step runs tests: `table` reads its lines."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Commands with a time limit in seconds.

    Attributes:
      default: True for a step of a run that names no steps.
      together: True if the commands run side by side, each of them to its end; False if they run one after another, and
        a failed one is the last.
      turn: when `side_by_side` runs the step: "first", before all others; "shared", beside other steps that share;
        "alone", while no step of "shared" runs and no timing measures; "early" and "own", beside all of these, with
        commands that take turns by themselves (--lock). Steps of "alone" and "own" start once all steps of "early" have
        ended.
    """

    name: str
    seconds: float
    commands: Callable[[Any], list[list[str]]]
    default: bool = True
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""
    together: bool = False
    turn: str = "shared"


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


WRITING = threading.Lock()
"""Held while a command's output is written to the log, since commands and steps may run side by side."""
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
    """Runs the step's commands within `seconds`, one after another or, with `step.together`, side by side.

    A command ends at once when `hangs()` becomes true. Output and status of every command go to `log`.
    """
    began = time.monotonic()
    status, text = "passed", ""

    def run(command: list[str]) -> processes.Finished | None:
        left = seconds - (time.monotonic() - began)
        if left <= 1:
            return None
        (done,) = processes.run_all([command], seconds=left, env=environment | step.environment, give_up=hangs)
        with WRITING:
            log.write(f"\n===== {step.name}: {' '.join(command)}\n{done.output}\n")
            log.write(f"===== status {done.returncode} after {done.seconds:.1f} s\n")
            log.flush()
        return done

    commands = step.commands(context)
    with futures.ThreadPoolExecutor(max(1, len(commands)) if step.together else 1) as pool:
        for done in pool.map(run, commands) if step.together else map(run, commands):
            if done is None:
                status = "out of time"
                break
            text += done.output
            if not done.ok:
                status = f"exit status {done.returncode}"
                if done.returncode is None:
                    status = HUNG if hangs() else KILLED
                if not step.together:
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


STAGGER = 40.0
"""Seconds by which timings start later than checks in `side_by_side`, unless all checks end earlier."""


@contextlib.contextmanager
def turn(path: str, kind: str) -> Iterator[None]:
    """Locks the file `path`, as `benchmarks.lib.turns` does, while the context lasts: "shared" together with other
    holders of this kind, "alone" without any other holder. Other kinds lock nothing."""
    if kind not in ("shared", "alone"):
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX)
        yield


def side_by_side(steps: list[Step], seconds: float, run: Callable[[Step, float], None], lock: str) -> None:
    """Calls `run(step, limit in seconds)` for each step: first those whose turn is "first", then the others in threads.

    Steps whose turn is "early" start up to `STAGGER` later than those that share: programs that see all GPUs and start
    at the same time wait for one another in the driver. Steps whose turn is "alone" or "own" start when those of
    "early" have ended. While XLA compiles a program with matmuls of its own, it times candidates for them on the GPU,
    which disturbs a measurement beside it: such programs belong in a step of "own", and not in one of "early". `lock`
    is the file of `turn`. A step has its own `seconds`, or what is left of those of the whole call where that is less.
    """
    began = time.monotonic()
    shared = [step for step in steps if step.turn == "shared"]
    early, others = ([step for step in steps if step.turn in turns] for turns in (("early",), ("alone", "own")))
    holding = threading.Barrier(len(shared) + 1)

    def one(step: Step) -> None:
        with turn(lock, step.turn):
            if step.turn == "shared":
                holding.wait()
            run(step, min(step.seconds, seconds - (time.monotonic() - began)))

    for step in steps:
        if step.turn == "first":
            one(step)
    with futures.ThreadPoolExecutor(max(1, len(steps))) as pool:
        waiting = [pool.submit(one, step) for step in shared]
        holding.wait()  # all checks hold the lock: no timing measures before they have ended
        futures.wait(waiting, STAGGER)
        before = [pool.submit(one, step) for step in early]
        futures.wait(before)
        for future in [*waiting, *before, *(pool.submit(one, step) for step in others)]:
            future.result()


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
