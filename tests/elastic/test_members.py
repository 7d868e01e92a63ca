"""Members come and go: killed at any moment, let in between two steps, stopped for too long."""

import contextlib
import gc
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time

import numpy as np
import pytest

from tests.elastic import chaos
from tests.support import lateness
from xen_moe_jax import elastic
from xen_moe_jax.elastic import _board, _rows
from xen_moe_jax.elastic._rows import GaveUp, Rows

FORK = multiprocessing.get_context("fork")


def run_within_the_limits(ranks, kills, seed):
    """Runs `chaos.run`, and checks that the members go on within 2 s of a kill, let a ready process in within 10 s, and
    stop for it for less than 2 s, in all of which this machine's other programs took no part."""
    with lateness.Lateness() as late:
        figures = chaos.run(ranks, kills, seed=seed)
    assert late.without(max(figures["pause_s"])) < 2 and late.without(max(figures["let_in_s"])) < 10, figures
    assert late.without(figures["stopped_s"]) < 2, figures
    return figures


@pytest.mark.parametrize(("ranks", "kills"), [(4, 12)])
def test_kills_and_joins(ranks, kills):
    figures = run_within_the_limits(ranks, kills, seed=ranks + kills)
    assert figures["kills"] >= kills and figures["joins"] >= kills // 2 and figures["steps"] > kills


def test_many_kills():
    figures = run_within_the_limits(5, 60, seed=35)
    assert figures["kills"] >= 60 and figures["joins"] >= 30


def test_kills_and_stops():
    figures = chaos.run(4, 6, seed=9, stops=True)
    assert figures["kills"] >= 6 and figures["stops"] >= chaos.LEAST_STOPS, figures


def steps(group, start_with):
    """Runs a rank of a group, and yields the number of its next step behind each step that did not fail."""
    step = group.join(start_with=start_with, timeout_s=60).step
    while True:
        if (change := group.boundary(step)) is not None:
            step = change.step
        group.exchange("gather", 7, np.full(3, step))
        if group.failure():
            step = group.recover(step).step
            continue
        step += 1
        yield step


def count_steps(folder, slot, start_with, words, timeout_s, returns):
    """Runs a rank that counts its steps in `words[2 * slot]`, and in the next word how often it was evicted. With
    `returns` it then comes in again: on a busy machine the others may leave a rank out that the test did not stop."""
    while not words[2 * slot + 1] or returns:
        name = f"ep{words[2 * slot + 1]}"
        with contextlib.suppress(elastic.Evicted):
            with elastic.Group(folder, 3, slot=slot, axis_name=name, timeout_s=timeout_s) as group:
                for words[2 * slot] in steps(group, start_with):
                    pass
        words[2 * slot + 1] += 1
        start_with = 1


@pytest.fixture
def ranks(tmp_path):
    """Yields `start(slot, start_with, timeout_s, returns)`, which starts a rank, and the words of all ranks; ends the
    ranks."""
    words = FORK.Array("q", 6, lock=False)
    started = {}

    def start(slot, start_with, timeout_s=60.0, returns=True):
        arguments = tmp_path / "group", slot, start_with, words, timeout_s, returns
        process = FORK.Process(target=count_steps, args=arguments)
        process.start()
        started[slot] = process
        return process

    yield start, words
    for process in started.values():
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def until(what, seconds=60):
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_growing_by_a_rank_that_was_never_there(ranks):
    start, words = ranks
    for slot in (0, 2):
        start(slot, 2)
    until(lambda: words[0] > 3 and words[4] > 3)
    start(1, 1)
    until(lambda: words[2] > words[0] - 3 > 3)  # it goes on from the members' step


def test_one_that_is_stopped_for_too_long_is_left_out_and_spoils_nothing(ranks, tmp_path):
    start, words = ranks
    slow = [start(slot, 3, timeout_s=1.0, returns=slot != 1) for slot in range(3)][1]
    until(lambda: min(words[0], words[2], words[4]) > 3)
    os.kill(slow.pid, signal.SIGSTOP)
    before = words[0]
    until(lambda: words[0] > before + 10 and words[4] > before + 10)
    again = start(1, 1)
    until(lambda: words[2] > before + 10)
    os.kill(slow.pid, signal.SIGCONT)
    slow.join(30)
    assert slow.exitcode == 0 and words[3] >= 1
    gc.collect()  # what earlier tests have left is not counted
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="slot 1 of 3 belongs to a process that runs"):
        elastic.Group(tmp_path / "group", 3, slot=1, axis_name="taken", timeout_s=0.01)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    before = words[2]
    until(lambda: words[2] > before + 20)
    assert again.is_alive()


@pytest.mark.parametrize(
    ("limit", "after", "most"), [(3.0, 0.05, 5.4), (2.5, 4.6, 2.4)], ids=["in a step", "in the agreement"]
)
def test_a_kill_while_another_rank_is_stopped(ranks, limit, after, most):
    """A rank that is stopped holds up the others for one time limit, although another rank is killed. On a busy machine
    the others may go on two seconds later than on a quiet one: a further limit would take longer.

    "in a step": the killed rank has sent its rows of the step, and the limit of 3 s counts from the kill: the others do
    not wait for the stopped rank in the step, and then again in the agreement. "in the agreement": two ranks are
    stopped. The others have given up the step after 2.5 s, and wait in the agreement for 2.1 s when one of the stopped
    ranks is killed. The proposal that follows gives the other stopped rank no further time.
    """
    start, words = ranks
    _, stopped, killed = [start(slot, 3, timeout_s=limit) for slot in range(3)]
    until(lambda: min(words[0], words[2], words[4]) > 3)
    for process in [stopped] if after < limit else [stopped, killed]:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(after)
    before, began = words[0], time.monotonic()
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: words[0] > before)
    assert time.monotonic() - began < most


