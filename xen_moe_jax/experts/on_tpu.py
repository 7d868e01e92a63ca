"""Grouped matmuls on TPU: Pallas kernels for the products and for their gradients.

XLA's `ragged_dot` multiplies 128 rows at a time and reads them again for each 128 columns, which takes HBM longer than
the products take the matrix units. For a gradient by the rows, XLA transposes the weights of all experts of the chip by
a copy in every step. The activation, and the sum of the rows' cotangents by gate and by up, are passes of XLA over all
rows. The kernels of `pallas_kernels/grouped_transposed.py` and `grouped_by_weight.py` read weights as they lie, and
compute the activation and that sum themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._mesh import automatic_axes, manual_axes, vary_alike
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts.hopper import first_order
from xen_moe_jax.pallas_kernels.grouped_by_weight import WeightTiles, grouped_by_weight
from xen_moe_jax.pallas_kernels.grouped_transposed import (
    Tiles,
    Window,
    activation_gradients,
    grouped_products,
    grouped_transposed,
)
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import LANES

DTYPES = ("bfloat16", "float32")
LEAST = 128
"""The numbers of rows of a buffer and of columns of a weight are multiples of this. No tile has fewer rows."""
ROWS = (1024, 512, 256, 128)
"""Rows of a tile, the preferred number first."""
PIECES = {"v4": 128, "v6e": 128, "tpu7x": 128}
"""Rows of a tile that are multiplied at a time, by generation of the chip; other generations have 64. The last piece of
an expert in a tile is filled in part: the smaller the piece, the fewer rows are multiplied in vain. A piece of fewer
rows than this would take as long: the matrix unit is loaded with weights in that time. On v4, 64 rows have 0.65 of the
bundles of 128."""
COLUMNS, DEPTHS = (1792, 1024, 896, 512, 256, 128), (2048, 1024, 512, 256, 128)
"""Columns of a tile, and elements of the contracted dimension that one step multiplies, the preferred ones first. One
step for the whole contracted dimension is preferred to all of these."""
STEP = 2**22
"""Most elements of the weights of a step: the program of a step, which has no loop over them, grows with them."""
WEIGHT_ROWS = {4096: STEP // 2, 2048: 7 * 2**16, 1024: 2**18, 512: 2**18, 256: 2**18, 128: 2**18}
"""Numbers of rows of a tile of the gradients by weights, the preferred number first. The value of each is the least
number of elements of the weight's tile with which so many rows are taken; if no tile has enough elements, the most rows
that fit are taken. With smaller tiles of the weight HBM would move more bytes, and the instructions of a step would
take longer than its products: on v4, 1024 rows beside 512 x 1024 of a weight take 0.88 of the time of 2048 rows beside
512 x 512. Pieces are 256 rows on the generations that `PIECES` names, 128 on others: as deep as the matrix unit, but on
v4 twice as deep, where a piece of 256 has fewer bundles than two of 128.

