"""A layer in waves has the bits of whole operations: in interpret mode, in both DMA modes, without a race."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts import grouped_matmul, on_tpu, waves

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 256, 128


@pytest.fixture(autouse=True)
def on_a_tpu(monkeypatch, capfd):
    """Tiles of 128 rows, so that few rows have several windows."""
    monkeypatch.setattr(grouped_matmul, "platform", lambda: "tpu")
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    monkeypatch.setattr(on_tpu, "ROWS", (128,))
    monkeypatch.setattr(on_tpu, "WEIGHT_ROWS", {128: 1})
    with interpreter.clean(capfd):
        yield
    jax.clear_caches()


def gradients(config, ranks, tokens, capacity, dtype, wire, monkeypatch):
    """Outputs, numbers of dropped slots, and gradients by tokens, router weights and weights; and what is in waves."""
    monkeypatch.setattr(on_tpu, "DEFAULT", config)
    rng = np.random.default_rng(11)
    drawn = [(ranks * tokens, HIDDEN), *[(EXPERTS, HIDDEN, WIDTH)] * 2, (EXPERTS, WIDTH, HIDDEN)]
    x, *weights = (jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, dtype) for shape in drawn)
    likely = np.arange(EXPERTS) ** 0.5  # some experts have many rows, and ranks have different numbers of rows
    idx = np.argsort(rng.random((ranks * tokens, EXPERTS)) * (1 + likely), axis=1)[:, :TOP_K]
    idx[5:9] = -1
    idx, factors = jnp.asarray(idx, jnp.int32), jnp.asarray(rng.random(idx.shape), jnp.float32)
    if dtype == jnp.bfloat16:  # tokens of two dimensions
        x, idx, factors = (a.reshape(2 * ranks, tokens // 2, -1) for a in (x, idx, factors))
    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))

    def layer(x, idx, factors, weights):
        y, info = xm.moe_mlp(
            x, idx, factors, *weights, num_experts=EXPERTS, axis_name="ep", capacity=capacity, wire=wire,
            return_info=True, config=config,
        )  # fmt: skip
        return y, info.num_dropped.reshape(1)

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)

    def loss(x, factors, weights):
        y, dropped = mapped(x, idx, factors, weights)
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(HIDDEN, dtype=jnp.float32))), (y, dropped)

    program = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    kernels = str(jax.make_jaxpr(program)(x, factors, weights))
    in_waves = {name for name in ("value_in_waves", "gradients_in_waves", "RowsLater") if name in kernels}
    (total, (y, dropped)), found = jax.jit(program)(x, factors, weights)
    # a forward pass alone keeps nothing
    alone = [jax.jit(mapped)(x, idx, factors, weights)[0]] if capacity == 256 else []
    return [total, y, *alone, *jax.tree.leaves(found)], np.asarray(dropped), in_waves


CASES = [
    pytest.param("eager", 2, 128, 512, jnp.float32, None, 1, False, marks=pytest.mark.slow),
    pytest.param("on_wait", 4, 96, 256, jnp.bfloat16, None, 2, False, marks=pytest.mark.slow),
    pytest.param("eager", 4, 96, 256, jnp.bfloat16, "float8_e4m3fn", 1, True, marks=pytest.mark.slow),
    pytest.param("on_wait", 2, 224, 1024, jnp.bfloat16, None, 1, True, marks=pytest.mark.slow),
    ("eager", 2, 128, 512, jnp.bfloat16, None, 1, True),
]
"""Ranks with room for 256 rows drop some. A wire with a dtype of its own has other records than sums that go home. Of
224 tokens some windows have two waves."""


@pytest.mark.parametrize(("mode", "ranks", "tokens", "capacity", "dtype", "wire", "cores", "halves"), CASES)
def test_waves_have_the_bits_of_whole_operations(
    mode, ranks, tokens, capacity, dtype, wire, cores, halves, monkeypatch
):
    small = dataclasses.replace(hardware.SMALLEST, cores=cores)
    monkeypatch.setattr(hardware, "SMALLEST", small)
    if halves:  # and the rows' gradient goes home in two waves
        monkeypatch.setattr(hardware, "HALVES", (small.name,))
        monkeypatch.setattr(waves, "TWO_WAVES", {small.name: 2})
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    config = xm.KernelConfig(backend="pallas", interpret=params, mode="throughput")
    got, dropped, in_waves = gradients(config, ranks, tokens, capacity, dtype, wire, monkeypatch)
    # rows of bfloat16 come in waves, too
    assert len(in_waves) == 2 + (dtype == jnp.bfloat16) and not interpreter.races_found(got)
    monkeypatch.setattr(waves, "ENDS", ())
    jax.clear_caches()
    expected, also_dropped, in_waves = gradients(config, ranks, tokens, capacity, dtype, wire, monkeypatch)
    assert not in_waves and (dropped == also_dropped).all() and dropped.any() == (capacity == 256)
    for name, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert np.asarray(theirs, np.float32).any()
        assert_bits(np.asarray(mine), np.asarray(theirs), str(name))


def test_indices_without_dimensions_are_refused_by_the_dispatch(mesh4):
    config = xm.KernelConfig(backend="pallas", mode="throughput")
    x, weight = jnp.zeros((128, HIDDEN), jnp.bfloat16), jnp.zeros((1, HIDDEN, WIDTH), jnp.bfloat16)

    def layer():
        given = x, jnp.int32(1), jnp.float32(1), weight, weight, jnp.swapaxes(weight, 1, 2)
        return xm.moe_mlp(*given, num_experts=4, axis_name="ep", capacity=512, config=config)

    with pytest.raises(ValueError, match=r"moe_mlp: topk_idx has shape \(\): must be \[T, K\]"):
        jax.eval_shape(jax.shard_map(layer, mesh=mesh4, in_specs=(), out_specs=P("ep"), check_vma=False))


def test_frozen_experts_have_no_gradients_by_their_projections():
    config = xm.KernelConfig(backend="pallas", mode="throughput")
    x, weight = jnp.zeros((512, HIDDEN), jnp.bfloat16), jnp.zeros((4, HIDDEN, WIDTH), jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, gate, up):
        def layer(x, idx, gate, up):
            down = jnp.swapaxes(up, 1, 2)
            return xm.moe_mlp(
                x, idx, None, gate, up, down, num_experts=4, axis_name="ep", capacity=512, config=config
            )  # fmt: skip

        idx = jnp.tile(jnp.arange(TOP_K, dtype=jnp.int32), (512, 1))
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jnp.sum(mapped(x, idx, gate, up))

    for trained, wanted in (((0,), (False, False)), ((0, 1), (True, False)), ((0, 1, 2), (True, True))):
        jaxpr = jax.make_jaxpr(jax.grad(loss, trained))(x, weight, weight).jaxpr
        used, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        assert f"wanted={wanted}" in str(used), trained
