"""One process of tests/ffi/test_processes.py: symmetric memory over host memory, agreed with the other processes.

cuda_memory_worker.py SCENARIO STORE PROCESS COUNT: STORE is a folder, or HOST:PORT of `jax.distributed`. It prints one
line of JSON: the outcome and its time.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import threading
import time

from tests.support import memory_module
from xen_moe_jax.backends.cuda import agreement, liveness, processes

SMALL, LARGE = (1024, 8192, 512), (4096, 65536, 2048)
WAIT_S = 100.0
"""Seconds for what comes soon, unless a process starts late beside others."""


class FolderStore:
    """A key-value store that is a folder: a file for each key."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)

    def _path(self, key: str) -> pathlib.Path:
        return self._folder / key.replace("/", "~")

    def _write(self, value: bytes) -> pathlib.Path:
        part = self._folder / f"part-{os.getpid()}-{threading.get_ident()}"
        part.write_bytes(value)
        return part

    def set(self, key: str, value: bytes) -> None:
        self._write(value).rename(self._path(key))

    def set_once(self, key: str, value: bytes) -> bytes:
        part = self._write(value)
        try:
            self._path(key).hardlink_to(part)
        except FileExistsError:
            return self._path(key).read_bytes()
        finally:
            part.unlink()
        return value

    def get(self, key: str, seconds: float) -> bytes | None:
        limit = time.monotonic() + seconds
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= limit:
                    return None
                time.sleep(0.005)


def open_store(where: str, process: int, count: int) -> agreement.Store:
    if ":" not in where:
        return FolderStore(where)
    import jax

    from xen_moe_jax import _jax_internals

    jax.distributed.initialize(where, count, process)
    return agreement.JaxStore(_jax_internals.key_value_client())


class Rank:
    """This process in its job."""

    def __init__(self, where: str, process: int, count: int) -> None:
        self.process, self.count = process, count
        self.store = open_store(where, process, count)
        self.memory = memory_module.load()
        self.memory.configure(process, count, [p * self.memory.devices_per_process for p in range(count)])
        self.memory.set_provider(self.memory.fake_provider())
        self.watcher = processes.watch(self.memory, self.store, process, count)

    def wait_for_death(self, process: int, seconds: float = 60.0) -> None:
        """Waits until the watcher has noticed the death, or the time is up."""
        began = time.monotonic()
        while process not in self.watcher.dead() and time.monotonic() - began < seconds:
            time.sleep(0.01)

    def workspace(self, channel: int = 0):
        devices = [p * self.memory.devices_per_process for p in range(self.count)]
        return self.memory.workspace(devices, self.count, channel)

    def serve(self, workspace, needs, seconds: float = WAIT_S) -> str:
        """Returns the error of `serve`, or ""."""
        try:
            self.memory.serve(workspace, *needs, seconds)
        except RuntimeError as error:
            return str(error)
        return ""

    def listed(self) -> list[dict]:
        return [{k: w[k] for k in ("channel", "staging_bytes", "generation")} for w in self.memory.workspaces()]

    def agree_through(self, change) -> None:
        """Workspaces made from now on agree through `change(agree, key, vote, ...)`. Nothing has been agreed on yet."""
        agree = agreement.Agreement(self.store, self.process, self.count, self.watcher.dead)
        self.memory.set_agreement(functools.partial(change, agree))

    def meet(self, name: str) -> None:
        """Waits until all processes have called this, independent of the library under test."""
        self.store.set(f"meet/{name}/{self.process}", b"1")
        for p in range(self.count):
            assert self.store.get(f"meet/{name}/{p}", 300.0) is not None, f"process {p} did not come to {name}"


def load_programs(rank: Rank) -> dict:
    """Acts as processes that lowered nothing: each loads a small program and then a large one, and process 1 the other
    way round. The job and the memory between processes start when the first of them is loaded."""
    memory, calls = rank.memory, []
    memory.clear()

    def describe():
        calls.append("describe")
        memory.configure(rank.process, rank.count, [p * memory.devices_per_process for p in range(rank.count)])
        return True

    def start_memory():
        calls.append("start memory")
        memory.set_provider(memory.fake_provider())
        memory.set_agreement(agreement.Agreement(rank.store, rank.process, rank.count, rank.watcher.dead))

    memory.set_up_job(describe, start_memory)
    places = [-1 - i for i in range(rank.count)]
    order = (LARGE, SMALL) if rank.process == 1 else (SMALL, LARGE)
    errors = [rank.serve(memory.workspace(places, rank.count, 0), needs) for needs in order]
    return {"errors": errors, "calls": calls, "listed": rank.listed()}


def grow(rank: Rank) -> dict:
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL), rank.serve(workspace, LARGE)]
    return {"errors": errors, "listed": rank.listed()}


