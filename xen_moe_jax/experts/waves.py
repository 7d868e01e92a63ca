"""Experts on TPU in waves: rows travel while kernels multiply other rows.

The rows of a rank, sorted by expert, are cut at fixed numbers of rows, multiples of every tile, so that the kernels of
a window of rows have the tiles and pieces that they would have in one call, and the bits of the results are the same.
Rows of tokens and of cotangents come in waves, and sums of the outputs go home in waves. A wave travels by the DMAs of
a start, and ends in a done, while kernels work on a window:

    backward: pack | start 0, done 0, start 1 | window 0: place, gradients without gate, up | done 1, start 2 | ...
    home:     window 0: products, sums | start 0 | window 1: products, sums | done 0, start 1 | ...
    forward:  pack | start 0, done 0, start 1 | window 0: place, products, sums | home 0 | done 1, start 2 | ...

A record comes once, in the wave of the first window in which its token has a row; kernels of later windows find it in
staging. A sum goes home once, in the wave of its token's last row. With few experts on a rank a wave carries little
more than its part of all records. The first wave that comes and the last one that goes home keep the core waiting.
Rows that come in waves need the routing of all ranks before: the dispatch (with a `RowsLater`) makes all of its results
but the rows out of numbers that ranks gather.
Interpret mode, in which no kernel leaves semaphores behind, exchanges a wave in one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xen_moe_jax import _layout
from xen_moe_jax._api import combined
from xen_moe_jax._config import KernelConfig, RowsLater
from xen_moe_jax._moe_primitives import ROWS
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._quantize import Wire
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import plan, records, tables
from xen_moe_jax.backends.pallas.start_done import exchange_launch
from xen_moe_jax.backends.pallas.sums import Sums
from xen_moe_jax.experts import on_tpu
from xen_moe_jax.pallas_kernels import exchange
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.grouped_transposed import Window
from xen_moe_jax.pallas_kernels.hopper.activations import Activation

ENDS = (1, 3, 5)
"""Where all windows but the last one end for rows that come, in eighths of the rows by uniform routing: the first wave,
beside which nothing runs, is a small one. For rows that go home the last window is the small one."""


def windows(spec: Spec, *, back: bool = False, both: bool = False) -> list[tuple[int, int]]:
    """Returns the first row of each window, and the row behind its last one, of rows that come, or with `back` go home,
    or do `both`. The last window has all rows that uniform routing does not have, too."""
    unit = next((size for size in on_tpu.WEIGHT_ROWS if spec.capacity % size == 0), 0)
    if not unit:
        return [(0, spec.capacity)]
    tiles = min(spec.num_tokens * spec.top_k, spec.capacity) // unit
    come = {-(-tiles * n // 8) for n in ENDS} - {0, tiles}
    home = {tiles - n for n in come}
    ends = {n * unit for n in (come | home if both else home if back else come)}
    return list(zip([0, *sorted(ends)], [*sorted(ends), spec.capacity], strict=True))


def areas(cut: list[tuple[int, int]]) -> list[int]:
    """Returns where each wave begins in a buffer of sums that go home, and at the end the rows of the buffer. A wave
    has at most one sum for each row of its window, and has left when the next but one is made."""
    even, odd = (max((end - begin for begin, end in cut[n::2]), default=0) for n in range(2))
    return [*(even * (n % 2) for n in range(len(cut))), even + odd]


class Waves(NamedTuple):
    """Where the records of each wave of an exchange lie.

    Attributes:
      wave: int32 `[R, T]`, the wave of each record on the rank that has the rows; the number of waves for none.
      here: int32 `[R, T]`, place of each record there: in staging, or of a combine in the send buffer.
      wanted, there: the same on the rank that has the tokens.
      runs: of each wave.
    """

    wave: jax.Array
    here: jax.Array
    wanted: jax.Array
    there: jax.Array
    runs: list[exchange.Runs]


def waves_of(row: jax.Array, cut: list[tuple[int, int]], spec: Spec, *, back: bool) -> Waves:
    """Plans an exchange in waves. The rank with the rows tells the ranks of the tokens in which wave each record goes.

    Args:
      row: int32 `[R, T]`, the row that tells the wave of each record, -1 for none.
      back: the records go to their tokens, and not from there to their rows.
    """
    count, ranks = len(cut), spec.num_ranks
    number = jnp.arange(count, dtype=jnp.int32).reshape(-1, 1, 1)
    wave = sum((row >= end).astype(jnp.int32) for _, end in cut[:-1])
    wave = jnp.where(row >= 0, wave, count)

    def ordered(wave: jax.Array, places: Sequence[int] = ()) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Records of each (wave, rank), the place of the first one, and the place of each record `[R, T]`. A wave
        begins at its place in `places`, or behind the wave before it."""
        of_wave = wave == number
        sizes = jnp.sum(of_wave, axis=2, dtype=jnp.int32)
        among = _layout.exclusive_cumsum(of_wave.astype(jnp.int32), axis=2)
        if places:
            starts = _layout.exclusive_cumsum(sizes, axis=1) + jnp.array(places, jnp.int32)[:, None]
        else:
            starts = _layout.exclusive_cumsum(sizes.reshape(-1), axis=0).reshape(count, ranks)
        return sizes, starts, jnp.sum(jnp.where(of_wave, starts[:, :, None] + among, 0), axis=0, dtype=jnp.int32)

    sizes, starts, here = ordered(wave, areas(cut)[:-1] if back else ())
    if back:
        wanted = plan.to_peers(wave, spec.axis_name)
        arriving, begin, there = ordered(wanted)
        remote = plan.to_peers(begin.T, spec.axis_name).T
        leaving, offsets = sizes, starts
    else:
        told = plan.to_peers(jnp.concatenate([wave, starts.T], axis=1), spec.axis_name)
        wanted, remote = told[:, : spec.num_tokens], told[:, spec.num_tokens :].T
        leaving, offsets, there = ordered(wanted)
        arriving = sizes
    ids, place = jnp.arange(ranks, dtype=jnp.int32), lax.axis_index(spec.axis_name).astype(jnp.int32).reshape(1)
    runs = [exchange.Runs(ids, place, offsets[n], leaving[n], remote[n], arriving[n]) for n in range(count)]
    return Waves(wave, here, wanted, there, runs)


