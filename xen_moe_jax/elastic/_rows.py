"""The exchange between the members of a view: each member writes what it sends into shared memory of its own slot, and
the others read it there. A process writes into the memory of its own claim alone (`_membership.py`), so that the last
process of its slot, which may have been stopped, and the next one write elsewhere.

A gather moves each member's array to all members; a scatter moves entry `r` of it to member `r`. Every member waits for
every other: before it reads rows, it waits until their mark is `(view, number of the exchange)`. There is one file for
each claim and each exchange of a program, with two halves that take turns. Exchange `n` ends on a member once it has
seen all marks `n`; then all members have ended exchange `n - 1`, and exchange `n + 1` may take that one's half. A mark
is stored after its rows and loaded before them, with a `fence` between. It is cleared before the rows change, and
loaded again after them: a process that is stopped while it copies, and left out, finds that the others have gone on.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable

import numpy as np

from xen_moe_jax.elastic._board import fence, map_file

HEADER = 64
"""Bytes in front of the rows in a region: room for the two marks."""
SPINS = 64
"""Looks for a mark before the first pause. After each look the rank yields its core, which ranks may share."""
PAUSE_S = 20e-6
"""Seconds of a pause between two later looks."""
LOOK_S = 0.001
"""Seconds between two looks of a waiting member at whether the member that it waits for still lives."""


class GaveUp(Exception):
    """An exchange cannot end; the text says why."""


class _Region:
    """The memory of one claim for one exchange: two marks, and two halves of `nbytes` bytes for rows."""

    def __init__(self, path: pathlib.Path, nbytes: int) -> None:
        memory = map_file(path, HEADER + 2 * (-(-nbytes // 64) * 64))
        self.marks = memory[:16].cast("Q")
        data = np.frombuffer(memory, np.uint8)
        half = (len(memory) - HEADER) // 2
        self.halves = [data[HEADER + i * half : HEADER + i * half + nbytes] for i in (0, 1)]


class Rows:
    """The exchanges of slot `slot`. `claims`: as for `enter`, with this slot alone. `check(member, waited_s)` raises
    `GaveUp` where a wait for this member, which has lasted for `waited_s` seconds, must end."""

    def __init__(
        self,
        folder: pathlib.Path,
        slot: int,
        num_slots: int,
        claims: dict[int, int],
        check: Callable[[int, float], None],
    ) -> None:
        self._folder, self._slot, self._num_slots, self._check = folder, slot, num_slots, check
        self._regions: dict[tuple[int, int, int], _Region] = {}  # by slot, claim and key
        self._numbers: dict[int, int] = {}
        self._view = 0
        self._claims = claims
        folder.mkdir(exist_ok=True)

    def enter(self, view: int, claims: dict[int, int]) -> None:
        """Begins a view: exchanges have its members, and are numbered from 1 again. No exchange may be running.

        Args:
          view: its number.
          claims: by slot of each member, the number of its claim.
        """
        self._view, self._claims = view, claims
        self._numbers.clear()
        self._regions = {at: region for at, region in self._regions.items() if claims.get(at[0]) == at[1]}
        for path in self._folder.glob(f"{self._slot}.*"):  # of processes that had this slot: no member reads them now
            if path.name.split(".")[1] != str(claims[self._slot]):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives back the memory. No exchange may be running."""
        self._regions.clear()

    def _region(self, slot: int, key: int, nbytes: int) -> _Region:
        at = slot, self._claims[slot], key
        if at not in self._regions:
            self._regions[at] = _Region(self._folder / f"{slot}.{self._claims[slot]}.{key:08x}", nbytes)
        return self._regions[at]

    def exchange(self, kind: str, key: int, x: np.ndarray) -> np.ndarray:
        """Runs an exchange of the given kind, "gather" or "scatter"; see `Group.exchange`.

        Returns:
          `[R, ...]` of the dtype of `x`: entry `r` came from member `r`, and is zero where `r` is no member.

        Raises:
          GaveUp: a member has ended, did not come in time, has given up the step, or has gone on without this rank.
        """
        number = self._numbers.get(key, 0) + 1
        self._numbers[key] = number
        mark, parity = self._view << 32 | number, number % 2
        sent = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        mine = self._region(self._slot, key, sent.size)
        mine.marks[parity] = 0
        fence()
        mine.halves[parity][:] = sent
        fence()
        mine.marks[parity] = mark
        shape = x.shape if kind == "scatter" else (self._num_slots, *x.shape)
        out = np.zeros(shape, x.dtype)
        rows = out.reshape(self._num_slots, -1).view(np.uint8)
        each = slice(self._slot * rows.shape[1], (self._slot + 1) * rows.shape[1]) if kind == "scatter" else slice(None)
        for member in self._claims:
            region = self._region(member, key, sent.size)
            self._wait(region, parity, mark, member)
            rows[member] = region.halves[parity][each]
            fence()
            if region.marks[parity] != mark:
                raise GaveUp(f"rank {member} went on while rank {self._slot} copied its rows")
        return out

    def _wait(self, region: _Region, parity: int, mark: int, member: int) -> None:
        """Waits until the half `parity` of `member` has this mark.

        Raises:
          GaveUp: the wait must end, and the mark is not there.
        """
        looks, began, looked = 0, 0.0, 0.0
        while region.marks[parity] != mark:
            looks += 1
            if looks < SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            began = began or now
            if now - looked > LOOK_S:
                looked = now
                try:
                    self._check(member, now - began)
                except GaveUp:
                    if region.marks[parity] == mark:  # the member stored the mark before it ended: all members find it
                        break
                    raise
            time.sleep(PAUSE_S)
        fence()
