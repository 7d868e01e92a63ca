"""Moments that chance hardly ever hits: a process is killed or stopped between two stores, wakes late, or differs."""

import concurrent.futures
import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import xen_moe_jax as xm
from tests.elastic.test_members import FORK, steps, until
from tests.elastic.test_members import ranks as ranks  # a fixture
from xen_moe_jax import _primitive, _spec, elastic
from xen_moe_jax.backends.cuda import liveness, members, memory
from xen_moe_jax.elastic import _board, _membership, _rows

NAMES = iter(f"findings{i}" for i in range(1000))


@pytest.fixture
def open_group(tmp_path):
    """Yields `open_group(slots, **options)`, which opens a further group of this process in one folder."""
    with contextlib.ExitStack() as stack:
        yield lambda slots=3, **options: stack.enter_context(
            elastic.Group(tmp_path / "group", slots, axis_name=next(NAMES), **options)
        )


# -- the lock ----------------------------------------------------------------------------------------------------------


def hold_the_lock(folder, ready):
    with _board.Board(folder, 3, 60.0).locked():
        ready.set()
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_that_is_stopped_with_the_lock_is_ended(ranks, tmp_path):
    start, words = ranks
    started = [start(slot, 3, timeout_s=3.0) for slot in range(3)]
    until(lambda: min(words[0], words[2], words[4]) > 3)
    ready = FORK.Event()
    holder = FORK.Process(target=hold_the_lock, args=(tmp_path / "group", ready))
    holder.start()
    assert ready.wait(30)
    os.kill(started[1].pid, signal.SIGKILL)  # the others need the lock
    before = words[0]
    until(lambda: words[0] > before + 10 and words[4] > before + 10)
    holder.join(10)
    assert holder.exitcode == -signal.SIGKILL


def test_a_holder_that_cannot_be_ended_is_named(tmp_path, monkeypatch):
    board = _board.Board(tmp_path / "group", 3, 0.02)
    ready, holder = FORK.Event(), None
    try:
        holder = FORK.Process(target=hold_the_lock, args=(tmp_path / "group", ready))
        holder.start()
        assert ready.wait(30)
        monkeypatch.setattr(liveness, "end", lambda pid: False)
        with pytest.raises(
            TimeoutError, match=f"process {holder.pid}, or a child of it, has held the lock of .* 0.02 s"
        ):
            with board.locked():
                pass
        monkeypatch.setattr(liveness, "end", lambda pid: True)  # but a process that it has forked holds it
        with pytest.raises(TimeoutError, match=f"process {holder.pid}, or a child of it"):
            with board.locked():
                pass
        monkeypatch.setattr(_board, "_holder", lambda descriptor: None)
        with pytest.raises(TimeoutError, match="process unknown, or a child of it, has held the lock"):
            with board.locked():
                pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        board.close()


def test_the_next_one_tells_what_a_killed_process_had_written(open_group):
    group = open_group()
    assert group.join().view == 1
    board = group._board
    board.write({**board.read(), "proposal": 2, "urgent": 2})  # and was killed before it stored the words
    change = group.recover(7)
    assert (change.view, change.step) == (2, 7)
    assert board.words[_board.PROPOSAL] == board.words[_board.URGENT] == 2
    assert group.boundary(7) is None


@pytest.mark.parametrize("step", [1_764_000_000_000_000_000, 2**40 - 1, -1])
def test_a_step_that_the_word_of_the_plan_cannot_hold_is_refused(open_group, step):
    group = open_group()
    group.join()
    group._board.words[_board.WAITING] = 1
    for name, call in (("boundary", group.boundary), ("recover", group.recover)):
        with pytest.raises(ValueError, match=rf"Group.{name}: step={step}: must be [<>]= "):
            call(step)
    assert group._board.words[_board.PROPOSAL] == group.view and not group._board.words[_board.CHANGE]
    assert group.boundary(2**40 - 2) is None and group.boundary(2**40 - 2) is None


