"""The members of a group, and how they agree on their set.

A *view* is a numbered set of members. A process that finds that the set must change writes a *proposal* with the next
number under the group's lock; every process that the proposal names *arrives*, and goes on once all of them have
arrived. If one of them dies meanwhile, or does not come in time, a further proposal leaves it out. Operations of
different views never meet, because the mark of each row names its view. A process that a proposal leaves out learns
that before its next operation ends, and no member reads rows of it.

A process takes its slot by a *claim*, which has a number of its own. The *identity* of a member is that of its process
and the number of its claim: the next process in a slot, and the next group of one process, have another identity.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import math
import os
import select
import threading
import time
from typing import Any, Protocol

from xen_moe_jax.backends.cuda import liveness
from xen_moe_jax.elastic._board import CHANGE, LEFT, LOOKS, PROPOSAL, STEP_BITS, URGENT, WAITING, Board, fence

PAUSE_S = 0.0005
"""Seconds between two looks for the files of a proposal."""
GRACE_S = 1.0
"""Seconds for which a member may stay in a step while another member waits for it in the next view. In the normal case
the wait is short: no member waits there before its own step has ended, and a step ends with the rows of all members.
Only a process that was stopped, and then wrote an old `CHANGE`, makes one member begin a step that another one does
not begin."""

MOST_COMPARED = 64
"""Operations of each process that are compared with each other for an error's text, which names the two most similar
ones."""


class Evicted(RuntimeError):
    """The other members went on without this process, because it did not come in time: within `Group.timeout_s`, or,
    where the members agree after a death, within half of it. The process may end, or close this group and open one with
    another `axis_name`. Where kernels exchange, the other members end such a process: its GPU could store into their
    memory later."""


@dataclasses.dataclass(frozen=True)
class Settled:
    """A view on which all of its members have agreed.

    Attributes:
      number, members: number and slots of the view.
      joined, lost: slots whose processes came or went since this process's view before.
      step: the lowest step that an old member was to run next; 0 where no member is old.
      share: bytes that an old member gives to all; empty where no member is old.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    step: int
    share: bytes


class Memory(Protocol):
    """Memory of a rank that the members map anew in every view: `backends.cuda.members.Members`. Other processes may
    store into it while it is mapped."""

    def programs(self) -> dict[str, Any]:
        """Returns what must be the same on all members."""

    def arrive(self) -> Any:
        """Ends operations that wait, and returns what the other members need to map this rank's memory, as a value that
        JSON can hold."""

    def adopt(self, view: int, shown: dict[int, Any]) -> None:
        """Maps the memory of the members of view `view`, and starts again with them. `shown`: by rank, what `arrive`
        returned there."""