4096 rows are for tiles of the largest size, `STEP // 2`. For a weight of 2048 x 768, which is one tile on v5e and v6e,
they were counted to save 2 to 3 us of a gradient's 145 to 560 us, for 16 experts with 2,048 rows each, but the first
blocks are twice as long: nothing covers the time in which they are read, 14 us more on v5e, 7 on v6e, 3 on v5p. For
weights under `2**18` elements all numbers of rows from 1024 to 4096 were counted within 3 us of each other."""
DEFAULT = KernelConfig(backend="pallas")


def why_not(rows: Any, weights: Any) -> str | None:
    """Returns why the kernels do not multiply rows `[C, A]` by weights `[L, A, B]` on a TPU here, with the remedy; None
    where they do."""
    if not manual_axes():
        return "the call is not inside jax.shard_map, where the kernels run"
    if axes := automatic_axes():
        return (
            f"mesh axes {list(axes)} are automatic here, and XLA does not partition the kernels: leave axis_names out "
            "of jax.shard_map"
        )
    if rows.dtype != weights.dtype or rows.dtype.name not in DTYPES:
        return (
            f"rows are {rows.dtype.name} and weights {weights.dtype.name}: both must be of one dtype, "
            f"{' or '.join(DTYPES)}"
        )
    sizes = {"C": rows.shape[0], "A": rows.shape[1], "B": weights.shape[2]}
    if 0 in sizes.values():
        return "an operand is empty"
    odd = [f"{name}={size}" for name, size in sizes.items() if size % LEAST]
    if odd:
        return (
            f"{' and '.join(odd)}: choose a capacity (C), a hidden size and an expert's width (A and B) that are "
            f"multiples of {LEAST}"
        )
    return None


def products(
    rows: jax.Array, weights: Sequence[jax.Array], group_sizes: jax.Array, config: KernelConfig | None = None
) -> tuple[jax.Array, ...]:
    """Returns the products of the rows with each of several weights of their experts, `[C, B]` each; unspecified past
    the last group.

    Args:
      rows: `[C, A]`, sorted by expert. weights: each `[L, A, B]`. group_sizes: int32 `[L]`.
    """
    rows, group_sizes, *varying = vary_alike(rows, group_sizes, *weights)
    return _products(config or DEFAULT, rows, tuple(varying), group_sizes)


def product_in_halves(rows: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns the product `[C, B]` of the rows with one weight of their experts, for a combine with `RowsInHalves`;
    unspecified past the last group.

    On the generations of `hardware.HALVES` the kernel writes it as `[2 * C, B / 2]`, and the reshape to `[C, B]` and
    that of the combine back to this form cancel each other. Any other reader costs a copy. It has no derivative.

    Args:
      rows: bfloat16 `[C, A]`, sorted by expert. weight: bfloat16 `[L, A, B]`, with `B` a multiple of 256.
      group_sizes: int32 `[L]`.
    """
    return _products_p.bind(rows, weight, group_sizes, activation=None, keep=True, halves=True, config=DEFAULT)[0]


def activated(
    rows: jax.Array, weights: Sequence[jax.Array], group_sizes: jax.Array, activation: Activation
) -> jax.Array:
    """Returns the activation of the `products`, `[C, B]`, computed in float32 from the rounded products and rounded
    once; unspecified past the last group. Its derivatives take the products as they are rounded."""
    rows, group_sizes, *varying = vary_alike(rows, group_sizes, *weights)
    return _activated(DEFAULT, activation, rows, tuple(varying), group_sizes)


