"""The programs that `tools/tpu_check.py` runs on TPUs, compiled ahead of time by libtpu for the chips of one host.

`make test` compiles one of each class of tests for one host. CI compiles every kernel for every host and each kind of
step for most; `slow` compiles all programs at their full sizes.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
pytest.importorskip("tools.tpu_check", reason="tools are part of a checkout alone")

from benchmarks.tpu import chip, further
from benchmarks.tpu.here import COMPILE_FOR
from tests.support import ROOT, processes
from tools import tpu_check

pytestmark = pytest.mark.tpu_aot

HOSTS = {"v4-8": "v4:2x2x1", "v5e-8": "v5e:2x4", "v5p-8": "v5p:2x2x1", "v6e-8": "v6e:2x4", "7x-8": "tpu7x:2x2x1"}
"""The name of a host, and its topology."""
REFUSED = "TestChips and ([grouped-mxfp4/uniform] or [grouped-f16/uniform])"
"""Tests that say why they do not run on a TPU."""
QUICK = "(TestHalves and [ranked/uniform]) or (TestFewTokens and [padded/uniform]) or (TestOneChip and in_segments)"
LARGEST = ("values[8192]", "DeepSeek")
"""Kinds of programs that fill the memory of their chip: compiled for every host."""
KINDS = (
    "(TestChips and [grouped/uniform])",
    "(TestChips and [grouped-fp8/uniform])",
    "(TestChips and [padded-scaled-int8/uniform])",
    "(TestChips and grouped-two-axes/uniform)",
    "(TestChips and in_segments)",
    "(TestChips and start_and_done)",
    "(TestChips and test_gradients and grouped)",
    "(TestFewTokens and [padded-fp8-ue8m0/uniform])",
    "(TestHalves and [grouped/uniform])",
    "(TestHalves and padded-two-axes)",
    "values[1]",
    "values[4096-fp8]",
)
"""The other kinds: each is compiled for three of the five hosts, and each of its kernels for all five."""
WHY_NOT = ("the TPU kernels take", "the TPU kernels have none", "needs ", "does not leave its slice")
"""One of these is in the reason of each test whose program is none for the topology."""
OUTCOME = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.*)$", re.MULTILINE)


def compile_tests(topology: str, expression: str) -> int:
    """Returns how many tests' programs were compiled; the others say why they do not run on a TPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/tpu", "-k", expression]
    (done,) = processes.run_all([command], seconds=3000, env=processes.environment(**{COMPILE_FOR: topology}))
    assert done.returncode == 0 and " failed" not in done.output, done.output[-6000:]
    found = [(int(number), reason) for number, reason in OUTCOME.findall(done.output)]
    rest = {reason for _, reason in found if not reason.startswith(f"compiled for {topology}")}
    assert all(any(why in reason for why in WHY_NOT) for reason in rest), rest
    return sum(number for number, reason in found if reason.startswith(f"compiled for {topology}"))


def compile_part(topology: str, part: str, folder, *arguments: str, before: str = "") -> list[dict]:
    """Returns the programs of a part of `benchmarks.tpu.chip`, with their kernels. `before`: lines that run first."""
    path = folder / "part.json"
    run = f"{before}\nfrom benchmarks.tpu import chip\nchip.main()"
    command = [sys.executable, "-c", run, part, "--json", str(path), *arguments]
    (done,) = processes.run_all([command], seconds=3000, env=processes.environment(**{COMPILE_FOR: topology}))
    assert done.ok, done.output[-4000:]
    document = json.loads(path.read_text())
    assert document["rows"] == []
    return document["programs"]


def test_some_programs_compile():
    assert compile_tests(HOSTS["v5p-8"], f"{QUICK} or ({REFUSED})") == 3


def counts(host: str, part: str, folder, *arguments: str) -> list[dict]:
    """Returns the rows of the static estimate."""
    path, (generation, devices) = folder / "counts.json", chip.HOSTS[host]
    command = [sys.executable, "-m", "benchmarks.tpu.chip", part, "--json", str(path), "--generation", generation]
    command += ["--devices", str(devices), *arguments]
    (done,) = processes.run_all([command], seconds=3000, env=processes.environment())
    assert done.ok, done.output[-4000:]
    return json.loads(path.read_text())["rows"]


def assert_compiled(rows: list[dict], absent: set[str]) -> None:
    """Every kernel that no dispatch or combine has is in one of the programs."""
    compiled = {kernel for row in rows for kernel in row["compiled"]}
    assert set(further.KERNELS) - set(further.OF_OPERATIONS) - absent <= compiled <= set(further.KERNELS)


@pytest.mark.parametrize("host", HOSTS)
def test_every_kernel_compiles(host, tmp_path):
    """At small sizes, of which none has rows enough for both cores of a device."""
    assert_compiled(counts(host, "counted-further", tmp_path, "--small"), {"xen_moe_decode_sums"})


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_every_kernel_has_a_count(host, tmp_path):
    """At full size. One kernel adds up the rows of two cores, where a device has two and VMEM for a layer of many
    tokens."""
    rows = counts(host, "counted-further", tmp_path)
    assert_compiled(rows, {"xen_moe_decode_sums"} if host != "v5p-8" else set())
    for row in rows:
        assert set(row["compiled"]) == set(row["kernels"]) and row["uncounted"] == {}, row
        assert all(us > 0 for us in row["kernels"].values()), row


