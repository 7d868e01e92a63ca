"""The Hopper kernels compiled for an H100 by Mosaic and ptxas, without a GPU: nothing is spilled, no wgmma waits.

It needs the plugin of `jax[cuda13]`, as `tests/backends/cuda/test_aot.py`, and CI runs it over the wheel, too.
"""

from __future__ import annotations

import dataclasses
import os
import re

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import gpu_topology, hopper_kernels
from xen_moe_jax.experts import hopper

pytestmark = pytest.mark.gpu_aot

FEW, MANY = hopper.FEW[0], hopper.PREFERRED[0]
TILES = {"few rows, claimed": dataclasses.replace(FEW, claimed=True), "many rows": MANY}
"""Each tile and each way to share tiles out once; the other pairs have the same code twice."""


@pytest.fixture(scope="module")
def operands():
    try:
        mesh = gpu_topology.mesh(1, "ep")
    except RuntimeError as reason:
        assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), reason
        pytest.skip(str(reason))
    return hopper_kernels.operands(NamedSharding(mesh, P()))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kernel", hopper_kernels.KERNELS)
def test_machine_code(operands, kernel, tiles, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    hopper_kernels.program(kernel, TILES[tiles]).lower(operands).compile()
    (report,) = (path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert re.search(r"Used \d+ registers", report) and " 0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report, "ptxas lets each wgmma wait for the one before"