def activated_and_products(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    activation: Activation,
    *,
    keep: bool,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns `activated`; and with `keep` the products, else an empty list. Both are unspecified past the last group.

    It has no derivative: `behind_activation` and `by_operands` are those of its caller.
    """
    config = config or DEFAULT
    inner, *kept = _products_p.bind(
        rows, *weights, group_sizes, activation=activation, keep=keep, halves=False, config=config
    )
    return inner, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(config: KernelConfig, rows: Any, weights: Any, group_sizes: Any) -> Any:
    return tuple(_products_p.bind(rows, *weights, group_sizes, activation=None, keep=True, halves=False, config=config))


def _forward(config: KernelConfig, rows: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    given = jax.tree.map(first_order, (rows, weights))
    return _products(config, *given, group_sizes), (rows, weights, group_sizes)


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
    """Returns the gradients of `products`: by the rows, `[C, A]`, zero past the last group; and by each of the weights,
    `[L, A, B]`.

    Args:
      rows: `[C, A]`. weights: each `[L, A, B]`. group_sizes: int32 `[L]`. cotangents: of the products, each `[C, B]`.
    """
    config = config or DEFAULT
    return (
        by_rows(weights, group_sizes, cotangents, config),
        tuple(by_weight(rows, group_sizes, by, config) for by in cotangents),
    )


def by_rows(
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    cotangents: Sequence[jax.Array],
    config: KernelConfig,
    halves: bool = False,
) -> jax.Array:
    """Returns the gradient of `products` by the rows, `[C, A]`, zero past the last group.

    Args:
      weights: each `[L, A, B]`. group_sizes: int32 `[L]`. cotangents: of the products, each `[C, B]`.
      halves: the gradient is made in the form that `product_in_halves` describes: it is bfloat16, and `A` is a multiple
        of 256.
    """
    return _transposed_p.bind(*cotangents, *weights, group_sizes, halves=halves, config=config)[0]


def by_weight(rows: jax.Array, group_sizes: jax.Array, cotangent: jax.Array, config: KernelConfig) -> jax.Array:
    """Returns the gradient of `products` by a weight, `[L, A, B]`, for rows `[C, A]` and a cotangent `[C, B]`. Both may
    be uninitialised memory past the last group."""
    return _by_weight_p.bind(rows, cotangent, group_sizes, config=config)[0]


def behind_activation(
    cotangent: jax.Array,
    weight: jax.Array,
    projections: Sequence[jax.Array],
    factors: jax.Array,
    group_sizes: jax.Array,
    activation: Activation,
    config: KernelConfig | None = None,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the gradients of `(f * a(projections)) @ weight[expert]`, by the kernel `activation_gradients`.

    Args:
      cotangent: `[C, H]`, of the product. weight: `[L, F, H]`, of the dtype of the cotangent.
      projections: each `[C, F]`, operands of the activation `a`. factors: float32 `[C]`, `f`.
      group_sizes: int32 `[L]`, rows of each expert.

    Returns:
      The cotangents of the projections; the rows `f * a(projections)`, `[C, F]`; and float32 `[C]`, the cotangent of
      `f`. All are zero past the last group.
    """
    found = _gradients_p.bind(
        cotangent, weight, factors, group_sizes, *projections, activation=activation, config=config or DEFAULT
    )
    return found[:-2], *found[-2:]


_products.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(config: KernelConfig, activation: Activation, rows: Any, weights: Any, group_sizes: Any) -> Any:
    return activated_and_products(rows, weights, group_sizes, activation, keep=False, config=config)[0]


def _activated_forward(
    config: KernelConfig, activation: Activation, rows: Any, weights: Any, group_sizes: Any
) -> tuple[Any, Any]:
    rows, weights = jax.tree.map(first_order, (rows, weights))
    inner, kept = activated_and_products(rows, weights, group_sizes, activation, keep=True, config=config)
    return inner, (kept, rows, weights, group_sizes)


def _activated_backward(config: KernelConfig, activation: Activation, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    *arrays, group_sizes = kept
    projections, rows, weights, cotangent = jax.tree.map(first_order, (*arrays, cotangent))
    by_inner, *inputs = (a.astype(jnp.float32) for a in (cotangent, *projections))
    by_projections = [a.astype(rows.dtype) for a in activation.gradients(by_inner, *inputs)]
    return *by_operands(rows, weights, group_sizes, by_projections, config), None


_activated.defvjp(_activated_forward, _activated_backward)


def tiles_for(
    limit: int,
    rows: int,
    depth: int,
    width: int,
    weights: int,
    given: int,
    itemsize: int,
    piece: int,
    results: int = 1,
    cores: int = 1,
) -> Tiles:
    """Returns the largest tiles that take at most three quarters of `limit` bytes of VMEM, or the smallest ones if none
    do. `cores` share the tiles of columns evenly where that is possible.

    Where one step has the whole contracted dimension, an expert's weights are read once for all its rows.

    Args:
      limit: bytes of VMEM of a core.
      rows, width: sizes of the result, multiples of 128, which the tiles divide; of a result in halves, `width` is that
        of one half. depth: size of the contracted dimension, a multiple of 128.
      weights, given, results: numbers of blocks, as in `Tiles.vmem_bytes`. itemsize: bytes of an element.
      piece: `Tiles.piece`. cores: of the chip.
    """
    of_depth = [depth, *(size for size in DEPTHS if depth % size == 0)]
    of_width = [size for size in COLUMNS if width % size == 0]
    of_width = [size for size in of_width if width // size % cores == 0] or of_width
    of_rows = [size for size in ROWS if rows % size == 0]
    for tiles in (Tiles(*sizes[::-1], piece) for sizes in itertools.product(of_depth, of_width, of_rows)):
        small = weights * tiles.columns * tiles.depth <= STEP
        if small and tiles.vmem_bytes(weights, given, itemsize, results) <= limit * 3 // 4:
            break
    return tiles


def _chosen(
    config: KernelConfig,
    given: Sequence[Any],
    width: int,
    weights: Sequence[Any],
    results: int = 1,
    window: Window | None = None,
) -> tuple[Tiles, Launch]:
    """Returns tiles and launch of a kernel that multiplies rows `given`, each `[C, A]`, with `weights` to `width`
    columns each. For a result in halves, `weights` has every weight twice, `width` is that of one half, and `results`
    counts both halves."""
    chip, itemsize = hardware.generation(), weights[0].dtype.itemsize
    limit, piece = config.vmem_limit_bytes or chip.vmem_bytes, PIECES.get(chip.name, 64)
    (rows, depth), operands = given[0].shape, (len(weights), len(given))
    rows = window.rows if window else rows
    tiles = tiles_for(limit, rows, depth, width, *operands, itemsize, piece, results, chip.cores)
    return tiles, _launch(config, limit, tiles.vmem_bytes(*operands, itemsize, results))


def _launch(config: KernelConfig, limit: int, need: int) -> Launch:
    """Launch of a kernel whose blocks take `need` of `limit` bytes of VMEM; a quarter more, at least 2 MiB, is for its
    values."""
    most = min(limit, need + max(need // 4, 2 * hardware.MIB))
    return Launch(1, most, interpret=hardware.interpret(config), cores=hardware.generation().cores)


def _shapes_of_products(
    rows: Any, *operands: Any, activation: Activation | None, keep: bool, halves: bool, config: KernelConfig
) -> list[ShapeDtype]:
    del halves, config
    *weights, _ = operands
    results = (activation is not None) + keep * len(weights)
    return [((rows.shape[0], weights[0].shape[2]), rows.dtype)] * results


def _lowered_products(
    rows: jax.Array,
    *operands: jax.Array,
    activation: Activation | None,
    keep: bool,
    halves: bool,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    *weights, group_sizes = operands
    found = rows_products(rows, weights, group_sizes, activation, keep, halves, config)
    return tuple(a.reshape(rows.shape[0], weights[0].shape[2]) for a in found)


def rows_products(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    activation: Activation | None,
    keep: bool,
    halves: bool,
    config: KernelConfig,
    window: Window | None = None,
) -> list[jax.Array]:
    """Returns `activated_and_products`, or without an activation the products, for lowering, of the rows of a window;
    `[2 * C, B / 2]` where rows are made in halves."""
    results, width = (activation is not None) + keep * len(weights), weights[0].shape[2]
    halves = halves and hardware.makes_halves()
    parts = 2 if halves else 1
    tiles, launch = _chosen(config, [rows], width // parts, [*weights] * parts, results * parts, window)
    return grouped_products(
        rows,
        weights,
        group_sizes,
        activation=activation,
        keep=keep,
        halves=halves,
        tiles=tiles,
        launch=launch,
        window=window,
    )


_products_p = declare_composite("grouped_products", _shapes_of_products, _lowered_products, multiplies=True)


def _shapes(*operands: Any, **_: Any) -> list[ShapeDtype]:
    return [((operands[0].shape[0], operands[-2].shape[1]), operands[0].dtype)]


def _lowered(*operands: jax.Array, halves: bool, config: KernelConfig) -> tuple[jax.Array]:
    *given, group_sizes = operands
    cotangents, weights = given[: len(given) // 2], given[len(given) // 2 :]
    out = rows_gradient(cotangents, weights, group_sizes, halves, config)
    return (out.reshape(cotangents[0].shape[0], weights[0].shape[1]),)


def rows_gradient(
    cotangents: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    halves: bool,
    config: KernelConfig,
    window: Window | None = None,
) -> jax.Array:
    """Returns `by_rows`, for lowering, of the rows of a window; `[2 * C, A / 2]` where rows are made in halves."""
    halves = halves and hardware.makes_halves()
    parts = 2 if halves else 1
    tiles, launch = _chosen(config, cotangents, weights[0].shape[1] // parts, [*weights] * parts, parts, window)
    return grouped_transposed(
        cotangents, weights, group_sizes, halves=halves, tiles=tiles, launch=launch, window=window
    )


_transposed_p = declare_composite("grouped_transposed", _shapes, _lowered, multiplies=True)


def _shapes_by_weight(rows: Any, cotangent: Any, group_sizes: Any, **_: Any) -> list[ShapeDtype]:
    return [((group_sizes.shape[0], rows.shape[1], cotangent.shape[1]), rows.dtype)]


def weight_tiles_for(
    limit: int, rows: int, depth: int, width: int, itemsize: int, piece: int, cores: int = 1
) -> WeightTiles:
    """Returns tiles that take at most three quarters of `limit` bytes of VMEM. Of all tiles whose part of the weight
    has as many elements as `WEIGHT_ROWS` asks for their number of rows, they have the most rows; and of the tiles with
    so many rows they are those for which HBM moves the fewest bytes. `cores` share the tiles of `depth` evenly where
    that is possible.

    Args:
      rows: `C`, which the tiles' rows divide. depth, width: `A` and `B` of the weight, multiples of 128.
      itemsize: bytes of an element. piece: `WeightTiles.piece`.
    """
    found = []
    for size in WEIGHT_ROWS:
        if rows % size or size % piece:
            continue
        for above, columns in itertools.product(_divisors(depth), _divisors(width)):
            tiles = WeightTiles(size, above, columns, piece)
            if above * columns <= STEP // 2 and tiles.vmem_bytes(itemsize) <= limit * 3 // 4:
                found.append(tiles)
    enough = [tiles for tiles in found if tiles.above * tiles.columns >= WEIGHT_ROWS[tiles.rows]] or found
    enough = [tiles for tiles in enough if depth // tiles.above % cores == 0] or enough
    return max(enough, key=lambda tiles: (tiles.rows, tiles.above * tiles.columns / (tiles.above + tiles.columns)))


def _divisors(size: int) -> list[int]:
    """Multiples of 128 that divide `size`."""
    return [n for n in range(LANES, size + 1, LANES) if size % n == 0]


def _lowered_by_weight(
    rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array, *, config: KernelConfig
) -> tuple[jax.Array]:
    return (weight_gradient(rows, cotangent, group_sizes, config)[0],)


def weight_gradient(
    rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array, config: KernelConfig, window: Window | None = None
) -> list[jax.Array]:
    """Returns the results of `grouped_by_weight`, for lowering."""
    chip, itemsize = hardware.generation(), rows.dtype.itemsize
    limit = config.vmem_limit_bytes or chip.vmem_bytes
    every = window.rows if window else rows.shape[0]
    piece = 256 if chip.name in PIECES and every % 256 == 0 else LEAST
    tiles = weight_tiles_for(limit, every, rows.shape[1], cotangent.shape[1], itemsize, piece, chip.cores)
    launch = _launch(config, limit, tiles.vmem_bytes(itemsize))
    return grouped_by_weight(rows, cotangent, group_sizes, tiles=tiles, launch=launch, window=window)


_by_weight_p = declare_composite("grouped_by_weight", _shapes_by_weight, _lowered_by_weight, multiplies=True)


def _shapes_of_gradients(*operands: Any, **_: Any) -> list[ShapeDtype]:
    _, _, factors, _, *projections = operands
    of_rows = (projections[0].shape, projections[0].dtype)
    return [of_rows] * (len(projections) + 1) + [(factors.shape, factors.dtype)]


def _lowered_gradients(*operands: jax.Array, activation: Activation, config: KernelConfig) -> tuple[jax.Array, ...]:
    *found, by_factors = gradients_behind_activation(*operands, activation=activation, config=config)
    return *found, summed_factors(by_factors)


def gradients_behind_activation(
    cotangent: jax.Array,
    weight: jax.Array,
    factors: jax.Array,
    group_sizes: jax.Array,
    *projections: jax.Array,
    activation: Activation,
    config: KernelConfig,
    window: Window | None = None,
) -> list[jax.Array]:
    """Returns `behind_activation`, for lowering, of the rows of a window. The last result is for `summed_factors`."""
    tiles, launch = _chosen(config, [cotangent], weight.shape[1], [weight], 2 * len(projections) + 1, window)
    return activation_gradients(
        cotangent,
        weight,
        projections,
        factors,
        group_sizes,
        activation=activation,
        tiles=tiles,
        launch=launch,
        window=window,
    )


def summed_factors(by_factors: jax.Array) -> jax.Array:
    """Returns float32 `[C]`, the cotangent of the factors, out of the sums for each tile of columns."""
    return jnp.sum(by_factors, axis=0).reshape(-1)


_gradients_p = declare_composite("activation_gradients", _shapes_of_gradients, _lowered_gradients, multiplies=True)
