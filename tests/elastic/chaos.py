"""Members that are killed at any moment and come back, as processes without JAX programs: they exchange through a group
and check every value. A process costs milliseconds here, so that hundreds can be killed.

    python -m tests.elastic.chaos --ranks 4 --kills 500 --seed 1 [--stops]

With `--stops`, members are also stopped at any moment, and wake before or after the others have gone on without them.
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
LONG_S, SHORT_S = 30.0, 1.0
"""Time limits of a group: without and with members that are stopped."""
LEFT_OUT = 3
"""Exit status of a member without which the others went on."""
WORDS = 8
"""Words of each rank in shared memory: the number of steps that it has committed, and in nanoseconds the times of the
last commit, of its being ready and of its being let in, and its longest stop at a boundary."""


def array_of(step: int, rank: int, to: int = -1) -> np.ndarray:
    """Returns the array that `rank` sends in `step`, int64 `[6]`: to all ranks, or to rank `to`."""
    return np.arange(6, dtype=np.int64) + 1000 * step + 10 * rank + 100_000_000 * (to + 1)


def placement_of(slots: int) -> balance.Placement:
    return balance.plan(np.ones(EXPERTS), num_ranks=slots, slots_per_rank=SLOTS_OF_A_RANK)


def member(folder: str, slots: int, slot: int, start_with: int, words: memoryview, seed: int, timeout_s: float) -> None:
    """Runs the process of one rank, which never ends by itself, unless the others go on without it."""
    try:
        _member(folder, slots, slot, start_with, words, seed, timeout_s)
    except elastic.Evicted:
        os._exit(LEFT_OUT)


def _member(
    folder: str, slots: int, slot: int, start_with: int, words: memoryview, seed: int, timeout_s: float
) -> None:
    rng = random.Random(seed)
    own = words[slot * WORDS : (slot + 1) * WORDS]
    group = elastic.Group(folder, slots, slot=slot, placement=placement_of(slots), timeout_s=timeout_s)
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

    def check(found: int) -> None:
        """All members see a death in the same exchange: none is ahead. One that was stopped may be a step behind."""
        assert found == step or (found == step - 1 and timeout_s == SHORT_S), (found, step)

    step = adopt(change)
    while True:
        began = time.monotonic_ns()
        if (change := group.boundary(step)) is not None:
            check(change.step)
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
            check(change.step)
            step = adopt(change)
            continue
        for rank in range(slots):
            assert (gathered[rank] == (array_of(step, rank) if active[rank] else 0)).all(), (step, rank, gathered)
            assert (scattered[rank] == (array_of(step, rank, slot) if active[rank] else 0)).all(), (step, rank)
        if rng.random() < 0.02:  # also while a change is on its way, or another member asks for another placement
            group.rebalance(balance.plan(rng.choices(range(9), k=EXPERTS), slots, SLOTS_OF_A_RANK, alive=active))
        step += 1
        own[COMMITTED], own[WHEN] = step, time.monotonic_ns()


LEAST_STOPS = 4
"""With stops: on a busy machine the kills alone may be done before a member has been stopped."""


def run(
    slots: int,
    kills: int,
    seed: int,
    joins: int | None = None,
    least: int = 2,
    seconds: float = 1e9,
    stops: bool = False,
) -> dict:
    """Kills members at random moments, and starts others in their slots, until `kills` have died. `stops`: stops others
    for a while, `LEAST_STOPS` at least.

    Returns:
      kills, joins, steps; stops and left_out: members that were stopped, and that ended for it; pause_s and let_in_s:
      lists of seconds from a kill to the next step of all that are left, and from a newcomer's being ready to its being
      let in; stopped_s: the longest stop for a newcomer.

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
        limit = SHORT_S if stops else LONG_S
        arguments = (os.path.join(folder, "group"), slots, slot, start_with, words, rng.randrange(1 << 30), limit)
        processes[slot] = fork.Process(target=member, args=arguments)
        processes[slot].start()

    def entered() -> list[int]:
        return [slot for slot in processes if words[slot * WORDS + ENTERED]]

    def forget_the_left_out() -> None:
        for slot, process in list(processes.items()):
            if not process.is_alive():
                of_stops = (LEFT_OUT, -signal.SIGKILL) if stops else ()  # one that is stopped with the lock is killed
                assert process.exitcode in of_stops, f"rank {slot} has ended by itself with {process.exitcode}"
                del processes[slot]
                waiting.discard(slot)
                count["left_out"] += 1

    def until(what, seconds: float = 60.0) -> None:
        limit = time.monotonic() + seconds
        while not what():
            forget_the_left_out()
            assert time.monotonic() < limit, (what, [words[i] for i in range(WORDS * slots)], dict(count))
            time.sleep(0.0005)

    waiting: set[int] = set()
    try:
        for slot in range(slots):
            start(slot, slots)
        until(lambda: len(entered()) == len(processes))
        began = time.monotonic()
        wanted = {"kills": kills} | ({"stops": LEAST_STOPS} if stops else {})
        while any(count[kind] < number for kind, number in wanted.items()) and time.monotonic() - began < seconds:
            time.sleep(rng.random() * 0.03)
            forget_the_left_out()
            spare = len(entered()) - least
            if spare > 0 and rng.random() < (0.3 if stops else 0.7):
                for slot in rng.sample(sorted(processes), min(1 + (rng.random() < 0.2), spare)):
                    os.kill(processes[slot].pid, signal.SIGKILL)
                    processes.pop(slot).join()
                    waiting.discard(slot)
                    count["kills"] += 1
                killed = time.monotonic_ns()
                steady = {slot: processes[slot] for slot in entered() if slot not in waiting}
                until(
                    lambda: (
                        len(processes) < least  # those that are left cannot hold all experts: they wait for others
                        or all(
                            words[slot * WORDS + WHEN] > killed or processes.get(slot) is not process  # noqa: B023
                            for slot, process in steady.items()  # noqa: B023
                        )
                    )
                )
                found["pause_s"].append((time.monotonic_ns() - killed) / 1e9)
            elif stops and spare > 0 and rng.random() < 0.5:
                process = processes[rng.choice(sorted(processes))]
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(rng.choice((0.002, 0.02, SHORT_S, 2 * SHORT_S, 3 * SHORT_S)))
                os.kill(process.pid, signal.SIGCONT)
                count["stops"] += 1
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
    parser.add_argument("--stops", action="store_true")
    given = parser.parse_args()
    figures = run(given.ranks, given.kills, given.seed, stops=given.stops)
    for name in ("pause_s", "let_in_s"):
        values = np.asarray(figures.pop(name))
        shares = {"median": 0.5, "99 %": 0.99, "most": 1.0}
        figures[name] = {which: round(float(np.quantile(values, share)), 4) for which, share in shares.items()}
    print(figures)


if __name__ == "__main__":
    assert pathlib.Path("tests").is_dir(), "run it in a checkout"
    sys.exit(main())
