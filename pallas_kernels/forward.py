"""Records that another slice sent here -> staging of the ranks of this slice that need them.

What moves: records as they are, by remote DMA from HBM to HBM; nothing passes through VMEM. The sends are counted and
awaited at the end, the arrivals as in `push`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.push import Routes
from xen_moe_jax.pallas_kernels.send import Link, await_whole, scratch


@dataclasses.dataclass(frozen=True)
class _Refs:
    sent: Any
    expected: Any
    source: Any
    peer: Any
    address: Any
    records: Any
    target: Any
    send: Any
    recv: Any
    credits: Any


def _body(refs: _Refs, *, entries: int, axes: peers.Axes) -> None:
    step, steps = pl.program_id(0), pl.num_programs(0)
    link = Link(axes, refs.target, refs.send, refs.recv, refs.credits)

    @pl.when(step == 0)
    def _() -> None:
        link.announce()
        link.await_peers()

    @pl.loop(0, refs.source.shape[2])
    def _(n: Any) -> None:
        for entry in range(entries):
            to = refs.peer[0, 0, n * entries + entry]

            @pl.when(to >= 0)
            def _(to: Any = to, entry: int = entry) -> None:
                link.start(refs.records.at[refs.source[0, 0, n]], refs.address[0, 0, n * entries + entry], to)

    @pl.when(step == steps - 1)
    def _() -> None:
        await_whole([refs.records], refs.sent[0], refs.send.at[0])
        link.await_records(refs.expected)
        link.leave()


def forward(records: jax.Array, source: jax.Array, routes: Routes, *, axes: peers.Axes, launch: Launch) -> jax.Array:
    """Sends records on.

    Args:
      records: int32 `[N, S, 128]`.
      source: int32 `[P]`, record of each entry of `routes`, whose tables are `[P, D]`.

    Returns:
      int32 `[staging_rows, S, 128]`; rows that no rank addressed are unspecified.
    """
    count, entries = routes.peer.shape
    block = min(launch.block, count)
    steps = -(-count // block)
    pad = steps * block - count
    table = functools.partial(pl.BlockSpec, index_map=lambda i, *_: (i, 0, 0), memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return launch.call(
        functools.partial(_body, entries=entries, axes=axes),
        _Refs,
        ["sent", "expected", "source", "peer", "address", "records", "target", "send", "recv", "credits"],
        name="xen_moe_forward",
        remote=True,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[table((1, 1, block)), table((1, 1, block * entries)), table((1, 1, block * entries)), hbm],
            out_specs=hbm,
            scratch_shapes=scratch(axes, axes.num_ranks, 1),
        ),
        out_shape=((routes.staging_rows, *records.shape[1:]), jnp.int32),
    )(
        jnp.sum(routes.peer >= 0, dtype=jnp.int32).reshape(1),
        routes.expected,
        jnp.pad(source, (0, pad)).reshape(steps, 1, block),
        jnp.pad(routes.peer, ((0, pad), (0, 0)), constant_values=-1).reshape(steps, 1, block * entries),
        jnp.pad(routes.address, ((0, pad), (0, 0))).reshape(steps, 1, block * entries),
        records,
    )
