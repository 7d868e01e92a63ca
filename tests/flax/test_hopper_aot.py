"""The Hopper kernels compiled for an H100 by Mosaic and ptxas, without a GPU: nothing is spilled, no wgmma waits.

It needs the plugin of `jax[cuda13]`, as `tests/test_cuda_aot.py`, and CI runs it over the wheel, too.
"""

from __future__ import annotations

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import gpu_topology
from xen_moe_jax.flax import hopper
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import rows_by_weights, swiglu_rows

pytestmark = pytest.mark.gpu_aot

GROUPS, HIDDEN, WIDTH, ROWS = 8, 1024, 512, 4096
SMS = 132
FEW, MANY = hopper.FEW[0], hopper.PREFERRED[0]
TILES = {"few rows, claimed": dataclasses.replace(FEW, claimed=True), "many rows": MANY}
"""Each tile and each way to share tiles out once; the other pairs have the same code twice."""


def swiglu(tiles, rows, up, group_sizes, **_):
    return swiglu_rows(rows, up, up, group_sizes, projections=True, tiles=tiles, num_sms=SMS)


def up_projection(tiles, rows, up, group_sizes, **_):
    return rows_by_weights(rows, up, group_sizes, transposed=False, tiles=tiles, num_sms=SMS)


def gradient_of_rows(tiles, wide, up, group_sizes, **_):
    return rows_by_weights(wide, up, group_sizes, transposed=True, tiles=tiles, num_sms=SMS)


def gradient_of_weights(tiles, rows, wide, group_sizes, **_):
    return rows_by_rows(rows, wide, group_sizes, tiles=tiles, num_sms=SMS)


@pytest.fixture(scope="module")
def operands():
    try:
        mesh = gpu_topology.mesh(1, "ep")
    except RuntimeError as reason:
        assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), reason
        pytest.skip(str(reason))
    sharding = NamedSharding(mesh, P())
    shapes = {"rows": (ROWS, HIDDEN), "wide": (ROWS, WIDTH), "up": (GROUPS, HIDDEN, WIDTH)}
    given = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for name, s in shapes.items()}
    return given | {"group_sizes": jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=sharding)}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kernel", [swiglu, up_projection, gradient_of_rows, gradient_of_weights])
def test_machine_code(operands, kernel, tiles, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    jax.jit(lambda operands: kernel(TILES[tiles], **operands)).lower(operands).compile()
    (report,) = (path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert re.search(r"Used \d+ registers", report) and " 0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report, "ptxas lets each wgmma wait for the one before"
