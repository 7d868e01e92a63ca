"""The Hopper kernels compiled for an H100 by Mosaic and ptxas, without a GPU: nothing is spilled, no wgmma waits.

It needs the plugin of `jax[cuda13]`, as `tests/backends/cuda/test_aot.py`, and CI runs it over the wheel, too.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import xen_moe_jax as xm
from tests.support import gpu_topology, hopper_kernels
from tests.support.ptxas_reports import check_reports, keep_reports
from xen_moe_jax.experts import hopper, lent
from xen_moe_jax.pallas_kernels.hopper.rows import rows_by_weights

pytestmark = pytest.mark.gpu_aot

FEW, MANY = hopper.FEW[0], hopper.PREFERRED[0]
TILES = {"few rows, claimed": dataclasses.replace(FEW, claimed=True), "many rows": MANY}
"""Each tile and each way to share tiles out once; the other pairs have the same code twice."""


@pytest.fixture(scope="module")
def sharding():
    return gpu_topology.one_or_skip()


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kernel", hopper_kernels.KERNELS)
def test_machine_code(sharding, kernel, tiles, tmp_path, monkeypatch):
    compile_alone(kernel, TILES[tiles], hopper_kernels.operands(sharding), tmp_path, monkeypatch)


@pytest.mark.parametrize("kernel", ["swiglu", "gradient_of_rows", "gathered_swiglu"])
def test_machine_code_of_fitted_tiles(sharding, kernel, tmp_path, monkeypatch):
    """Stores turn the tiles by stmatrix. Those of two projections are claimed, as in `hopper.plan`."""
    given = hopper_kernels.operands(sharding, 2880, 2880)
    tiles = dataclasses.replace(hopper.FITTED, claimed="swiglu" in kernel)
    compile_alone(getattr(hopper_kernels, kernel), tiles, given, tmp_path, monkeypatch)
    (text,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert re.search(r"stmatrix\S*\.trans", text) and "st.shared.b16" not in text


PAIRED = [(name, MANY) for name in ("swiglu", "gradient_of_rows", "gathered_swiglu", "gathered_gradient_of_rows")]


@pytest.mark.parametrize("kernel,tiles", [*PAIRED, ("gathered_swiglu", hopper.FITTED)])
def test_machine_code_of_pairs(sharding, kernel, tiles, tmp_path, monkeypatch):
    """Both blocks of a pair get what either one loads."""
    tiles = dataclasses.replace(tiles, band=2, pair=True)
    compile_alone(getattr(hopper_kernels, kernel), tiles, hopper_kernels.operands(sharding), tmp_path, monkeypatch)
    (text,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert "multicast::cluster" in text


@pytest.mark.parametrize("kernel", hopper_kernels.EPILOGUES)
def test_machine_code_of_epilogues(sharding, kernel, tmp_path, monkeypatch):
    """The shape is gpt-oss', whose columns end within a tile. Tiles begin at any row, so that factors of rows are
    loaded one by one."""
    compile_alone(kernel, MANY, hopper_kernels.operands(sharding, 2880, 2880), tmp_path, monkeypatch)
    (text,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert not re.search(r"ld\.(global\.)?v[24]\.[bf]32", text)


@pytest.mark.parametrize("kernel", hopper_kernels.GATHERED)
def test_machine_code_of_gathered_rows(sharding, kernel, tmp_path, monkeypatch):
    """The loading warpgroup has few registers, and the copies are 16 bytes a thread."""
    compile_alone(kernel, MANY, hopper_kernels.operands(sharding, 2880, 2880), tmp_path, monkeypatch)
    (text,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert "cp.async.cg.shared.global" in text and re.search(r"setmaxnreg\.dec\S+ 40;", text)


def test_experts_copy_no_weights(sharding, tmp_path, monkeypatch):
    """Forward and backward pass of gpt-oss' experts: no instruction of XLA reads or writes a matrix of weights, but the
    kernels do, and the ends of the program."""
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    for name in ("rows_by_weights", "rows_by_rows", "activated_rows"):
        kernel = functools.partial(getattr(hopper, name), num_sms=hopper_kernels.SMS)
        monkeypatch.setattr(hopper, name, kernel)
    groups, rows, size = hopper_kernels.GROUPS, hopper_kernels.ROWS, 2880
    activation = hopper.Activation("clipped_swiglu")

    def experts(x, gate, up, down, biases, sizes):
        inner = hopper.activated(x, (gate, up), sizes, biases[:2], activation=activation)
        return hopper.grouped_matmul(inner, down, sizes, bias=biases[2])

    def both(x, gate, up, down, biases, sizes):
        out, pull = jax.vjp(lambda *given: experts(*given, sizes), x, gate, up, down, biases)
        return out, pull(x)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights, bias = array(groups, size, size), array(groups, size)
    given = array(rows, size), weights, weights, weights, (bias, bias, bias), array(groups, dtype=jnp.int32)
    keep_reports(tmp_path, monkeypatch)
    text = jax.jit(both).lower(*given).compile().as_text()
    check_reports(tmp_path)
    results = re.findall(rf"= \(?bf16\[{groups},{size},{size}\]\S* ([\w-]+)\(", text)
    assert results.count("parameter") >= 3 and results.count("custom-call") == 3, results
    assert set(results) <= {"parameter", "custom-call", "get-tuple-element", "bitcast"}, results


def test_vmap_fuses_no_slices_with_a_kernel_that_writes_into_an_array(sharding):
    """XLA's fusion of slices with a call forgets that the call's result is its operand with more rows."""

    def kernel(by_row, weights, _, sizes, into):
        options = {"into": into, "transposed": False, "tiles": MANY, "num_sms": hopper_kernels.SMS}
        return [rows_by_weights(by_row[0], weights[0], sizes, **options)]

    def one(rows, weights, sizes, first_row, out):
        operands, tree = jax.tree.flatten(([rows], [weights], None, sizes, first_row, [out]))
        return lent.into_p.bind(*operands, kernel=kernel, tree=tree, config=xm.KernelConfig())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((3, *shape), dtype, sharding=sharding)

    given = array(256, 128), array(1, 128, 256), array(1, dtype=jnp.int32), array(dtype=jnp.int32), array(256, 256)
    text = jax.jit(jax.vmap(one)).lower(*given).compile().as_text()
    (found,) = [part for part in text.split("\n\n") if "output_to_operand_aliasing" in part]
    assert not found.lstrip().startswith("%dynamic-slice-fusion"), found


@pytest.mark.parametrize("kernel", hopper_kernels.KERNELS)
def test_machine_code_of_narrow_swizzles(sharding, kernel, tmp_path, monkeypatch):
    """Half of gpt-oss' width: a row of 32 elements is what shared memory holds side by side, and tiles are cut off."""
    plan = hopper.plan(2880, 1440)
    tiles = {"swiglu": plan.gated, "gradient_of_rows": plan.rows, "gradient_of_weights": plan.weights}
    chosen = tiles.get(kernel.__name__, plan.forward)
    assert chosen.swizzle == 64
    compile_alone(kernel, chosen, hopper_kernels.operands(sharding, 2880, 1440), tmp_path, monkeypatch)


def compile_alone(kernel, tiles, operands, tmp_path, monkeypatch):
    keep_reports(tmp_path, monkeypatch)
    hopper_kernels.program(kernel, tiles).lower(operands).compile()
    check_reports(tmp_path)
