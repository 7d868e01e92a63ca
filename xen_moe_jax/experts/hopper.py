"""The grouped matmul of this library for Hopper GPUs, with its derivatives and the choice of its tiles.

Both gradients are kernels too: that of the rows reads the weights transposed as they lie, that of the weights
contracts the rows of each group. Sums are in float32, results in the dtype of the operands.

Two projections of the same rows have one gradient of the rows: both products are added up in one accumulator, and
neither is stored. The two projections of SwiGLU are multiplied side by side, and the activation is stored with or
without them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, vary_alike
from xen_moe_jax._overlap import in_overlap
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import rows_by_weights, swiglu_rows
from xen_moe_jax.pallas_kernels.hopper.tiles import ROW_ALIGNMENT, Tiles

DTYPES = ("bfloat16", "float16")
COMPUTE_CAPABILITY = "9.0"
PREFERRED = (Tiles(), Tiles(n=128, stages=6))
"""The first that divides the shapes. The times of twelve are in benchmarks/results/grouped_matmul_h200.json. Pairs of
blocks that share their loads (`Tiles(cluster="m")`) are 2 to 5 % faster on groups of 2048 rows; a layer gains nothing
by them (docs/lab/layers.md), and tiles twice as high fit small groups worse."""
SWIGLU = Tiles()
"""Tiles of the kernel that multiplies both projections: half of a tile's columns belong to each projection."""
FEW_ROWS = 64
"""Rows a group (by the size of the buffer) up to which loading the weights takes longer than multiplying by them."""
FEW = (Tiles(m=64, split="n"), Tiles(m=64, n=128, stages=8, split="n"))
"""PREFERRED and SWIGLU for few rows: half as high, so that fewer unused rows are multiplied and stored."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of the kernels: forward, gradient of the rows, gradient of the weights, and SwiGLU forward."""

    forward: Tiles
    rows: Tiles
    weights: Tiles
    swiglu: Tiles = SWIGLU


@functools.cache
def on_hopper() -> bool:
    """True if the default device is a Hopper GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == COMPUTE_CAPABILITY


def plan(depth: int, columns: int, rows: int | None = None, groups: int = 1) -> Plan | None:
    """Tiles for `[rows, depth]` times weights `[groups, depth, columns]`; None where the kernels have none.

    Beside pending operations (`xm.overlap`) thread blocks claim their tiles one by one, in the backward pass too.
    """
    few = rows is not None and rows <= FEW_ROWS * groups
    of_rows = FEW if few else PREFERRED

    def fits(preferred: tuple[Tiles, ...], height: int | None, width: int, depth: int | None) -> Tiles | None:
        for tiles in preferred:
            if (
                width % tiles.cluster_n == 0
                and (height is None or height % tiles.cluster_m == 0)
                and (depth is None or depth % tiles.k == 0)
            ):
                return tiles
        return None

    found = (
        fits(of_rows, None, columns, depth),
        fits(of_rows, None, depth, columns),
        fits(PREFERRED, depth, columns, None),
    )
    swiglu = FEW[0] if few else SWIGLU
    kinds = [dataclasses.replace(tiles, claimed=in_overlap()) for tiles in (*found, swiglu) if tiles is not None]
    return Plan(*kinds) if len(kinds) == len(dataclasses.fields(Plan)) else None


def _plan_for(rows: jax.Array, weights: jax.Array) -> Plan | None:
    groups, depth, columns = weights.shape
    return plan(depth, columns, rows.shape[0], groups)


def supports(rows: jax.Array, weights: jax.Array) -> bool:
    """True if the kernels can multiply operands of these shapes and dtypes on this machine."""
    return (
        rows.dtype == weights.dtype
        and rows.dtype.name in DTYPES
        and rows.shape[0] > 0
        and on_hopper()
        and _plan_for(rows, weights) is not None
    )


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, plan_of: Plan | None = None
) -> jax.Array:
    """Rows `[C, A]` times the weights `[L, A, B]` of their groups -> `[C, B]`; bfloat16 or float16.

    Raises ValueError where the kernels do not support the operands: `supports`.
    """
    chosen = plan_of or _plan_for(rows, weights)
    if chosen is None or not supports(rows, weights):
        raise ValueError(
            f"grouped_matmul='hopper': rows {rows.dtype}{list(rows.shape)}, weights {weights.dtype}"
            f"{list(weights.shape)}: needs a Hopper GPU, one dtype of {DTYPES}, and widths that are multiples of 128; "
            "use 'auto'"
        )
    padded, weights, group_sizes = vary_alike(_whole_tiles(rows), weights, group_sizes)
    return _multiply(chosen, padded, weights, group_sizes)[: rows.shape[0]]


def two_projections(
    rows: jax.Array, one: jax.Array, other: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`grouped_matmul` of rows `[C, A]` with each of two weights `[L, A, B]` -> two of `[C, B]`; `supports` holds."""
    chosen = _plan_for(rows, one)
    assert chosen is not None
    padded, *operands = vary_alike(_whole_tiles(rows), one, other, group_sizes)
    first, second = _multiply_two(chosen, padded, *operands)
    return first[: rows.shape[0]], second[: rows.shape[0]]


