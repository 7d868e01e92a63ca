"""The Hopper kernels' contract in plain JAX: rows past the last group are not read, and their results are NaN."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from xen_moe_jax.experts import grouped_matmul, hopper


def groups_of(sizes, rows, first_row=0):
    """bool `[L, C]`: which rows each group has, the first one from `first_row` on."""
    ends = jnp.cumsum(sizes) + first_row
    row = jnp.arange(rows)[None, :]
    return (row < ends[:, None]) & (row >= (ends - sizes)[:, None])


def only(array, mask):
    return jnp.where(mask[..., None], array, 0)


def unspecified(array, sizes, into=None, number=0):
    """Returns `array` with NaN in the rows past the last group; with `into`, rows of no group are those of its array
    `number`."""
    if into is not None:
        mine = groups_of(sizes, array.shape[0], into.first_row).any(axis=0)
        return jnp.where(mine[:, None], array, into.arrays[number].astype(array.dtype))
    return jnp.where((jnp.arange(array.shape[0]) < jnp.sum(sizes))[:, None], array, jnp.nan)


def of_group(array, sizes, rows, first_row=0):
    """The row of `array [L, B]` of each row's group -> `[C, B]`, float32."""
    mine = groups_of(sizes, rows, first_row).astype(jnp.float32)
    return jnp.dot(mine.T, array.astype(jnp.float32), precision="highest")


def rows_by_weights(
    rows,
    weights,
    sizes,
    also=None,
    bias=None,
    row_weights=None,
    index=None,
    into=None,
    *,
    transposed,
    tiles,
    num_sms=None,
    rounded=True,
    number=0,
):
    rows, first_row = taken(rows, index), 0 if into is None else into.first_row
    total = 0.0
    for left, right in [(rows, weights)] + ([] if also is None else [also]):
        right = jnp.swapaxes(right, 1, 2) if transposed else right
        mine = groups_of(sizes, left.shape[0], first_row)
        total = total + sum(
            jnp.dot(only(left, mine[group]), right[group], precision="highest", preferred_element_type=jnp.float32)
            for group in range(right.shape[0])
        )
    if bias is not None:
        added = of_group(bias, sizes, rows.shape[0], first_row)
        total = total + (added if row_weights is None else added * row_weights[:, None])
    total = unspecified(total, sizes, into, number)
    return total.astype(rows.dtype) if rounded else total


def taken(rows, index):
    """Rows of an operand `[T, A]` by an index `[C]`, zeros where it is outside."""
    if index is None:
        return rows
    inside = (index >= 0) & (index < rows.shape[0])
    return only(rows[jnp.where(inside, index, 0)], inside)


def rows_by_rows(rows, others, sizes, index=None, first_row=None, *, gathered="rows", tiles, height=None, num_sms=None):
    rows, others = (taken(a, index if gathered == name else None) for a, name in ((rows, "rows"), (others, "others")))
    mine = groups_of(sizes, rows.shape[0], 0 if first_row is None else first_row)
    products = [
        jnp.dot(only(rows, m).T, only(others, m), precision="highest", preferred_element_type=jnp.float32) for m in mine
    ]
    return jnp.stack(products).astype(rows.dtype)[:, :height]


def activated_rows(
    rows,
    weights,
    sizes,
    biases=None,
    row_weights=None,
    index=None,
    into=None,
    *,
    activation,
    projections,
    tiles,
    num_sms=None,
):
    rows = taken(rows, index)
    run = functools.partial(rows_by_weights, rows, into=into, transposed=False, tiles=tiles, rounded=False)
    biases = biases or (None,) * len(weights)
    of = [
        run(w, sizes, bias=b, number=n + 1 if projections else 0)
        for n, (w, b) in enumerate(zip(weights, biases, strict=True))
    ]
    out = activation(*of)
    if row_weights is not None:
        out = out * row_weights[:, None]
    out = unspecified(out, sizes, into)
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