class Membership:
    """This process in a slot of a group. Before it is let in, its view has number 0 and itself as the only member.

    Args:
      board: the group's files.
      slots: number of slots of the group.
      slot: the slot to take; None takes the lowest free one.
      placement: text that is the same for equal placements of the experts, and for no others.
      timeout_s: seconds that this process waits for a member that lives.

    Raises:
      RuntimeError: the slot, or every slot, belongs to a process that runs.
      ValueError: the processes of the group have another placement, or another number of slots.
    """

    def __init__(self, board: Board, slots: int, slot: int | None, placement: str, timeout_s: float) -> None:
        self._board, self._slots, self._placement, self._timeout_s = board, slots, placement, timeout_s
        self._process = liveness.identity()
        self._held: dict[str, int | None] = {}  # by process: a pidfd, or None for a process that has ended
        self._polls: dict[int, select.poll] = {}
        self._looking = threading.Lock()
        try:
            self.slot, self._identity = self._claim(slot)
        except BaseException:
            self._look_no_more()
            raise
        self.number, self._identities = 0, {self.slot: self._identity}
        self.members: tuple[int, ...] = (self.slot,)
        self.memory: Memory | None = None
        self._newer = 0, 0.0  # the newest proposal that `interrupted` has found, and when
        self._gone_at: float | None = None  # when this process first found that a member of this view was killed

    def _claim(self, slot: int | None) -> tuple[int, str]:
        """Takes a slot that no living process has; returns it and the identity of this claim. A dead member's slot
        becomes free once a member has proposed a view without it."""
        limit = time.monotonic() + self._timeout_s
        while True:
            with self._board.locked():
                state = self._board.read()
                if state["members"] and all(self._away(*member) for member in state["members"].items()):
                    state["members"] = {}  # the whole group has ended: this one is the next
                    self._board.words[WAITING] = self._board.words[CHANGE] = 0
                claims = {s: c for s, c in state["claims"].items() if not self._ended(c["identity"])}
                if not claims and not state["members"]:  # the first process says what the others must have
                    state["placement"], state["slots"] = self._placement, self._slots
                elif state["slots"] != self._slots:
                    raise ValueError(
                        f"elastic.Group: slots={self._slots}: the group in {self._board.folder} has {state['slots']}: "
                        "give all of its processes the same, or use another folder"
                    )
                elif state["placement"] != self._placement:
                    raise ValueError(
                        f"elastic.Group: placement: the processes of the group in {self._board.folder} have another "
                        "one, or one of them has none: give all of them the same, or use another folder"
                    )
                taken = {int(s) for s in (*claims, *state["members"])}
                free = [s for s in range(self._slots) if s not in taken]
                if slot in free or (slot is None and free):
                    mine = free[0] if slot is None else slot
                    state["claimed"] += 1
                    identity = f"{self._process} {state['claimed']}"
                    state["claims"] = {**claims, str(mine): {"identity": identity, "ready": False}}
                    self._board.write(state)
                    return mine, identity
            if time.monotonic() > limit:
                which = "every slot" if slot is None else f"slot {slot}"
                raise RuntimeError(
                    f"elastic.Group: {which} of {self._slots} belongs to a process that runs: end it first"
                )
            time.sleep(0.01)

    # -- who has ended -------------------------------------------------------------------------------------------------

    def _ended(self, identity: str) -> bool:
        """Returns True if the process has ended. A process that is stopped or busy has not."""
        process = identity.rsplit(" ", 1)[0]
        if process == self._process:
            return False
        with self._looking:
            return self._look(process)

    def _look(self, process: str) -> bool:
        """Returns what `_ended` does, for an identity of `liveness`. The caller holds `_looking`.

        Raises:
          RuntimeError: the process cannot be watched from here.
        """
        if process not in self._held:
            try:
                self._held[process] = descriptor = liveness.hold(process)
            except ProcessLookupError:
                self._held[process] = descriptor = None
            else:
                if descriptor is None:
                    raise RuntimeError(
                        f"elastic.Group: process {process} cannot be watched: one host, one PID namespace"
                    )
            if descriptor is not None:
                self._polls[descriptor] = select.poll()
                self._polls[descriptor].register(descriptor, select.POLLIN)
        descriptor = self._held[process]
        if descriptor is None:
            return True
        if self._polls[descriptor].poll(0):
            del self._polls[descriptor]
            os.close(descriptor)
            self._held[process] = None
            return True
        return False

    def gone(self, slot: int) -> bool:
        """Returns True if the member in this slot has ended, or has left the group, or if the newest proposal at which
        this process has arrived does not name the slot."""
        if (identity := self._identities.get(slot)) is None:
            return True
        ended = self._ended(identity)  # before the next look: a process first leaves and then ends
        left = self._left(slot, identity)
        if ended and not left and self._gone_at is None:  # one that leaves has ended its last step, and so can others
            self._gone_at = time.monotonic()
        return ended or left

    def waits_in_vain(self) -> bool:
        """Returns True if this process found more than an eighth of the time limit ago that a member was killed.

        A member that has ended may have sent all of its rows before. Then no member waits for it in this step, which
        another member may hold up because it is stopped or slow. The next step cannot end without the member that has
        ended, so the members agree on the next view, and do not wait for the end of this step.
        """
        return self._gone_at is not None and time.monotonic() - self._gone_at > self._timeout_s / 8

    def _away(self, slot: str | int, identity: str) -> bool:
        """Returns True if the process with this identity in `slot` has ended, or has left the group."""
        return self._left(slot, identity) or self._ended(identity)

    def _left(self, slot: str | int, identity: str) -> bool:
        """Returns True if the process with this identity in `slot` has left the group."""
        return self._board.words[LEFT + int(slot)] >= _claim_of(identity)

    def claims(self) -> dict[int, int]:
        """Returns the number of each member's claim, by slot."""
        return {slot: _claim_of(identity) for slot, identity in self._identities.items()}

    def interrupted(self) -> bool:
        """Returns True if the other members have given up the step under way, which then cannot end, or if one of them
        has been waiting for this process for `GRACE_S`."""
        if self._board.words[URGENT] > self.number:
            return True
        proposal, now = self._board.words[PROPOSAL], time.monotonic()
        if self._newer[0] != proposal:
            self._newer = proposal, now
        return proposal > self.number and now - self._newer[1] > GRACE_S

    # -- coming in -----------------------------------------------------------------------------------------------------

    def announce(self, operations: list[str]) -> None:
        """Tells the members that this process is ready to be let in.

        Args:
          operations: those of this process's programs, each a JSON object.

        Raises:
          ValueError: the members, or the processes that wait with this one, run other programs.
          RuntimeError: the file of the group's programs was removed.
        """
        mine = {"operations": operations, "memory": {} if self.memory is None else self.memory.programs()}
        with self._board.locked():
            state = self._board.read()
            own = self._own_claim(state)
            first = all(self._away(*m) for m in state["members"].items()) and not self._ready(state)
            theirs = mine if first else self._board.get("programs.json")
            if theirs is not None and _alike(mine, theirs):
                both = sorted({*operations, *theirs["operations"]})  # the next process is compared with all of them
                self._board.put("programs.json", {**mine, "operations": both})
                own["ready"] = True
                self._board.write(state)
                self._board.words[WAITING] = 1
                return
        if theirs is None:
            raise RuntimeError(
                f"elastic.Group.join: {self._board.folder / 'programs.json'}, with which this process compares its "
                "programs, was removed while the group runs: end the group, or open one in another folder"
            )
        raise ValueError(
            "elastic.Group.join: this process has compiled other programs than the group: "
            f"{_differences(mine, theirs)}; compile and run the same programs, with the same shapes, before join(), or "
            "open a group in another folder"
        )

    def enter(self, start_with: int, timeout_s: float) -> Settled:
        """Waits to be let in. In a group without members, a process begins it with all ready processes once they are
        `start_with` or more.

        Raises:
          TimeoutError: this process was not let in within `timeout_s`. It is not ready any more.
          Evicted: this process was let in, and did not come in time.
        """
        limit = time.monotonic() + timeout_s
        while True:
            with self._board.locked():
                state = self._board.read()
                if state["members"].get(str(self.slot)) == self._identity:
                    break
                own = self._own_claim(state)
                if time.monotonic() > limit:
                    own["ready"] = False
                    self._board.write(state)
                    raise TimeoutError(
                        f"elastic.Group: slot {self.slot} was not let in within {timeout_s:g} s: the members call "
                        f"boundary() at every step, and a new group starts with {start_with} ready processes"
                    )
                if all(self._away(*member) for member in state["members"].items()):
                    state["members"] = {}
                    if len(self._ready(state)) >= start_with:
                        self._propose(state, urgent=False)
                        break
            time.sleep(0.002)
        return self.settle(0, b"", old=False)

    def _own_claim(self, state: dict) -> dict[str, Any]:
        """Returns the claim of this process, which is not a member."""
        own = state["claims"].get(str(self.slot), {})
        if own.get("identity") != self._identity:
            raise Evicted(f"elastic.Group: the members went on without slot {self.slot}: open a new group")
        return own

    def _ready(self, state: dict) -> dict[str, str]:
        """Returns the living processes that wait to be let in: identity by slot."""
        claims = state["claims"].items()
        return {s: c["identity"] for s, c in claims if c["ready"] and not self._ended(c["identity"])}

    def due(self, step: int) -> bool:
        """Returns True if the view changes at the beginning of `step`. Reads three words.

        The member with the lowest slot decides: at the beginning of step `s` it writes that the change is at `s + 1`.
        No member begins `s + 1` before this is written, because no step ends without all members.
        """
        words, view = self._board.words, self.number % (1 << 24) << STEP_BITS
        waiting, change = words[WAITING], words[CHANGE] - view
        fence()
        if words[PROPOSAL] != self.number:  # read last: a process clears CHANGE after it has written PROPOSAL
            return True
        planned = 0 < change < 1 << STEP_BITS  # else no change, or one that a process of an older view has written
        if waiting and not planned and self.slot == self.members[0]:
            words[CHANGE] = view + step + 1
        return planned and change <= step

    # -- agreeing ------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Lets the members change the view at one of the next boundaries, as for a process that waits."""
        self._board.words[WAITING] = 1

    def propose(self, *, urgent: bool) -> None:
        """Proposes the next view, of all living members and all ready processes, unless another process already has.
        `urgent`: interrupts steps under way, and lets no process in while a member lives."""
        with self._board.locked():
            state = self._board.read()
            if state["proposal"] == self.number:
                self._propose(state, urgent=urgent)

    def _propose(self, state: dict, *, urgent: bool, without: tuple[int, ...] = ()) -> None:
        """Writes a proposal that leaves out the slots `without`. The caller holds the lock, under which it read
        `state`."""
        left = {s: i for s, i in state["members"].items() if int(s) not in without and not self._away(s, i)}
        ready = {s: i for s, i in self._ready(state).items() if int(s) not in without and s not in left}
        if urgent and left:
            ready = {}  # the members that are left go on first; ready processes come in at the next boundary
        state["proposal"] += 1
        if urgent:
            state["urgent"] = state["proposal"]
        state["members"] = {**left, **ready}
        state["claims"] = {
            s: c for s, c in state["claims"].items() if s not in ready and not self._ended(c["identity"])
        }
        self._board.write(state)
        self._publish(state)

    def _publish(self, state: dict) -> None:
        """Writes the words that belong to the newest proposal. The caller holds the lock. The process that has written
        the state may have been killed before it did so."""
        words = self._board.words
        words[URGENT] = state.get("urgent", 0)
        words[PROPOSAL] = state["proposal"]
        fence()
        words[CHANGE], words[WAITING] = 0, int(any(c["ready"] for c in state["claims"].values()))

    def settle(self, step: int, share: bytes, *, old: bool = True, wanted: bool = False) -> Settled:
        """Arrives at the newest proposal, and returns the view once all processes that it names have arrived.

        Args:
          step: the step that this process is to run next.
          share: bytes for all members. The bytes of one old member count: of the lowest slot with `wanted`, or of the
            lowest slot where no old member has `wanted`.
          old: whether this process was a member before.
          wanted: whether `share` goes before the bytes of members without `wanted`.

        Raises:
          Evicted: the newest proposal does not name this process.
        """
        before = dict(self._identities) if old else {}
        limits: dict[str, float] = {}  # of members that have arrived at no proposal yet: until when they are awaited
        awaited_since = self._gone_at
        while True:
            began = time.monotonic()
            with self._board.locked():
                state = self._board.read()
                if state["members"].get(str(self.slot)) == self._identity:
                    self._publish(state)
                    self._look_no_more(but_at=state)
            number, members = state["proposal"], {int(s): i for s, i in state["members"].items()}
            if members.get(self.slot) != self._identity:
                raise Evicted(
                    f"elastic.Group: the members went on without slot {self.slot} in view {number}: it did not come "
                    f"within {self._timeout_s:g} s, or after a death within half of that"
                )
            for slot, identity in self._identities.items():
                if members.get(slot) != identity:
                    self._shut_out(slot, identity)
            self._identities = members
            shown = None if self.memory is None else self.memory.arrive()
            says = {"old": old, "step": step, "share": base64.b64encode(share).decode(), "memory": shown}
            says["wanted"] = wanted
            self._board.put(f"arrived.{number}.{self.slot}", says)
            now = time.monotonic()  # the time that this process took to come here itself counts against no member
            limits = {identity: until + now - began for identity, until in limits.items()}
            limit = now + self._timeout_s
            if awaited_since is not None:  # since then, but a member may be late by half of the limit
                limit, awaited_since = max(awaited_since + self._timeout_s, now + self._timeout_s / 2), None
            for identity in members.values():
                limits.setdefault(identity, limit)
            arrived = self._await("arrived", number, limits)
            if arrived is None:
                continue
            if self.memory is None:
                break
            try:
                self.memory.adopt(number, {s: a["memory"] for s, a in arrived.items()})
            except RuntimeError:
                if not self._ended_meanwhile(number):
                    raise
                continue
            self._board.put(f"adopted.{number}.{self.slot}", True)  # no rank stores where another has yet to clear
            if self._await("adopted", number, {}) is not None:
                break
        olds = {s: a for s, a in arrived.items() if a["old"]}
        self.number, self.members, self._gone_at = number, tuple(sorted(members)), None
        for path in self._board.folder.glob(f"a*.*.{self.slot}"):
            if int(path.name.split(".")[1]) < number - 1:  # others may still read the newest two
                path.unlink(missing_ok=True)
        gives = olds[min(olds, key=lambda s: (not olds[s]["wanted"], s))] if olds else {"share": ""}
        return Settled(
            number,
            self.members,
            joined=tuple(s for s in self.members if before.get(s) != members[s]),
            lost=tuple(s for s, identity in before.items() if members.get(s) != identity),
            step=min((a["step"] for a in olds.values()), default=0),
            share=base64.b64decode(gives["share"]),
        )

    def _shut_out(self, slot: int, identity: str) -> None:
        """Returns once a process that is no member any more, or never became one, stores into no member's memory."""
        if self.memory is None or slot == self.slot or self._away(slot, identity):
            return  # through the host a process writes into its own memory alone; one that leaves waits for its GPU
        pid = int(identity.split()[2])
        if not liveness.end(pid):
            raise RuntimeError(
                f"elastic.Group: process {pid} of slot {slot} did not come in time and cannot be ended "
                "from here, and its GPU may still store into the memory of this one: end it, and this one"
            )

    def settle_with_more(self, settled: Settled, timeout_s: float) -> Settled:
        """Waits until a process is ready or another member has gone, and returns the next view. All members of
        `settled` call it, before they run anything in that view.

        Raises:
          TimeoutError: neither happened within `timeout_s`.
          Evicted: as `settle`.
        """
        limit = time.monotonic() + timeout_s
        words = self._board.words
        while words[PROPOSAL] == self.number and not words[WAITING] and not any(map(self.gone, self.members)):
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"elastic.Group: the slots of ranks {self.members} do not hold all experts, and no other process "
                    f"was ready within {timeout_s:.0f} s: start one, or give ranks more slots (slots_per_rank)"
                )
            time.sleep(0.002)
        self.propose(urgent=False)
        return self.settle(settled.step, settled.share)

    def _await(self, stage: str, number: int, limits: dict[str, float]) -> dict[int, Any] | None:
        """Waits for the files that the members write in a stage, "arrived" or "adopted", of proposal `number`. Returns
        their values by slot; None where there is a newer proposal. This process makes one itself without a member that
        has ended or left, also after that member has come, and without a member that does not come in time.

        `limits`: by identity of a member, the time by `time.monotonic` at which a proposal leaves the member out unless
        it has come. A member without an entry has the whole time limit, from this call on. The entry of a member that
        comes is removed. The other entries hold for further proposals, too: however many proposals follow, a member
        that is stopped is awaited for one time limit in all. But where this process gets the group's lock late when it
        would leave members out, these members have half of the time limit from then on.
        """
        late = time.monotonic() + self._timeout_s
        arrived: dict[int, Any] = {}
        while True:
            for slot, identity in self._identities.items():
                if slot not in arrived and (says := self._board.get(f"{stage}.{number}.{slot}")) is not None:
                    arrived[slot] = says
                    limits.pop(identity, None)
            if self._board.words[PROPOSAL] != number:
                return None
            missing = {slot: i for slot, i in self._identities.items() if slot not in arrived}
            if not missing:
                return arrived
            if gone := tuple(filter(self.gone, self._identities)):  # also a member that came before it was killed
                self._leave_out(gone, number)
                return None
            now = time.monotonic()
            if overdue := {slot: i for slot, i in missing.items() if now > limits.get(i, late)}:
                if self._leave_out(tuple(overdue), number, within=self._timeout_s / LOOKS):
                    return None
                # Another process, which may be stopped, has held the lock. The overdue members need it to arrive.
                limits.update(dict.fromkeys(overdue.values(), time.monotonic() + self._timeout_s / 2))
            time.sleep(PAUSE_S)

    def _leave_out(self, slots: tuple[int, ...], number: int, within: float = math.inf) -> bool:
        """Proposes a view without `slots`, unless there is a newer proposal than `number`, and returns True. Returns
        False, and proposes nothing, if this process waited for the lock for more than `within` seconds."""
        began = time.monotonic()
        with self._board.locked():
            if time.monotonic() - began > within:
                return False
            state = self._board.read()
            if state["proposal"] == number:
                self._propose(state, urgent=True, without=slots)
        return True

    def _ended_meanwhile(self, number: int) -> bool:
        """Waits for a newer proposal than `number`, whose members' memory this process could not map, and makes one
        itself if a member has ended or left, or is ending. Returns False if there is none within half of the time
        limit. The wait is for a process that was killed: its memory goes before the process counts as ended, which can
        take longer than the time limit. Before the next view begins, `_shut_out` waits until it has ended."""
        limit = time.monotonic() + self._timeout_s / 2
        while time.monotonic() < limit:
            if self._board.words[PROPOSAL] != number:
                return True
            if lost := tuple(s for s, i in self._identities.items() if self.gone(s) or liveness.ending(i)):
                self._leave_out(lost, number)
                return True
            time.sleep(PAUSE_S)
        return False

    def leave(self) -> None:
        """Gives back the slot, which may be another process's by now, and watches no process any more. A removed folder
        has no members to tell."""
        slot = str(self.slot)
        with contextlib.suppress(FileNotFoundError), self._board.locked():
            state = self._board.read()
            if state["members"].get(slot) == self._identity:
                self._board.words[LEFT + self.slot] = _claim_of(self._identity)
            elif state["claims"].get(slot, {}).get("identity") == self._identity:
                del state["claims"][slot]
                self._board.write(state)
        self._look_no_more()

    def _look_no_more(self, but_at: dict | None = None) -> None:
        """Watches no process any more, but for those of a state."""
        state = but_at or {"members": {}, "claims": {}}
        identities = (*state["members"].values(), *(claim["identity"] for claim in state["claims"].values()))
        known = {identity.rsplit(" ", 1)[0] for identity in identities}
        with self._looking:
            for process in self._held.keys() - known:
                if (descriptor := self._held.pop(process)) is not None:
                    del self._polls[descriptor]
                    os.close(descriptor)


