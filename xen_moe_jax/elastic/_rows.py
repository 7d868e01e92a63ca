"""The exchange between the members of a view: each writes what it sends into shared memory of its own, and the others
read it there. Nobody writes into another's memory, so that a process that was left out can spoil nothing.

What moves: an array of each member to all (gather), or entry `r` of it to member `r` (scatter). Who waits for whom:
every member for every other; for a row until its mark says `(view, number)`. Memory: one file for each slot and each
exchange of a program, with two halves in turn: an exchange that ends has seen the marks of all for its number, so all
have ended the one before, whose half the next one then takes. A mark is stored after its rows (`fence`), and loaded
before them.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from xen_moe_jax.elastic._board import fence, map_file

HEADER = 64
SPINS = 64
"""Looks for a mark before the first pause. Ranks may share cores: a look gives the core away."""
PAUSE_S = 20e-6
LOOK_S = 0.001
"""Interval in which a waiting member looks whether the others still live."""


class GaveUp(Exception):
    """The exchange cannot end; the text says why."""


class _Region:
    """One slot's side of one exchange."""

    def __init__(self, path: pathlib.Path, nbytes: int) -> None:
        memory = map_file(path, HEADER + 2 * (-(-nbytes // 64) * 64))
        self.marks = memory[:16].cast("Q")
        data = np.frombuffer(memory, np.uint8)
        half = (len(memory) - HEADER) // 2
        self.halves = [data[HEADER + i * half : HEADER + i * half + nbytes] for i in (0, 1)]


class Rows:
    """Exchanges of slot `slot`. `check(slot)` raises `GaveUp` when a wait for this slot must end."""

    def __init__(self, folder: pathlib.Path, slot: int, num_slots: int, check: Callable[[int, float], None]) -> None:
        self._folder, self._slot, self._num_slots, self._check = folder, slot, num_slots, check
        self._regions: dict[tuple[int, int], _Region] = {}
        self._numbers: dict[int, int] = {}
        self._view = 0
        self._members: tuple[int, ...] = (slot,)
        folder.mkdir(exist_ok=True)

    def enter(self, view: int, members: Sequence[int]) -> None:
        """From now on exchanges are of this view: their numbers start again. Nothing may be running."""
        self._view, self._members = view, tuple(members)
        self._numbers.clear()

    def _region(self, slot: int, key: int, nbytes: int) -> _Region:
        if (slot, key) not in self._regions:
            self._regions[slot, key] = _Region(self._folder / f"{key:08x}.{slot}", nbytes)
        return self._regions[slot, key]

    def exchange(self, kind: str, key: int, x: np.ndarray) -> np.ndarray:
        """`[R, ...]`: what each member sent; zero for slots that are no members.

        Raises:
          GaveUp: a member has ended, or did not come in time.
        """
        number = self._numbers.get(key, 0) + 1
        self._numbers[key] = number
        mark, parity = self._view << 32 | number, number % 2
        sent = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        mine = self._region(self._slot, key, sent.size)
        mine.halves[parity][:] = sent
        fence()
        mine.marks[parity] = mark
        shape = x.shape if kind == "scatter" else (self._num_slots, *x.shape)
        out = np.zeros(shape, x.dtype)
        rows = out.reshape(self._num_slots, -1).view(np.uint8)
        each = slice(self._slot * rows.shape[1], (self._slot + 1) * rows.shape[1]) if kind == "scatter" else slice(None)
        for member in self._members:
            region = self._region(member, key, sent.size)
            self._wait(region, parity, mark, member)
            rows[member] = region.halves[parity][each]
        return out

    def _wait(self, region: _Region, parity: int, mark: int, member: int) -> None:
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
                    if region.marks[parity] == mark:  # it had come before it ended: for all members or for none
                        break
                    raise
            time.sleep(PAUSE_S)
        fence()
