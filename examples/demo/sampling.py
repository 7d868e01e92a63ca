"""Samples of text from the trained model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@functools.partial(jax.jit, static_argnums=(0, 3))
def _continue(
    graph: Any, state: Any, tokens: jax.Array, start: int, temperature: jax.Array, key: jax.Array
) -> jax.Array:
    """Fills `tokens [batch, length]` from position `start` on; each step is a whole expert-parallel forward pass."""
    model = nnx.merge(graph, state)

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        logits, _ = model(tokens)  # causal: tokens at i and after it have no effect on logits[i - 1]
        at = jax.lax.dynamic_index_in_dim(logits, i - 1, axis=1, keepdims=False)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), at / temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens, drawn[:, None].astype(tokens.dtype), i, axis=1)

    return jax.lax.fori_loop(start, tokens.shape[1], step, tokens)


def sample(graph: Any, state: Any, prompts: list[str], length: int, seed: int, temperature: float = 0.7) -> list[str]:
    """Continues each prompt (equal byte lengths) to `length` bytes."""
    encoded = [prompt.encode() for prompt in prompts]
    (start,) = {len(prompt) for prompt in encoded}
    tokens = np.zeros((len(prompts), length), np.int32)
    tokens[:, :start] = [list(prompt) for prompt in encoded]
    drawn = _continue(graph, state, jnp.asarray(tokens), start, jnp.float32(temperature), jax.random.key(seed))
    return [bytes(row.astype(np.uint8)).decode(errors="replace") for row in np.asarray(drawn)]
