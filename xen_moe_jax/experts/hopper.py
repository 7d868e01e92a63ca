"""The grouped matmul of this library for Hopper GPUs, with its derivatives and the choice of its tiles.

Both gradients are kernels too: that of the rows reads the weights transposed as they lie, that of the weights
contracts the rows of each group. Sums are in float32, results in the dtype of the operands.

The two projections of gated experts are computed side by side by one kernel, which stores the activation, with or
without the projections. They have one gradient of the rows: both products are added up in one accumulator, and neither
is stored. Biases are added where the sums are stored. A bias' gradient, the sum over a group's rows, is a contraction
with ones.

Hidden sizes and widths may be any multiples of 32 from 128 on. Others are padded up to a multiple of 64, and to 128 at
least, by a copy of the weights in every call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._async_primitives import order
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, vary_alike
from xen_moe_jax._overlap import in_overlap, overlap_work
from xen_moe_jax.experts.lent import Lent, by_slots, contracted, one_at_once
from xen_moe_jax.pallas_kernels.hopper import gather
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import COLUMN_ALIGNMENT, HEIGHTS, ROW_ALIGNMENT, Tiles

DTYPES = ("bfloat16", "float16")
COMPUTE_CAPABILITY = "9.0"
PREFERRED = (Tiles(), Tiles(n=192), Tiles(n=128, stages=6))
"""Tiles by their widths. The times of twelve are in benchmarks/results/grouped_matmul_h200.json."""
COSTS = {256: 1.0, 192: 1.02, 128: 1.06}
"""Relative time of a column in tiles of each width: narrower tiles load more for each multiplication."""
GATED = Tiles()
"""Tiles of the kernel that multiplies both projections: half of a tile's columns belong to each projection."""
FEW_ROWS = 64
"""Rows a group (by the size of the buffer) up to which loading the weights takes longer than multiplying by them."""
FEW = (Tiles(m=64, split="n"), Tiles(m=64, n=128, stages=8, split="n"))
"""PREFERRED and GATED for few rows: half as high, so that fewer unused rows are multiplied and stored."""
SWIGLU = Activation()
SUMS = Tiles(m=64, split="n")
"""Tiles of the contraction with ones: as low as tiles can be, since all rows but one or two are zeros."""
TALL = Tiles(m=256, n=128)
"""Tiles of weights' gradients in bands where the operand on the side of the columns is gathered. Threads copy half as
many elements of a row as with `PREFERRED`, and TMA twice as many. At DeepSeek-V3's size the kernel takes 1,526 us
instead of 1,717 (H100)."""
FITTED, FITTED_ROWS = Tiles(m=HEIGHTS[-1], split="n", fitted=True), 640
"""Fitted tiles, and the most rows a group, by the size of the buffer, for which two projections and gradients of rows
have them; single products have them up to half as many rows. They save work at the ends of groups, where few tiles of
a group with more rows are."""
PAIRED_FROM = 4096
"""Depth from which fitted tiles of two projections of gathered rows are for pairs of blocks, with fixed shares, instead
of claimed. A pair reads weights once and waits for the higher one of its tiles, which costs more where tiles are short.
docs/lab/layers.md has the times."""
BAND = 20
"""Most tiles of rows in a band of a group, in matmuls of many rows. All thread blocks together compute 132 tiles at a
time. Row by row, blocks side by side would share the rows of a tile. In a band they share its weights, which are twice
as wide. No band has rows of two groups, so that a group of up to 2,560 rows reads its weights from memory once.
docs/lab/layers.md has the gains."""
CONTRACTION_BAND_FROM, CONTRACTION_BAND = 16, 8
"""Weights' gradients with more columns of tiles than the first number compute these in bands of the second."""
PADDED = 64
"""Sizes that are no multiples of `COLUMN_ALIGNMENT` are padded up to a multiple of this."""
LEAST = 128
"""Smaller sizes are padded up to this. On an H100, jax 0.11.2, kernels whose results have 64 columns, one row of the
swizzle, store zeros; with 128 and 192 columns every element is right (tests/gpu/test_grouped_matmul.py)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of the kernels for one matmul and its gradients.

    Attributes:
      forward: of the product.
      rows: of the gradient of the rows.
      weights: of the gradient of the weights.
      gated: of two projections side by side.
      sums: of the gradient of a bias.
      gathered: of the gradient of the weights where the operand on the side of the columns is gathered; None if these
        are `weights`.
      gated_gathered: of two projections side by side of rows that are gathered; None if these are `gated`.
    """

    forward: Tiles
    rows: Tiles
    weights: Tiles
    gated: Tiles = GATED
    sums: Tiles = SUMS
    gathered: Tiles | None = None
    gated_gathered: Tiles | None = None

    @property
    def columns_gathered(self) -> Tiles:
        return self.gathered or self.weights

    @property
    def projections_gathered(self) -> Tiles:
        return self.gated_gathered or self.gated


