"""Configs that are wrong in ways that only a run would show, or right in an unusual way; routers that went wrong."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from tests.support.layers import CONFIG, layer, make_mesh, run, tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [("wire", "fp4"), ("combine_wire", "int8:bf16"), ("wire", 8), ("dtype", "float7"), ("param_dtype", "int8")],
)
def test_unknown_wires_and_dtypes(field, value):
    with pytest.raises(ValueError, match=f"MoEConfig.{field}={value!r}: must be"):
        dataclasses.replace(CONFIG, **{field: value})


def test_numpy_numbers_are_numbers():
    changed = {"hidden_size": np.int64(16), "top_k": np.int32(2), "num_experts": np.uint8(8), "num_groups": np.int8(2)}
    config = dataclasses.replace(CONFIG, **changed, capacity_factor=np.float32(1.5), aux_loss_weight=np.float64(0.1))
    assert config == dataclasses.replace(CONFIG, num_groups=2, capacity_factor=1.5, aux_loss_weight=0.1)
    assert config.chunk_capacity(8, 4) == 24
    arrays = {name: np.array(value) for name, value in (changed | {"capacity_factor": 1.5}).items()}
    assert hash(dataclasses.replace(config, **arrays)) == hash(config)
    assert dataclasses.replace(config, top_k=jnp.int32(2), weight_scale=jnp.float32(1)) == config
    assert run(layer(config), tokens(6))[0].shape == (6, 16)


@pytest.mark.parametrize("sizes", [None, (2, 4)], ids=["one device", "dp x ep"])
def test_a_router_that_went_wrong_shows_in_the_metrics(sizes):
    """The output of those tokens is not finite or arbitrary; the layer says how many they are."""
    mesh = make_mesh(sizes, ("dp", "ep")) if sizes else None
    moe = layer(CONFIG, mesh=mesh)
    x = np.array(tokens(16))
    assert run(moe, x, mesh)[1].num_nonfinite == 0
    x[3, 0], x[9] = np.nan, np.inf
    mask = np.arange(16) != 9
    assert run(moe, x, mesh)[1].num_nonfinite == 2
    assert run(moe, x, mesh, mask=jnp.asarray(mask))[1].num_nonfinite == 1, "a left-out token does not count"
    moe.router[...] = moe.router[...].at[0, 0].set(jnp.nan)
    assert run(moe, tokens(16), mesh)[1].num_nonfinite == 16
