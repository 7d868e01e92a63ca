"""Counters of arrivals: the only order that transfers have.

A write that carries `imm` adds one to the counter of that number when all of its bytes are in the window. Arrivals come
in any order, and may come before anybody asks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from xen_moe_jax.transfer._checks import as_int
from xen_moe_jax.transfer._errors import TransferRefused, about

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine

Imm = int | str
MAX_NUMBERS = 1 << 20
"""Numbers with arrivals that nobody has closed yet: beyond this a peer is refused."""

Origin = tuple[int, int, int]
"""(peer's number, window's number, generation) of an arrival."""


def check_imm(imm: Any) -> Imm:
    number = imm if isinstance(imm, str) else as_int(imm)
    if number is None or (isinstance(number, str) and len(number) > 256):
        raise TransferRefused(f"imm={imm!r} must be an int or a string of at most 256 characters")
    return number


class SeenNumbers:
    """The numbers 0, 1, 2, ... that have been seen, in any order: each counts once."""

    def __init__(self) -> None:
        self._below = 0
        self._beyond: set[int] = set()

    def add(self, number: int) -> bool:
        """False for a number that was seen before."""
        if number < self._below or number in self._beyond:
            return False
        if number - self._below > MAX_NUMBERS:
            raise ValueError(f"arrival number {number} while {self._below} is missing")
        self._beyond.add(number)
        while self._below in self._beyond:
            self._beyond.remove(self._below)
            self._below += 1
        return True


class Arrivals:
    """All counters of an engine; under its lock."""

    def __init__(self) -> None:
        self._counts: dict[Imm, Counter[Origin]] = {}

    def add(self, imm: Imm, origin: Origin) -> bool:
        """False where the table is full."""
        if imm not in self._counts and len(self._counts) >= MAX_NUMBERS:
            return False
        self._counts.setdefault(imm, Counter())[origin] += 1
        return True

    def value(self, imm: Imm, peer: int | None) -> int:
        counts = self._counts.get(imm, Counter())
        return sum(n for origin, n in counts.items() if peer is None or origin[0] == peer)

    def peers(self, imm: Imm) -> set[int]:
        return {origin[0] for origin in self._counts.get(imm, ())}

    def forget(self, imm: Imm) -> None:
        self._counts.pop(imm, None)

    def forget_generation(self, window: int, generation: int) -> None:
        """What was counted for a generation that was thrown away did not arrive."""
        for counts in self._counts.values():
            for origin in [o for o in counts if o[1:] == (window, generation)]:
                del counts[origin]


class ImmCounter:
    """Waits until `expect` writes with number `imm` have arrived. Made by `Engine.counter` and `Window.counter`."""

    def __init__(self, engine: Engine, imm: Imm, expect: int, source: int | None):
        self._engine = engine
        self.imm = imm
        self.expect = expect
        self._source = source

    @property
    def value(self) -> int:
        """Arrivals so far."""
        with self._engine._lock:
            return self._engine._arrivals.value(self.imm, self._source)

    def done(self) -> bool:
        """Whether as many have arrived as are expected; never waits."""
        return self.value >= self.expect

    def wait(self, timeout: float | None = None) -> None:
        """Returns when `expect` writes have arrived, in any order.

        Raises `TransferTimeout`, or `PeerLost` as soon as the counter's source (or, without one, a peer that had begun
        to count here) is lost.
        """
        engine = self._engine
        request = f"counter {self.imm!r}"

        def state() -> bool:
            arrivals = engine._arrivals
            if arrivals.value(self.imm, self._source) >= self.expect:
                return True
            for number in {self._source} if self._source is not None else arrivals.peers(self.imm):
                peer = engine._peers_by_number[number]
                if peer.lost:
                    have = arrivals.value(self.imm, self._source)
                    raise peer.lost_error(f"{request}: {have} of {self.expect} writes had arrived", request)
            return False

        source = None if self._source is None else engine._peers_by_number[self._source].name
        with about(request, source):
            engine._wait(
                state,
                timeout,
                lambda: f"{request}: {engine._arrivals.value(self.imm, self._source)} of {self.expect} writes",
                request,
            )

    def close(self) -> None:
        """Forgets the number; a later write with it counts from zero. Engines that run for long close what they have
        waited for.
        """
        with self._engine._lock:
            self._engine._arrivals.forget(self.imm)

    def __enter__(self) -> ImmCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
