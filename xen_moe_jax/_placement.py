"""`Placement`: which slot of which rank holds which expert, as arrays; and what moves weights and gradients by it.

Rank `r` of `R` has slots `[r*S, (r+1)*S)`. The home of expert `e` is rank `e // L`, `L = ceil(E / R)`, as without a
placement. Everything here is data: another placement of the same shapes runs in the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from xen_moe_jax import _active, _layout, _mesh, _nodes, _ranks, backends
from xen_moe_jax import _single_ops as ops
from xen_moe_jax._collective_primitives import ragged_all_to_all_p
from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._moe_primitives import transposed_by
from xen_moe_jax._numbers import array, indices, is_one_of, known_array
from xen_moe_jax._primitive import batch_done, batch_start, declare, declare_composite
from xen_moe_jax._types import export_as, pytree

SUMS = ("home", "rank")


@pytree(static=("sums",))
class Placement:
    """Which expert each slot holds, and which slots hold each expert. Arrays: pass it to a program as an argument.

    Make one with `xm.balance.plan`, `xm.balance.home` or `xm.balance.from_experts`. No rank holds an expert twice.

    Attributes:
      experts: int32 `[R, S]`, the expert in each slot of each rank; -1 for an empty slot.
      slots: int32 `[E, R]`, the slots of each expert in ascending order, numbered `rank * S + slot`; then -1.
      num_replicas: int32 `[E]`, how many slots hold each expert; 0 for an expert that is nowhere.
      sums: where the outputs of a token's experts are added up first. "home": each row travels by itself, and they are
        added as the experts' homes would add them, so that the result has the bits of the result without a placement.
        "rank": the ranks that hold the rows add them, which sends fewer bytes, and the last bits depend on the
        placement. Static: `dataclasses.replace(placement, sums="rank")` is another program.
    """

    experts: Any
    slots: Any
    num_replicas: Any
    sums: str = "home"

    @property
    def num_ranks(self) -> int:
        """`R`."""
        return self.experts.shape[-2]

    @property
    def slots_per_rank(self) -> int:
        """`S`."""
        return self.experts.shape[-1]

    @property
    def num_experts(self) -> int:
        """`E`."""
        return self.slots.shape[-2]

    def route(self, topk_idx: jax.Array, rank: Any) -> jax.Array:
        """Chooses a replica for every slot of a token. Runs inside jit; nothing is communicated.

        The `n`-th slot of this rank's tokens that names an expert goes to replica `(rank + n) mod num_replicas`: the
        same batch gives the same choice, and replicas get equally many rows, to within one for each rank.

        Args:
          topk_idx: integer `[..., K]`, experts; an entry outside `[0, E)` is an unused slot.
          rank: this rank's number, one integer: `jax.lax.axis_index(axis_name)`.

        Returns:
          int32 `[..., K]`: slots, numbered `rank * S + slot`. -1 for unused slots and for experts that are nowhere.

        Raises:
          TypeError: `topk_idx` or `rank` holds no integers or has other dimensions.
        """
        topk_idx = indices(topk_idx, "Placement.route", "topk_idx")
        rank = array(rank, "Placement.route", "rank")
        for name, given, fits in (("topk_idx", topk_idx, topk_idx.ndim > 0), ("rank", rank, rank.ndim == 0)):
            if not fits or not jnp.issubdtype(given.dtype, jnp.integer):
                wanted = "integers [..., K]" if name == "topk_idx" else "one integer"
                raise TypeError(f"Placement.route: {name} is {given.dtype}{list(given.shape)}: must be {wanted}")
        if 0 in topk_idx.shape:
            return jnp.zeros(topk_idx.shape, jnp.int32)
        idx = _layout.sanitize(_mesh.whole(topk_idx), self.num_experts)
        expert = idx.reshape(-1)
        order, _ = _layout.order_by_blocks(expert, self.num_experts)
        known = jnp.maximum(expert, 0)
        copies = ops.take(jnp.asarray(self.num_replicas), known)
        which = lax.rem(order + rank.astype(jnp.int32), jnp.maximum(copies, 1))
        slot = ops.take(jnp.asarray(self.slots).reshape(-1), known * self.num_ranks + which)
        return jnp.where((expert >= 0) & (copies > 0), slot, -1).reshape(idx.shape)

    def without(self, alive: Any) -> Placement:
        """Returns the same slots on the ranks that are left: nothing moves, and replicas serve at once.

        Args:
          alive: bool `[R]`, False for a rank that is gone. Its slots become empty. An expert that only it had is
            nowhere, `num_replicas` 0: `route` gives -1 for it, and its rows are zero until it is fetched.

        Returns:
          `Placement`, of NumPy arrays if all arrays are NumPy's.

        Raises:
          ValueError: `alive` is not bool `[R]`. TypeError: it is no array.
        """
        alive = alive if isinstance(alive, jax.Array) else known_array(alive, "Placement.without", "alive")
        if alive.shape != (self.num_ranks,) or alive.dtype != np.bool_:
            raise ValueError(
                f"Placement.without: alive is {alive.dtype}{list(alive.shape)}: must be bool[{self.num_ranks}], one "
                "for each rank"
            )
        np_or_jnp = _arrays_of(self.experts, alive)
        return of_experts(np_or_jnp.where(alive[:, None], self.experts, -1), self.num_experts, self.sums)

    @staticmethod
    def move(
        weights: Any,
        old: Placement | None,
        new: Placement | None,
        *,
        axis_name: Any = None,
        active: jax.Array | None = None,
        config: KernelConfig | None = None,
    ) -> Any:
        """Brings weights from the slots of `old` to those of `new`; its transpose adds up gradients as `reduce` does.

        Inside `jax.shard_map` a rank gives and gets its own slots; a slot's weights come from this rank where it has
        them, else from one of the replicas. Outside, arrays are global.

        Args:
          weights: pytree of arrays `[S_old, ...]`, or `[R * S_old, ...]` outside `shard_map`.
          old, new: placements of the same experts over the same ranks; None is the experts' homes, `S = L`.
          axis_name: mesh axis, or a pair of axes; None is all manual axes, or the one that has `R` ranks.
          active: bool `[R]`, as in `xm.dispatch`: GPUs of one node wait for no inactive rank, and between nodes every
            rank must call this. Weights that only inactive ranks have count as being nowhere; the result on an inactive
            rank is unspecified.
          config: tuning; never changes the result.

        Returns:
          pytree of arrays `[S_new, ...]` or `[R * S_new, ...]`. Empty slots are zero. A slot whose expert `old` has
          nowhere is NaN, or zero if its dtype is an integer.

        Raises:
          ValueError: both placements are None, they differ in ranks or experts, or weights or `active` have other
            dimensions. TypeError: an argument is no placement or no array.
        """
        old, new = _both(old, new, "move")
        return _apply(move_p, weights, old, new, old.slots_per_rank, axis_name, active, config, "move")

    def reduce(
        self,
        gradients: Any,
        home: Placement | None = None,
        *,
        axis_name: Any = None,
        active: jax.Array | None = None,
        config: KernelConfig | None = None,
    ) -> Any:
        """Adds up the gradients of an expert's replicas at its home: the transpose of `move(weights, home, self)`.

        They are added in float32 in ascending order of the slots, one after another, and rounded once.

        Args:
          gradients: pytree of float arrays `[S, ...]`, or `[R * S, ...]` outside `shard_map`.
          home: where the sums go; None is the experts' homes.
          axis_name, active, config: as in `move`.

        Returns:
          pytree of arrays `[L, ...]`, this rank's experts (`[S_home, ...]` with `home`), or `[R * L, ...]`. Zero for an
          expert without replicas.

        Raises:
          ValueError: the placements differ in ranks or experts, or gradients or `active` have other dimensions.
          TypeError: an argument is no placement or no array, or gradients are no floats.
        """
        home, placement = _both(home, self, "reduce")
        return _apply(reduce_p, gradients, home, placement, self.slots_per_rank, axis_name, active, config, "reduce")


def _arrays_of(*arrays: Any) -> Any:
    """NumPy where all arrays are NumPy's, else `jax.numpy`."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp


