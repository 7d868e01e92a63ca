"""The drop-ins on TPU: `all_to_all` and `ragged_all_to_all` as one remote DMA per peer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends import gathered
from xen_moe_jax.backends.base import Exchange
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.pallas_kernels.exchange import Runs, exchange
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import LANES

_MOVABLE = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}


def all_to_all(call: Exchange, x: jax.Array) -> jax.Array:
    """Computes `jax.lax.all_to_all`: every peer's part is one run of whole rows of 128 elements."""
    hardware.check_one_slice(call.axis_name, "use jax.lax or KernelConfig(backend='reference')")
    axes = Axes(call.axis_name, call.axis_sizes)
    ids, place = _group(axes, call.axis_index_groups)
    peers = ids.shape[0]
    rows, restore = _as_rows(gathered.parts_of(x, call.split_axis, peers, call.tiled), "all_to_all")
    one = jnp.ones((peers,), jnp.int32)
    received = exchange(
        rows,
        None,
        Runs(ids, place, jnp.arange(peers, dtype=jnp.int32), one, jnp.broadcast_to(place, (peers,)), one),
        axes=axes,
        launch=_launch(axes, call.axis_index_groups, call.config),
    )
    return gathered.arranged(restore(received), call.concat_axis, call.tiled)  # element p is from peer p


def ragged_all_to_all(call: Exchange, operand: jax.Array, output: jax.Array, *segments: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all`; it neither reads nor writes elements outside `operand` or `output`."""
    input_offsets, send_sizes, output_offsets, recv_sizes = segments
    hardware.check_one_slice(call.axis_name, "use jax.lax or KernelConfig(backend='reference')")
    axes = Axes(call.axis_name, call.axis_sizes)
    ids, place = _group(axes, call.axis_index_groups)
    peers = ids.shape[0]

    def to_peers(a: jax.Array) -> jax.Array:
        return lax.all_to_all(a.reshape(peers, 1), call.axis_name, 0, 0, axis_index_groups=call.groups).reshape(peers)

    wanted = jnp.minimum(send_sizes, to_peers(recv_sizes))
    skip = jnp.maximum(jnp.maximum(-input_offsets, -output_offsets), 0)
    room = jnp.minimum(operand.shape[0] - input_offsets, output.shape[0] - output_offsets)
    sizes = jnp.maximum(jnp.minimum(wanted, room) - skip, 0)
    rows, _ = _as_rows(operand, "ragged_all_to_all")
    target, restore = _as_rows(output, "ragged_all_to_all")
    return restore(
        exchange(
            rows,
            target,
            Runs(ids, place, input_offsets + skip, sizes, output_offsets + skip, to_peers(sizes)),
            axes=axes,
            launch=_launch(axes, call.axis_index_groups, call.config),
        )
    )


def _group(axes: Axes, groups: Any) -> tuple[jax.Array, jax.Array]:
    """This rank's peers as int32 `[n]` ranks along `axes`, and its own place among them as int32 `[1]`."""
    rank = lax.axis_index(axes.names)
    if groups is None:
        return jnp.arange(axes.num_ranks, dtype=jnp.int32), rank.reshape(1).astype(jnp.int32)
    table = jnp.asarray(groups, jnp.int32)
    mine = table == rank
    return (
        table[jnp.argmax(jnp.any(mine, axis=1))],
        jnp.argmax(jnp.any(mine, axis=0)).reshape(1).astype(jnp.int32),
    )


def _as_rows(x: jax.Array, operation: str) -> tuple[jax.Array, Any]:
    """`x [N, ...]` -> integers `[N, S, 128]`, each row padded to whole rows of 128; and the way back."""
    itemsize = x.dtype.itemsize
    if x.dtype == jnp.bool_:
        rows, to_int8 = _as_rows(x.astype(jnp.int8), operation)
        return rows, lambda a: to_int8(a).astype(jnp.bool_)
    if itemsize not in _MOVABLE or jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{operation} on TPU: dtype {x.dtype} is not supported: elements must be of 1, 2 or 4 bytes")
    elements = math.prod(x.shape[1:])
    sublanes = max(1, -(-elements // LANES))
    flat = lax.bitcast_convert_type(x, _MOVABLE[itemsize]).reshape(x.shape[0], elements)
    rows = jnp.pad(flat, ((0, 0), (0, sublanes * LANES - elements))).reshape(x.shape[0], sublanes, LANES)

    def back(a: jax.Array) -> jax.Array:
        a = a.reshape(a.shape[0], -1)[:, :elements].reshape(a.shape[0], *x.shape[1:])
        return lax.bitcast_convert_type(a, x.dtype)

    return rows, back


def _launch(axes: Axes, groups: Any, config: KernelConfig) -> Launch:
    return hardware.launch(
        "exchange", lambda block: 0, preferred=1, smallest=1, available=1, config=config, axes=axes, groups=groups
    )
