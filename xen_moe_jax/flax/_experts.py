"""SwiGLU experts on the rows that a rank received, in either layout, and the shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up` (arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


def grouped_experts(x: jax.Array, group_sizes: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Rows `[C, H]` sorted by expert -> `[C, H]`; `group_sizes` int32 `[L]`, `gate`, `up [L, H, F]`, `down [L, F, H]`.

    Rows past the last group come out unspecified; `combine` does not read them, and `ragged_dot`'s gradient neither.
    """
    hidden = swiglu(jax.lax.ragged_dot(x, gate, group_sizes), jax.lax.ragged_dot(x, up, group_sizes))
    return jax.lax.ragged_dot(hidden, down, group_sizes)


def padded_experts(x: jax.Array, num_rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Rows `[L, M, H]`, of which expert `l` uses the first `num_rows[l]` -> `[L, M, H]`."""
    used = jnp.arange(x.shape[1])[None, :] < num_rows[:, None]
    # Unused rows are unspecified and may be NaN, which a zero gradient would not silence in the weights' gradient.
    x = jnp.where(used[..., None], x, 0)
    hidden = swiglu(jnp.einsum("lmh,lhf->lmf", x, gate), jnp.einsum("lmh,lhf->lmf", x, up))
    return jnp.einsum("lmf,lfh->lmh", hidden, down)


def shared_expert(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
    """The expert that every token uses: `[T, H]` -> `[T, H]`."""
    hidden = swiglu(x @ weights["shared_gate"], x @ weights["shared_up"])
    return hidden @ weights["shared_down"]
