"""The grouped matmul's kernels for Hopper GPUs as functions of shapes, to be lowered and compiled without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import Tiles

GROUPS, HIDDEN, WIDTH, ROWS = 8, 1024, 512, 4096
SMS = 132
"""SMs of an H100, which a program asks the GPU for, and there is none here."""


def swiglu(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return activated_rows(
        rows, (up, up), group_sizes, activation=Activation(), projections=True, tiles=tiles, num_sms=SMS
    )


def clipped_swiglu_with_biases(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    """With all that an epilogue can do: row weights, biases and both projections stored."""
    activation, biases = Activation("clipped_swiglu"), (up[:, 0], up[:, 1])
    factors = rows[:, 0].astype(jnp.float32)
    return activated_rows(
        rows, (up, up), group_sizes, biases, factors, activation=activation, projections=True, tiles=tiles, num_sms=SMS
    )


def geglu(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return activated_rows(
        rows, (up, up), group_sizes, activation=Activation("geglu"), projections=False, tiles=tiles, num_sms=SMS
    )


def gelu(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    biases, activation = (up[:, 0],), Activation("gelu")
    return activated_rows(
        rows, (up,), group_sizes, biases, activation=activation, projections=True, tiles=tiles, num_sms=SMS
    )


def projection_with_bias(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    factors = rows[:, 0].astype(jnp.float32)
    run = functools.partial(rows_by_weights, bias=up[:, 0], row_weights=factors, transposed=False, num_sms=SMS)
    return run(rows, up, group_sizes, tiles=tiles)


def up_projection(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_weights(rows, up, group_sizes, transposed=False, tiles=tiles, num_sms=SMS)


def gradient_of_rows(tiles: Tiles, wide: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_weights(wide, up, group_sizes, transposed=True, tiles=tiles, num_sms=SMS)


def gradient_of_weights(tiles: Tiles, rows: Any, wide: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_rows(rows, wide, group_sizes, tiles=tiles, num_sms=SMS)


def sums(tiles: Tiles, wide: Any, group_sizes: Any, **_: Any) -> Any:
    """The gradient of a bias."""
    ones = jnp.ones((wide.shape[0], 64), wide.dtype)
    return rows_by_rows(ones, wide, group_sizes, tiles=tiles, height=8, num_sms=SMS)


def _index(rows: Any) -> Any:
    return jnp.arange(rows.shape[0], dtype=jnp.int32)[::-1]


def gathered_swiglu(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    run = functools.partial(activated_rows, activation=Activation(), projections=True, num_sms=SMS)
    return run(rows, (up, up), group_sizes, index=_index(rows), tiles=tiles)


def gathered_gradient_of_rows(tiles: Tiles, wide: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_weights(wide, up, group_sizes, index=_index(wide), transposed=True, tiles=tiles, num_sms=SMS)


def gathered_rows_by_rows(tiles: Tiles, rows: Any, wide: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_rows(rows, wide, group_sizes, _index(rows), gathered="rows", tiles=tiles, num_sms=SMS)


def rows_by_gathered_rows(tiles: Tiles, rows: Any, wide: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_rows(wide, rows, group_sizes, _index(rows), gathered="others", tiles=tiles, num_sms=SMS)


KERNELS: tuple[Callable[..., Any], ...] = swiglu, up_projection, gradient_of_rows, gradient_of_weights
EPILOGUES: tuple[Callable[..., Any], ...] = clipped_swiglu_with_biases, geglu, gelu, projection_with_bias
GATHERED: tuple[Callable[..., Any], ...] = (
    gathered_swiglu,
    gathered_gradient_of_rows,
    gathered_rows_by_rows,
    rows_by_gathered_rows,
)


def operands(
    sharding: Sharding | None = None, hidden: int = HIDDEN, width: int = WIDTH
) -> dict[str, jax.ShapeDtypeStruct]:
    """Operands of every kernel, by the names of its parameters."""
    shapes = {"rows": (ROWS, hidden), "wide": (ROWS, width), "up": (GROUPS, hidden, width)}
    given = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for name, s in shapes.items()}
    return given | {"group_sizes": jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=sharding)}


def program(kernel: Callable[..., Any], tiles: Tiles) -> Any:
    """A program of the operands: a new function each time, which no cache of JAX's knows."""
    return jax.jit(lambda operands: kernel(tiles, **operands))
