"""The Hopper kernels' contract in plain JAX: rows past the last group are not read, and their results are NaN."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from xen_moe_jax.experts import grouped_matmul, hopper


def groups_of(sizes, rows):
    """bool `[L, C]`: which rows each group has."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows)[None, :]
    return (row < ends[:, None]) & (row >= (ends - sizes)[:, None])


def only(array, mask):
    return jnp.where(mask[..., None], array, 0)


def unspecified(array, sizes):
    return jnp.where((jnp.arange(array.shape[0]) < jnp.sum(sizes))[:, None], array, jnp.nan)


def of_group(array, sizes, rows):
    """The row of `array [L, B]` of each row's group -> `[C, B]`, float32."""
    mine = groups_of(sizes, rows).astype(jnp.float32)
    return jnp.dot(mine.T, array.astype(jnp.float32), precision="highest")


def rows_by_weights(
    rows,
    weights,
    sizes,
    also=None,
    bias=None,
    row_weights=None,
    index=None,
    *,
    transposed,
    tiles,
    num_sms=None,
    rounded=True,
):
    rows = taken(rows, index)
    total = 0.0
    for left, right in [(rows, weights)] + ([] if also is None else [also]):
        right = jnp.swapaxes(right, 1, 2) if transposed else right
        mine = groups_of(sizes, left.shape[0])
        total = total + sum(
            jnp.dot(only(left, mine[group]), right[group], precision="highest", preferred_element_type=jnp.float32)
            for group in range(right.shape[0])
        )
    if bias is not None:
        added = of_group(bias, sizes, rows.shape[0])
        total = total + (added if row_weights is None else added * row_weights[:, None])
    total = unspecified(total, sizes)
    return total.astype(rows.dtype) if rounded else total


def taken(rows, index):
    """Rows of an operand `[T, A]` by an index `[C]`, zeros where it is outside."""
    if index is None:
        return rows
    inside = (index >= 0) & (index < rows.shape[0])
    return only(rows[jnp.where(inside, index, 0)], inside)


def rows_by_rows(rows, others, sizes, index=None, *, gathered="rows", tiles, height=None, num_sms=None):
    rows, others = (taken(a, index if gathered == name else None) for a, name in ((rows, "rows"), (others, "others")))
    mine = groups_of(sizes, rows.shape[0])
    products = [
        jnp.dot(only(rows, m).T, only(others, m), precision="highest", preferred_element_type=jnp.float32) for m in mine
    ]
    return jnp.stack(products).astype(rows.dtype)[:, :height]


def activated_rows(
    rows, weights, sizes, biases=None, row_weights=None, index=None, *, activation, projections, tiles, num_sms=None
):
    rows = taken(rows, index)
    run = functools.partial(rows_by_weights, rows, transposed=False, tiles=tiles, rounded=False)
    of = [run(w, sizes, bias=bias) for w, bias in zip(weights, biases or (None,) * len(weights), strict=True)]
    out = activation(*of)
    if row_weights is not None:
        out = out * row_weights[:, None]
    out = unspecified(out, sizes)
    return tuple(a.astype(rows.dtype) for a in ((out, *of) if projections else (out,)))


@contextlib.contextmanager
def in_the_kernels_place():
    """Inside this context layers with grouped_matmul="auto" compute as on a Hopper GPU, in any dtype. They are traced
    anew."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rows_by_weights", "rows_by_rows", "activated_rows"):
            patch.setattr(hopper, name, globals()[name])
        patch.setattr(hopper, "plan", lambda *shape: hopper.Plan(*[hopper.GATED] * 3))
        patch.setattr(hopper, "supports", lambda rows, weights: True)
        patch.setattr(grouped_matmul, "auto", hopper.grouped_matmul)
        yield
    jax.clear_caches()