@functools.cache
def on_hopper() -> bool:
    """True if the default device is a Hopper GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == COMPUTE_CAPABILITY


def plan(depth: int, columns: int, rows: int | None = None, groups: int = 1) -> Plan:
    """Returns tiles for `[rows, depth]` times weights `[groups, depth, columns]`; `rows` None means many rows.

    Those of weights' gradients are `claimed`: thread blocks take them one by one, since a tile takes as long as its
    group has rows. So are fitted tiles of two projections, except those for pairs of blocks (`PAIRED_FROM`). Their
    heights differ, and blocks with fixed shares would drift apart until those with the same weights, two matrices, read
    them from memory one after the other. While the work of an `xm.overlap` is traced, all tiles are claimed, in the
    backward pass, too.
    """
    few = rows is not None and rows <= FEW_ROWS * groups
    common = math.gcd(_padded(depth), _padded(columns)) * 2
    swizzle = next(width for width in (128, 64) if common % width == 0)

    def fits(part: int) -> bool:
        return rows is not None and part * rows <= FITTED_ROWS * groups and swizzle == FITTED.swizzle

    def of_rows(part: int) -> tuple[Tiles, ...]:
        return FEW if few else (FITTED,) if fits(part) else PREFERRED

    def best(candidates: tuple[Tiles, ...], width: int) -> Tiles:
        chosen = min(candidates, key=lambda tiles: -(-width // tiles.n) * tiles.n * COSTS[tiles.n])
        return dataclasses.replace(chosen, swizzle=swizzle, claimed=in_overlap())

    def for_rows(candidates: tuple[Tiles, ...], width: int) -> Tiles:
        chosen = best(candidates, width)
        return dataclasses.replace(chosen, band=1 if few else BAND, pair=not few and not chosen.fitted)

    def for_weights(candidates: tuple[Tiles, ...]) -> Tiles:
        chosen = best(candidates, columns)
        band = CONTRACTION_BAND if -(-columns // chosen.n) > CONTRACTION_BAND_FROM else 1
        return dataclasses.replace(chosen, band=band, claimed=True)

    weights = for_weights(PREFERRED)
    gated = for_rows((FEW[0] if few else FITTED if fits(1) else GATED,), columns)
    even = -(-columns // (gated.n // 2)) % 2 == 0
    in_pairs = gated.fitted and not gated.claimed and even and depth >= PAIRED_FROM
    return Plan(
        forward=for_rows(of_rows(2), columns),
        rows=for_rows(of_rows(1), depth),
        weights=weights,
        gathered=for_weights((TALL,)) if weights.band > 1 and depth % TALL.m == 0 else None,
        gated=dataclasses.replace(gated, claimed=gated.claimed or gated.fitted),
        gated_gathered=dataclasses.replace(gated, pair=True) if in_pairs else None,
        sums=best((SUMS,), columns),
    )


def _plan_for(rows: jax.Array, weights: jax.Array) -> Plan:
    groups, depth, columns = weights.shape
    with overlap_work(in_overlap() or isinstance(weights, Lent)):  # lent weights travel beside the kernels
        return plan(depth, columns, rows.shape[0], groups)


def why_not(rows: jax.ShapeDtypeStruct | jax.Array, weights: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Returns why the kernels cannot multiply operands of these shapes and dtypes on a Hopper GPU, or None."""
    if rows.dtype != weights.dtype:
        return f"the rows are {rows.dtype.name} and the weights {weights.dtype.name}: they must be of one dtype"
    if rows.dtype.name not in DTYPES:
        return f"{rows.dtype.name} is none of {' and '.join(DTYPES)}: set MoEConfig.dtype"
    if 0 in rows.shape or 0 in weights.shape:
        return "an operand is empty"
    return None


