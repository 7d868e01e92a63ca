"""all_gather_matmul as one FFI call: an exchange in rounds, and a matmul of cuBLAS for the rows of each rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xen_moe_jax import _mesh, _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends.base import Exchange
from xen_moe_jax.backends.cuda import call, collectives, devices, module

DTYPES = ("bfloat16", "float16")
LEAST_OPERATIONS = 1 << 35
"""Multiplications and additions of a rank's rows (50 us on an H100) from which mode="auto" multiplies rank by rank:
the rounds, and a matmul for each rank, take tens of microseconds that those of a rank's rows must hide."""
WORKSPACE_BYTES = 32 << 20
"""Of cuBLAS, which recommends as much for Hopper GPUs."""
CHUNK_BYTES = 64 << 10
"""Few blocks carry much: long chunks keep their warps busy between two flags."""
BLOCKS, MOST_BLOCKS = 4, 24
BLOCK_COLUMNS = 56_000
"""Thread blocks of a round, each of which takes a multiprocessor from the matmul beside it: so many that a row arrives
in the time that it takes to multiply it. At 12 GB/s a block, as measured beside a matmul, and 650 TFLOP/s that is
blocks times columns. Fewer keep the matmul waiting, more slow it down: 4, 6, 8 and 12 blocks took 1.30, 1.11, 1.04 and
1.14 of the time of the matmul of 8192 x 4096 by 4096 x 7168 alone (two H200)."""


def by_rank(exchange: Exchange, x: jax.Array, w: jax.Array) -> bool:
    """True if the rows of each rank are multiplied by themselves."""
    config, ranks = exchange.config, _mesh.group_size(exchange.axis_sizes, None)
    if x.dtype.name not in DTYPES or ranks == 1 or 0 in (*x.shape, *w.shape) or _nodes.several(ranks, config):
        return False
    wanted = 2 * x.size * w.shape[1] >= LEAST_OPERATIONS
    return config.mode == "throughput" or (config.mode == "auto" and wanted)


def all_gather_matmul(exchange: Exchange, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x [T, H]`, `w [H, N]` -> `[R * T, N]`."""
    if not by_rank(exchange, x, w):
        return jnp.matmul(collectives.all_gather(exchange, x).reshape(-1, x.shape[1]), w)
    mesh, config = _mesh.lowering_mesh(), exchange.config
    ranks, (rows, depth), columns = _mesh.group_size(exchange.axis_sizes, None), x.shape, w.shape[1]
    row_bytes = depth * x.dtype.itemsize
    attrs = collectives.attributes(
        config,
        devices.num_sms(mesh),
        ranks,
        rows * row_bytes,
        x.dtype,
        gather=1,
        unit_bytes=row_bytes,
        operand_units=rows,
        output_units=ranks * rows,
    )
    attrs |= {
        "lanes": _blocks(config, columns, ranks) * module.compiled().block_lanes,
        "chunk_bytes": CHUNK_BYTES,
        "dtype": module.compiled().dtypes.index(x.dtype.name),
        "depth": depth,
        "columns": columns,
        "workspace_bytes": WORKSPACE_BYTES,
    }
    keys = devices.groups(mesh, exchange.axis_name, None)
    results = [
        jax.ShapeDtypeStruct((ranks * rows, columns), x.dtype),
        jax.ShapeDtypeStruct((ranks * rows, depth), x.dtype),
        jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8),
    ]
    return call.ffi_call("xen_moe_gather_matmul", (x, w), results, keys, attrs)[0]


def _blocks(config: KernelConfig, columns: int, ranks: int) -> int:
    wanted = config.num_sms or max(BLOCKS, -(-BLOCK_COLUMNS // columns))
    return max(1, min(wanted, MOST_BLOCKS, module.compiled().max_blocks // ranks))