def grow_each_on_its_own_gpu_zero(rank: Rank) -> dict:
    """Processes that see one GPU each describe a mesh: their own GPU is number 0, and every other GPU has its number in
    the job."""
    per = rank.memory.devices_per_process
    keys = [p * per + (0 if p == rank.process else p) for p in range(rank.count)]
    workspace = rank.memory.workspace(keys, rank.count, 0)
    return {"errors": [rank.serve(workspace, SMALL), rank.serve(workspace, LARGE)], "listed": rank.listed()}


def different_needs(rank: Rank) -> dict:
    """All processes get the largest size that one of them asks for."""
    workspace = rank.workspace()
    needs = tuple(n * (1 + rank.process) for n in SMALL)
    return {"errors": [rank.serve(workspace, needs)], "listed": rank.listed()}


def one_cannot(rank: Rank) -> dict:
    """Process 1 has no memory for the second growth; then it has."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    held = rank.memory.held()
    rank.meet("before")
    if rank.process == 1:
        rank.memory.fail_after(0)
    second = rank.serve(workspace, LARGE)
    rank.memory.fail_after(-1)
    good = rank.memory.serves(workspace, *SMALL) and not rank.memory.serves(workspace, *LARGE)
    third = rank.serve(workspace, LARGE)
    return {"errors": [first, second, third], "kept": good, "held": held, "listed": rank.listed()}


def one_cannot_begin(rank: Rank) -> dict:
    """Process 1 has no memory at all for the first growth, at one call after the other; then it has."""
    workspace = rank.workspace()
    errors = []
    for call in range(6):
        rank.meet(f"call {call}")
        if rank.process == 1:
            rank.memory.fail_after(call)
        errors.append(rank.serve(workspace, SMALL))
        rank.memory.fail_after(-1)
    errors.append(rank.serve(workspace, SMALL))
    return {"errors": errors, "listed": rank.listed()}


def one_stays_away(rank: Rank) -> dict:
    """Process 1 does something else while the other processes grow their memory; later it joins, and all of them
    grow."""
    workspace = rank.workspace()
    first = ""
    if rank.process != 1:
        first = rank.serve(workspace, SMALL, 2.0)
    rank.meet("after")
    late = rank.serve(workspace, SMALL, 2.0) if rank.process == 1 else ""
    rank.meet("late")
    return {"errors": [first, late, rank.serve(workspace, SMALL)], "listed": rank.listed()}


def one_dies(rank: Rank) -> dict:
    """The test kills process 1 while the other processes wait for it."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    rank.meet("up")
    if rank.process == 1:
        print("ready", flush=True)
        time.sleep(600)
    print("ready", flush=True)
    began = time.monotonic()
    while not rank.memory.failure() and time.monotonic() - began < 60:
        time.sleep(0.01)
    named = time.time()
    second = rank.serve(workspace, LARGE, 300.0)
    return {"errors": [first, second], "failure": rank.memory.failure(), "named": named, "ended": time.time()}


def one_is_left_out(rank: Rank) -> dict:
    """The test kills process 1; the programs of the other processes take `active`, and these processes go on."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    rank.memory.leave_out_the_dead(workspace)
    rank.memory.set_epoch(workspace, 0, 100 + rank.process)
    rank.meet("up")
    print("ready", flush=True)
    if rank.process == 1:
        time.sleep(600)
    rank.wait_for_death(1)
    failure, dead = rank.memory.failure(), rank.memory.mailbox_dead(workspace, 0)
    rank.memory.fail(workspace, 0, {"cause": 3, "rank": 1, "other": rank.process})  # an operation has needed it
    rank.memory.reset(30.0)
    return {
        "errors": [first],
        "failure": failure,
        "dead": dead,
        "after": [rank.memory.failure(), rank.memory.mailbox_dead(workspace, 0), rank.memory.gone()],
        "epoch": rank.memory.epoch(workspace, 0),
    }


def one_stops(rank: Rank) -> dict:
    """Process 1 is stopped by the test for a while: slow, not dead."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    rank.meet("up")
    print("ready", flush=True)
    if rank.process == 1:
        time.sleep(0.5)  # the test stops it here
    second = rank.serve(workspace, LARGE, 60.0)
    return {"errors": [first, second], "failure": rank.memory.failure(), "dead": sorted(rank.watcher.dead())}


