"""Experts on TPU in waves: rows travel while kernels multiply other rows.

The rows of a rank, sorted by expert, are cut at fixed numbers of rows, multiples of every tile, so that the kernels of
a window of rows have the tiles and pieces that they would have in one call, and the bits of the results are the same.
Rows of tokens and of cotangents come in waves, and sums of the outputs go home in waves. A wave travels by the DMAs of
a start, and ends in a done, while kernels work on a window:

    come:     pack | start 0 | tables | done 0, start 1 | window 0 | done 1, start 2 | window 1 | ...
    home:     window 0: products, sums | start 0 | window 1: products, sums | done 0, start 1 | ...
    backward: windows: place, gradients without gate, up | sums of all but the last, start 0 | the last one, its sums,
              start 1 | gradients of gate, up | done 0, done 1

A record comes once, in the wave of the first window in which its token has a row; kernels of later windows find it in
staging. A sum goes home once, in the wave of its token's last row. With few experts on a rank a wave carries little
more than its part of all records. The first wave that comes has tables beside it alone, which the backward pass takes
from the forward pass; the last one that goes home has nothing beside it in the forward pass.
Rows that come in waves need the routing of all ranks before: the dispatch (with a `RowsLater`) makes all of its results
but the rows and their router weights out of numbers that ranks gather.
Interpret mode, in which no kernel leaves semaphores behind, exchanges a wave in one kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval as pe

from xen_moe_jax import _layout
from xen_moe_jax._api import combined
from xen_moe_jax._config import KernelConfig, RowsLater
from xen_moe_jax._moe_primitives import HANDLE, ROWS
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._quantize import Wire
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import hardware, plan, records, tables
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

TWO_WAVES = {"v5e": 64}
"""Least number of ranks with which the gradient of the rows goes home in two waves, by generation. The wire is longer
there than the work of a core, and the first wave keeps it busy, but takes memory beside the last windows. On other
chips it goes home in one wave, behind the last window, which the gradients of gate and up hide."""


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


def ways_back(spec: Spec, generation: str) -> list[tuple[int, int]]:
    """Returns the windows of each wave of the rows' gradient, as one window: of all, or of all but the last two, and of
    these."""
    cut = windows(spec)
    if len(cut) < 3 or spec.num_ranks < TWO_WAVES.get(generation, spec.num_ranks + 1):
        return [(0, spec.capacity)]
    return [(0, cut[-2][0]), (cut[-2][0], spec.capacity)]


def rooms(cut: list[tuple[int, int]], spec: Spec) -> list[int]:
    """Returns the most sums that each wave has: one for each row of its window, and one for each token."""
    return [min(end - begin, spec.num_ranks * spec.num_tokens) for begin, end in cut]


class Waves(NamedTuple):
    """Where the records of each wave of an exchange lie.

    Attributes:
      wave: int32 `[R, T]`, the wave of each record on the rank that has the rows; the number of waves for none.
      here: int32 `[R, T]`, place of each record there: in staging, or of a combine in the send buffer.
      wanted, there: the same on the rank that has the tokens.
      runs: int32 `[waves, 4, R]`, of each wave what `exchange.Runs` has behind `place`.
    """

    wave: jax.Array
    here: jax.Array
    wanted: jax.Array
    there: jax.Array
    runs: jax.Array


def waves_of(row: jax.Array, cut: list[tuple[int, int]], spec: Spec, *, back: bool) -> Waves:
    """Plans an exchange in waves. The rank with the rows tells the ranks of the tokens in which wave each record goes.

    Args:
      row: int32 `[R, T]`, the row that tells the wave of each record, -1 for none.
      back: the records go to their tokens, each wave from a buffer of its own, and not from there to their rows.
    """
    count, ranks = len(cut), spec.num_ranks
    number = jnp.arange(count, dtype=jnp.int32).reshape(-1, 1, 1)
    wave = sum((row >= end).astype(jnp.int32) for _, end in cut[:-1])
    wave = jnp.where(row >= 0, wave, count)

    def ordered(wave: jax.Array, apart: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Records of each (wave, rank), the place of the first one, and the place of each record `[R, T]`. A wave
        begins at the first place, if `apart`, or behind the wave before it."""
        of_wave = wave == number
        sizes = jnp.sum(of_wave, axis=2, dtype=jnp.int32)
        among = _layout.exclusive_cumsum(of_wave.astype(jnp.int32), axis=2)
        if apart:
            starts = _layout.exclusive_cumsum(sizes, axis=1)
        else:
            starts = _layout.exclusive_cumsum(sizes.reshape(-1), axis=0).reshape(count, ranks)
        return sizes, starts, jnp.sum(jnp.where(of_wave, starts[:, :, None] + among, 0), axis=0, dtype=jnp.int32)

    sizes, starts, here = ordered(wave, back)
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
    return Waves(wave, here, wanted, there, jnp.stack([offsets, leaving, remote, arriving], axis=1))


