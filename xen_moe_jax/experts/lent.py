"""Weights that an exact balance lends, one or a few experts at a time: a rank keeps its own and copies none.

Slots of a rank are `L` of its own experts, then those that it borrows (`_exact.places`). A product by the weights of
all slots (`by_slots`) runs a kernel over the rows of the own experts. Then, round by round, every rank fetches the next
experts that it borrows from their homes, and writes the results of their rows to the same array, in windows of rows.
Gradients of the weights (`contracted`) are made in the same rounds, and each goes home and is added there in ascending
order of ranks. Thus memory for a few borrowed matrices suffices, whatever the routing lends. The number of rounds is
that of the rank that borrows most: all ranks know it, and take part in the exchanges of every round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout, _mesh, _ranks
from xen_moe_jax._active import EVERY_RANK
from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._placement import between_ranks, move_p
from xen_moe_jax._types import Handle, pytree

AT_ONCE = 1
"""Experts that a rank borrows in one round. Four make a layer 5 % faster, and a forward pass takes 1.31 times the
memory of uniform routing instead of 1.10 (docs/lab/layers.md)."""
WINDOWS = 8
"""Windows of rows in the buffer of a rank. Rows of a window are copied in front of its kernel."""
ROWS = 8
"""The kernels take multiples of this many rows."""


@pytree(static=("axis_name", "at_once", "config"))
class Lent:
    """The weights of a rank's experts, and the experts that each rank borrows.

    Attributes:
      own: `[L, A, B]`, one matrix of each of this rank's experts.
      borrowed: int32 `[R, N]`, the experts that each rank borrows, and then -1; the same on every rank.
      active: bool `[R]`, or None for all ranks.
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
        """Returns the same with other arrays of the own experts."""
        return dataclasses.replace(self, own=own)

    def gradient(self, own: Any) -> Lent:
        """Returns the cotangent of the weights: integers have none."""
        return dataclasses.replace(self, own=own, borrowed=None, active=None)

    def rounds(self) -> Any:
        """Returns int32 `[]`, the number of rounds of the rank that borrows most experts."""
        return -(-jnp.max(jnp.sum(self.borrowed >= 0, axis=1, dtype=jnp.int32)) // self.at_once)

    def of_round(self, array: Any, turn: Any, axis: int = 0) -> Any:
        """Returns the `W` entries of round `turn` from an array that has `N` entries, one for each borrowed expert,
        along `axis`. Behind the last entry they are -1 for `borrowed`, and 0 for other arrays."""
        extra = [(0, -array.shape[a] % self.at_once if a == axis else 0) for a in range(array.ndim)]
        padded = jnp.pad(array, extra, constant_values=-1 if array is self.borrowed else 0)
        return lax.dynamic_slice_in_dim(padded, turn * self.at_once, self.at_once, axis)

    def fetch(self, turn: Any) -> jax.Array:
        """Returns `[W, A, B]`, the weights of the experts that this rank borrows in round `turn`; zeros where there is
        none. All ranks call it in the same round."""
        wanted = self.of_round(self.borrowed, turn, axis=1)  # the home of expert e is row e of all ranks
        return self._move(self.own, wanted, self.shape[0])

    def send_home(self, own: jax.Array, gradients: jax.Array, turn: Any) -> jax.Array:
        """Sends `gradients [W, A, B]` of the experts that this rank borrows in round `turn` to their homes. Returns
        `own [L, A, B]` with those that came here added in ascending order of ranks, each sum in float32 and rounded to
        the dtype of `own`. A home gets `W` gradients at a time."""
        ranks, local, width = self.borrowed.shape[0], self.shape[0], self.at_once
        expert = self.of_round(self.borrowed, turn, axis=1).reshape(-1)
        home = jnp.where(expert >= 0, expert // local, -1)
        order, _ = _layout.order_within_bins(home, ranks)
        order = jnp.where(home >= 0, order, -1)
        me = _ranks.index(self.axis_name)
        slots = jnp.arange(ranks * width, dtype=jnp.int32)

        def some(number: Any, own: Any) -> Any:
            place = order - number * width
            to = jnp.where((place >= 0) & (place < width), home * width + place, ranks * width)
            givers = jnp.full(ranks * width, -1, jnp.int32).at[to].set(slots, mode="drop").reshape(ranks, width)
            came = self._move(gradients, givers, width)
            mine = lax.dynamic_index_in_dim(givers, me, 0, keepdims=False)
            for at in range(width):
                row = jnp.where(mine[at] >= 0, expert[jnp.maximum(mine[at], 0)] % local, 0)
                before = lax.dynamic_index_in_dim(own, row, 0, keepdims=False)
                after = (before.astype(jnp.float32) + came[at].astype(jnp.float32)).astype(own.dtype)
                own = lax.dynamic_update_index_in_dim(own, jnp.where(mine[at] >= 0, after, before), row, 0)
            return own

        return lax.fori_loop(0, (jnp.max(order) + width) // width, some, own)

    def _move(self, rows: Any, source: Any, slots: int) -> jax.Array:
        """Returns `[W, ...]`: this rank's rows by `source int32 [R, W]`, numbered `rank * slots + row`, -1 for zeros,
        from the `rows [slots, ...]` of all ranks."""
        active, width = EVERY_RANK if self.active is None else self.active, source.shape[1]
        return between_ranks(
            move_p, rows, source, active, self.axis_name, self.config, old_slots=slots, new_slots=width
        )


def weights_of(
    weights: dict[str, Any], handle: Handle, move: Callable[..., Any], config: KernelConfig | None
) -> dict[str, Any]:
    """Returns `weights` of this rank's experts for the slots of a dispatch with an exact balance: matrices lent,
    and biases moved by `move(weights, old, new)`."""
    placement, spec = handle.placement, handle.spec
    local = -(-placement.num_experts // placement.num_ranks)
    borrowed, active = lax.stop_gradient((placement.experts[:, local:], handle.active))

    def of_slots(weight: Any) -> Any:
        if weight.ndim < 3:
            return move(weight, None, placement)
        return Lent(weight, borrowed, active, spec.axis_name, AT_ONCE, config or DEFAULT_CONFIG)

    return {name: of_slots(weight) for name, weight in weights.items()}


def by_slots(
    kernel: Callable[..., Sequence[Any]], by_row: Sequence[Any], weights: Sequence[Any], by_slot: Any, sizes: Any
) -> list[jax.Array]:
    """Returns `kernel(by_row, weights, by_slot, sizes)`, arrays `[C, ...]` whose row `c` depends on rows `c` alone.

    Args:
      kernel: takes rows in groups.
      by_row: arrays `[C, ...]`.
      weights: arrays `[L, ...]`, one for each group, or `Lent` ones.
      by_slot: pytree of arrays with an entry for every slot.
      sizes: int32, rows of each slot.
    """
    if not isinstance(weights[0], Lent):
        return list(kernel(by_row, weights, by_slot, sizes))
    local = weights[0].shape[0]
    own = kernel(by_row, [w.own for w in weights], jax.tree.map(lambda a: a[:local], by_slot), sizes[:local])

    def borrowed(turn: Any, outs: Any) -> Any:
        fetched = [w.fetch(turn) for w in weights]
        entries = jax.tree.map(lambda a: weights[0].of_round(a[local:], turn), by_slot)

        def window(mine: Any, start: Any, sizes: Any, outs: Any) -> Any:
            news = kernel([_window(a, start, mine) for a in by_row], fetched, entries, sizes)
            return tuple(_put(out, new, start, mine) for out, new in zip(outs, news, strict=True))

        return _in_windows(window, by_row[0].shape[0], weights[0], sizes, turn, outs)

    axes = varying_axes(by_row[0])
    return list(lax.fori_loop(0, weights[0].rounds(), borrowed, tuple(_mesh.vary(out, axes) for out in own)))


def contracted(kernel: Callable[..., Any], by_row: Sequence[Any], weights: Any, sizes: Any) -> Any:
    """Returns the gradient of `weights` where it is `kernel(by_row, sizes)`, sums over the rows of each group; that of
    `Lent` weights as they are."""
    if not isinstance(weights, Lent):
        return kernel(by_row, sizes)
    local, count = weights.shape[0], by_row[0].shape[0]
    axes = varying_axes(by_row[0])

    def borrowed(turn: Any, own: Any) -> Any:
        def window(mine: Any, start: Any, sizes: Any, total: Any) -> Any:
            return total + kernel([_window(a, start, mine) for a in by_row], sizes).astype(jnp.float32)

        start = _mesh.vary(jnp.zeros((weights.at_once, *own.shape[1:]), jnp.float32), axes)
        total = _in_windows(window, count, weights, sizes, turn, start)
        return weights.send_home(own, total.astype(own.dtype), turn)

    own = _mesh.vary(kernel(by_row, sizes[:local]), axes)
    return weights.gradient(lax.fori_loop(0, weights.rounds(), borrowed, own))


def _in_windows(step: Callable[..., Any], count: int, weights: Lent, sizes: Any, turn: Any, carry: Any) -> Any:
    """Calls `step(mine, start, sizes, carry) -> carry` for each window of the rows of a round, of `count` rows.

    A window begins at row `start`; `mine` says which of its rows belong to it and to no window before, and `sizes`,
    int32 `[W]`, how many rows each of the round's experts has there. Rows in front of the first that is `mine` count
    for one of them.
    """
    if count == 0:
        return carry
    height = min(-(-count // WINDOWS // ROWS) * ROWS, count)
    local = weights.shape[0]
    of_slots = weights.of_round(sizes[local:], turn)
    ends = jnp.sum(sizes[:local]) + jnp.cumsum(of_slots, dtype=jnp.int32)
    ends = ends + jnp.sum(jnp.where(jnp.arange(len(sizes) - local) < turn * weights.at_once, sizes[local:], 0))
    begin, end = ends[0] - of_slots[0], ends[-1]

    def one(number: Any, carry: Any) -> Any:
        first = begin + number * height
        last = jnp.minimum(first + height, end)
        start = jnp.minimum(first, count - height)
        row = start + jnp.arange(height, dtype=jnp.int32)
        within = jnp.diff(jnp.clip(ends, start, last) - start, prepend=0)
        return step((row >= first) & (row < last), start, within, carry)

    return lax.fori_loop(0, -(-(end - begin) // height), one, carry)


def _window(array: Any, start: Any, mine: Any) -> Any:
    """Returns the rows of a window from row `start` on, with zeros for rows that are not `mine`."""
    rows = lax.dynamic_slice_in_dim(array, start, mine.shape[0])
    return jnp.where(_over_columns(mine, rows), rows, 0)


def _put(array: Any, rows: Any, start: Any, mine: Any) -> Any:
    """Returns `array` with those `rows` that are `mine` in the place of its own, from row `start` on."""
    before = lax.dynamic_slice_in_dim(array, start, mine.shape[0])
    return lax.dynamic_update_slice_in_dim(array, jnp.where(_over_columns(mine, rows), rows, before), start, 0)


def _over_columns(mine: Any, rows: Any) -> Any:
    """Returns `mine [N]` with as many dimensions as `rows [N, ...]` have."""
    return mine.reshape(-1, *[1] * (rows.ndim - 1))
