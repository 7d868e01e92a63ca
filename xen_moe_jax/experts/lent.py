"""Weights that an exact balance lends, one expert at a time: a rank keeps its own where they are, and copies none.

Slots of a rank are `L` of its own experts, then those that it borrows (`_exact.at_home_first`). A product by the
weights of all slots (`by_slots`) runs a kernel over the rows of the own experts; then, round by round, every rank
fetches the next expert that it borrows from the expert's home, and adds the results of its rows to the same array, in
windows of rows. Gradients of the weights (`contracted`) are made in the same rounds, and each goes home and is added
there in ascending order of ranks. Thus memory for one borrowed matrix suffices, whatever the routing lends. The number
of rounds is that of the rank that borrows most: all ranks know it, and take part in the exchanges of every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout, _mesh, _ranks
from xen_moe_jax._active import EVERY_RANK
from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._placement import move_p
from xen_moe_jax._types import Handle, pytree

WINDOWS = 8
"""Windows of rows in the buffer of a rank. Rows of a window are copied in front of its kernel."""
ROWS = 8
"""The kernels take multiples of this many rows."""


@pytree(static=("axis_name", "config"))
class Lent:
    """A rank's weights `own [L, A, B]` of its experts, and which experts each rank borrows: `borrowed int32 [R, N]`,
    then -1, the same on every rank. `active`: bool `[R]`, or None."""

    own: Any
    borrowed: Any
    active: Any
    axis_name: tuple[str, ...]
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
        return Lent(own, self.borrowed, self.active, self.axis_name, self.config)

    def gradient(self, own: Any) -> Lent:
        """Returns the cotangent of the weights: integers have none."""
        return Lent(own, None, None, self.axis_name, self.config)

    def rounds(self) -> Any:
        """How many experts the rank borrows that borrows most."""
        return jnp.max(jnp.sum(self.borrowed >= 0, axis=1, dtype=jnp.int32))

    def fetch(self, turn: Any) -> jax.Array:
        """`[1, A, B]`: the weights of the expert that this rank borrows in a round; zeros if there is none."""
        wanted = lax.dynamic_slice_in_dim(self.borrowed, turn, 1, axis=1)  # the home of expert e is row e of all ranks
        return self._move(self.own, wanted, self.shape[0])

    def send_home(self, own: jax.Array, gradient: jax.Array, turn: Any) -> jax.Array:
        """Adds `gradient [1, A, B]`, that of the expert which this rank borrows in a round, to the `own` gradients of
        the expert's home. A home gets one gradient at a time."""
        ranks, local = self.borrowed.shape[0], self.shape[0]
        expert = lax.dynamic_index_in_dim(self.borrowed, turn, 1, keepdims=False)
        home = jnp.where(expert >= 0, expert // local, -1)
        order, _ = _layout.order_within_bins(home, ranks)
        order = jnp.where(home >= 0, order, -1)
        me = _ranks.index(self.axis_name)
        peers = jnp.arange(ranks, dtype=jnp.int32)

        def one(number: Any, own: Any) -> Any:
            lender = jnp.where(order == number, home, ranks)
            giver = jnp.full(ranks, -1, jnp.int32).at[lender].set(peers, mode="drop")
            came = self._move(gradient, giver[:, None], 1)[0].astype(jnp.float32)
            mine = lax.dynamic_index_in_dim(giver, me, 0, keepdims=False)
            at = lax.dynamic_index_in_dim(expert, jnp.maximum(mine, 0), 0, keepdims=False) % local
            at = jnp.where(mine >= 0, at, 0)
            before = lax.dynamic_index_in_dim(own, at, 0, keepdims=False)
            after = (before.astype(jnp.float32) + came).astype(own.dtype)
            return lax.dynamic_update_index_in_dim(own, jnp.where(mine >= 0, after, before), at, 0)

        return lax.fori_loop(0, jnp.max(order) + 1, one, own)

    def _move(self, rows: Any, source: Any, slots: int) -> jax.Array:
        sizes = tuple(_mesh.axis_size(name) for name in self.axis_name)
        active = EVERY_RANK if self.active is None else self.active
        operands = _mesh.vary_over([rows, source, active], self.axis_name)
        params = {"axis_name": self.axis_name, "axis_sizes": sizes, "config": self.config}
        return move_p.bind(*operands, **params, old_slots=slots, new_slots=1)[0]


def weights_of(
    weights: dict[str, Any], handle: Handle, move: Callable[..., Any], config: KernelConfig | None
) -> dict[str, Any]:
    """Returns `weights` of this rank's experts for the slots of a dispatch with an exact balance: matrices lent, biases
    moved by `move(weights, old, new)`."""
    placement, spec = handle.placement, handle.spec
    local = -(-placement.num_experts // placement.num_ranks)
    borrowed, active = lax.stop_gradient((placement.experts[:, local:], handle.active))

    def of_slots(weight: Any) -> Any:
        if weight.ndim < 3:
            return move(weight, None, placement)
        return Lent(weight, borrowed, active, spec.axis_name, config or DEFAULT_CONFIG)

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
        entries = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, local + turn, 1), by_slot)

        def window(mine: Any, start: Any, size: Any, outs: Any) -> Any:
            news = kernel([_window(a, start, mine) for a in by_row], fetched, entries, size)
            return tuple(_put(out, new, start, mine) for out, new in zip(outs, news, strict=True))

        return _in_windows(window, by_row[0].shape[0], sizes, local + turn, outs)

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
        def window(mine: Any, start: Any, size: Any, total: Any) -> Any:
            return total + kernel([_window(a, start, mine) for a in by_row], size).astype(jnp.float32)

        start = _mesh.vary(jnp.zeros((1, *own.shape[1:]), jnp.float32), axes)
        total = _in_windows(window, count, sizes, local + turn, start)
        return weights.send_home(own, total.astype(own.dtype), turn)

    own = _mesh.vary(kernel(by_row, sizes[:local]), axes)
    return weights.gradient(lax.fori_loop(0, weights.rounds(), borrowed, own))