def never(member, waited_s):
    raise GaveUp("no wait in this test")


def test_the_last_process_of_a_slot_and_the_next_one_write_elsewhere(tmp_path):
    member, last = (Rows(tmp_path / "rows", slot, 2, {slot: slot}, never) for slot in (0, 1))
    view = {0: 0, 1: 1}  # number of the claim by slot
    for rows in (last, member):
        rows.enter(1, view)
    with pytest.raises(GaveUp):
        last.exchange("gather", 7, np.ones(3))
    np.testing.assert_array_equal(member.exchange("gather", 7, np.zeros(3))[1], np.ones(3))
    following = Rows(tmp_path / "rows", 1, 2, {1: 2}, never)
    following.exchange("gather", 7, np.full(3, 4.0))  # it warms up, alone
    with pytest.raises(GaveUp):
        last.exchange("gather", 7, np.full(3, 5.0))
    np.testing.assert_array_equal(member.exchange("gather", 7, np.zeros(3))[1], np.full(3, 5.0))
    for rows in (following, member):
        rows.enter(2, {0: 0, 1: 2})
    for rows, value in ((following, 6.0), (last, 7.0)):
        with pytest.raises(GaveUp):
            rows.exchange("gather", 7, np.full(3, value))
    np.testing.assert_array_equal(member.exchange("gather", 7, np.zeros(3))[1], np.full(3, 6.0))
    assert sorted(path.name.split(".")[1] for path in (tmp_path / "rows").glob("1.*")) == ["2"]


@pytest.mark.parametrize("fences", [1, 2, 9])
def test_one_that_is_stopped_while_it_copies_finds_that_the_others_went_on(tmp_path, monkeypatch, fences):
    slow, other = (Rows(tmp_path / "rows", slot, 2, {slot: slot}, never) for slot in (0, 1))
    for rows in (slow, other):
        rows.enter(1, {0: 0, 1: 1})
    with pytest.raises(GaveUp):
        other.exchange("gather", 7, np.ones(3))
    wait = Rows._wait

    def wait_and_be_stopped(self, region, parity, mark, member):
        wait(self, region, parity, mark, member)
        if self is slow and member == 1:
            other.enter(2, {1: 1})
            left = iter(range(fences - 1))  # the other one is seen after so many fences: before, or after its new rows
            with monkeypatch.context() as patch, contextlib.suppress(StopIteration):
                patch.setattr(_rows, "fence", lambda: next(left))
                other.exchange("gather", 7, np.full(3, 2.0))

    monkeypatch.setattr(Rows, "_wait", wait_and_be_stopped)
    with pytest.raises(GaveUp, match="rank 1 went on while rank 0 copied its rows"):
        slow.exchange("gather", 7, np.zeros(3))


def test_a_folder_without_room_is_an_error():
    memory = pathlib.Path("/dev/shm")
    if not memory.is_dir() or not (room := os.statvfs(memory).f_blocks * os.statvfs(memory).f_frsize):
        pytest.skip("no folder in memory that has a limit")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        with pytest.raises(OSError, match=rf"no room for {2 * room} bytes in {folder}: free or enlarge it"):
            _board.map_file(pathlib.Path(folder) / "rows", 2 * room)


def test_a_full_file_system_leaves_the_state_as_it_was(tmp_path):
    """The error named neither the folder nor a remedy, and half a file stayed in the folder."""
    board = _board.Board(tmp_path, 2, 1.0)
    before = board.read()
    (tmp_path / f".state.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"no room for state.json in {tmp_path}: free or enlarge it"):
        board.write({**before, "proposal": 7})
    assert board.read() == before and not list(tmp_path.glob(".*"))
    board.close()


def test_a_damaged_folder_is_named_and_an_ended_group_may_be_larger(tmp_path):
    for slots in (2, 3, 1):  # each group has ended before the next one begins
        with elastic.Group(tmp_path, slots, axis_name=f"slots {slots}") as group:
            assert group.join().joined == (0,)
            with pytest.raises(ValueError, match=rf"slots=9: the group in .* has {slots}: .*use another folder"):
                elastic.Group(tmp_path, 9, axis_name="nine")
    (tmp_path / "state.json").write_text("")
    with pytest.raises(RuntimeError, match=r"state.json is damaged: .*use another one"):
        elastic.Group(tmp_path, 2, axis_name="damaged")


def test_all_die_and_the_next_ones_begin_anew(ranks):
    start, words = ranks
    first = [start(slot, 3) for slot in range(3)]
    until(lambda: min(words[0], words[2], words[4]) > 3)
    for process in first:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    words[0] = words[2] = words[4] = 0
    for slot in range(3):
        start(slot, 3)
    until(lambda: min(words[0], words[2], words[4]) > 3)
