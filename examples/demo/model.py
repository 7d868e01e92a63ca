"""A decoder-only transformer over bytes: every second feed-forward layer is a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.nnx import MoE

VOCABULARY = 256
ApplyMoE = Callable[[MoE, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the language model; `moe` is shared by its MoE layers.

    `attention` is the implementation of `jax.nn.dot_product_attention`: None is XLA's, "cudnn" needs a GPU and 16 bits.
    """

    layers: int
    heads: int
    context: int
    dense_size: int
    moe: MoEConfig
    attention: Any = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Odd layers: 1, 3, ..."""
        return tuple(range(1, self.layers, 2))


class SwiGLU(nnx.Module):
    """The feed-forward layer of the dense blocks."""

    def __init__(self, hidden: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(inner, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(_gated(self.gate(x), self.up(x)))


@jax.custom_vjp
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU of two projections, computed in float32 and rounded once."""
    return _silu_times(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def _silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gradients(kept: tuple[jax.Array, jax.Array], by: jax.Array) -> tuple[jax.Array, ...]:
    # Behind a barrier XLA computes both gradients in one kernel, which reads each operand once.
    gate, up, by = (a.astype(jnp.float32) for a in (*kept, jax.lax.optimization_barrier(by)))
    return tuple(a.astype(kept[0].dtype) for a in jax.vjp(_silu_times, gate, up)[1](by))


_gated.defvjp(lambda gate, up: (_gated(gate, up), (gate, up)), _gradients)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions (arXiv:2104.09864)."""

    def __init__(self, hidden: int, heads: int, *, implementation: Any = None, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.implementation = implementation
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(
            _rotate(q), _rotate(k), v, is_causal=True, implementation=self.implementation
        )
        return self.out(mixed.reshape(batch, length, hidden))


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of `x [batch, length, heads, features]`."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    # Halves are exchanged by reversing an axis of two. In the gradient of a concatenation XLA would pad each half, and
    # one kernel with the gradients of all slices of `qkv` would take three times as long as its memory does.
    pairs = x.reshape(*x.shape[:-1], 2, half).astype(jnp.float32)
    sin = jnp.sin(angle)
    turned = pairs * jnp.cos(angle) + pairs[..., ::-1, :] * jnp.concatenate([-sin, sin], axis=-2)
    return turned.reshape(x.shape).astype(x.dtype)


class Block(nnx.Module):
    """Attention, then a dense or an MoE feed-forward layer, each after an RMS norm and with a residual."""

    def __init__(self, config: ModelConfig, use_moe: bool, *, rngs: nnx.Rngs) -> None:
        hidden = config.moe.hidden_size
        self.attention_norm = nnx.RMSNorm(hidden, rngs=rngs)
        self.attention = Attention(hidden, config.heads, implementation=config.attention, rngs=rngs)
        self.ffn_norm = nnx.RMSNorm(hidden, rngs=rngs)
        self.use_moe = use_moe
        self.ffn: Any = MoE(config.moe, rngs=rngs) if use_moe else SwiGLU(hidden, config.dense_size, rngs=rngs)

    def __call__(self, x: jax.Array, apply_moe: ApplyMoE | None) -> tuple[jax.Array, Any]:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        if not self.use_moe:
            return x + self.ffn(h), None
        y, metrics = self.ffn(h) if apply_moe is None else apply_moe(self.ffn, h)
        return x + y, metrics


class LanguageModel(nnx.Module):
    """Bytes to next-byte logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden = config.moe.hidden_size
        self.embed = nnx.Embed(VOCABULARY, hidden, rngs=rngs, embedding_init=nnx.initializers.normal(0.02))
        self.blocks = nnx.List([Block(config, i in config.moe_layers, rngs=rngs) for i in range(config.layers)])
        self.norm = nnx.RMSNorm(hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, apply_moe: ApplyMoE | None = None) -> tuple[jax.Array, list[Any]]:
        """Tokens integer `[batch, length]` -> logits float32 `[batch, length, 256]`, metrics of each MoE layer.

        `apply_moe(layer, x) -> (y, anything)` takes the place of the MoE layers' own forward pass (`dense.py`).
        """
        x = self.embed(tokens.astype(jnp.int32)).astype(self.embed.embedding[...].dtype)
        metrics = []
        for block in self.blocks:
            x, layer_metrics = block(x, apply_moe)
            if layer_metrics is not None:
                metrics.append(layer_metrics)
        return self.head(self.norm(x)), metrics


def next_byte_losses(logits: jax.typing.ArrayLike, targets: jax.typing.ArrayLike) -> jax.Array:
    """Nats of each target byte, float32 `[batch, length]`."""
    log_probability = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return -jnp.take_along_axis(log_probability, jnp.asarray(targets, jnp.int32)[..., None], axis=-1)[..., 0]
