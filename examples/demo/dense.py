"""A dense evaluation of the same model: every expert on every token, on one device, nothing dispatched.

Its logits must equal those of the expert-parallel model. Both compute in float32 and differ in the order of their sums
only, about 1e-5 in a logit after four layers. One thing is not continuous: where a token's second and third best
experts tie to within that rounding, either choice is right and the logits may differ from that token on. Such tokens
are rare, and the comparison of a window stops before its first one; how much was compared is reported and checked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.demo.model import LanguageModel
from xen_moe_jax.flax.nnx import MoE

LOGIT_TOLERANCE = 1e-3
"""Largest difference of two logits (of magnitude 10): 100 times the rounding, 100 times under one wrong expert."""
NEAR_TIE = 1e-5
"""Router scores closer than this may come out in either order: 10 times their rounding."""
LEAST_COMPARED = 0.5
"""Share of the logits that must be comparable, or the check means too little."""


def dense_moe(layer: MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layer's output `[..., H]` and, per token, the gap between the last chosen and the first rejected score."""
    config = layer.config
    scores = jax.nn.softmax(jnp.dot(x, layer.router[...], precision="highest"))
    best, experts = jax.lax.top_k(scores, config.top_k + 1)
    chosen = best[..., :-1] / best[..., :-1].sum(-1, keepdims=True)
    share = (jax.nn.one_hot(experts[..., :-1], config.num_experts) * chosen[..., None]).sum(-2)
    gate = jnp.einsum("...h,ehf->...ef", x, layer.gate[...])
    up = jnp.einsum("...h,ehf->...ef", x, layer.up[...])
    y = jnp.einsum("...ef,efh->...eh", jax.nn.silu(gate) * up, layer.down[...])
    return jnp.einsum("...eh,...e->...h", y, share), best[..., -2] - best[..., -1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Largest logit difference over the compared share (0 to 1) of all logits, and the two mean losses in nats."""

    max_difference: float
    compared: float
    loss: float
    dense_loss: float

    @property
    def equal(self) -> bool:
        """True if the two evaluations agree; a NaN never does."""
        losses_agree = abs(self.loss - self.dense_loss) <= LOGIT_TOLERANCE
        return self.max_difference <= LOGIT_TOLERANCE and self.compared >= LEAST_COMPARED and losses_agree


class DenseModel:
    """The dense evaluation of a model's state, copied to one device."""

    def __init__(self, graph: Any, state: Any) -> None:
        self._graph = graph
        device = jax.devices("cpu")[0]
        self._mesh = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])
        self._state = jax.device_put(jax.tree.map(np.asarray, state), device)

        def forward(state: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model: LanguageModel = nnx.merge(graph, state)
            logits, gaps = model(tokens, dense_moe)
            return logits, jnp.stack(gaps).min(0)

        self._forward = jax.jit(forward)

    def __call__(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `[batch, length]` -> logits `[batch, length, 256]`, smallest router gap of each token."""
        with jax.set_mesh(self._mesh):
            logits, gap = self._forward(self._state, tokens)
        return np.asarray(logits), np.asarray(gap)


def comparable(gap: np.ndarray) -> np.ndarray:
    """Bool `[batch, length]`: positions before their window's first near-tie (attention is causal)."""
    return np.cumprod(gap > NEAR_TIE, axis=1).astype(bool)
