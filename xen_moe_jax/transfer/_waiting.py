"""The one place where a caller waits: it drives the engine itself, for a while without a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from xen_moe_jax.transfer._checks import optional_deadline
from xen_moe_jax.transfer._errors import TransferError, TransferRefused, TransferTimeout
from xen_moe_jax.transfer._loop import BUSY_S, SPIN_IDLE_S, SPIN_S

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine


def wait(
    engine: Engine,
    state: Callable[[], bool],
    timeout: float | None,
    describe: Callable[[], str],
    request: str,
    bytes_done: Callable[[], int],
) -> None:
    """Drives the engine until `state()`. Raises what `state` raises, and `TransferTimeout`."""
    begun = time.monotonic()
    deadline = optional_deadline(timeout, request)
    spins = False
    engine._adopt_device()
    with engine._changed:
        try:
            while True:
                moved = engine._progress()
                if state():
                    return
                if engine._failure is not None:
                    raise TransferError(
                        f"{describe()}: the engine's thread failed", request=request
                    ) from engine._failure
                if engine._closed:
                    raise TransferRefused(f"{describe()}: the engine {engine.name!r} was closed", request=request)
                now = time.monotonic()
                remaining = 3600.0 if deadline is None else deadline - now
                if remaining <= 0:
                    raise TransferTimeout(f"{describe()} after {timeout} s", request=request, bytes_done=bytes_done())
                short = now - begun < (SPIN_S if engine._active else SPIN_IDLE_S)
                if spins != short:  # Meanwhile the thread stays out of the way.
                    spins = short
                    engine._spinning += 1 if spins else -1
                if spins:
                    engine._loop.poll()
                engine._changed.wait(0 if moved or spins else min(remaining, BUSY_S if engine._active else 1.0))
        finally:
            engine._spinning -= spins
