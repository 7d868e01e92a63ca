"""Checks of arguments: integers, names and time limits."""

from __future__ import annotations

import math
import numbers
import operator
import time
from typing import Any


def as_int(value: Any) -> int | None:
    """Returns an int, a NumPy integer or an integer array without dimensions as an int; None for anything else.

    A bool is not taken for an integer, nor is a value that JAX is tracing.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # JAX's error for a traced value is a TypeError too.
        return None


def check_name(name: Any, request: str) -> None:
    """Raises ValueError unless `name` is a string that is not empty."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{request}: name={name!r} must be a string, not empty")


def deadline(timeout: Any, request: str) -> float:
    """Returns the time at which a wait of `timeout` seconds ends, on the clock of `time.monotonic`.

    Raises ValueError for a value that is not a number of seconds. NaN is refused too: no time is later than NaN, so
    such a wait would never end.
    """
    if not isinstance(timeout, numbers.Real) or math.isnan(timeout):
        raise ValueError(f"{request}: timeout={timeout!r} must be seconds")
    return time.monotonic() + float(timeout)


def optional_deadline(timeout: Any, request: str) -> float | None:
    """Returns `deadline(timeout, request)`, or None for a timeout of None, which waits without a limit."""
    return None if timeout is None else deadline(timeout, request)
