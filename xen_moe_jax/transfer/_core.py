"""State that all parts of an engine share: the lock, the wire, the pending operations, and the one way to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from xen_moe_jax.transfer import _device
from xen_moe_jax.transfer._checks import optional_deadline
from xen_moe_jax.transfer._errors import TransferError, TransferRefused, TransferTimeout
from xen_moe_jax.transfer._poller import Poller
from xen_moe_jax.transfer._wire import Wire

BUSY_S = 50e-6
"""Pause between two attempts to make progress while an operation is pending and nothing moves."""
SPIN_S, SPIN_IDLE_S = 2e-3, 300e-6
"""Seconds that a waiting caller drives the engine without a pause, while an operation is pending and while none is:
handing work over to another thread takes longer than a small transfer.
"""


class Pending(Protocol):
    """An operation in progress: a transfer, or a message that its receiver has not taken yet."""

    ended: bool

    def advance(self) -> bool:
        """Goes on with the operation; returns whether anything was done."""

    def lose(self, peer: Any) -> None:
        """Ends the operation with `PeerLost` if it concerns this peer."""


class Core:
    """The state that the parts of one engine share.

    Attributes, all under `lock`: `changed` (the condition that every change notifies), `wire`, `poller`, `pending`,
    `spinning` (callers that drive the engine at this moment), `failure` (of the engine's thread), `closing` and
    `closed`. `device` is the CUDA device of this engine, or None; `default_device` is JAX's device for arrays that
    name none.
    """

    def __init__(self, name: str, open_wire: Callable[[], Wire]):
        self.name = name
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closing = self.closed = False
        self.spinning = 0
        self.failure: BaseException | None = None
        self.pending: list[Pending] = []
        # UCX looks for GPUs in the current context, and pushes another one where the memory is another GPU's.
        self.default_device, self.device = _device.default(), _device.default_ordinal()
        self.adopt_device()
        self.wire = open_wire()
        self.poller = Poller(self.wire.event_fd)

    def adopt_device(self) -> None:
        """Makes the engine's CUDA device current in the calling thread."""
        if self.device is not None:
            _device.make_current(self.device)

    def check_open(self, request: str) -> None:
        """Raises `TransferRefused` once `close` was called."""
        if self.closing:
            raise TransferRefused(f"{request}: the engine {self.name!r} is closed", request=request)

    def progress(self) -> bool:
        """Drives the wire and every pending operation; returns whether anything was done. Needs the lock."""
        if self.closed:
            return False
        self.wire.progress()
        moved = False
        for operation in list(self.pending):
            moved |= operation.advance()
        if moved:
            self.pending = [operation for operation in self.pending if not operation.ended]
        return moved

    def wait(
        self,
        state: Callable[[], bool],
        timeout: float | None,
        describe: Callable[[], str],
        request: str,
        bytes_done: Callable[[], int] = lambda: 0,
    ) -> None:
        """Drives the engine until `state()` is true. Raises the exceptions of `state`, and `TransferTimeout`.

        `describe` and `bytes_done` are called, under the lock, for the text of an error.
        """
        begun = time.monotonic()
        deadline = optional_deadline(timeout, request)
        spins = False
        self.adopt_device()
        with self.changed:
            try:
                while True:
                    moved = self.progress()
                    if state():
                        return
                    if self.failure is not None:
                        text = f"{describe()}: the engine's thread failed"
                        raise TransferError(text, request=request) from self.failure
                    if self.closed:
                        raise TransferRefused(f"{describe()}: the engine {self.name!r} was closed", request=request)
                    now = time.monotonic()
                    remaining = 3600.0 if deadline is None else deadline - now
                    if remaining <= 0:
                        text = f"{describe()} after {timeout} s"
                        raise TransferTimeout(text, request=request, bytes_done=bytes_done())
                    short = now - begun < (SPIN_S if self.pending else SPIN_IDLE_S)
                    if spins != short:  # While a caller spins, the engine's thread stays out of the way.
                        spins = short
                        self.spinning += 1 if spins else -1
                    if spins:
                        self.poller.poll()
                    pause = min(remaining, BUSY_S if self.pending else 1.0)
                    self.changed.wait(0 if moved or spins else pause)
            finally:
                self.spinning -= spins
