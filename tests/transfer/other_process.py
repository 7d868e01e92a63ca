"""Another process with an engine, made from a server that has imported JAX already, and driven over a pipe."""

import multiprocessing
import os
import pathlib
import signal
import time

from tests.transfer import transfer_sides

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jax", "numpy", "xen_moe_jax.transfer", "tests.transfer.transfer_sides"])
LIMIT_S = 300


class Other:
    """`call` runs a function of `transfer_sides` there, with its engine; `start` and `result` do this in two steps."""

    def __init__(self, name, **options):
        self.connection, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=transfer_sides.serve, args=(there, name, options), daemon=True)
        self.process.start()
        there.close()
        self.name = name
        self.descriptor = self.result()

    def start(self, function, *arguments):
        self.connection.send((function, arguments))

    def result(self, limit=LIMIT_S):
        if not self.connection.poll(limit):
            raise AssertionError(f"{self.name} did not answer within {limit} s")
        ok, value = self.connection.recv()
        if not ok:
            raise value
        return value

    def call(self, function, *arguments):
        self.start(function, *arguments)
        return self.result()

    def kill(self):
        self.process.kill()
        self.process.join(60)

    def pause(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + 60
        while {path.read_text().rpartition(")")[2].split()[0] for path in self._threads()} != {"T"}:
            assert time.monotonic() < until, "the process did not stop"

    def _threads(self):
        return pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/stat")

    def resume(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self):
        self.kill()
        self.connection.close()


class Others:
    """Starts other processes that are connected to `engine`, all with the same `options`, and ends them at the end."""

    def __init__(self, engine, **options):
        self._engine, self._options, self._started = engine, options, []

    def __call__(self, name="there", connected=True, **options):
        other = Other(name, **self._options, **options)
        self._started.append(other)
        if connected:
            other.call("connect", self._engine.descriptor)
        return other

    def end(self):
        for other in self._started:
            other.end()
