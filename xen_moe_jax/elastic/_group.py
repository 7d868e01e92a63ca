"""`Group`: the membership of one process in a group, and the exchanges of operations over the group's axis."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from typing import Any

import numpy as np

from xen_moe_jax import _mesh, _validate, balance
from xen_moe_jax._numbers import positive_seconds
from xen_moe_jax._placement import Placement
from xen_moe_jax.backends.cuda.members import Members
from xen_moe_jax.elastic._board import LAST_STEP, MOST_SLOTS, Board
from xen_moe_jax.elastic._membership import Membership, Settled
from xen_moe_jax.elastic._rows import GaveUp, Rows

WATCH_S = 0.01
"""Seconds between two looks of the thread that watches the members while kernels, not the host, wait for them."""
ROOM_S = 600.0
"""Seconds for which members whose slots do not hold all experts wait for another member."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a group's members or of its placement. `view` and `step` are the same on all members; the other
    attributes may differ.

    Attributes:
      view: its number; each change has a larger one than the change before.
      step: the step that all members run next. It is the step that this process was to run, or the step before where a
        member had not completed that one: then run it again, and deliver nothing of it twice. For a newcomer it is the
        members' step.
      joined, lost: slots whose processes came or went since the set of which this process was a member before.
      fetch: pairs (slot for experts on this rank, expert) whose weights this rank must load before it runs `step`.
    """

    view: int
    step: int
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    fetch: tuple[tuple[int, int], ...]


def _step(step: Any, caller: str) -> int:
    """Returns the number of a step as an int.

    Raises:
      TypeError, ValueError: it is no whole number from 0 to `LAST_STEP`.
    """
    number = _validate.integer(step, "step", caller, minimum=0, maximum=None)
    if number > LAST_STEP:
        raise ValueError(f"{caller}: step={number}: must be <= {LAST_STEP}: count steps from 0, and not by a clock")
    return number


class Group:
    """One rank of a group of processes that come and go. Programs over the group's axis are plain `jax.jit` programs.

    group = elastic.Group("/dev/shm/server", slots=4, placement=placement)
    weights = load(group.experts)                          # compile and warm up: alone, no other process is waited for
    change = group.join(start_with=4)
    while serving:
        if change is not None:
            weights, step = fetch(weights, change.fetch), change.step
        if change := group.boundary(step):                 # lets processes in; None nearly always
            continue
        tokens = jax.block_until_ready(decode(step, weights, group.active(), group.placement))
        try:
            xm.check()
        except xm.OperationFailed:
            change = group.recover(step)                   # the step is retracted: run change.step
            continue
        deliver(step, tokens)                              # not those that were delivered before
        step += 1

    A group is a context manager: leaving it closes the group, and the members treat that as the death of this process.
    One thread calls the methods; JAX's threads call the exchanges of the programs.

    Attributes:
      rank, num_ranks: this process's rank, which is its slot, and `R`.
      placement: `Placement` of the experts on the members, the same on all of them; None if the group has none.
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
        """Takes a slot. It waits for no other process, except for the members to notice that the slot's last process
        has died.

        Args:
          folder: folder of the group, the same for all of its processes, which run on one host. It should lie in
            memory, such as under /dev/shm.
          slots: `R`, the largest number of ranks that the group ever has; the `num_ranks` of its programs.
          slot: this process's rank; None takes the lowest free one.
          axis_name: name of the axis in `dispatch` and `combine`. A process can open one group with a name, and no
            further one with that name after it has closed the first.
          placement: `Placement` of the experts on all `R` ranks, which says what a rank holds when it comes. None: the
            experts are at their homes, and no rank serves the experts of an absent rank.
          timeout_s: seconds for which a member that lives may keep the others waiting; then they go on without it.
            After a death a member that comes later than half of that is left out. The time to load weights between two
            steps counts.

        Raises:
          TypeError: `slots`, `slot`, `axis_name` or `placement` has a wrong type.
          ValueError: an argument is wrong, or other than that of the group in `folder`.
          RuntimeError: the slot, or every slot, belongs to a process that runs, or a process of the group cannot be
            watched from here, or a file of the group is damaged.
          OSError: the folder cannot be written, or has no room.
        """
        caller = "elastic.Group"
        self.num_ranks = _validate.integer(slots, "slots", caller, minimum=1)
        if self.num_ranks > MOST_SLOTS:
            raise ValueError(f"{caller}: slots={slots}: must be at most {MOST_SLOTS}")
        if slot is not None and not 0 <= _validate.integer(slot, "slot", caller, minimum=0) < self.num_ranks:
            raise ValueError(f"{caller}: slot={slot}: must be below slots={slots}")
        if not isinstance(axis_name, str):
            raise TypeError(f"{caller}: axis_name={axis_name!r}: must be a str")
        self._timeout_s = positive_seconds(timeout_s, "timeout_s", caller)
        if placement is not None:
            placement = _checked(placement, getattr(placement, "num_experts", 0), self.num_ranks, caller)
        self.axis_name = axis_name
        self._base = self.placement = placement
        self._wanted: Placement | None = None  # that of `rebalance`, until all members have adopted it
        self._wanted_at: int | None = None  # the first step of this view, if `_wanted` counts in it
        self._operations: set[str] = set()
        self.failed = ""  # why an operation has failed; failures of kernels are in their own records
        self._failing = threading.Lock()
        self._closed = False
        self._kernels: Members | None = None
        self._watcher: threading.Thread | None = None
        self._stopped = threading.Event()
        self._changing = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._board = Board(folder, self.num_ranks, self._timeout_s)
            undo.callback(self._board.close)
            told = None if placement is None else (placement.num_experts, placement.experts.tolist(), placement.sums)
            digest = hashlib.sha256(repr(told).encode()).hexdigest()
            self._membership = Membership(self._board, self.num_ranks, slot, digest, self._timeout_s)
            undo.callback(self._membership.leave)
            self.rank, claims = self._membership.slot, self._membership.claims()
            self._rows = Rows(self._board.folder / "rows", self.rank, self.num_ranks, claims, self._check_wait)
            _mesh.join(axis_name, self)
            undo.pop_all()
        # The expert in each slot of this rank once the last `Change` has been loaded. A caller that calls `recover`
        # instead of `boundary` may have loaded any part of that `Change`: slots in `_unsure` may hold another expert.
        self._held = None if placement is None else placement.experts[self.rank].copy()
        self._unsure: set[int] = set()
        if placement is not None:
            self.placement = self._placed(placement.without(self.active()))

    # -- for programs --------------------------------------------------------------------------------------------------

    @property
    def view(self) -> int:
        """Number of the present set of members; 0 before `join`."""
        return self._membership.number

    @property
    def experts(self) -> np.ndarray:
        """int32 `[S]`: the expert in each slot of this rank, -1 for an empty slot, once `fetch` of the last `Change`
        has been loaded.

        Raises:
          ValueError: the group was opened without a placement.
        """
        if self._held is None:
            raise ValueError("elastic.Group.experts: the group has no placement")
        return self._held.copy()

    def active(self) -> np.ndarray:
        """bool `[R]`, True for the members: the `active` of every operation over the axis. Before `join`, it is True
        for this rank alone."""
        mask = np.zeros(self.num_ranks, bool)
        mask[list(self._membership.members)] = True
        return mask

    # -- membership ----------------------------------------------------------------------------------------------------

    def join(self, *, start_with: int = 1, timeout_s: float = 600.0) -> Change:
        """Announces that this process is ready, and returns once the members have let it in, when a step begins.

        Args:
          start_with: number of processes that must be ready before a group without members begins.
          timeout_s: seconds to wait for being let in.

        Returns:
          `Change`, whose `step` is the members' step, or 0 where the group begins.

        Raises:
          TimeoutError: the members did not let this process in, or `start_with` processes were not ready. A further
            call tries again. Or this process is in, and the members' slots do not hold all experts, as in `boundary`.
          ValueError: `start_with` is more than the group's slots, `timeout_s` is not positive, or the members run other
            programs than this process.
          elastic.Evicted: the members went on without this process while it was coming in.
          RuntimeError: this process is a member already, the group is closed, or its file of programs was removed.
        """
        if _validate.integer(start_with, "start_with", "elastic.Group.join", minimum=1) > self.num_ranks:
            raise ValueError(f"elastic.Group.join: start_with={start_with}: must be at most slots={self.num_ranks}")
        timeout_s = positive_seconds(timeout_s, "timeout_s", "elastic.Group.join")
        self._open("join")
        if self.view:
            raise RuntimeError("elastic.Group.join: this process is a member already")
        self._membership.announce(sorted(self._operations))
        with self._changing:
            return self._adopt(self._membership.enter(start_with, timeout_s))

    def boundary(self, step: int) -> Change | None:
        """Changes the members where that is due. Call it before every step, while no program runs, and once the experts
        of the last `Change` are loaded.

        Args:
          step: number of the step that this process runs next, up to 2**40 - 2.

        Returns:
          `Change`, also where only the placement changes (`rebalance`); None where nothing has changed. To find that
          out, it reads three words of memory.

        Raises:
          elastic.Evicted: the other members have gone on without this process.
          TimeoutError: the slots of the ranks that are left do not hold all experts, and no other rank came within ten
            minutes, for which these ranks stood still.
          RuntimeError: the group is closed, this process has not joined, or kernels exchange and the members' memory
            could not be mapped.
          TypeError, ValueError: `step` is no such number.
        """
        self._open("boundary", member=True)
        step = _step(step, "elastic.Group.boundary")
        if self._unsure:  # the last `Change` named these slots, but for those that are empty in its placement
            assert self.placement is not None
            self._unsure = {s for s in self._unsure if self.placement.experts[self.rank, s] < 0}
        if self._wanted is not None:
            if self._wanted_at is None:
                self._membership.ask()
            elif step > self._wanted_at:  # a step has ended in this view, which needs all members: all adopted it
                self._wanted = None
        if not self._membership.due(step):
            return None
        self._membership.propose(urgent=False)
        return self._settle(step, self._wanted)

    def rebalance(self, placement: Placement) -> None:
        """Asks for another placement: from one of the next steps on, all members hold the experts as `placement` says.
        The call waits for nothing. Later every member gets a `Change` from `boundary` or `recover`, whose `fetch` names
        the experts that this member must load. Any one member makes the call; if it ends before that `Change`, another
        member has to make it again. If several members ask, each placement gets a `Change` of its own.

        Args:
          placement: of the same experts, ranks and slots as that of the group, such as `balance.plan` for the members
            (`alive=group.active()`). Ranks that are no members hold nothing. A member without any expert in it gets
            those that its rank holds when it comes, and an expert that no member would hold is given to one, as by
            `balance.repair`. Its `sums` are not read: those of the group stay.

        Raises:
          TypeError, ValueError: `placement` is not such a placement, or the group was opened without one.
          RuntimeError: the group is closed.
        """
        caller = "elastic.Group.rebalance"
        self._open("rebalance")
        if self._base is None:
            raise ValueError(f"{caller}: the group has no placement: open it with one")
        wanted = _checked(placement, self._base.num_experts, self.num_ranks, caller)
        if placement.slots_per_rank != self._base.slots_per_rank:
            raise ValueError(
                f"{caller}: placement has slots_per_rank={placement.slots_per_rank}: must be that of the group, "
                f"{self._base.slots_per_rank}"
            )
        self._wanted, self._wanted_at = wanted, None

    def recover(self, step: int) -> Change:
        """Agrees on the next set of members with the members that are left, and makes the group usable again.

        Call it after `xm.check` has raised, or after the loading of experts has, while no program runs. A process that
        has seen no failure need not be told: its own step fails. `Change.fetch` names the experts of earlier changes
        again for which no `boundary` has said that they are loaded.

        Args:
          step: number of the step that failed.

        Returns:
          `Change`, whose `step` is to be run again.

        Raises:
          The errors of `boundary`.
        """
        self._open("recover", member=True)
        step = _step(step, "elastic.Group.recover")
        self._membership.propose(urgent=True)
        return self._settle(step)

    def _settle(self, step: int, wanted: Placement | None = None) -> Change:
        """Arrives at the newest proposal as a member that is to run `step` next, and adopts the view that follows.
        `wanted`: the placement for which this member has asked, if it is to count in that view; None for no request.
        """
        given = self.placement if wanted is None else wanted
        share = b"" if given is None else np.asarray(given.experts, np.int32).tobytes()
        self._wanted_at = None
        with self._changing:
            settled = self._membership.settle(step, share, wanted=wanted is not None)
            change = self._adopt(settled)
        if wanted is not None and settled.share == share:  # else another member's counts: ask again for this one
            self._wanted_at = change.step
        return change

    def _adopt(self, settled: Settled) -> Change:
        """Goes on as a member of the view `settled`: exchanges with its members, forgets the failure, and computes the
        placement, which is the same on all members. Waits for further members where the slots do not hold all experts.
        """
        joined, lost = settled.joined, settled.lost
        while self._base is not None and self._room() < self._base.num_experts:
            settled = self._membership.settle_with_more(settled, ROOM_S)
            joined, lost = (*joined, *settled.joined), (*lost, *settled.lost)
        self._rows.enter(settled.number, self._membership.claims())
        self.failed = ""
        fetch: tuple[tuple[int, int], ...] = ()
        if self._base is not None:
            start = self._base.without(self.active())
            if settled.share:
                experts = np.frombuffer(settled.share, np.int32).reshape(self._base.experts.shape)
                start = balance.from_experts(experts, self._base.num_experts).without(self.active())
            self.placement = self._placed(balance.repair(self._placed(start), self.active()))
            mine, held = self.placement.experts[self.rank], self.experts
            named = [s for s, e in enumerate(mine) if e >= 0 and (e != held[s] or s in self._unsure)]
            fetch = tuple((s, int(mine[s])) for s in named)
            self._unsure.update(named)
            self._held = np.where(mine >= 0, mine, held)
        return Change(settled.number, settled.step, tuple(sorted({*joined})), tuple(sorted({*lost})), fetch)

    def _room(self) -> int:
        """Returns the number of slots for experts on all members together."""
        assert self._base is not None
        return int(self.active().sum()) * self._base.slots_per_rank

    def _placed(self, placement: Placement) -> Placement:
        """Returns `placement`, where a member without any expert gets the experts that a rank holds when it comes."""
        assert self._base is not None
        empty = self.active() & (placement.experts < 0).all(axis=1)
        experts = np.where(empty[:, None], self._base.experts, placement.experts)
        placed = balance.from_experts(experts, self._base.num_experts)
        return dataclasses.replace(placed, sums=self._base.sums)

    # -- for operations ------------------------------------------------------------------------------------------------

    def exchange(self, kind: str, key: int, x: np.ndarray) -> np.ndarray:
        """Runs one exchange of a program between the members.

        Args:
          kind: "gather" (`x` goes to all members) or "scatter" (`x [R, ...]`: entry `r` goes to member `r`).
          key: names the exchange; the same in every process.
          x: the array that this rank sends, of any shape and dtype.

        Returns:
          `[R, ...]` of the dtype of `x`: entry `r` came from member `r`, and is zero where `r` is no member. All zeros
          after a failure.
        """
        if self._usable():
            try:
                return self._rows.exchange(kind, key, x)
            except GaveUp as reason:
                self._fail(str(reason))
        return np.zeros(x.shape if kind == "scatter" else (self.num_ranks, *x.shape), x.dtype)

    def note(self, operation: dict[str, Any]) -> None:
        """Notes an operation of a program that is being compiled. `join` compares the noted operations with those of
        the group, but for two parameters that may differ between processes: the name of the axis and the time limit.
        Once this process is a member, nothing reads its notes, and none are made.

        Args:
          operation: name of the operation ("operation") and its static parameters, by name. The fields of the
            dataclasses `spec` and `config` are noted one by one.
        """
        if self.view:
            return
        words: dict[str, Any] = {}
        for name, value in operation.items():
            words.update(dataclasses.asdict(value) if name in ("spec", "config") else {name: value})
        told = {name: value for name, value in words.items() if name not in ("axis_name", "timeout_s")}
        self._operations.add(json.dumps(told, sort_keys=True, default=str))

    def good(self, operation: str, active: np.ndarray) -> bool:
        """Returns False if the group has failed, or if `active`, bool `[R]`, names other ranks than the members, which
        is a failure, too. `operation`: name of the operation, "" for an operation without `active`."""
        if operation and self._usable() and not np.array_equal(active, self.active()):
            self._fail(
                f"{operation}: active={active.astype(int).tolist()} and the members of view {self.view} are "
                f"{self._membership.members}: pass group.active() anew after every Change"
            )
        return self._usable()

    def _usable(self) -> bool:
        if self._closed and not self.failed:
            self._fail("a program ran over the axis of a closed elastic.Group", "open another one")
        return not self.failed

    def device_keys(self) -> np.ndarray:
        """Returns the GPUs of all ranks as the kernels know them, int64 `[1, R]`. The first call starts the memory of
        the kernels.

        Raises:
          RuntimeError: this process is a member already.
          BackendUnavailable, ValueError: as `backends.cuda.members.Members`.
        """
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
        """Ends the waits of kernels for a member that has gone, and all waits of kernels in a step that the other
        members have given up or that goes on for too long after a death (`Membership.waits_in_vain`)."""
        told: set[tuple[int, int]] = set()
        while not self._stopped.wait(WATCH_S):
            with self._changing:
                try:
                    self._look(told)
                except Exception as error:  # `xm.check` raises it, and this thread looks on
                    self._fail(f"looking after the members failed: {error!r}")

    def _look(self, told: set[tuple[int, int]]) -> None:
        """Looks once. `told`: pairs (view, member) of which the kernels have been told; -1 stands for all members."""
        view, members = self._membership.number, self._membership.members
        assert self._kernels is not None
        told.difference_update([(earlier, member) for earlier, member in told if earlier != view])
        for member in members:
            if (view, member) not in told and member != self.rank and self._membership.gone(member):
                self._kernels.mark_dead(member)
                told.add((view, member))
        others, alone = self._membership.interrupted(), self._membership.waits_in_vain()
        if (view, -1) not in told and view and (others or alone):
            if not others and not self._kernels.failure():  # that of the kernels would say that others gave up
                self._fail(f"{self._gone()}, and rank {self.rank} gave up this step {self._timeout_s / 8:g} s later")
            self._kernels.interrupt()
            told.add((view, -1))

    def _gone(self) -> str:
        """Returns in words which members of this view have gone; "" for none."""
        names = [f"rank {member}" for member in self._membership.members if self._membership.gone(member)]
        return f"{' and '.join(names)} ended or left the group" if names else ""

    def _stop_watching(self) -> None:
        """Ends the thread that watches the members, if there is one."""
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()

    def failure(self) -> str:
        """Returns why an operation has failed since the last `Change`, or since the group was closed; "" if none
        has."""
        kernels = None if self._closed else self._kernels
        return self.failed or (kernels.failure() if kernels is not None else "")

    def _fail(self, text: str, remedy: str = "call group.recover(step)") -> None:
        """Notes why an operation has failed, unless an earlier failure is noted already."""
        with self._failing:
            self.failed = self.failed or f"xen_moe_jax: {text}; {remedy}"

    def _check_wait(self, member: int, waited_s: float) -> None:
        """Checks a wait of an exchange for `member`, which has lasted for `waited_s` seconds.

        Raises:
          GaveUp: the wait must end: `member` has gone, the other members have given up the step, the wait has lasted
            for an eighth of the time limit while another member has gone, or it has lasted for the whole time limit.
        """
        if self._membership.gone(member):
            raise GaveUp(f"the process of rank {member} has ended")
        if self._membership.interrupted():
            raise GaveUp(f"the other members of view {self.view} have given up this step")
        if waited_s > self._timeout_s / 8 and (gone := self._gone()):
            raise GaveUp(f"{gone}, and rank {member} did not start an operation")
        if waited_s > self._timeout_s:
            raise GaveUp(
                f"rank {member} did not start an operation, and rank {self.rank} gave up after {waited_s:.1f} s"
            )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _open(self, caller: str, member: bool = False) -> None:
        """Raises RuntimeError, which names the method `caller`, if the group is closed, or if this process is to be a
        `member` and is none."""
        if self._closed:
            raise RuntimeError(f"elastic.Group.{caller}: the group is closed")
        if member and not self.view:
            raise RuntimeError(f"elastic.Group.{caller}: this process is no member: call join() before")

    def close(self) -> None:
        """Leaves the group, while no program runs; the members treat that as the death of this process. A further call
        does nothing.

        Raises:
          RuntimeError: the GPU did not become idle. The group is closed all the same, but the members are not told that
            this process has left, because its kernels may still store into their memory: they end it after `timeout_s`.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:
            last.callback(setattr, self, "failed", "")  # `xm.check` asks every group that this process has opened
            last.callback(self._rows.close)
            last.callback(self._board.close)
            self._stop_watching()
            if self._kernels is not None:
                self._kernels.leave()
            self._membership.leave()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _checked(placement: Any, num_experts: int, num_ranks: int, caller: str) -> Placement:
    """Returns a placement of these experts over these ranks, as NumPy arrays. A placement that one member adopts must
    be right for all of them.

    Raises:
      TypeError, ValueError: it is no such `Placement`, it has a batch of placements, or its slots hold experts that do
        not exist or that the rank has twice.
    """
    _validate.placement(placement, num_experts, num_ranks, caller)
    checked = balance.from_experts(placement.experts, num_experts)
    return dataclasses.replace(checked, sums=placement.sums)