# -- words that come late ----------------------------------------------------------------------------------------------


def test_the_plan_of_an_older_view_counts_for_nothing(open_group):
    group = open_group()
    group.join()
    words, stale = group._board.words, (1 << 24) - 1 << _board.STEP_BITS | 5
    for old in (stale, 5, 0):  # of a later number, of view 0, and none
        words[_board.CHANGE] = old
        assert group.boundary(9) is None and words[_board.CHANGE] == old
    for old in (stale, 5, 0):
        words[_board.CHANGE], words[_board.WAITING] = old, 1
        assert group.boundary(9) is None
        assert words[_board.CHANGE] == group.view << _board.STEP_BITS | 10  # it plans, as without the old word
        assert group.boundary(10).step == 10


def test_a_member_that_begins_a_step_alone_gives_it_up(open_group, monkeypatch):
    monkeypatch.setattr(_membership, "GRACE_S", 0.1)
    both = [open_group(2, slot=slot, timeout_s=60.0) for slot in (0, 1)]
    threads = [threading.Thread(target=group.join, kwargs={"start_with": 2}) for group in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [group.view for group in both] == [1, 1]
    found = []

    def begin():
        both[0].exchange("gather", 1, np.zeros(1))  # a step that the other one does not begin
        found.append((both[0].failure(), both[0].recover(4)))

    alone = threading.Thread(target=begin)
    alone.start()
    time.sleep(0.05)
    both[1]._membership.propose(urgent=False)
    change = both[1]._settle(4)
    alone.join(30)
    ((failure, other),) = found
    assert "the other members of view 1 have given up this step" in failure
    assert change == other and (change.step, change.lost) == (4, ())
    assert [group.active().tolist() for group in both] == [[True, True]] * 2


def test_a_slot_that_is_taken_again_does_not_call_back_the_process_that_left(open_group):
    first = open_group(slot=0)
    first.join()
    identity = first._membership._identity
    first.close()
    second = open_group(slot=0)
    assert second._membership._away(0, identity), "this process lives, and has left"
    assert not second._membership._away(0, second._membership._identity)


# -- kernels, with memory that is none ---------------------------------------------------------------------------------


class Memory:
    """Takes the place of `backends.cuda.members.Members`."""

    def __init__(self, sizes):
        self.sizes, self.adopted, self.left, self.told = sizes, [], 0, []
        self.text = ""

    def programs(self):
        return self.sizes

    def arrive(self):
        return []

    def adopt(self, view, shown):
        self.adopted.append((view, sorted(shown)))
        self.text = ""

    def leave(self):
        self.left += 1
        self.text = ""

    def mark_dead(self, rank):
        self.told.append(rank)
        if len(self.told) == 1:
            raise RuntimeError("the driver has no mood for it")

    def interrupt(self):
        self.told.append("all")

    def failure(self):
        return self.text


def with_memory(group, sizes):
    group._kernels = group._membership.memory = Memory(sizes)
    return group


@pytest.mark.parametrize("limit", [None, float("nan"), "10", 0])
def test_a_time_limit_that_is_none_is_refused_before_the_members_hear_of_it(open_group, limit):
    """They would let the process in, and wait for it in vain; with NaN it would wait for ever."""
    member, newcomer = open_group(), open_group()
    member.join()
    for call in (newcomer.join, open_group, memory.reset):
        with pytest.raises(ValueError, match="timeout_s=.*must be positive seconds"):
            call(timeout_s=limit)
    assert not member._board.words[_board.WAITING]


def test_a_process_that_has_not_joined_changes_no_members(open_group):
    member, newcomer = open_group(), open_group()
    member.join()
    for call in (newcomer.boundary, newcomer.recover):
        with pytest.raises(RuntimeError, match=r"this process is no member: call join\(\) before"):
            call(0)
    assert member.boundary(1) is None


def test_a_newcomer_with_other_programs_is_refused_alone(open_group):
    member = with_memory(open_group(), {"3 ranks, channel 0": [64, 4096]})
    member.join()
    for sizes in ({"3 ranks, channel 0": [64, 8192]}, {}, {"3 ranks, channel 1": [64, 4096]}):
        newcomer = with_memory(open_group(), sizes)
        with pytest.raises(ValueError, match="compiled other programs than the group: symmetric memory .* here and"):
            newcomer.join()
        assert member.boundary(3) is None and not member._board.words[_board.WAITING]
        newcomer.close()
    assert member._kernels.adopted == [(1, [0])]


def operation(name, top_k, site, timeout_s=20.0):
    spec = _spec.Spec(("ep",), (3,), num_experts=6, num_tokens=4, top_k=top_k, layout="ranked", capacity=12)
    config = xm.KernelConfig(timeout_s=timeout_s)
    return {"operation": name, "operands": "float32[4, 8]", "site": site, "spec": spec, "config": config, "wire": None}


LAYER = operation("dispatch", 2, 5), operation("combine", 2, 6)


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (LAYER, None),
        ([operation("dispatch", 2, 5, timeout_s=9.0)], None),
        ([*LAYER, operation("combine", 2, 7)], None),
        ([operation("dispatch", 4, 7), LAYER[1]], "dispatch has top_k=4 here and 2 there;"),
        ([operation("dispatch", 2, 7), LAYER[1]], "dispatch is at another place of a program, or in a program of an"),
        ([operation("redispatch", 2, 5)], "redispatch has operation=redispatch here and dispatch there;"),
    ],
)
def test_a_newcomer_with_other_operations_is_refused_alone(open_group, mine, text):
    member, newcomer = open_group(), open_group()
    for group, operations in ((member, LAYER), (newcomer, mine)):
        for one in operations:
            group.note(one)
    member.join()
    with pytest.raises(ValueError if text else TimeoutError, match=text or "was not let in"):
        newcomer.join(timeout_s=0.01)
    assert member.active().tolist() == [True, False, False]


