"""The CUDA kernels, run on host threads by the emulator of this folder (README.md): no GPU, no CUDA, a minute or so."""

import json
import pathlib
import subprocess

import pytest

from tests.native.emulator import build
from tests.native.emulator.built import built, emulate, with_fault
from tests.support import HANG_S

PATIENCE = 20  # other tests run beside
SECONDS = HANG_S


@pytest.fixture(scope="session")
def harness() -> pathlib.Path:
    return built("harness")


# scenario, ranks, GPUs, multiprocessors of each, calls. One multiprocessor means that a block runs only when the one
# before it has ended: no block may wait for a block that has not started.
CASES = [
    ("normal", 4, 4, 64, 0),
    ("errors", 2, 2, 64, 0),
    ("normal", 3, 3, 1, 0),
    ("wrap", 2, 2, 64, 0),
    ("late", 2, 2, 64, 0),
    ("absent", 2, 2, 64, 100),
    ("skip", 3, 3, 64, 0),
    ("shapes", 3, 3, 64, 0),
    ("order", 3, 3, 64, 0),
    ("dead", 3, 3, 64, 0),
    ("indices", 2, 2, 64, 0),
    ("generations", 2, 2, 64, 0),
    ("company", 2, 2, 8, 0),
    ("concurrent", 2, 2, 64, 2),
    ("members", 2, 2, 64, 0),
    ("members", 3, 3, 64, 0),
    ("members", 3, 3, 1, 0),
    ("leaver", 3, 3, 12, 0),
    ("flying", 3, 3, 64, 50),
    ("graphs", 2, 2, 64, 15),
    ("few", 2, 2, 64, 300),
    ("few", 3, 3, 1, 60),
    ("broken", 2, 2, 8, 30),
    ("unmet", 3, 3, 64, 0),
    ("balance", 3, 3, 64, 60),
    ("balance", 2, 2, 1, 0),
    ("alone", 2, 2, 64, 150),
    ("numbers", 2, 2, 64, 60),
    ("numbers", 3, 3, 1, 30),
    ("random", 2, 2, 64, 1500),
    ("random", 4, 2, 64, 300),
    ("random", 3, 3, 2, 300),
]


@pytest.mark.parametrize("scenario, ranks, gpus, multiprocessors, calls", CASES)
def test_scenario(harness, tmp_path, scenario, ranks, gpus, multiprocessors, calls):
    out = tmp_path / "out.json"
    command = [harness, "--ranks", ranks, "--gpus", gpus, "--scenario", scenario, "--calls", calls]
    command += ["--patience", {"graphs": 4}.get(scenario, PATIENCE), "--json", out]
    done = emulate(command, seconds=SECONDS, multiprocessors=multiprocessors)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(out.read_text())["scenarios"]
    assert entry["name"] == scenario and entry["verdict"] == "passed"


@pytest.mark.parametrize("ranks, multiprocessors", [(18, 3), (33, 3), pytest.param(72, 2, marks=pytest.mark.slow)])
def test_many_ranks(harness, ranks, multiprocessors):
    """More ranks than a word has bits, in the kernels of the ranks256 variant: 72 is the largest NVLink domain."""
    done = wide(harness, ranks, multiprocessors)
    assert done.returncode == 0 and " passed " in done.stdout, done.stdout + done.stderr


def rings(program, ranks, multiprocessors, calls=0):
    command = [program, "--ranks", ranks, "--gpus", ranks, "--scenario", "rings", "--patience", 4, "--calls", calls]
    return emulate(command, seconds=SECONDS, multiprocessors=multiprocessors)


