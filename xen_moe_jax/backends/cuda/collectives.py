"""all_to_all and ragged_all_to_all as FFI calls: shapes into `[ranks, bytes]` and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _mesh, _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends.base import Exchange
from xen_moe_jax.backends.cuda import call, devices, module
from xen_moe_jax.backends.cuda import schedule as schedules

CHUNK_BYTES = 64 * 1024
RING_CHUNKS = 4


def _attributes(
    config: KernelConfig, sms: int, ranks: int, pair_bytes: int, dtype: Any, **units: int
) -> dict[str, int]:
    """`pair_bytes`: the largest message between two ranks."""
    if _nodes.several(ranks, config):
        raise ValueError(
            f"all_to_all or ragged_all_to_all of {ranks} ranks with KernelConfig.ranks_per_node="
            f"{config.ranks_per_node}: the CUDA backend's exchange stores at every rank by pointer: leave "
            "ranks_per_node out where all ranks share NVLink, or use KernelConfig(backend='reference'), which is XLA's"
        )
    most = module.compiled().max_ranks
    if ranks > most:
        raise ValueError(
            f"the CUDA backend takes at most {most} ranks, not {ranks}: use KernelConfig(backend='reference')"
        )
    lanes = max(1, min(schedules.blocks(config, sms) // ranks, -(-pair_bytes // 4096)))
    chunk = min(CHUNK_BYTES, -(-pair_bytes // (256 * lanes)) * 256)
    return {
        "ranks": ranks,
        "lanes": lanes,
        "chunk_bytes": max(256, chunk),
        "ring_chunks": RING_CHUNKS,
        "timeout_ns": call.timeout_ns(config),
        "channel": config.channel,
        "poison": 0x80 if "fnuz" in jnp.dtype(dtype).name else 0xFF,
        **units,
    }


def all_to_all(exchange: Exchange, x: jax.Array) -> jax.Array:
    """Computes `jax.lax.all_to_all`."""
    mesh = _mesh.lowering_mesh()
    split_axis, concat_axis = exchange.split_axis, exchange.concat_axis
    ranks = _mesh.group_size(exchange.axis_sizes, exchange.axis_index_groups)
    if exchange.tiled:
        parts = x.reshape(*x.shape[:split_axis], ranks, x.shape[split_axis] // ranks, *x.shape[split_axis + 1 :])
    else:
        parts = x
    parts = jnp.moveaxis(parts, split_axis, 0)
    unit_bytes = parts[0].size * x.dtype.itemsize
    attrs = _attributes(
        exchange.config,
        devices.num_sms(mesh),
        ranks,
        unit_bytes,
        x.dtype,
        unit_bytes=unit_bytes,
        operand_units=ranks,
        output_units=ranks,
        ragged=0,
    )
    keys = devices.groups(mesh, exchange.axis_name, exchange.axis_index_groups)
    (out,) = call.ffi_call("xen_moe_exchange", (parts,), [jax.ShapeDtypeStruct(parts.shape, x.dtype)], keys, attrs)
    out = jnp.moveaxis(out, 0, concat_axis)
    if exchange.tiled:
        shape = out.shape
        out = out.reshape(*shape[:concat_axis], shape[concat_axis] * shape[concat_axis + 1], *shape[concat_axis + 2 :])
    return out


def ragged_all_to_all(exchange: Exchange, operand: jax.Array, output: jax.Array, *segments: jax.Array) -> jax.Array:
    """Computes `jax.lax.ragged_all_to_all`. Rows past the end of `operand` or `output` are never read or written."""
    mesh = _mesh.lowering_mesh()
    ranks = segments[0].shape[0]
    unit_bytes = int(np.prod(operand.shape[1:], dtype=np.int64)) * operand.dtype.itemsize
    if unit_bytes == 0 or operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    attrs = _attributes(
        exchange.config,
        devices.num_sms(mesh),
        ranks,
        unit_bytes * operand.shape[0],
        operand.dtype,
        unit_bytes=unit_bytes,
        operand_units=operand.shape[0],
        output_units=output.shape[0],
        ragged=1,
    )
    keys = devices.groups(mesh, exchange.axis_name, exchange.axis_index_groups)
    sizes = [lax.convert_element_type(a, jnp.int32) for a in segments]
    results = [jax.ShapeDtypeStruct(output.shape, output.dtype)]
    (out,) = call.ffi_call(
        "xen_moe_exchange", (operand, output, *sizes), results, keys, attrs, input_output_aliases={1: 0}
    )
    return out
