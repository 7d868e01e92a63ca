"""Tiles quantized by the PTX of `float8_tile`, which NumPy runs, have the bits of the rule in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.ptx import E4M3, Machine
from xen_moe_jax._quantize import Wire, quantize_arrays
from xen_moe_jax.pallas_kernels.hopper import float8_tile

BLOCK = 128
FORMAT = Wire("float8_e4m3fn")
ROWS = np.arange(BLOCK)


def swizzled(tile):
    """Bytes `[128, 128]` as they lie in shared memory: in a row, piece `q` of 16 bytes lies at `q ^ (row % 8)`."""
    pieces = tile.reshape(BLOCK, 8, 16)
    return pieces[ROWS[:, None], np.arange(8) ^ ROWS[:, None] % 8].reshape(BLOCK, BLOCK)


def halves(x):
    """16-bit `[128, 128]` -> the bytes of both halves, one after the other."""
    return np.concatenate([swizzled(np.ascontiguousarray(x[:, at : at + 64]).view(np.uint8)) for at in (0, 64)]).ravel()


def rule(x):
    """float32 `[128, 128]` -> codes and scales of its rows."""
    values, scales = quantize_arrays(jnp.asarray(x, jnp.float32), FORMAT)
    return np.asarray(values).view(np.uint8), np.asarray(scales)[:, 0]


def drawn(kind):
    """Numbers of many magnitudes, a row and a column of zeros, the largest number, some that are not finite."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((BLOCK, BLOCK)) * 2.0 ** rng.integers(-12, 3, (BLOCK, BLOCK))
    x[7], x[:, 9] = 0, 0
    x[20, 21] = float(ml_dtypes.finfo(kind).max)
    x[40, 100], x[41, 3] = np.nan, -np.inf
    return x.astype(kind)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("use", ["rows", "rows for the wire", "columns", "columns over the tile"])
def test_rows_and_columns(kind, use):
    x, by_rows, apart = drawn(kind), use.startswith("rows"), 3 if use == "rows for the wire" else 1
    shared = np.concatenate([halves(x), np.zeros(BLOCK * BLOCK, np.uint8)])
    memory = np.zeros(BLOCK * 4 * apart, np.uint8)
    over, kinds = use == "columns over the tile", float8_tile.GIVEN[np.dtype(kind).name]
    place = 0 if over else 2 * BLOCK * BLOCK
    body = float8_tile._rows(kinds, apart=apart) if by_rows else float8_tile._columns(kinds, over)
    Machine((0, place, 0), shared, memory).run(body)
    codes, scales = rule(x if by_rows else x.T)
    np.testing.assert_array_equal(swizzled(shared[place : place + BLOCK * BLOCK].reshape(BLOCK, BLOCK)), codes)
    np.testing.assert_array_equal(memory.view(np.float32)[::apart], scales)


def test_rows_that_go_to_the_memory():
    """Only the first rows are written, of a tile whose rows lie apart."""
    x, count, stride = drawn(ml_dtypes.bfloat16), 75, 3 * BLOCK
    memory = np.full((4 + 3 * BLOCK) * BLOCK, 0xAB, np.uint8)
    Machine((0, 0, 4 * BLOCK, count), halves(x), memory).run(float8_tile._rows("bf16", stride))
    codes, scales = rule(x)
    np.testing.assert_array_equal(memory[: 4 * BLOCK].view(np.float32), scales)
    found = memory[4 * BLOCK :].reshape(BLOCK, stride)
    np.testing.assert_array_equal(found[:count, :BLOCK], codes[:count])
    assert (found[count:] == 0xAB).all() and (found[:, BLOCK:] == 0xAB).all()


@pytest.mark.parametrize("first", [0, 3])
def test_columns_of_quantized_rows(first):
    values, scales = rule(drawn(ml_dtypes.bfloat16))
    factors = np.zeros(BLOCK + 8, np.float32)
    factors[first : first + BLOCK] = scales
    places = 0, BLOCK * BLOCK, BLOCK * BLOCK + factors.nbytes
    shared = np.concatenate([swizzled(values).ravel(), factors.view(np.uint8), np.zeros(BLOCK * BLOCK, np.uint8)])
    memory = np.zeros(BLOCK * 4, np.uint8)
    Machine((*places, 0, first), shared, memory).run(float8_tile._quantized_columns())
    codes, scales = rule((values.view(E4M3).astype(np.float32) * scales[:, None]).T)
    np.testing.assert_array_equal(swizzled(shared[places[2] :].reshape(BLOCK, BLOCK)), codes)
    np.testing.assert_array_equal(memory.view(np.float32), scales)


def test_rows_past_a_group_are_zeros():
    x = drawn(ml_dtypes.bfloat16)
    shared = halves(x)
    Machine((0, 77), shared, None).run(float8_tile._zeros(2))
    x[77:] = 0
    np.testing.assert_array_equal(shared, halves(x))
