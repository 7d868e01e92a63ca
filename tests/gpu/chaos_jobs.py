"""Jobs whose processes are stopped and killed at random (chaos.py), and what came of them.

Each job is a process per GPU that repeats a checked step (chaos_rank.py). Ranks are stopped for random times, a few
times each job; then one is killed. Every survivor must then end by itself within ten seconds, with an error that names
that rank, and must never have seen a wrong row that was not poison.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from tests.gpu import processes
from tools.children import bound

START_S = 120.0
NAMED_S = 10.0


@dataclasses.dataclass
class Tally:
    jobs: int = 0
    kills: int = 0
    stalls: int = 0
    steps: int = 0
    slowest_s: float = 0.0
    """From a kill to the last survivor's error."""
    faults: list[str] = dataclasses.field(default_factory=list)
    not_started: list[str] = dataclasses.field(default_factory=list)
    """Jobs that ended with an error before the first step; nothing was killed in them."""

    def add(self, other: Tally) -> None:
        for name in ("jobs", "kills", "stalls", "steps", "faults", "not_started"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest_s = max(self.slowest_s, other.slowest_s)


class Rank:
    """A process of a job, and the lines that it prints."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            bound(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(("ready", "{")):  # libraries print too
                self._lines.put(line.strip())
        self._lines.put("")

    def line(self, seconds: float) -> str:
        """ "" when the process has ended, or said nothing in time."""
        try:
            return self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return ""

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-600:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def start(count: int, order: list[int], *extra: str, environment: dict[str, str]) -> list[Rank]:
    program = [sys.executable, "-m", "tests.gpu.chaos_rank", "--order", ",".join(map(str, order))]
    program += ["--coordinator", f"127.0.0.1:{processes.free_port()}", "--num_processes", str(count), *extra]
    return [Rank([*program, "--process_id", str(p)], environment) for p in range(count)]


def shuffled(rng: random.Random, count: int, per_node: int) -> list[int]:
    """Processes in rank order: a node's stay together, as their numbers do."""
    nodes = [rng.sample(range(first, first + per_node), per_node) for first in range(0, count, per_node)]
    rng.shuffle(nodes)
    return [process for node in nodes for process in node]


def one_job(
    rng: random.Random,
    count: int,
    stalls: int,
    kill: bool,
    *extra: str,
    environment: dict[str, str],
    per_node: int | None = None,
) -> Tally:
    tally = Tally(jobs=1)
    order = shuffled(rng, count, per_node or count)
    if per_node:
        extra = (*extra, "--ranks_per_node", str(per_node))
    running = start(count, order, *extra, environment=environment)
    name = f"ranks on processes {order}"
    try:
        for p, rank in enumerate(running):
            if rank.line(START_S) != "ready":
                ended = rank.process.poll() is not None
                (tally.not_started if ended else tally.faults).append(
                    f"{name}: process {p} {'ended' if ended else 'hung'} before its first step: {rank.last_words()}"
                )
                return tally
        for _ in range(stalls):
            time.sleep(rng.uniform(0.0, 0.2))
            victim = running[rng.randrange(count)]
            victim.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.01, 0.6))
            victim.signal(signal.SIGCONT)
            tally.stalls += 1
        time.sleep(rng.uniform(0.0, 0.5))
        dead = rng.randrange(1, count) if kill else None
        began = time.time()
        if dead is None:
            for rank in running:  # the ranks that remain after the first stop end with an error and do not hang
                rank.stop()
        else:
            running[dead].signal(signal.SIGKILL)
            tally.kills += 1
        for p, rank in enumerate(running):
            if p == dead:
                continue
            line = rank.line(NAMED_S + 5.0 - (time.time() - began) if dead is not None else 60.0)
            if not line:
                after = f"process {dead} died" if kill else "the end"
                tally.faults.append(f"{name}: process {p} says nothing after {after}: {rank.last_words()}")
                continue
            result = json.loads(line)
            tally.steps += result["steps"]
            if result["wrong"]:
                tally.faults.append(f"{name}: process {p}: {result['wrong']} wrong elements")
            if dead is None:
                continue
            tally.slowest_s = max(tally.slowest_s, result["at"] - began)
            wanted = f"rank {order.index(dead)} ("
            if wanted not in result["failure"] or "has ended" not in result["failure"]:
                tally.faults.append(f"{name}: process {p} should name {wanted}...): {result['failure'][:300]!r}")
            if result["at"] - began > NAMED_S:
                tally.faults.append(f"{name}: process {p} took {result['at'] - began:.1f} s")
        return tally
    finally:
        for rank in running:
            rank.end()


def run(
    count: int,
    kills: int,
    stalls: int,
    seconds: float,
    *extra: str,
    environment: dict[str, str],
    seed: int = 0,
    together: int = 1,
    per_node: int | None = None,
    report: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Runs jobs, `together` at a time, until there were `kills` and `stalls`, or `seconds` have passed. `report` gets
    the tally after every job."""
    tally, began = Tally(), time.monotonic()
    each = -(-stalls // max(1, kills))
    random_numbers = random.Random(seed)
    started = 0

    def wanted() -> bool:
        coming = started - tally.jobs
        enough = tally.kills + coming * bool(kills) >= kills and tally.stalls + coming * each >= stalls
        return (
            not enough
            and len(tally.faults) <= 5
            and len(tally.not_started) <= kills // 10
            and time.monotonic() - began < seconds
        )

    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        running: set[concurrent.futures.Future[Tally]] = set()
        while True:
            while len(running) < together and wanted():
                rng = random.Random(random_numbers.random())
                how = {"environment": environment, "per_node": per_node}
                running.add(pool.submit(one_job, rng, count, each, kills > 0, *extra, **how))
                started += 1
            if not running:
                return tally
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for job in done:
                tally.add(job.result())
                report(tally)
