"""Virtual nodes of one process: the kernels across nodes through JAX, on the GPUs of one host.

A rank has pointers of another node only in the table of its link, so a kernel can reach another node only by a put.
With two GPUs there are two nodes of one rank, with four 2 x 2 and 4 x 1.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import ClassVar

import jax
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.gpu import bodies, members, random_calls
from tests.gpu.bodies import Setup
from tests.gpu.programs import (
    SIZES,
    assert_poisoned,
    dispatch,
    operands,
    over,
    round_trip,
    skipped_on,
    zeros_like_results,
)
from tests.support import conformance
from tests.support.cases import CASES, Case
from xen_moe_jax import cuda

BY_NAME = {case.name: case for case in CASES}
DEEPSEEK = {"experts": lambda ranks: 256, "top_k": 8}
LARGE = (
    (Case("deepseek", capacity=2 * 4096 * 8, **DEEPSEEK), 4096, 7168),
    (Case("deepseek-fp8", block_scaled="float8_e4m3fn", capacity=2 * 4096 * 8, **DEEPSEEK), 4096, 7168),
    (Case("deepseek-ranked", layout="ranked", **DEEPSEEK), 4096, 7168),
    (Case("most-tokens", experts=lambda ranks: 64, top_k=2, capacity=4 * 8192), 8192, 1024),
)
SHAPES = [pytest.param(2, 1, marks=pytest.mark.gpu2, id="2x1")] + [
    pytest.param(4, per_node, marks=pytest.mark.gpu4, id=f"{4 // per_node}x{per_node}") for per_node in (2, 1)
]
"""Ranks, and ranks of a node."""


MODES = ["throughput", "low_latency"]


def cuda_config(per_node: int, **fields) -> xm.KernelConfig:
    """With the kernels of many tokens, if not asked for others."""
    defaults = {"backend": "cuda", "ranks_per_node": per_node, "timeout_s": 20.0, "mode": "throughput"}
    return xm.KernelConfig(**defaults | fields)


def reference(per_node: int) -> xm.KernelConfig:
    return xm.KernelConfig(backend="reference", ranks_per_node=per_node)


def launched(ranks: int, per_node: int) -> int:
    """Launches so far between nodes of this size."""
    return sum(w["launches"] for w in workspaces(ranks, per_node))


def workspaces(ranks: int, per_node: int) -> list[dict]:
    return [w for w in cuda.workspaces() if (w["ranks"], w["ranks_per_node"], w["flights"]) == (ranks, per_node, False)]


# -- the contract ------------------------------------------------------------------------------------------------------


class Nodes(conformance.Conformance):
    no_exchange: ClassVar[str] = (
        "the drop-ins do not cross between nodes: tests/backends/cuda/test_policy.py, they are refused"
    )

    @pytest.fixture(autouse=True)
    def between_nodes(self, request):
        """Checks that every launch was one between nodes. Replays of a CUDA graph are not counted."""
        beside = launched(self.num_ranks, self.num_ranks)
        yield
        assert launched(self.num_ranks, self.num_ranks) == beside
        if "all_to_all" not in request.node.name:
            assert launched(self.num_ranks, self.config.ranks_per_node) > 0


@pytest.mark.gpu2
class TestTwoNodesOfOne(Nodes):
    config = cuda_config(1)
    num_ranks = 2
    two_axis_sizes = (2, 1)


@pytest.mark.gpu4
class TestTwoNodesOfTwo(Nodes):
    config = cuda_config(2)
    num_ranks = 4
    two_axis_sizes = (2, 2)


@pytest.mark.gpu4
class TestFourNodesOfOne(Nodes):
    config = cuda_config(1)
    num_ranks = 4
    two_axis_sizes = (4, 1)


@pytest.mark.gpu2
class TestTwoNodesOddSizes(Nodes):
    """A prime number of tokens, chunks of three, five thread blocks: nothing lines up."""

    config = cuda_config(1, chunk_tokens=3, num_sms=5)
    num_ranks = 2
    two_axis_sizes = (2, 1)
    num_tokens = 7
    hidden = 128
    odd_hidden = 72


@pytest.mark.gpu2
class TestTwoNodesOfOneFewTokens(TestTwoNodesOfOne):
    config = cuda_config(1, mode="low_latency")


@pytest.mark.gpu4
class TestTwoNodesOfTwoFewTokens(TestTwoNodesOfTwo):
    config = cuda_config(2, mode="low_latency")


@pytest.mark.gpu4
class TestFourNodesOfOneFewTokens(TestFourNodesOfOne):
    config = cuda_config(1, mode="low_latency")


@pytest.mark.gpu2
class TestTwoNodesOddSizesFewTokens(TestTwoNodesOddSizes):
    config = cuda_config(1, chunk_tokens=3, num_sms=5, mode="low_latency")


@pytest.mark.gpu8
class TestTwoNodesOfFour(Nodes):
    config = cuda_config(4)
    num_ranks = 8
    two_axis_sizes = (2, 4)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize(("case", "tokens", "hidden"), LARGE, ids=[case.name for case, *_ in LARGE])
def test_large(gpu_mesh, ranks, per_node, routing, case, tokens, hidden):
    setup = Setup(case, gpu_mesh((ranks,), ("ep",)), ("ep",), tokens, hidden)
    bodies.assert_same(setup, routing, cuda_config(per_node), against=reference(per_node), gradients=False)


FEW = (
    Case("deepseek", **DEEPSEEK),
    Case("deepseek-fp8", block_scaled="float8_e4m3fn", **DEEPSEEK),
    Case("deepseek-padded-fp8", layout="padded", block_scaled="float8_e4m3fn", **DEEPSEEK),
    Case("deepseek-ranked", layout="ranked", **DEEPSEEK),
)


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 33, 128, 512])
@pytest.mark.parametrize("case", FEW, ids=[case.name for case in FEW])
def test_few_tokens(gpu_mesh, ranks, per_node, tokens, case):
    """One chunk, a nearly empty one, several, and the largest number of chunks."""
    setup = Setup(case, gpu_mesh((ranks,), ("ep",)), ("ep",), tokens, 7168)
    config = cuda_config(per_node, mode="low_latency")
    bodies.assert_same(setup, "uniform", config, against=reference(per_node), gradients=False)


@pytest.mark.gpu4
@pytest.mark.parametrize("name", ["grouped", "padded", "grouped-fp8"])
def test_data_parallel_groups_of_two_nodes(gpu_mesh, name):
    """dp=2 x ep=2, each group of two nodes: the groups must not see each other."""
    setup = Setup(BY_NAME[name], gpu_mesh((2, 2), ("dp", "ep")), ("ep",), 20, 256)
    bodies.assert_same(setup, "uniform", cuda_config(1), against=reference(1))


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_random_calls(gpu_mesh, ranks, per_node, mode):
    """`python tests/gpu/random_calls.py --ranks-per-node N --calls 100000` makes more of them."""
    result = random_calls.run(
        gpu_mesh((ranks,), ("ep",)),
        cuda_config(per_node, mode=mode),
        calls=4000,
        length=1000,
        steps=random_calls.without_exchange(),
        reference=reference(per_node),
    )
    assert result.operations >= 4000 and not result.wrong, result


# -- inactive ranks ----------------------------------------------------------------------------------------------------

ABSENT = (*(BY_NAME[n] for n in ("grouped", "ranked", "padded", "grouped-fp8")),)


@pytest.mark.gpu4
@pytest.mark.parametrize("per_node", [2, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ABSENT, ids=lambda case: case.name)
def test_every_subset_between_nodes(gpu_mesh, per_node, mode, case):
    """All sixteen subsets give the bits of plain JAX, forward and backward, in two orders, from one trace."""
    setup = Setup(case, gpu_mesh((4,), ("ep",)), ("ep",), 20, 256)
    comparison = members.Comparison(setup, cuda_config(per_node, mode=mode), reference(per_node))
    for active in members.subsets(4) + members.subsets(4)[::-1]:
        wrong = comparison.wrong(active)
        assert not wrong, f"active={active}: elements that differ: {wrong}"
    assert comparison.traces == 1
    xm.check()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
def test_memory_grows_between_programs_and_older_programs_find_it(gpu_mesh, ranks, per_node):
    mesh = gpu_mesh((ranks,), ("ep",))
    config = cuda_config(per_node, channel=9)
    programs = []
    for step in range(6):  # more often than there are memory tables
        args = operands(mesh, dataclasses.replace(SIZES, tokens=64 << step))
        program = over(mesh, round_trip(config))
        programs.append((program, args))
        for known, arguments in programs:
            np.testing.assert_array_equal(np.asarray(known(*arguments)), np.asarray(arguments[0]))
    (listed,) = [w for w in workspaces(ranks, per_node) if w["channel"] == 9]
    assert listed["generation"] >= 6 and listed["generations_held"] == 1


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
def test_a_buffer_serves_nodes(gpu_mesh, ranks, per_node):
    mesh = gpu_mesh((ranks,), ("ep",))
    config = cuda_config(per_node, channel=10)
    args, program = operands(mesh), over(mesh, round_trip(config))
    sizes = {"num_tokens": 64, "hidden": 256, "top_k": 4, "num_experts": 16, "dtype": "float32"}
    with xm.Buffer(mesh, "ep", channel=10, ranks_per_node=per_node, **sizes) as buffer:
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(program(*args)), np.asarray(args[0]))
        (listed,) = [w for w in workspaces(ranks, per_node) if w["channel"] == 10]
        assert listed["staging_bytes"] <= buffer.size_bytes + 1024


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def healed():
    """Makes everything usable again after the test, whichever part it has broken."""
    yield
    cuda.reset()


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_never_comes_is_named_by_all(gpu_mesh, healed, ranks, per_node, kind, mode):
    mesh, absent = gpu_mesh((ranks,), ("ep",)), ranks - 1
    hasty, patient = (cuda_config(per_node, timeout_s=s, mode=mode) for s in (3.0, 120.0))
    args = operands(mesh)

    def body(x, idx, weights):
        routed = dispatch(x, idx, weights, patient)

        def operation():
            if kind == "combine":
                return xm.combine(routed.x, routed.handle, config=hasty)
            return dispatch(x, idx, weights, hasty).x

        return skipped_on(absent, operation, zeros_like_results(operation))

    whole = over(mesh, round_trip(patient))
    before = np.asarray(whole(*args))
    began = time.monotonic()
    results = jax.block_until_ready(over(mesh, body)(*args))
    assert time.monotonic() - began < 60.0  # it compiles too
    for shard in results.addressable_shards[:absent]:
        assert_poisoned(np.asarray(shard.data))
    with pytest.raises(xm.OperationFailed) as caught:
        xm.check()
    assert re.search(rf"{kind} number \d+ .*failed: rank {absent} \(GPU {absent}\)", str(caught.value)), caught.value
    cuda.reset()
    xm.check()
    np.testing.assert_array_equal(np.asarray(whole(*args)), before)


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_another_operation_on_another_node_is_refused(gpu_mesh, healed, ranks, per_node, mode):
    """The last rank leaves a dispatch out and runs the combine behind it."""
    mesh, odd = gpu_mesh((ranks,), ("ep",)), ranks - 1
    patient = cuda_config(per_node, timeout_s=120.0, mode=mode)
    args = operands(mesh)

    def body(x, idx, weights):
        def operation():
            return dispatch(x, idx, weights, patient)

        routed = skipped_on(odd, operation, zeros_like_results(operation))
        return xm.combine(routed.x, routed.handle, config=patient)

    whole = over(mesh, round_trip(patient))
    before = np.asarray(whole(*args))
    began = time.monotonic()
    assert_poisoned(jax.block_until_ready(over(mesh, body)(*args)))
    assert time.monotonic() - began < 60.0
    with pytest.raises(xm.OperationFailed, match="different operations under this number"):
        xm.check()
    for _ in range(2):  # reset again and again: arrived chunks are forgotten
        cuda.reset()
        np.testing.assert_array_equal(np.asarray(whole(*args)), before)
