"""Grouped matmuls on TPU: XLA's `ragged_dot`, and Pallas kernels for its gradients by the rows.

XLA multiplies cotangents with weights that it has transposed by a copy, all experts of the chip in every step, and adds
the cotangents of the rows by gate and by up in a pass over all rows. Here one kernel reads the weights as they lie and
adds both up, and another one goes on through the activation (`pallas_kernels/grouped_transposed.py`).
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
from xen_moe_jax.experts.hopper import first_order
from xen_moe_jax.pallas_kernels.grouped_transposed import Tiles, activation_gradients, grouped_transposed
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import LANES

DTYPES = ("bfloat16", "float32")
LEAST = 128
"""The numbers of rows of a buffer and of columns of a weight are multiples of this. No tile has fewer rows."""
ROWS = (512, 256, 128)
"""Rows of a tile, the preferred number first."""
PIECES = {"v6e": 128, "tpu7x": 128}
"""Rows of a tile that are multiplied at a time, by generation of the chip; other generations have 64. An expert may
begin inside a piece, which is then multiplied by the weights of both experts: the smaller the piece, the fewer rows are
multiplied twice. Fewer than this take as long: the matrix unit is loaded with weights in that time."""
COLUMNS, DEPTHS = (1024, 512, 256, 128), (2048, 1024, 512, 256, 128)
"""Columns of a tile, and elements of the contracted dimension that one step multiplies, the preferred ones first. One
step for the whole contracted dimension is preferred to all of these."""
STEP = 2**22
"""Most elements of the weights of a step: the program of a step, which has no loop over them, grows with them."""
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
    rows, weights, cotangents = jax.tree.map(first_order, (rows, weights, cotangents))
    return *by_operands(rows, weights, group_sizes, cotangents, config), None


def by_operands(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    cotangents: Sequence[jax.Array],
    config: KernelConfig | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the gradients of `products` by the rows and by each of the weights."""
    (by_rows,) = _transposed_p.bind(*cotangents, *weights, group_sizes, config=config or DEFAULT)
    return by_rows, tuple(
        by_weight(rows, weight, group_sizes, by) for weight, by in zip(weights, cotangents, strict=True)
    )


def by_weight(rows: jax.Array, weight: jax.Array, group_sizes: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the gradient of `ragged_dot(rows, weight, group_sizes)` by the weight."""
    return jax.vjp(lambda weight: jax.lax.ragged_dot(rows, weight, group_sizes), weight)[1](cotangent)[0]


def behind_activation(
    cotangent: jax.Array,
    weight: jax.Array,
    projections: Sequence[jax.Array],
    factors: jax.Array,
    group_sizes: jax.Array,
    activation: Activation,
    config: KernelConfig = DEFAULT,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the gradients of `(f * a(projections)) @ weight[expert]`, by the kernel `activation_gradients`.

    Args:
      cotangent: `[C, H]`, of the product. weight: `[L, F, H]`, of the dtype of the cotangent.
      projections: each `[C, F]`, operands of the activation `a`. factors: float32 `[C]`, `f`.
      group_sizes: int32 `[L]`, rows of each expert.

    Returns:
      The cotangents of the projections; the rows `f * a(projections)`, and float32 `[C]`, the cotangent of `f`.
    """
    found = _gradients_p.bind(
        cotangent, weight, factors, group_sizes, *projections, activation=activation, config=config
    )
    return found[:-2], *found[-2:]


_products.defvjp(_forward, _backward)


def tiles_for(
    limit: int, rows: int, depth: int, width: int, operands: int, itemsize: int, piece: int, results: int = 1
) -> Tiles:
    """Returns the largest tiles that take at most three quarters of `limit` bytes of VMEM, or the smallest ones if none
    do.

    Where one step has the whole contracted dimension, an expert's weights are read once for all its rows.

    Args:
      rows, width: sizes of the result, which tiles divide where they can. depth: size of the contracted dimension.
      operands: number of cotangents. itemsize: bytes of an element. piece: `Tiles.piece`. results: number of results.
    """
    of_depth = [depth, *(size for size in DEPTHS if depth % size == 0)]
    of_width = [size for size in COLUMNS if width % size == 0]
    of_rows = [size for size in ROWS if rows % size == 0]
    for tiles in (Tiles(*sizes[::-1], piece) for sizes in itertools.product(of_depth, of_width, of_rows)):
        small = operands * tiles.columns * tiles.depth <= STEP
        if small and tiles.vmem_bytes(operands, itemsize, results) <= limit * 3 // 4:
            break
    return tiles


def _chosen(config: KernelConfig, rows: int, weights: Sequence[Any], results: int = 1) -> tuple[Tiles, Launch]:
    """Tiles and launch of a kernel that multiplies `rows` rows with transposed weights, each `[L, B, A]`."""
    chip, (_, width, depth), itemsize = hardware.generation(), weights[0].shape, weights[0].dtype.itemsize
    limit, piece = config.vmem_limit_bytes or chip.vmem_bytes, PIECES.get(chip.name, 64)
    tiles = tiles_for(limit, rows, depth, width, len(weights), itemsize, piece, results)
    need = tiles.vmem_bytes(len(weights), itemsize, results)
    return tiles, Launch(1, min(limit, need + need // 4), interpret=hardware.interpret(config), cores=chip.cores)


def _shapes(*operands: Any, **_: Any) -> list[ShapeDtype]:
    return [((operands[0].shape[0], operands[-2].shape[1]), operands[0].dtype)]


def _lowered(*operands: jax.Array, config: KernelConfig) -> tuple[jax.Array]:
    *given, group_sizes = operands
    cotangents, weights = given[: len(given) // 2], given[len(given) // 2 :]
    tiles, launch = _chosen(config, cotangents[0].shape[0], weights)
    return (grouped_transposed(cotangents, weights, group_sizes, tiles=tiles, launch=launch),)


_transposed_p = declare_composite("grouped_transposed", _shapes, _lowered)


def _shapes_of_gradients(*operands: Any, **_: Any) -> list[ShapeDtype]:
    _, _, factors, _, *projections = operands
    of_rows = (projections[0].shape, projections[0].dtype)
    return [of_rows] * (len(projections) + 1) + [(factors.shape, factors.dtype)]


def _lowered_gradients(*operands: jax.Array, activation: Activation, config: KernelConfig) -> tuple[jax.Array, ...]:
    cotangent, weight, factors, group_sizes, *projections = operands
    tiles, launch = _chosen(config, cotangent.shape[0], [weight], 2 * len(projections) + 1)
    by_projections, weighted, by_factors = activation_gradients(
        cotangent, weight, projections, factors, group_sizes, activation=activation, tiles=tiles, launch=launch
    )
    return *by_projections, weighted, by_factors


_gradients_p = declare_composite("activation_gradients", _shapes_of_gradients, _lowered_gradients)
