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

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import gather, peers
from xen_moe_jax.pallas_kernels.launch import Launch, block_rows
from xen_moe_jax.pallas_kernels.record import LANES, Record
from xen_moe_jax.pallas_kernels.reduce_ranks import encode_sums, keep
from xen_moe_jax.pallas_kernels.send import Link, Outgoing, await_whole, scratch

GATHERED, DEEPEST, SENT, FACTS = 0, 1, 2, 8
"""What a step must know of its block: rows, most rows of a pair, pairs; `FACTS` numbers a block."""


def _row_values(words: jax.Array, odd: jax.Array, paired: bool) -> jax.Array:
    """float32 row values; `paired`: even rows are the low halves of the words, odd rows the high halves."""
    if not paired:
        return words
    bits = jnp.where(odd, words & jnp.int32(-65536), words << 16)
    return lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """(source, token) pairs to reduce, and where their sums go.

    Attributes:
      rows: int32 `[P, S]`, rows of each pair in slot order, those in use first, then `-1`.
      peer: int32 `[P]`, the token's rank, `-1` for no pair.
      address: int32 `[P]`, row of its staging.
      count: int32 `[]`, how many pairs to visit: those after it are all unused.
      expected: int32 `[R]`, partial records that arrive from each rank. Unused in the local form.
      staging_rows: rows of staging.
    """

    rows: jax.Array
    peer: jax.Array
    address: jax.Array
    count: jax.Array
    expected: jax.Array
    staging_rows: int


@dataclasses.dataclass(frozen=True)
class _Refs:
    expected: Any
    zero: Any
    facts: Any
    following_facts: Any
    now: Any
    following: Any
    peer: Any
    address: Any
    rows: Any
    y: Any
    target: Any
    buffer: Any
    arrived: Any
    acc: Any
    outgoing: Any
    sent: Any
    send: Any
    weights: Any = None
    weight_rows: Any = None
    recv: Any = None
    credits: Any = None


@dataclasses.dataclass(frozen=True)
class _Static:
    record: Record
    quantise: tuple[str, str] | None
    slots: int
    weighted: bool
    paired: bool
    axes: peers.Axes | None


def _fetch(refs: _Refs, static: _Static) -> Any:
    """This step's rows in a buffer, the next step's on their way; the buffer's number."""
    y, buffer, arrived = refs.y, refs.buffer, refs.arrived
    rows = y.bitcast(jnp.int32) if y.dtype == jnp.bfloat16 else y

    at_once = next(n for n in (gather.AT_ONCE, 2, 1) if buffer.shape[2] % n == 0)

    def start(table: Any, slot: Any, step: Any) -> None:
        facts = refs.facts if table is refs.now else refs.following_facts

        @pl.loop(0, facts[0, 0, DEEPEST])
        def _(s: Any) -> None:
            @pl.loop(0, buffer.shape[2] // at_once)
            def _(i: Any) -> None:
                for n in range(at_once):
                    pair = i * at_once + n
                    row = table[0, 0, pair * static.slots + s]

                    @pl.when(row >= 0)
                    def _(row: Any = row, pair: Any = pair) -> None:
                        if static.weighted:
                            from_row = refs.weights.at[pl.ds(lax.shift_right_logical(row, 7), 1)]
                            into = refs.weight_rows.at[slot, s, pl.ds(pair, 1)]
                            pltpu.make_async_copy(from_row, into, arrived.at[slot]).start()
                        row = lax.shift_right_logical(row, 1) if static.paired else row
                        into = buffer.at[slot, s, pl.ds(pair, 1)]
                        pltpu.make_async_copy(rows.at[pl.ds(row, 1)], into, arrived.at[slot]).start()

    def wait(slot: Any) -> None:
        for rows in (buffer, *([refs.weight_rows] if static.weighted else [])):
            first = rows.at[slot, 0]
            await_whole(first, refs.facts[0, 0, GATHERED], arrived.at[slot])

    return gather.double_buffered(start, wait, refs.now, refs.following)


def _add_up(refs: _Refs, static: _Static, slot: Any) -> None:
    """`acc`: the float32 sums of a block of pairs."""
    acc, table = refs.acc, refs.rows[...]
    slot_lane = lax.broadcasted_iota(jnp.int32, table.shape, 1)
    lane = lax.broadcasted_iota(jnp.int32, (table.shape[0], LANES), 1)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.loop(0, refs.facts[0, 0, DEEPEST])
    def _(s: Any) -> None:
        number = jnp.max(jnp.where(slot_lane == s, table, -1), axis=1, keepdims=True)
        weight = None
        if static.weighted:
            mine = lane == (number & (LANES - 1))
            weight = jnp.sum(jnp.where(mine, refs.weight_rows[slot, s], 0.0), axis=1, keepdims=True)
        for c in range(static.record.chunks):
            columns = slice(c * LANES, (c + 1) * LANES)
            row = _row_values(refs.buffer[slot, s, :, columns], (number & 1) == 1, static.paired)
            if weight is not None:
                row = keep(row * weight, refs.zero[0])
            acc[:, columns] = jnp.where(number >= 0, acc[:, columns] + row, acc[:, columns])


def _body(refs: _Refs, *, static: _Static) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    pairs = refs.buffer.shape[2]

    def outgoing(slot: Any) -> Outgoing:
        return Outgoing(refs.outgoing.at[slot], spread=True)

    link = Link(static.axes, refs.target, refs.send, refs.recv, refs.credits)

    @pl.when(step == 0)
    def _() -> None:
        link.announce()

    slot = _fetch(refs, static)
    _add_up(refs, static, slot)

    @pl.when(step >= 2)
    def _() -> None:
        link.await_sent(outgoing(slot), refs.sent[slot], slot)

    encode_sums(
        static.record,
        lambda c: refs.acc[:, c * LANES : (c + 1) * LANES],
        static.quantise,
        refs.zero[0],
        outgoing(slot).put(pl.ds(0, pairs)),
        pairs,
    )

    @pl.when(step == 0)
    def _() -> None:
        link.await_peers()

    link.start_block(outgoing(slot), refs.peer, refs.address, 1, slot)
    refs.sent[slot] = refs.facts[0, 0, SENT]

    @pl.when(step == steps - 1)
    def _() -> None:
        link.drain_blocks(outgoing, refs.sent, refs.expected)


def _pair_words(y: jax.Array) -> jax.Array:
    """What `y.bitcast(int32)` shows the kernel on a TPU, `[C / 2, hidden]`: interpret mode cannot bitcast a buffer in
    HBM.
    """
    bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.uint32).reshape(-1, 2, y.shape[1])
    return lax.bitcast_convert_type(bits[:, 0] | (bits[:, 1] << 16), jnp.int32)


