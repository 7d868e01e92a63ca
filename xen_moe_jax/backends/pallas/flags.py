"""One bit for every (rank, token) between ranks: 32 tokens a word."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax.backends import rounds

BITS = 32
AT_ONCE = 8 * 1024
"""Words that one round of an exchange moves."""


def packed(flags: jax.Array) -> jax.Array:
    """bool `[P, T, ...]` -> int32 `[P, ceil(T / 32), ...]`."""
    peers, tokens, *rest = flags.shape
    padded = jnp.pad(flags, ((0, 0), (0, -tokens % BITS), *((0, 0) for _ in rest)))
    bits = padded.reshape(peers, -1, BITS, *rest)
    values = (jnp.int32(1) << jnp.arange(BITS, dtype=jnp.int32)).reshape(BITS, *(1 for _ in rest))
    return jnp.sum(jnp.where(bits, values, 0), axis=2, dtype=jnp.int32)  # no bit twice: a sum is an or


def unpacked(words: jax.Array, tokens: int) -> jax.Array:
    """int32 `[P, tokens, ...]`, zeros and ones, of `packed` words."""
    peers, count, *rest = words.shape
    shift = jnp.arange(BITS, dtype=jnp.int32).reshape(BITS, *(1 for _ in rest))
    return ((words[:, :, None] >> shift) & 1).reshape(peers, count * BITS, *rest)[:, :tokens]


def to_peers(flags: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """bool `[P, T, ...]`, element `p` for rank `p` -> int32 zeros and ones, element `s` from rank `s`."""
    return unpacked(lax.all_to_all(packed(flags), axis_name, 0, 0, tiled=True), flags.shape[1])


def to_peers_if(wanted: jax.Array, flags: jax.Array, otherwise: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """The same where `wanted`, bool `[]` and the same on every rank; else `otherwise`, and nothing travels."""
    words = packed(flags)
    peers, count = words.shape[:2]
    block = max(1, min(count, AT_ONCE * count // words.size))
    padded = rounds.pad_to_blocks(words, 1, block, fill=0)
    came = rounds.exchange(
        lambda first: lax.dynamic_slice_in_dim(padded, first, block, axis=1),
        largest_pair=jnp.where(wanted, jnp.int32(count), 0),
        max_rows=count,
        block=block,
        axis_name=axis_name,
    )
    return jnp.where(wanted, unpacked(came, flags.shape[1]), otherwise)
