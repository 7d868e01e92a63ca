"""Kernels across nodes, on the emulator: the network that they are tested over by itself, then the kernels over it."""

import json
import pathlib

import pytest

from tests.native.emulator import build
from tests.native.emulator.built import built, emulate, with_fault
from tests.support import HANG_S

SECONDS = HANG_S


@pytest.fixture(scope="session")
def network_test() -> pathlib.Path:
    return built("network_test")


@pytest.fixture(scope="session")
def nodes() -> pathlib.Path:
    return built("nodes")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_network_keeps_its_rules_and_each_rule_is_needed(network_test, seed):
    done = emulate([network_test, "all", seed], seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed ") == 19 and done.stdout.count("a rule is broken") == 7, done.stdout


@pytest.fixture(scope="session")
def nodes_ranks256() -> pathlib.Path:
    return built("nodes_ranks256")


@pytest.fixture(scope="session")
def paced() -> pathlib.Path:
    return built("paced")


def run(program, scenario, ranks, per_node, link="network", multiprocessors=64, **options):
    command = [program, "--ranks", ranks, "--per-node", per_node, "--gpus", ranks, "--link", link]
    command += ["--scenario", scenario, "--patience", options.pop("patience", 20)]
    seconds = options.pop("seconds", SECONDS)
    for name, value in options.items():
        command += [f"--{name}", value]
    return emulate(command, seconds=seconds, multiprocessors=multiprocessors)


def run_until_seen(*arguments, seeds=(1, 2, 3, 4), **options):
    """With one seed after the other, until the program fails: some faults show only as things happen to come."""
    for seed in seeds:
        done = run(*arguments, seed=seed, **options)
        if done.returncode:
            break
    return done


# scenario, ranks, ranks of a node, link, multiprocessors. With one multiprocessor a block must not wait for a block
# that has not started.
CASES = [
    ("normal", 4, 2, "network", 64),
    ("normal", 4, 1, "network", 64),
    ("normal", 6, 2, "network", 1),
    ("normal", 4, 2, "peer", 64),
    ("graph", 4, 2, "network", 64),
    ("absent", 4, 2, "network", 64),
    ("mismatch", 6, 2, "network", 64),
    ("dead", 4, 2, "network", 64),
    ("members", 4, 2, "network", 64),
    ("growth", 4, 2, "network", 64),
    ("overtaken", 4, 2, "network", 64),
    ("left", 4, 2, "network", 64),
    ("apart", 4, 2, "network", 3),
    ("chain", 6, 2, "network", 3),
    pytest.param("normal", 6, 3, "network", 64, marks=pytest.mark.slow),
    pytest.param("random", 4, 2, "network", 64, marks=pytest.mark.slow),
    pytest.param("random", 6, 3, "network", 64, marks=pytest.mark.slow),
    pytest.param("absent", 4, 1, "network", 64, marks=pytest.mark.slow),
    pytest.param("members", 6, 3, "network", 64, marks=pytest.mark.slow),
    pytest.param("members", 6, 2, "network", 1, marks=pytest.mark.slow),
    pytest.param("members", 4, 1, "network", 64, marks=pytest.mark.slow),
    pytest.param("growth", 6, 2, "network", 1, marks=pytest.mark.slow),
    pytest.param("overtaken", 4, 1, "network", 64, marks=pytest.mark.slow),
    pytest.param("left", 6, 3, "network", 64, marks=pytest.mark.slow),
    pytest.param("chain", 3, 1, "network", 64, marks=pytest.mark.slow),
    pytest.param("chain", 9, 3, "network", 64, marks=pytest.mark.slow),
]


# For scenarios that wait until times are up. A rank that does not say for half a second that it still waits counts as
# stopped, or for an eighth of the timeout: with 5 that is a quarter of a second, in which a busy machine may be late.
PATIENCE = {"absent": 8, "chain": 8, "dead": 5, "growth": 5}


@pytest.mark.parametrize("scenario, ranks, per_node, link, multiprocessors", CASES)
def test_scenario(nodes, scenario, ranks, per_node, link, multiprocessors):
    patience = PATIENCE.get(scenario, 20)
    done = run(nodes, scenario, ranks, per_node, link, multiprocessors, calls=150, patience=patience)
    assert done.returncode == 0 and " passed " in done.stdout, done.stdout + done.stderr


MANY = [("many", 18, 6)]  # thorough; the remaining scenarios take minutes
MANY_SLOW = [("many", 32, 8), ("many", 36, 12), ("mismatch", 18, 6), ("absent", 18, 6), ("members", 18, 6)]
MANY_SLOW += [("left", 18, 6), ("overtaken", 18, 6), ("normal", 18, 6), ("normal", 72, 24)]


@pytest.mark.parametrize(
    "scenario, ranks, per_node", [*MANY, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY_SLOW)]
)
def test_many_ranks(nodes_ranks256, scenario, ranks, per_node):
    """Nodes of more ranks together than the kernels for few ranks take, and than a word has bits."""
    patience = 120 if ranks > 64 else 20  # on two cores, 216 blocks wait for each other for more than 20 s
    done = run(nodes_ranks256, scenario, ranks, per_node, multiprocessors=3, calls=40, seconds=600, patience=patience)
    assert done.returncode == 0 and " passed " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_fault_that_shows_beyond_a_word_of_ranks_is_seen(nodes_ranks256):
    """Counters of chunks from rank to rank by the rank's number in its word: ranks 1 and 33 share one."""
    fault = {"cuda_kernels/node/direct.cuh": ("* Sources(plan) + rank)", "* Sources(plan) + rank % 32)")}
    program = with_fault(nodes_ranks256, "counters-by-word", fault)
    assert run(program, "many", 18, 6, multiprocessors=3).returncode == 0
    done = run(program, "many", 36, 12, multiprocessors=3, patience=1, seconds=600)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr


