"""all_to_all, ragged_all_to_all, all_gather and moved weights as FFI calls: shapes into `[ranks, bytes]` and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _active, _layout, _mesh, _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import gathered
from xen_moe_jax.backends.base import Call, Exchange, Move
from xen_moe_jax.backends.cuda import call, devices, module
from xen_moe_jax.backends.cuda import schedule as schedules
from xen_moe_jax.backends.cuda.gather import gather_words

CHUNK_BYTES = 64 * 1024
RING_CHUNKS = 4
MOVE_CHUNK_BYTES = 256 * 1024
"""Bytes of a chunk of moved weights. Each chunk costs a fence, so large chunks come closer to the rate of the link."""
MOVE_RING_CHUNKS = 3
MOVE_SMS = 96
"""SMs of moved weights: with two ranks, half of the blocks copy the slots that stay on their rank."""
KEEP = -3
"""Entry of a table for a slot that is not written (`ExchangeParams::sources`)."""
GATHER_CHUNK_BYTES, GATHER_RING_CHUNKS = 8 * 1024, 4
"""Bytes of a chunk of an all_gather, and chunks of a ring: each of its thread blocks has `block_lanes` rings."""
GATHER_SMS = 96
"""SMs of an all_gather: with two ranks, half of the blocks copy this rank's own rows."""
LOW_LATENCY_BYTES = 16 << 20
"""Most bytes of the gathered array, which has the parts of all ranks, for which mode="auto" takes the low-latency
kernels of an all_gather."""
ROUND_BYTES = 480
"""Bytes that a warp of the low-latency kernels moves at once (cuda_kernels/low_latency/ll128_plan.h)."""