def copied_bytes(depth: int, columns: int, groups: int, dtype: Any) -> int:
    """Returns the bytes of the padded copy of weights `[groups, depth, columns]` that every call makes; 0 if it makes
    none."""
    if (_padded(depth), _padded(columns)) == (depth, columns):
        return 0
    return groups * _padded(depth) * _padded(columns) * jnp.dtype(dtype).itemsize


def gathers(depth: int, columns: int) -> bool:
    """True if the kernels can gather rows of `depth` elements that they multiply by `[depth, columns]`."""
    whole = all(size == _padded(size) for size in (depth, columns))
    return whole and plan(depth, columns).forward.swizzle == gather.SWIZZLE


def supports(rows: jax.Array, weights: jax.Array) -> bool:
    """True if the kernels can multiply operands of these shapes and dtypes on this machine."""
    return on_hopper() and why_not(rows, weights) is None


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    plan_of: Plan | None = None,
    *,
    bias: jax.Array | None = None,
    row_weights: jax.Array | None = None,
) -> jax.Array:
    """Multiplies rows by the weights of their groups: `[C, B]` in their dtype, from float32 sums that are rounded once.

    Args:
      rows: `[C, A]`, bfloat16 or float16, sorted by group.
      weights: `[L, A, B]` in the dtype of the rows.
      group_sizes: int32 `[L]`; rows past the last group come out unspecified.
      plan_of: tiles, if not those of `plan`.
      bias: `[L, B]`, of which each row gets that of its group before the sum is rounded, or None.
      row_weights: float32 `[C]`, factors of the bias, or None.

    Raises:
      ValueError: the kernels do not support the operands, as `supports` says.
    """
    if not supports(rows, weights):
        reason = why_not(rows, weights) or f"{jax.devices()[0].device_kind} is no Hopper GPU"
        raise ValueError(
            f"grouped_matmul='hopper': rows {rows.dtype}{list(rows.shape)}, weights {weights.dtype}"
            f"{list(weights.shape)}: {reason}; needs a Hopper GPU and one dtype of {DTYPES}; use 'auto'"
        )
    chosen = plan_of or _plan_for(rows, weights)
    given = (_whole(rows, 0, 1), _whole(weights, 1, 2), _whole(bias, 1), _whole(row_weights, 0), group_sizes)
    out = _multiply(chosen, *vary_alike(*given))
    return out[: rows.shape[0], : weights.shape[2]]


def activated(
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    biases: tuple[jax.Array, ...] | None = None,
    row_weights: jax.Array | None = None,
    *,
    activation: Activation = SWIGLU,
) -> jax.Array:
    """Returns the activation of the rows' projections, times `row_weights` if given, in float32 and rounded once.

    `supports` must hold for the rows and each of the weights.

    Args:
      rows: `[C, A]`, bfloat16 or float16.
      weights: `[L, A, F]`, `gate` and `up`, or `up` alone where the activation is not gated.
      group_sizes: int32 `[L]`.
      biases: `[L, F]`, one for each of the weights.
      row_weights: float32 `[C]`.

    Returns:
      `[C, F]`. Its derivatives take the projections as they are in the dtype of the rows.
    """
    return _with_projections(_activated, rows, weights, group_sizes, biases, row_weights, activation)[0]


