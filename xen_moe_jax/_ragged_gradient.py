"""The transpose of `ragged_all_to_all`, right for empty segments and for slices of `operand` that overlap."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary


def transpose(
    cotangent: jax.Array,
    operand_shape: tuple[int, ...],
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    ragged: Callable[..., jax.Array],
    exchange: Callable[[jax.Array], jax.Array],
    axis_name: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of `operand` and `output`.

    Args:
      cotangent: cotangent of the result, shape of `output`.
      ragged: `ragged_all_to_all` with the axis bound. exchange: `all_to_all` of one number for each peer, the axis
        bound.
    """
    landed = exchange(output_offsets)  # where each source's rows lie in this rank's result
    came_from = exchange(input_offsets)  # where they lay in the source's operand
    zeros = vary(jnp.zeros(operand_shape, cotangent.dtype), varying_axes(cotangent))

    def all_at_once():
        return ragged(cotangent, zeros, landed, recv_sizes, came_from, send_sizes)

    def peer_by_peer():
        peer = jnp.arange(send_sizes.shape[0], dtype=jnp.int32)

        def one_shift(shift, total):
            # in a whole round every rank hears from exactly one peer, so nothing it adds can collide
            rank = _own_peer_number(send_sizes, exchange)
            to, source = (rank - shift) % peer.size, (rank + shift) % peer.size
            send = jnp.where(peer == to, recv_sizes, 0)
            receive = jnp.where(peer == source, send_sizes, 0)
            return total + ragged(cotangent, zeros, landed, send, came_from, receive)

        return lax.fori_loop(0, peer.size, one_shift, zeros)

    overlap = lax.pmax(_segments_overlap(input_offsets, send_sizes).astype(jnp.int32), axis_name)
    operand_ct = lax.cond(overlap > 0, peer_by_peer, all_at_once)

    number = jnp.arange(cotangent.shape[0], dtype=jnp.int32)[:, None] - landed[None]  # of a row, in each segment
    source = came_from[None] + number
    came = (number >= 0) & (number < recv_sizes[None]) & (source >= 0) & (source < operand_shape[0])
    overwritten = jnp.any(came, axis=1)
    overwritten = overwritten.reshape(-1, *[1] * (cotangent.ndim - 1))
    return operand_ct, jnp.where(overwritten, jnp.zeros((), cotangent.dtype), cotangent)


def _segments_overlap(offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    by_offset = jnp.argsort(jnp.where(sizes > 0, offsets, jnp.iinfo(jnp.int32).max))
    start, size = offsets[by_offset], sizes[by_offset]
    most = jnp.iinfo(jnp.int32).max - jnp.maximum(start, 0)  # for a sum that int32 holds
    end = lax.cummax(jnp.where(size > 0, start + jnp.minimum(size, most), jnp.iinfo(jnp.int32).min))
    return jnp.any((size[1:] > 0) & (start[1:] < end[:-1]))


def _own_peer_number(sizes: jax.Array, exchange: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """This rank's number among its peers (inside its group, when there are groups)."""
    return exchange(jnp.arange(sizes.shape[0], dtype=jnp.int32) + sizes * 0)[0]
