"""Records that another slice sent here -> staging of the ranks of this slice that need them.

What moves: records as they are, by remote DMA from HBM to HBM; nothing passes through VMEM. The sends are counted and
awaited at the end, the arrivals as in `push`.
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
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.push import await_records, recv_semaphores


def _body(
    sent: Any,
    expected: Any,
    source: Any,
    peer: Any,
    address: Any,
    records: Any,
    target: Any,
    send: Any,
    recv: Any,
    credits: Any,
    *,
    entries: int,
    axes: peers.Axes,
) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    mine = lax.rem(lax.axis_index(axes.names), recv_semaphores(axes.num_ranks))

    @pl.when(step == 0)
    def _() -> None:
        peers.announce(axes)
        peers.await_peers(axes, credits)

    @pl.loop(0, source.shape[2])
    def _(n: Any) -> None:
        for entry in range(entries):
            to = peer[0, 0, n * entries + entry]

            @pl.when(to >= 0)
            def _(to: Any = to, entry: int = entry) -> None:
                pltpu.make_async_remote_copy(
                    records.at[source[0, 0, n]],
                    target.at[address[0, 0, n * entries + entry]],
                    send,
                    recv.at[mine],
                    device_id=axes.device_id(to),
                ).start()

    @pl.when(step == steps - 1)
    def _() -> None:
        peers.wait_rows(records, sent[0], send)
        await_records(target, expected, recv, axes.num_ranks)
        peers.leave(credits, axes.num_ranks)


def forward(
    records: jax.Array,
    source: jax.Array,
    peer: jax.Array,
    address: jax.Array,
    expected: jax.Array,
    *,
    staging_rows: int,
    axes: peers.Axes,
    launch: Launch,
) -> jax.Array:
    """Sends records on.

    Args:
      records: int32 `[N, S, 128]`.
      source: int32 `[P]`, record of each entry. peer, address: int32 `[P, D]`, as in `push`.
      expected: int32 `[R]`, records that arrive from each rank of `axes`.

    Returns:
      int32 `[staging_rows, S, 128]`; rows that nobody addressed are unspecified.
    """
    count, entries = peer.shape
    block = min(launch.block, count)
    steps = -(-count // block)
    pad = steps * block - count
    table = functools.partial(pl.BlockSpec, index_map=lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return launch.call(
        functools.partial(_body, entries=entries, axes=axes),
        name="xen_moe_forward",
        remote=True,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[table((1, 1, block)), table((1, 1, block * entries)), table((1, 1, block * entries)), hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((recv_semaphores(axes.num_ranks),)),
                pltpu.SemaphoreType.REGULAR,
            ],
        ),
        out_shape=((staging_rows, *records.shape[1:]), jnp.int32),
    )(
        jnp.sum(peer >= 0, dtype=jnp.int32).reshape(1),
        expected,
        jnp.pad(source, (0, pad)).reshape(steps, 1, block),
        jnp.pad(peer, ((0, pad), (0, 0)), constant_values=-1).reshape(steps, 1, block * entries),
        jnp.pad(address, ((0, pad), (0, 0))).reshape(steps, 1, block * entries),
        records,
    )