def of_experts(experts: Any, num_experts: int, sums: str = "home") -> Placement:
    """The placement with these `experts [R, S]`. No rank may hold an expert twice; this is not checked here."""
    xp = _arrays_of(experts)
    ranks, per_rank = experts.shape
    numbers = xp.arange(ranks * per_rank, dtype=xp.int32)
    flat = xp.where(experts >= 0, experts, num_experts).reshape(-1)
    nowhere = ranks * per_rank
    table: Any
    if xp is np:
        table = np.full((num_experts + 1, ranks), nowhere, np.int32)
        table[flat, numbers // per_rank] = numbers
    else:
        table = jnp.full((num_experts + 1, ranks), nowhere, jnp.int32).at[flat, numbers // per_rank].set(numbers)
    table = xp.sort(table[:num_experts], axis=1)
    found = table < nowhere
    return Placement(
        experts.astype(xp.int32), xp.where(found, table, -1).astype(xp.int32), found.sum(axis=1, dtype=xp.int32), sums
    )


def home(num_experts: int, num_ranks: int) -> Placement:
    """Experts where they are without a placement: expert `e` on rank `e // ceil(E / R)`."""
    local = -(-num_experts // num_ranks)
    experts = np.arange(num_ranks * local, dtype=np.int32).reshape(num_ranks, local)
    return of_experts(np.where(experts < num_experts, experts, -1), num_experts)


# -- between ranks -----------------------------------------------------------------------------------------------------


NOWHERE = -3
"""Entry of `source` for a slot that gets no weights and whose contents are unspecified (`KEEP` in backends/cuda)."""


def sources(old: Placement, new: Placement) -> Any:
    """int32 `[R, S_new]`: the slot of `old` from which each slot of `new` gets its expert; -1 for an empty slot, -2 for
    an expert that `old` has nowhere.

    A rank takes its own replica where it has one. Otherwise rank `r` takes replica `r mod num_replicas`.
    """
    xp = _arrays_of(*jax.tree.leaves((old, new)))
    expert = xp.maximum(new.experts, 0)
    found = xp.asarray(old.slots)[expert]  # [R, S_new, R]
    copies = xp.asarray(old.num_replicas)[expert]
    rank = xp.arange(new.num_ranks, dtype=xp.int32)[:, None]
    own = xp.max(xp.where(found // old.slots_per_rank == rank[..., None], found, -1), axis=-1)  # -1 // S is -1
    other = xp.take_along_axis(found, (rank % xp.maximum(copies, 1))[..., None], axis=-1)[..., 0]
    source = xp.where(copies > 0, xp.where(own >= 0, own, other), -2)
    return xp.where(new.experts >= 0, source, -1).astype(xp.int32)


def check_arrays(placement: Placement, caller: str) -> None:
    """Raises ValueError unless the arrays of the placement fit each other, and TypeError if one is no array of
    integers."""
    experts, slots, copies = placement.experts, placement.slots, placement.num_replicas
    for name, found in (("experts", experts), ("slots", slots), ("num_replicas", copies)):
        if not hasattr(found, "shape") or not jnp.issubdtype(found.dtype, jnp.integer):
            raise TypeError(f"{caller}: placement.{name} is a {type(found).__name__}: must be an array of int32")
    if experts.ndim != 2 or slots.ndim != 2 or slots.shape[1] != experts.shape[0] or copies.shape != slots.shape[:1]:
        raise ValueError(
            f"{caller}: placement has experts {list(experts.shape)}, slots {list(slots.shape)} and num_replicas "
            f"{list(copies.shape)}: must be [R, S], [E, R] and [E]; make it by xm.balance.from_experts"
        )
    if not is_one_of(placement.sums, SUMS):
        raise ValueError(f"{caller}: placement.sums={placement.sums!r}: must be one of {', '.join(map(repr, SUMS))}")


def _both(old: Placement | None, new: Placement | None, caller: str) -> tuple[Placement, Placement]:
    given = [p for p in (old, new) if p is not None]
    if not given:
        raise ValueError(f"Placement.{caller}: both placements are None, the experts' homes: nothing would move")
    for placement in given:
        if not isinstance(placement, Placement):
            raise TypeError(f"Placement.{caller}: got a {type(placement).__name__}: must be a Placement, or None")
        check_arrays(placement, f"Placement.{caller}")
    default = home(given[0].num_experts, given[0].num_ranks)
    old, new = old or default, new or default
    if (old.num_experts, old.num_ranks) != (new.num_experts, new.num_ranks):
        raise ValueError(
            f"Placement.{caller}: one placement has {old.num_experts} experts on {old.num_ranks} ranks and the other "
            f"{new.num_experts} on {new.num_ranks}: both must be of the same experts and ranks"
        )
    return old, new


def _apply(
    primitive: Any,
    tree: Any,
    old: Placement,
    new: Placement,
    slots: int,
    axis_name: Any,
    active: Any,
    config: Any,
    caller: str,
) -> Any:
    """Runs `primitive` on every array of `tree`, which has `slots` rows a rank."""
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"Placement.{caller}: config={config!r}: must be None or an xm.KernelConfig")
    mask = _active.EVERY_RANK if active is None else array(active, f"Placement.{caller}", "active")
    if active is not None and (mask.shape != (old.num_ranks,) or mask.dtype != jnp.bool_):
        raise ValueError(
            f"Placement.{caller}: active is {mask.dtype}{list(mask.shape)}: must be bool[{old.num_ranks}], one for "
            "each rank"
        )
    if active is not None:
        old, new = old.without(mask), new.without(mask)
    source = jnp.asarray(sources(old, new))
    names = _axis(axis_name, old.num_ranks, caller)
    run = functools.partial(between_ranks, primitive, old_slots=old.slots_per_rank, new_slots=new.slots_per_rank)
    rows = slots if names else slots * old.num_ranks

    def one(leaf: Any) -> jax.Array:
        leaf = array(leaf, f"Placement.{caller}", "an array of weights")
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            where = "a rank's slots" if names else f"the slots of all {old.num_ranks} ranks"
            raise ValueError(f"Placement.{caller}: an array has shape {leaf.shape}: must be [{rows}, ...], {where}")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"Placement.{caller}: an array has dtype {leaf.dtype}: pass jax.random.key_data of keys")
        if caller == "reduce" and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"Placement.reduce: an array has dtype {leaf.dtype}: gradients must be floating point")
        if not names:
            everywhere = move_everywhere_p if primitive is move_p else reduce_everywhere_p
            run_everywhere = functools.partial(_everywhere, everywhere, rows=old.slots_per_rank * old.num_ranks)
            return _mesh.sharded_alike(run_everywhere, leaf, source.reshape(-1))
        return run(leaf, source, mask, names, config)

    return jax.tree.map(one, tree)


def between_ranks(
    primitive: Any,
    array: Any,
    source: Any,
    active: Any,
    axis_name: tuple[str, ...],
    config: KernelConfig | None,
    *pending: Any,
    old_slots: int,
    new_slots: int,
) -> jax.Array:
    """Returns the result of `primitive` for one array of a rank.

    Args:
      primitive: `move_p`, `move_start_p`, `move_done_p` or `reduce_p`.
      array: `[S_old, ...]`; for `reduce_p`, `[S_new, ...]`.
      source: int32 `[R, S_new]`, as `sources` returns it.
      active: bool `[R]`, or `_active.EVERY_RANK`.
      axis_name: mesh axes over which the ranks are numbered.
      config: tuning; None is `DEFAULT_CONFIG`. Where it says nothing of nodes, the primitive gets those of the job.
      pending: for `move_done_p`, the result of the start.
      old_slots, new_slots: `S_old` and `S_new`.
    """
    sizes = tuple(_mesh.axis_size(name) for name in axis_name)
    config = backends.with_nodes(sizes, config or DEFAULT_CONFIG)
    params = {"axis_name": axis_name, "axis_sizes": sizes, "config": config}
    operands = _mesh.vary_over([array, source, active, *pending], axis_name)
    return primitive.bind(*operands, **params, old_slots=old_slots, new_slots=new_slots)[0]


def _axis(axis_name: Any, num_ranks: int, caller: str) -> tuple[str, ...]:
    """The mesh axes over which the placement's ranks are numbered; () outside `shard_map`."""
    manual = _mesh.manual_axes()
    if axis_name is None:
        candidates = [manual, *((name,) for name in manual)]
        fitting = [names for names in candidates if names and math.prod(map(_mesh.axis_size, names)) == num_ranks]
        if not manual or len(set(fitting)) == 1 or manual in fitting:
            return tuple(fitting[0]) if manual else ()
        raise ValueError(
            f"Placement.{caller}: the placement has {num_ranks} ranks, and the manual axes here are "
            f"{ {name: _mesh.axis_size(name) for name in manual} }: say which with axis_name="
        )
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = [name for name in names if not is_one_of(name, manual)]
    if missing or math.prod(map(_mesh.axis_size, names)) != num_ranks:
        raise ValueError(
            f"Placement.{caller}: axis_name={axis_name!r}: must be manual axes (inside jax.shard_map) with the "
            f"placement's {num_ranks} ranks; the manual axes here are {manual}"
        )
    return names


def _column(mask: Any, ndim: int) -> Any:
    """Returns `mask [N]` with dimensions of size 1 behind it, `ndim` in all."""
    return mask.reshape(*mask.shape, *[1] * (ndim - mask.ndim))


def _lost(dtype: Any) -> Any:
    """Returns the value of a slot whose expert is nowhere: NaN, or 0 for integers."""
    return jnp.asarray(jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


@functools.partial(jax.jit, static_argnums=0, static_argnames="rows")
def _everywhere(primitive: Any, array: Any, source: Any, *, rows: int) -> jax.Array:
    """Runs a primitive on global arrays; by itself it would not run where nothing is traced."""
    return primitive.bind(array, source, rows=rows, config=DEFAULT_CONFIG)[0]


def _move_everywhere(weights: Any, source: Any, **_: Any) -> Any:
    """`move_p` outside `shard_map`: global `weights [R * S_old, ...]` by `source [R * S_new]`."""
    moved = jnp.where(_column(source >= 0, weights.ndim), weights[jnp.maximum(source, 0)], jnp.zeros((), weights.dtype))
    return jnp.where(_column(source == -2, weights.ndim), _lost(weights.dtype), moved)


def _reduce_everywhere(gradients: Any, source: Any, *, rows: int, **_: Any) -> Any:
    """`reduce_p` outside `shard_map`: global `gradients [R * S_new, ...]` by `source [R * S_new]`, to `[rows, ...]`."""
    order = _layout.order_within_bins(source, rows)[0]

    def add(state: Any) -> Any:
        turn, total = state
        to = jnp.where((source >= 0) & (order == turn), source, rows)
        came = jnp.zeros(rows, jnp.bool_).at[to].set(True, mode="drop")
        part = jnp.zeros_like(total).at[to].set(gradients.astype(jnp.float32), mode="drop")
        return turn + 1, jnp.where(_column(came, total.ndim), jnp.where(turn == 0, part, total + part), total)

    deepest = jnp.max(jnp.where(source >= 0, order, -1))
    start = jnp.zeros((rows, *gradients.shape[1:]), jnp.float32)
    total = lax.while_loop(lambda state: state[0] <= deepest, add, (jnp.int32(0), start))[1]
    return total.astype(gradients.dtype)


def _ragged(operand: Any, output: Any, sent: Any, sent_to: Any, landed: Any, came: Any, params: Any) -> Any:
    """One ragged exchange of at most a row between any two ranks: `sent`, `came` bool `[R]`, by peer; `sent_to`: the
    row of `operand`; `landed [R]`: its row in the peer's `output`. Between nodes it is XLA's collective: the CUDA
    backend's exchange stores at every rank by pointer."""
    peers = came.shape[0]
    config = params["config"]
    if _nodes.several(peers, config):
        config = dataclasses.replace(config, backend="reference")
    segments = (jnp.broadcast_to(sent_to, (peers,)), sent, jnp.broadcast_to(landed, (peers,)), came)
    known = {"axis_name": params["axis_name"], "axis_sizes": params["axis_sizes"], "config": config}
    return ragged_all_to_all_p.bind(
        operand, output, *(a.astype(jnp.int32) for a in segments), axis_index_groups=None, **known
    )[0]


def _move(weights: Any, source: Any, _: Any, **params: Any) -> Any:
    """An exchange for each slot of `new`: every rank gets the expert that is in this slot of its own."""
    old_slots, new_slots = params["old_slots"], params["new_slots"]
    me = _ranks.index(params["axis_name"])
    peers = jnp.arange(source.shape[0], dtype=jnp.int32)

    def slot(output: Any, at: Any) -> Any:
        wanted = lax.dynamic_index_in_dim(source, at, 1, keepdims=False)  # [R], by the rank that gets
        owner = jnp.where(wanted >= 0, wanted // old_slots, -1)
        mine = lax.dynamic_index_in_dim(owner, me, 0, keepdims=False)
        row = jnp.where(owner == me, wanted % old_slots, 0)
        return _ragged(weights, output, owner == me, row, at, peers == mine, params), None

    start = jnp.zeros((new_slots, *weights.shape[1:]), weights.dtype)
    own = lax.dynamic_index_in_dim(source, me, 0, keepdims=False)
    start = jnp.where(_column(own == -2, start.ndim), _lost(start.dtype), start)
    return lax.scan(slot, start, jnp.arange(new_slots, dtype=jnp.int32))[0]


def _reduce(gradients: Any, source: Any, _: Any, **params: Any) -> Any:
    """For each row of the homes and each turn an exchange, in which every home gets the next replica's gradient of this
    row. Turns in which no home gets one are skipped: all ranks know that, since all have `source`."""
    old_slots, new_slots = params["old_slots"], params["new_slots"]
    ranks = source.shape[0]
    me = _ranks.index(params["axis_name"])
    peers = jnp.arange(ranks, dtype=jnp.int32)
    flat = source.reshape(-1)
    order, _ = _layout.order_within_bins(flat, ranks * old_slots)
    order = jnp.where(flat >= 0, order, -1)

    def row(at: Any, total: Any) -> Any:
        homes = peers * old_slots + at
        here = flat[None, :] == homes[:, None]  # [home, new slot]
        deepest = jnp.max(jnp.where(here, order[None, :], -1))

        def turn(state: Any) -> Any:
            number, acc = state
            next_one = here & (order[None, :] == number)
            slot = jnp.where(jnp.any(next_one, axis=1), jnp.argmax(next_one, axis=1), -1).astype(jnp.int32)  # by home
            owner = jnp.where(slot >= 0, slot // new_slots, -1)
            mine = lax.dynamic_index_in_dim(owner, me, 0, keepdims=False)
            came = _ragged(
                gradients, jnp.zeros((1, *acc.shape), gradients.dtype), owner == me,
                jnp.where(owner == me, slot % new_slots, 0), 0, peers == mine, params,
            )[0].astype(jnp.float32)  # fmt: skip
            return number + 1, jnp.where(mine >= 0, jnp.where(number == 0, came, acc + came), acc)

        acc = jnp.zeros(gradients.shape[1:], jnp.float32)
        acc = lax.while_loop(lambda state: state[0] <= deepest, turn, (jnp.int32(0), acc))[1]
        return lax.dynamic_update_index_in_dim(total, acc.astype(total.dtype), at, 0)

    return lax.fori_loop(0, old_slots, row, jnp.zeros((old_slots, *gradients.shape[1:]), gradients.dtype))


def _rows(rows: str, array: Any, *_: Any, **params: Any) -> Any:
    return [((params[rows], *array.shape[1:]), array.dtype)]


# Operands: the weights of a rank's slots; `source int32 [R, S_new]` (`sources`), the same on every rank; and `active`.
# `move_start_p` and `move_done_p` are the halves of `move_p`: only the done may read the result of the start, which is
# pending, and gets it behind the operands of the start. Neither half has a derivative.
move_p = declare("move_weights", functools.partial(_rows, "new_slots"), otherwise=_move)
move_start_p = declare("move_weights_start", functools.partial(_rows, "new_slots"), otherwise=_move)
move_done_p = declare(
    "move_weights_done", functools.partial(_rows, "new_slots"), otherwise=lambda *operands, **_: operands[-1]
)
reduce_p = declare("reduce_gradients", functools.partial(_rows, "old_slots"), otherwise=_reduce)
transposed_by(move_p, reduce_p)
transposed_by(reduce_p, move_p)
move_everywhere_p = declare_composite(
    "move_weights_everywhere",
    lambda weights, source, **_: [((*source.shape, *weights.shape[1:]), weights.dtype)],
    _move_everywhere,
)
reduce_everywhere_p = declare_composite(
    "reduce_gradients_everywhere",
    lambda gradients, _, *, rows, **__: [((rows, *gradients.shape[1:]), gradients.dtype)],
    _reduce_everywhere,
)
transposed_by(move_everywhere_p, reduce_everywhere_p)
transposed_by(reduce_everywhere_p, move_everywhere_p)
batching.primitive_batchers[move_start_p] = batch_start(functools.partial(_rows, "new_slots"))
batching.primitive_batchers[move_done_p] = batch_done("move_weights_done", move_p.bind, 3)

export_as(Placement)
