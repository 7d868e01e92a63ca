"""Checks that the groups of fields share: each error names the field of `MoEConfig`, its value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from xen_moe_jax._numbers import is_one_of, is_wide


def require(ok: bool, name: str, value: Any, remedy: str) -> None:
    """Raises ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"MoEConfig.{name}={value!r}: {remedy}")


def _require_each(config: Any, names: tuple[str, ...], valid: Callable[[Any], bool], remedy: str) -> None:
    """Raises ValueError for the first of these fields that is not valid."""
    for name in names:
        value = getattr(config, name)
        require(valid(value), name, value, remedy)


def require_positive_ints(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields that is no positive int."""
    _require_each(config, names, lambda value: is_int(value) and value > 0, "must be a positive int")


def require_numbers(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields that is no finite number >= 0."""
    _require_each(config, names, lambda value: is_number(value) and value >= 0, "must be a finite number >= 0")


def require_positive_numbers(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields that is no finite number > 0."""
    _require_each(config, names, lambda value: is_number(value) and value > 0, "must be a finite number > 0")


def require_booleans(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields that is neither True nor False."""
    _require_each(config, names, lambda value: isinstance(value, bool), "must be True or False")


def require_choices(config: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the field is one of `choices`."""
    value = getattr(config, name)
    require(is_one_of(value, choices), name, value, f"must be one of {choices}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_float_dtype(value: Any) -> bool:
    """True for a floating-point dtype of 16 bits or more."""
    try:  # NumPy takes None for float64
        return value is not None and is_wide(jnp.dtype(value))
    except (TypeError, ValueError):  # not a dtype at all
        return False
