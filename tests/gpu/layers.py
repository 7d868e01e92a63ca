"""Whole MoE layers in bfloat16 beside the dense evaluation in float32: how far apart they are, on any backend.

The widths are multiples of 128, so that on a Hopper GPU the library's own matmuls take part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tests.support import layers
from tests.support.dense_moe import dense_moe
from xen_moe_jax.flax import MoEConfig

HIDDEN, TOKENS = 256, 96
PLAIN = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=128,
    num_experts=8,
    top_k=2,
    balancing="none",
    param_dtype=jnp.bfloat16,
)
DEEPSEEK_V3 = dataclasses.replace(
    PLAIN, score="sigmoid", balancing="bias", num_groups=4, topk_groups=2, weight_scale=2.5, num_shared_experts=1
)
GPT_OSS = dataclasses.replace(PLAIN, activation="clipped_swiglu", expert_bias=True, logits_bias=True)
"""The limit clips nothing here: after rounding, other elements would be clipped and lose their gradient."""
IN_FRONT = dataclasses.replace(PLAIN, apply_weights_to="activation")
CASES = {
    "swiglu": PLAIN,
    "weights in front": IN_FRONT,
    "DeepSeek-V3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS,
    "geglu, padded": dataclasses.replace(PLAIN, activation="geglu", layout="padded"),
    "relu2, uneven, aligned": dataclasses.replace(PLAIN, activation="relu2", num_experts=7, alignment=16),
    "chunks that take turns": dataclasses.replace(PLAIN, num_chunks=2, remat="all"),
    "tokens on every rank": dataclasses.replace(PLAIN, token_axes=()),
    "tensor axis": dataclasses.replace(PLAIN, intermediate_size=256, tensor_axis="tp"),
}
OVERLAPPING = {
    "chunks that overlap": dataclasses.replace(PLAIN, num_chunks=2),
    "chunks that overlap, weights in front": dataclasses.replace(IN_FRONT, num_chunks=2, remat="experts"),
}
TOLERANCE = 0.03
"""Allowed difference as a share of the largest element: bfloat16 rounds to 0.4 %, several times in a row."""


def axes_of(config: MoEConfig, devices: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns sizes and names of the mesh's axes for a case."""
    return ((1, devices), ("ep", "tp")) if config.tensor_axis else ((devices,), ("ep",))


def draw(config: MoEConfig, mesh: Mesh) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a layer with values in its biases, tokens, and the factors of the output."""
    rng = np.random.default_rng(3)
    x, target = (jnp.asarray(rng.standard_normal((TOKENS, HIDDEN), np.float32), jnp.bfloat16) for _ in range(2))
    with jax.set_mesh(mesh):  # weights are replicated where the ranks do not divide the experts
        moe = layers.layer(config)
    for name in moe.weight_names:
        if name.endswith("_bias"):
            bias = getattr(moe, name)
            bias[...] = jnp.asarray(0.3 * rng.standard_normal(bias[...].shape, np.float32), bias[...].dtype)
    return moe, x, target


def differences(config: MoEConfig, mesh: Mesh, kept: list | None = None) -> dict[str, float]:
    """Returns the differences from the dense layer, over the largest element.

    They are those of the output ("y"), of the gradient of the tokens ("x"), and of that of each weight, by its name.

    `kept`, if given, gets the layer's compiled program."""
    moe, x, target = draw(config, mesh)
    y, metrics, gradients = layers.run_with_gradients(moe, x, target, mesh, kept)
    assert metrics.num_dropped == 0
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in layers.weights_of(moe).items()}

    def loss(weights: Any, x: jax.Array) -> Any:
        y = dense_moe(config, weights, x)
        return (y * target).sum(), y

    with jax.default_matmul_precision("highest"):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        (by_name, by_x), exact = gradient(weights, x.astype(jnp.float32))
    expected = {name: value for name, value in by_name.items() if name in gradients}
    expected |= {"x": by_x, "y": exact}
    got = gradients | {"y": y}
    return {name: distance(got[name], value) for name, value in expected.items()}


def distance(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    scale = np.abs(expected).max()
    assert scale > 1e-3, "the case tests nothing"
    return float(np.abs(got - expected).max() / scale)


def assert_close(config: MoEConfig, mesh: Mesh, kept: list | None = None) -> None:
    wrong = {name: far for name, far in differences(config, mesh, kept).items() if not far <= TOLERANCE}
    assert not wrong, f"further from the dense layer than {TOLERANCE} of the largest element: {wrong}"


def output(config: MoEConfig, mesh: Mesh) -> np.ndarray:
    """Returns the output of the layer, bit for bit as the devices computed it."""
    moe, x, _ = draw(config, mesh)
    graph, state = nnx.split(moe)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])(state, x))