def _of_tokens(todo: Waves, topk_idx: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Returns the ranks of each token's records, int32 `[T, D]`, -1 for none, and the places of these records."""
    peer = plan.distinct_ranks(topk_idx, spec)
    known = (todo.wanted < len(todo.runs)).astype(jnp.int32).T
    peer = jnp.where(plan.pick(known, peer) > 0, peer, -1)
    return peer, plan.pick(todo.there.T, peer)


class _Records:
    """A buffer of records, which kernels pass on."""

    def __init__(self, records: Any = None) -> None:
        self.now = records


class _Travel:
    """Waves on their way: a `begin` for each in turn, and an `end` for all that have begun.

    Attributes:
      leaving, staged: the records that leave, and those that have come.
    """

    def __init__(
        self, runs: jax.Array, rows: int, spec: Spec, config: KernelConfig, staged: _Records | None = None
    ) -> None:
        """`staged` has `rows` records; None: a fresh buffer."""
        ids, place = jnp.arange(spec.num_ranks, dtype=jnp.int32), lax.axis_index(spec.axis_name).astype(jnp.int32)
        self._left = [exchange.Runs(ids, place.reshape(1), *runs[n]) for n in range(len(runs))]
        self.leaving, self.staged = _Records(), staged or _Records()
        self._rows, self._axes, self._config = rows, plan.kernel_axes(spec), config
        self._flying: list[tuple[exchange.Runs, exchange.Started]] = []

    def begin(self) -> None:
        """Starts the next wave."""
        runs, given, into = self._left.pop(0), self.leaving.now, self.staged.now
        launch = exchange_launch(self._axes, self._config)
        if launch.interpret:
            into = jnp.zeros((self._rows, *given.shape[1:]), given.dtype) if into is None else into
            self.staged.now = exchange.exchange(given, into, runs, axes=self._axes, launch=launch)
            return
        flight = exchange.start(given, runs, rows=self._rows, axes=self._axes, launch=launch, output=into)
        self.leaving.now, self.staged.now = flight[:2]
        self._flying.append((runs, flight))

    def ordered(self, work: Any) -> Any:
        """Returns `work`: what uses it follows the starts of the waves on their way, which end behind all that made
        it."""
        if self._flying:
            (self.leaving.now, self.staged.now), work = lax.optimization_barrier(
                ((self.leaving.now, self.staged.now), work)
            )
        return work

    def end(self) -> None:
        """Waits for the waves on their way."""
        launch = exchange_launch(None, self._config)
        for runs, (_, _, *semaphores) in self._flying:
            flight = exchange.Started(self.leaving.now, self.staged.now, *semaphores)
            self.leaving.now, self.staged.now = exchange.done(flight, runs.sizes, runs.expected, launch=launch)
        self._flying = []


class _Coming:
    """Rows of tokens `[T, H]` that come in waves, along the routing that `positions` and `topk_idx` tell.

    Attributes:
      tables: int32 arrays, the same for all tokens along this routing: ranks and places of each token's records, the
        runs of `Waves`, and the staged record of each row.
      weights: float32 `[C]`, the router weights of the rows; None without `topk_weights`.
    """

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
        tables_known: Sequence[jax.Array] = (),
        topk_weights: jax.Array | None = None,
    ) -> None:
        """The first wave starts as soon as the tokens are packed; `tables`, if not known, are made beside it.

        Args:
          cut: the windows. Waves are those of the forward pass, of which a window may have several.
        """
        self._like, self._counts, self._spec, self._config = records.rows_of(tokens, wire), recv_counts, spec, config
        self.record, self.weights = self._like.record, None
        waves = windows(spec, back=True, both=True)
        # Each window waits for so many waves.
        self._begins = [sum(begin < end <= last for _, end in waves) for begin, last in cut]
        if tables_known:
            ranks, places, runs, self._source = tables_known
        else:
            row = jnp.min(jnp.where(positions >= 0, positions, spec.capacity), axis=-1)
            todo = waves_of(jnp.where(row < spec.capacity, row, -1), waves, spec, back=False)
            (ranks, places), runs = _of_tokens(todo, topk_idx, spec), todo.runs
        routes = push_kernel.Routes(ranks, places, jnp.zeros((1,), jnp.int32), plan.combine_staging_rows(spec))
        self.travel = _Travel(runs, plan.dispatch_staging_rows(spec), spec, config)
        packed = records.push_records(tokens, None, routes, self._like, axes=None, spec=spec, config=config)
        self.travel.leaving.now = packed
        self._begin()
        if not tables_known:
            here, positions = self.travel.ordered((todo.here, positions))
            values = [(here, -1)]
            if topk_weights is not None:
                bits = lax.bitcast_convert_type(self.travel.ordered(topk_weights), jnp.int32)
                values.append((tables.of_all_ranks(bits, spec), 0))
            self._source, *found = tables.scattered(positions, values, recv_counts, spec, config)
            self.weights = lax.bitcast_convert_type(found[0], jnp.float32) if found else None
        self.tables = [ranks, places, runs, self._source]

    def _begin(self) -> None:
        for _ in range(self._begins.pop(0) if self._begins else 0):
            self.travel.begin()

    def rows(self, begin: int, end: int, into: jax.Array | None = None, whole: bool = False) -> jax.Array:
        """Waits for the waves of a window, starts those of the next one, and makes the rows, as `records.place_rows`
        says."""
        self._source = self.travel.ordered(self._source)
        self.travel.end()
        self._begin()
        return records.place_rows(
            self.travel.staged.now, self._source, self._counts, self._like,
            spec=self._spec, config=self._config, window=slice(begin, end), into=into, whole=whole,
        )[0]  # fmt: skip


