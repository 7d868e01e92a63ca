"""The kernel of grouped matmuls' gradient by the rows in interpret mode, to the bit, and the layer that has it."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax.experts import on_tpu
from xen_moe_jax.pallas_kernels.grouped_transposed import Tiles, grouped_transposed
from xen_moe_jax.pallas_kernels.launch import Launch

SIZES = {
    "experts that share tiles, one without rows": (100, 0, 156, 128, 70),
    "no rows at all": (0, 0, 0),
    "every row": (128, 256, 128),
    "few rows": (1, 0, 2, 0),
    "the last experts have none": (0, 40, 0, 0),
}
ROWS, DEPTH = 512, 256
INTERPRETED = xm.KernelConfig(backend="pallas", interpret=True)


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    with interpreter.clean(capfd):
        yield


def whole_numbers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def launch():
    return Launch(1, interpret=pltpu.InterpretParams(detect_races=True))


@pytest.mark.parametrize("name", SIZES)
def test_cotangents_times_transposed_weights(name):
    """Two pairs are added up; a width that tiles do not divide; what lies past the last group is zero."""
    rng, sizes, width = np.random.default_rng(0), SIZES[name], 200
    cotangents = [whole_numbers(rng, ROWS, DEPTH) for _ in range(2)]
    weights = [whole_numbers(rng, len(sizes), width, DEPTH) for _ in range(2)]
    expected = np.zeros((ROWS, width), np.float32)
    for e, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        for cotangent, weight in zip(cotangents, weights, strict=True):
            expected[end - size : end] += cotangent[end - size : end] @ weight[e].T
    for cotangent in cotangents:
        cotangent[sum(sizes) :] = np.nan
    out = jax.jit(functools.partial(grouped_transposed, tiles=Tiles(128, 128, 128), launch=launch()))(
        [jnp.asarray(a) for a in cotangents], [jnp.asarray(w) for w in weights], jnp.asarray(sizes, jnp.int32)
    )
    assert not interpreter.races_found()
    assert_bits(np.asarray(out), expected, name)


def test_no_rows_have_no_tiles(monkeypatch):
    monkeypatch.setattr(on_tpu, "platform", lambda: "tpu")
    rows, weights = jnp.zeros((128, 256)), jnp.zeros((2, 256, 128))
    assert on_tpu.supports(rows, weights) and not on_tpu.supports(rows[:0], weights)


@pytest.mark.parametrize("changes", [{}, {"activation": "relu2"}, {"apply_weights_to": "input"}], ids=str)
def test_a_layer_has_the_gradients_of_ragged_dot(changes, monkeypatch):
    """On a TPU without tokamax: values to the bit, gradients to the rounding of their sums."""
    monkeypatch.setattr(on_tpu, "platform", lambda: "tpu")
    monkeypatch.setattr(on_tpu, "DEFAULT", INTERPRETED)
    monkeypatch.setattr(on_tpu.products, "__defaults__", (INTERPRETED,))
    rng, ranks, tokens, hidden, width = np.random.default_rng(2), 2, 32, 128, 128
    gated = "activation" not in changes
    experts, top_k = 4, 2
    x = jnp.asarray(rng.standard_normal((ranks * tokens, hidden)), jnp.float32)
    idx = jnp.asarray(np.argsort(rng.random((ranks * tokens, experts)), axis=1)[:, :top_k], jnp.int32)
    factors = jnp.asarray(rng.random(idx.shape), jnp.float32)
    shapes = [(hidden, width)] * (1 + gated) + [(width, hidden)]
    weights = [jnp.asarray(rng.standard_normal((experts, *shape)) / 8, jnp.float32) for shape in shapes]
    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))

    def run(grouped_matmul):
        def layer(x, idx, factors, weights):
            matrices = weights if gated else [None, *weights]
            return xm.moe_mlp(
                x, idx, factors, *matrices, num_experts=experts, axis_name="ep", capacity=128,
                grouped_matmul=grouped_matmul, **changes,
            )  # fmt: skip

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)

        def loss(x, factors, weights):
            y = mapped(x, idx, factors, weights)
            return jnp.sum(y * jnp.cos(y)), y

        program = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        assert ("grouped_transposed" in str(jax.make_jaxpr(program)(x, factors, weights))) == (grouped_matmul == "auto")
        return jax.jit(program)(x, factors, weights)

    (_, y), gradients = run("auto")
    (_, expected), expected_gradients = run("ragged_dot")
    assert_bits(np.asarray(y), np.asarray(expected), "values")

    def assert_close(value, wanted):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()

    jax.tree.map(assert_close, gradients, expected_gradients)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "generation", ["v5e", *(pytest.param(g, marks=pytest.mark.slow) for g in ("v4", "v5p", "v6e", "tpu7x"))]
)
def test_a_compiled_layer_copies_no_weights(generation):
    """With `ragged_dot`'s own gradients XLA makes a transposed copy of every matrix."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    pytest.importorskip("flax", reason="the layer's configuration is the Flax layers': pip install 'xen-moe-jax[flax]'")
    from benchmarks.tpu import layer_programs

    sizes, width = {"hidden": 1024, "experts": 32, "top_k": 4}, 512
    copied = {}
    for matmul in ("auto", "ragged_dot"):
        text = layer_programs.compile_layer(layer_programs.OWN, generation, None, 512, sizes, width, matmul).as_text()
        copied[matmul] = len(re.findall(r"= bf16\[(?:1,)?4,(?:1024,512|512,1024)\]\S* copy\(", text))
        assert ("xen_moe_grouped_transposed" in text) == (matmul == "auto")
    assert copied["auto"] == 0 < copied["ragged_dot"], copied
