"""Token rows -> records -> staging of the ranks that need them.

What moves: for each token, one record per destination rank, from VMEM by remote DMA to row `address` of that rank's
staging.
Steps: a block of `x` is pipelined into VMEM and encoded (packed or quantised) into one of two record buffers; then
one DMA per (token, destination). A record buffer is reused once the DMAs of two blocks ago have left it.
Who waits: nobody writes before every peer has announced itself, which is checked only after the first block is
encoded. At the end each rank waits for the number of records that the routing says it receives, one semaphore per
source (modulo `RECV_SEMAPHORES`), so that no counter can overflow.
Local form (`axes=None`): the same, into a send buffer of this rank's own, for `exchange`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, for_row_groups, tile_rows
from xen_moe_jax.pallas_kernels.record import LANES, Record, encode, quantize_chunk

RECV_SEMAPHORES = 16


def recv_semaphores(num_ranks: int) -> int:
    return min(num_ranks, RECV_SEMAPHORES)


def send_block(record_buffer: Any, target: Any, peer: Any, address: Any, tokens: int, entries: int, copy: Any) -> None:
    """Starts one DMA per table entry `>= 0` of a block of `tokens` records, `entries` destinations each."""

    @pl.loop(0, tokens)
    def _(token: Any) -> None:
        for entry in range(entries):
            to = peer[0, 0, token * entries + entry]

            @pl.when(to >= 0)
            def _(to: Any = to, entry: int = entry) -> None:
                copy(record_buffer.at[token], target.at[address[0, 0, token * entries + entry]], to).start()


def await_records(staging: Any, expected: Any, recv: Any, num_ranks: int) -> None:
    """Waits for `expected[source]` records from every source."""
    semaphores = recv_semaphores(num_ranks)

    @pl.loop(0, num_ranks)
    def _(source: Any) -> None:
        peers.wait_rows(staging, expected[source], recv.at[lax.rem(source, semaphores)])


def _encode_rows(x: Any, scales: Any, out: Any, rows: Any, record: Record, quantise: tuple[str, str] | None) -> None:
    latest = {}

    def chunk(c: int) -> jax.Array:
        values = x[rows, c * LANES : (c + 1) * LANES]
        if quantise is None:
            return values
        values, latest["scale"] = quantize_chunk(values.astype(jnp.float32), *quantise)
        return values

    def scale(c: int) -> jax.Array:
        return latest["scale"] if scales is None else scales[rows, c : c + 1]

    encode(record, chunk, scale if record.scaled else None, out, rows)


def _body(
    sent: Any,
    expected: Any,
    peer: Any,
    address: Any,
    x: Any,
    *refs: Any,
    record: Record,
    quantise: tuple[str, str] | None,
    has_scales: bool,
    entries: int,
    axes: peers.Axes | None,
) -> None:
    scales, refs = (refs[0], refs[1:]) if has_scales else (None, refs)
    target, buffers, send, *sync = refs
    step, steps = pl.program_id(0), pl.num_programs(0)
    slot = lax.rem(step, 2)
    if axes is not None:
        recv, credits = sync
        mine = lax.rem(lax.axis_index(axes.names), recv_semaphores(axes.num_ranks))

        @pl.when(step == 0)
        def _() -> None:
            peers.announce(axes)

    def copy(source: Any, row: Any, to: Any) -> Any:
        if axes is None:
            return pltpu.make_async_copy(source, row, send.at[slot])
        return pltpu.make_async_remote_copy(source, row, send.at[slot], recv.at[mine], device_id=axes.device_id(to))

    @pl.when(step >= 2)
    def _() -> None:
        peers.wait_rows(buffers.at[slot], sent[step - 2], send.at[slot])

    def encode_rows(rows: Any) -> None:
        _encode_rows(x, scales, buffers.at[slot], rows, record, quantise)

    for_row_groups(x.shape[0], tile_rows(x.dtype), encode_rows)

    if axes is not None:

        @pl.when(step == 0)
        def _() -> None:
            peers.await_peers(axes, credits)

    send_block(buffers.at[slot], target, peer, address, x.shape[0], entries, copy)

    @pl.when(step == steps - 1)
    def _() -> None:
        @pl.when(step >= 1)
        def _() -> None:
            peers.wait_rows(buffers.at[1 - slot], sent[step - 1], send.at[1 - slot])

        peers.wait_rows(buffers.at[slot], sent[step], send.at[slot])
        if axes is not None:
            await_records(target, expected, recv, axes.num_ranks)
            peers.leave(credits, axes.num_ranks)


def vmem_bytes(record: Record, x_dtype: Any, has_scales: bool, block: int) -> int:
    """VMEM that a block size needs: two input blocks (pipelined) and two record buffers."""
    row = record.hidden * jnp.dtype(x_dtype).itemsize + (4 * LANES * max(1, record.scale_rows) if has_scales else 0)
    return 2 * block * (row + record.bytes)


def push(
    x: jax.Array,
    scales: jax.Array | None,
    peer: jax.Array,
    address: jax.Array,
    expected: jax.Array,
    *,
    record: Record,
    quantise: tuple[str, str] | None,
    staging_rows: int,
    axes: peers.Axes | None,
    launch: Launch,
) -> jax.Array:
    """Sends every token's record to its destinations.

    Args:
      x: `[T, hidden]`.
      scales: float32 `[T, chunks]` that travel with `x`, or None.
      peer: int32 `[T, D]`, destination rank of each entry, `-1` for none.
      address: int32 `[T, D]`, row of the destination's staging.
      expected: int32 `[R]`, records that arrive from each source. Unused in the local form.
      quantise: (dtype, scale format) to quantise to, or None to send `x` as it is.
      staging_rows: rows of the result.
      axes: the ranks that are reached; None writes into this rank's own buffer.

    Returns:
      int32 `[staging_rows, *record.shape]`; rows that nobody addressed are unspecified.
    """
    tokens, entries = peer.shape
    block = block_rows(launch.block, tokens, tile_rows(x.dtype))
    steps = -(-tokens // block)
    pad = steps * block - tokens
    peer = jnp.pad(peer, ((0, pad), (0, 0)), constant_values=-1).reshape(steps, 1, block * entries)
    address = jnp.pad(address, ((0, pad), (0, 0))).reshape(steps, 1, block * entries)
    sent = jnp.sum(peer >= 0, axis=(1, 2), dtype=jnp.int32)

    table = pl.BlockSpec((1, 1, block * entries), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    in_specs = [table, table, pl.BlockSpec((block, record.hidden), lambda i, *_: (i, 0))]
    operands = [sent, expected, peer, address, x]
    if scales is not None:
        in_specs.append(pl.BlockSpec((block, record.chunks), lambda i, *_: (i, 0)))
        operands.append(scales)
    scratch = [pltpu.VMEM((2, block, *record.shape), jnp.int32), pltpu.SemaphoreType.DMA((2,))]
    if axes is not None:
        scratch += [pltpu.SemaphoreType.DMA((recv_semaphores(axes.num_ranks),)), pltpu.SemaphoreType.REGULAR]
    body = functools.partial(
        _body,
        record=record,
        quantise=quantise,
        has_scales=scales is not None,
        entries=entries,
        axes=axes,
    )
    return launch.call(
        body,
        name="xen_moe_push" if axes is not None else "xen_moe_pack",
        remote=axes is not None,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=scratch,
        ),
        out_shape=((staging_rows, *record.shape), jnp.int32),
    )(*operands)
