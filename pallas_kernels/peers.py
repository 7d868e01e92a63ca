"""The ranks that a kernel spans, and the order in which they signal and wait: when a rank may write into a peer.

A remote DMA may start only once its target is inside the same kernel: before that, XLA may use the target's buffer for
something else. `ANNOUNCE` tells every peer "I am in"; `AWAIT` waits until every peer has announced itself.

A barrier semaphore is one counter shared by all peers, so a fast rank's announcement for the *next* operation could be
taken for a slow rank's announcement for this one. Exit credits prevent that: no rank passes `LEAVE` before every peer
has passed `AWAIT`. They arrive while rows travel, so that no rank waits for them in practice. Between kernels over
different groups of ranks credits prove nothing: such kernels must have different barrier semaphores.

`send.Link` runs these phases in a kernel; tests/backends/pallas/barrier_model.py checks every interleaving of the same
phases.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax import lax


@dataclasses.dataclass(frozen=True)
class Axes:
    """The ranks that a kernel spans: mesh axes inside one slice, slowest first, and their sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def device_id(self, rank: Any) -> Any:
        """Mesh coordinates of a rank; the other mesh axes stay this rank's own."""
        ids = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            ids[name] = rank if name == self.names[0] else lax.rem(rank, size)
            rank = rank if name == self.names[0] else lax.div(rank, size)
        return ids


@dataclasses.dataclass(frozen=True)
class Signal:
    """Adds one to a semaphore of every peer, this rank included."""

    semaphore: str


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits until every peer has signalled a semaphore of this rank, and takes their signals back."""

    semaphore: str


@dataclasses.dataclass(frozen=True)
class Send:
    """DMAs into buffers of peers."""


@dataclasses.dataclass(frozen=True)
class Drain:
    """Waits for the DMAs into this rank's buffers, and for its own to have left."""


BARRIER, CREDITS = "barrier", "credits"
ANNOUNCE = (Signal(BARRIER),)
AWAIT = (Wait(BARRIER), Signal(CREDITS))
LEAVE = (Wait(CREDITS),)
KERNEL = (*ANNOUNCE, *AWAIT, Send(), Drain(), *LEAVE)
"""Every kernel that reaches other ranks does this, in this order."""
START, DONE = (*ANNOUNCE, *AWAIT, Send(), *LEAVE), (Drain(),)
"""Or this, as two kernels: the semaphores of the DMAs pass from one to the other."""
