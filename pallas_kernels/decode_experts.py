"""Few rows an expert: all local experts' gated MLPs in one kernel, at the speed at which HBM gives their weights.

What moves: the weights of every expert that has rows, once, in slabs of whole rows of the matrices: first slabs of gate
and up, along the contracted dimension, then slabs of down. A slab travels while the one before it is multiplied, over
the ends of matrices and of experts, so that HBM has no pause between the first expert and the last. Rows of an expert
stay in VMEM while its weights go by, together with the float32 sums of both projections and of the output. An expert
without rows is not visited; one with more rows than fit is visited again. Weights of one byte travel as they are
(`scaled_weights.py`).

Who does it: a visit is one expert with up to `rows_at_once` rows. Where a device has two cores, each takes every second
visit.

Memory order: a slab's buffer is filled again only after the multiplication that reads it, which comes earlier in the
same program. Output rows leave by DMA from one of two buffers, and a visit waits for the DMAs of the visit before last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch, precision
from xen_moe_jax.pallas_kernels.record import LANES
from xen_moe_jax.pallas_kernels.scaled_weights import Scales, scales_of

GROUP = 16
"""Groups of rows begin at multiples of this: a DMA addresses whole tiles of two-byte rows."""
COLUMNS = 512
"""Columns of one matrix product: its sums stay in registers."""
PRODUCTS = 8
"""Matrix products in one turn of a loop: the weights of one are pushed into the matrix units while the sums of another
leave them. A product of few rows that is alone in its turn waits for both."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Sizes that the policy chooses.

    Attributes:
      rows_at_once: rows of a visit, a multiple of `rows`.
      rows: rows of one matrix product.
      depth: rows of a slab of gate and of up, a multiple of 128.
      width: rows of a slab of down, a multiple of 128.
      ahead: slabs that travel before the slab that is multiplied has been.
      widened: True converts weights in fp8 to bfloat16 before they are multiplied by bfloat16 rows, for chips whose
        matrix units take no fp8.
    """

    rows_at_once: int
    rows: int
    depth: int
    width: int
    ahead: int = 1
    widened: bool = True

    def slabs(self, hidden: int, width: int) -> tuple[int, int]:
        """Returns how many slabs an expert's gate and up have (one of each makes a slab), and its down."""
        return -(-hidden // self.depth), -(-width // self.width)

    def buffers(self, hidden: int, width: int) -> tuple[int, int]:
        """Returns how many slabs of gate and up, and of down, `ahead + 1` slabs in a row can be."""
        each = self.slabs(hidden, width)
        whole, rest = divmod(self.ahead + 1, sum(each))
        return whole * each[0] + min(rest, each[0]), whole * each[1] + min(rest, each[1])


@dataclasses.dataclass(frozen=True)
class _Refs:
    received: Any
    x: Any
    up: Any
    down: Any
    out: Any
    experts: Any
    firsts: Any
    counts: Any
    rows: Any
    ups: Any
    downs: Any
    up_sum: Any
    hidden: Any
    out_sum: Any
    result: Any
    up_semaphore: Any
    down_semaphore: Any
    row_semaphore: Any
    out_semaphore: Any
    gate: Any = None
    gates: Any = None
    gate_sum: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    gate_scales: Any = None
    up_scales: Any = None
    down_scales: Any = None


@dataclasses.dataclass(frozen=True)
class _Phase:
    """Slabs of one size, one after the other.

    Attributes:
      down: they are of down, else of gate and up.
      at: row of the matrix at which the first begins.
      size, turns: rows of a slab, and how many slabs there are.
      first: number of the first slab among the expert's.
    """

    down: bool
    at: int
    size: int
    turns: int
    first: int

    def rows(self, turn: Any) -> Any:
        """Returns the rows of the matrix that the slab of a turn has."""
        if self.turns == 1:
            return pl.ds(self.at, self.size)
        return pl.ds(pl.multiple_of(self.at + turn * self.size, self.size), self.size)


class _Place(NamedTuple):
    """A slab of a core's visits, in the order in which they are multiplied.

    Attributes:
      visit, slab: number of the visit, and of the slab among the expert's.
      up, down: buffers of the next slab of gate and up, and of down, from this one on.
    """

    visit: Any
    slab: Any
    up: Any
    down: Any


def columns_at_once(width: int, together: int) -> tuple[int, int]:
    """Returns how many pieces of `COLUMNS` columns one turn of a loop over `width` takes, at most `together`, and the
    number of turns, which is 1 where there is no loop."""
    whole = width // COLUMNS
    size = max(1, min(together, whole))
    return size, max(1, whole // size)


def for_columns(width: int, work: Callable[[Any, int], None], together: int = 1) -> None:
    """Calls `work(offset, size)` for each piece of `COLUMNS` columns of `width`, up to `together` in a turn of a loop,
    and then for the columns that are left."""
    whole = width // COLUMNS
    size, turns = columns_at_once(width, together)
    if turns > 1:

        @pl.loop(0, turns)
        def _(i: Any) -> None:
            for n in range(size):
                work(pl.multiple_of(i * (size * COLUMNS) + n * COLUMNS, COLUMNS), COLUMNS)

    for n in range(turns * size if turns > 1 else 0, whole):
        work(n * COLUMNS, COLUMNS)
    if width % COLUMNS:
        work(whole * COLUMNS, width % COLUMNS)


def rounded_sums(total: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns sums as the result of a matmul of its own, to which the bias `[1, N]` is added: each is rounded."""
    value = total.astype(dtype)
    return value if bias is None else (value.astype(jnp.float32) + bias).astype(dtype)


def bias_of(bias: Any, expert: Any, at: Any) -> jax.Array | None:
    """Returns the columns `at` of an expert's row of a bias, float32 `[1, N]`, or None where there is none."""
    return None if bias is None else bias[pl.ds(expert, 1), at]


def _fill_tables(refs: _Refs, most: int, alignment: int) -> Any:
    """Writes which expert, first group of rows and number of groups every visit has; returns the number of visits."""
    sources, local = refs.received.shape

    def of_expert(e: Any, carry: Any) -> Any:
        visits, first = carry
        rows = lax.fori_loop(0, sources, lambda source, sum: sum + refs.received[source, e], jnp.int32(0))
        groups = lax.div(rows + (alignment - 1), alignment) * (alignment // GROUP)
        groups = jnp.minimum(groups, refs.x.shape[0] // GROUP - first)  # rows past the capacity were dropped

        def piece(p: Any, at: Any) -> Any:
            refs.experts[at] = e
            refs.firsts[at] = first + p * most
            refs.counts[at] = jnp.minimum(groups - p * most, most)
            return at + 1

        return lax.fori_loop(0, lax.div(groups + (most - 1), most), piece, visits), first + groups

    visits, _ = lax.fori_loop(0, local, of_expert, (jnp.int32(0), jnp.int32(0)))
    return visits


def _body(
    refs: _Refs,
    *,
    pieces: Pieces,
    activate: Callable[..., jax.Array],
    alignment: int,
    cores: int,
    blocks: dict[str, tuple[int, int] | None],
) -> None:
    core = pl.program_id(0)
    visits = _fill_tables(refs, pieces.rows_at_once // GROUP, alignment)
    mine = lax.div(visits - core + (cores - 1), cores)
    if refs.result.shape[2] > refs.out_sum.shape[1]:  # columns that the experts do not have leave as zeros
        beyond = refs.result.shape[2] - refs.out_sum.shape[1]
        zeros = jnp.zeros((*refs.result.shape[:2], beyond), refs.result.dtype)
        refs.result[:, :, refs.out_sum.shape[1] :] = zeros
    _Rows(refs, pieces, activate, core, cores, mine, scales=scales_of(refs, blocks, pieces.widened)).run()


@dataclasses.dataclass(frozen=True)
class Streams:
    """One core's visits: `i` counts them, `core + i * cores` is their place in the tables.

    A subclass brings the rows of a visit to `left`, and takes what `out_sum` has then.
    """

    refs: Any
    pieces: Pieces
    activate: Callable[..., jax.Array]
    core: Any
    cores: int
    mine: Any
    scales: dict[str, Scales] = dataclasses.field(default_factory=dict, kw_only=True)

    def visit(self, i: Any) -> Any:
        return self.core + i * self.cores

    def left(self, i: Any) -> Any:
        """Returns the ref of the rows of visit `i`."""
        raise NotImplementedError

    def before(self, i: Any) -> None:
        """Brings the rows of visit `i`."""
        raise NotImplementedError

    def after(self, i: Any) -> None:
        """Takes the sums of visit `i` away."""
        raise NotImplementedError

    # -- what travels --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def phases(self) -> list[_Phase]:
        """The slabs of gate and up, then those of down. A last slab that is smaller is a phase of its own."""
        phases: list[_Phase] = []
        for down, matrix, size in ((False, self.refs.up, self.pieces.depth), (True, self.refs.down, self.pieces.width)):
            whole, rest = divmod(matrix.shape[1], size)
            for at, rows, turns in ((0, size, whole), (whole * size, rest, 1)):
                if rows and turns:
                    phases.append(_Phase(down, at, rows, turns, sum(phase.turns for phase in phases)))
        return phases

    def _copies(self, i: Any, phase: _Phase, turn: Any, slot: Any) -> list[Any]:
        """DMAs of the slabs of turn `turn` of a phase of visit `i`."""
        refs = self.refs
        expert, rows = refs.experts[self.visit(i)], phase.rows(turn)
        pairs = [(refs.down, refs.downs)] if phase.down else [(refs.up, refs.ups), (refs.gate, refs.gates)]
        semaphore = (refs.down_semaphore if phase.down else refs.up_semaphore).at[slot]
        return [
            pltpu.make_async_copy(source.at[expert, rows], buffer.at[slot, pl.ds(0, phase.size)], semaphore)
            for source, buffer in pairs
            if source is not None
        ]

    def _following(self, place: _Place, phase: _Phase) -> _Place:
        """Returns the place behind one that is in `phase`."""
        slab, slots = place.slab + 1, (self.refs.ups.shape[0], self.refs.downs.shape[0])
        ends = slab == sum(p.turns for p in self.phases)
        up, down = place.up, place.down
        if phase.down:
            down = jnp.where(down + 1 == slots[1], 0, down + 1)
        else:
            up = jnp.where(up + 1 == slots[0], 0, up + 1)
        return _Place(jnp.where(ends, place.visit + 1, place.visit), jnp.where(ends, 0, slab), up, down)

    def _start(self, place: _Place, most: Any) -> _Place:
        """Starts the DMAs of a slab if its visit is one of the first `most`; returns the place behind it."""

        def start(phase: _Phase) -> _Place:
            @pl.when(place.visit < most)
            def _() -> None:
                slot = place.down if phase.down else place.up
                for copy in self._copies(place.visit, phase, place.slab - phase.first, slot):
                    copy.start()

            return self._following(place, phase)

        def of_one(phases: list[_Phase]) -> _Place:
            if len(phases) == 1:
                return start(phases[0])
            here = place.slab < phases[1].first
            return lax.cond(here, lambda: start(phases[0]), lambda: of_one(phases[1:]))

        return of_one(self.phases)

    # -- what is computed ----------------------------------------------------------------------------------------------

    def for_rows(self, i: Any, work: Callable[[Any], None]) -> None:
        """Calls `work(rows)` for the pieces of a visit's rows that one matrix product takes."""
        size = self.pieces.rows
        if self.pieces.rows_at_once == size:
            work(pl.ds(0, size))
            return

        @pl.loop(0, lax.div(self.refs.counts[self.visit(i)] * GROUP + (size - 1), size))
        def _(n: Any) -> None:
            work(pl.ds(pl.multiple_of(n * size, size), size))

    def _multiply(self, i: Any, phase: _Phase, turn: Any, slot: Any) -> None:
        """Multiplies a slab of down, or of gate and up, and adds the products to their sums. The products of the first
        slab overwrite the sums of the visit before."""
        refs = self.refs
        expert = refs.experts[self.visit(i)]
        totals = [(refs.up_sum, refs.ups, "up"), (refs.gate_sum, refs.gates, "gate")]
        if phase.down:
            totals = [(refs.out_sum, refs.downs, "down")]
        totals = [each for each in totals if each[0] is not None]
        begins = phase is next(p for p in self.phases if p.down == phase.down)

        def work(rows: Any) -> None:
            of_slab = phase.rows(turn)
            left = refs.hidden[rows, of_slab] if phase.down else self.left(i)[rows, of_slab]

            def columns(at: Any, size: int) -> None:
                for total, buffer, name in totals:
                    scales, slab = self.scales.get(name), buffer.at[slot, pl.ds(0, phase.size)]
                    if scales is None:
                        right, exact = slab[:, pl.ds(at, size)], precision(left.dtype)
                        product = jnp.dot(left, right, precision=exact, preferred_element_type=jnp.float32)
                    else:
                        product = scales.product(left, slab, of_slab.start, at, size, expert)
                    before = total[rows, pl.ds(at, size)]
                    if begins:
                        before = jnp.where(turn == 0, 0.0, before)
                    total[rows, pl.ds(at, size)] = before + product

            for_columns(totals[0][0].shape[1], columns, PRODUCTS // len(totals))

        self.for_rows(i, work)

    def _finish(self, i: Any, *, down: bool) -> None:
        """Multiplies sums by the scales of channels, where weights have them."""
        refs, expert = self.refs, self.refs.experts[self.visit(i)]
        of_both = {"down": refs.out_sum} if down else {"gate": refs.gate_sum, "up": refs.up_sum}
        for name, total in of_both.items():
            scales = self.scales.get(name)
            if total is None or scales is None or scales.block is not None:
                continue

            def work(rows: Any, total: Any = total, scales: Scales = scales) -> None:
                def columns(at: Any, size: int) -> None:
                    total[rows, pl.ds(at, size)] = scales.finish(total[rows, pl.ds(at, size)], expert, pl.ds(at, size))

                for_columns(total.shape[1], columns)

            self.for_rows(i, work)

    def _activation(self, i: Any) -> None:
        """Makes the operand of down out of the sums of gate and up."""
        refs, dtype = self.refs, self.refs.hidden.dtype
        expert = refs.experts[self.visit(i)]

        def rounded(total: Any, bias: Any, rows: Any, at: Any) -> jax.Array:
            return rounded_sums(total[rows, at], bias_of(bias, expert, at), dtype).astype(jnp.float32)

        def work(rows: Any) -> None:
            def columns(at: Any, size: int) -> None:
                at = pl.ds(at, size)
                gate = None if refs.gate_sum is None else rounded(refs.gate_sum, refs.gate_bias, rows, at)
                up = rounded(refs.up_sum, refs.up_bias, rows, at)
                refs.hidden[rows, at] = self.activate(gate, up).astype(dtype)

            for_columns(refs.hidden.shape[1], columns)

        self.for_rows(i, work)

    # -- in which order ------------------------------------------------------------------------------------------------

    def beginning(self) -> _Place:
        """Returns the place of the first slab."""
        return _Place(*(jnp.int32(0) for _ in _Place._fields))

    def first_slabs(self, count: int, most: Any) -> _Place:
        """Starts the DMAs of the first `count` slabs, of the first `most` visits; returns the place behind them."""
        if count == 1:
            return self._start(self.beginning(), most)
        return lax.fori_loop(0, count, lambda _, place: self._start(place, most), self.beginning())

    def more_slabs(self, some: Any, count: int, place: _Place) -> _Place:
        """Starts the DMAs of the slabs that may be on their way: of all of them, or where `some`, without the first
        `count`, behind which `place` is. Returns the place behind them."""
        begin = _Place(*(jnp.where(some, at, 0) for at in place))
        first = jnp.where(some, count, 0)
        return lax.fori_loop(first, self.pieces.ahead, lambda _, place: self._start(place, self.mine), begin)

    def visits(self, ahead: _Place) -> None:
        """Makes all visits; `ahead` is the place of the slab whose DMAs start next."""
        zero = jnp.int32(0)
        lax.fori_loop(0, self.mine, self._one, (zero, zero, ahead))

    def _one(self, i: Any, state: Any) -> Any:
        """One visit. The state: buffers of its first slabs of gate and up, and of down; the place of the slab whose
        DMAs start next."""
        self.before(i)
        for phase in self.phases:
            if phase.down and phase.at == 0:
                self._finish(i, down=False)
                self._activation(i)

            def turn(n: Any, state: Any, phase: _Phase = phase) -> Any:
                up, down, ahead = state
                ahead = self._start(ahead, self.mine)
                slot = down if phase.down else up
                for copy in self._copies(i, phase, n, slot):
                    copy.wait()
                self._multiply(i, phase, n, slot)
                here = self._following(_Place(i, jnp.int32(0), up, down), phase)
                return here.up, here.down, ahead

            state = lax.fori_loop(0, phase.turns, turn, state)
        self._finish(i, down=True)
        self.after(i)
        return state


@dataclasses.dataclass(frozen=True)
class _Rows(Streams):
    """Visits whose rows lie in HBM, in groups, and leave for the same places."""

    def left(self, i: Any) -> Any:
        return self.refs.rows.at[lax.rem(i, 2)]

    def _move(self, i: Any, act: Callable[[Any], None], *, out: bool) -> None:
        """Calls `act` for the DMA of each group of rows of visit `i`, into VMEM or out of it."""
        refs, visit = self.refs, self.visit(i)
        slot, first = lax.rem(i, 2), refs.firsts[visit]

        @pl.loop(0, refs.counts[visit])
        def _(n: Any) -> None:
            there = pl.ds(pl.multiple_of((first + n) * GROUP, GROUP), GROUP)
            here = pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)
            if out:
                act(pltpu.make_async_copy(refs.result.at[slot, here], refs.out.at[there], refs.out_semaphore.at[slot]))
            else:
                act(pltpu.make_async_copy(refs.x.at[there], refs.rows.at[slot, here], refs.row_semaphore.at[slot]))

    def before(self, i: Any) -> None:
        self._move(i, lambda copy: copy.wait(), out=False)

        @pl.when(i + 1 < self.mine)
        def _() -> None:
            self._move(i + 1, lambda copy: copy.start(), out=False)

    def after(self, i: Any) -> None:
        refs, dtype = self.refs, self.refs.out.dtype
        slot, expert = lax.rem(i, 2), refs.experts[self.visit(i)]

        @pl.when(i >= 2)
        def _() -> None:
            self._move(i - 2, lambda copy: copy.wait(), out=True)

        def work(rows: Any) -> None:
            def columns(at: Any, size: int) -> None:
                at = pl.ds(at, size)
                bias = bias_of(refs.down_bias, expert, at)
                refs.result[slot, rows, at] = rounded_sums(refs.out_sum[rows, at], bias, dtype)

            for_columns(refs.out_sum.shape[1], columns)

        self.for_rows(i, work)
        self._move(i, lambda copy: copy.start(), out=True)

    def run(self) -> None:
        @pl.when(self.mine > 0)
        def _() -> None:
            self._move(0, lambda copy: copy.start(), out=False)

        self.visits(self.first_slabs(self.pieces.ahead, self.mine))
        for back in (2, 1):

            @pl.when(self.mine >= back)
            def _(back: int = back) -> None:
                self._move(self.mine - back, lambda copy: copy.wait(), out=True)


def vmem_bytes(
    pieces: Pieces, hidden: int, width: int, gated: bool, itemsize: int, of_weights: int | None = None
) -> int:
    """VMEM that the kernel needs beside biases and scales; `of_weights` are bytes of a weight, if not `itemsize`."""
    wide, narrow = (-(-n // LANES) * LANES for n in (hidden, width))
    ups, downs = pieces.buffers(hidden, width)
    in_slabs = (ups * (1 + gated) * pieces.depth * narrow + downs * pieces.width * wide) * (of_weights or itemsize)
    in_rows = pieces.rows_at_once * (wide * (4 * itemsize + 4) + narrow * (itemsize + 4 * (1 + gated)))
    return in_slabs + in_rows


def decode_experts(
    x: jax.Array,
    received: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    biases: dict[str, jax.Array] | None,
    *,
    activate: Callable[..., jax.Array],
    alignment: int,
    pieces: Pieces,
    launch: Launch,
    scales: dict[str, tuple[jax.Array, tuple[int, int] | None]] | None = None,
) -> jax.Array:
    """Rows of each expert through its MLP.

    Args:
      x: `[C, W]`, rows sorted by expert, of which the first `H` columns count; `C` is a multiple of `GROUP`.
      received: int32 `[R, L]`, rows that each source has sent to each expert.
      gate, up: `[L, H, F]` in `x.dtype`, or in float8_e4m3fn or int8 with `scales`; gate is None where the activation
        takes one projection.
      down: `[L, F, H]`.
      biases: None, or float32 `gate [L, F]`, `up [L, F]`, `down [L, H]`.
      activate: `(gate or None, up) -> [m, n]`, of float32 values, element by element.
      alignment: an expert's rows begin at the next multiple of this, itself a multiple of `GROUP`.
      scales: of weights of one byte, for each matrix and its block as `scaled_weights.Scales` has them.

    Returns:
      `[C, W]` in `x.dtype`, zero in the columns past `H`; rows past the last group are unspecified.
    """
    (rows, wide), (local, hidden, width) = x.shape, up.shape
    dtype, gated = x.dtype, gate is not None
    visits = local + rows // pieces.rows_at_once
    operands: dict[str, Any] = {"x": x, "up": up, "down": down}
    if gated:
        operands["gate"] = gate
    spaces: list[Any] = [pltpu.HBM] * len(operands)
    for name, bias in (biases or {}).items():
        operands[f"{name}_bias"] = bias
        spaces.append(pltpu.VMEM)
    blocks = {name: block for name, (_, block) in (scales or {}).items()}
    for name, (of_matrix, block) in (scales or {}).items():
        operands[f"{name}_scales"] = of_matrix
        spaces.append(pltpu.VMEM if block is None else pltpu.SMEM)

    def slab(size: int, columns: int, count: int = 2, dtype: Any = dtype) -> Any:
        return pltpu.VMEM((count, size, columns), dtype)

    table, semaphores = pltpu.SMEM((visits,), jnp.int32), pltpu.SemaphoreType.DMA((2,))
    ups, downs = pieces.buffers(hidden, width)
    most = pieces.rows_at_once
    scratch: dict[str, Any] = {
        "experts": table,
        "firsts": table,
        "counts": table,
        "rows": slab(most, wide),
        "ups": slab(min(pieces.depth, hidden), width, ups, up.dtype),
        "downs": slab(min(pieces.width, width), hidden, downs, down.dtype),
        "up_sum": pltpu.VMEM((most, width), jnp.float32),
        "hidden": pltpu.VMEM((most, width), dtype),
        "out_sum": pltpu.VMEM((most, hidden), jnp.float32),
        "result": slab(most, wide),
        "up_semaphore": pltpu.SemaphoreType.DMA((ups,)),
        "down_semaphore": pltpu.SemaphoreType.DMA((downs,)),
        "row_semaphore": semaphores,
        "out_semaphore": semaphores,
    }
    if gated:
        scratch["gates"] = slab(min(pieces.depth, hidden), width, ups, up.dtype)
        scratch["gate_sum"] = pltpu.VMEM((most, width), jnp.float32)
    body = functools.partial(_body, pieces=pieces, activate=activate, alignment=alignment, cores=launch.cores)
    return launch.call(
        functools.partial(body, blocks=blocks),
        _Refs,
        ["received", *operands, "out", *scratch],
        name="xen_moe_decode_experts",
        remote=False,
        by_dma=True,
        shared=True,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(launch.cores,),
            in_specs=[pl.BlockSpec(memory_space=space) for space in spaces],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=((rows, wide), dtype),
    )(received, *operands.values())
