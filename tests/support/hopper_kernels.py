"""The grouped matmul's kernels for Hopper GPUs as functions of shapes, to be lowered and compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import rows_by_weights, swiglu_rows
from xen_moe_jax.pallas_kernels.hopper.tiles import Tiles

GROUPS, HIDDEN, WIDTH, ROWS = 8, 1024, 512, 4096
SMS = 132
"""SMs of an H100, which a program asks the GPU for, and there is none here."""


def swiglu(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return swiglu_rows(rows, up, up, group_sizes, projections=True, tiles=tiles, num_sms=SMS)


def up_projection(tiles: Tiles, rows: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_weights(rows, up, group_sizes, transposed=False, tiles=tiles, num_sms=SMS)


def gradient_of_rows(tiles: Tiles, wide: Any, up: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_weights(wide, up, group_sizes, transposed=True, tiles=tiles, num_sms=SMS)


def gradient_of_weights(tiles: Tiles, rows: Any, wide: Any, group_sizes: Any, **_: Any) -> Any:
    return rows_by_rows(rows, wide, group_sizes, tiles=tiles, num_sms=SMS)


KERNELS: tuple[Callable[..., Any], ...] = swiglu, up_projection, gradient_of_rows, gradient_of_weights


def operands(sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Operands of every kernel, by the names of its parameters."""
    shapes = {"rows": (ROWS, HIDDEN), "wide": (ROWS, WIDTH), "up": (GROUPS, HIDDEN, WIDTH)}
    given = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for name, s in shapes.items()}
    return given | {"group_sizes": jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=sharding)}


def program(kernel: Callable[..., Any], tiles: Tiles) -> Any:
    """A program of the operands: a new function each time, which no cache of JAX's knows."""
    return jax.jit(lambda operands: kernel(tiles, **operands))
