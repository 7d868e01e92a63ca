"""Weights that an exact balance lends, one or a few experts at a time: a rank keeps its own and copies none.

The slots of a rank hold its own `L` experts first, and then the experts that it borrows (`_exact.places`). A product
by the weights of all slots (`by_slots`) runs a kernel over the rows of the rank's own experts. Then, round by round,
it runs the kernel over the rows of the next borrowed experts, which writes its results to the same array. The weights
of a round are fetched from their homes while the kernel of the round in front runs. Gradients of the weights
(`contracted`) are made in the same rounds. Each gradient goes home while the kernel of the next round runs, and is
added there: round after round, and within a round in ascending order of ranks. With more than two ranks, the number of
experts in a round therefore changes the order in which an expert's gradients are added, and with it their last bits.
Memory for a few borrowed matrices suffices, whatever the routing lends. The number of rounds is that of the rank that
borrows most: all ranks that exchange know it, and take part in the exchanges of every round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _mesh, _ranks
from xen_moe_jax._active import EVERY_RANK
from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._placement import NOWHERE, between_ranks, move_done_p, move_start_p
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._types import Handle, pytree
from xen_moe_jax.backends.cuda.call import apart
from xen_moe_jax.pallas_kernels.hopper.rows import Into

AT_ONCE = 2
"""Experts that a rank borrows in one round. Two products borrow one (`one_at_once`), because they hold most memory: all
of a pass without gradients whose combine weights the rows (`combined._run`), which would take 1.20 times the memory of
uniform routing instead of 1.10, and the gradient of rows by two projections (`hopper._by_rows`), with which a backward
pass would take 1.16 times that memory instead of 1.13. Elsewhere two in a round are faster and take no more memory
(docs/lab/layers.md)."""


@pytree(static=("axis_name", "at_once", "config"))
class Lent:
    """The weights of a rank's experts, and the experts that each rank borrows.

    Attributes:
      own: `[L, A, B]`, one matrix of each of this rank's experts.
      borrowed: int32 `[R, N]`, the experts that each rank borrows, followed by -1; the same on every active rank, and
        between nodes on every rank.
      active: bool `[R]`, False for a rank that takes no part; None is all ranks.
      axis_name: names of the mesh axes over which the ranks are numbered.
      at_once: `W`, experts that a rank borrows in one round.
      config: tuning of the exchanges.
    """

    own: Any
    borrowed: Any
    active: Any
    axis_name: tuple[str, ...]
    at_once: int
    config: KernelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `own`."""
        return self.own.shape

    @property
    def dtype(self) -> Any:
        """Dtype of `own`."""
        return self.own.dtype

    def with_own(self, own: Any) -> Lent:
        """Returns the same loans with `own [L, ...]` in the place of the weights."""
        return dataclasses.replace(self, own=own)

    def gradient(self, own: Any) -> Lent:
        """Returns the cotangent of these weights: `own [L, A, B]` for the weights, and None for integers and masks,
        which have none."""
        return dataclasses.replace(self, own=own, borrowed=None, active=None)

    def rounds(self) -> Any:
        """Returns int32 `[]`, the number of rounds of the rank that borrows most experts; 0 where no rank borrows."""
        return -(-jnp.max(jnp.sum(self.borrowed >= 0, axis=1, dtype=jnp.int32)) // self.at_once)

    def of_round(self, array: Any, turn: Any, axis: int = 0) -> Any:
        """Returns the `W` entries of round `turn` of an array that has `N` entries along `axis`, one for each expert
        that a rank may borrow. Entries behind the `N`-th, and all entries of the round after the last one, are -1 for
        `borrowed` and 0 for other arrays."""
        extra = [(0, -n % self.at_once + self.at_once if a == axis else 0) for a, n in enumerate(array.shape)]
        padded = jnp.pad(array, extra, constant_values=-1 if array is self.borrowed else 0)
        return lax.dynamic_slice_in_dim(padded, turn * self.at_once, self.at_once, axis)

    def rows_of_round(self, sizes: Any, turn: Any) -> tuple[Any, Any]:
        """Returns the first row of round `turn`, int32 `[]`, and how many rows each of its experts has, int32 `[W]`.
        `sizes`, int32 `[L + N]`, are the numbers of rows of all slots."""
        local = self.shape[0]
        before = jnp.arange(len(sizes), dtype=jnp.int32) < local + turn * self.at_once
        return jnp.sum(jnp.where(before, sizes, 0), dtype=jnp.int32), self.of_round(sizes[local:], turn)

    def fetch(self, turn: Any) -> _Moving:
        """Starts to fetch `[W, A, B]`, the weights of the experts that this rank borrows in round `turn`. A matrix is
        unspecified where the rank borrows no expert. All ranks call this in every round."""
        wanted = self.of_round(self.borrowed, turn, axis=1)  # the home of expert e is row e of all ranks
        return self._move(self.own, wanted, self.shape[0])

    def send_home(self, own: jax.Array, gradients: jax.Array, turn: Any, meanwhile: Any) -> tuple[jax.Array, Any]:
        """Sends `gradients [W, A, B]` of the experts that this rank borrows in round `turn` to their homes.

        A home gets `W` gradients at a time, and all ranks take as many turns as the home that gets most.

        Args:
          own: `[L, A, B]`, the sums so far of the gradients of this rank's own experts.
          meanwhile: `(work, operands)`: `work(operands)` runs while the first `W` gradients of each home travel.

        Returns:
          `own` with the gradients of this round that came here added in ascending order of ranks, each sum in float32
          and rounded to the dtype of `own`; and the result of `work`.
        """
        ranks, local, width = self.borrowed.shape[0], self.shape[0], self.at_once
        expert = self.of_round(self.borrowed, turn, axis=1).reshape(-1)
        home = jnp.where(expert >= 0, expert // local, -1)
        me = _ranks.index(self.axis_name)
        slots = jnp.arange(ranks * width, dtype=jnp.int32)
        # `order` is the place of a gradient among all that go to the same home. Sorting so few would take longer.
        before = (home == home[:, None]) & (slots < slots[:, None])
        order = jnp.where(home >= 0, jnp.sum(before, axis=1, dtype=jnp.int32), -1)

        def givers(number: Any) -> Any:
            """Returns int32 `[R, W]`: gradients that each home gets in turn `number`, as `rank * W + row`, or -1."""
            place = order - number * width
            to = jnp.where((place >= 0) & (place < width), home * width + place, ranks * width)
            return jnp.full(ranks * width, -1, jnp.int32).at[to].set(slots, mode="drop").reshape(ranks, width)

        def add(number: Any, came: Any, own: Any) -> Any:
            """Returns `own` plus `came [W, A, B]`, the gradients that this home got in turn `number`."""
            mine = lax.dynamic_index_in_dim(givers(number), me, 0, keepdims=False)
            for at in range(width):
                row = jnp.where(mine[at] >= 0, expert[jnp.maximum(mine[at], 0)] % local, 0)
                before = lax.dynamic_index_in_dim(own, row, 0, keepdims=False)
                after = (before.astype(jnp.float32) + came[at].astype(jnp.float32)).astype(own.dtype)
                own = lax.dynamic_update_index_in_dim(own, jnp.where(mine[at] >= 0, after, before), row, 0)
            return own

        def more(number: Any, own: Any) -> Any:
            return add(number, self._move(gradients, givers(number), width).done(), own)

        (moving,), result = beside([self._move(gradients, givers(0), width)], *meanwhile)
        own = add(0, moving.done(), own)
        if ranks == 2:  # a home gets at most W gradients
            return own, result
        return lax.fori_loop(1, (jnp.max(order) + width) // width, more, own), result

    def _move(self, rows: Any, source: Any, slots: int) -> _Moving:
        """Starts to move `[W, ...]` to this rank from the `rows [slots, ...]` of all ranks.

        `source int32 [R, W]`, the same on every active rank, names the rows that each rank gets, numbered
        `rank * slots + row`. -1 is no row, and what the rank then has in its place is unspecified.
        """
        active = EVERY_RANK if self.active is None else self.active
        moving = _Moving(self, rows, jnp.where(source >= 0, source, NOWHERE), active, slots)
        return dataclasses.replace(moving, pending=moving.run(move_start_p))


@pytree(static=("old_slots",))
class _Moving:
    """Rows that are on their way.

    Attributes:
      lent: the weights that are lent, which know axes and tuning.
      rows: `[S, ...]`, the rows of this rank from which others get theirs.
      source: int32 `[R, W]`, as an operand of `move_start_p`.
      active: bool `[R]`, or `EVERY_RANK`.
      old_slots: `S`.
      pending: `[W, ...]`, the result of the start, which only the done may read; None before the start.
    """

    lent: Lent
    rows: Any
    source: Any
    active: Any
    old_slots: int
    pending: Any = None

    def run(self, primitive: Any, *pending: Any) -> Any:
        """Returns the result of `move_start_p`, or of `move_done_p`, which gets the `pending` array too."""
        lent, new_slots = self.lent, self.source.shape[1]
        operands = self.rows, self.source, self.active, lent.axis_name, lent.config, *pending
        return between_ranks(primitive, *operands, old_slots=self.old_slots, new_slots=new_slots)

    def done(self) -> jax.Array:
        """Waits for the rows and returns them, `[W, ...]`."""
        return self.run(move_done_p, self.pending)


def beside(moving: list[_Moving], work: Callable[..., Any], operands: Any) -> tuple[list[_Moving], Any]:
    """Runs `work(operands)` after the rows of `moving` have started to travel, and before the program waits for them.

    XLA orders operations by their data alone, and neither depends on the other. So one barrier makes the work depend on
    the starts, and another one makes the ends depend on the work.

    Returns:
      `moving`, whose `done` comes after the work, and the result of the work.
    """
    pending, operands = lax.optimization_barrier(([m.pending for m in moving], operands))
    pending, result = lax.optimization_barrier((pending, work(operands)))
    return [dataclasses.replace(m, pending=p) for m, p in zip(moving, pending, strict=True)], result


def weights_of(
    weights: dict[str, Any], handle: Handle, move: Callable[..., Any], config: KernelConfig | None
) -> dict[str, Any]:
    """Returns the weights for the slots of a dispatch with an exact balance, by name.

    Args:
      weights: of this rank's own experts, by name: matrices `[L, A, B]`, which become `Lent`, and biases `[L, B]`,
        which travel to the slots at once.
      handle: of the dispatch; its placement says which experts each rank borrows.
      move: `Placement.move`, called as `move(bias, None, placement)`.
      config: tuning of the exchanges; None is the default.
    """
    placement, spec = handle.placement, handle.spec
    local = -(-placement.num_experts // placement.num_ranks)
    borrowed, active = lax.stop_gradient((placement.experts[:, local:], handle.active))

    def of_slots(weight: Any) -> Any:
        if weight.ndim < 3:
            return move(weight, None, placement)
        return Lent(weight, borrowed, active, spec.axis_name, AT_ONCE, config or DEFAULT_CONFIG)

    return {name: of_slots(weight) for name, weight in weights.items()}


def one_at_once(weights: Any) -> Any:
    """Returns a dictionary or list of weights, in which each `Lent` lends one expert in a round."""

    def one(weight: Any) -> Any:
        return dataclasses.replace(weight, at_once=1) if isinstance(weight, Lent) else weight

    return jax.tree.map(one, weights, is_leaf=lambda weight: isinstance(weight, Lent))


def by_slots(
    kernel: Callable[..., Sequence[Any]], by_row: Sequence[Any], weights: Sequence[Any], by_slot: Any, sizes: Any
) -> list[jax.Array]:
    """Returns `kernel(by_row, weights, by_slot, sizes)`: arrays `[C, ...]` whose row `c` depends on row `c` of `by_row`
    and on the weights of its slot alone.

    Args:
      kernel: multiplies rows that are sorted by groups, one group for each matrix. With `into=Into(arrays, first_row)`
        the first group begins at that row, and the kernel overwrites the groups' rows in these arrays.
      by_row: arrays `[C, ...]`.
      weights: arrays `[L, A, B]`, one matrix for each slot, or `Lent` ones, whose borrowed experts have slots as well.
      by_slot: pytree of arrays with an entry for every slot.
      sizes: int32, the number of rows of each slot.
    """
    if not isinstance(weights[0], Lent):
        return list(kernel(by_row, weights, by_slot, sizes))
    first, local = weights[0], weights[0].shape[0]

    def of_own(by_row: Any) -> Any:
        return kernel(by_row, [w.own for w in weights], jax.tree.map(lambda a: a[:local], by_slot), sizes[:local])

    if by_row[0].shape[0] == 0:
        return list(of_own(by_row))

    def borrowed(turn: Any, carry: Any) -> Any:
        fetched, outs = carry
        entries = jax.tree.map(lambda a: first.of_round(a[local:], turn), by_slot)
        first_row, of_slots = first.rows_of_round(sizes, turn)

        def of_round(given: Any) -> Any:
            fetched, outs = given
            operands, tree = jax.tree.flatten((by_row, fetched, entries, of_slots, first_row, outs))
            return tuple(into_p.bind(*_mesh.vary_alike(*operands), kernel=kernel, tree=tree, config=DEFAULT_CONFIG))

        moving, outs = beside([w.fetch(turn + 1) for w in weights], of_round, (fetched, outs))
        return [m.done() for m in moving], _varying(outs, axes)

    axes = varying_axes(by_row[0])
    # No weights start to travel before the rows have arrived: the dispatch then has the link to itself.
    weights, by_row = lax.optimization_barrier((list(weights), list(by_row)))
    moving, own = beside([w.fetch(0) for w in weights], of_own, by_row)
    carry = [m.done() for m in moving], _varying(own, axes)
    return list(lax.fori_loop(0, first.rounds(), borrowed, carry)[1])


def _into(*operands: Any, kernel: Any, tree: Any, **_: Any) -> tuple[Any, ...]:
    """Returns the arrays after `kernel` has written its rows into them: the leaves of the last operand."""
    # The kernel's result shares its memory with an operand, whose other rows belong to the result, too. In a loop over
    # a batch, such as `vmap` makes, slices of the batch must stay apart from the kernel.
    *given, first_row, outs = jax.tree.unflatten(tree, apart(*operands))
    return tuple(apart(*kernel(*given, into=Into(outs, first_row))))


def _shapes_into(*operands: Any, tree: Any, **_: Any) -> list[Any]:
    """Returns shapes and dtypes of these arrays."""
    return [(out.shape, out.dtype) for out in jax.tree.unflatten(tree, operands)[-1]]


into_p = declare_composite("rows_into", _shapes_into, _into)
"""A kernel that writes rows into arrays, its last operands. JAX refuses a kernel that writes into an array that varies
over mesh axes; as a primitive, the kernel is traced only when it is lowered, without varying axes."""


def in_place(work: Callable[..., Any], by_weighted: Any, projections: Sequence[Any], row_weights: Any) -> Any:
    """Returns `work(by_weighted, projections, row_weights)`, whose results take the memory of the operands.

    The operands come out of loops, because their experts' weights are lent, and XLA lets no operation overwrite an
    operand that a loop has returned. But XLA gives the state of a loop the same memory before and after a turn. So the
    work is made the only turn of a loop, and a barrier hides from XLA that there is only one.

    A result must depend on the operand whose memory it takes, since XLA otherwise copies that operand. In gated experts
    the gradient of the last projection, `up`, does not depend on `up`. Therefore it takes the memory of `by_weighted`,
    and the weighted activation takes that of `up`. The gradient of `gate` takes the memory of `gate`. The gradient of
    `row_weights` does not depend on `row_weights`; XLA may copy this operand, which is small.

    Args:
      work: returns the gradients of the projections and the weighted activation, `[C, F]` each in the dtype of the
        projections, and the gradient of `row_weights`.
      by_weighted: `[C, F]` in the dtype of the projections, the gradient of the weighted activation.
      projections: `[C, F]` each.
      row_weights: float32 `[C]`.
    """
    *others, last = projections

    def turn(state: Any) -> Any:
        at, (*others, by_weighted), last, _ = state
        return at + 1, *work(by_weighted, [*others, last], row_weights)

    end = lax.optimization_barrier(jnp.int32(1))
    start = jnp.int32(0), [*others, by_weighted], last, row_weights
    return lax.while_loop(lambda state: state[0] < end, turn, start)[1:]


def contracted(kernel: Callable[..., Any], by_row: Sequence[Any], weights: Any, sizes: Any) -> Any:
    """Returns the gradient of `weights`: `[L, A, B]`, or a `Lent` that holds it.

    Args:
      kernel: `kernel(by_row, sizes)` returns the gradient of one matrix for each group, a sum over the group's rows.
        With `first_row` as a third argument, int32 `[]`, the first group begins at that row.
      by_row: arrays `[C, ...]`, sorted by slots.
      weights: the weights of the slots, `[L, A, B]` or `Lent`.
      sizes: int32, the number of rows of each slot.
    """
    if not isinstance(weights, Lent):
        return kernel(by_row, sizes)
    local, axes = weights.shape[0], varying_axes(by_row[0])

    def of_round(turn: Any, by_row: Any) -> Any:
        first_row, of_slots = weights.rows_of_round(sizes, turn)
        return _mesh.vary(kernel(by_row, of_slots, first_row), axes)

    def borrowed(turn: Any, carry: Any) -> Any:
        own, gradients = carry
        next_round = functools.partial(of_round, turn + 1), by_row
        return weights.send_home(own, gradients, turn, next_round)

    own = _mesh.vary(kernel(by_row, sizes[:local]), axes)
    if by_row[0].shape[0] == 0:
        return weights.gradient(own)
    carry = own, of_round(0, by_row)
    return weights.gradient(lax.fori_loop(0, weights.rounds(), borrowed, carry)[0])


def _varying(arrays: Sequence[Any], axes: Any) -> tuple[Any, ...]:
    """Returns the arrays, made to vary over the mesh `axes`: the state of a loop must enter and leave a turn alike."""
    return tuple(_mesh.vary(array, axes) for array in arrays)
