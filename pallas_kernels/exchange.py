"""One remote DMA per peer over contiguous runs of rows.

What moves: rows `[input_offset, + size)` of the operand, HBM to HBM, to row `output_offset` of the peer's result.
Only the peer's semaphore knows of their arrival: each rank waits for the number of rows that it expects from each
source.
Who waits: no rank writes before all of its peers have announced themselves (`peers`).
Forms: `exchange` does it all in one kernel. `start` returns while the rows travel, with its semaphores as results;
`done` waits on them. Nothing between the two may touch the operand or the result; both are passed through.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels import peers
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.send import Link, recv_semaphores, scratch


class Runs(NamedTuple):
    """Runs of rows between a group of `n` ranks.

    Attributes:
      ids: int32 `[n]`, rank along the axes of each peer, this rank included; the same list on all of them.
      place: int32 `[1]`, this rank's place in `ids`.
      input_offsets, sizes, output_offsets: int32 `[n]`, rows for each peer; `output_offsets` are rows of the peer's
        result.
      expected: int32 `[n]`, rows that each source sends here: the source's entry in its own `sizes`.
    """

    ids: jax.Array
    place: jax.Array
    input_offsets: jax.Array
    sizes: jax.Array
    output_offsets: jax.Array
    expected: jax.Array


@dataclasses.dataclass(frozen=True)
class _Refs:
    """`Runs`, then buffers and semaphores; start and done have only some of them."""

    sizes: Any
    x: Any
    out: Any
    send: Any
    recv: Any
    credits: Any = None
    ids: Any = None
    place: Any = None
    input_offsets: Any = None
    output_offsets: Any = None
    expected: Any = None
    passed_on: Any = None
    given: Any = None

    def link(self, axes: peers.Axes | None, count: int) -> Link:
        place = None if self.place is None else self.place[0]
        return Link(axes, self.out, self.send, self.recv, self.credits, place, lambda i: self.ids[i], count)


def _start(refs: _Refs, link: Link, count: int) -> None:
    """Enters the barrier, then starts one DMA per peer that gets rows. Each rank begins with the next rank, so that
    first peers differ."""
    link.announce()
    link.await_peers()

    @pl.loop(1, count + 1)
    def _(i: Any) -> None:
        peer = lax.rem(refs.place[0] + i, count)
        size = refs.sizes[peer]

        @pl.when(size > 0)
        def _() -> None:
            rows = refs.x.at[pl.ds(refs.input_offsets[peer], size)]
            link.start(rows, pl.ds(refs.output_offsets[peer], size), peer)


def _exchange_body(refs: _Refs, *, axes: peers.Axes, count: int) -> None:
    link = refs.link(axes, count)
    _start(refs, link, count)
    link.drain_runs(refs.x, refs.sizes, refs.expected)
    link.leave()


def exchange(x: jax.Array, output: jax.Array | None, runs: Runs, *, axes: peers.Axes, launch: Launch) -> jax.Array:
    """Sends runs of rows to peers.

    Args:
      x: `[N, S, 128]`, rows to send.
      output: `[M, S, 128]`, the result where nothing arrives, its buffer is reused; None: a fresh result of the shape
        of `x`.
    """
    count = runs.ids.shape[0]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    buffers = [x] if output is None else [x, output]
    names = [*Runs._fields, "x", *([] if output is None else ["given"]), "out", "send", "recv", "credits"]
    return launch.call(
        functools.partial(_exchange_body, axes=axes, count=count),
        _Refs,
        names,
        name="xen_moe_exchange",
        remote=True,
        by_dma=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            in_specs=[hbm] * len(buffers),
            out_specs=hbm,
            scratch_shapes=scratch(axes, count, 1),
        ),
        out_shape=(buffers[-1].shape, x.dtype),
        aliases={} if output is None else {7: 0},
    )(*runs, *buffers)


def _start_body(refs: _Refs, *, axes: peers.Axes, count: int) -> None:
    link = refs.link(axes, count)
    _start(refs, link, count)
    link.leave()


def _done_body(refs: _Refs, *, count: int) -> None:
    refs.link(None, count).drain_runs(refs.x, refs.sizes, refs.expected)


class Started(NamedTuple):
    """Buffers and semaphores that `start` returns and `done` takes.

    Attributes:
      x: the operand. rows: the result, arriving.
      send, recv: semaphores of `send.scratch`.
    """

    x: jax.Array
    rows: jax.Array
    send: jax.Array
    recv: jax.Array


def semaphore_counts(count: int) -> tuple[int, int]:
    """Returns the numbers of send and receive semaphores of `Started` for `count` peers."""
    return 1, recv_semaphores(count)


def start(
    x: jax.Array, runs: Runs, *, rows: int, axes: peers.Axes, launch: Launch, output: jax.Array | None = None
) -> Started:
    """Starts an `exchange` into a fresh buffer of `rows` rows, or into `output`, whose other rows stay as they are;
    `runs.expected` is for `done`."""
    count, given = runs.ids.shape[0], [] if output is None else [output]
    hbm, sem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    return Started(
        *launch.call(
            functools.partial(_start_body, axes=axes, count=count),
            _Refs,
            [*Runs._fields[:5], "x", *["given"] * len(given), "passed_on", "out", "send", "recv", "credits"],
            name="xen_moe_start",
            remote=True,
            by_dma=True,
            pending=True,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                in_specs=[hbm] * (1 + len(given)),
                out_specs=[hbm, hbm, sem, sem],
                scratch_shapes=[pltpu.SemaphoreType.REGULAR],
            ),
            out_shape=[
                (x.shape, x.dtype),
                ((rows, *x.shape[1:]), x.dtype),
                *(pltpu.SemaphoreType.DMA((n,)) for n in semaphore_counts(count)),
            ],
            aliases={5: 0} | ({6: 1} if given else {}),
        )(*runs[:5], x, *given)
    )


def done(started: Started, sizes: jax.Array, expected: jax.Array, *, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """Finishes an `exchange`: waits for the sends and the arrivals; returns the operand and the received rows."""
    hbm, sem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    x, out = launch.call(
        functools.partial(_done_body, count=sizes.shape[0]),
        _Refs,
        ["sizes", "expected", "x", "given", "send", "recv", "passed_on", "out"],
        name="xen_moe_done",
        remote=False,
        by_dma=True,
        pending=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, in_specs=[hbm, hbm, sem, sem], out_specs=[hbm, hbm], scratch_shapes=[]
        ),
        out_shape=[(a.shape, a.dtype) for a in started[:2]],
        aliases={2: 0, 3: 1},
    )(sizes, expected, *started)
    return x, out
