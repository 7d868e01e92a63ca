"""Calls that are queued at once, and the lock by which processes that measure side by side take turns."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

TURN_SECONDS = 0.1
"""Pause between two turns of a process, so that a process that waits for the lock gets it."""


def queued(
    program: Callable[..., Any],
    operands: tuple[Any, ...],
    calls: int,
    repeats: int,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> list[float]:
    """Returns the time of a call in us, one entry for each repeat, in which `calls` calls are queued at once.

    A call before the first repeat is not timed. `wait(result)` returns when this call and all earlier ones have ended.
    """
    wait(program(*operands))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            result = program(*operands)
        wait(result)
        taken.append((time.perf_counter() - began) / calls * 1e6)
    return taken


@contextlib.contextmanager
def alone(path: str | None) -> Iterator[None]:
    """Holds an exclusive lock on a file, so that processes which compile side by side measure one after the other."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def turns(path: str | None, repeats: int) -> Iterator[int]:
    """Numbers of repeats, each with the lock of `alone` held and then let go for a moment: processes that measure side
    by side take turns."""
    for repeat in range(repeats):
        with alone(path):
            yield repeat
        if path is not None:
            time.sleep(TURN_SECONDS)
