"""One remote DMA per peer over contiguous runs of rows.

What moves: rows `[input_offset, + size)` of the operand, HBM to HBM, to row `output_offset` of the peer's result.
Only the peer's semaphore knows of their arrival: each rank waits for the number of rows that it expects from each
source.
Who waits: as everywhere, nobody writes before every peer has announced itself (`peers`).
Forms: `exchange` does it all in one kernel. `start` returns while the rows travel, with its semaphores as results;
`done` waits on them. Nothing between the two may touch the operand or the result; both are passed through.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch

MAX_SEMAPHORES = 16


def num_semaphores(count: int) -> int:
    """Receive semaphores for `count` sources: shared, so that they stay few, but not one, so that no counter
    overflows.
    """
    return min(count, MAX_SEMAPHORES)


def _start(
    ids: Any,
    place: Any,
    in_off: Any,
    send_sizes: Any,
    out_off: Any,
    x: Any,
    out: Any,
    send: Any,
    recv: Any,
    credits: Any,
    axes: peers.Axes,
    count: int,
) -> None:
    """Barrier, then one DMA per peer that gets rows, beginning with the next rank: nobody is everybody's first."""
    mine = lax.rem(place[0], num_semaphores(count))
    peers.announce(axes, lambda i: ids[i], count)
    peers.await_peers(axes, credits, lambda i: ids[i], count)

    @pl.loop(1, count + 1)
    def _(i: Any) -> None:
        peer = lax.rem(place[0] + i, count)
        size = send_sizes[peer]

        @pl.when(size > 0)
        def _() -> None:
            pltpu.make_async_remote_copy(
                x.at[pl.ds(in_off[peer], size)],
                out.at[pl.ds(out_off[peer], size)],
                send.at[0],
                recv.at[mine],
                device_id=axes.device_id(ids[peer]),
            ).start()


def _wait(rows: Any, sizes: Any, semaphore: Any, count: int) -> None:
    """Waits for `sizes[i]` rows on `semaphore(i)`, for each of `count` peers."""

    @pl.loop(0, count)
    def _(i: Any) -> None:
        @pl.when(sizes[i] > 0)
        def _() -> None:
            run = rows.at[pl.ds(0, sizes[i])]
            pltpu.make_async_copy(run, run, semaphore(i)).wait()


def _finish(send_sizes: Any, recv_sizes: Any, x: Any, out: Any, send: Any, recv: Any, count: int) -> None:
    _wait(x, send_sizes, lambda i: send.at[0], count)
    _wait(out, recv_sizes, lambda i: recv.at[lax.rem(i, num_semaphores(count))], count)


def _exchange_body(ids, place, in_off, send_sizes, out_off, recv_sizes, x, *refs, axes, count) -> None:
    out, send, recv, credits = refs[-4:]
    _start(ids, place, in_off, send_sizes, out_off, x, out, send, recv, credits, axes, count)
    _finish(send_sizes, recv_sizes, x, out, send, recv, count)
    peers.leave(credits, count)


def exchange(
    x: jax.Array,
    output: jax.Array | None,
    ids: jax.Array,
    place: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axes: peers.Axes,
    launch: Launch,
) -> jax.Array:
    """Sends runs of rows to peers.

    Args:
      x: `[N, S, 128]`, rows to send.
      output: `[M, S, 128]`, the result where nothing arrives, its buffer is reused; None: a fresh result of the shape
        of `x`.
      ids: int32 `[n]`, rank along `axes` of each peer, this rank included; the same list on all of them.
      place: int32 `[1]`, this rank's place in `ids`.
      input_offsets, send_sizes, output_offsets: int32 `[n]`, rows for each peer; `output_offsets` are rows of the
        peer's result.
      recv_sizes: int32 `[n]`, rows that each source sends here: what it has in its `send_sizes`.
    """
    count = ids.shape[0]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    buffers = [x] if output is None else [x, output]
    return launch.call(
        functools.partial(_exchange_body, axes=axes, count=count),
        name="xen_moe_exchange",
        remote=True,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            in_specs=[hbm] * len(buffers),
            out_specs=hbm,
            scratch_shapes=[
                pltpu.SemaphoreType.DMA((1,)),
                pltpu.SemaphoreType.DMA((num_semaphores(count),)),
                pltpu.SemaphoreType.REGULAR,
            ],
        ),
        out_shape=(buffers[-1].shape, x.dtype),
        aliases={} if output is None else {7: 0},
    )(ids, place, input_offsets, send_sizes, output_offsets, recv_sizes, *buffers)


def _start_body(ids, place, in_off, send_sizes, out_off, x, _x_out, out, send, recv, credits, *, axes, count) -> None:
    _start(ids, place, in_off, send_sizes, out_off, x, out, send, recv, credits, axes, count)
    peers.leave(credits, count)


def _done_body(send_sizes, recv_sizes, x, _in_flight, send, recv, _x_out, out, *, count) -> None:
    _finish(send_sizes, recv_sizes, x, out, send, recv, count)


def semaphore_shapes(count: int) -> tuple[Any, Any]:
    """Send and receive semaphores that `start` returns and `done` takes."""
    return pltpu.SemaphoreType.DMA((1,)), pltpu.SemaphoreType.DMA((num_semaphores(count),))


def start(
    x: jax.Array,
    ids: jax.Array,
    place: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    *,
    rows: int,
    axes: peers.Axes,
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """First half of `exchange` into a fresh buffer of `rows` rows: `(x, in_flight, send semaphore, receive
    semaphores)`.
    """
    count = ids.shape[0]
    hbm, sem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    return pl.pallas_call(
        functools.partial(_start_body, axes=axes, count=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            in_specs=[hbm],
            out_specs=[hbm, hbm, sem, sem],
            scratch_shapes=[pltpu.SemaphoreType.REGULAR],
        ),
        out_shape=[
            pltpu.HBM(x.shape, x.dtype),
            pltpu.HBM((rows, *x.shape[1:]), x.dtype),
            *semaphore_shapes(count),
        ],
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(
            has_side_effects=pltpu.SideEffectType.DATAFLOW_SIDE_EFFECTING, collective_id=launch.collective_id
        ),
        name="xen_moe_start",
    )(ids, place, input_offsets, send_sizes, output_offsets, x)


def done(
    x: jax.Array,
    in_flight: jax.Array,
    send: jax.Array,
    recv: jax.Array,
    send_sizes: jax.Array,
    recv_sizes: jax.Array,
) -> jax.Array:
    """Second half: waits for what left and for what arrives; the received rows."""
    hbm, sem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    _, out = pl.pallas_call(
        functools.partial(_done_body, count=send_sizes.shape[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, in_specs=[hbm, hbm, sem, sem], out_specs=[hbm, hbm], scratch_shapes=[]
        ),
        out_shape=[pltpu.HBM(x.shape, x.dtype), pltpu.HBM(in_flight.shape, in_flight.dtype)],
        input_output_aliases={2: 0, 3: 1},
        compiler_params=pltpu.CompilerParams(has_side_effects=pltpu.SideEffectType.DATAFLOW_SIDE_EFFECTING),
        name="xen_moe_done",
    )(send_sizes, recv_sizes, x, in_flight, send, recv)
    return out
