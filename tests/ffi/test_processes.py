"""Processes that share symmetric memory: they agree, or all fail alike with the culprit's name; a death is noticed.

Real processes over host memory; see tests/support/cuda_memory_worker.py. `make memory-test` builds their module.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from tests.support import HANG_S, ROOT, forked, memory_module
from tests.support.memory_module import wait_until
from tests.support.processes import free_port
from xen_moe_jax.backends.cuda import agreement, liveness

WORKER = "tests.support.cuda_memory_worker"
COUNT = 3
SMALL_STAGING, LARGE_STAGING = 2 * (1024 + 8192), 2 * (4096 + 65536)


class Job:
    """`COUNT` processes that run a scenario: forks, or programs that begin anew where how they begin or end counts."""

    def __init__(self, scenario: str, where: str, anew: bool = False) -> None:
        memory_module.load()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        start = forked.anew if anew else forked.Program
        self.processes = [start(WORKER, [scenario, where, str(p), str(COUNT)], environment) for p in range(COUNT)]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def ready(self) -> None:
        for process in self.processes:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]

    def results(self, *who: int) -> list[dict]:
        out = []
        for p in who or range(COUNT):
            text, errors = self.processes[p].communicate(timeout=HANG_S)
            assert self.processes[p].returncode == 0, f"process {p}: {errors[-2000:]}"
            out.append(json.loads(text.splitlines()[-1]))
        return out


def run(scenario: str, where: str, anew: bool = False) -> list[dict]:
    with Job(scenario, where, anew) as job:
        return job.results()


def test_all_grow_and_get_the_same(tmp_path):
    for result in run("grow", str(tmp_path), anew=True):
        assert result["errors"] == ["", ""]
        assert result["listed"] == [{"channel": 0, "staging_bytes": LARGE_STAGING, "generation": 2}]


def test_processes_that_lowered_nothing_start_memory_when_they_load_a_program(tmp_path):
    for result in run("load_programs", str(tmp_path)):
        assert result["errors"] == ["", ""] and result["calls"] == ["describe", "start memory"]
        assert result["listed"] == [{"channel": 0, "staging_bytes": LARGE_STAGING, "generation": 1}]


def test_all_grow_through_the_store_of_jax():
    for result in run("grow", f"127.0.0.1:{free_port()}"):
        assert result["errors"] == ["", ""] and result["listed"][0]["staging_bytes"] == LARGE_STAGING


def test_processes_that_see_one_gpu_each_agree(tmp_path):
    for result in run("grow_each_on_its_own_gpu_zero", str(tmp_path)):
        assert result["errors"] == ["", ""] and result["listed"][0]["staging_bytes"] == LARGE_STAGING


def test_the_neediest_decides(tmp_path):
    for result in run("different_needs", str(tmp_path)):
        assert result["errors"] == [""] and result["listed"][0]["staging_bytes"] == COUNT * SMALL_STAGING


def test_memory_that_one_lacks_is_an_error_in_all_and_nobody_is_left_waiting(tmp_path):
    for result in run("one_cannot", str(tmp_path)):
        first, second, third = result["errors"]
        assert first == third == ""
        assert "failed in process 1, so every process leaves its memory as it was" in second
        assert result["kept"] and result["seconds"] < 80, "a wait of 100 s"
        assert result["listed"][0]["staging_bytes"] == LARGE_STAGING


def test_a_first_growth_that_fails_in_one_can_be_tried_again(tmp_path):
    for result in run("one_cannot_begin", str(tmp_path)):
        assert any("failed in process 1" in error for error in result["errors"][:-1])
        assert result["errors"][-1] == "" and result["listed"][0]["staging_bytes"] == SMALL_STAGING


def test_a_vote_that_cannot_be_read_is_an_error_in_all_and_changes_nothing(tmp_path):
    for result in run("foreign_votes", str(tmp_path)):
        *votes, good, reset = result["errors"]
        assert all("failed in process 1, so every process leaves its memory as it was: " in error for error in votes)
        assert votes[0].endswith(": it sent nothing") and votes[1].endswith(": no room left")
        for error in [*votes[2:], reset]:
            assert error.endswith(
                ": its vote cannot be read: every process of a job must run the same version of xen_moe_jax"
            )
        assert good == "" and result["kept"] and result["listed"][0]["staging_bytes"] == SMALL_STAGING


def test_a_ticket_ends_when_its_turn_does_not_come(tmp_path):
    for result in run("late_turn", str(tmp_path)):
        first, closing, second = result["errors"]
        assert first == second == "" and "agreement number 4 did not end within 2 s in this process" in closing


def test_a_process_that_does_not_come_is_named_by_all_within_the_limit(tmp_path):
    results = run("one_stays_away", str(tmp_path))
    for process in (0, 2):
        assert "process 1 did not come within 2 s" in results[process]["errors"][0]
    assert "process 1 did not come within 2 s" in results[1]["errors"][1]  # told at once that it is too late
    for result in results:
        assert result["errors"][2] == "" and result["seconds"] < 80, "a wait of 100 s"


def test_a_killed_process_is_named_within_ten_seconds_and_ends_the_wait_for_it(tmp_path):
    with Job("one_dies", str(tmp_path)) as job:
        job.ready()
        time.sleep(0.3)
        killed = time.time()
        job.processes[1].send_signal(signal.SIGKILL)
        for result in job.results(0, 2):
            assert "the process of rank 1 (GPU 0 of process 1) has ended" in result["failure"]
            assert result["named"] - killed < 10
            assert "process 1 has died" in result["errors"][1] and result["ended"] - killed < 10


def test_the_others_reset_and_go_on_without_a_killed_process(tmp_path):
    """If programs take `active`, a death fails no operation until one needs the dead rank; then all other processes
    reset once."""
    with Job("one_is_left_out", str(tmp_path)) as job:
        job.ready()
        job.processes[1].kill()
        for result in job.results(0, 2):
            assert result["errors"] == [""] and result["failure"] == "" and result["dead"] == 0b10
            assert result["after"] == ["", 0b10, [1]] and result["epoch"] == 104


def test_without_dead_only_who_is_known_to_be_dead_is_left_out():
    store = DictStore()
    store.set(f"{agreement.PREFIX}/key/2", b"two")
    agree = agreement.Agreement(store, 0, 3, dead=lambda: {1})
    assert agree("key", b"zero", 5.0, True) == (1, [b"zero", b"", b"two"], [1])
    assert agreement.Agreement(store, 2, 3)("key", b"two", 5.0, True) == (1, [b"zero", b"", b"two"], [1])
    with pytest.raises(RuntimeError, match="process 2 did not come"):
        agree("other", b"zero", 0.2, True)
    with pytest.raises(RuntimeError, match="process 1 has died"):
        agreement.Agreement(store, 0, 2, dead=lambda: {1})("third", b"zero", 5.0)


def test_a_stopped_process_is_slow_not_dead(tmp_path):
    with Job("one_stops", str(tmp_path)) as job:
        job.ready()
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(12)
        job.processes[1].send_signal(signal.SIGCONT)
        for result in job.results():
            assert result["errors"] == ["", ""] and result["failure"] == "" and result["dead"] == []


def test_a_process_that_ends_in_order_fails_only_operations_that_need_it(tmp_path):
    with Job("one_leaves", str(tmp_path), anew=True) as job:
        for result in job.results(0, 2):
            assert result["failure"] == ""
            assert result["word"] >> 56 & 0x7F == 3 and result["word"] >> 40 & 0xFF == 1


def test_channels_that_grow_at_once_in_another_order_everywhere(tmp_path):
    for result in run("two_threads", str(tmp_path)):
        assert result["errors"] == [""] * 9
        assert sorted(w["staging_bytes"] for w in result["listed"]) == [3 * SMALL_STAGING] * 3


def test_buffers_close_together_and_alone(tmp_path):
    results = run("buffers", str(tmp_path))
    for result in results:
        assert result["errors"] == ["", ""] and result["freed"] >= 1 << 16
    assert results[0]["seconds"] < 20 and "did not come" in results[0]["closing"]


def test_closing_frees_nothing_that_a_busy_gpu_may_use(tmp_path):
    results = run("busy_buffer", str(tmp_path))
    assert results[0]["errors"] == [""] and results[0]["freed"] == 0 and results[0]["freed_later"] == 512


def test_reset_in_all_processes_begins_again_under_one_number(tmp_path):
    for result in run("reset", str(tmp_path)):
        assert "rank 2 (GPU 0 of process 2)" in result["failed"] and result["failure"] == ""
        assert result["epoch"] == 104


# -- the watcher itself ------------------------------------------------------------------------------------------------


class DictStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.looks = collections.Counter[str]()

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        self.looks[key] += 1
        limit = time.monotonic() + seconds
        while key not in self.values and time.monotonic() < limit:
            time.sleep(0.002)
        return self.values.get(key)


def test_an_identity_is_of_one_process_only():
    child = subprocess.Popen(["sleep", "60"])
    try:
        descriptor = liveness.hold(liveness.identity(child.pid))
        assert descriptor is not None
        os.close(descriptor)
        boot, namespace, pid, started = liveness.identity(child.pid).split()
        with pytest.raises(ProcessLookupError):
            liveness.hold(f"{boot} {namespace} {pid} {int(started) + 1}")
        assert liveness.hold(f"{boot} pid:[1] {pid} {started}") is None
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):
        liveness.hold(f"{boot} {namespace} {pid} {started}")


def test_without_pidfds_silence_counts(monkeypatch):
    """By a clock that goes on when the watcher has looked, however late its thread runs."""
    now = 0.0
    monkeypatch.setattr(liveness, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(liveness, "POLL_S", 0.01)
    store, died = DictStore(), []
    store.set(f"{liveness.PREFIX}/1/identity", b"elsewhere pid:[7] 12 34")
    beat = f"{liveness.PREFIX}/1/beat"
    watcher = liveness.Watcher(store, 0, 2, lambda process, clean: died.append((process, clean)))
    for number in range(10):
        store.set(beat, str(number).encode())
        looks = store.looks[beat]
        wait_until(lambda: store.looks[beat] > looks + 1, 60)  # noqa: B023
        now += 0.9 * liveness.SILENCE_S
    assert not died and store.get(f"{liveness.PREFIX}/0/beat", 60.0)
    now += 0.2 * liveness.SILENCE_S
    wait_until(lambda: died, 60)
    watcher.leave()
    assert died == [(1, False)] and watcher.dead() == {1}


def test_a_late_process_zero_tells_the_others_who_was_missing():
    store = DictStore()
    store.set(f"{agreement.PREFIX}/key/verdict", b"late 2,3 5")
    with pytest.raises(RuntimeError, match="process 2, 3 did not come within 5 s"):
        agreement.Agreement(store, 1, 4)("key", b"ok", 1.0)


def test_a_process_that_has_given_up_is_not_gone_on_without():
    """Process 0 comes when all words are there and process 1 has left: the memory of one alone would be waited for."""
    store = DictStore()
    store.set(f"{agreement.PREFIX}/key/1", b"one")
    with pytest.raises(RuntimeError, match="process 0 did not come within 0 s"):
        agreement.Agreement(store, 1, 2, clock=iter([0.0, 6.0, 7.0]).__next__)("key", b"one", 0.4)
    zero = agreement.Agreement(store, 0, 2)
    with pytest.raises(RuntimeError, match="process 0 did not come within 0 s"):
        zero("key", b"zero", 5.0)
    store.set(f"{agreement.PREFIX}/next/1", b"one")
    assert zero("next", b"zero", 5.0)[0] == 1, "no ticket was lost"
    assert agreement.Agreement(store, 1, 2)("next", b"one", 5.0)[0] == 1


def test_the_store_of_jax_keeps_what_was_written_first():
    program = (
        "import jax; from xen_moe_jax import _jax_internals; from xen_moe_jax.backends.cuda import agreement\n"
        f"jax.distributed.initialize('127.0.0.1:{free_port()}', 1, 0)\n"
        "store = agreement.JaxStore(_jax_internals.key_value_client())\n"
        "print(store.set_once('verdict', b'one'), store.set_once('verdict', b'two'), store.get('verdict', 1.0))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.split() == ["b'one'", "b'one'", "b'one'"], done.stderr[-1000:]
