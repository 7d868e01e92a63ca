"""Comparisons: bit for bit where the contract fixes the bits, in units of the last place where it allows one."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

_INTEGER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}


def bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(_INTEGER[x.dtype.itemsize]) if x.dtype != bool else x.astype(np.uint8)


def assert_bits(actual, expected, what: str, *, where: np.ndarray | None = None, any_nan: bool = False) -> None:
    """Asserts that two arrays have the same dtype, shape and bits.

    Args:
      what: name of the array, for the message.
      where: bool, leading dimensions of the array: only these entries are specified.
      any_nan: a NaN equals any other NaN (results of arithmetic: NaN payloads are not compared).
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    wrong = bits(actual) != bits(expected)
    if any_nan:
        wrong &= ~(np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64)))
    if where is not None:
        wrong &= where.reshape(where.shape + (1,) * (wrong.ndim - where.ndim))
    _report(wrong, actual, expected, what)


def assert_within_ulp(actual, expected, what: str, *, ulp_dtype, ulps: int = 1) -> None:
    """`|actual - expected| <= ulps` units in the last place of `ulp_dtype` at the larger of the two magnitudes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    magnitude = np.maximum(np.maximum(np.abs(a), np.abs(e)), 2.0**-100)
    unit = 2.0 ** (np.floor(np.log2(magnitude)) - _MANTISSA[np.dtype(ulp_dtype).name])
    _report(~(np.abs(a - e) <= ulps * unit), actual, expected, what)


def _report(wrong: np.ndarray, actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} entries differ; "
        f"the first at {at}: {actual[at]!r}, expected {expected[at]!r}"
    )