def test_newcomers_are_compared_with_each_other_and_without_the_lock(open_group, monkeypatch):
    groups = [open_group(5) for _ in range(5)]
    for group, own in zip(groups, ([], [LAYER[1]], [operation("combine", 2, 7)], LAYER[1:], []), strict=True):
        for one in (LAYER[0], *own):
            group.note(one)
    member, more, other, same, late = groups
    member.join()
    member.note(operation("dispatch", 8, 9))
    assert len(member._operations) == 1, "nothing reads the notes of a member"
    difference, free = _membership._difference, []

    def noticed(here, there):
        free.append(member._board._take())
        fcntl.flock(member._board._lock, fcntl.LOCK_UN)
        return difference(here, there)

    monkeypatch.setattr(_membership, "_difference", noticed)
    for group, error, text in (
        (more, TimeoutError, "was not let in"),
        (other, ValueError, "combine is at another place"),  # than that of the process before, not of a member
        (same, TimeoutError, "was not let in"),
    ):
        with pytest.raises(error, match=text):
            group.join(timeout_s=0.01)
    assert free == [True]
    (member._board.folder / "programs.json").unlink()
    with pytest.raises(RuntimeError, match=r"programs.json, with which .* was removed while the group runs"):
        late.join()


def test_an_operation_that_cannot_be_traced_is_not_noted():
    notes = []

    def run(fails):
        if fails:
            raise ValueError("the backend refuses it")
        return fails

    noted = _primitive._noted(run, SimpleNamespace(note=notes.append), "dispatch", [], {"top_k": 2})
    with pytest.raises(ValueError, match="refuses it"):
        noted(True)
    assert notes == [] and noted(False) is False
    assert [(note["operation"], note["top_k"]) for note in notes] == [("dispatch", 2)]


