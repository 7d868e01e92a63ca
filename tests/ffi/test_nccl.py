"""NCCL as memory between processes, without a GPU: the choice of the library, the start of a job, growth in all
processes or in none, a process that dies or gets stuck inside NCCL.

Real processes over a stand-in for NCCL (tests/native/fakes/fake_nccl.cc), which `make memory-test` builds.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import sys
import time
import types

import pytest

from tests.support import HANG_S, fake_nccl, forked, memory_module, processes
from xen_moe_jax import doctor
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import nccl, nvshmem
from xen_moe_jax.backends.cuda import processes as start

WORKER = "tests.support.nccl_memory_worker"
COUNT = 3
SMALL_STAGING, LARGE_STAGING = 2 * (1024 + 8192), 2 * (4096 + 65536)


@contextlib.contextmanager
def job(scenario: str, folder: pathlib.Path, count: int = COUNT, anew: bool = False):
    """`count` processes that run a scenario: forks, or programs that begin anew where how they end counts."""
    memory_module.load()
    store = folder / "store"
    store.mkdir()
    home = str(fake_nccl.home(folder / "home"))
    environment = processes.environment(JAX_PLATFORMS="cpu", XEN_MOE_MEMORY="nccl", NCCL_HOME=home)
    start = forked.anew if anew else forked.Program
    running = [start(WORKER, [scenario, str(store), str(p), str(count)], environment) for p in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def results(running: list[forked.Program], *who: int) -> list[dict]:
    out = []
    for p in who or range(len(running)):
        text, errors = running[p].communicate(timeout=HANG_S)
        assert running[p].returncode == 0 and text, f"process {p}: {errors[-2000:]}"
        out.append(json.loads(text.splitlines()[-1]))
    return out


# -- which library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nccl_home(tmp_path, monkeypatch):
    """Gives `nccl_home(library=None)`: it points NCCL_HOME to a folder with the fake, or the given file, as NCCL."""
    nccl.usable.cache_clear()

    def make(library: pathlib.Path | None = None) -> pathlib.Path:
        home = fake_nccl.home(tmp_path / "home", library)
        monkeypatch.setenv("NCCL_HOME", str(home))
        return home

    yield make
    nccl.usable.cache_clear()


def test_the_library_of_nccl_home_is_taken_with_its_version(nccl_home):
    home = nccl_home()
    assert nccl.usable() == (home / "lib" / "libnccl.so.2", (2, 32, 3))
    nccl.load(memory_module.load())


def test_a_library_that_is_too_old_is_named_with_both_versions_and_the_remedy(nccl_home, monkeypatch):
    nccl_home()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22809")
    with pytest.raises(BackendUnavailable, match=r"NCCL 2\.28\.9 in .*libnccl\.so\.2 is too old") as error:
        nccl.usable()
    assert "nvidia-nccl-cu13>=2.31" in str(error.value) and "NCCL_HOME" in str(error.value)
    monkeypatch.setenv("FAKE_NCCL_VERSION", "23100")
    assert nccl.usable()[1] == (2, 31, 0)


def test_a_file_that_is_no_library_or_not_nccl_is_named(nccl_home, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("not a library")
    home = nccl_home(text)
    with pytest.raises(BackendUnavailable, match="NCCL cannot be loaded .*(invalid ELF|too short).*NCCL_HOME"):
        nccl.usable()
    (home / "lib" / fake_nccl.NAME).unlink()
    with pytest.raises(BackendUnavailable, match=r"NCCL cannot be loaded .*libnccl\.so\.2.*No such file"):
        nccl.usable()
    (home / "lib" / fake_nccl.NAME).symlink_to(memory_module.find())
    with pytest.raises(BackendUnavailable, match="NCCL cannot be loaded .*ncclGetVersion"):
        nccl.usable()
    nccl.usable.cache_clear()
    monkeypatch.setattr(nccl, "version", lambda path: (2, 31, 0))
    with pytest.raises(RuntimeError, match="has no ncclGetVersion: it is not NCCL"):
        memory_module.load().nccl_load(str(nccl.usable()[0]))


def test_no_library_at_all_says_how_to_get_one(monkeypatch):
    nccl.usable.cache_clear()
    monkeypatch.setattr(nccl, "find", lambda: None)
    with pytest.raises(BackendUnavailable, match=r"NCCL was not found: pip install 'nvidia-nccl-cu13>=2\.31'"):
        nccl.usable()


def test_the_doctor_names_the_library_the_version_and_the_remedy(nccl_home, monkeypatch):
    home = nccl_home()
    found = doctor.nccl_library()
    assert found.ok and found.detail == f"2.32.3 ({home}/lib/libnccl.so.2)" and not found.remedy
    nccl.usable.cache_clear()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22809")
    found = doctor.nccl_library()
    assert found.ok is None and "NCCL 2.28.9 in" in found.detail and "is too old (needed only" in found.detail
    assert found.remedy == nccl.REMEDY


def test_the_doctor_says_whether_a_kernel_could_put_to_other_nodes(nccl_home, monkeypatch):
    nccl_home()
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_GIN_ENABLE", "NCCL_GIN_PROXY_QUEUE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.nccl_puts().ok
    monkeypatch.setenv("NCCL_GIN_PROXY_QUEUE_SIZE", "32")
    assert doctor.nccl_puts().ok
    monkeypatch.setenv("NCCL_GIN_PROXY_QUEUE_SIZE", "16")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    found = doctor.nccl_puts()
    assert found.ok is False and found.remedy == "unset it"
    assert found.detail.startswith("NCCL_CUMEM_ENABLE=0, NCCL_GIN_PROXY_QUEUE_SIZE=16 (at least 32)")
    nccl.usable.cache_clear()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "23100")
    found = doctor.nccl_puts()
    assert found.ok is None and "puts from a kernel need NCCL 2.32" in found.detail and "2.32" in found.remedy
    nccl.usable.cache_clear()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22809")
    assert doctor.nccl_puts().ok is None


def test_doctor_names_the_headers_of_the_kernels_between_nodes(monkeypatch):
    for headers, ok, said in ((23203, True, "of NCCL 2.32.3"), (0, None, "built without NCCL's headers")):
        monkeypatch.setitem(sys.modules, "xen_moe_jax._cuda", types.SimpleNamespace(nccl_headers=headers))
        found = doctor.nccl_kernels()
        assert found.ok is ok and said in found.detail and bool(found.remedy) is not bool(ok)
    monkeypatch.setitem(sys.modules, "xen_moe_jax._cuda", None)
    assert doctor.nccl_kernels().ok is None


# -- the provider of a job ---------------------------------------------------------------------------------------------

FINE = {"node": "a", "asked": ""}


def test_the_same_is_used_in_all_processes():
    assert start.decide([FINE] * 3) == "nvshmem"
    assert start.decide([FINE | {"asked": "nccl"}] * 2) == "nccl"
    assert start.decide([FINE, FINE | {"node": "b"}]) == "nccl", "on several nodes"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"node": "b"}, "the processes are on 2 nodes and XEN_MOE_MEMORY=nvshmem.*unset it or set XEN_MOE_MEMORY=nccl"),
        ({"asked": "nccl"}, "XEN_MOE_MEMORY is 'nvshmem' in process 0 and 'nccl' in process 1"),
    ],
)
def test_processes_that_differ_are_told_in_what(second, message):
    asked = FINE | {"asked": "nvshmem"}
    with pytest.raises(ValueError, match=message):
        start.decide([asked, asked | second])


class Alone:
    """The store of a job of one process, or of several processes, whose entries are in `said` from the beginning."""

    def __init__(self, **said) -> None:
        self.said = {f"{start.PREFIX}/{about}/1": json.dumps(words).encode() for about, words in said.items()}

    def key_value_set_bytes(self, key, value):
        self.said[key] = value

    def blocking_key_value_get_bytes(self, key, milliseconds):
        return self.said[key]


def test_an_unknown_kind_of_memory_is_refused(monkeypatch):
    monkeypatch.setenv("XEN_MOE_MEMORY", "mpi")
    with pytest.raises(ValueError, match="XEN_MOE_MEMORY='mpi' in process 0: must be one of nvshmem, nccl"):
        start.choose(None, Alone(), 0, 1)


def test_what_another_process_lacks_is_an_error_here_too(nccl_home, monkeypatch):
    nccl_home()
    monkeypatch.setenv("XEN_MOE_MEMORY", "nccl")
    monkeypatch.setattr(start, "_node", lambda: "a")
    other = Alone(asked=FINE | {"asked": "nccl"}, lacks="this")
    with pytest.raises(BackendUnavailable, match="process 1 has no memory that processes can share: this$"):
        start.choose(memory_module.load(), other, 0, 2)


def test_several_nodes_take_kernels_that_put_and_a_library_as_new_as_they(nccl_home, monkeypatch):
    class Module:
        nccl_headers = 0

        def nccl_load(self, path):
            pass

    nccl_home()
    others = {"asked": {"node": "elsewhere", "asked": ""}, "lacks": ""}
    with pytest.raises(BackendUnavailable, match=r"process 0 .*built without NCCL's headers: build it again"):
        start.choose(Module(), Alone(**others), 0, 2)
    monkeypatch.setattr(Module, "nccl_headers", 23301)
    with pytest.raises(BackendUnavailable, match=r"NCCL 2\.32\.3 .*between nodes the kernels need 2\.33 or later: pip"):
        start.choose(Module(), Alone(**others), 0, 2)
    monkeypatch.setattr(Module, "nccl_headers", 23203)
    assert start.choose(Module(), Alone(**others), 0, 2) == "nccl"


def test_virtual_nodes_are_nodes(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    real = start._node()
    monkeypatch.setenv("NCCL_HOSTID", "a")
    virtual = start._node()
    monkeypatch.setenv("NCCL_HOSTID", "b")
    assert len({real, virtual, start._node()}) == 3


def test_one_error_names_both_remedies(monkeypatch):
    """No NVSHMEM module in a checkout."""
    monkeypatch.setitem(sys.modules, "xen_moe_jax._nvshmem", None)
    nvshmem.load.cache_clear()
    with pytest.raises(BackendUnavailable) as error:
        start.choose(memory_module.load(), Alone(), 0, 1)
    for part in (
        "process 0 has no memory that processes can share",
        "pip install nvidia-nvshmem-cu13",
        "XEN_MOE_MEMORY=nccl in every process, which takes NCCL 2.31 or later",
    ):
        assert part in str(error.value), error.value


def test_an_nccl_that_is_too_old_is_named(nccl_home, monkeypatch):
    nccl_home()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22809")
    monkeypatch.setenv("XEN_MOE_MEMORY", "nccl")
    with pytest.raises(BackendUnavailable, match="NCCL 2.28.9 in .*pip install 'nvidia-nccl-cu13>=2.31'"):
        start.choose(memory_module.load(), Alone(), 0, 1)


def test_a_start_that_failed_fails_again_with_the_same_words(monkeypatch):
    """Another attempt would find the first one's keys in the store."""
    calls = []

    def start_memory(*arguments):
        calls.append(arguments)
        raise BackendUnavailable("no memory that processes can share")

    monkeypatch.setattr(start, "start_memory", start_memory)
    monkeypatch.setattr(start, "_failed", None)
    monkeypatch.setattr(start._jax_internals, "key_value_client", object)
    monkeypatch.setattr(start.jax, "local_device_count", lambda: 1)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="no memory that processes can share"):
            start.start(None)
    assert len(calls) == 1 and not start._started


