"""A Flax layer, forward and backward, on the kernels and on plain JAX, in one program: the same layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", reason="the layer needs xen-moe-jax[flax]")

from flax import nnx

import xen_moe_jax as xm
from benchmarks.tpu import here as places
from benchmarks.tpu.here import here
from tests.support import layers
from tests.tpu import chips
from xen_moe_jax.flax import MoEConfig

HIDDEN, TOKENS = 256, 8
TOLERANCE = 0.02
"""Share of the largest element. Layers in bfloat16 round alike, but for the activation and for a unit in the last place
of a weighted sum."""
CASES = {
    "swiglu": MoEConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_experts=8, top_k=2, balancing="none", param_dtype=jnp.bfloat16
    )
}
CASES["DeepSeek-V3"] = dataclasses.replace(
    CASES["swiglu"], score="sigmoid", balancing="bias", num_groups=4, topk_groups=2, num_shared_experts=1
)
CASES["chunks"] = dataclasses.replace(CASES["swiglu"], num_chunks=2)
CASES["grouped matmuls of few rows"] = dataclasses.replace(CASES["swiglu"], capacity=128)
CASES["many rows"] = dataclasses.replace(CASES["swiglu"], num_experts=16, top_k=4)
MANY = 64
"""Tokens of a device with which, on four devices, an expert has so many rows that both cores of a v4 or v5p share the
experts of their rank."""


@pytest.mark.tpu4
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_plain_jax(name):
    if here().slices > 1:
        pytest.skip("an operation on one axis does not leave its slice (a ValueError says so)")
    mesh = chips.mesh((here().count,), ("ep",))
    rng = np.random.default_rng(3)
    shape = ((MANY if name == "many rows" else TOKENS) * here().count, HIDDEN)
    x, target = (rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for _ in range(2))
    ours = dataclasses.replace(CASES[name], kernel=places.config())
    plain = dataclasses.replace(CASES[name], kernel=xm.KernelConfig(backend="reference"), grouped_matmul="ragged_dot")
    _, params, rest = nnx.split(layers.layer(ours), nnx.Param, ...)
    params, rest = (jax.tree.map(np.asarray, part) for part in (params, rest))

    def run(config: MoEConfig, params: Any, rest: Any, x: jax.Array, target: jax.Array) -> dict[str, Any]:
        graph = nnx.split(nnx.eval_shape(lambda: layers.layer(config)), nnx.Param, ...)[0]

        def loss(params: Any, x: jax.Array) -> Any:
            y, metrics = nnx.merge(graph, params, rest)(x)
            return (y * target).sum(), (y, metrics.num_dropped)

        (by_name, by_x), (y, dropped) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return nnx.to_pure_dict(by_name) | {"x": by_x, "y": y, "dropped": dropped}

    def compare(params: Any, rest: Any, x: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
        got, expected = (run(config, params, rest, x, target) for config in (ours, plain))
        far = {}
        for key in expected.keys() - {"dropped"}:
            a, b = (jnp.asarray(value, jnp.float32) for value in (got[key], expected[key]))
            far[key] = jnp.stack([jnp.abs(a - b).max(), jnp.abs(b).max()])
        return far | {"dropped": jnp.stack([got["dropped"], expected["dropped"]]).astype(jnp.float32)}

    with jax.set_mesh(mesh):
        far = chips.run(
            jax.jit(compare, out_shardings=jax.NamedSharding(mesh, P())), mesh, P(), (params, rest, x, target)
        )
    assert not far.pop("dropped").any() and {"x", "y", "gate", "up", "down"} <= far.keys()
    wrong = {key: pair.tolist() for key, pair in far.items() if not pair[0] <= TOLERANCE * pair[1] or pair[1] < 1e-4}
    assert not wrong, f"largest difference from plain JAX and largest element: {wrong}"
