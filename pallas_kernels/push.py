"""Token rows -> records -> staging of the ranks that need them.

What moves: for each token, one record per destination rank, from VMEM by remote DMA to row `address` of that rank's
staging.
Steps: a block of `x` is pipelined into VMEM and encoded (packed or quantized) into one of two record buffers; then
one DMA per (token, destination). A record buffer is reused once the DMAs of two blocks ago have left it.
Who waits: no rank writes before all of its peers have announced themselves, which is checked only after the first
block is encoded. At the end each rank waits for the number of records that the routing says it receives (`send`).
Local form (`axes=None`): the records go into a send buffer of this rank's own, for `exchange`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, for_row_groups, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Quantization, Record, encode, quantize_chunk
from xen_moe_jax.pallas_kernels.send import Link, Outgoing, scratch


@dataclasses.dataclass(frozen=True)
class Routes:
    """Destinations of records, and the number of records to expect.

    Attributes:
      peer: int32 `[T, D]`, destination rank of each entry, `-1` for none.
      address: int32 `[T, D]`, row of the destination's staging.
      expected: int32 `[R]`, records that arrive from each source. Unused in the local form.
      staging_rows: rows of staging.
    """

    peer: jax.Array
    address: jax.Array
    expected: jax.Array
    staging_rows: int


@dataclasses.dataclass(frozen=True)
class _Refs:
    expected: Any
    counts: Any
    peer: Any
    address: Any
    x: Any
    target: Any
    buffers: Any
    sent: Any
    send: Any
    scales: Any = None
    header: Any = None
    recv: Any = None
    credits: Any = None


def encode_rows(
    refs: Any, put: Callable[[int, jax.Array], None], rows: Any, record: Record, quantize: Quantization | None
) -> None:
    """Encodes the tokens `rows` of `refs.x`, with their `scales` and `header` if there are any, by `record.encode`."""
    x, scales = refs.x, refs.scales
    latest = {}

    def chunk(c: int) -> jax.Array:
        values = x[rows, c * LANES : (c + 1) * LANES]
        if quantize is None:
            return values
        values, latest["scale"] = quantize_chunk(values.astype(jnp.float32), quantize)
        return values

    def scale(c: int) -> jax.Array:
        return latest["scale"] if scales is None else scales[rows, c : c + 1]

    header = None if refs.header is None else refs.header[rows, :]
    encode(record, chunk, scale if record.scaled else None, put, rows.size, header)


def _body(refs: _Refs, *, record: Record, quantize: Quantization | None, entries: int, axes: peers.Axes | None) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    slot = lax.rem(step, 2)

    def outgoing(slot: Any) -> Outgoing:
        return Outgoing(refs.buffers.at[slot], spread=False)

    link = Link(axes, refs.target, refs.send, refs.recv, refs.credits)

    @pl.when(step == 0)
    def _() -> None:
        link.announce()

    @pl.when(step >= 2)
    def _() -> None:
        link.await_sent(outgoing(slot), refs.sent[slot], slot)

    def encode(rows: Any) -> None:
        encode_rows(refs, outgoing(slot).put(rows), rows, record, quantize)

    for_row_groups(refs.x.shape[0], tile_rows(refs.x.dtype), encode)

    @pl.when(step == 0)
    def _() -> None:
        link.await_peers()

    link.start_block(outgoing(slot), refs.peer, refs.address, entries, slot)
    refs.sent[slot] = refs.counts[0, 0, 0]

    @pl.when(step == steps - 1)
    def _() -> None:
        link.drain_blocks(outgoing, refs.sent, refs.expected, step)


def vmem_bytes(record: Record, x_dtype: Any, has_scales: bool, block: int) -> int:
    """VMEM that a block size needs: two input blocks (pipelined) and two record buffers."""
    row = record.hidden * jnp.dtype(x_dtype).itemsize + (4 * LANES * max(1, record.scale_rows) if has_scales else 0)
    row += 4 * LANES if record.header else 0
    return 2 * block * (row + record.bytes)


def push(
    x: jax.Array,
    scales: jax.Array | None,
    routes: Routes,
    *,
    record: Record,
    quantize: Quantization | None,
    axes: peers.Axes | None,
    launch: Launch,
    header: jax.Array | None = None,
) -> jax.Array:
    """Sends every token's record to its destinations.

    Args:
      x: `[T, hidden]`.
      scales: float32 `[T, chunks]` that travel with `x`, or None.
      quantize: how to quantize, or None to send `x` as it is.
      axes: the ranks that are reached; None writes into this rank's own buffer.
      header: int32 `[T, 128]`, as `record.encode` takes it, where the record has one.

    Returns:
      int32 `[staging_rows, *record.shape]`; rows that no rank addressed are unspecified.
    """
    tokens, entries = routes.peer.shape
    block = block_rows(launch.block, tokens, tile_rows(x.dtype))
    steps = -(-tokens // block)
    pad = ((0, steps * block - tokens), (0, 0))
    peer = jnp.pad(routes.peer, pad, constant_values=-1).reshape(steps, 1, block * entries)
    address = jnp.pad(routes.address, pad).reshape(steps, 1, block * entries)
    counts = jnp.sum(peer >= 0, axis=2, keepdims=True, dtype=jnp.int32)

    table = pl.BlockSpec((1, 1, block * entries), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    one = pl.BlockSpec((1, 1, 1), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    in_specs = [one, table, table, pl.BlockSpec((block, record.hidden), lambda i, *_: (i, 0))]
    names = ["expected", "counts", "peer", "address", "x"]
    operands = [routes.expected, counts, peer, address, x]
    if scales is not None:
        in_specs.append(pl.BlockSpec((block, record.chunks), lambda i, *_: (i, 0)))
        names.append("scales")
        operands.append(scales)
    if header is not None:
        in_specs.append(pl.BlockSpec((block, LANES), lambda i, *_: (i, 0)))
        names.append("header")
        operands.append(header)
    names += ["target", "buffers", "sent", "send"] + (["recv", "credits"] if axes is not None else [])
    return launch.call(
        functools.partial(_body, record=record, quantize=quantize, entries=entries, axes=axes),
        _Refs,
        names,
        name="xen_moe_push" if axes is not None else "xen_moe_pack",
        remote=axes is not None,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                Outgoing.scratch(record.shape, block, spread=False),
                pltpu.SMEM((2,), jnp.int32),
                *scratch(axes, axes.num_ranks if axes else 0, 2),
            ],
        ),
        out_shape=((routes.staging_rows, *record.shape), jnp.int32),
    )(*operands)