# -- growth ------------------------------------------------------------------------------------------------------------


def test_all_grow_or_none_and_see_each_other_in_rank_order(tmp_path):
    with job("grow", tmp_path) as running:
        for process, result in enumerate(results(running)):
            assert result["errors"] == ["", "", ""]
            assert result["seen"] == [True, True]
            for error, full in zip(result["lacking"], (True, False, True), strict=True):
                assert "failed in process 1, so every process leaves its memory as it was" in error
                assert ("Cuda failure 2 'out of memory'" if full else "Cuda failure 801") in error
                assert ("XLA_CLIENT_MEM_FRACTION" in error) is full, "only lack of memory has this remedy"
            assert result["kept"] == [[0, 0]] * 3, process  # no window was begun, and all memory is given back
            staging = {w["channel"]: w["staging_bytes"] for w in result["listed"] if w["staging_bytes"]}
            assert staging == {0: LARGE_STAGING, 1: COUNT * SMALL_STAGING}
            assert set(result["kinds"]) == {"NCCL"}
            # A mailbox and a staging area; then another staging area, and both on the second channel; closing gives
            # back both staging areas of the first.
            assert result["windows"] == [2, 5, 3]
            far, none, after = result["unreachable"]
            assert "the memory of process 1 is not mapped into process " in far and "NVLink domain" in far
            for error in (none, after):
                assert "NCCL has no windows between these GPUs" in error and "NCCL_CUMEM_ENABLE" in error, process


