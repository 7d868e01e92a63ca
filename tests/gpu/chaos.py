"""Stops and kills processes at random: the remaining ranks wait for a stopped rank, and each of them names a killed
one.

Each job is a process per GPU that repeats a checked step. Ranks are stopped for random times, a few times each job;
then one is killed. Every survivor must then end by itself within ten seconds, with an error that names that rank, and
must never have seen a wrong row that was not poison.

    python tests/gpu/chaos.py --ranks 4 --kills 40 --stalls 200 --together 6 --seconds 900

Starting a job takes most of its time, so several run side by side on the same GPUs. With `--gpus` fewer than ranks, the
processes of a job share GPUs too, in turns that the driver deals out: a job of four then needs only one, and a step
takes some 15 ms.

Process 0 is not killed: it keeps `jax.distributed`'s service, and JAX ends every process that loses it. The ranks are
in another order in each job, so that every rank is killed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

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
    program = [
        sys.executable,
        str(pathlib.Path(__file__).with_name("chaos_rank.py")),
        "--order",
        ",".join(map(str, order)),
    ]
    program += ["--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", str(count), *extra]
    return [Rank([*program, "--process-id", str(p)], environment) for p in range(count)]


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
        extra = (*extra, "--ranks-per-node", str(per_node))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--stalls", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=900.0, help="no further job is started after this long")
    parser.add_argument("--together", type=int, default=1, help="jobs side by side on the same GPUs")
    parser.add_argument("--gpus", type=int, help="that the ranks share (default: one each)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks-per-node", type=int, help="of virtual nodes (virtual_nodes.py)")
    parser.add_argument("--network", default="", help="between them")
    parser.add_argument("--json")
    options = parser.parse_args()
    gpus = options.gpus or options.ranks
    on_each = options.together * -(-options.ranks // gpus)
    share = f"{0.2 if on_each == 1 else min(0.08, 0.6 / on_each):.3f}"
    environment = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION=share)
    limits = options.ranks, options.kills, options.stalls, options.seconds

    def report(tally: Tally) -> None:  # after every job, so that a run that is stopped half way leaves its results
        summary = dataclasses.asdict(tally) | {"ranks": options.ranks, "gpus": gpus, "together": options.together}
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")

    shared = "--gpus", str(gpus)
    if options.network:
        shared = (*shared, "--network", options.network)
    how = {"seed": options.seed, "together": options.together, "per_node": options.ranks_per_node, "report": report}
    tally = run(*limits, *shared, environment=environment, **how)
    print(json.dumps(dataclasses.asdict(tally), indent=1))
    return int(bool(tally.faults) or not tally.kills)


if __name__ == "__main__":
    sys.exit(main())