def test_a_slow_link_is_as_slow_as_it_says(paced, tmp_path):
    """Results over a paced link are those of one node, no operation is quicker than its bytes allow, and tokens that
    choose their experts on one node alone send half as much. The emulator says nothing of how well the rest is hidden:
    its own time is the larger part of everything, and the machine's."""
    out = tmp_path / "out.json"
    command = [paced, "--ranks", 4, "--per-node", 2, "--gpus", 4, "--tokens", 16, "--hidden", 64, "--chunk-tokens", 8]
    command += ["--blocks", 4, "--repeats", 1, "--rate", 1e-5, "--json", out]
    done = emulate(command, seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 6 and all(case["different"] == 0 for case in cases)
    assert all(case["us"] > 0.95 * case["link_us"] > 10000 for case in cases), cases
    free, limited = (sum(case["bytes"] for case in cases if case["groups"] == groups) for groups in (2, 1))
    assert 0.3 * free < limited < 0.75 * free, cases
    done = emulate([*command, "--mode", "link-only", "--pacer-blocks", 2], seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = json.loads(out.read_text())["cases"]
    assert len(alone) == 6 and all(case["us"] > 0.95 * case["link_us"] > 10000 for case in alone), alone


def test_a_weak_signal_is_enough(nodes):
    """Bits of `--broken`: network.h. A chunk is one put, so signals that speak for their own put alone do."""
    done = run(nodes, "normal", 4, 2, broken=1)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_before_its_put_is_seen(nodes):
    """Not in every run: the bytes may come in time by chance. Some runs fail only when their time is up."""
    done = run_until_seen(nodes, "normal", 4, 2, broken=4, patience=0.3)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr


# Each is compiled anew, 15 s: one runs always. Fault: file, its text, the text put in its place, the expected message
# of the test, and its scenario.
FAULTS = {
    "crosses-twice": (
        "node/dispatch.cuh",
        "Holds(ranks, expert / r.local_experts)",
        "true",
        " bytes instead of ",
        "normal",
    ),
    "node-order": (
        "node/combine.cuh",
        "for (int node = 0; node < plan.nodes; ++node) {",
        "for (int node = plan.nodes - 1; node >= 0; --node) {",
        "wrong vectors",
        "normal",
    ),
    "node-order-streamed": (
        "node/combine.cuh",
        "before = far & ((1u << plan.node) - 1), after = far & ~before;",
        "after = far & ((1u << plan.node) - 1), before = far & ~after;",
        "wrong vectors",
        "normal",
    ),
    "missing-wait": (
        "node/combine.cuh",
        "if (!(arrived = AwaitPartials(p, shared, plan, slots, others, token, part))) return;",
        "",
        "wrong vectors",
        "normal",
    ),
    "rows-before-their-routing": (
        "node/dispatch.cuh",
        "arrived = WaitFlag(routed, shared.run, shared.run.epoch, Step::kMetadata, source);",
        "",
        "FAILED",
        "normal",
    ),
    "routing-not-awaited": (
        "node/dispatch.cuh",
        "arrived = WaitFlag(flag, shared.run, shared.run.epoch, Step::kMetadata, source);",
        "",
        "FAILED",
        "normal",
    ),
    "direct-crosses-twice": (
        "node/low_latency_dispatch.cuh",
        "goes |= local >= 0 && local < r.local_experts;",
        "goes = true;",
        " bytes instead of ",
        "normal",
    ),
    "direct-node-order": (
        "node/low_latency_combine.cuh",
        "for (int node = 0; node < direct.plan.nodes; ++node) {",
        "for (int node = direct.plan.nodes - 1; node >= 0; --node) {",
        "wrong vectors",
        "normal",
    ),
    "direct-rounds-once": (
        "node/low_latency_combine.cuh",
        "for (int i = 0; i < kSumRounds; ++i) sum[i].Add(total[i].Round());",
        "for (int i = 0; i < kSumRounds; ++i)\n"
        "for (int j = 0; j < Values<Y>::kCount; ++j) sum[i].v[j] += total[i].v[j];",
        "wrong vectors",
        "normal",
    ),
    "direct-missing-wait": (
        "node/direct.cuh",
        "if (!AwaitCounter(rank, Signal(rank, chunk), step)) return false;",
        "",
        "FAILED",
        "normal",
    ),
    "share-done-twice": (
        "node/low_latency_combine.cuh",
        "if (good && sends && block < schedule.push && !run.repeats) {",
        "if (good && sends && block < schedule.push) {",
        "FAILED",
        "members",
    ),
    "not-past-the-rail": (
        "node/rail.cuh",
        "(forwards == to || !Takes(forwards));",
        "forwards == to;",
        "FAILED",
        "members",
    ),
    "joins-without-meeting": (
        "core/operation.cuh",
        "refused = !far.Join(run, run.active & ~run.reachable);",
        "",
        "FAILED",
        "members",
    ),
    "rails-without-parity": (
        "node/rail.cuh",
        "parity = run_.epoch & 1;",
        "parity = 0;",
        "FAILED",
        "overtaken",
    ),
    "left-without-waiting": (
        "node/rail.cuh",
        "return call.active == nullptr || transport.Flush();",
        "return true;",
        "FAILED",
        "left",
    ),
    "notifies-nobody": (
        "node/transport.cuh",
        "/ kNoticeShare) NotifyWaiting(link, run);",
        "/ kNoticeShare) (void)0;",
        "FAILED",
        "chain",
    ),
    "reset-forgets-nothing": (
        "node/direct.cuh",
        "const uint32_t value = static_cast<uint32_t>(seen) + 1;",
        "const uint32_t value = static_cast<uint32_t>(seen);",
        "FAILED",
        "growth",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_can_be_put_in(fault):
    """Most of the next tests are slow: this one says at once that a kernel no longer reads as they take it to."""
    file, before, *_ = FAULTS[fault]
    assert (build.ROOT / "cuda_kernels" / file).read_text().count(before) == 1


@pytest.mark.parametrize("fault", ["crosses-twice", *(pytest.param(f, marks=pytest.mark.slow) for f in [*FAULTS][1:])])
def test_a_fault_in_a_kernel_is_seen(nodes, fault):
    """A token sent to a node where it has no expert, sums in another order, partial rows taken before they came, and
    the faults of the further names."""
    file, before, after, says, scenario = FAULTS[fault]
    program = with_fault(nodes, fault, {f"cuda_kernels/{file}": (before, after)})
    # One multiprocessor: a block waits for ranks in a known order.
    (ranks, per_node), multiprocessors = ((3, 1), 1) if scenario == "chain" else ((6, 2), 64)
    patience = 2 if says == "FAILED" else 20
    done = run_until_seen(program, scenario, ranks, per_node, multiprocessors=multiprocessors, patience=patience)
    assert done.returncode == 1 and "FAILED" in done.stdout and says in done.stdout, done.stdout + done.stderr
