"""`tools/tpu_check.py` without TPUs: faults planted in kernels are reported rightly, and what it says of them.

Here the kernels run in Pallas's interpreter. What a rehearsal cannot show is a chip: whether a killed process lets it
go, and the names that its profiler gives to kernels, of which a profile written by hand takes the place.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import sys
import threading
import time

import pytest

from tests.support import HANG_S, ROOT, processes

pytest.importorskip("tools.tpu_check", reason="tools are part of a checkout alone")
pytest.importorskip("jax.experimental.pallas.tpu")

from benchmarks.tpu import chip, further, watch
from benchmarks.tpu import here as places
from tools import tpu_check
from tools.steps import HUNG, Outcome
from xen_moe_jax import _check_command


def check(out, *arguments: str, devices: int = 4, seconds: float = 900) -> tuple[int, dict, str]:
    """Exit status, report and output of a rehearsal."""
    command = [sys.executable, str(ROOT / "tools" / "tpu_check.py"), str(out), "--rehearse", str(devices), *arguments]
    (done,) = processes.run_all([command], seconds=seconds, env=processes.environment())
    path = out / "tpu_check.json"
    assert path.exists(), done.output[-4000:]
    return done.returncode, json.loads(path.read_text()), done.output


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_kernel_that_hangs_is_named_with_its_semaphore(tmp_path):
    """A rank that never announces itself: its peers wait at the barrier."""
    arguments = ("--steps", "drop-ins", "--plant", "hang:xen_moe_exchange", "--hang-seconds", "30")
    status, report, output = check(tmp_path, *arguments)
    assert status == 1 and [step["status"] for step in report["steps"]] == [HUNG], output[-3000:]
    hang = report["hangs"]["drop-ins"]
    assert hang["program"].endswith("TestChips::test_ragged_all_to_all_in_segments"), hang
    assert (hang["kernel"], hang["kernel_number"], hang["semaphore"]) == ("xen_moe_exchange", 1, "barrier"), hang
    assert f"in xen_moe_exchange (kernel 1), at barrier: {watch.WAITS['barrier']}" in output


@pytest.mark.slow
def test_one_of_many_kernels_that_hangs_is_named(tmp_path):
    arguments = ("--steps", "conformance", "--plant", "hang:xen_moe_reduce_slots", "--hang-seconds", "60")
    _, report, output = check(tmp_path, *arguments)
    hang = report["hangs"]["conformance"]
    assert (hang["kernel"], hang["semaphore"]) == ("xen_moe_reduce_slots", "barrier"), output[-3000:]
    assert hang["kernels"][hang["kernel_number"] - 1] == "xen_moe_reduce_slots"


def test_a_wrong_kernel_fails_the_step_and_the_next_one_runs(tmp_path):
    """The first step's program has the kernel, the second one's has not."""
    status, report, output = check(tmp_path, "--steps", "drop-ins,few-tokens", "--plant", "wrong:xen_moe_reduce_ranks")
    drop_ins, few = (next(s for s in report["steps"] if s["step"] == name) for name in ("drop-ins", "few-tokens"))
    assert status == 1 and drop_ins["status"] == "passed" and few["status"] == "exit status 1", output[-3000:]
    assert [name.rpartition("::")[2] for name in few["failures"]] == ["test_dispatch_and_combine[padded/uniform]"]
    assert report["verdicts"] == [f"failed: {few['failures'][0]}"] and not report["hangs"]


def test_a_slow_kernel_is_named(tmp_path):
    status, report, output = check(tmp_path, "--steps", "counted,kernels", "--plant", "slow:xen_moe_place")
    assert status == 0, output[-3000:]
    slow = [(e["kernel"], e["operation"]) for e in report["measured"]["compared"]["kernels"] if e["slow"]]
    assert slow == [("xen_moe_place", "dispatch")], report["measured"]["compared"]
    (line,) = report["verdicts"]
    assert line.startswith("slow: xen_moe_place of throughput-bf16 dispatch") and line in output


@pytest.mark.slow
def test_a_whole_rehearsal_without_a_fault(tmp_path):
    status, report, output = check(tmp_path, seconds=5400)
    assert status == 0 and report["verdicts"] == [], output[-6000:]
    assert [step["step"] for step in report["steps"]] == [step.name for step in tpu_check.STEPS]
    assert {"counted", "operations", "kernels", "layer", "compared"} <= report["measured"].keys()


def test_several_hosts_check_together(tmp_path):
    """Two processes of two devices; plain JAX takes the place of the kernels, which are interpreted in one process."""
    coordinator = f"127.0.0.1:{processes.free_port()}"
    results = [None, None]

    def one(process: int) -> None:
        arguments = ("--coordinator", coordinator, "--num-processes", "2", "--process-id", str(process))
        command = [sys.executable, str(ROOT / "tools" / "tpu_check.py"), str(tmp_path), "--rehearse", "2", *arguments]
        command += ["--steps", "conformance,sizes"]
        (results[process],) = processes.run_all([command], seconds=600, env=processes.environment())

    running = [threading.Thread(target=one, args=(process,)) for process in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(done.ok for done in results), [done.output[-3000:] for done in results]
    for name in ("tpu_check.json", "tpu_check-1.json"):
        report = json.loads((tmp_path / name).read_text())
        assert (report["devices"]["devices"], report["devices"]["processes"]) == (4, 2)
        assert [step["status"] for step in report["steps"]] == ["passed", "passed"]


# -- what it says -----------------------------------------------------------------------------------------------------

KERNELS = [["push", "peer"], ["place", "here"], ["reduce_slots", "peer"], ["reduce_ranks", "here"]]


WHY = watch.WAITS | {None: "without any one of its waits it hangs, too"}


class Searched(tpu_check.Search):
    """A test that hangs in the kernel of this number, in this wait; without kernels at all where `number` is None."""

    def __init__(self, number, wait):
        super().__init__("a::b", {}, None, 1, io.StringIO())
        self.number, self.wait, self.runs = number, wait, 0

    def ends(self, kept, without=None):
        self.runs += 1
        return self.number is not None and (kept <= self.number or without is not None and without == self.wait)


@pytest.mark.parametrize("wait", [*watch.WAITS, None])
@pytest.mark.parametrize("number", range(4))
def test_the_kernel_and_the_semaphore_are_found(number, wait):
    search = Searched(number, wait)
    last = {"program": "a::b", "kernels": KERNELS, "waits": watch.WAITS}
    found = tpu_check.name_hang(Outcome("step", HUNG, 1.0), search, last)
    assert (found["kernel"], found["kernel_number"]) == (KERNELS[number][0], number + 1)
    if KERNELS[number][1] == "here":
        assert found["semaphore"] is None and "its own DMAs alone" in found["why"]
    else:
        assert found["semaphore"] == wait and found["why"] == watch.WAITS.get(
            wait, "without any one of its waits it hangs, too"
        )
    assert search.runs <= 2 + 2 + len(watch.WAITS)


def test_a_hang_that_is_not_of_a_kernel_is_not_blamed_on_one():
    last = {"program": "a::b", "kernels": KERNELS, "waits": watch.WAITS}
    hung, without = Outcome("step", HUNG, 1.0), {"kernel": None, "semaphore": None}
    assert tpu_check.name_hang(hung, Searched(None, None), last).items() >= without.items()
    assert tpu_check.name_hang(hung, Searched(9, None), last).items() >= without.items()  # run again, it ends
    assert tpu_check.name_hang(hung, None, last).items() >= (without | {"program": "a::b"}).items()
    line = tpu_check.verdicts([], {"step": tpu_check.name_hang(hung, None, last)}, {})
    assert line == ["hung: step: a::b in a kernel not told apart: kernels are told apart in tests, on one host"]


def test_only_a_program_that_runs_can_hang(tmp_path):
    progress = tpu_check.Progress(tmp_path / "progress.json", 5.0)
    assert not progress.hangs()
    for phase, since, hangs in (("compiling", 100, False), ("running", 1, False), ("running", 100, True)):
        progress.path.write_text(json.dumps({"phase": phase, "since": time.time() - since}))
        assert progress.hangs() == hangs
    progress.path.write_text("{")
    assert not progress.hangs()


def test_measured_over_counted():
    """One of five kernels takes thirty times as long for its count as the other four; one was not counted."""
    row = {"case": "c", "operation": "dispatch", "kernels": dict.fromkeys("abcde", 10.0), "floor_us": 40.0}
    row |= {"bytes_us": {"a": 5.0, "e": 12.5}}  # the bytes of e take longer than its bundles
    us = {"a": 20.0, "b": 22.0, "c": 600.0, "d": 18.0, "e": 25.0, "f": 5.0}
    measured = [{"case": "c", "operation": "dispatch", "by": "profile", "us": us}]
    operations = [{"case": "c", "operation": "dispatch", "program": chip.OURS, "us": 80.0}]
    operations.append({"case": "c", "operation": "dispatch", "program": "peer", "us": 90.0})
    found = chip.compared([row], measured, operations)
    assert {e["kernel"]: e["ratio"] for e in found["kernels"]} == {
        "a": 2.0, "b": 2.2, "c": 60.0, "d": 1.8, "e": 2.0, "f": None
    }  # fmt: skip
    assert found["median_ratio"] == 2.0 and [e["kernel"] for e in found["kernels"] if e["slow"]] == ["c"]
    assert [(o["program"], o["ratio"]) for o in found["operations"]] == [(chip.OURS, 2.0)]
    text = chip.table(found, operations)
    assert len(text.splitlines()) == 2 + 6 + 2 and text.count("SLOW") == 1


def test_a_static_estimate_is_written_after_every_row(tmp_path, monkeypatch):
    """A process that is killed later has left the rows that it had counted."""
    path, written = tmp_path / "counts.json", []

    def counted(one, *_):
        written.append(json.loads(path.read_text())["rows"] if path.exists() else [])
        return {"operation": one}

    monkeypatch.setenv(places.COMPILE_FOR, "")  # the part sets it
    monkeypatch.setattr(chip, "further_programs", lambda small: [("a", None), ("b", None)])
    monkeypatch.setattr(further, "counted", counted)
    found = chip.counted_further("v5e", 8, False, "", functools.partial(chip.write, path))
    assert written == [[], [{"operation": "a"}]] and json.loads(path.read_text()) == found
    assert found["topology"] == "v5e:2x4"


def test_a_kernel_takes_what_a_program_with_it_takes_longer():
    assert chip.differences(["a", "b", "a"], [1.0, 4.0, 3.5, 5.5]) == {"a": 3.0 + 2.0, "b": 0.0}


PROFILE = """
planes { name: "/device:TPU:0"
  lines { name: "XLA Ops"
    events { metadata_id: 1 duration_ps: 6000000 } events { metadata_id: 1 duration_ps: 8000000 }
    events { metadata_id: 2 duration_ps: 9000000 } events { metadata_id: 3 duration_ps: 5000000 } }
  lines { name: "XLA Modules" events { metadata_id: 2 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "%xen_moe_push.3 = s32[8]{0} custom-call(%a)" } }
  event_metadata { key: 2 value { id: 2 name: "xen_moe_reduce_slots.1" } }
  event_metadata { key: 3 value { id: 3 name: "%fusion.2 = f32[8]{0} fusion(%xen_moe_push.3)" } } }
