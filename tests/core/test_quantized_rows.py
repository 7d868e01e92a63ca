"""Where the kernel for weights in shipped formats multiplies, and with what. tests/gpu has the tests that run it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.support.quantized import FORMATS, quantized_weight, widen_in_numpy
from xen_moe_jax import _overlap
from xen_moe_jax.experts import hopper, quantized
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.experts.mlp import grouped_experts


def rows_of(count, depth, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((count, depth), dtype)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    monkeypatch.setattr(quantized, "not_built", lambda: None)
    monkeypatch.setattr(quantized.module, "registered", lambda: None)


@pytest.mark.parametrize("name", FORMATS)
def test_widening_is_written_down_twice(name):
    weight = quantized_weight(name, 2, 160, 48)
    np.testing.assert_array_equal(
        np.asarray(weight.widen(jnp.bfloat16), np.float32), widen_in_numpy(weight).astype(np.float32)
    )


def test_why_not():
    blocks = quantized_weight("fp8 blocks", 2, 256, 144)
    fp4 = quantized_weight("MXFP4", 2, 96, 144)
    assert quantized.why_not(rows_of(128, 256), [blocks]) is None
    assert quantized.why_not(rows_of(1, 96), [fp4, fp4]) is None
    low = xm.QuantizedWeight(blocks.values, np.ones((2, 8, 144), np.float32), (32, 1))
    for rows, weights, reason in (
        (rows_of(129, 256), [blocks], "129 rows for 2 groups are more than 64 a group"),
        (rows_of(8, 256, "float16"), [blocks], "the rows are float16"),
        (rows_of(8, 256), [blocks, low], "the projections are in different formats"),
        (rows_of(8, 256), [low], r"blocks of \(32, 1\) are no multiples of 64 high"),
        (rows_of(0, 256), [blocks], "an operand is empty"),
        (rows_of(8, 256), [quantized_weight("int8 channels", 2, 256, 40)], "256 by 40 are no multiples of 8 and 16"),
        (rows_of(8, 16), [quantized_weight("int8 channels", 513, 16, 16)], "513 groups are more than 512"),
    ):
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(quantized.why_not(rows, weights))


def test_few_rows_without_the_kernel_are_told_why(on_hopper):
    weight = quantized_weight("fp8 blocks", 2, 256, 144)
    with pytest.warns(UserWarning, match="with few rows widen their quantized weights.*the rows are float16"):
        assert not quantized.by_kernel("auto", rows_of(8, 256, "float16"), [weight])
    assert not quantized.by_kernel("auto", rows_of(129, 256), [weight])  # many rows are multiplied so: no warning


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
def test_experts_with_few_rows_call_it_twice(name, on_hopper):
    """Once for both projections and once behind the activation, with values and scales and no widened weight."""
    rows, sizes = jnp.zeros((24, 256), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    gate = quantized_weight(name, 3, 256, 128)
    weights = {"gate": gate, "up": gate, "down": quantized_weight(name, 3, 128, 256)}

    def lowered():
        program = jax.jit(lambda rows, weights: grouped_experts(ExpertFunction(), rows, sizes, weights))
        return program.trace(rows, weights).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered()
    assert text.count(f"@{quantized.TARGET}") == 2 and "3x256x128xbf16" not in text and "ragged" not in text
    assert f"block_rows = {gate.block[0]} : i64" in text and ("dims = [0, 1, 3, 2]" in text) == (name == "MXFP4")
    assert text.count("claimed = 0 : i64") == 2
    with _overlap.overlap_work():  # beside a pending operation
        assert lowered().count("claimed = 1 : i64") == 2


def test_it_is_not_taken_for_another_choice(on_hopper):
    blocks = quantized_weight("fp8 blocks", 2, 256, 144)
    rows = rows_of(8, 256)
    assert quantized.by_kernel("auto", rows, [blocks]) and quantized.by_kernel("hopper", rows, [blocks])
    wide = blocks.widen(jnp.bfloat16)
    for choice, weights in (("ragged_dot", [blocks]), (jax.lax.ragged_dot, [blocks]), ("auto", [wide])):
        assert not quantized.by_kernel(choice, rows, weights)


def test_order_of_rows_for_mxfp4():
    rows = quantized.even_elements_first(jnp.arange(64.0).reshape(2, 32))
    assert rows[0, :16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert rows[1, 16:20].tolist() == [48, 50, 52, 54]


def test_a_gradient_by_the_weight_is_an_error(on_hopper):
    weight = quantized_weight("fp8 blocks", 2, 256, 144)

    def loss(scales):
        given = xm.QuantizedWeight(weight.values, scales, weight.block)
        (out,) = quantized.grouped_matmuls(jnp.zeros((8, 256), jnp.bfloat16), [given], jnp.zeros(2, jnp.int32))
        return out.sum()

    with pytest.raises(TypeError, match="a gradient by a quantized weight"):
        jax.eval_shape(jax.grad(loss), weight.scales)