def activated_and_projections(
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    biases: tuple[jax.Array, ...] | None = None,
    *,
    activation: Activation = SWIGLU,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns `activated`, and the projections `[C, F]` in the dtype of the rows, for `projected_again`. Neither has a
    derivative."""
    out, *projections = _with_projections(_activated_kept, rows, weights, group_sizes, biases, None, activation)
    return out, projections


def projected_again(
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    biases: tuple[jax.Array, ...] | None,
    projections: list[jax.Array],
    *,
    activation: Activation = SWIGLU,
) -> list[jax.Array]:
    """Returns `projections`, `[C, F]` each, which `activated_and_projections` has returned for the same operands. The
    results have derivatives by rows, weights and biases."""
    kept = tuple(_whole(projection, 0, 1) for projection in projections)
    return _with_projections(_projected_again, rows, weights, group_sizes, biases, kept, activation)


def from_projections(activation: Activation, projections: Sequence[jax.Array]) -> jax.Array:
    """Returns the activation of projections `[C, F]`, computed in float32, in the dtype of the projections."""
    return activation(*(a.astype(jnp.float32) for a in projections)).astype(projections[0].dtype)


def _with_projections(
    run: Any, rows: Any, weights: Any, group_sizes: Any, biases: Any, more: Any, activation: Activation
) -> list[Any]:
    """Calls `run`, one of the functions below, on operands padded to sizes that the kernels take, and cuts its results.

    Args:
      more: factors of the rows, float32 `[C]`, or None, or a tuple of projections that are padded already.

    Raises:
      ValueError: the activation takes another number of weights.
    """
    chosen, count = _plan_for(rows, weights[0]), len(weights)
    if count != 1 + activation.gated:
        raise ValueError(f"activated: {count} weights: {activation.name!r} has {1 + activation.gated}")
    padded = [_whole(w, 1, 2) for w in weights] + [_whole(bias, 1) for bias in biases or ()]
    more = more if isinstance(more, tuple) else _whole(more, 0)
    padded_rows, *both, more, group_sizes = vary_alike(_whole(rows, 0, 1), *padded, more, group_sizes)
    added = tuple(both[count:]) or None
    results = run(chosen, activation, padded_rows, tuple(both[:count]), added, more, group_sizes)
    return [result[: rows.shape[0], : weights[0].shape[2]] for result in results]


def _padded(size: int) -> int:
    """Returns the size that the kernels multiply in place of `size`."""
    return size if size % COLUMN_ALIGNMENT == 0 and size >= LEAST else max(LEAST, -(-size // PADDED) * PADDED)


def _whole(array: Any, *axes: int) -> Any:
    """Pads `axes` with zeros to sizes that the kernels take: axis 0 counts rows, the other axes count columns."""
    if array is None:
        return None
    if isinstance(array, Lent):
        return array.with_own(_whole(array.own, *axes))
    extra = {
        axis: -array.shape[0] % ROW_ALIGNMENT if axis == 0 else _padded(n) - n for axis, n in enumerate(array.shape)
    }
    widths = [(0, extra[axis] if axis in axes else 0) for axis in range(array.ndim)]
    return jnp.pad(array, widths) if any(more for _, more in widths) else array


def sum_of_groups(chosen: Plan, rows: Any, group_sizes: Any, row_weights: Any = None, index: Any = None) -> Any:
    """Returns the sum over each group's `rows [C, B]`, times float32 `row_weights [C]` if given: `[L, B]` in the dtype
    of the rows.

    With `index`, int32 `[C]`, row `c` is `rows[index[c]]`, and zeros where `rows` has no such row.
    """
    count = rows.shape[:1] if index is None else index.shape
    ones = jnp.ones(count, jnp.float32) if row_weights is None else row_weights
    high = ones.astype(rows.dtype)
    low = (ones - high.astype(jnp.float32)).astype(rows.dtype)  # what rounding takes from a factor is a factor, too
    factors = jnp.where(jnp.arange(PADDED) == 0, high[:, None], jnp.where(jnp.arange(PADDED) == 1, low[:, None], 0))
    factors = vary(factors.astype(rows.dtype), varying_axes(rows))
    sums = rows_by_rows(factors, rows, group_sizes, index, gathered="others", tiles=chosen.sums, height=ROW_ALIGNMENT)
    return vary(sums[:, 0] if row_weights is None else sums[:, 0] + sums[:, 1], varying_axes(rows))


def refusing(message: str) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that returns its array. Differentiating the result is a NotImplementedError with `message`."""

    @jax.custom_jvp
    def as_it_is(array: jax.Array) -> jax.Array:
        return array

    @as_it_is.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(message)

    return as_it_is


first_order = refusing(
    "a second derivative of experts on a Hopper GPU or a TPU: the kernels have first derivatives alone; pass "
    "grouped_matmul='ragged_dot', whose derivatives are JAX's"
)
first_order_quantized = refusing(
    "a second derivative of experts in fp8 or int8: gradients pass straight through their rounding, and have no "
    "derivative themselves; leave experts (expert_dtype in a MoEConfig) None, with grouped_matmul='ragged_dot'"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(chosen: Plan, rows: Any, weights: Any, bias: Any, row_weights: Any, group_sizes: Any) -> Any:
    def kernel(by_row: Any, weights: Any, bias: Any, sizes: Any, into: Any = None) -> list[Any]:
        rows, *factors = by_row
        more = {"bias": bias, "row_weights": factors[0] if factors else None, "into": into}
        return [rows_by_weights(rows, weights[0], sizes, **more, transposed=False, tiles=chosen.forward)]

    by_row = [rows] if row_weights is None else [rows, row_weights]
    (out,) = by_slots(kernel, by_row, [weights], bias, group_sizes)
    return vary(out, varying_axes(rows))


def _forward(chosen: Plan, *operands: Any) -> tuple[Any, Any]:
    return _multiply(chosen, *operands), operands


def _backward(chosen: Plan, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    *arrays, group_sizes = kept
    rows, weights, bias, row_weights, cotangent = jax.tree.map(first_order, (*arrays, cotangent))
    by_rows = _by_rows(chosen, [cotangent], [weights], group_sizes)
    by_weights = _by_weights(chosen, rows, cotangent, weights, group_sizes)
    by_bias = None if bias is None else sum_of_groups(chosen, cotangent, group_sizes, row_weights)
    by_row_weights = None
    if row_weights is not None:
        by_row_weights = jnp.zeros_like(row_weights) if bias is None else _by_rows_of(bias, group_sizes, cotangent)
    return by_rows, by_weights, by_bias, by_row_weights, None


def _by_rows(chosen: Plan, cotangents: list[Any], weights: Sequence[Any], group_sizes: Any) -> Any:
    """Returns the gradient of rows, `[C, A]`, from one or two `cotangents [C, B]` of their products by weights."""

    def kernel(by_row: Any, weights: Any, _: Any, sizes: Any, into: Any = None) -> list[Any]:
        first, *more = zip(by_row, weights, strict=True)
        also = more[0] if more else None
        return [rows_by_weights(*first, sizes, also, into=into, transposed=True, tiles=chosen.rows)]

    weights = weights if len(weights) == 1 else one_at_once(list(weights))
    return vary(by_slots(kernel, cotangents, weights, None, group_sizes)[0], varying_axes(cotangents[0]))


def _by_weights(chosen: Plan, rows: Any, cotangent: Any, weights: Any, group_sizes: Any) -> Any:
    """Returns the gradient of the weights of `rows [C, A]`, from the `cotangent [C, B]` of their products."""

    def kernel(by_row: Any, sizes: Any, first_row: Any = None) -> Any:
        products = rows_by_rows(*by_row, sizes, first_row=first_row, tiles=chosen.weights)
        return vary(products, varying_axes(by_row[0]))

    return contracted(kernel, [rows, cotangent], weights, group_sizes)


def _by_rows_of(bias: Any, group_sizes: Any, cotangent: Any) -> Any:
    """Returns float32 `[C]`: each row of `cotangent [C, B]` times its group's `bias [L, B]`, summed up; zero past the
    last group."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(cotangent.shape[0], dtype=jnp.int32)[:, None]
    mine = (row < ends[None, :]) & (row >= (ends - group_sizes)[None, :])
    # A row past the last group may be NaN, but reaches no other row: the cotangent need not be cleared first.
    products = jnp.dot(cotangent, bias.T, preferred_element_type=jnp.float32)
    return jnp.sum(jnp.where(mine, products, 0), axis=1)


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(
    chosen: Plan, activation: Activation, rows: Any, weights: Any, biases: Any, row_weights: Any, group_sizes: Any
) -> list[Any]:
    return _activated_and(chosen, activation, False, rows, weights, biases, row_weights, group_sizes)


def _activated_and(
    chosen: Plan,
    activation: Activation,
    projections: bool,
    rows: Any,
    weights: Any,
    biases: Any,
    factors: Any,
    sizes: Any,
) -> list[Any]:
    """Returns the activation `[C, F]`, and with `projections` these, `[C, F]` each. `factors` are float32 `[C]` or
    None."""
    tiles = chosen.gated if activation.gated else chosen.forward

    def kernel(by_row: Any, weights: Any, biases: Any, sizes: Any, into: Any = None) -> Any:
        rows, *more = by_row
        operands = rows, tuple(weights), sizes, biases, *more
        return activated_rows(*operands, into=into, activation=activation, projections=projections, tiles=tiles)

    by_row = [rows] if factors is None else [rows, factors]
    return [vary(result, varying_axes(rows)) for result in by_slots(kernel, by_row, weights, biases, sizes)]


def _activated_forward(chosen: Plan, activation: Activation, *operands: Any) -> tuple[Any, Any]:
    out, *projections = _activated_and(chosen, activation, True, *operands)
    return [out], (*operands, projections)


def _activated_backward(chosen: Plan, activation: Activation, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    cotangent, *_ = cotangents
    *arrays, group_sizes, projections = kept
    given = (*arrays, projections, cotangent)
    rows, weights, biases, row_weights, projections, cotangent = jax.tree.map(first_order, given)
    *inputs, by_out = (a.astype(jnp.float32) for a in (*projections, cotangent))
    by_row_weights = None
    if row_weights is not None:
        by_row_weights = jnp.sum(activation(*inputs) * by_out, axis=-1)
        by_out = by_out * row_weights[:, None]
    by_projections = [a.astype(rows.dtype) for a in activation.gradients(by_out, *inputs)]
    by_rows, by_weights, by_biases = _by_operands(chosen, rows, weights, biases, group_sizes, by_projections)
    return by_rows, by_weights, by_biases, by_row_weights, None


def _by_operands(
    chosen: Plan, rows: Any, weights: Any, biases: Any, group_sizes: Any, by_projections: list[Any]
) -> tuple[Any, ...]:
    """Returns the gradients of rows, weights and biases from those of the projections, `[C, F]` each."""
    by_weights, sizes = [], group_sizes
    for by, w in zip(by_projections, weights, strict=True):
        by_weights.append(_by_weights(chosen, rows, by, w, sizes))
        if isinstance(w, Lent):  # one after the other, so that rows and their gradient are never in memory together
            by_weights[-1], sizes = order(by_weights[-1], sizes)
    by_rows = _by_rows(chosen, by_projections, weights, sizes)
    by_biases = None
    if biases is not None:
        by_biases = tuple(sum_of_groups(chosen, by, group_sizes) for by in by_projections)
    return by_rows, tuple(by_weights), by_biases


_activated.defvjp(_activated_forward, _activated_backward)


def _activated_kept(chosen: Plan, activation: Activation, *operands: Any) -> list[Any]:
    return _activated_and(chosen, activation, True, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _projected_again(
    chosen: Plan, activation: Activation, rows: Any, weights: Any, biases: Any, projections: Any, group_sizes: Any
) -> list[Any]:
    return list(projections)


def _again_forward(chosen: Plan, activation: Activation, *operands: Any) -> tuple[Any, Any]:
    *arrays, projections, group_sizes = operands
    return list(projections), (*arrays, group_sizes)


def _again_backward(chosen: Plan, activation: Activation, kept: Any, by_projections: Any) -> tuple[Any, ...]:
    *arrays, group_sizes = kept
    rows, weights, biases, by_projections = jax.tree.map(first_order, (*arrays, by_projections))
    return *_by_operands(chosen, rows, weights, biases, group_sizes, by_projections), None, None


_projected_again.defvjp(_again_forward, _again_backward)
