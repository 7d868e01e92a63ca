"""The grouped matmul of this library for Hopper GPUs, with its derivatives and the choice of its tiles.

Both gradients are kernels too: that of the rows reads the weights transposed as they lie, that of the weights
contracts the rows of each group. Sums are in float32, results in the dtype of the operands.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import ROW_ALIGNMENT, Tiles

DTYPES = ("bfloat16", "float16")
COMPUTE_CAPABILITY = "9.0"
PREFERRED = (Tiles(), Tiles(n=128, stages=6))
"""The first that divides the shapes. The times of twelve are in benchmarks/results/grouped_matmul_h200.json: pairs of
blocks that share their loads (`Tiles(cluster="m")`) were some 5 % faster, and their results have not been compared on a
GPU yet."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of the three kernels: forward, gradient of the rows, gradient of the weights."""

    forward: Tiles
    rows: Tiles
    weights: Tiles


@functools.cache
def on_hopper() -> bool:
    """Whether the default device is a Hopper GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == COMPUTE_CAPABILITY


def plan(depth: int, columns: int) -> Plan | None:
    """Tiles for rows `[C, depth]` times weights `[L, depth, columns]`; None where the kernels have none."""

    def fits(height: int | None, width: int, depth: int | None) -> Tiles | None:
        for tiles in PREFERRED:
            if (
                width % tiles.cluster_n == 0
                and (height is None or height % tiles.cluster_m == 0)
                and (depth is None or depth % tiles.k == 0)
            ):
                return tiles
        return None

    found = (
        fits(None, columns, depth),
        fits(None, depth, columns),
        fits(depth, columns, None),
    )
    return None if None in found else Plan(*found)  # type: ignore[arg-type]


def supports(rows: jax.Array, weights: jax.Array) -> bool:
    """Whether the kernels can multiply operands of these shapes and dtypes, here."""
    return (
        rows.dtype == weights.dtype
        and rows.dtype.name in DTYPES
        and rows.shape[0] > 0
        and plan(*weights.shape[1:]) is not None
        and on_hopper()
    )


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, plan_of: Plan | None = None
) -> jax.Array:
    """Rows `[C, A]` times the weights `[L, A, B]` of their groups -> `[C, B]`; bfloat16 or float16.

    Raises ValueError where the kernels do not support the operands: `supports`.
    """
    chosen = plan_of or plan(*weights.shape[1:])
    if chosen is None or not supports(rows, weights):
        raise ValueError(
            f"grouped_matmul='hopper': rows {rows.dtype}{list(rows.shape)}, weights {weights.dtype}"
            f"{list(weights.shape)}: needs a Hopper GPU, one dtype of {DTYPES}, and widths that are multiples of 128; "
            "use 'auto'"
        )
    axes = frozenset().union(*(varying_axes(operand) for operand in (rows, weights, group_sizes)))
    rows, weights, group_sizes = (_vary(operand, axes) for operand in (rows, weights, group_sizes))
    extra = -rows.shape[0] % ROW_ALIGNMENT
    out = _multiply(chosen, jnp.pad(rows, ((0, extra), (0, 0))) if extra else rows, weights, group_sizes)
    return out[: rows.shape[0]] if extra else out


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`array`, varying over mesh `axes`: what a kernel returns varies over none, as far as JAX knows."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(chosen: Plan, rows: Any, weights: Any, group_sizes: Any) -> Any:
    out = rows_by_weights(rows, weights, group_sizes, transposed=False, tiles=chosen.forward)
    return _vary(out, varying_axes(rows))


def _forward(chosen: Plan, rows: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    return _multiply(chosen, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(chosen: Plan, kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    rows, weights, group_sizes = kept
    by_rows = rows_by_weights(cotangent, weights, group_sizes, transposed=True, tiles=chosen.rows)
    by_weights = rows_by_rows(rows, cotangent, group_sizes, tiles=chosen.weights)
    return _vary(by_rows, varying_axes(rows)), _vary(by_weights, varying_axes(weights)), None


_multiply.defvjp(_forward, _backward)