planes { name: "/device:TPU:1"
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 20000000 } }
  event_metadata { key: 1 value { id: 1 name: "%xen_moe_push.3 = s32[8]{0} custom-call(%a)" } } }
planes { name: "/host:CPU" lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "xen_moe_place" } } }
"""


def test_kernels_of_a_profile():
    """Two calls, two devices: the slower one counts."""
    from jax.profiler import ProfileData

    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(PROFILE))
    assert chip.kernels_of_profile(profile, 2) == {"xen_moe_push": 10.0, "xen_moe_reduce_slots": 4.5}


def test_every_step_that_is_rehearsed_says_what_it_runs():
    named = {step.name for step in tpu_check.STEPS}
    assert set(tpu_check.REHEARSED) < named and set(tpu_check.ONE_AXIS) < named and set(tpu_check.ONE_CHIP) < named
    assert len(named) == len(tpu_check.STEPS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plant", "hang:xen_moe_push"], "--plant: only with --rehearse"),
        (["--num-processes", "2"], "--num-processes 2: needs --coordinator HOST:PORT"),
        (["--rehearse", "--steps", "conformance,smoke"], r"--steps: unknown \['smoke'\]; there are"),
    ],
)
def test_arguments_that_do_not_go_together(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        tpu_check.main([str(tmp_path), *arguments])


def test_recipes_run_the_check():
    """The check takes the arguments of every recipe, and the hosts of the recipe for GKE have as many chips as its
    topology."""
    yaml = pytest.importorskip("yaml")
    recipe, page = (ROOT / name for name in ("tools/tpu_check_gke.yaml", "docs/user/tpu.md"))
    (slices,) = yaml.safe_load(recipe.read_text())["spec"]["replicatedJobs"]
    hosts = slices["template"]["spec"]
    pod = hosts["template"]["spec"]
    (container,) = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert hosts["completions"] == hosts["parallelism"]
    assert hosts["completions"] * chips == math.prod(map(int, topology.split("x")))
    commands = re.findall(r"tools/tpu_check\.py (OUT[^;\"\n]*)", container["command"][-1] + page.read_text())
    parsed = [tpu_check.build_parser().parse_args(arguments.split()) for arguments in commands]
    assert [options.coordinator for options in parsed] == ["auto", None, "auto"]


@pytest.mark.parametrize(("name", "value"), [(watch.PLANT, "late:x"), (watch.WITHOUT, "sleep")])
def test_a_fault_or_wait_that_does_not_exist_is_an_error(name, value):
    program = [sys.executable, "-c", "from benchmarks.tpu import watch; watch.install()"]
    (done,) = processes.run_all([program], seconds=HANG_S, env=processes.environment(**{name: value}))
    assert done.returncode == 1 and f"{name}={value}" in done.output and "must be one of" in done.output


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "program", "first"),
    [("tpu", "tpu_check.py", []), ("gpu", "gpu_check.py", []), ("cpu", "tpu_check.py", ["--rehearse"])],
)
def test_the_command_chooses_the_program(platform, program, first):
    command = _check_command.command_for(platform, ["out", "--steps", "info"])
    assert command[1:] == [str(ROOT / "tools" / program), "out", "--steps", "info", *first]


def test_the_command_finds_the_platform_and_says_what_it_lacks(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    assert _check_command.find_platform() == "cpu"
    monkeypatch.setattr(_check_command, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        _check_command.main([str(tmp_path), "--platform", "cpu"])
    assert ended.value.code == 2 and "clone the repository" in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "nonsense")
    with pytest.raises(ValueError, match="JAX does not start here .*nonsense.*xen-moe-jax doctor"):
        _check_command.find_platform()