def test_the_thread_that_looks_after_members_outlives_an_error(open_group, monkeypatch):
    group = with_memory(open_group(), {})
    group.join()
    group._membership.members = (0, 1)
    monkeypatch.setattr(group._membership, "gone", lambda member: True)
    watcher = threading.Thread(target=group._watch)
    watcher.start()
    until(lambda: len(group._kernels.told) > 1)
    assert group._kernels.told == [1, 1], "told again, once that can be done"
    assert "looking after the members failed: RuntimeError('the driver has no mood for it')" in group.failure()
    group._watcher = watcher
    group.close()
    assert not watcher.is_alive()


def test_a_group_that_is_closed_has_no_failure_of_its_kernels(open_group):
    group = with_memory(open_group(), {})
    group.join()
    group._kernels.text = "xen_moe_jax: dispatch number 3 failed"
    assert group.failure() == group._kernels.text
    group.close()
    assert group._kernels.left == 1 and group._kernels.failure() == "" == group.failure()


def join_both(open_group, timeout_s):
    """Returns two groups with memory, the members of one view."""
    both = [with_memory(open_group(2, slot=slot, timeout_s=timeout_s), {}) for slot in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        changes = pool.map(lambda group: group.join(start_with=2, timeout_s=30), both)
        assert [change.view for change in changes] == [1, 1]
    return both


@pytest.mark.parametrize("dead", [False, True])
def test_the_wait_for_its_own_gpu_counts_against_no_other_member(open_group, monkeypatch, dead):
    """Member 0 waits longer for its GPU than its time limit, also when another proposal has come meanwhile, and member
    1 arrives a little later."""
    first, second = join_both(open_group, 60.0)
    late, ready = [0.0], threading.Event()

    def arrive_late():
        late[0] += 100.0
        if late[0] == 100.0:
            with first._board.locked():
                first._membership._propose(first._board.read(), urgent=True)
        else:
            ready.set()
        return []

    def arrive_later():
        assert ready.wait(30)
        time.sleep(0.05)
        return []

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(_membership, "time", clock)
    monkeypatch.setattr(liveness, "end", lambda pid: True)  # not this process
    monkeypatch.setattr(first._kernels, "arrive", arrive_late)
    monkeypatch.setattr(second._kernels, "arrive", arrive_later)
    first._membership._gone_at = time.monotonic() - 90.0 if dead else None
    first._membership.propose(urgent=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        changes = [*pool.map(lambda group: group._settle(4), (first, second))]
    assert changes[0] == changes[1] and changes[0].lost == () and late == [200.0]


def test_a_step_is_given_up_for_a_killed_member_and_not_for_one_that_left(open_group, monkeypatch):
    first, second = join_both(open_group, 30.0)
    second.close()
    first._kernels.told = [-1]
    first._membership._timeout_s = 0.0
    told = set()
    first._look(told)
    time.sleep(0.001)
    first._look(told)
    assert first._kernels.told == [-1, 1] and first.failure() == ""
    monkeypatch.setattr(first._membership, "_left", lambda slot, identity: False)
    monkeypatch.setattr(first._membership, "_ended", lambda identity: identity != first._membership._identity)
    told.clear()
    first._look(told)
    time.sleep(0.001)
    first._look(told)
    assert first._kernels.told == [-1, 1, 1, "all"]
    assert "rank 1 ended or left the group, and rank 0 gave up this step" in first.failure()
    with pytest.raises(_rows.GaveUp, match="rank 1 ended or left the group, and rank 0 did not start"):
        first._check_wait(0, 10.0)


def test_a_member_that_the_newest_proposal_does_not_name_is_gone(open_group, monkeypatch):
    first, second = join_both(open_group, 30.0)
    second.close()
    monkeypatch.setattr(first._kernels, "arrive", lambda: {}["the GPU did not become idle"])
    with pytest.raises(KeyError, match="did not become idle"):
        first.recover(4)
    first._kernels.told = [-1]
    first._look(set())
    assert first._membership.members == (0, 1) and first._kernels.told == [-1, 1, "all"]
    assert first._membership._gone_at is None


def come_and_be_killed(folder, arrived):
    with elastic.Group(folder, 2, slot=1, timeout_s=30.0) as group:
        group._membership.memory = Memory({})
        group._membership._await = lambda *_: arrived.set() or time.sleep(60)
        group.join(start_with=2)


@pytest.mark.parametrize("ending", [False, True])
def test_a_member_that_was_killed_after_it_arrived_is_left_out(open_group, tmp_path, monkeypatch, ending):
    """The driver refuses to map the member's memory, which goes before the process counts as ended. That can take
    longer than the time limit, while the operating system says that the process is `ending`."""
    group, arrived = with_memory(open_group(2, slot=0, timeout_s=30.0), {}), FORK.Event()
    adopt, ended, waited_for = group._kernels.adopt, group._membership._ended, []
    newcomer = FORK.Process(target=come_and_be_killed, args=(tmp_path / "group", arrived))
    newcomer.start()

    def refuse(view, shown):
        if view > 1:
            return adopt(view, shown)
        assert arrived.wait(30)
        newcomer.kill()
        newcomer.join()
        late = iter([False] * 9)
        group._membership._ended = lambda identity: not ending and next(late, True) and ended(identity)
        if ending:
            group._membership._timeout_s = 0.1
            monkeypatch.setattr(liveness, "ending", lambda identity: identity.split()[2] == str(newcomer.pid))
            monkeypatch.setattr(liveness, "end", lambda pid: waited_for.append(pid) or pid == newcomer.pid)
        raise RuntimeError("the memory of process 1 cannot be mapped")

    group._kernels.adopt = refuse
    change = group.join(start_with=2)
    assert change.view == 2 and group.active().tolist() == [True, False] and group._kernels.adopted == [(2, [0])]
    assert waited_for == [newcomer.pid] * ending
    group._kernels.adopt = lambda view, shown: refuse(0, shown)
    group._membership._timeout_s = 0.1
    with pytest.raises(RuntimeError, match="cannot be mapped"):  # and no member has ended
        group.recover(0)


def test_a_process_that_was_killed_is_ending_until_it_has_gone():
    with subprocess.Popen(["sleep", "60"]) as child:
        name = liveness.identity(child.pid)
        assert not liveness.ending(name) and not liveness.ending(liveness.identity())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness.ending(name)
    assert not liveness.ending(name)


def test_a_member_that_waits_for_the_lock_is_not_late(open_group, monkeypatch):
    """A stopped process holds the lock when the time of the member that needs it to arrive is over."""
    first, second = join_both(open_group, 8.0)
    monkeypatch.setattr(liveness, "end", lambda pid: pytest.fail("a living member is ended"))
    first._membership.propose(urgent=True)
    await_, locked, busy = first._membership._await, first._board.locked, threading.Event()

    @contextlib.contextmanager
    def locked_late():
        if busy.is_set():  # while this member waits for the lock, which it needs to leave out the other
            busy.clear()
            time.sleep(1.2)
            late.append(pool.submit(second.recover, 4))
        with locked():
            yield

    def await_in_vain(stage, number, limits):
        if number == 2 and stage == "arrived":
            limits.update(dict.fromkeys(limits, 0.0))
            busy.set()
        return await_(stage, number, limits)

    late = []
    first._board.locked, first._membership._await = locked_late, await_in_vain
    with concurrent.futures.ThreadPoolExecutor() as pool:
        change = first.recover(4)
        assert late[0].result(30) == change and (change.view, change.lost) == (2, ())


def stopped_with_memory(folder, slot, words):
    """Runs a rank whose memory others could store into."""
    with elastic.Group(folder, 2, slot=slot, timeout_s=2.0) as group:
        group._membership.memory = Memory({})
        for words[slot] in steps(group, start_with=2):
            pass


def test_a_stopped_process_whose_gpu_could_store_later_is_ended(tmp_path):
    words = FORK.Array("q", 2, lock=False)
    both = [FORK.Process(target=stopped_with_memory, args=(tmp_path / "group", slot, words)) for slot in (0, 1)]
    try:
        for process in both:
            process.start()
        until(lambda: min(words) > 3)
        os.kill(both[1].pid, signal.SIGSTOP)
        before = words[0]
        until(lambda: words[0] > before + 10)
        assert not both[1].is_alive() and both[1].exitcode == -signal.SIGKILL
    finally:
        for process in both:
            process.kill()
            process.join()


# -- epochs ------------------------------------------------------------------------------------------------------------


class Compiled:
    def __init__(self, shown):
        self.shown, self.adopted = shown, []

    def ipc_quiet(self, seconds):
        pass

    def ipc_show(self):
        return self.shown

    def ipc_adopt(self, name, mailboxes, stagings, epoch, generation, seconds):
        self.adopted.append((name, mailboxes, stagings, epoch, generation))


@pytest.mark.parametrize(
    ("epochs", "following"), [((3, 70_000), 70_064), ((2**31, 5), 2**31 + 64), ((1, 0xFFFF0001), 2)]
)
def test_a_view_begins_after_every_operation_of_its_members(epochs, following):
    """A view may have had any number of operations: the next one begins behind the one that has had the most."""
    memory = members.Members.__new__(members.Members)
    memory._rank, memory._num_ranks, memory._alone, memory._view = 0, 3, members.Alone(), 1
    memory._compiled = Compiled([("3 ranks, channel 0", b"mail", b"stage", 64, 4096, epochs[0])])
    assert memory.programs() == {"3 ranks, channel 0": [64, 4096]}
    mine = memory.arrive()
    theirs = [[*mine[0][:5], epochs[1]]]
    memory.adopt(9, {0: mine, 2: theirs})
    ((name, mailboxes, stagings, epoch, generation),) = memory._compiled.adopted
    assert (name, epoch, generation) == ("3 ranks, channel 0", following, 9)
    assert mailboxes == [b"mail", b"", b"mail"] and stagings == [b"stage", b"", b"stage"]
    with pytest.raises(RuntimeError, match=r"compile and run every program, of every shape, before join\(\)"):
        memory._alone("a key", b"", 1.0)


# -- what a group keeps ------------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_processes_that_have_gone(open_group, tmp_path):
    group = open_group()
    group.join()
    step, seen = 0, FORK.Semaphore(0)

    def came():
        nonlocal step
        group.boundary(step := step + 1)
        return group.active().sum() == 2

    for _ in range(3):
        newcomer = FORK.Process(target=come_and_go, args=(tmp_path / "group", seen))
        newcomer.start()
        until(came)
        seen.release()
        newcomer.join(30)
        assert group.recover(step).lost == (1,)
    membership = group._membership
    assert not {*membership._held} and not membership._polls
    assert {path.name for path in (tmp_path / "group" / "rows").iterdir()} == set()
    assert len([*(tmp_path / "group").iterdir()]) < 12


def come_and_go(folder, seen):
    with elastic.Group(folder, 3, slot=1) as group:
        group.join(timeout_s=30)
        assert seen.acquire(timeout=30)  # else the members may go on without a process that has already left


def test_a_member_closes_no_buffer(monkeypatch):
    """It is refused before the memory has changed, which the other members go on using."""
    member, released = members.Alone(), []
    member.member = True
    monkeypatch.setattr(members.Alone, "here", member)
    buffer = object.__new__(memory.Memory)
    buffer._workspace = SimpleNamespace(release=released.append)
    with pytest.raises(RuntimeError, match="cannot change while this process is a member"):
        buffer.close()
    assert not released
    member.member = False
    buffer.close()
    assert released == [memory.CLOSE_S]