@pytest.mark.parametrize(
    "ranks, multiprocessors, calls",
    [
        (17, 1, 0),
        (18, 3, 10),
        pytest.param(18, 1, 100, marks=pytest.mark.slow),
        pytest.param(33, 3, 0, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_many_ranks(harness, ranks, multiprocessors, calls):
    """More tokens than their rings hold: docs/design/nodes_kernels.md. One multiprocessor: one block at a time."""
    done = rings(harness, ranks, multiprocessors, calls)
    assert done.returncode == 0 and " passed " in done.stdout, done.stdout + done.stderr


RING_FAULTS = {
    "no-credit": (
        "core/rounds.cuh",
        "if (!rounds.AwaitCredits(item / per_round + kRoundsAhead - kRingRounds + 1, &credited)) return;",
        "",
    ),
    "early-credit": ("core/rounds.cuh", "!= static_cast<uint32_t>(items)", "!= 1u"),
    "no-row": (
        "dispatch/dispatch.cuh",
        "arrived = WaitFlag(flags + RowFlagIndex(p, source, token, part), shared.run, epoch, Step::kRows, source);",
        "arrived = true;",
    ),
    "no-partial": (
        "combine/combine.cuh",
        "arrived = waits ? WaitFlag(flag, shared.run, epoch, Step::kRows, rank) : LoadAcquireSystem(flag) == epoch;",
        "arrived = true;",
    ),
}


@pytest.mark.parametrize(
    "fault", [*list(RING_FAULTS)[:1], *(pytest.param(f, marks=pytest.mark.slow) for f in list(RING_FAULTS)[1:])]
)
def test_a_fault_in_the_rings_is_seen(harness, fault):
    """Rows stored before their place is free, in two ways, and rows taken before they have come."""
    file, *texts = RING_FAULTS[fault]
    program = with_fault(harness, fault, {f"cuda_kernels/{file}": tuple(texts)}, units="ranks256_ring.")
    done = rings(program, 18, 3)
    assert done.returncode == 1 and "wrong vectors" in done.stdout, done.stdout + done.stderr


def test_a_wait_for_rows_that_is_hidden_is_seen(harness):
    """A rank shows the peer whose credit it waits for, though it waits for rows too: a rank that gives up could name
    the wrong peer."""
    faults = {"cuda_kernels/core/failure.cuh": ("(!YieldsToRows(step) || !ShowsRows(run))", "true")}
    done = rings(with_fault(harness, "hides-rows", faults, units="ranks256_ring."), 18, 3)
    assert done.returncode == 1 and "not for 17 in step 2" in done.stdout, done.stdout + done.stderr


def wide(program, ranks, multiprocessors):
    command = [program, "--ranks", ranks, "--gpus", ranks, "--scenario", "wide", "--patience", 4]
    return emulate(command, seconds=SECONDS, multiprocessors=multiprocessors)


def test_a_fault_in_the_sets_of_many_ranks_is_seen(harness):
    """Ranks of the second word are not counted: their partial rows are left out of sums."""
    before = "for (int w = 0; w < kRankWords; ++w) count += __popc(ranks.word[w]);"
    faults = {"cuda_kernels/core/rank_mask.cuh": (before, before.replace("w < kRankWords", "w < 1"))}
    done = wide(with_fault(harness, "wide-fault", faults, units="ranks256."), 33, 3)
    assert done.returncode == 1 and "wrong vectors" in done.stdout, done.stdout + done.stderr


def test_a_scenario_of_few_ranks_is_refused_for_many(harness):
    command = [harness, "--ranks", "17", "--gpus", "17", "--scenario", "normal"]
    done = emulate(command, seconds=SECONDS)
    assert done.returncode == 2 and "--scenario wide" in done.stderr
    command[2] = "257"
    done = emulate(command, seconds=SECONDS)
    assert done.returncode == 2 and "2 to 256" in done.stderr


FAULTS = {
    "wrong-bytes": (
        "exchange/ring.cuh",
        "p.chunk_bytes, p.operand + chunk.at, chunk.bytes",
        "p.chunk_bytes, p.operand, chunk.bytes",
    ),
    "missing-wait": (
        "exchange/ring.cuh",
        "return WaitFlag(flag, run, epoch, Step::kRows, source);",
        "return true;",
    ),
    "early-line": (
        "low_latency/ll128.cuh",
        "piece.line < lines && v.w != epoch",
        "piece.line < lines && v.w > epoch",
    ),
    "row-twice": ("low_latency/few.cuh", "(keys.y - least < below)", "0"),  # rows of few tokens on one another
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_seen(harness, fault):
    """The kernels with one fault in them: a chunk sent again and again, rows or lines taken before they came."""
    file, *texts = FAULTS[fault]
    program = with_fault(harness, fault, {f"cuda_kernels/{file}": tuple(texts)}, units="ranks16.")
    scenario = ["few", "--calls", "100"] if fault == "row-twice" else ["normal"]
    command = [program, "--ranks", "2", "--gpus", "2", "--scenario", *scenario, "--patience", "20"]
    done = emulate(command, seconds=SECONDS)
    assert done.returncode == 1 and "FAILED" in done.stdout and "wrong vectors" in done.stdout, done.stdout


def test_a_rank_that_shows_the_wrong_one_is_seen(harness):
    """Blocks wait beside the block that meets the other ranks: `Announcements::AwaitOwn` of operation.cuh."""
    faults = {"cuda_kernels/core/operation.cuh": ("  announcements.AwaitOwn();\n", "")}
    program = with_fault(harness, "not-own", faults, units="ranks16.exchange.")
    command = [program, "--ranks", 3, "--gpus", 3, "--scenario", "unmet", "--calls", 0, "--patience", PATIENCE]
    done = emulate(command, seconds=SECONDS)
    assert done.returncode == 1 and "shows that it waits for" in done.stdout, done.stdout + done.stderr


def test_shared_memory_that_no_kernel_asked_for_is_an_error(harness):
    faults = {"cuda_kernels/core/launch.cuh": ("if (shared_bytes == 0)", "if (shared_bytes >= 0)")}
    program = with_fault(harness, "not-asked", faults, units="ranks16.dispatch.")
    done = emulate([program, "--ranks", 2, "--gpus", 2, "--scenario", "normal"], seconds=SECONDS)
    assert done.returncode != 0 and "shared memory that it was not granted" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        'asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(a));',
        'asm volatile("ld.const.u32 %0, [%1];" : "=r"(v) : "l"(p));',
    ],
)
def test_an_unknown_instruction_is_an_error(statement):
    with pytest.raises(build.Untranslated):
        build.translate(statement)


def test_a_kernel_that_lets_the_next_one_in_is_an_error():
    """XLA launches its kernels early and reads results as if no kernel still wrote them."""
    with pytest.raises(build.Untranslated, match="launch.cuh"):
        build.translate('asm volatile("griddepcontrol.launch_dependents;" ::: "memory");')


LATER = """
#include <cstdio>
__global__ void Wait(const volatile int* go) {
  while (!*go) ::emulator::Poll();
}
__global__ void Write(int* out, int value) { *out = value; }
int main() {
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  int memory[2] = {}, value = 7;
  int *const go = memory, *const out = memory + 1;
  auto read = [&] { return value; };
  Wait<<<1, 1, 0, stream>>>(go);
  Write<<<1, 1, 0, stream>>>(out, read());
  value = 8;
  *static_cast<volatile int*>(go) = 1;
  cudaStreamSynchronize(stream);
  std::printf("%d\\n", *out);
}
"""


def test_a_kernel_gets_its_arguments_as_they_are_when_it_is_launched(harness, tmp_path):
    """Not when it runs: the caller's variables may be gone by then."""
    source, program = tmp_path / "later.cc", tmp_path / "later"
    source.write_text(build.translate(LATER))
    runtime = [harness.parent / f"{unit.name}.o" for unit in build.RUNTIME]
    command = [*build.compiler(harness.parent), source, *runtime, "-o", program]
    subprocess.run(list(map(str, command)), check=True)
    done = emulate([program], seconds=SECONDS)
    assert done.returncode == 0 and done.stdout == "7\n", done.stdout + done.stderr
