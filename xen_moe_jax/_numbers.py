"""Conversion of arguments into arrays, and into Python numbers where they must be known when a call is traced."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_int(value: Any) -> int | None:
    """Returns an int, a NumPy integer or an integer array without dimensions as an int; None for everything else.

    A bool is no number here, nor is a value that is known at run time only.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # JAX's error for a traced number is one too
        return None


def as_float(value: Any) -> float | None:
    """Converts a finite or infinite float, or a value that `as_int` takes, to float; None for NaN and all else."""
    whole = as_int(value)
    if whole is not None:
        return float(whole)
    array = _is_scalar(value) and jnp.issubdtype(value.dtype, jnp.floating)
    if not array and not isinstance(value, float | np.floating):
        return None
    found = float(value)
    return None if math.isnan(found) else found


def positive_seconds(value: Any, name: str, caller: str) -> float:
    """Returns a number of seconds as a float. Raises ValueError where it is not positive, or no number: NaN is refused
    too, since no time is later than NaN and a wait would never end."""
    seconds = as_float(value)
    if seconds is None or seconds <= 0:
        raise ValueError(f"{caller}: {name}={value!r}: must be positive seconds")
    return seconds


def as_bool(value: Any) -> bool | None:
    """Returns a bool or a NumPy bool as a bool; None for everything else."""
    return bool(value) if isinstance(value, bool | np.bool_) else None


def is_wide(dtype: Any) -> bool:
    """True for a floating-point dtype of 16 bits or more."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 1


def is_one_of(value: Any, choices: Collection[str | None]) -> bool:
    """True for one of the choices. An array, which cannot be told from them by `in`, is none of them."""
    return isinstance(value, str | None) and value in choices


def array(x: Any, caller: str, name: str) -> jax.Array:
    """Returns `x` as a JAX array. Raises TypeError, which names `caller` and the argument `name`, if JAX can make no
    array of it, or none that holds its integers."""
    held = jnp.iinfo(jax.dtypes.canonicalize_dtype(int))
    try:
        made = jnp.asarray(x)
        if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or x.dtype == made.dtype:
            return made
        held = jnp.iinfo(made.dtype)  # of 32 bits: JAX cuts numbers of 64 bits without a word
        if not x.size or (held.min <= x.min() and x.max() <= held.max):
            return made
        raise OverflowError
    except OverflowError:
        wrong = f"={reprlib.repr(x)}: integers must be in [{held.min}, {held.max}], those of {held.dtype}"
    except (TypeError, ValueError):
        wrong = f" is a {type(x).__name__}: must be an array"
        if isinstance(x, np.ndarray | np.generic):
            wrong = f" has dtype {x.dtype}: must be an array of numbers or bools"
    raise TypeError(f"{caller}: {name}{wrong}")


def indices(x: Any, caller: str, name: str) -> jax.Array:
    """Returns `x` as `array` does. Integers of NumPy that int32 does not hold become -1, which names no expert either;
    JAX would cut them to 32 bits, and 2**32 to expert 0."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype.itemsize > 4:
        x = np.where((x >= 0) & (x < 2**31), x.astype(np.int32), np.int32(-1))
    return array(x, caller, name)


def known_array(x: Any, caller: str, name: str) -> np.ndarray:
    """Returns `x` as a NumPy array. Raises TypeError, which names `caller` and the argument `name`, if its values are
    unknown (it is traced, was donated or deleted, or has shards on other processes) or NumPy can make no array of
    it."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{caller}: {name} is a {type(x).__name__}: must be an array whose values are known") from None
    except RuntimeError as error:
        raise TypeError(f"{caller}: {name} must be an array whose values are known: {error}") from error


def entries(sequence: Any) -> list[Any]:
    """Returns the entries of a sequence or of an array. Raises TypeError if it has none, or is traced.

    Those of a JAX array come from NumPy: where a program is traced, they would be traced.
    """
    return list(known_array(sequence, "entries", "the array") if isinstance(sequence, jax.Array) else sequence)


def plain(value: Any) -> Any:
    """Returns a number of NumPy, or in an array without dimensions, as Python's own; returns anything else unchanged.

    So that frozen configs hash, and are equal where their numbers are.
    """
    if isinstance(value, np.number):
        return value.item()
    if _is_scalar(value):
        number = as_int(value)
        found = as_float(value) if number is None else number
        return value if found is None else found
    return value


def _is_scalar(value: Any) -> bool:
    """True for an array without dimensions whose value is known."""
    return isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer) and value.ndim == 0