def swiglu(
    rows: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, row_weights: jax.Array | None = None
) -> jax.Array:
    """`silu(rows @ gate) * (rows @ up)`, times `row_weights` if given, in float32 and rounded once; `supports` holds.

    Args:
      rows: `[C, A]`, bfloat16 or float16.
      gate, up: `[L, A, F]`.
      group_sizes: int32 `[L]`.
      row_weights: float32 `[C]`.

    Returns:
      `[C, F]`. Its derivatives take the projections as they are in the dtype of the rows.
    """
    chosen = _plan_for(rows, gate)
    assert chosen is not None
    weighted = [] if row_weights is None else [_whole_tiles(row_weights)]
    padded, *operands = vary_alike(_whole_tiles(rows), gate, up, group_sizes, *weighted)
    return _swiglu(chosen, padded, *operands, *([] if weighted else [None]))[: rows.shape[0]]


def _whole_tiles(array: jax.Array) -> jax.Array:
    """Pads rows with zeros to a multiple of `ROW_ALIGNMENT`."""
    extra = -array.shape[0] % ROW_ALIGNMENT
    return jnp.pad(array, ((0, extra), *[(0, 0)] * (array.ndim - 1))) if extra else array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(chosen: Plan, rows: Any, weights: Any, group_sizes: Any) -> Any:
    out = rows_by_weights(rows, weights, group_sizes, transposed=False, tiles=chosen.forward)
    return vary(out, varying_axes(rows))


def _forward(chosen: Plan, rows: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    return _multiply(chosen, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(chosen: Plan, kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    rows, weights, group_sizes = kept
    by_rows = rows_by_weights(cotangent, weights, group_sizes, transposed=True, tiles=chosen.rows)
    by_weights = rows_by_rows(rows, cotangent, group_sizes, tiles=chosen.weights)
    return vary(by_rows, varying_axes(rows)), vary(by_weights, varying_axes(weights)), None


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_two(chosen: Plan, rows: Any, one: Any, other: Any, group_sizes: Any) -> Any:
    return tuple(_multiply(chosen, rows, weights, group_sizes) for weights in (one, other))


def _two_forward(chosen: Plan, rows: Any, one: Any, other: Any, group_sizes: Any) -> tuple[Any, Any]:
    return _multiply_two(chosen, rows, one, other, group_sizes), (rows, one, other, group_sizes)


def _two_backward(chosen: Plan, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    rows, one, other, group_sizes = kept
    by_rows = rows_by_weights(
        cotangents[0], one, group_sizes, (cotangents[1], other), transposed=True, tiles=chosen.rows
    )
    by_weights = [
        vary(rows_by_rows(rows, cotangent, group_sizes, tiles=chosen.weights), varying_axes(rows))
        for cotangent in cotangents
    ]
    return vary(by_rows, varying_axes(rows)), *by_weights, None


_multiply_two.defvjp(_two_forward, _two_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(chosen: Plan, rows: Any, gate: Any, up: Any, group_sizes: Any, row_weights: Any) -> Any:
    (out,) = swiglu_rows(rows, gate, up, group_sizes, row_weights, projections=False, tiles=chosen.swiglu)
    return vary(out, varying_axes(rows))


def _swiglu_forward(chosen: Plan, rows: Any, gate: Any, up: Any, group_sizes: Any, row_weights: Any) -> tuple[Any, Any]:
    results = swiglu_rows(rows, gate, up, group_sizes, row_weights, projections=True, tiles=chosen.swiglu)
    out, *projections = (vary(result, varying_axes(rows)) for result in results)
    return out, (rows, gate, up, group_sizes, row_weights, projections)


def _swiglu_backward(chosen: Plan, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    rows, gate, up, group_sizes, row_weights, projections = kept
    g, u, by_out = (a.astype(jnp.float32) for a in (*projections, cotangent))
    sigmoid = jax.nn.sigmoid(g)
    by_row_weights = None
    if row_weights is not None:
        by_row_weights = jnp.sum(g * sigmoid * u * by_out, axis=-1)
        by_out = by_out * row_weights[:, None]
    by_projections = by_out * u * sigmoid * (1 + g * (1 - sigmoid)), by_out * g * sigmoid
    by_projections = tuple(a.astype(rows.dtype) for a in by_projections)
    return *_two_backward(chosen, (rows, gate, up, group_sizes), by_projections), by_row_weights


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