class _Going:
    """Sums of rows that go home to their tokens in waves.

    Attributes:
      travels: of each wave.
    """

    def __init__(
        self,
        like: jax.Array,
        topk_idx: jax.Array,
        positions: jax.Array,
        recv_counts: jax.Array,
        cut: list[tuple[int, int]],
        call: Call,
        halves: bool,
        coming: _Coming | None,
        onto: bool,
    ) -> None:
        """The first wave of `coming` waits for the tables that are made here.

        Args:
          like: `[..., H]`, of the dtype of the rows. cut: the windows of each wave.
          onto: sums come to where the records of `coming` have left, if there is room: up to any window there are no
            more sums than records.
        """
        spec = call.spec
        if coming:
            topk_idx, positions = coming.travel.ordered((topk_idx, positions))
        todo = waves_of(jnp.max(positions, axis=-1), cut, spec, back=True)
        ranks, there = _of_tokens(todo, topk_idx, spec)
        self._sums = Sums.of(call, like)
        _, self._zero = self._sums.prepared(like, recv_counts)
        self._halved = halves and self._sums.reads_halves(like)
        self._launch = self._sums.slots_launch(halved=self._halved)
        source_rank = jnp.arange(spec.num_ranks, dtype=jnp.int32)[:, None]
        self._pairs = [
            slots_kernel.in_order(
                slots_kernel.Pairs(
                    rows=positions.reshape(todo.here.size, -1),
                    peer=jnp.where(todo.wave == number, source_rank, -1).reshape(-1),
                    address=todo.here.reshape(-1),
                    expected=jnp.zeros((1,), jnp.int32),
                    staging_rows=room,
                ),
                self._launch,
            )
            for number, room in enumerate(rooms(cut, spec))
        ]
        in_order = [(pairs.tables, pairs.rows, pairs.made) for pairs in self._pairs]
        self._source, runs = jnp.where(ranks >= 0, there, -1), todo.runs
        if coming:
            in_order, self._source, runs = coming.travel.ordered((in_order, self._source, runs))
        self._pairs = [
            dataclasses.replace(pairs, tables=words, rows=rows, made=made)
            for pairs, (words, rows, made) in zip(self._pairs, in_order, strict=True)
        ]
        staged = coming.travel.leaving if onto and coming and coming.record == self._sums.record else _Records()
        rows = plan.combine_staging_rows(spec)
        self.travels = [_Travel(runs[n : n + 1], rows, spec, call.config, staged) for n in range(len(cut))]

    def send(self, rows: jax.Array, number: int, weights: Any = None, into: Any = None) -> None:
        """Makes the sums of a wave, times `weights` if the call is weighted, and starts it when the waves before it
        have come. Its buffer is `into`, if that is of the form of the sums; with `into` the waves before it may still
        be on their way."""
        pairs, travel = self._pairs[number], self.travels[number]
        if into is not None and into.shape[1:] == self._sums.record.shape:
            travel.leaving.now, pairs = into, dataclasses.replace(pairs, staging_rows=into.shape[0])
        travel.leaving.now = self._sums.of_slots(
            rows.reshape(self._sums.call.spec.capacity, -1), pairs, weights, self._zero, self._launch,
            axes=None, cores=self._launch.cores, halved=self._halved, into=travel.leaving.now,
        )  # fmt: skip
        if into is None:
            travel.leaving.now = self.ordered(travel.leaving.now)
            self._end()
        travel.begin()

    def ordered(self, work: Any) -> Any:
        """`_Travel.ordered`."""
        return functools.reduce(lambda work, travel: travel.ordered(work), self.travels, work)

    def _end(self) -> None:
        for travel in self.travels:
            travel.end()

    def come(self) -> jax.Array:
        """Waits for the waves on their way, and adds up each token's sums."""
        self._end()
        launch = self._sums.ranks_launch(self._source.shape[1], self._sums.call.spec.num_tokens)
        return self._sums.of_ranks(self.travels[0].staged.now, self._source, self._zero, launch)


