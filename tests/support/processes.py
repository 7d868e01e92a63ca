"""Starts programs under a hard time limit: at the limit their whole process groups are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Finished:
    """`returncode` is None where the process was killed at the limit."""

    command: list[str]
    returncode: int | None
    output: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.returncode == 0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the tests and the library importable, and `changes`."""
    path = dict.fromkeys([str(ROOT), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes


def run_all(commands: list[list[str]], *, seconds: float, env: dict[str, str] | None = None) -> list[Finished]:
    """Runs `commands` side by side; when one fails, the others get five more seconds, and none outlives `seconds`."""
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        began = time.monotonic()
        running = [
            subprocess.Popen(c, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True)
            for c, log in zip(commands, logs, strict=True)
        ]
        ended = [0.0] * len(running)
        limit = began + seconds
        try:
            while any(p.poll() is None for p in running) and time.monotonic() < limit:
                for i, process in enumerate(running):
                    if process.poll() is not None and not ended[i]:
                        ended[i] = time.monotonic() - began
                        if process.returncode != 0:
                            limit = min(limit, time.monotonic() + 5.0)
                time.sleep(0.05)
        finally:
            codes = [process.poll() for process in running]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        finished = []
        for command, log, code, end in zip(commands, logs, codes, ended, strict=True):
            log.seek(0)
            finished.append(Finished(command, code, log.read(), end or time.monotonic() - began))
        return finished


def assert_finished(finished: list[Finished]) -> None:
    """Fails with the end of every output when one process failed or was killed."""
    if all(f.ok for f in finished):
        return
    report = "\n".join(
        f"--- process {i}: {'killed at the time limit' if f.returncode is None else f'exit status {f.returncode}'}, "
        f"{f.seconds:.1f} s\n{f.output[-3000:]}"
        for i, f in enumerate(finished)
    )
    raise AssertionError(report)
