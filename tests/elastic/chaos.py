"""Members that are killed at any moment and come back, as processes without JAX programs: they exchange through a group
and check every value. A process costs milliseconds here, so that hundreds can be killed.

    python -m tests.elastic.chaos --ranks 4 --kills 500 --seed 1
"""

import argparse
import collections
import contextlib
import mmap
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

import numpy as np

from xen_moe_jax import balance, elastic

SLOTS_OF_A_RANK, EXPERTS = 4, 8
COMMITTED, WHEN, READY, ENTERED, STOPPED = range(5)
WORDS = 8
"""Words of each rank in shared memory: the number of steps that it has committed, and in nanoseconds the times of the
last commit, of its being ready and of its being let in, and its longest stop at a boundary."""


def array_of(step: int, rank: int, to: int = -1) -> np.ndarray:
    """Returns the array that `rank` sends in `step`, int64 `[6]`: to all ranks, or to rank `to`."""
    return np.arange(6, dtype=np.int64) + 1000 * step + 10 * rank + 100_000_000 * (to + 1)


def placement_of(slots: int) -> balance.Placement:
    return balance.plan(np.ones(EXPERTS), num_ranks=slots, slots_per_rank=SLOTS_OF_A_RANK)


def member(folder: str, slots: int, slot: int, start_with: int, words: memoryview, seed: int) -> None:
    """Runs the process of one rank, which ends with status 0 at SIGTERM, and never by itself."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    rng = random.Random(seed)
    own = words[slot * WORDS : (slot + 1) * WORDS]
    group = elastic.Group(folder, slots, slot=slot, placement=placement_of(slots), timeout_s=30.0)
    held = {slot: int(e) for slot, e in enumerate(group.experts)}
    own[ENTERED], own[READY] = 0, time.monotonic_ns()
    change = group.join(start_with=start_with, timeout_s=120.0)
    own[ENTERED] = time.monotonic_ns()

    def adopt(change: elastic.Change) -> int:
        held.update(change.fetch)
        wanted = {slot: int(e) for slot, e in enumerate(group.experts)}
        assert all(held[s] == e for s, e in wanted.items() if e >= 0), (held, wanted, change)
        assert (np.asarray(group.placement.num_replicas) > 0).all(), "an expert is nowhere"
        assert not (np.asarray(group.placement.experts)[~group.active()] >= 0).any()
        return change.step

    step = adopt(change)
    while True:
        began = time.monotonic_ns()
        if (change := group.boundary(step)) is not None:
            assert change.step == step, (change, step)
            step = adopt(change)
            own[STOPPED] = max(own[STOPPED], time.monotonic_ns() - began)
        active = group.active()
        gathered = group.exchange("gather", 1, array_of(step, slot))
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.003)
        everything = np.stack([array_of(step, slot, to) for to in range(slots)])
        scattered = group.exchange("scatter", 2, everything)
        if not group.good("step", active):
            change = group.recover(step)
            assert change.step == step, (change, step)  # all members see a death in the same exchange: none is ahead
            step = adopt(change)
            continue
        for rank in range(slots):
            assert (gathered[rank] == (array_of(step, rank) if active[rank] else 0)).all(), (step, rank, gathered)
            assert (scattered[rank] == (array_of(step, rank, slot) if active[rank] else 0)).all(), (step, rank)
        step += 1
        own[COMMITTED], own[WHEN] = step, time.monotonic_ns()


def run(slots: int, kills: int, seed: int, joins: int | None = None, least: int = 2, seconds: float = 1e9) -> dict:
    """Kills members at random moments, and starts others in their slots, until `kills` have died.

    Returns:
      kills, joins, steps; pause_s and let_in_s: lists of seconds from a kill to the next step of all that are left,
      and from a newcomer's being ready to its being let in; stopped_s: the longest stop for a newcomer.

    Raises:
      AssertionError: a member ended by itself, or the group stood still.
    """
    rng = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="xen_moe_chaos_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    shared = mmap.mmap(-1, 8 * WORDS * slots)
    words = memoryview(shared).cast("Q")
    fork = multiprocessing.get_context("fork")
    processes: dict[int, multiprocessing.process.BaseProcess] = {}
    found = collections.defaultdict(list)
    count = collections.Counter()

    def start(slot: int, start_with: int = 1) -> None:
        words[slot * WORDS + ENTERED] = words[slot * WORDS + READY] = 0
        arguments = (os.path.join(folder, "group"), slots, slot, start_with, words, rng.randrange(1 << 30))
        processes[slot] = fork.Process(target=member, args=arguments)
        processes[slot].start()

    def entered() -> list[int]:
        return [slot for slot in processes if words[slot * WORDS + ENTERED]]

    def until(what, seconds: float = 60.0) -> None:
        limit = time.monotonic() + seconds
        while not what():
            for slot, process in processes.items():
                assert process.is_alive(), f"rank {slot} has ended by itself with {process.exitcode}"
            assert time.monotonic() < limit, (what, [words[i] for i in range(WORDS * slots)], dict(count))
            time.sleep(0.0005)

    try:
        for slot in range(slots):
            start(slot, slots)
        until(lambda: len(entered()) == slots)
        began = time.monotonic()
        waiting: set[int] = set()
        while count["kills"] < kills and time.monotonic() - began < seconds:
            time.sleep(rng.random() * 0.03)
            spare = len(entered()) - least
            if spare > 0 and rng.random() < 0.7:
                for slot in rng.sample(sorted(processes), min(1 + (rng.random() < 0.2), spare)):
                    os.kill(processes[slot].pid, signal.SIGKILL)
                    processes.pop(slot).join()
                    waiting.discard(slot)
                    count["kills"] += 1
                killed = time.monotonic_ns()
                steady = [slot for slot in entered() if slot not in waiting]
                until(lambda: all(words[slot * WORDS + WHEN] > killed for slot in steady))  # noqa: B023
                found["pause_s"].append((time.monotonic_ns() - killed) / 1e9)
            elif len(processes) < slots and (joins is None or count["joins"] < joins):
                slot = rng.choice([slot for slot in range(slots) if slot not in processes])
                start(slot)
                count["joins"] += 1
                waiting.add(slot)
            for slot in list(waiting):
                if words[slot * WORDS + ENTERED]:
                    waiting.discard(slot)
                    found["let_in_s"].append((words[slot * WORDS + ENTERED] - words[slot * WORDS + READY]) / 1e9)
        until(lambda: len(entered()) == len(processes))
        now = time.monotonic_ns()
        until(lambda: all(words[slot * WORDS + WHEN] > now for slot in processes))
        steps = {words[slot * WORDS + COMMITTED] for slot in processes}
        stopped = max(words[slot * WORDS + STOPPED] for slot in range(slots)) / 1e9
        return {**count, "steps": max(steps), **found, "stopped_s": stopped, "seconds": time.monotonic() - began}
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    figures = run(given.ranks, given.kills, given.seed)
    for name in ("pause_s", "let_in_s"):
        values = np.asarray(figures.pop(name))
        shares = {"median": 0.5, "99 %": 0.99, "most": 1.0}
        figures[name] = {which: round(float(np.quantile(values, share)), 4) for which, share in shares.items()}
    print(figures)


if __name__ == "__main__":
    assert pathlib.Path("tests").is_dir(), "run it in a checkout"
    sys.exit(main())