class Kept(NamedTuple):
    """Holds what the backward pass reads of the rows.

    Attributes:
      rows: `[C, H]`. row_weights: `[C]`, their router weights. tables: of `_Coming`; none where rows come all at once.
    """

    rows: jax.Array
    row_weights: jax.Array
    tables: list[jax.Array]


def value(
    rows: jax.Array,
    tokens: tuple[jax.Array, jax.Array | None],
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
) -> tuple[jax.Array, Kept, list[jax.Array]]:
    """Returns the experts' outputs for `rows [C, H]`, added up for each token, `[..., H]` with the dimensions of the
    tokens; what `gradients` takes; and with `keep` the products of the projections, else none.

    With a `RowsLater` as `config` the rows of `tokens` come here, and their router weights, in the waves in which sums
    go home. Without `keep` they are not returned.

    Args:
      tokens: and their router weights, or None for ones. first, last, halves: as of `gradients`.
    """
    later = isinstance(config, RowsLater)
    given = [rows, row_weights]
    if later:
        x, factors = tokens
        factors = jnp.ones(handle.topk_idx.shape, jnp.float32) if factors is None else factors.astype(jnp.float32)
        given = [a.reshape(-1, a.shape[-1]) for a in (x, factors)]
    out, *found = _value_p.bind(
        *given, last, group_sizes, handle.topk_idx, handle.positions, handle.recv_counts, *first,
        activation=activation, keep=keep, halves=halves, spec=handle.spec, wire=wire, config=config,
    )  # fmt: skip
    kept = Kept(rows, row_weights, [])
    if later and keep:
        kept = Kept(checkpoint_name(found[0], ROWS), *(checkpoint_name(a, HANDLE) for a in (found[1], found[2:6])))
        found = found[6:]
    return combined(out, handle.spec), kept, found


