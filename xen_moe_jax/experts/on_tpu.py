"""Grouped matmuls on TPU: XLA's `ragged_dot`, and a Pallas kernel for its gradient by the rows.

XLA multiplies cotangents with weights that it has transposed by a copy, all experts of the chip in every step, and adds
the cotangents of the rows by gate and by up in a pass over all rows. Here one kernel reads the weights as they lie and
adds both up (`pallas_kernels/grouped_transposed.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._mesh import platform, vary_alike
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.pallas_kernels.grouped_transposed import Tiles, grouped_transposed
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import LANES

DTYPES = ("bfloat16", "float32")
LEAST = 128
"""The numbers of rows of a buffer and of columns of a weight are multiples of this. No tile has fewer rows."""
ROWS = {"v6e": 256, "tpu7x": 256}
"""Rows of a tile by generation of the chip, as many as its matrix unit has; other generations have `LEAST`. An expert
may begin inside a tile, and the whole tile is multiplied by its weights: the larger the tile, the more of these rows
belong to another expert."""
COLUMNS, DEPTHS = (512, 256, 128), (2048, 1024, 512, 256, 128)
"""Columns of a tile, and elements of the contracted dimension that one step multiplies, the preferred ones first. One
step for the whole contracted dimension is preferred to all of these."""
DEFAULT = KernelConfig(backend="pallas")


def supports(rows: Any, weights: Any) -> bool:
    """Returns True on a TPU, for rows `[C, A]` and weights `[L, A, B]` of one dtype that whole tiles cover."""
    whole = (
        rows.shape[0] > 0
        and rows.shape[0] % LEAST == 0
        and weights.shape[2] % LEAST == 0
        and rows.shape[1] % LANES == 0
    )
    return platform() == "tpu" and whole and rows.dtype == weights.dtype and rows.dtype.name in DTYPES


def products(
    rows: jax.Array, weights: Sequence[jax.Array], group_sizes: jax.Array, config: KernelConfig = DEFAULT
) -> tuple[jax.Array, ...]:
    """Returns `ragged_dot` of the rows with each of several weights of their experts, `[C, B]` each.

    Args:
      rows: `[C, A]`, sorted by expert. weights: each `[L, A, B]`. group_sizes: int32 `[L]`.
    """
    rows, group_sizes, *varying = vary_alike(rows, group_sizes, *weights)
    return _products(config, rows, tuple(varying), group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(config: KernelConfig, rows: Any, weights: Any, group_sizes: Any) -> Any:
    return tuple(jax.lax.ragged_dot(rows, weight, group_sizes) for weight in weights)


def _forward(config: KernelConfig, rows: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    return _products(config, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(config: KernelConfig, kept: Any, cotangents: Any) -> tuple[Any, Any, None]:
    rows, weights, group_sizes = kept
    (by_rows,) = _transposed_p.bind(*cotangents, *weights, group_sizes, config=config)

    def of(weights: Any) -> Any:
        return tuple(jax.lax.ragged_dot(rows, weight, group_sizes) for weight in weights)

    (by_weights,) = jax.vjp(of, weights)[1](cotangents)
    return by_rows, by_weights, None


_products.defvjp(_forward, _backward)


def tiles_for(limit: int, rows: int, depth: int, operands: int, itemsize: int) -> Tiles:
    """Returns the tiles of `rows` rows with the largest steps that take at most three quarters of `limit` bytes of
    VMEM, or with the smallest steps if none do.

    Where one step has the whole contracted dimension, an expert's weights are read once for all its rows.

    Args:
      depth: size of the contracted dimension. operands: number of cotangents. itemsize: bytes of an element.
    """
    of_depth = [depth, *(size for size in DEPTHS if depth % size == 0)]
    for tiles in (Tiles(rows, *sizes[::-1]) for sizes in itertools.product(of_depth, COLUMNS)):
        if tiles.vmem_bytes(operands, itemsize) <= limit * 3 // 4:
            break
    return tiles


def _tile_of_rows(rows: int) -> int:
    preferred = ROWS.get(hardware.generation().name, LEAST)
    return preferred if rows % preferred == 0 else LEAST


def _shapes(*operands: Any, **_: Any) -> list[ShapeDtype]:
    return [((operands[0].shape[0], operands[-2].shape[1]), operands[0].dtype)]


def _lowered(*operands: jax.Array, config: KernelConfig) -> tuple[jax.Array]:
    *given, group_sizes = operands
    cotangents, weights = given[: len(given) // 2], given[len(given) // 2 :]
    chip, (rows, depth), itemsize = hardware.generation(), cotangents[0].shape, cotangents[0].dtype.itemsize
    limit = config.vmem_limit_bytes or chip.vmem_bytes
    tiles = tiles_for(limit, _tile_of_rows(rows), depth, len(weights), itemsize)
    need = tiles.vmem_bytes(len(weights), itemsize)
    launch = Launch(1, min(limit, need + need // 4), interpret=hardware.interpret(config), cores=chip.cores)
    return (grouped_transposed(cotangents, weights, group_sizes, tiles=tiles, launch=launch),)


_transposed_p = declare_composite("grouped_transposed", _shapes, _lowered)
