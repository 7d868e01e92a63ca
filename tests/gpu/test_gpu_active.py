"""Ranks that are out, on GPUs: every subset of four ranks in one program, and processes that die and are left out."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.gpu import members, programs
from tests.gpu.bodies import Setup
from tests.support.cases import CASES
from xen_moe_jax import cuda

BY_NAME = {case.name: case for case in CASES}
CONFIG = xm.KernelConfig(backend="cuda", timeout_s=20.0)
NAMES = ("grouped", "ranked", "padded", "grouped-fp8", "grouped-align8", "grouped-two-axes")


@pytest.mark.gpu4
@pytest.mark.parametrize("name", NAMES)
def test_every_subset_of_four_ranks(gpu_mesh, name):
    """The same bits as plain JAX for all sixteen, forwards and backwards, from one trace."""
    case = BY_NAME[name]
    mesh = gpu_mesh((2, 2), ("node", "gpu")) if case.axes == 2 else gpu_mesh((4,), ("ep",))
    comparison = members.Comparison(Setup(case, mesh, mesh.axis_names, 20, 256), CONFIG)
    for active in members.subsets(4) + members.subsets(4)[::-1]:
        wrong = comparison.wrong(active)
        assert not wrong, f"active={active}: elements that differ: {wrong}"
    assert comparison.traces == 1
    xm.check()
