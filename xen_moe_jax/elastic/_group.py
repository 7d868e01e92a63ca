"""`Group`: one process's membership, and the operations that run over its axis."""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _mesh, _validate, balance
from xen_moe_jax._placement import Placement
from xen_moe_jax.backends.cuda.members import Members
from xen_moe_jax.elastic._board import MOST_SLOTS, Board
from xen_moe_jax.elastic._membership import Membership, Settled
from xen_moe_jax.elastic._rows import GaveUp, Rows

WATCH_S = 0.01
"""Interval in which a thread looks after the members where kernels wait for them, and not the host."""
ROOM_S = 600.0
"""How long members with too few slots for all experts wait for another one."""


@dataclasses.dataclass(frozen=True)
class Change:
    """What has changed in a group, the same for all members but for `joined`, `lost` and `fetch`.

    Attributes:
      view: number of the set of members; it only grows.
      step: the step to run next. It is the one that was to run, or the one before where a member had not completed it:
        run that step again, and deliver nothing of it twice. For a newcomer it is the members' step.
      joined, lost: slots, since the view that this process had before.
      fetch: pairs (slot of this rank, expert) whose weights this rank must load before the next step.
    """

    view: int
    step: int
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    fetch: tuple[tuple[int, int], ...]


class Group:
    """One rank of a group of processes that come and go. Programs over its axis are plain `jax.jit` programs.

    group = elastic.Group("/dev/shm/server", slots=4, placement=placement)
    weights = load(group.experts)                          # compile and warm up: alone, no other process is waited for
    group.join(start_with=4)
    while serving:
        change = group.boundary(step)                      # lets processes in; None nearly always
        ...                                                # load what change.fetch names
        tokens = jax.block_until_ready(decode(..., group.active(), group.placement))
        try:
            xm.check()
        except xm.OperationFailed:
            change = group.recover(step)                   # the step is retracted: run it again
            continue
        deliver(tokens)

    A context manager; leaving it tells the members that this process takes part no more, which they then treat as its
    death. Not for several threads, but for operations that JAX runs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        slots: int,
        *,
        slot: int | None = None,
        axis_name: str = "ep",
        placement: Placement | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Takes a slot; waits for no other process, unless for the death of the slot's last one to be noticed.

        Args:
          folder: of the group; the same for all of its processes, on one host. In memory, such as under /dev/shm.
          slots: `R`, the most ranks that the group ever has; `num_ranks` of its programs.
          slot: this process's rank; None takes the lowest that is free.
          axis_name: name of the axis in `dispatch` and `combine`; at most one group of a process has it, ever.
          placement: of experts on all `R` ranks: what a rank holds when it comes. None: experts are at their homes,
            and those of an absent rank are served by nobody.
          timeout_s: how long a member that lives may keep the others waiting; then they go on without it. Loading
            weights between two steps counts.

        Raises:
          ValueError: an argument is wrong, or other than that of the group in `folder`.
          RuntimeError: the slot, or every slot, belongs to a process that runs.
        """
        caller = "elastic.Group"
        self.num_ranks = _validate.integer(slots, "slots", caller, minimum=1)
        if self.num_ranks > MOST_SLOTS:
            raise ValueError(f"{caller}: slots={slots}: must be at most {MOST_SLOTS}")
        if slot is not None and not 0 <= _validate.integer(slot, "slot", caller, minimum=0) < self.num_ranks:
            raise ValueError(f"{caller}: slot={slot}: must be below slots={slots}")
        if not isinstance(axis_name, str):
            raise TypeError(f"{caller}: axis_name={axis_name!r}: must be a str")
        if timeout_s <= 0:
            raise ValueError(f"{caller}: timeout_s={timeout_s!r}: must be positive seconds")
        if placement is not None:
            _validate.placement(placement, placement.num_experts, self.num_ranks, caller)
            placement = jax.tree.map(np.asarray, placement)
        self.axis_name = axis_name
        self._timeout_s = float(timeout_s)
        self._board = Board(folder, self.num_ranks)
        self._membership = Membership(self._board, self.num_ranks, slot, self._timeout_s)
        self.rank = self._membership.slot
        self._rows = Rows(self._board.folder / "rows", self.rank, self.num_ranks, self._check_wait)
        self._base = self.placement = placement
        self._held = None if placement is None else placement.experts[self.rank].copy()
        self._failure = ""
        self._failing = threading.Lock()
        self._closed = False
        self._kernels: Members | None = None
        self._watcher: threading.Thread | None = None
        self._stopped = threading.Event()
        self._changing = threading.Lock()
        _mesh.join(axis_name, self)
        if placement is not None:
            self.placement = self._placed(placement.without(self.active()))

    # -- for programs --------------------------------------------------------------------------------------------------

    @property
    def view(self) -> int:
        """Number of the set of members; 0 before `join`."""
        return self._membership.number

    @property
    def experts(self) -> np.ndarray:
        """int32 `[S]`: the expert in each slot of this rank, -1 for none, as the last `Change` left it."""
        if self._held is None:
            raise ValueError("elastic.Group.experts: the group has no placement")
        return self._held.copy()

    def active(self) -> np.ndarray:
        """bool `[R]`, True for the members: the `active` of every operation over the axis. This rank alone before
        `join`."""
        mask = np.zeros(self.num_ranks, bool)
        mask[list(self._membership.members)] = True
        return mask

    # -- membership ----------------------------------------------------------------------------------------------------

    def join(self, *, start_with: int = 1, timeout_s: float = 600.0) -> Change:
        """Says that this process is ready, and returns once the members have let it in, at the beginning of a step.

        Args:
          start_with: how many processes must be ready where the group has no members.
          timeout_s: how long to wait.

        Raises:
          TimeoutError: nobody let it in.
        """
        _validate.integer(start_with, "start_with", "elastic.Group.join", minimum=1)
        self._open("join")
        if self.view:
            raise RuntimeError("elastic.Group.join: this process is a member already")
        self._membership.announce()
        with self._changing:
            return self._adopt(self._membership.enter(start_with, timeout_s))

    def boundary(self, step: int) -> Change | None:
        """Call it before every step, with the number of the step, when nothing runs. Returns None where nothing has
        changed, at the price of reading three words of memory.

        Raises:
          elastic.Evicted: the others have gone on without this process.
          TimeoutError: the ranks that are left have too few slots for all experts, and no other came for ten minutes,
            in which they stand still.
        """
        self._open("boundary")
        if not self._membership.due(step):
            return None
        self._membership.propose(urgent=False)
        return self._settle(step)

    def recover(self, step: int) -> Change:
        """After a failure: agrees with the members that are left on who they are, and makes the group usable again.

        Call it when nothing runs, in the process that has seen the failure; the others see it by themselves.

        Args:
          step: the step that failed.

        Raises:
          As `boundary`.
        """
        self._open("recover")
        self._membership.propose(urgent=True)
        return self._settle(step)

    def _settle(self, step: int) -> Change:
        share = b"" if self.placement is None else np.asarray(self.placement.experts, np.int32).tobytes()
        step = _validate.integer(step, "step", "elastic.Group", minimum=0)
        with self._changing:
            return self._adopt(self._membership.settle(step, share))

    def _adopt(self, settled: Settled) -> Change:
        joined, lost = settled.joined, settled.lost
        while self._base is not None and self._room() < self._base.num_experts:
            settled = self._membership.settle_with_more(settled, ROOM_S)
            joined, lost = (*joined, *settled.joined), (*lost, *settled.lost)
        self._rows.enter(settled.number, settled.members)
        self._failure = ""
        fetch: tuple[tuple[int, int], ...] = ()
        if self._base is not None:
            start = self._base.without(self.active())
            if settled.share:
                experts = np.frombuffer(settled.share, np.int32).reshape(self._base.experts.shape)
                start = balance.from_experts(experts, self._base.num_experts).without(self.active())
            self.placement = self._placed(balance.repair(self._placed(start), self.active()))
            mine = self.placement.experts[self.rank]
            fetch = tuple((int(s), int(mine[s])) for s in np.flatnonzero((mine != self._held) & (mine >= 0)))
            self._held = np.where(mine >= 0, mine, self._held)
        return Change(settled.number, settled.step, tuple(sorted({*joined})), tuple(sorted({*lost})), fetch)

    def _room(self) -> int:
        """Slots of the members that can hold an expert."""
        assert self._base is not None
        return int(self.active().sum()) * self._base.slots_per_rank

    def _placed(self, placement: Placement) -> Placement:
        """`placement`, with what a rank holds when it comes on members that have nothing in it."""
        assert self._base is not None
        empty = self.active() & (placement.experts < 0).all(axis=1)
        experts = np.where(empty[:, None], self._base.experts, placement.experts)
        return balance.from_experts(experts, self._base.num_experts)

    # -- for operations ------------------------------------------------------------------------------------------------

    def exchange(self, kind: str, key: int, x: np.ndarray) -> np.ndarray:
        """Runs an exchange of a program; zeros after a failure."""
        if not self._failure:
            try:
                return self._rows.exchange(kind, key, x)
            except GaveUp as reason:
                self._fail(str(reason))
        return np.zeros(x.shape if kind == "scatter" else (self.num_ranks, *x.shape), x.dtype)

    def good(self, operation: str, active: np.ndarray) -> bool:
        """Whether the results of an operation are good. `operation`: "" for one without `active`."""
        if operation and not self._failure and not np.array_equal(active, self.active()):
            self._fail(
                f"{operation}: active={active.astype(int).tolist()} and the members of view {self.view} are "
                f"{self._membership.members}: pass group.active() anew after every Change"
            )
        return not self._failure

    def device_keys(self) -> np.ndarray:
        """int64 `[1, R]`: this rank's GPU and those of the others, as the kernels know them. Starts their memory."""
        if self._kernels is None:
            if self.view:
                raise RuntimeError(
                    "elastic.Group: the first program with backend='cuda' was compiled after join(): compile and run "
                    "every program before"
                )
            self._kernels = self._membership.memory = Members(self.rank, self.num_ranks)
            self._watcher = threading.Thread(target=self._watch, name="xen_moe_jax members", daemon=True)
            self._watcher.start()
            atexit.register(self._stop_watching)  # a thread inside the module when the interpreter ends would abort it
        return self._kernels.keys

    def _watch(self) -> None:
        """Tells kernels that wait when they wait in vain."""
        told: set[tuple[int, int]] = set()
        while not self._stopped.wait(WATCH_S):
            with self._changing:
                view, members = self._membership.number, self._membership.members
                assert self._kernels is not None
                for member in members:
                    if (view, member) not in told and member != self.rank and self._membership.gone(member):
                        told.add((view, member))
                        self._kernels.mark_dead(member)
                if (view, -1) not in told and view and self._membership.interrupted():
                    told.add((view, -1))
                    self._kernels.interrupt()

    def _stop_watching(self) -> None:
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()

    def failure(self) -> str:
        """Why an operation has failed since the last `Change`; "" if none has."""
        text = self._failure or (self._kernels.failure() if self._kernels is not None else "")
        told, reset, _ = text.partition(" Call xen_moe_jax.cuda.reset()")
        return f"{told} Call group.recover(step)" if reset else text

    def _fail(self, text: str) -> None:
        with self._failing:
            self._failure = self._failure or f"xen_moe_jax: {text}; call group.recover(step)"

    def _check_wait(self, member: int, waited_s: float) -> None:
        if self._membership.gone(member):
            raise GaveUp(f"the process of rank {member} has ended")
        if self._membership.interrupted():
            raise GaveUp(f"the other members of view {self.view} have given up this step")
        if waited_s > self._timeout_s:
            raise GaveUp(
                f"rank {member} did not start an operation, and rank {self.rank} gave up after {waited_s:.1f} s"
            )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _open(self, caller: str) -> None:
        if self._closed:
            raise RuntimeError(f"elastic.Group.{caller}: the group is closed")

    def close(self) -> None:
        """Leaves the group. The members treat it as a death. May be called again."""
        if not self._closed:
            self._closed = True
            self._stop_watching()
            self._membership.leave()
            self._board.close()
            self._failure = "xen_moe_jax: the elastic.Group is closed"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