def _claim_of(identity: str) -> int:
    """Returns the number of the claim, the last word of an identity."""
    return int(identity.rsplit(" ", 1)[1])


def _alike(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Returns True if this process may join with its programs: the memory of its kernels is the group's, and its
    operations are some of the group's, or all of them and more."""
    here, there = (set(programs["operations"]) for programs in (mine, theirs))
    return mine["memory"] == theirs["memory"] and (here <= there or there <= here)


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns in words how programs differ that are not `_alike`."""
    found = []
    if mine["memory"] != theirs["memory"]:
        found.append(f"symmetric memory {mine['memory']} here and {theirs['memory']} there")
    here, there = (set(programs["operations"]) for programs in (mine, theirs))
    if not here <= there and not there <= here:
        found.append(_difference(sorted(here - there), sorted(there - here)))
    return "; ".join(found)


def _difference(here: list[str], there: list[str]) -> str:
    """Returns in words how two operations differ, one from each list: the two that are most similar."""

    def differing(pair: tuple[dict[str, Any], dict[str, Any]]) -> list[str]:
        return [name for name in sorted({*pair[0], *pair[1]}) if pair[0].get(name) != pair[1].get(name)]

    first, second = ([json.loads(text) for text in texts[:MOST_COMPARED]] for texts in (here, there))
    pairs = itertools.product(first, second)
    mine, theirs = min(pairs, key=lambda pair: (pair[0]["operation"] != pair[1]["operation"], len(differing(pair))))
    if (names := differing((mine, theirs))) == ["site"]:
        return f"operation {mine['operation']} is at another place of a program, or in a program of another name"
    each = ", ".join(f"{name}={mine.get(name)} here and {theirs.get(name)} there" for name in names if name != "site")
    return f"operation {mine['operation']} has {each}"