# -- failure inside NCCL -----------------------------------------------------------------------------------------------


def test_a_process_that_dies_inside_nccl_holds_up_neither_growth_nor_close(tmp_path):
    with job("one_dies", tmp_path) as running:
        for process in running:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]
        time.sleep(0.5)
        running[1].send_signal(signal.SIGKILL)
        for result in results(running, 0, 2):
            first, second = result["errors"]
            assert first == "" and "process 1 has died" in second and result["waited"] < 10, result
            assert result["serves"] and result["aborted"] == 0  # an abort would unmap what kernels may use
            assert "(GPU 0 of process 1) has ended" in result["failure"]
            assert "process 1 has died" in result["closing"] and result["seconds"] < 40


def test_a_process_that_is_stuck_inside_nccl_ends_growth_and_leaves_what_there_is(tmp_path):
    with job("one_is_silent", tmp_path) as running:
        for result in results(running):
            first, second, third = result["errors"]
            assert first == "" and "had not ended after 2 s" in second
            assert "cannot grow any more; start all processes of the job again" in third
            assert result["serves"] and result["seen"] and result["aborted"] == 0


def test_a_process_that_has_given_up_ends_with_its_own_status_beside_a_thread_of_nccl(tmp_path):
    with job("ends_inside", tmp_path, anew=True) as running:
        for process in running:
            _, errors = process.communicate(timeout=HANG_S)
            assert process.returncode == 7 and "had not ended after 2 s" in errors, (process.returncode, errors[-2000:])