def attributes(
    config: KernelConfig,
    sms: int,
    ranks: int,
    pair_bytes: int,
    dtype: Any,
    groups: tuple[tuple[int, ...], ...] | None = None,
    **units: int,
) -> dict[str, int]:
    """Returns the integer attributes of an exchange, as ffi/operation.cc decodes them.

    `sms`: SMs of a GPU of the mesh. `pair_bytes`: bytes of the largest message between two ranks. `dtype`: the dtype of
    the elements, whose NaN fills a failed result. `groups`: the ranks that exchange with each other, or None for all.
    `units`: attributes that the operation adds or sets.

    Raises:
      ValueError: the ranks are on several nodes, or there are more than the kernels take.
    """
    if _nodes.several(ranks, config) if groups is None else _nodes.divide_a_group(groups, config):
        raise ValueError(
            "all_to_all, ragged_all_to_all, or all_gather in groups or over three axes or more, of "
            f"{ranks} ranks with KernelConfig.ranks_per_node={config.ranks_per_node}, given or found: the CUDA "
            "backend's exchange stores at every rank by pointer: give groups whose ranks share a node, or use "
            "KernelConfig(backend='reference'), which is XLA's"
        )
    most = module.compiled().max_ranks
    if ranks > most:
        raise ValueError(
            f"the CUDA backend takes at most {most} ranks, not {ranks}: use KernelConfig(backend='reference')"
        )
    gather = bool(units.get("gather"))
    blocks = schedules.blocks(config, sms, GATHER_SMS if gather else schedules.DEFAULT_SMS)
    lanes = max(1, min(blocks // ranks, -(-pair_bytes // 4096))) * (module.compiled().block_lanes if gather else 1)
    chunk = min(GATHER_CHUNK_BYTES if gather else CHUNK_BYTES, -(-pair_bytes // (256 * lanes)) * 256)
    return {
        "ranks": ranks,
        "lanes": lanes,
        "chunk_bytes": max(256, chunk),
        "ring_chunks": GATHER_RING_CHUNKS if gather else RING_CHUNKS,
        "timeout_ns": call.timeout_ns(config),
        "channel": config.channel,
        "poison": 0x80 if "fnuz" in jnp.dtype(dtype).name else 0xFF,
        "ragged": 0,
        "gather": 0,
        "low_latency": 0,
        **units,
    }


def all_to_all(exchange: Exchange, x: jax.Array) -> jax.Array:
    """Computes `jax.lax.all_to_all`: an array of the dtype of `x`, with the shape that `jax.lax` documents."""
    mesh = _mesh.lowering_mesh()
    ranks = _mesh.group_size(exchange.axis_sizes, exchange.axis_index_groups)
    parts = gathered.parts_of(x, exchange.split_axis, ranks, exchange.tiled)
    unit_bytes = parts[0].size * x.dtype.itemsize
    attrs = attributes(
        exchange.config,
        devices.num_sms(mesh),
        ranks,
        unit_bytes,
        x.dtype,
        exchange.axis_index_groups,
        unit_bytes=unit_bytes,
        operand_units=ranks,
        output_units=ranks,
    )
    keys = devices.groups(mesh, exchange.axis_name, exchange.axis_index_groups)
    results = [jax.ShapeDtypeStruct(parts.shape, x.dtype)]
    (out,) = call.ffi_call("xen_moe_exchange", (parts,), results, keys, attrs, between_nodes=False)
    return gathered.arranged(out, exchange.concat_axis, exchange.tiled)


def ragged_all_to_all(exchange: Exchange, operand: jax.Array, output: jax.Array, *segments: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all` of `operand [N, ...]` into `output [M, ...]`, the shape of the result.

    `segments`: input offsets, send sizes, output offsets and receive sizes, `[R]` each, in rows. Rows past the end of
    `operand` or `output` are never read or written.
    """
    mesh = _mesh.lowering_mesh()
    ranks = segments[0].shape[0]
    unit_bytes = int(np.prod(operand.shape[1:], dtype=np.int64)) * operand.dtype.itemsize
    if unit_bytes == 0 or operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    attrs = attributes(
        exchange.config,
        devices.num_sms(mesh),
        ranks,
        unit_bytes * operand.shape[0],
        operand.dtype,
        exchange.axis_index_groups,
        unit_bytes=unit_bytes,
        operand_units=operand.shape[0],
        output_units=output.shape[0],
        ragged=1,
    )
    keys = devices.groups(mesh, exchange.axis_name, exchange.axis_index_groups)
    sizes = [lax.convert_element_type(a, jnp.int32) for a in segments]
    results = [jax.ShapeDtypeStruct(output.shape, output.dtype)]
    (out,) = call.ffi_call(
        "xen_moe_exchange",
        (operand, output, *sizes),
        results,
        keys,
        attrs,
        between_nodes=False,
        input_output_aliases={1: 0},
    )
    return out


def moves(move: Move, weights: Any) -> bool:
    """Returns whether an exchange can move weights like these: the ranks share a node, elements have whole bytes, and
    neither the weights nor the new slots are empty."""
    ranks = int(np.prod(move.axis_sizes))
    few = ranks <= module.compiled().max_ranks and not _nodes.several(ranks, move.config)
    return (
        few
        and 0 not in weights.shape
        and move.new_slots > 0
        and jnp.dtype(weights.dtype).name not in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
    )


def move_weights(
    move: Move, weights: jax.Array, source: jax.Array, active: jax.Array, start: bool = False
) -> jax.Array:
    """Returns weights `[S_new, ...]`, of the dtype of `weights [S_old, ...]`, in the slots of another placement.

    `source int32 [R, S_new]`, the same on all active ranks, gives the slot from which each slot gets its weights, as
    `_placement.sources` does. A slot with `KEEP` is not written, and its contents are unspecified. With `start` the
    call is a start: it takes few SMs, and only its done (`start_done.py`) may read the result.
    """
    mesh = _mesh.lowering_mesh()
    ranks, slots = source.shape
    config = schedules.for_async(move.config) if start else move.config
    unit_bytes = int(np.prod(weights.shape[1:], dtype=np.int64)) * weights.dtype.itemsize
    attrs = attributes(
        config,
        devices.num_sms(mesh),
        ranks,
        unit_bytes * slots,
        weights.dtype,
        unit_bytes=unit_bytes,
        operand_units=weights.shape[0],
        output_units=slots,
        ragged=0,
    )
    lanes = max(1, min(schedules.blocks(config, devices.num_sms(mesh), MOVE_SMS) // ranks, -(-unit_bytes // 4096)))
    chunk = min(MOVE_CHUNK_BYTES, -(-unit_bytes // 256) * 256)
    attrs |= {"lanes": lanes, "chunk_bytes": max(256, chunk), "ring_chunks": MOVE_RING_CHUNKS}
    attrs |= {"masked": int(_active.given(active)), "flight": int(start)}
    attrs["lost"] = attrs["poison"] if jnp.issubdtype(weights.dtype, jnp.floating) else 0
    results = [jax.ShapeDtypeStruct((slots, *weights.shape[1:]), weights.dtype)]
    keys = devices.groups(mesh, move.axis_name)
    operands = (weights, source, call.active_operand(active))
    (out,) = call.ffi_call("xen_moe_move_weights", operands, results, keys, attrs)
    return out


def reduce_gradients(move: Move, gradients: jax.Array, source: jax.Array, active: jax.Array) -> jax.Array:
    """Adds up `gradients [S_new, ...]` at the slots that `source int32 [R, S_new]` names.

    Returns `[S_old, ...]` of the dtype of `gradients`; sums are in float32. Turn `n` moves the gradient of the `n`-th
    replica of every expert to its home. All ranks take the same number of turns, since all have the same `source`.
    """
    ranks = source.shape[0]
    flat, rows = source.reshape(-1), ranks * move.old_slots
    order, _ = _layout.order_within_bins(flat, rows)
    order = jnp.where(flat >= 0, order, -1)
    me = lax.axis_index(move.axis_name)

    def came(turn: Any, otherwise: int) -> tuple[jax.Array, jax.Array]:
        slots = lax.iota(jnp.int32, flat.size)
        table = jnp.full(rows, otherwise, jnp.int32).at[jnp.where(order == turn, flat, rows)].set(slots, mode="drop")
        table = table.reshape(ranks, move.old_slots)
        mine = lax.dynamic_index_in_dim(table, me, 0, keepdims=False) >= 0
        return move_weights(move, gradients, table, active), mine.reshape(-1, *[1] * (gradients.ndim - 1))

    def add(state: Any) -> Any:
        turn, total = state
        part, mine = came(turn, KEEP)
        return turn + 1, jnp.where(mine, total + part.astype(jnp.float32), total)

    def all_turns() -> jax.Array:
        state: Any = (jnp.int32(1), first.astype(jnp.float32))
        if ranks == 2:  # an expert has at most two replicas: no sum is carried through memory
            return add(state)[1].astype(gradients.dtype)
        return lax.while_loop(lambda state: state[0] <= deepest, add, state)[1].astype(gradients.dtype)

    first, _ = came(0, -1)
    deepest = jnp.max(order)
    return lax.cond(deepest > 0, all_turns, lambda: first)


def all_gather(exchange: Exchange, x: jax.Array) -> jax.Array:
    """Computes `jax.lax.all_gather`; with a wire, through it (`gathered.through_wire`)."""
    ranks = _mesh.group_size(exchange.axis_sizes, exchange.axis_index_groups)

    def gather(x: jax.Array) -> jax.Array:
        several = _by_dispatch(exchange) and _nodes.several(ranks, exchange.config)
        return _between_nodes(exchange, x) if several else _within_node(exchange, x, ranks)

    parts = gather(x) if exchange.wire is None else gathered.through_wire(gather, x, exchange.wire)
    return gathered.arranged(parts, exchange.concat_axis, exchange.tiled)


def _by_dispatch(exchange: Exchange) -> bool:
    """Returns True for an all_gather that a dispatch does where the ranks are on several nodes."""
    return exchange.axis_index_groups is None and len(exchange.axis_sizes) <= 2


def use_low_latency(config: KernelConfig, ranks: int, operand_bytes: int) -> bool:
    """True if the low-latency kernels (cuda_kernels/low_latency/gather.cu) gather operands of this size."""
    few = ranks * operand_bytes <= LOW_LATENCY_BYTES
    wanted = config.mode == "low_latency" or (config.mode == "auto" and few)
    return wanted and operand_bytes % 16 == 0 and operand_bytes <= module.compiled().max_gather_bytes


def _within_node(exchange: Exchange, x: jax.Array, ranks: int) -> jax.Array:
    """Returns `[R, *x.shape]` by an exchange, in which every rank stores its operand at every other rank."""
    mesh, config = _mesh.lowering_mesh(), exchange.config
    size = x.size * x.dtype.itemsize
    rows = x.shape[0] if x.ndim > 1 else 1  # the units in which error messages give the size of the operand
    sms = devices.num_sms(mesh)
    attrs = attributes(
        config,
        sms,
        ranks,
        size,
        x.dtype,
        exchange.axis_index_groups,
        gather=1,
        unit_bytes=size // rows,
        operand_units=rows,
        output_units=ranks * rows,
    )
    if use_low_latency(config, ranks, size):
        warps = -(-size // ROUND_BYTES)
        blocks = min(schedules.blocks(config, sms, schedules.LOW_LATENCY_SMS), -(-warps // module.compiled().warps))
        attrs |= {"low_latency": 1, "lanes": blocks}
    keys = devices.groups(mesh, exchange.axis_name, exchange.axis_index_groups)
    results = [jax.ShapeDtypeStruct((ranks, *x.shape), x.dtype)]
    across = _by_dispatch(exchange)
    (out,) = call.ffi_call("xen_moe_exchange", (x,), results, keys, attrs, between_nodes=across)
    return out


def _between_nodes(exchange: Exchange, x: jax.Array) -> jax.Array:
    """Returns `[R, *x.shape]` by a dispatch. A row crosses to each other node once, and ranks of that node forward it.

    Raises:
      ValueError: `x` is complex.
    """
    ranks = _mesh.group_size(exchange.axis_sizes, None)
    if x.dtype == jnp.bool_:
        return _between_nodes(exchange, x.astype(jnp.uint8)).astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(
            f"all_gather of {x.dtype} between nodes: gather the real and the imaginary parts, or use "
            "KernelConfig(backend='reference'), which is XLA's"
        )
    as_bytes = lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)
    words = lax.bitcast_convert_type(jnp.pad(as_bytes, (0, -as_bytes.size % 4)).reshape(-1, 4), jnp.int32)
    spec = Spec(exchange.axis_name, exchange.axis_sizes, ranks, 1, 1, "grouped", ranks)
    came = gather_words(Call(spec, exchange.config), words, _active.EVERY_RANK)
    found = lax.bitcast_convert_type(came, jnp.uint8).reshape(ranks, -1)[:, : as_bytes.size]
    shape = (ranks, *x.shape, *([x.dtype.itemsize] if x.dtype.itemsize > 1 else []))
    return lax.bitcast_convert_type(found.reshape(shape), x.dtype)
