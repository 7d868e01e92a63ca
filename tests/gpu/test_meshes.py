"""Meshes with further axes, devices in any order, large shapes: compared bit for bit with the reference on the same
GPUs.
"""

import pytest

import xen_moe_jax as xm
from tests.gpu import bodies
from tests.gpu.bodies import Setup
from tests.support.cases import CASES, Case

CUDA = xm.KernelConfig(backend="cuda", timeout_s=20.0)
BY_NAME = {case.name: case for case in CASES}
SOME = ("grouped", "ranked", "padded", "grouped-fp8", "grouped-scaled-fp8", "grouped-align8-capacity-one-below")
DEEPSEEK = {"experts": lambda ranks: 256, "top_k": 8}
LARGE = (
    (Case("deepseek", **DEEPSEEK), 4096, 7168),
    (Case("deepseek-fp8", block_scaled="float8_e4m3fn", **DEEPSEEK), 4096, 7168),
    (Case("deepseek-ranked", layout="ranked", **DEEPSEEK), 4096, 7168),
    (Case("deepseek-decode", layout="padded", **DEEPSEEK), 128, 7168),
    (Case("top2", experts=lambda ranks: 60, top_k=2), 2048, 2048),
    (Case("top6-zipf", experts=lambda ranks: 96, top_k=6, capacity=12_000), 2000, 4096),
)


@pytest.mark.gpu4
@pytest.mark.parametrize("name", SOME)
def test_data_parallel_groups(gpu_mesh, name):
    """dp=2 x ep=2: the groups must not see each other."""
    mesh = gpu_mesh((2, 2), ("dp", "ep"))
    bodies.assert_same(Setup(BY_NAME[name], mesh, ("ep",), 20, 256), "uniform", CUDA)


@pytest.mark.gpu8
@pytest.mark.parametrize("name", SOME)
def test_data_parallel_groups_of_four(gpu_mesh, name):
    mesh = gpu_mesh((2, 4), ("dp", "ep"))
    bodies.assert_same(Setup(BY_NAME[name], mesh, ("ep",), 20, 256), "zipf", CUDA)


@pytest.mark.gpu4
def test_expert_axis_first(gpu_mesh):
    """The expert axis is the slow one: ranks of a group are not neighbours."""
    mesh = gpu_mesh((2, 2), ("ep", "tp"))
    bodies.assert_same(Setup(BY_NAME["grouped"], mesh, ("ep",), 20, 256), "zipf", CUDA)


@pytest.mark.gpu4
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_permuted_devices(gpu_mesh, name, order):
    mesh = gpu_mesh((4,), ("ep",), order)
    bodies.assert_same(Setup(BY_NAME[name], mesh, ("ep",), 20, 256), "uniform", CUDA)


@pytest.mark.gpu4
@pytest.mark.parametrize("num_sms", [1, 8, 132])
def test_number_of_thread_blocks(gpu_mesh, num_sms):
    mesh = gpu_mesh((4,), ("ep",))
    config = xm.KernelConfig(backend="cuda", num_sms=num_sms, timeout_s=20.0)
    bodies.assert_same(Setup(BY_NAME["grouped"], mesh, ("ep",), 300, 1024), "zipf", config)


@pytest.mark.gpu4
@pytest.mark.parametrize("routing", ["uniform", "zipf", "one_hot"])
@pytest.mark.parametrize(("case", "tokens", "hidden"), LARGE, ids=[case.name for case, *_ in LARGE])
def test_large(gpu_mesh, case, tokens, hidden, routing):
    mesh = gpu_mesh((4,), ("ep",))
    setup = Setup(_sized(case, tokens, routing, mesh.size), mesh, ("ep",), tokens, hidden)
    bodies.assert_same(setup, routing, CUDA, gradients=False)


def _sized(case: Case, tokens: int, routing: str, ranks: int) -> Case:
    """A capacity that holds twice the mean unless the case has its own: the worst case of these sizes is tens of
    gigabytes.
    """
    import dataclasses

    if case.capacity is not None or case.layout != "grouped":
        return case
    return dataclasses.replace(case, capacity=2 * tokens * case.top_k)