def _shapes_of_value(
    given: Any, weights: Any, last: Any, *more: Any, keep: bool, spec: Spec, config: KernelConfig, **_: Any
) -> list[ShapeDtype]:
    inner = (spec.capacity, last.shape[1]), given.dtype
    came: list[ShapeDtype] = []
    if keep and isinstance(config, RowsLater):
        records, waves = (spec.num_tokens, min(spec.num_ranks, spec.top_k)), windows(spec, back=True, both=True)
        numbers = [records, records, (len(waves), 4, spec.num_ranks), (spec.capacity,)]
        came = [((spec.capacity, given.shape[1]), given.dtype), ((spec.capacity,), weights.dtype)]
        came += [(shape, jnp.int32) for shape in numbers]
    return [((spec.num_tokens, given.shape[1]), given.dtype), *came, *[inner] * (keep * (len(more) - 4))]


def _lowered_value(
    given: jax.Array,
    weights: jax.Array,
    last: jax.Array,
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
    rows: Any = given
    factors: Any = weights
    coming = None
    routing = topk_idx, positions, recv_counts, cut
    if isinstance(config, RowsLater):
        coming = _Coming(given, *routing, spec, config.row_wire, config, topk_weights=weights)
        rows, factors = None, coming.weights
    going = _Going(given, *routing, Call(spec, config, wire, weighted=True), halves, coming, onto=True)
    every: dict[int, Any] = {1 + n: None for n in range(len(first) * keep)}  # the projections, all rows
    y: Any = None
    for number, (begin, end) in enumerate(cut):
        if coming:
            rows = coming.rows(begin, end, rows if keep else None, keep)
        rows, every, y = going.ordered((rows, every, y))
        window = functools.partial(Window, begin, end - begin, spec.capacity)
        inner, *found = on_tpu.rows_products(rows, first, group_sizes, activation, keep, False, matmuls, window(every))
        every = dict(enumerate(found, 1))
        (y,) = on_tpu.rows_products(inner, [last], group_sizes, None, True, halves, matmuls, window({0: y}))
        going.send(y, number, factors)
        if coming:
            home = going.travels[number].leaving
            rows, every, y, home.now = coming.travel.ordered((rows, every, y, home.now))
    out = going.come()
    came = [rows, factors, *coming.tables] if coming and keep else []
    return out, *came, *every.values()


_value_p = declare_composite("value_in_waves", _shapes_of_value, _lowered_value, multiplies=True)


def gradients(
    cotangent: jax.Array,
    kept: Kept,
    first: Sequence[jax.Array],
    last: jax.Array,
    projections: Sequence[jax.Array],
    group_sizes: jax.Array,
    handle: Any,
    activation: Activation,
    *,
    halves: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
    """Returns of a cotangent `[..., H]`, which has the dimensions of the tokens, the gradients by the tokens, of the
    same shape; by `first`; by `last`; and by the row weights.

    Args:
      first: weights of the projections. last: weight of `down`. halves: as in `on_tpu.by_rows`.
    """
    of_tokens = cotangent.reshape(-1, cotangent.shape[-1])
    by_tokens, by_last, by_factors, *by_first = _gradients_p.bind(
        of_tokens, kept.rows, last, kept.row_weights, group_sizes, handle.topk_idx, handle.positions,
        handle.recv_counts, *first, *projections, *kept.tables, wanted=(True,) * len(first), activation=activation,
        halves=halves, spec=handle.spec, wire=wire, config=config,
    )  # fmt: skip
    return combined(by_tokens, handle.spec), by_first, by_last, by_factors


def _shapes(
    cotangent: Any, rows: Any, last: Any, row_weights: Any, sizes: Any, idx: Any, positions: Any, counts: Any,
    *more: Any, wanted: tuple[bool, ...], **_: Any,
) -> list[ShapeDtype]:  # fmt: skip
    del rows, sizes, idx, positions, counts
    by_first = (weight for weight, w in zip(more, wanted, strict=False) if w)
    return [(a.shape, a.dtype) for a in (cotangent, last, row_weights, *by_first)]


def _lowered(
    cotangent: jax.Array,
    rows: jax.Array,
    last: jax.Array,
    row_weights: jax.Array,
    group_sizes: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *more: jax.Array,
    wanted: tuple[bool, ...],
    activation: Activation,
    halves: bool,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    count = len(wanted)
    first, projections, known = more[:count], list(more[count : 2 * count]), more[2 * count :]
    cut, matmuls = windows(spec), on_tpu.DEFAULT
    routing = topk_idx, positions, recv_counts
    coming = _Coming(cotangent, *routing, cut, spec, wire, config, known)
    ways = ways_back(spec, hardware.generation().name)
    going = _Going(cotangent, *routing, ways, Call(spec, config, wire), halves, coming, onto=len(ways) > 1)
    by_rows: Any = None
    by_last: list[jax.Array] = []
    factors: list[jax.Array] = []
    for begin, end in cut:
        by_output = coming.rows(begin, end)
        if ways[0][1] == begin:
            going.send(by_rows, 0)
        window = functools.partial(Window, begin, end - begin, spec.capacity)
        *projections, weighted, by_factors = on_tpu.gradients_behind_activation(
            by_output, last, row_weights, group_sizes, *projections,
            activation=activation, config=matmuls, window=window(),
        )  # fmt: skip
        by_rows = on_tpu.rows_gradient(projections, first, group_sizes, halves, matmuls, window({0: by_rows}))
        if end == spec.capacity:  # no rows come any more, and sums leave from where the last ones came
            going.send(by_rows, len(ways) - 1, into=coming.travel.staged.now)
            weighted, by_output = going.ordered((weighted, by_output))
        by_last = on_tpu.weight_gradient(weighted, by_output, group_sizes, matmuls, window(dict(enumerate(by_last))))
        factors.append(by_factors)
        by_rows, by_last, projections, factors = coming.travel.ordered((by_rows, by_last, projections, factors))
    rows, projections = going.ordered((rows, projections))
    of_first = [by for by, w in zip(projections, wanted, strict=True) if w]
    by_first = [on_tpu.weight_gradient(rows, by, group_sizes, matmuls)[0] for by in of_first]
    by_first, by_last = going.ordered((by_first, by_last))
    by_row_weights = on_tpu.summed_factors(jnp.concatenate(factors, axis=1))
    return going.come(), by_last[0], by_row_weights, *by_first


_gradients_p = declare_composite("gradients_in_waves", _shapes, _lowered, multiplies=True)


def _without_frozen(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    """Leaves gradients by projections out that nothing asks for, as where experts are frozen."""
    eqn, always = live_and_eqn[-1], 3  # JAX 0.12 says before it which operands live on
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    kept, of_first = [True] * always + used[always:], iter(used[always:])
    wanted = tuple(w and next(of_first) for w in eqn.params["wanted"])
    outvars = [var for var, k in zip(eqn.outvars, kept, strict=True) if k]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=eqn.params | {"wanted": wanted})


pe.dce_rules[_gradients_p] = _without_frozen
