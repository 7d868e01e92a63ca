"""Expert rank: a token's rows -> one partial record -> staging of the token's rank.

What moves: for each block of (source, token) pairs, their rows of `y`, one local DMA each, read in XLA's own layout
of `[C, H]`: a float32 row as it is, a bfloat16 row as the pair of rows that shares its 32-bit words (of which one is
used). Rows are multiplied by their weights and added in float32 in slot order; the sum becomes a record and leaves by
remote DMA.
Double buffers on both sides: the next block's rows arrive, and the last block's records leave, while this block is
added up.
Who waits: as in `push`. Local form (`axes=None`): records go to a send buffer of this rank's own, for `exchange`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import gather, peers
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows
from xen_moe_jax.pallas_kernels.push import await_records, recv_semaphores, send_block
from xen_moe_jax.pallas_kernels.record import LANES, Record
from xen_moe_jax.pallas_kernels.reduce_ranks import encode_sums, keep

NO_ROW, ODD_ROW = -1.0, 1.0
"""What the vector unit needs to know of a row: none, or in which half of its words an odd row is (an even row is 0)."""


def _row_values(words: jax.Array, odd: jax.Array, paired: bool) -> jax.Array:
    """float32 row values; `paired`: even rows are the low halves of the words, odd rows the high halves."""
    if not paired:
        return words
    bits = jnp.where(odd, words & jnp.int32(-65536), words << 16)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _body(
    gathered: Any,
    deepest: Any,
    sent: Any,
    expected: Any,
    zero: Any,
    now: Any,
    following: Any,
    peer: Any,
    address: Any,
    kinds: Any,
    weights: Any,
    y: Any,
    target: Any,
    buffer: Any,
    arrived: Any,
    acc: Any,
    outgoing: Any,
    send: Any,
    *sync: Any,
    record: Record,
    quantise: tuple[str, str] | None,
    slots: int,
    weighted: bool,
    paired: bool,
    axes: peers.Axes | None,
) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    pairs = buffer.shape[2]
    rows = y.bitcast(jnp.int32) if y.dtype == jnp.bfloat16 else y
    if axes is not None:
        recv, credits = sync
        mine = lax.rem(lax.axis_index(axes.names), recv_semaphores(axes.num_ranks))

        @pl.when(step == 0)
        def _() -> None:
            peers.announce(axes)

    def start(table: Any, slot: Any) -> None:
        @pl.loop(0, pairs)
        def _(pair: Any) -> None:
            for s in range(slots):
                row = table[0, 0, pair * slots + s]

                @pl.when(row >= 0)
                def _(row: Any = row, s: int = s) -> None:
                    row = lax.div(row, 2) if paired else row
                    into = buffer.at[slot, s, pl.ds(pair, 1)]
                    pltpu.make_async_copy(rows.at[pl.ds(row, 1)], into, arrived.at[slot]).start()

    def wait(slot: Any) -> None:
        @pl.loop(0, gathered[step])
        def _(_: Any) -> None:
            one = buffer.at[slot, 0, pl.ds(0, 1)]
            pltpu.make_async_copy(one, one, arrived.at[slot]).wait()

    slot = gather.double_buffered(start, wait, now, following)
    lane = lax.broadcasted_iota(jnp.int32, kinds.shape, 1)
    nothing = zero[0]
    acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.loop(0, deepest[step])
    def _(s: Any) -> None:
        kind = jnp.max(jnp.where(lane == s, kinds[...], NO_ROW), axis=1, keepdims=True)
        weight = jnp.sum(jnp.where(lane == s, weights[...], 0.0), axis=1, keepdims=True) if weighted else None
        for c in range(record.chunks):
            columns = slice(c * LANES, (c + 1) * LANES)
            row = _row_values(buffer[slot, s, :, columns], kind == ODD_ROW, paired)
            if weight is not None:
                row = keep(row * weight, nothing)
            acc[:, columns] = jnp.where(kind != NO_ROW, acc[:, columns] + row, acc[:, columns])

    @pl.when(step >= 2)
    def _() -> None:
        peers.wait_rows(outgoing.at[slot], sent[step - 2], send.at[slot])

    encode_sums(
        record,
        lambda c: acc[:, c * LANES : (c + 1) * LANES],
        quantise,
        nothing,
        outgoing.at[slot],
        pl.ds(0, pairs),
    )

    def copy(source: Any, row: Any, to: Any) -> Any:
        if axes is None:
            return pltpu.make_async_copy(source, row, send.at[slot])
        return pltpu.make_async_remote_copy(source, row, send.at[slot], recv.at[mine], device_id=axes.device_id(to))

    if axes is not None:

        @pl.when(step == 0)
        def _() -> None:
            peers.await_peers(axes, credits)

    send_block(outgoing.at[slot], target, peer, address, pairs, 1, copy)

    @pl.when(step == steps - 1)
    def _() -> None:
        @pl.when(step >= 1)
        def _() -> None:
            peers.wait_rows(outgoing.at[1 - slot], sent[step - 1], send.at[1 - slot])

        peers.wait_rows(outgoing.at[slot], sent[step], send.at[slot])
        if axes is not None:
            await_records(target, expected, recv, axes.num_ranks)
            peers.leave(credits, axes.num_ranks)


def _pair_words(y: jax.Array) -> jax.Array:
    """What `y.bitcast(int32)` shows the kernel on a TPU, `[C / 2, hidden]`: interpret mode cannot bitcast a buffer in
    HBM.
    """
    bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32).reshape(-1, 2, y.shape[1])
    return lax.bitcast_convert_type(bits[:, 0] | (bits[:, 1] << 16), jnp.int32)


def vmem_bytes(record: Record, slots: int, block: int) -> int:
    """VMEM that a block of pairs needs: two row buffers of 32-bit words, the sums, two record buffers, two tables."""
    return block * (4 * record.hidden * (2 * slots + 1) + 2 * record.bytes + 4 * 4 * LANES)


def reduce_slots(
    y: jax.Array,
    positions: jax.Array,
    weights: jax.Array | None,
    peer: jax.Array,
    address: jax.Array,
    num_pairs: jax.Array,
    expected: jax.Array,
    zero: jax.Array,
    *,
    record: Record,
    quantise: tuple[str, str] | None,
    staging_rows: int,
    axes: peers.Axes | None,
    launch: Launch,
) -> jax.Array:
    """Reduces each pair's rows and sends the partial sums.

    Args:
      y: `[C, hidden]`, float32, or bfloat16 with an even `C`.
      positions: int32 `[P, S]`, rows of each pair in slot order, those in use first, then `-1`.
      weights: float32 `[P, S]`, or None.
      peer: int32 `[P]`, the token's rank, `-1` for no pair.
      address: int32 `[P]`, row of its staging.
      num_pairs: int32 `[]`, how many pairs to visit: those after it are all unused.
      expected: int32 `[R]`, partial records that arrive from each rank. Unused in the local form.
      zero: int32 `[1]`, a zero unknown to the compiler.
      quantise: (dtype, scale format), or None to send partial sums in `y.dtype`.

    Returns:
      int32 `[staging_rows, *record.shape]`; rows that nobody addressed are unspecified.
    """
    pairs, slots = positions.shape
    paired = y.dtype.itemsize == 2
    if paired and launch.interpret:
        y = _pair_words(y)
    block = block_rows(launch.block, pairs, 8)
    steps = -(-pairs // block)
    pad = steps * block - pairs
    positions = jnp.pad(positions, ((0, pad), (0, 0)), constant_values=-1)
    weights = None if weights is None else jnp.pad(weights, ((0, pad), (0, 0)))
    peer = jnp.pad(peer, (0, pad), constant_values=-1).reshape(steps, 1, block)
    address = jnp.pad(address, (0, pad)).reshape(steps, 1, block)
    used = (positions >= 0).reshape(steps, block, slots)
    gathered = jnp.sum(used, axis=(1, 2), dtype=jnp.int32)
    deepest = jnp.max(jnp.sum(used, axis=2, dtype=jnp.int32), axis=1)
    sent = jnp.sum(peer[:, 0] >= 0, axis=1, dtype=jnp.int32)
    table = positions.reshape(steps, 1, block * slots)

    smem = functools.partial(pl.BlockSpec, (1, 1, block * slots), memory_space=pltpu.SMEM)
    per_pair = pl.BlockSpec((1, 1, block), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    vector = pl.BlockSpec((block, slots), lambda i, *_: (i, 0))
    row_words = jnp.int32 if paired else y.dtype
    scratch = [
        pltpu.VMEM((2, slots, block, record.hidden), row_words),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((block, record.hidden), jnp.float32),
        pltpu.VMEM((2, block, *record.shape), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    if axes is not None:
        scratch += [pltpu.SemaphoreType.DMA((recv_semaphores(axes.num_ranks),)), pltpu.SemaphoreType.REGULAR]
    body = functools.partial(
        _body,
        record=record,
        quantise=quantise,
        slots=slots,
        weighted=weights is not None,
        paired=paired,
        axes=axes,
    )
    return launch.call(
        body,
        name="xen_moe_reduce_slots" if axes is not None else "xen_moe_reduce_slots_local",
        remote=axes is not None,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(jnp.maximum(-(-num_pairs // block), 1),),
            in_specs=[
                smem(lambda i, *_: (i, 0, 0)),
                smem(lambda i, *_: (jnp.minimum(i + 1, steps - 1), 0, 0)),
                per_pair,
                per_pair,
                vector,
                vector,
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=scratch,
        ),
        out_shape=((staging_rows, *record.shape), jnp.int32),
    )(
        gathered,
        deepest,
        sent,
        expected,
        zero,
        table,
        table,
        peer,
        address,
        jnp.where(positions >= 0, (positions & 1).astype(jnp.float32), NO_ROW),
        jnp.zeros(positions.shape, jnp.float32) if weights is None else weights,
        y,
    )
