"""The fp8 kernels compiled for an H100 by Mosaic and ptxas, without a GPU: nothing is spilled, no wgmma waits.

It needs the plugin of `jax[cuda13]`, as `tests/flax/test_hopper_aot.py`, and CI runs it over the wheel, too.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from tests.support import gpu_topology
from tests.support.ptxas_reports import check_reports, keep_reports
from xen_moe_jax.experts import hopper, hopper_float8
from xen_moe_jax.pallas_kernels.hopper import float8_activation, float8_quantize, ring
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.float8_contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, DTYPE, Quantized, activated_rows, rows_by_weights

pytestmark = pytest.mark.gpu_aot

GROUPS, HIDDEN, WIDTH, ROWS, SMS = 4, 1024, 512, 2048, 132
BLOCKS = ROWS // BLOCK + GROUPS
GIVEN = {"tiles": dataclasses.replace(hopper_float8.TILES, claimed=True), "num_sms": SMS}


@pytest.fixture(scope="module")
def sharding():
    return gpu_topology.one_or_skip()


def product(rows, turned, sizes, **_):
    return rows_by_weights(((rows, turned),), sizes, columns=WIDTH, dtype=jnp.bfloat16, **GIVEN)


def gradient_of_rows(by, lying, sizes, **_):
    return rows_by_weights(((by, lying), (by, lying)), sizes, columns=HIDDEN, dtype=jnp.bfloat16, **GIVEN)


def gradient_of_weights(columns, by_columns, sizes, **_):
    return rows_by_rows(columns, by_columns, sizes, height=HIDDEN, width=WIDTH, dtype=jnp.bfloat16, **GIVEN)


def clipped_swiglu(rows, turned, sizes, **_):
    run = {"width": WIDTH, "activation": Activation("clipped_swiglu"), "projections": jnp.bfloat16}
    return activated_rows(rows, (turned, turned), sizes, **run, **GIVEN)


def gelu(rows, turned, sizes, **_):
    run = {"width": WIDTH, "activation": Activation("gelu"), "projections": None}
    return activated_rows(rows, (turned,), sizes, **run, **GIVEN)


def quantize_rows(x, **_):
    return float8_quantize.rows(x)


def quantize_for_the_wire(x, **_):
    return float8_quantize.rows(x, by_row=True)


def quantize_weights(w, **_):
    return float8_quantize.weights(w, product=True, gradient=True)


def quantize_columns(x, sizes, **_):
    return float8_quantize.columns(x, float8_quantize.blocks_of_groups(sizes, ROWS)[0])


def quantize_both(x, sizes, **_):
    return float8_quantize.both(x.astype(jnp.float16), float8_quantize.blocks_of_groups(sizes, ROWS)[0])


def quantize_columns_again(rows, sizes, **_):
    return float8_quantize.columns(rows, float8_quantize.blocks_of_groups(sizes, ROWS)[0])


def backward_of_swiglu(by_inner, row_weights, sizes, **_):
    facts, _ = float8_quantize.blocks_of_groups(sizes, ROWS)
    return float8_activation.gradients(Activation(), by_inner, (by_inner, by_inner), row_weights, facts, claimed=True)


KERNELS = (
    product,
    gradient_of_rows,
    gradient_of_weights,
    clipped_swiglu,
    gelu,
    quantize_rows,
    quantize_for_the_wire,
    quantize_weights,
    quantize_columns,
    quantize_both,
    quantize_columns_again,
    backward_of_swiglu,
)


def operands(sharding):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def quantized(*shape, scales):
        return Quantized(array(*shape, dtype=DTYPE), array(*scales, dtype=jnp.float32))

    a, b = HIDDEN // BLOCK, WIDTH // BLOCK
    return {
        "x": array(ROWS, HIDDEN),
        "w": array(GROUPS, HIDDEN, WIDTH),
        "rows": quantized(ROWS, HIDDEN, scales=(1, a, ROWS)),
        "by": quantized(ROWS, WIDTH, scales=(1, b, ROWS)),
        "turned": quantized(GROUPS, WIDTH, HIDDEN, scales=(GROUPS, b, a)),
        "lying": quantized(GROUPS, HIDDEN, WIDTH, scales=(GROUPS, a, b)),
        "columns": quantized(HIDDEN, BLOCKS * BLOCK, scales=(BLOCKS, HIDDEN)),
        "by_columns": quantized(WIDTH, BLOCKS * BLOCK, scales=(BLOCKS, WIDTH)),
        "by_inner": array(ROWS, WIDTH),
        "row_weights": array(ROWS, dtype=jnp.float32),
        "sizes": array(GROUPS, dtype=jnp.int32),
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_machine_code(sharding, kernel, tmp_path, monkeypatch):
    keep_reports(tmp_path, monkeypatch)
    jax.jit(lambda given: kernel(**given)).lower(operands(sharding)).compile()
    check_reports(tmp_path)


def test_experts_widen_nothing(sharding, tmp_path, monkeypatch):
    """Forward pass of rows from an fp8 wire: five kernels, three of them for weights; no array of rows in bfloat16 but
    the result, and no instruction of XLA that reads or writes a matrix of weights."""
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    launch = ring.kernel
    monkeypatch.setattr(ring, "kernel", lambda body, tiles, _, *rest: launch(body, tiles, SMS, *rest))
    given = operands(sharding)

    def experts(x, values, scales, gate, up, down, sizes):
        from xen_moe_jax import BlockScaled

        return hopper_float8.experts(Activation(), x, BlockScaled(values, scales), (gate, up), down, sizes)

    down = jax.ShapeDtypeStruct((GROUPS, WIDTH, HIDDEN), jnp.bfloat16, sharding=sharding)
    scales = jax.ShapeDtypeStruct((ROWS, HIDDEN // BLOCK), jnp.float32, sharding=sharding)
    keep_reports(tmp_path, monkeypatch)
    shapes = given["x"], given["rows"].values, scales, given["w"], given["w"], down, given["sizes"]
    text = jax.jit(experts).lower(*shapes).compile().as_text()
    check_reports(tmp_path)
    assert len(re.findall(r" custom-call\(", text)) == 5, text  # three matrices quantized, two products
    assert set(re.findall(rf"bf16\[{ROWS},\d+\]\S* ([\w-]+)\(", text)) <= {"parameter", "custom-call"}, text
    widths = rf"bf16\[{GROUPS},(?:{HIDDEN},{WIDTH}|{WIDTH},{HIDDEN})\]\S* ([\w-]+)\("
    assert set(re.findall(widths, text)) <= {"parameter"}, text
