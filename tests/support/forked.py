"""Programs that begin with their imports made: forks of a process that has imported jax and started nothing of it.

An import costs each of three to six processes of a test a second of a core.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from tools.children import PR_SET_PDEATHSIG, bound

CONTEXT = multiprocessing.get_context("forkserver")


def _program(module: str, arguments: list[str], environment: dict[str, str], streams: list[Connection]) -> None:
    """Runs `main()` of a module as `python -m` would, and ends as a program does: with the functions of `atexit`."""
    # The fork ends with the process that forks, which ends with the one that runs the tests.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        importlib.import_module(module).main()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


class Program:
    """A process that runs `main()` of a module, with what `subprocess.Popen` has of it."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        CONTEXT.set_forkserver_preload([module])  # for the first program of this process, which starts the forking one
        ends = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        written = [end for _, end in ends]
        self._process = CONTEXT.Process(target=_program, args=(module, arguments, environment, written))
        self._process.start()
        for end in written:
            end.close()
        self.stdout, self.stderr = (open(os.dup(end.fileno())) for end, _ in ends)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)

    def communicate(self, timeout: float) -> list[str]:
        """Returns what is left of both streams when the process has ended; at the limit it is killed."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        with concurrent.futures.ThreadPoolExecutor(2) as readers:
            texts = list(readers.map(lambda stream: stream.read(), (self.stdout, self.stderr)))
        self.wait(timeout)
        late.cancel()
        return texts


def anew(module: str, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Returns the process of `python -m module`, which makes its own imports."""
    command = bound([sys.executable, "-m", module, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