def _of_tokens(todo: Waves, topk_idx: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Returns the ranks of each token's records, int32 `[T, D]`, -1 for none, and the places of these records."""
    peer = plan.distinct_ranks(topk_idx, spec)
    known = (todo.wanted < len(todo.runs)).astype(jnp.int32).T
    peer = jnp.where(plan.pick(known, peer) > 0, peer, -1)
    return peer, plan.pick(todo.there.T, peer)


class _Travel:
    """Waves on their way, one at a time: `begin` and `end` of each in turn.

    Attributes:
      buffer, staged: the records that leave, and those that have come.
    """

    def __init__(
        self, runs: list[exchange.Runs], rows: int, spec: Spec, config: KernelConfig, onto: _Travel | None = None
    ) -> None:
        """With `onto`, records come to where those of other waves, along the same routing, have left."""
        self.buffer: Any = None
        self._staged: Any = None
        self._left, self._rows, self._axes, self._config = list(runs), rows, plan.kernel_axes(spec), config
        self._onto = onto
        self._flight: Any = None
        self._runs: Any = None

    @property
    def staged(self) -> Any:
        return self._onto.buffer if self._onto else self._staged

    @staged.setter
    def staged(self, records: Any) -> None:
        if self._onto:
            self._onto.buffer = records
        else:
            self._staged = records

    def begin(self) -> None:
        """Starts the next wave, if there is one left."""
        if not self._left:
            return
        self._runs = self._left.pop(0)
        launch = exchange_launch(self._axes, self._config)
        if launch.interpret:
            if self.staged is None:
                self.staged = jnp.zeros((self._rows, *self.buffer.shape[1:]), self.buffer.dtype)
            self.staged = exchange.exchange(self.buffer, self.staged, self._runs, axes=self._axes, launch=launch)
            return
        self._flight = exchange.start(
            self.buffer, self._runs, rows=self._rows, axes=self._axes, launch=launch, output=self.staged
        )
        self.buffer, self.staged = self._flight[:2]

    def ordered(self, work: Any) -> Any:
        """Returns `work`: what uses it follows the start of the wave on its way, which ends behind all that made it."""
        if self._flight is not None:
            (self.buffer, self.staged), work = lax.optimization_barrier(((self.buffer, self.staged), work))
        return work

    def end(self) -> None:
        """Waits for the wave on its way."""
        if self._flight is not None:
            flight = exchange.Started(self.buffer, self.staged, *self._flight[2:])
            launch = exchange_launch(None, self._config)
            self.buffer, self.staged = exchange.done(flight, self._runs.sizes, self._runs.expected, launch=launch)
            self._flight = None


class _Coming:
    """Rows of tokens `[T, H]` that come in waves, along the routing that `positions` and `topk_idx` tell."""

    def __init__(
        self,
        tokens: jax.Array,
        topk_idx: jax.Array,
        positions: jax.Array,
        recv_counts: jax.Array,
        cut: list[tuple[int, int]],
        spec: Spec,
        wire: Wire | None,
        config: KernelConfig,
    ) -> None:
        self._like, self._counts, self._spec, self._config = records.rows_of(tokens, wire), recv_counts, spec, config
        self.record = self._like.record
        row = jnp.min(jnp.where(positions >= 0, positions, spec.capacity), axis=-1)
        todo = waves_of(jnp.where(row < spec.capacity, row, -1), cut, spec, back=False)
        (self._source,) = tables.scattered(positions, [(todo.here, -1)], recv_counts, spec, config)
        routes = push_kernel.Routes(
            *_of_tokens(todo, topk_idx, spec), jnp.zeros((1,), jnp.int32), plan.combine_staging_rows(spec)
        )
        self.travel = _Travel(todo.runs, plan.dispatch_staging_rows(spec), spec, config)
        self.travel.buffer = records.push_records(tokens, None, routes, self._like, axes=None, spec=spec, config=config)
        self.travel.begin()

    def rows(self, begin: int, end: int, into: jax.Array | None = None, whole: bool = False) -> jax.Array:
        """Waits for the wave of a window, starts the next one, and makes the rows, as `records.place_rows` says."""
        self.travel.end()
        self.travel.begin()
        return records.place_rows(
            self.travel.staged, self._source, self._counts, self._like,
            spec=self._spec, config=self._config, window=slice(begin, end), into=into, whole=whole,
        )[0]  # fmt: skip


def value(
    rows: jax.Array,
    tokens: jax.Array,
    first: Sequence[jax.Array],
    last: jax.Array,
    row_weights: jax.Array,
    group_sizes: jax.Array,
    handle: Any,
    activation: Activation,
    *,
    keep: bool,
    halves: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Returns the experts' outputs for `rows [C, H]`, added up for each token, `[..., H]` with the dimensions of the
    tokens; the rows; and with `keep` the products of the projections, else none.

    With a `RowsLater` as `config` the rows of `tokens` come here, in the waves in which sums go home. Without `keep`
    they are not returned.

    Args:
      first, last, halves: as of `gradients`.
    """
    later = isinstance(config, RowsLater)
    given = tokens.reshape(-1, tokens.shape[-1]) if later else rows
    out, *found = _value_p.bind(
        given, last, row_weights, group_sizes, handle.topk_idx, handle.positions, handle.recv_counts, *first,
        activation=activation, keep=keep, halves=halves, spec=handle.spec, wire=wire, config=config,
    )  # fmt: skip
    if later and keep:
        rows = checkpoint_name(found.pop(0), ROWS)
    return combined(out, handle.spec), rows, found


def _shapes_of_value(
    given: Any, last: Any, *more: Any, keep: bool, spec: Spec, config: KernelConfig, **_: Any
) -> list[ShapeDtype]:
    rows = (spec.capacity, given.shape[1]), given.dtype
    inner = (spec.capacity, last.shape[1]), given.dtype
    out = (spec.num_tokens, given.shape[1]), given.dtype
    return [out, *[rows] * (keep and isinstance(config, RowsLater)), *[inner] * (keep * (len(more) - 5))]


def _lowered_value(
    given: jax.Array,
    last: jax.Array,
    row_weights: jax.Array,
    group_sizes: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *first: jax.Array,
    activation: Activation,
    keep: bool,
    halves: bool,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    later, matmuls = isinstance(config, RowsLater), on_tpu.DEFAULT
    cut = windows(spec, back=True, both=later)
    todo = waves_of(jnp.max(positions, axis=-1), cut, spec, back=True)
    ranks, places = _of_tokens(todo, topk_idx, spec)
    source = jnp.where(ranks >= 0, places, -1)
    sums = Sums.of(Call(spec, config, wire, weighted=True), given)
    _, zero = sums.prepared(given, recv_counts)
    halved = halves and sums.reads_halves(given)
    launch = sums.slots_launch(halved=halved)
    rows: Any = given
    coming = onto = None
    if isinstance(config, RowsLater):
        rows, coming = None, _Coming(given, topk_idx, positions, recv_counts, cut, spec, config.row_wire, config)
        # the sums of a wave and of those before it are no more than the records that have left: they have the room
        onto = coming.travel if coming.record == sums.record else None
    travel = _Travel(todo.runs, plan.combine_staging_rows(spec), spec, config, onto)
    every: dict[int, Any] = {1 + n: None for n in range(len(first) * keep)}  # the projections, all rows
    y: Any = None
    for number, (begin, end) in enumerate(cut):
        if coming:
            rows = coming.rows(begin, end, rows if keep else None, keep)
        rows, every, y = travel.ordered((rows, every, y))
        window = functools.partial(Window, begin, end - begin, spec.capacity)
        inner, *found = on_tpu.rows_products(rows, first, group_sizes, activation, keep, False, matmuls, window(every))
        every = dict(enumerate(found, 1))
        (y,) = on_tpu.rows_products(inner, [last], group_sizes, None, True, halves, matmuls, window({0: y}))
        pairs = slots_kernel.Pairs(
            rows=positions.reshape(todo.here.size, -1),
            peer=jnp.where(todo.wave == number, jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None], -1).reshape(-1),
            address=todo.here.reshape(-1),
            expected=jnp.zeros((1,), jnp.int32),
            staging_rows=areas(cut)[-1],
        )
        travel.buffer = sums.of_slots(
            y.reshape(spec.capacity, -1), pairs, row_weights, zero, launch,
            axes=None, cores=launch.cores, halved=halved, into=travel.buffer,
        )  # fmt: skip
        travel.end()
        travel.begin()
        if coming:
            rows, every, y, travel.buffer = coming.travel.ordered((rows, every, y, travel.buffer))
    travel.end()
    out = sums.of_ranks(travel.staged, source, zero, sums.ranks_launch(source.shape[1], spec.num_tokens))
    return out, *[rows] * (keep and later), *every.values()


_value_p = declare_composite("value_in_waves", _shapes_of_value, _lowered_value)


def gradients(
    cotangent: jax.Array,
    first: Sequence[jax.Array],
    last: jax.Array,
    projections: Sequence[jax.Array],
    row_weights: jax.Array,
    group_sizes: jax.Array,
    handle: Any,
    activation: Activation,
    *,
    halves: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
    """Returns of a cotangent `[..., H]`, which has the dimensions of the tokens, the gradients by the rows, `[C, H]`;
    by the projections; by `last`; and by the row weights.

    Args:
      first: weights of the projections. last: weight of `down`. halves: as in `on_tpu.by_rows`.
    """
    of_tokens = cotangent.reshape(-1, cotangent.shape[-1])
    by_rows, by_last, by_factors, *by_projections = _gradients_p.bind(
        of_tokens, last, row_weights, group_sizes, handle.topk_idx, handle.positions, handle.recv_counts, *first,
        *projections, activation=activation, halves=halves, spec=handle.spec, wire=wire, config=config,
    )  # fmt: skip
    return by_rows, by_projections, by_last, by_factors


def _shapes(
    cotangent: Any, last: Any, row_weights: Any, sizes: Any, idx: Any, positions: Any, counts: Any, *more: Any,
    spec: Spec, **_: Any,
) -> list[ShapeDtype]:  # fmt: skip
    del sizes, idx, positions, counts
    projections = more[len(more) // 2 :]
    return [
        ((spec.capacity, cotangent.shape[1]), cotangent.dtype),
        *((a.shape, a.dtype) for a in (last, row_weights, *projections)),
    ]


def _lowered(
    cotangent: jax.Array,
    last: jax.Array,
    row_weights: jax.Array,
    group_sizes: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *more: jax.Array,
    activation: Activation,
    halves: bool,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    first, projections = more[: len(more) // 2], list(more[len(more) // 2 :])
    cut, matmuls = windows(spec), on_tpu.DEFAULT
    coming = _Coming(cotangent, topk_idx, positions, recv_counts, cut, spec, wire, config)
    by_rows: Any = None
    by_last: list[jax.Array] = []
    factors: list[jax.Array] = []
    for begin, end in cut:
        by_output = coming.rows(begin, end)
        window = functools.partial(Window, begin, end - begin, spec.capacity)
        *projections, weighted, by_factors = on_tpu.gradients_behind_activation(
            by_output, last, row_weights, group_sizes, *projections,
            activation=activation, config=matmuls, window=window(),
        )  # fmt: skip
        by_rows = on_tpu.rows_gradient(projections, first, group_sizes, halves, matmuls, window({0: by_rows}))
        by_last = on_tpu.weight_gradient(weighted, by_output, group_sizes, matmuls, window(dict(enumerate(by_last))))
        factors.append(by_factors)
        by_rows, by_last, projections, factors = coming.travel.ordered((by_rows, by_last, projections, factors))
    by_row_weights = on_tpu.summed_factors(jnp.concatenate(factors, axis=1))
    return by_rows.reshape(spec.capacity, -1), by_last[0], by_row_weights, *projections


_gradients_p = declare_composite("gradients_in_waves", _shapes, _lowered)