def test_every_kernel_is_timed():
    """The check knows the name of each kernel that `pallas_kernels/` gives to one on TPUs."""
    folder = ROOT / "pallas_kernels"
    named = {name for path in folder.glob("*.py") for name in re.findall(r'"(xen_moe_\w+)"', path.read_text())}
    assert named == set(further.KERNELS)


@pytest.mark.parametrize("host", HOSTS)
def test_each_kind_of_program_compiles(host):
    place = list(HOSTS).index(host)
    kinds = [*LARGEST, *(kind for number, kind in enumerate(KINDS) if (number + place) % len(HOSTS) < 3)]
    assert compile_tests(HOSTS[host], " or ".join(kinds)) == len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_every_program_compiles(host):
    assert compile_tests(HOSTS[host], "not TestOneChip and not small_tokens") > 300


def test_one_chip():
    """The steps that a machine with a single chip runs."""
    chosen = "TestOneChip and ([grouped/uniform] or (test_gradients and ranked) or in_segments)"
    assert compile_tests("v5e:2x2", chosen) == 3


def test_two_slices():
    """The step that two slices of four chips run has its slow axis between them; on one axis nothing leaves a slice."""
    chosen = [step.name for step in tpu_check.possible(list(tpu_check.STEPS), 8, 2)]
    assert chosen == ["info", "plain-jax", "counted", "counted-further", "two-axes"]
    assert compile_tests("v5e:2x2/2", "TestChips and (grouped-two-axes/uniform or [grouped/uniform])") == 1


def assert_timed(programs: list[dict], cases: int, peers: int) -> None:
    """Dispatch and combine of each case; a round trip of those with peers, beside them."""
    own = [p for p in programs if p["program"].endswith(", xen_moe_jax (pallas)")]
    assert len(own) == 2 * cases + peers and all(p["kernels"] for p in own)
    assert len(programs) == len(own) + peers * (len(chip.PEERS) + 1)


def assert_fewer_and_fewer(programs: list[dict], operations: int) -> None:
    """A program for each kernel of an operation, besides the whole, with so many kernels in their order. The kernel of
    a start half comes with that of its done half, which waits for its DMAs."""
    whole = [p for p in programs if p["program"].endswith(", whole")]
    assert len(whole) == operations and len(programs) == sum(1 + len(p["kernels"]) for p in whole)
    for all_of_them in whole:
        label = all_of_them["program"].removesuffix("whole")
        fewer = [p for p in programs if p["program"].startswith(label) and p is not all_of_them]
        kernels = all_of_them["kernels"]
        kept = [n + (kernels[n - 1 : n] == ["xen_moe_start"]) for n in range(len(fewer))]
        assert [p["compiled"] for p in fewer] == [kernels[:n] for n in kept]


def test_what_is_timed_of_a_decode_compiles(tmp_path):
    decode = ("--cases", "low-latency-bf16")
    assert_timed(compile_part(HOSTS["v5e-8"], "operations", tmp_path, *decode), 1, 1)
    assert_fewer_and_fewer(compile_part(HOSTS["v4-8"], "kernels", tmp_path, *decode), 2)


def test_halves_of_which_nothing_is_read_are_timed(tmp_path):
    """Kernels of a start and a done half, whose results nothing reads where later kernels are left out."""
    halves = "from benchmarks.tpu import further as f\nf.FURTHER = [o for o in f.FURTHER if 'halves' in o.operation]"
    assert_fewer_and_fewer(compile_part(HOSTS["v5e-8"], "further", tmp_path, "--small", before=halves), 2)


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_all_that_is_timed_compiles(host, tmp_path):
    cases = len(chip.cases(False))
    assert_fewer_and_fewer(compile_part(HOSTS[host], "further", tmp_path), len(further.FURTHER))
    assert_timed(compile_part(HOSTS[host], "operations", tmp_path), cases, len(chip.AGAINST_PEERS))
    assert_fewer_and_fewer(compile_part(HOSTS[host], "kernels", tmp_path), 2 * cases)
    layers = compile_part(HOSTS[host], "layer", tmp_path)
    assert [bool(p["kernels"]) for p in layers] == [True, True, False]


@pytest.mark.parametrize("host", HOSTS)
def test_the_chip_of_a_host_is_known(host):
    """The generation and number of devices are enough to count for the same chip."""
    from benchmarks.tpu import topologies
    from xen_moe_jax.backends.pallas.hardware import GENERATIONS

    generation = HOSTS[host].partition(":")[0]
    devices = topologies.devices(generation, topology=HOSTS[host])
    assert GENERATIONS[devices[0].device_kind].name == generation
    assert topologies.TOPOLOGIES[generation].topology_of(len(devices)) == HOSTS[host]
    assert tpu_check.MESH <= len(devices) == {"v4": 4, "v5p": 4}.get(generation, 8)