# -- device communicators ----------------------------------------------------------------------------------------------


def test_device_communicators_are_made_beside_windows_and_those_that_differ_end_growth(tmp_path):
    with job("devices", tmp_path) as running:
        for process, result in enumerate(results(running)):
            assert result["errors"] == ["", ""] and result["seen"]
            assert result["properties"] == [process, COUNT] and result["made"] == [[process, COUNT]] * 2
            for error in (result["different"], *result["after"]):
                assert "could not connect the GPUs with those of other nodes" in error
                assert "ranks ask for different device communicators" in error
                assert "cannot grow any more; start all processes of the job again" in error
            assert result["serves"] and result["aborted"] == 0  # kernels may use the windows


def test_a_process_that_dies_while_gpus_are_connected_is_named(tmp_path):
    with job("one_dies_connecting", tmp_path) as running:
        for process in running:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]
        time.sleep(0.5)
        running[1].send_signal(signal.SIGKILL)
        for process, result in zip((0, 2), results(running, 0, 2), strict=True):
            assert result["waited"] < 10, result
            assert process == 0 or "waits for process 1, which has died" in result["error"], result
            assert process == 2 or "rank 1 closed" in result["error"], result
            assert "could not connect the GPUs" in result["after"], result


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> list[dict]:
    """Returns the results of four processes in two nodes, whose ranks are in reverse order of the processes."""
    with job("nodes", tmp_path_factory.mktemp("two_nodes"), 4) as running:
        return results(running)