def _in_windows(step: Callable[..., Any], count: int, sizes: Any, slot: Any, carry: Any) -> Any:
    """Calls `step(mine, start, size, carry) -> carry` for each window of the rows of a slot.

    A window begins at row `start`; `mine` says which of its rows are the slot's and no other window's, and `size`,
    int32 `[1]`, how many there are up to the last of them.
    """
    height = min(-(-count // WINDOWS // ROWS) * ROWS, count)
    size = lax.dynamic_index_in_dim(sizes, slot, 0, keepdims=False)
    end = lax.dynamic_index_in_dim(jnp.cumsum(sizes, dtype=jnp.int32), slot, 0, keepdims=False)

    def one(number: Any, carry: Any) -> Any:
        first = end - size + number * height
        last = jnp.minimum(first + height, end)
        start = jnp.minimum(first, count - height)
        row = start + jnp.arange(height, dtype=jnp.int32)
        return step((row >= first) & (row < last), start, (last - start)[None], carry)

    return lax.fori_loop(0, -(-size // height), one, carry)


def _window(array: Any, start: Any, mine: Any) -> Any:
    """Rows of a window, zeros for those that are not its own."""
    rows = lax.dynamic_slice_in_dim(array, start, mine.shape[0])
    return jnp.where(_over_columns(mine, rows), rows, 0)


def _put(array: Any, rows: Any, start: Any, mine: Any) -> Any:
    before = lax.dynamic_slice_in_dim(array, start, mine.shape[0])
    return lax.dynamic_update_slice_in_dim(array, jnp.where(_over_columns(mine, rows), rows, before), start, 0)


def _over_columns(mine: Any, rows: Any) -> Any:
    return mine.reshape(-1, *[1] * (rows.ndim - 1))
