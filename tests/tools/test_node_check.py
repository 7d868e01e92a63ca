"""`tools/gpu_check.py --nodes` without GPUs: its place in a job, and a run of two processes on CPUs."""

import json
import sys
import threading

import pytest

from tests.support import processes

pytest.importorskip("tools.node_check", reason="tools are part of a checkout alone")

from tools import node_check

SLURM = {"SLURM_NTASKS": "16", "SLURM_PROCID": "11", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_ID": "70123"}


def test_slurm_says_where_a_process_is(monkeypatch):
    asked = []

    def shown(command, **_):
        asked.append(command)
        return type("Done", (), {"stdout": "first\nsecond\n"})

    monkeypatch.setattr(node_check.subprocess, "run", shown)
    place = node_check.find_place({}, SLURM | {"SLURM_JOB_NODELIST": "node[1-2]"})
    assert asked == [["scontrol", "show", "hostnames", "node[1-2]"]]
    assert place == node_check.Place("first:20123", 16, 11, 8, 3)
    assert place.at_step(2) == "first:20125"


def test_options_go_before_slurm():
    given = {"coordinator": "host:7000", "num_processes": 4, "process_id": 3, "processes_per_node": 2, "local_gpu": 0}
    assert node_check.find_place(given, SLURM) == node_check.Place("host:7000", 4, 3, 2, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "pass --num-processes, or run under Slurm, which sets SLURM_NTASKS"),
        ({"num_processes": 4, "process_id": 0}, "pass --processes-per-node"),
        (
            {"num_processes": 4, "process_id": 0, "processes_per_node": 4},
            "4 processes, 4 to a node: two or more nodes of one size are needed",
        ),
        ({"num_processes": 4, "process_id": 0, "processes_per_node": 3}, "4 processes, 3 to a node"),
    ],
)
def test_what_is_not_known_is_asked_for(given, message):
    with pytest.raises(ValueError, match=message):
        node_check.find_place(given, {})


def test_two_processes_run_and_one_json_says_what_came_of_it(tmp_path):
    """The second step's arguments are wrong, and the check goes on to say so."""
    steps = [node_check.Step("begin", 100, ("--cases", "none")), node_check.Step("wrong", 100, ("--nonsense",))]
    on_cpus = ("--backend", "reference", "--cpu_devices", "1")
    coordinator, failed = f"127.0.0.1:{processes.free_port()}", [None, None]

    def one(process: int) -> None:
        place = node_check.Place(coordinator, 2, process, 1, 0)
        failed[process] = node_check.run(tmp_path, place, steps, on_cpus)

    running = [threading.Thread(target=one, args=(process,)) for process in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    written = json.loads((tmp_path / "nodes.json").read_text())
    assert failed == [1, 1], [(tmp_path / f"nodes-{p}.txt").read_text()[-2000:] for p in range(2)]
    begin, wrong = written["steps"]
    assert begin["status"] == "passed" and begin["seen"]["ranks"] == 2 and begin["seen"]["failed"] == []
    assert wrong["status"] == "failed" and "nonsense" in wrong["output_end"] and wrong["seen"] is None
    assert written["processes"] == 2 and any(f["name"] == "libnccl" for f in written["doctor"]["Compiled modules"])
    assert "PASSED" in (tmp_path / "nodes-1.txt").read_text()
    assert str(sys.version_info.major) in written["doctor"]["Versions"][0]["detail"]
