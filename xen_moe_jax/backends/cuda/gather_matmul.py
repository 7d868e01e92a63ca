"""all_gather_matmul as one FFI call: an exchange in rounds, and a matmul by cuBLAS of each rank's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xen_moe_jax import _mesh, _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends.base import Exchange
from xen_moe_jax.backends.cuda import call, collectives, devices, module

DTYPES = ("bfloat16", "float16")
LEAST_OPERATIONS = 1 << 35
"""Multiplications and additions in the matmul of a rank's rows from which mode="auto" multiplies rank by rank. They
take 50 us on an H100. The launches of the rounds and of a matmul for each rank cost tens of microseconds, which a
matmul must last long enough to hide."""
WORKSPACE_BYTES = 32 << 20
"""Bytes of the workspace of cuBLAS: as much as cuBLAS recommends for Hopper GPUs."""
CHUNK_BYTES = 64 << 10
"""Bytes of a chunk. Few blocks carry many bytes, and long chunks keep the warps busy between two flags."""
BLOCKS, MOST_BLOCKS = 4, 24
BLOCK_COLUMNS = 56_000
"""The product of a round's thread blocks and of the columns of `w` with which a row arrives in the time that its
multiplication takes, at 12 GB/s a block, as measured beside a matmul, and 650 TFLOP/s. A block takes a multiprocessor
from the matmul beside it: fewer blocks keep the matmul waiting, more slow it down. With 4, 6, 8 and 12 blocks the
operation took 1.30, 1.11, 1.04 and 1.14 of the time of the matmul of 8192 x 4096 by 4096 x 7168 alone (two H200)."""


def by_rank(exchange: Exchange, x: jax.Array, w: jax.Array) -> bool:
    """True if each rank's rows are multiplied by a matmul of their own: `x [T, H]`, `w [H, N]`."""
    config, ranks = exchange.config, _mesh.group_size(exchange.axis_sizes, None)
    if x.dtype.name not in DTYPES or ranks == 1 or 0 in (*x.shape, *w.shape) or _nodes.several(ranks, config):
        return False
    wanted = 2 * x.size * w.shape[1] >= LEAST_OPERATIONS
    return config.mode == "throughput" or (config.mode == "auto" and wanted)


def all_gather_matmul(exchange: Exchange, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x [T, H]`, `w [H, N]` of one dtype -> `[R * T, N]`; by an all_gather and one matmul unless `by_rank` holds."""
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
    """Returns the thread blocks of a round for a `w` of so many columns."""
    wanted = config.num_sms or max(BLOCKS, -(-BLOCK_COLUMNS // columns))
    return max(1, min(wanted, MOST_BLOCKS, module.compiled().max_blocks // ranks))