def vmem_bytes(record: Record, slots: int, block: int) -> int:
    """VMEM that a block of pairs needs: two buffers of rows and two of weights, sums, two record buffers, tables."""
    return block * (4 * (record.hidden + LANES) * 2 * slots + 4 * record.hidden + 2 * record.bytes + 2 * 4 * LANES)


def reduce_slots(
    y: jax.Array,
    pairs: Pairs,
    weights: jax.Array | None,
    zero: jax.Array,
    *,
    record: Record,
    quantise: tuple[str, str] | None,
    axes: peers.Axes | None,
    launch: Launch,
) -> jax.Array:
    """Reduces each pair's rows and sends the partial sums.

    Args:
      y: `[C, hidden]`, float32, or bfloat16 with an even `C`.
      weights: float32 `[C]`, what the rows are multiplied by, or None.
      zero: int32 `[1]`, a zero unknown to the compiler.
      quantise: (dtype, scale format), or None to send partial sums in `y.dtype`.

    Returns:
      int32 `[staging_rows, *record.shape]`; rows that nobody addressed are unspecified.
    """
    count, slots = pairs.rows.shape
    paired = y.dtype.itemsize == 2
    if paired and launch.interpret:
        y = _pair_words(y)
    block = block_rows(launch.block, count, 8)
    steps = -(-count // block)
    pad = steps * block - count
    rows = jnp.pad(pairs.rows, ((0, pad), (0, 0)), constant_values=-1)
    peer = jnp.pad(pairs.peer, (0, pad), constant_values=-1).reshape(steps, 1, block)
    address = jnp.pad(pairs.address, (0, pad)).reshape(steps, 1, block)
    used = (rows >= 0).reshape(steps, block, slots)
    table = rows.reshape(steps, 1, block * slots)
    numbers = [
        jnp.sum(used, axis=(1, 2), dtype=jnp.int32),
        jnp.max(jnp.sum(used, axis=2, dtype=jnp.int32), axis=1),
        jnp.sum(peer[:, 0] >= 0, axis=1, dtype=jnp.int32),
    ]
    known = jnp.stack([*numbers, *[numbers[0]] * (FACTS - len(numbers))], axis=1).reshape(steps, 1, FACTS)

    def following(i: Any, *_: Any) -> Any:
        return jnp.minimum(i + 1, steps - 1), 0, 0

    smem = functools.partial(pl.BlockSpec, (1, 1, block * slots), memory_space=pltpu.SMEM)
    facts = pl.BlockSpec((1, 1, FACTS), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    following_facts = pl.BlockSpec((1, 1, FACTS), following, memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    per_pair = pl.BlockSpec((1, 1, block), lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    names = ["expected", "zero", "facts", "following_facts", "now", "following", "peer", "address", "rows", "y"]
    scratch_shapes = [
        pltpu.VMEM((2, slots, block, record.hidden), jnp.int32 if paired else y.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((block, record.hidden), jnp.float32),
        Outgoing.scratch(record.shape, block, spread=True),
        pltpu.SMEM((2,), jnp.int32),
        *scratch(axes, axes.num_ranks if axes else 0, 2),
    ]
    operands = []
    if weights is not None:
        names.append("weights")
        scratch_shapes.append(pltpu.VMEM((2, slots, block, LANES), jnp.float32))
        operands.append(jnp.pad(weights, (0, -weights.shape[0] % LANES)).reshape(-1, LANES))
    names += ["target", "buffer", "arrived", "acc", "outgoing", "sent", "send"]
    names += ["recv", "credits"] if axes is not None else []
    names += ["weight_rows"] if operands else []
    return launch.call(
        functools.partial(_body, static=_Static(record, quantise, slots, weights is not None, paired, axes)),
        _Refs,
        names,
        name="xen_moe_reduce_slots" if axes is not None else "xen_moe_reduce_slots_local",
        remote=axes is not None,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(-(-pairs.count // block), 1),),
            in_specs=[
                facts,
                following_facts,
                smem(lambda i, *_: (i, 0, 0)),
                smem(following),
                per_pair,
                per_pair,
                pl.BlockSpec((block, slots), lambda i, *_: (i, 0)),
                *[hbm] * (1 + len(operands)),
            ],
            out_specs=hbm,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=((pairs.staging_rows, *record.shape), jnp.int32),
    )(
        pairs.expected,
        zero,
        known,
        known,
        table,
        table,
        peer,
        address,
        rows,
        y,
        *operands,
    )
