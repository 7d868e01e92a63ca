"""Starts programs under a hard time limit: at the limit their whole process groups are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

from tests.support import ROOT
from tools.children import bound


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


_held_ports: list[IO[str]] = []


def free_port() -> int:
    """A TCP port for a server that another process starts: no other caller gets it while this process lives.

    Not one that the system gives out by itself: it could give it to another process before the server has started.
    """
    folder = pathlib.Path(tempfile.gettempdir()) / "xen_moe_jax_ports"
    folder.mkdir(exist_ok=True)
    ports = list(range(20000, 30000))  # below the ports that systems give to outgoing connections
    random.SystemRandom().shuffle(ports)
    for port in ports:
        claim = open(folder / str(port), "w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _held_ports.append(claim)
        return port
    raise OSError("no free port between 20000 and 30000")


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment, with the tests and the library importable, and `changes`."""
    path = dict.fromkeys([str(ROOT), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes


def run_all(
    commands: list[list[str]],
    *,
    seconds: float,
    env: dict[str, str] | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> list[Finished]:
    """Runs `commands` side by side; when one fails, the remaining ones get five more seconds, and none outlives
    `seconds`, or the moment at which `give_up()` is true.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        began = time.monotonic()
        running = [
            subprocess.Popen(bound(c), stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True)
            for c, log in zip(commands, logs, strict=True)
        ]
        ended = [0.0] * len(running)
        limit = began + seconds
        try:
            while any(p.poll() is None for p in running) and time.monotonic() < limit and not give_up():
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
