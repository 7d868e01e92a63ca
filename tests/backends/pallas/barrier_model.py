"""Explores every interleaving of kernels that signal, wait and send by the rules of `pallas_kernels.peers`.

A rank runs its kernels one after the other. A step of a rank, or with `delayed` the arrival of one signal or row, is
one transition; all reachable states are visited. Faults have names:
  early send      a row is sent to a rank that is not inside the kernel
  borrowed        a wait is satisfied by signals of another kernel
  stray           a credit or row arrives at a rank that is not inside the kernel
  not at rest     a semaphore that is not zero when all is done
  deadlock        nothing can move and not all is done
"""

from __future__ import annotations

from typing import NamedTuple

from xen_moe_jax.pallas_kernels import peers

ROWS = "rows"


class Kernel(NamedTuple):
    """Attributes:
    steps: as in `peers`. groups: which ranks reach each other. barrier: id of its barrier semaphore.
    traffic: every rank sends each of its peers a row, or no rank sends any.
    starts: number of the kernel whose rows it drains, if not its own.
    """

    steps: tuple
    groups: tuple[tuple[int, ...], ...]
    barrier: int
    traffic: bool = True
    starts: int | None = None

    def group(self, rank: int) -> tuple[int, ...]:
        return next(g for g in self.groups if rank in g)


def explore(kernels: list[Kernel], ranks: int, *, delayed: bool) -> tuple[set[str], int]:
    """Returns the faults that are reachable, and the number of states."""
    numbers = range(len(kernels))
    barriers = sorted({k.barrier for k in kernels})
    semaphores = [*((peers.BARRIER, b) for b in barriers), (peers.CREDITS, 0), *((ROWS, k) for k in numbers)]
    slots = {key: i for i, key in enumerate((s, r, k) for s in semaphores for r in range(ranks) for k in numbers)}
    where = list(slots)
    found: set[str] = set()

    def semaphore(name: str, kernel: int) -> tuple[str, int]:
        if name == peers.BARRIER:
            return name, kernels[kernel].barrier
        return (name, 0) if name == peers.CREDITS else (ROWS, kernel)

    def inside(state, rank: int, kernel: int) -> bool:
        at = state[0][rank]
        owner = kernels[at[0]].starts if at[0] < len(kernels) else None
        started = at[0] == kernel and at[1] >= 0
        # rows of a start kernel may arrive until its done kernel has run
        return started or owner == kernel or (kernel < at[0] < len(kernels) and _awaits(kernels, kernel, at[0]))

    def arrive(state, slot: int):
        (name, _), rank, kernel = where[slot]
        if name != peers.BARRIER and not inside(state, rank, kernel):
            found.add("stray")
        return _add(state[1], slot, 1)

    def step(state, rank: int):
        """The state after `rank` moves on; None if it waits."""
        number, at, peer = state[0][rank]
        if at < 0:  # enters: from here on its buffers are this kernel's
            return _put(state[0], rank, (number, 0, 0)), *state[1:]
        kernel = kernels[number]
        action, group = kernel.steps[at], kernel.group(rank)
        arrived, flying = state[1], state[2]
        last = peer == len(group) - 1
        if isinstance(action, peers.Signal | peers.Send):
            to = group[peer]
            row = isinstance(action, peers.Send)
            if row and kernel.traffic and not inside(state, to, number):
                found.add("early send")
            if not row or kernel.traffic:
                slot = slots[semaphore(ROWS if row else action.semaphore, number), to, number]
                if delayed and to != rank:
                    flying = _add(flying, slot, 1)
                else:
                    arrived = arrive(state, slot)
        else:
            owner = number if kernel.starts is None else kernel.starts
            drain = isinstance(action, peers.Drain)
            needed = len(group) if not drain or kernel.traffic else 0
            name = ROWS if drain else action.semaphore
            tags = [slots[semaphore(name, owner), rank, k] for k in numbers]
            if sum(arrived[s] for s in tags) < needed:
                return None
            if arrived[tags[owner]] < needed:
                found.add("borrowed")
            for slot in (tags[owner], *tags):  # one counter: it cannot tell its own from others
                taken = min(arrived[slot], needed)
                arrived, needed = _add(arrived, slot, -taken), needed - taken
            last = True
        if not last:
            return _put(state[0], rank, (number, at, peer + 1)), arrived, flying
        after = (number, at + 1, 0) if at + 1 < len(kernel.steps) else (number + 1, -1, 0)
        return _put(state[0], rank, after), arrived, flying

    first = (((0, -1, 0),) * ranks, (0,) * len(slots), (0,) * len(slots))
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        reached = []
        for rank in range(ranks):
            if state[0][rank][0] < len(kernels) and (after := step(state, rank)) is not None:
                reached.append(after)
        reached += [(state[0], arrive(state, slot), _add(state[2], slot, -1)) for slot, n in enumerate(state[2]) if n]
        if not reached:
            if any(at[0] < len(kernels) for at in state[0]):
                found.add("deadlock")
            elif any(state[1]):
                found.add("not at rest")
        for after in reached:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return found, len(seen)


def _awaits(kernels: list[Kernel], started: int, at: int) -> bool:
    """True if rows of kernel `started` may still arrive at a rank that is in kernel `at`."""
    return any(k.starts == started for k in kernels[at:])


def _put(places, rank: int, place):
    return (*places[:rank], place, *places[rank + 1 :])


def _add(counts, slot: int, n: int):
    return (*counts[:slot], counts[slot] + n, *counts[slot + 1 :])
