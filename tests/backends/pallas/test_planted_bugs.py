"""Bugs planted on purpose are noticed: the means that all other tests rely on work."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from tests.support import ROOT
from tools.children import bound

pytest.importorskip("jax.experimental.pallas.tpu")

PROGRAM = pathlib.Path(__file__).with_name("planted_bugs.py")
HANG_SECONDS = 60
"""A healthy run takes about 10 s on two cores; a run of six times this counts as a hang."""

SECONDS = 300

NOTICED = (  # bug, DMA mode, the expected finding
    ("no_wait_for_arrivals", "eager", "RACE DETECTED"),
    ("no_wait_for_sends", "eager", "non-zero count"),
    ("buffer_reused_early", "on_wait", "RACE DETECTED"),
    ("one_record_too_few", "on_wait", "WRONG"),
    ("no_exit_credits", "eager", "non-zero count"),
    pytest.param("no_wait_for_arrivals", "on_wait", "WRONG", marks=pytest.mark.slow),
    pytest.param("no_wait_for_sends", "on_wait", "RACE DETECTED", marks=pytest.mark.slow),
    pytest.param("buffer_reused_early", "eager", "RACE DETECTED", marks=pytest.mark.slow),
    pytest.param("one_record_too_few", "eager", "non-zero count", marks=pytest.mark.slow),
)


def command(bug: str, mode: str) -> list[str]:
    return [sys.executable, str(PROGRAM), bug, mode]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run(bug: str, mode: str, seconds: float) -> str:
    done = subprocess.run(
        command(bug, mode), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    assert "FINISHED" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def said(bug: str, mode: str, sign: str) -> str:
    """Output of the program up to `sign`, or until its end: rows of garbage may keep it from ending."""
    started = subprocess.Popen(
        bound(command(bug, mode)),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = threading.Timer(SECONDS, started.kill)
    limit.start()
    lines: list[str] = []
    try:
        for line in started.stdout or ():
            lines.append(line)
            if sign in line:
                break
    finally:
        limit.cancel()
        started.kill()
        started.wait()
    return "".join(lines)


def test_nothing_is_noticed_without_a_bug():
    out = run("none", "eager", SECONDS)
    assert out.strip() == "FINISHED", out


@pytest.mark.parametrize(("bug", "mode", "sign"), NOTICED)
def test_planted_bug_is_noticed(bug, mode, sign):
    assert sign in said(bug, mode, sign)


@pytest.mark.slow
def test_a_missing_announcement_hangs():
    with pytest.raises(subprocess.TimeoutExpired):
        run("no_announcement", "eager", HANG_SECONDS)
