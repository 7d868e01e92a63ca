"""Counters of arrivals: the only order that transfers have.

A write that carries `imm` adds one to the counter of that number when all of its bytes are in the window. Arrivals come
in any order, and may come before the counter is made.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from xen_moe_jax.transfer._checks import as_int
from xen_moe_jax.transfer._connection import Connection
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused, about

Imm = int | str
MAX_NUMBERS = 1 << 20
"""Most numbers that may have arrivals and no closed counter; arrivals of further numbers are refused."""

Origin = tuple[Connection, int, int]
"""(peer, window's number, generation) of an arrival."""


def check_imm(imm: Any) -> Imm:
    """Returns `imm` as an int or a string. Raises `TransferRefused` for anything else."""
    number = imm if isinstance(imm, str) else as_int(imm)
    if number is None or (len(number) if isinstance(number, str) else number.bit_length()) > 256:
        what = imm if number is None or isinstance(number, str) else f"{number:#x}"
        raise TransferRefused(f"imm={what!r:.300} must be an int of at most 256 bits or a string of as many characters")
    return number


class Arrivals:
    """All counters of an engine. Its methods need the engine's lock."""

    def __init__(self) -> None:
        self._counts: dict[Imm, Counter[Origin]] = {}

    def add(self, imm: Imm, origin: Origin) -> bool:
        """Counts one arrival. Returns False where the table is full."""
        if imm not in self._counts and len(self._counts) >= MAX_NUMBERS:
            return False
        self._counts.setdefault(imm, Counter())[origin] += 1
        return True

    def value(self, imm: Imm, peer: Connection | None) -> int:
        """Returns the arrivals with this number, of all peers or of one."""
        counts = self._counts.get(imm, Counter())
        return sum(n for origin, n in counts.items() if peer is None or origin[0] is peer)

    def peers(self, imm: Imm) -> set[Connection]:
        """Returns the peers with arrivals of this number."""
        return {origin[0] for origin in self._counts.get(imm, ())}

    def forget(self, imm: Imm) -> None:
        """Removes a number."""
        self._counts.pop(imm, None)

    def forget_generation(self, window: int, generation: int) -> None:
        """Removes the arrivals of a generation that was thrown away."""
        for counts in self._counts.values():
            for origin in [o for o in counts if o[1:] == (window, generation)]:
                del counts[origin]


class ImmCounter:
    """Waits until `expect` writes with number `imm` have arrived. Made by `Engine.counter` and `Window.counter`."""

    def __init__(self, core: Core, arrivals: Arrivals, imm: Imm, expect: int, source: Connection | None):
        self._core, self._arrivals, self._source = core, arrivals, source
        self.imm = imm
        self.expect = expect

    @property
    def value(self) -> int:
        """Arrivals so far."""
        with self._core.lock:
            return self._arrivals.value(self.imm, self._source)

    def done(self) -> bool:
        """Returns whether `expect` writes have arrived; never waits."""
        return self.value >= self.expect

    def wait(self, timeout: float | None = None) -> None:
        """Returns when `expect` writes have arrived, in any order.

        Raises `TransferTimeout`, or `PeerLost` as soon as the counter's source (or, without one, a peer that had begun
        to count here) is lost.
        """
        request = f"counter {self.imm!r}"

        def state() -> bool:
            have = self._arrivals.value(self.imm, self._source)
            if have >= self.expect:
                return True
            for peer in {self._source} if self._source is not None else self._arrivals.peers(self.imm):
                if peer.lost:
                    raise peer.lost_error(f"{request}: {have} of {self.expect} writes had arrived", request)
            return False

        def text() -> str:
            return f"{request}: {self._arrivals.value(self.imm, self._source)} of {self.expect} writes"

        with about(request, None if self._source is None else self._source.name):
            self._core.wait(state, timeout, text, request)

    def close(self) -> None:
        """Forgets the number; a later write with it counts from zero. A program that runs for long closes its counters
        after it has waited for them.
        """
        with self._core.lock:
            self._arrivals.forget(self.imm)

    def __enter__(self) -> ImmCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