def one_leaves(rank: Rank) -> dict:
    """Process 1 ends in order: no failure is shown until an operation needs it."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    rank.meet("up")
    if rank.process == 1:
        return {"errors": [first]}
    began = time.monotonic()
    while not rank.watcher.dead() and time.monotonic() - began < 60:
        time.sleep(0.01)
    time.sleep(0.3)
    shown = rank.memory.failure()
    return {"errors": [first], "failure": shown, "word": rank.memory.mailbox_failure(workspace, 0)}


def two_threads(rank: Rank) -> dict:
    """Two channels grow at once, on every process in another order."""
    errors: dict[int, str] = {}

    def serve(channel: int) -> None:
        time.sleep(0.02 * ((channel + rank.process) % 3))
        for factor in (1, 2, 3):
            errors[10 * channel + factor] = rank.serve(rank.workspace(channel), tuple(n * factor for n in SMALL))

    threads = [threading.Thread(target=serve, args=(channel,)) for channel in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"errors": [errors[key] for key in sorted(errors)], "listed": rank.listed()}


def buffers(rank: Rank) -> dict:
    """Open, close, open: no process waits beyond the limit for memory that another one still holds."""
    workspace = rank.workspace()
    workspace.reserve(1 << 16, WAIT_S)
    first = rank.serve(workspace, SMALL)
    held = rank.memory.held()
    workspace.release(WAIT_S)
    freed = held - rank.memory.held()
    workspace.reserve(1 << 16, WAIT_S)
    second = rank.serve(workspace, SMALL)
    rank.meet("open")
    closing = ""
    began = time.monotonic()
    if rank.process == 0:
        try:
            workspace.release(1.0)
        except RuntimeError as error:
            closing = str(error)
    return {"errors": [first, second], "freed": freed, "closing": closing, "seconds": time.monotonic() - began}


def busy_buffer(rank: Rank) -> dict:
    """Close while process 0's GPU is busy: its memory stays until it is not."""
    workspace = rank.workspace()
    workspace.reserve(1 << 16, WAIT_S)
    first = rank.serve(workspace, SMALL)
    held = rank.memory.held()
    rank.memory.set_busy(rank.process == 0)
    workspace.release(2.0)
    closed = rank.memory.held()
    rank.memory.set_busy(False)
    limit = time.monotonic() + WAIT_S
    while rank.process == 0 and rank.memory.held() == held and time.monotonic() < limit:
        time.sleep(0.01)
    return {"errors": [first], "freed": held - closed, "freed_later": closed - rank.memory.held()}


def reset(rank: Rank) -> dict:
    """After a failure and a reset all processes begin again under one number."""
    workspace = rank.workspace()
    first = rank.serve(workspace, SMALL)
    rank.memory.set_epoch(workspace, 0, 100 + rank.process)
    rank.memory.fail(workspace, 0, {"cause": 1, "rank": 2, "other": 0, "epoch": 100})
    failed = rank.memory.failure()
    rank.meet("failed")
    rank.memory.reset(WAIT_S)
    return {
        "errors": [first],
        "failed": failed,
        "failure": rank.memory.failure(),
        "epoch": rank.memory.epoch(workspace, 0),
    }


FOREIGN_VOTES = (
    b"",
    b"error no room left",
    b"ok 1024 8192 512 0 1 3 4",
    b"ok flag_bytes=1024 data_bytes=8192 scratch_bytes=512 colour=3",
    b"ok flag_bytes=1024 data_bytes=many scratch_bytes=512",
    b"ok flag_bytes=1024 data_bytes=8192",
    b"1024 8192",
)


def foreign_votes(rank: Rank) -> dict:
    """Process 1 votes as other versions of the library might, in growths and in a reset, and then as this one."""
    votes: list[bytes] = []
    rank.agree_through(lambda agree, key, vote, *rest: agree(key, votes[-1] if votes else vote, *rest))
    workspace, errors = rank.workspace(), []
    for foreign in FOREIGN_VOTES:
        votes[:] = [foreign] if rank.process == 1 else []
        errors.append(rank.serve(workspace, SMALL))
    kept = not rank.memory.serves(workspace, *SMALL)
    votes[:] = []
    errors.append(rank.serve(workspace, SMALL))
    votes[:] = FOREIGN_VOTES[2:3] if rank.process == 1 else []
    try:
        rank.memory.reset(WAIT_S)
        errors.append("")
    except RuntimeError as error:
        errors.append(str(error))
    votes[:] = []
    rank.memory.reset(WAIT_S)
    return {"errors": errors, "kept": kept, "listed": rank.listed()}


def late_turn(rank: Rank) -> dict:
    """The ticket before that of a close ends in no process before the close gives up."""
    swapped = {4: 5, 5: 4}  # a growth takes the first three

    def swap(agree, *arguments):
        ticket, *rest = agree(*arguments)
        return swapped.get(ticket, ticket), *rest

    rank.agree_through(swap)
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL)]
    rank.meet("close")
    try:
        workspace.release(2.0)
    except RuntimeError as error:
        errors.append(str(error))
    errors.append(rank.serve(workspace, SMALL))
    workspace.release(WAIT_S)
    return {"errors": errors}


def main() -> None:
    scenario, where, process, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    liveness.POLL_S = 0.1
    rank = Rank(where, process, count)
    began = time.monotonic()
    result = globals()[scenario](rank)
    print(json.dumps(result | {"seconds": result.get("seconds", time.monotonic() - began)}), flush=True)
    if scenario != "one_leaves":
        rank.store.set(f"end/{process}", b"1")
        for p in range(count):
            if p not in rank.watcher.dead():
                rank.store.get(f"end/{p}", 30.0)


if __name__ == "__main__":
    main()
