"""One process of tests/ffi/test_nccl.py: memory between processes as `processes.start_memory` makes it with NCCL, over
tests/native/fakes/fake_nccl.cc and a folder in place of `jax.distributed`'s store.

nccl_memory_worker.py SCENARIO FOLDER PROCESS COUNT, with NCCL_HOME set. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any

from tests.support import cuda_memory_worker, fake_nccl, memory_module
from tests.support.cuda_memory_worker import LARGE, SMALL, WAIT_S
from xen_moe_jax.backends.cuda import liveness, processes


class FolderClient:
    """Stands in for the client of `jax.distributed`, with a folder as the store."""

    def __init__(self, folder: str) -> None:
        self.store = cuda_memory_worker.FolderStore(folder)

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        self.store.set(key, value)

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        value = self.store.get(key, milliseconds / 1000)
        if value is None:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return value


class Rank(cuda_memory_worker.Rank):
    """This process in its job; ranks run against the order of the processes."""

    def __init__(self, folder: str, process: int, count: int) -> None:
        self.process, self.count = process, count
        client = FolderClient(folder)
        self.store = client.store
        self.memory = memory_module.load()
        self.memory.configure(process, count, [p * self.memory.devices_per_process for p in range(count)])
        self.watcher = processes.start_memory(self.memory, client, process, count, 0)
        self.nccl = fake_nccl.Knobs(os.environ["NCCL_HOME"])
        self.rank = count - 1 - process

    def workspace(self, channel: int = 0, ranks_per_node: int = 0, flights: bool = False):
        devices = [p * self.memory.devices_per_process for p in reversed(range(self.count))]
        make = self.memory.flights if flights else self.memory.workspace
        return make(devices, self.count, channel, ranks_per_node)

    def see_each_other(self, workspace, name: str) -> bool:
        """Every rank writes a word into the memory of every other rank, and finds the words of all ranks in its own
        memory.
        """
        own = [self.nccl.owns(self.memory.staging_address(workspace, other)) for other in range(self.count)]
        offset = SMALL[0]
        for other in range(self.count):
            self.memory.put(workspace, other, offset + 4 * self.rank, 100 * self.rank + other)
        self.meet(f"written {name}")
        found = [self.memory.get(workspace, self.rank, offset + 4 * other) for other in range(self.count)]
        self.meet(f"read {name}")
        mine = own == [other == self.rank for other in range(self.count)]
        return mine and found == [100 * other + self.rank for other in range(self.count)]


def grow(rank: Rank) -> dict:
    """Grows; fails to grow because one process gets no memory, at one call after the other; grows on another channel;
    closes; meets a GPU that shares no NVLink, and GPUs without any windows.
    """
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL)]
    seen = [rank.see_each_other(workspace, "first")]
    lacking, kept = [], []
    windows, blocks = rank.nccl.get("windows"), rank.nccl.get("blocks")
    for channel, call in ((1, 0), (1, 1), (0, 0)):  # a mailbox; the staging area behind it; one that is to be larger
        rank.meet(f"lack {channel} {call}")
        rank.nccl.set("full", 1 - call)
        if rank.process == 1:
            rank.nccl.set("fail_alloc", call)
        lacking.append(rank.serve(rank.workspace(channel), LARGE))
        rank.nccl.set("fail_alloc", -1)
        kept.append([rank.nccl.get("windows") - windows, rank.nccl.get("blocks") - blocks])
    errors.append(rank.serve(workspace, LARGE))
    seen.append(rank.see_each_other(workspace, "second"))
    errors.append(rank.serve(rank.workspace(1), tuple(n * (1 + rank.process) for n in SMALL)))
    listed = rank.listed()
    grown = rank.nccl.get("windows")
    workspace.release(WAIT_S)
    closed = rank.nccl.get("windows")
    rank.nccl.set("far_rank", 1)
    far = rank.serve(rank.workspace(2), SMALL)
    rank.nccl.set("far_rank", -1)
    rank.nccl.set("no_windows", 1)
    return {
        "errors": errors,
        "seen": seen,
        "lacking": lacking,
        "kept": kept,
        "listed": listed,
        "kinds": [w["memory"] for w in rank.memory.workspaces()],
        "windows": [windows, grown, closed],
        "unreachable": [far, rank.serve(rank.workspace(2), SMALL), rank.serve(rank.workspace(1), LARGE)],
    }


def wait_for_the_dead(rank: Rank, workspace: Any, needs: tuple) -> tuple[str, float]:
    """Process 1 stays inside NCCL until the test kills it. Returns the error of growth in the other processes, and its
    time."""
    if rank.process == 1:
        rank.nccl.set("stall", 1)
    print("ready", flush=True)
    began = time.monotonic()
    return rank.serve(workspace, needs, 300.0), time.monotonic() - began


def one_dies(rank: Rank) -> dict:
    """The test kills process 1 while the other processes wait for it inside NCCL, which does not notice in process
    2."""
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL)]
    rank.nccl.set("deaf", int(rank.process == 2))
    rank.meet("up")
    error, waited = wait_for_the_dead(rank, workspace, LARGE)
    errors.append(error)
    began = time.monotonic() - waited
    while not rank.memory.failure() and time.monotonic() - began < 60:
        time.sleep(0.01)
    serves = rank.memory.serves(workspace, *SMALL) and not rank.memory.serves(workspace, *LARGE)
    began, closing = time.monotonic(), ""
    try:
        workspace.release(60.0)
    except RuntimeError as error:
        closing = str(error)
    return {
        "errors": errors,
        "failure": rank.memory.failure(),
        "waited": waited,
        "serves": serves,
        "closing": closing,
        "seconds": time.monotonic() - began,
        "aborted": rank.nccl.get("aborted"),
    }


def one_is_silent(rank: Rank) -> dict:
    """Process 1 gets stuck inside NCCL, and no process dies. The old memory still serves, and nothing is added to
    it."""
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL)]
    rank.meet("up")
    if rank.process == 1:
        rank.nccl.set("stall", 1)
    errors.append(rank.serve(workspace, LARGE, 2.0))
    rank.meet("given up")
    rank.nccl.set("stall", 0)
    errors.append(rank.serve(workspace, LARGE))
    return {
        "errors": errors,
        "serves": rank.memory.serves(workspace, *SMALL) and not rank.memory.serves(workspace, *LARGE),
        "seen": rank.see_each_other(workspace, "after"),
        "aborted": rank.nccl.get("aborted"),
    }


def ends_inside(rank: Rank) -> dict:
    """A call of NCCL never ends. The processes give up, and each ends by itself, with a status of its own."""
    rank.nccl.set("stall", 2)
    rank.meet("up")
    print(rank.serve(rank.workspace(), SMALL, 2.0), file=sys.stderr)
    sys.exit(7)


# size, magic, version; then the words that differ between two requests
HEAD = struct.Struct("QII")
MAGIC = 0xCAFEBEEF


def join_devices(rank: Rank, asked: int = 0, seconds: float = WAIT_S) -> str | tuple[int, ...]:
    requirements = HEAD.pack(HEAD.size + 8, MAGIC, 23203) + struct.pack("Q", asked)
    try:
        made = rank.memory.nccl_join_devices(requirements, 64, seconds)
    except RuntimeError as error:
        return str(error)
    assert len(made) == 64
    return struct.unpack_from("ii", made)


def devices(rank: Rank) -> dict:
    """Device communicators beside windows; requests that differ; the memory that is left after that."""
    workspace = rank.workspace()
    errors = [rank.serve(workspace, SMALL)]
    asked = HEAD.pack(HEAD.size + 8, MAGIC, 23203) + bytes(8)
    properties = struct.unpack_from("ii", rank.memory.nccl_properties(asked), HEAD.size)
    made = [join_devices(rank), join_devices(rank, 7)]
    errors.append(rank.serve(workspace, LARGE))
    seen = rank.see_each_other(workspace, "between")
    different = join_devices(rank, 8 + rank.process)
    after = [join_devices(rank), rank.serve(rank.workspace(1), SMALL)]
    return {
        "errors": errors,
        "properties": properties,
        "made": made,
        "seen": seen,
        "different": different,
        "after": after,
        "serves": rank.memory.serves(workspace, *LARGE) and rank.see_each_other(workspace, "after"),
        "aborted": rank.nccl.get("aborted"),
    }


def one_dies_connecting(rank: Rank) -> dict:
    """The test kills process 1 while the other processes wait for its device communicator; process 2 gets no notice."""
    rank.nccl.set("deaf", int(rank.process == 2))
    rank.meet("up")
    if rank.process == 1:
        rank.nccl.set("stall", 1)
        print("ready", flush=True)
        join_devices(rank, 0, 300.0)
    print("ready", flush=True)
    began = time.monotonic()
    error = join_devices(rank, 0, 300.0)
    return {"error": error, "waited": time.monotonic() - began, "after": join_devices(rank)}


def put_and_look(rank: Rank, workspace, name: str, per_node: int = 2) -> bool:
    """Puts a word to the rank of the same place on each other node, through the window of the newest memory, and looks
    for their words in its own memory."""
    table = rank.memory.windows(workspace)
    offset = SMALL[0]
    others = [r for r in range(rank.rank % per_node, rank.count, per_node) if r != rank.rank]
    for other in others:
        place = offset + 4 * rank.rank
        rank.nccl.put(table["staging"], table["processes"][other], place, 100 * rank.rank + other)
    rank.meet(f"put {name}")
    found = [rank.memory.get(workspace, rank.rank, offset + 4 * other) for other in others]
    rank.meet(f"looked {name}")
    return found == [100 * other + rank.rank for other in others]


def nodes(rank: Rank) -> dict:
    """Two nodes of two: growth, growth that one process cannot make, puts in each memory, resets."""
    rank.nccl.set("node_ranks", 2)
    workspace = rank.workspace(0, 2)
    rank.meet("start")
    if rank.process == 1:
        rank.nccl.set("fail_alloc", 1)  # the staging area, behind a mailbox
    errors = [rank.serve(workspace, SMALL)]
    rank.nccl.set("fail_alloc", -1)
    errors.append(rank.serve(workspace, SMALL))
    seen = [put_and_look(rank, workspace, "small")]
    first = rank.memory.windows(workspace)
    needs = tuple(n * (3 if rank.process == 3 else 2) for n in SMALL)
    errors.append(rank.serve(workspace, needs))
    seen.append(put_and_look(rank, workspace, "larger"))
    second = rank.memory.windows(workspace)
    pointers = rank.memory.pointers_across(workspace)
    reset = []
    for _ in range(2):
        rank.memory.fail(workspace, 0, {"cause": 1, "rank": 0, "other": 1})
        failed = bool(rank.memory.failure())
        rank.memory.reset(WAIT_S)
        table = rank.memory.windows(workspace)
        reset.append([failed, rank.memory.failure(), table["base"], table["expected"]])
    errors.append(rank.serve(workspace, LARGE))
    seen.append(put_and_look(rank, workspace, "after resets"))
    # One process divides the ranks in another way: the other processes wait for it in vain.
    other = rank.serve(rank.workspace(1, 1 if rank.process == 0 else 2), SMALL, 3.0)
    rank.meet("cut")
    late = ""
    rank.memory.settle_late(rank.process == 2)
    try:
        rank.memory.reset(4.0)
    except RuntimeError as error:
        late = str(error)
    return {
        "errors": errors,
        "seen": seen,
        "windows": [first, second],
        "pointers": pointers,
        "settled": rank.memory.settled(),
        "reset": reset,
        "cut": other,
        "late": late,
        "kinds": [[w["memory"], w["ranks_per_node"]] for w in rank.memory.workspaces()],
    }


def flights_between_nodes(rank: Rank) -> dict:
    """Two nodes of two: memory, windows and a connection for asynchronous operations, beside those of synchronous ones;
    both begin again when one fails."""
    rank.nccl.set("node_ranks", 2)
    both = {"in flight": rank.workspace(0, 2, flights=True), "others": rank.workspace(0, 2)}
    errors = [rank.serve(workspace, SMALL) for workspace in both.values()]
    errors.append(rank.serve(both["in flight"], LARGE))
    seen = [put_and_look(rank, workspace, name) for name, workspace in both.items()]
    before = [rank.memory.windows(workspace) for workspace in both.values()]
    rank.memory.fail(both["in flight"], 0, {"cause": 1, "rank": 0, "other": 1})
    failed = rank.memory.admit(both["others"], 5)
    rank.memory.reset(WAIT_S)
    seen += [put_and_look(rank, workspace, f"{name} again") for name, workspace in both.items()]
    return {
        "errors": errors,
        "seen": seen,
        "connections": [table["connection"] for table in before],
        "mailboxes": len({table["mailbox"] for table in before}),
        "failed": failed,
        "settled": rank.memory.settled(),
        "failure": rank.memory.failure(),
        "kinds": [[w["flights"], w["memory"], w["ranks_per_node"]] for w in rank.memory.workspaces()],
    }


def node_dies(rank: Rank) -> dict:
    """The test kills process 1 while the other processes wait for it inside NCCL, for the connection of a group of two
    nodes."""
    rank.nccl.set("node_ranks", 2)
    workspace = rank.workspace(0, 2)
    rank.meet("up")
    error, waited = wait_for_the_dead(rank, workspace, SMALL)
    return {"error": error, "waited": waited}


def node_goes_on(rank: Rank) -> dict:
    """The test kills process 1. The programs of the other processes take `active`; these processes begin again without
    it, and each network owes signals to the remaining ranks alone."""
    rank.nccl.set("node_ranks", 2)
    workspace = rank.workspace(0, 2)
    first = rank.serve(workspace, SMALL)
    rank.memory.leave_out_the_dead(workspace)
    rank.memory.fail(workspace, 0, {"cause": 1, "rank": 0, "other": 1})
    rank.memory.reset(WAIT_S)
    without = [rank.memory.settled_without()]
    rank.meet("up")
    print("ready", flush=True)
    if rank.process == 1:
        time.sleep(600)
    rank.wait_for_death(1)
    rank.memory.fail(workspace, 0, {"cause": 3, "rank": 2, "other": rank.rank})  # an operation has needed it
    rank.memory.reset(30.0)
    without.append(rank.memory.settled_without())
    return {"error": first, "without": without, "settled": rank.memory.settled(), "failure": rank.memory.failure()}


def many_nodes(rank: Rank) -> dict:
    """Three nodes of six, whose tables are those of many ranks: puts in two memories; process 1, which is the last rank
    but one, is killed, and the other processes begin again without it."""
    rank.nccl.set("node_ranks", 6)
    workspace = rank.workspace(0, 6)
    errors = [rank.serve(workspace, SMALL)]
    assert errors == [""], errors
    seen = [put_and_look(rank, workspace, "small", 6)]
    errors.append(rank.serve(workspace, tuple(2 * n for n in SMALL)))
    seen.append(put_and_look(rank, workspace, "larger", 6))
    rank.memory.leave_out_the_dead(workspace)
    rank.meet("up")
    print("ready", flush=True)
    if rank.process == 1:
        time.sleep(600)
    rank.wait_for_death(1)
    rank.memory.fail(workspace, 0, {"cause": 3, "rank": rank.count - 2, "other": rank.rank})
    rank.memory.reset(60.0)
    table = rank.memory.windows(workspace)
    return {
        "errors": errors,
        "seen": seen,
        "processes": table["processes"],
        "pointers": rank.memory.pointers_across(workspace),
        "without": rank.memory.settled_without(),
        "counters": [table["base"], table["expected"]],
        "failure": rank.memory.failure(),
    }


def main() -> None:
    scenario, folder, process, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    liveness.POLL_S = 0.1
    rank = Rank(folder, process, count)
    result = globals()[scenario](rank)
    print(json.dumps(result), flush=True)
    rank.store.set(f"end/{process}", b"1")
    for p in range(count):
        while p not in rank.watcher.dead() and rank.store.get(f"end/{p}", 0.2) is None:
            pass
    os._exit(0)


if __name__ == "__main__":
    main()