def test_two_nodes_share_windows_and_have_pointers_inside_alone(two_nodes):
    for process, result in enumerate(two_nodes):
        lacking, *grown = result["errors"]
        assert "failed in process 1, so every process leaves its memory as it was" in lacking
        assert grown == [""] * 3 and result["seen"] == [True] * 3, result
        first, second = result["windows"]
        assert first["processes"] == second["processes"] == [3, 2, 1, 0]
        assert first["connection"] == second["connection"] == [process, 4], "NCCL's rank is the process"
        assert first["mailbox"] == second["mailbox"] and first["staging"] != second["staging"]
        assert result["pointers"] == [[2, 3] if process < 2 else [0, 1]] * 2
        assert ["NCCL", 2] in result["kinds"]


def test_a_reset_waits_for_the_network_before_it_clears(two_nodes):
    for process, result in enumerate(two_nodes):
        assert result["settled"][:2] == [1, 2], "twice, by all"
        assert result["reset"] == [[True, "", 1000, 0], [True, "", 2000, 0]]
        assert process != 2 or "puts between nodes were still under way" in result["late"], result["late"]
        assert result["late"], "who waits for that process is told, too"


def test_operations_in_flight_between_nodes_have_a_connection_of_their_own(tmp_path):
    with job("flights_between_nodes", tmp_path, 4) as running:
        for process, result in enumerate(results(running)):
            assert result["errors"] == [""] * 3 and result["seen"] == [True] * 4, result
            assert result["connections"] == [[process, 4]] * 2 and result["mailboxes"] == 2
            assert "rank 0" in result["failed"], "they fail together"
            assert result["settled"] == [1, 1] and result["failure"] == ""
            assert result["kinds"] == [[True, "NCCL", 2], [False, "NCCL", 2]]


def test_a_reset_waits_for_nothing_of_a_process_that_has_ended(tmp_path):
    """Some ranks may be inactive: process 1 is rank 2 of two nodes, and puts to it never complete."""
    with job("node_goes_on", tmp_path, 4) as running:
        for process in running:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]
        running[1].send_signal(signal.SIGKILL)
        for result in results(running, 0, 2, 3):
            assert result == {"error": "", "without": [[], [2]], "settled": [1, 2], "failure": ""}


@pytest.mark.slow
def test_many_ranks_in_several_nodes(tmp_path):
    """Eighteen processes: more than a group of few ranks has counters for. One of them ends."""
    count = 18
    with job("many_nodes", tmp_path, count) as running:
        for process in running:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]
        running[1].send_signal(signal.SIGKILL)
        others = [p for p in range(count) if p != 1]
        for process, result in zip(others, results(running, *others), strict=True):
            assert result["errors"] == ["", ""] and result["seen"] == [True, True], result
            assert result["processes"] == [*reversed(range(count))]
            first = (count - 1 - process) // 6 * 6
            assert result["pointers"] == [[*range(first, first + 6)]] * 2
            assert result["without"] == [16] and result["counters"] == [1000, 0] and result["failure"] == ""


def test_processes_that_cut_an_axis_in_different_nodes_wait_no_longer_than_told(two_nodes):
    for process, result in enumerate(two_nodes):
        assert ("process 1" if process == 0 else "process 0") in result["cut"], result["cut"]


def test_a_process_that_dies_while_nodes_are_connected_is_named(tmp_path):
    with job("node_dies", tmp_path, 4) as running:
        for process in running:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()[-2000:]
        time.sleep(0.5)
        running[1].send_signal(signal.SIGKILL)
        for result in results(running, 0, 2, 3):
            assert result["waited"] < 10, result
            assert "rank 1 closed" in result["error"] or "process 1" in result["error"], result
