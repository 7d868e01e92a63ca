"""Balanced experts: `plan` makes a `Placement` from statistics. Which slot holds which expert is data.

counts = xm.balance.count(topk_idx, num_experts=E)             # int32 [E]; add up over batches and ranks
placement = xm.balance.plan(counts, num_ranks=R, slots_per_rank=S)
weights = placement.move(weights, None, placement)             # from the experts' homes to their slots
routed = xm.dispatch(x, topk_idx, topk_weights, num_experts=E, axis_name="ep", placement=placement)
out = xm.combine(experts(routed.x, routed.group_sizes, weights), routed.handle)
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax import _layout, _validate
from xen_moe_jax._numbers import known_array
from xen_moe_jax._placement import Placement, of_experts, sources
from xen_moe_jax._placement import home as _home

__all__ = ["Placement", "count", "from_experts", "home", "moves", "plan", "repair"]

TRIALS = 16
"""Numbers of replicas, of all experts together, that `plan` tries."""
REFINED = 3
"""The best of these trials, in which `plan` then swaps replicas between ranks."""
EXCHANGES = 8
"""Exchanges of a replica of one expert for one of another that `plan` tries in the best trial."""
EVEN = 1.001
"""Load of the busiest rank over the mean of the ranks that are alive, at which `plan` stops improving."""


def count(topk_idx: jax.Array, num_experts: int, mask: jax.Array | None = None) -> jax.Array:
    """Slots that name each expert: the statistics of `plan`. Runs anywhere; nothing is communicated.

    Args:
      topk_idx: integer `[..., K]`. Entries outside `[0, num_experts)`, unused slots, count nowhere.
      num_experts: `E`.
      mask: bool `[...]`, False for tokens that are padding or whose rank takes no part: they count nowhere.

    Returns:
      int32 `[E]`. `MoEMetrics.tokens_per_expert` of the Flax layers is this sum over all ranks.

    Raises:
      ValueError, TypeError: an argument is wrong.
    """
    caller = "balance.count"
    idx, _ = _validate.routing(topk_idx, None, None, caller)
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    _validate.names_every_expert(idx, num_experts, caller)
    idx = _layout.sanitize(idx, num_experts)
    if mask is not None:
        mask = _validate.array(mask, caller, "mask")
        if mask.shape != jnp.shape(topk_idx)[:-1] or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{caller}: mask is {mask.dtype}{list(mask.shape)}: must be bool{list(jnp.shape(topk_idx)[:-1])}"
            )
        idx = jnp.where(mask.reshape(-1, 1), idx, -1)
    experts = jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return jnp.sum(idx[..., None] == experts, axis=(0, 1), dtype=jnp.int32)


def home(num_experts: int, num_ranks: int) -> Placement:
    """The placement of a dispatch without one: expert `e` on rank `e // L` alone, `S = L = ceil(E / R)`.

    Raises:
      ValueError, TypeError: a number is below 1, or no int.
    """
    caller = "balance.home"
    experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    return _home(experts, _validate.integer(num_ranks, "num_ranks", caller, minimum=1))


def from_experts(experts: Any, num_experts: int) -> Placement:
    """The placement with the given slots.

    Args:
      experts: integers `[R, S]`, the expert in each slot of each rank; -1 for an empty slot. Values, not traced.
      num_experts: `E`.

    Raises:
      ValueError: a slot holds an expert outside `[-1, E)`, or a rank holds an expert twice. TypeError: `experts` is no
        array, or its values are traced.
    """
    caller = "balance.from_experts"
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    held = known_array(experts, caller, "experts")
    if held.ndim != 2 or 0 in held.shape or not np.issubdtype(held.dtype, np.integer):
        raise ValueError(f"{caller}: experts is {held.dtype}{list(held.shape)}: must be integers [R, S]")
    if held.min() < -1 or held.max() >= num_experts:
        raise ValueError(f"{caller}: experts has entries outside [-1, {num_experts}): -1 is an empty slot")
    for rank, row in enumerate(held):
        full = row[row >= 0]
        if len(set(full.tolist())) < full.size:
            raise ValueError(f"{caller}: rank {rank} holds an expert twice in {row.tolist()}: use -1 for empty slots")
    return of_experts(held.astype(np.int32), num_experts)


def plan(
    counts: Any,
    num_ranks: int,
    slots_per_rank: int,
    ranks_per_node: int | None = None,
    alive: Any = None,
    min_replicas: int = 1,
    max_replicas: int | None = None,
) -> Placement:
    """Places experts so that all ranks get about equally many rows, if batches resemble `counts`. NumPy; not traced.

    Greedy, as published (EPLB, DeepSeek-V3: arXiv:2412.19437, section 3.4): the expert with the largest load for each
    replica gets one more; then replicas go, the largest load first, to the node with the least load for each of its
    ranks, and inside the node to the rank with the least. Some numbers of replicas are tried (`TRIALS`), since more
    are not always better. In the best ones the busiest rank of a node swaps replicas with other ranks of the node.
    Then, in the best of all, an expert whose replicas would have little load with one fewer gives a replica to the
    expert whose replica is the largest on the busiest rank, as long as that helps (at most `EXCHANGES` are tried).
    Slots without use stay empty.

    Args:
      counts: rows of each expert, numbers `>= 0`, `[E]`, or `[..., E]` to be added up: `count`, without padding.
      num_ranks, slots_per_rank: `R` and `S`.
      ranks_per_node: consecutive ranks that share a fast link; None is all of them. Must divide `num_ranks`.
      alive: bool `[R]`, False for a rank that gets no expert; None is all ranks.
      min_replicas: slots that every expert gets at least, on different ranks; at most the number of ranks that are
        alive. With 2, the experts of any one rank that fails are on other ranks as well.
      max_replicas: slots that all ranks together use at most, `>= E * min_replicas`; None is all of them. Redundancy
        of 12.5% for 256 experts on 64 ranks is 288: four and a half on a rank, with `slots_per_rank=5`.

    Returns:
      `Placement` of NumPy arrays, whose shapes depend on `R`, `S` and `E` alone.

    Raises:
      ValueError: an argument is out of range, or ranks that are alive have fewer than `E * min_replicas` slots.
      TypeError: a number is no int, or `counts` or `alive` is no array or is traced.
    """
    caller = "balance.plan"
    ranks = _validate.integer(num_ranks, "num_ranks", caller, minimum=1)
    slots = _validate.integer(slots_per_rank, "slots_per_rank", caller, minimum=1)
    per_node = _validate.ranks_per_node(ranks_per_node, ranks, caller)
    load = _load(counts, caller)
    up = np.ones(ranks, bool) if alive is None else known_array(alive, caller, "alive")
    least = _validate.integer(min_replicas, "min_replicas", caller, minimum=1)
    room = _room(up, ranks, slots, load.size, caller, least)
    if max_replicas is not None:
        room = min(room, _validate.integer(max_replicas, "max_replicas", caller, minimum=load.size * least))
    num_up = int(up.sum())
    nodes = [[r for r in range(first, first + per_node) if up[r]] for first in range(0, ranks, per_node)]
    packing = _Packing(load, [node for node in nodes if node], ranks, slots)
    more = _order_of_replicas(load, least, room - load.size * least, num_up)
    numbers = sorted({round(len(more) * i / (TRIALS - 1)) for i in range(TRIALS)})
    trials = [packing.greedy(least + np.bincount(more[:extra], minlength=load.size)) for extra in numbers]
    ordered = sorted((trial for trial in trials if trial is not None), key=lambda trial: trial.busiest)
    best = min((packing.swapped(trial) for trial in ordered[:REFINED]), key=lambda trial: trial.busiest, default=None)
    experts = np.full((ranks, slots), -1, np.int32)
    held = _in_turn(load.size, least, np.flatnonzero(up), ranks)
    if best is not None:
        held = packing.with_other_replicas(best, least, room).held
    for rank, row in enumerate(held):
        experts[rank, : len(row)] = sorted(row)
    return of_experts(experts, load.size)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A placement that `plan` considers.

    Attributes:
      copies: int `[E]`, the number of replicas of each expert.
      held: the experts of each of the `R` ranks; none for a rank that is not alive.
      busiest: load of the busiest rank over the mean of the ranks that are alive.
    """

    copies: np.ndarray
    held: list[list[int]]
    busiest: float


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Ways to give replicas of experts to ranks.

    Attributes:
      load: float64 `[E]`, the rows of each expert.
      nodes: the ranks of each node that are alive; a node without such a rank is left out.
      ranks: `R`, the number of all ranks, alive or not.
      slots: `S`, the slots of each rank.
    """

    load: np.ndarray
    nodes: list[list[int]]
    ranks: int
    slots: int

    def greedy(self, copies: np.ndarray) -> _Trial | None:
        """Returns the trial in which `copies [E]` replicas are packed greedily, or None if they do not fit."""
        held = _pack_nodes(self.load / copies, copies, self.nodes, self.ranks, self.slots)
        return None if held is None else self._trial(copies, held)

    def swapped(self, trial: _Trial) -> _Trial:
        """Returns the trial after swaps of replicas between the ranks of each node (`_swap`)."""
        if trial.busiest <= EVEN:
            return trial
        each, held = self.load / trial.copies, list(trial.held)
        for node in self.nodes:
            rows = _swap(each, [held[rank] for rank in node], self.slots)
            for rank, row in zip(node, rows, strict=True):
                held[rank] = row
        return self._trial(trial.copies, held)

    def with_other_replicas(self, trial: _Trial, least: int, most: int) -> _Trial:
        """Returns the best trial found by giving the largest expert on the busiest rank one replica more, again and
        again: a new one while all experts together have fewer than `most`, or that of an expert with more than `least`
        replicas. At most `EXCHANGES` changes are tried, and a change is kept if the busiest rank is then less busy.
        """
        tried = 0
        while trial.busiest > EVEN and tried < EXCHANGES:
            each = self.load / trial.copies
            rank = max(range(self.ranks), key=lambda r: each[trial.held[r]].sum())
            taker = max(trial.held[rank], key=lambda expert: each[expert])
            if trial.copies[taker] == sum(map(len, self.nodes)):
                break
            then = np.where(trial.copies > least, self.load / np.maximum(trial.copies - 1, 1), np.inf)
            then[taker] = np.inf
            givers = [e for e in np.argsort(then, kind="stable").tolist() if then[e] < np.inf]
            spare = [-1] if trial.copies.sum() < most else []
            before = trial
            for giver in [*spare, *givers][: EXCHANGES - tried]:
                copies = trial.copies.copy()
                copies[taker] += 1
                if giver >= 0:
                    copies[giver] -= 1
                tried += 1
                other = self.greedy(copies)
                other = None if other is None else self.swapped(other)
                if other is not None and other.busiest < trial.busiest:
                    trial = other
                    break
            if trial is before:
                break
        return trial

    def _trial(self, copies: np.ndarray, held: list[list[int]]) -> _Trial:
        """Returns the trial with these replicas on these ranks, and how busy its busiest rank is."""
        each = self.load / copies
        mean = self.load.sum() / sum(map(len, self.nodes))
        return _Trial(copies, held, max(float(each[row].sum()) for row in held) / mean)


def _swap(each: np.ndarray, held: list[list[int]], slots: int) -> list[list[int]]:
    """Returns the experts of each rank of a node after swaps between its busiest rank and another one: of a replica for
    another, or of a replica for an empty slot.

    Of all swaps, the one is made after which the busier of the two ranks has the least load. Swaps end when no swap
    leaves that rank with less load than the busiest rank had, or when the busiest rank is within `EVEN` of the mean.

    Args:
      each: `[E]`, the load of one replica of each expert.
      held: the experts of each rank of the node.
      slots: of a rank.
    """
    empty = each.size
    loads = np.append(each, 0.0)
    table = np.full((len(held), slots), empty, np.int64)
    for rank, row in enumerate(held):
        table[rank, : len(row)] = row
    of_slot = loads[table]
    by_rank = of_slot.sum(axis=1)
    enough = by_rank.mean() * EVEN
    for _ in range(table.size):
        busy = int(by_rank.argmax())
        if by_rank[busy] <= enough:
            break
        mine = table[busy]
        less = of_slot[busy][:, None, None] - of_slot  # [own slot, rank, its slot]
        then = np.maximum(by_rank[busy] - less, by_rank[:, None] + less)
        same = (table == mine[:, None, None]) & (mine != empty)[:, None, None]
        then[same.any(axis=2)] = np.inf  # the other rank has this expert
        then[:, same.any(axis=0)] = np.inf  # the busiest rank has that one
        best = int(then.argmin())
        if then.flat[best] >= by_rank[busy] * (1 - 1e-9):
            break
        own, rank, slot = (int(at) for at in np.unravel_index(best, then.shape))
        moved = less[own, rank, slot]
        table[busy, own], table[rank, slot] = table[rank, slot], table[busy, own]
        of_slot[busy, own], of_slot[rank, slot] = of_slot[rank, slot], of_slot[busy, own]
        by_rank[busy] -= moved
        by_rank[rank] += moved
    return [[expert for expert in row if expert != empty] for row in table.tolist()]


def _in_turn(experts: int, copies: int, up: np.ndarray, ranks: int) -> list[list[int]]:
    """Returns the experts of each of the `ranks` ranks, `copies` replicas of each expert dealt out in turn to the ranks
    `up`. These fit whenever there are slots enough; where slots are scarce, the greedy packing may not."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(experts * copies):
        held[up[number % len(up)]].append(number // copies)
    return held


def repair(placement: Placement, alive: Any, counts: Any = None) -> Placement:
    """Gives the experts that were on lost ranks alone a slot on the ranks that are left, and moves nothing else. NumPy.

    The expert with the most rows comes first, and goes to the rank with the least load that has an empty slot. Where no
    slot is empty, it takes the place of a replica: that of the expert whose other replicas then have the fewest rows.
    `np.argwhere(new.experts != placement.without(alive).experts)` names the slots whose weights have to be fetched.

    Args:
      placement: as it was; values, not traced.
      alive: bool `[R]`, False for a rank that is gone.
      counts: as in `plan`; None counts all experts alike.

    Returns:
      `Placement` of NumPy arrays, with the shapes of `placement`.

    Raises:
      ValueError: `alive` or `counts` is out of range or has other dimensions, or the ranks that are left have fewer
        slots than there are experts. TypeError: `placement` is no `Placement`, or `alive` or `counts` is no
        array or is traced.
    """
    caller = "balance.repair"
    if not isinstance(placement, Placement):
        raise TypeError(f"{caller}: placement is a {type(placement).__name__}: must be a Placement")
    ranks, slots, size = placement.num_ranks, placement.slots_per_rank, placement.num_experts
    up = known_array(alive, caller, "alive")
    _room(up, ranks, slots, size, caller)
    load = _load(np.ones(size) if counts is None else counts, caller)
    if load.size != size:
        raise ValueError(f"{caller}: counts has {load.size} experts, and the placement {size}: they must be equal")
    left = jax.tree.map(np.asarray, placement).without(up)
    held, copies = left.experts.copy(), left.num_replicas.copy()
    gone = np.flatnonzero(copies == 0)
    for expert in gone[np.argsort(-load[gone], kind="stable")].tolist():
        each = np.append(load / np.maximum(copies, 1), 0.0)
        by_rank = each[held].sum(axis=1)
        spare = np.append(copies > 1, True)[held] & up[:, None]  # an empty slot is -1, the last entry
        # For a slot that is in use: rows of each other replica once this one is gone.
        then = np.append(load / np.maximum(copies - 1, 1), -1.0)[held]
        order = np.lexsort(
            (np.broadcast_to(by_rank[:, None], held.shape).ravel(), np.where(spare, then, np.inf).ravel())
        )
        rank, slot = divmod(int(order[0]), slots)
        if held[rank, slot] >= 0:
            copies[held[rank, slot]] -= 1
        held[rank, slot] = expert
        copies[expert] = 1
    return of_experts(held, size, placement.sums)


def _room(up: np.ndarray, ranks: int, slots: int, experts: int, caller: str, least: int = 1) -> int:
    """Returns how many slots the ranks have that are `up`, bool `[R]`. Raises ValueError if `least` replicas of each of
    the experts do not fit there."""
    if up.shape != (ranks,) or up.dtype != np.bool_:
        raise ValueError(f"{caller}: alive is {up.dtype}{list(up.shape)}: must be bool[{ranks}], one for each rank")
    num_up, replicas = int(up.sum()), experts * least
    if num_up == 0:
        raise ValueError(
            f"{caller}: alive is False for all {ranks} ranks: must be True for at least one, to hold experts"
        )
    if least > num_up:
        raise ValueError(f"{caller}: min_replicas={least}: must be at most the {num_up} ranks that are alive")
    room = num_up * slots
    if room < replicas:
        raise ValueError(
            f"{caller}: {num_up} ranks with slots_per_rank={slots} have {room} slots for {replicas} replicas: "
            f"slots_per_rank must be at least {-(-replicas // num_up)}"
        )
    return room


def _load(counts: Any, caller: str) -> np.ndarray:
    """Returns `counts [..., E]` added up, float64 `[E]`, or ones where all are zero. Raises ValueError unless the
    counts are finite numbers `>= 0`, and TypeError if they are no array or are traced."""
    array = known_array(counts, caller, "counts")
    is_number = array.dtype.kind in "iu" or jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim == 0 or array.shape[-1] == 0 or not is_number:
        raise ValueError(f"{caller}: counts is {array.dtype}{list(array.shape)}: must be numbers [E] or [..., E]")
    load = array.astype(np.float64).reshape(-1, array.shape[-1]).sum(axis=0)
    if not np.isfinite(load).all() or (array < 0).any():
        raise ValueError(f"{caller}: counts has negative or infinite entries: must be numbers of rows, >= 0")
    return load if load.any() else np.ones_like(load)


def _order_of_replicas(load: np.ndarray, least: int, most: int, ranks: int) -> np.ndarray:
    """Returns the experts that get a replica more than `least`, in the order in which they get it, at most `most`
    entries: the next expert is the one with the largest load for each replica. An expert has at most `ranks` replicas,
    and one without load gets no more than `least`."""
    heap = [
        (-value / least, expert, least) for expert, value in enumerate(load.tolist()) if ranks > least and value > 0
    ]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < most:
        _, expert, copies = heapq.heappop(heap)
        order.append(expert)
        if copies + 1 < ranks:
            heapq.heappush(heap, (-load[expert] / (copies + 1), expert, copies + 1))
    return np.asarray(order, np.int64)


def _pack_nodes(
    each: np.ndarray, copies: np.ndarray, nodes: list[list[int]], ranks: int, slots: int
) -> list[list[int]] | None:
    """Packs replicas into nodes and then into ranks. Returns the experts of each rank, or None if they do not fit.

    Args:
      each, copies: `[E]`, the load of one replica, and the number of replicas, of each expert.
      nodes: ranks of each node. ranks: number of all ranks. slots: of a rank.
    """
    sizes = [len(node) for node in nodes]
    held: list[list[int]] = [[] for _ in range(ranks)]
    by_node = _pack(each, copies, [slots * size for size in sizes], sizes)
    if by_node is None:
        return None
    for node, experts in zip(nodes, by_node, strict=True):
        inside = np.bincount(np.asarray(experts, np.int64), minlength=each.size)
        by_rank = _pack(each, inside, [slots] * len(node), [1] * len(node))
        if by_rank is None:
            return None
        for rank, row in zip(node, by_rank, strict=True):
            held[rank] = row
    return held


def _pack(each: np.ndarray, copies: np.ndarray, room: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
    """Returns the experts of each bin, or None if a replica finds no bin with room.

    Replicas are packed in descending order of their load, each into the bin with the least load for its size. Bin `b`
    takes `room[b]` replicas at most, and `sizes[b]` of one expert.
    """
    heap = [(0.0, b) for b in range(len(room)) if room[b]]
    held: list[list[int]] = [[] for _ in room]
    loads, numbers = each.tolist(), copies.tolist()
    for expert in np.argsort(-each, kind="stable").tolist():
        full: list[tuple[float, int]] = []
        taken: dict[int, int] = {}
        for _ in range(numbers[expert]):
            if not heap:
                return None
            load, b = heapq.heappop(heap)
            held[b].append(expert)
            taken[b] = taken.get(b, 0) + 1
            if len(held[b]) < room[b]:
                entry = load + loads[expert] / sizes[b], b
                if taken[b] < sizes[b]:
                    heapq.heappush(heap, entry)
                else:
                    full.append(entry)
        for entry in full:
            heapq.heappush(heap, entry)
    return held


def moves(old: Placement | None, new: Placement | None) -> np.ndarray:
    """Returns the experts that must travel between ranks from one placement to another, for a transfer outside of jit.

    Args:
      old, new: as in `Placement.move`; values, not traced.

    Returns:
      int32 `[N, 4]`, in ascending order of the last two: (rank, slot) of `old` that gives and (rank, slot) of `new`
      that gets. Slots that a rank fills from its own are among them, with equal ranks.

    Raises:
      ValueError: `old` holds an expert of `new` nowhere (fetch it from a checkpoint and move the rest), or the
        placements differ in ranks or experts. TypeError: `old` or `new` is no `Placement`, or both are None.
    """
    for name, placement in (("old", old), ("new", new)):
        if not isinstance(placement, Placement | None) or old is new is None:
            raise TypeError(
                f"balance.moves: {name} is a {type(placement).__name__}: must be a Placement, or one of the two None"
            )
    given: Any = new if old is None else old
    default = _home(given.num_experts, given.num_ranks)
    old, new = (jax.tree.map(np.asarray, p if p is not None else default) for p in (old, new))
    if (old.num_experts, old.num_ranks) != (new.num_experts, new.num_ranks):
        raise ValueError("balance.moves: the placements must be of the same experts and ranks")
    source = np.asarray(sources(old, new))
    lost = sorted(set(new.experts[source == -2].tolist()))
    if lost:
        raise ValueError(f"balance.moves: experts {lost} are nowhere in the old placement: fetch them elsewhere")
    rank, slot = np.nonzero(source >= 0)
    gives = source[rank, slot]
    table = [gives // old.slots_per_rank, gives % old.slots_per_rank, rank, slot]
    return np.stack(table, axis=1).astype(np.int32)
