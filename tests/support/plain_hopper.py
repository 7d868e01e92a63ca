"""The Hopper kernels' contract in plain JAX: rows past the last group are not read, and their results are NaN."""

from __future__ import annotations

import contextlib

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


def rows_by_weights(rows, weights, sizes, also=None, *, transposed, tiles, num_sms=None):
    total = 0.0
    for left, right in [(rows, weights)] + ([] if also is None else [also]):
        right = jnp.swapaxes(right, 1, 2) if transposed else right
        mine = groups_of(sizes, left.shape[0])
        total = total + sum(
            jnp.dot(only(left, mine[group]), right[group], precision="highest", preferred_element_type=jnp.float32)
            for group in range(right.shape[0])
        )
    return unspecified(total, sizes).astype(rows.dtype)


def rows_by_rows(rows, others, sizes, *, tiles, num_sms=None):
    mine = groups_of(sizes, rows.shape[0])
    products = [
        jnp.dot(only(rows, m).T, only(others, m), precision="highest", preferred_element_type=jnp.float32) for m in mine
    ]
    return jnp.stack(products).astype(rows.dtype)


def swiglu_rows(rows, gate, up, sizes, row_weights=None, *, projections, tiles, num_sms=None):
    g, u = (rows_by_weights(rows, w, sizes, transposed=False, tiles=tiles) for w in (gate, up))
    out = jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32)
    if row_weights is not None:
        out = out * row_weights[:, None]
    out = unspecified(out, sizes).astype(rows.dtype)
    return (out, g, u) if projections else (out,)


@contextlib.contextmanager
def in_the_kernels_place():
    """Inside this context layers with grouped_matmul="auto" compute as on a Hopper GPU, in any dtype. They are traced
    anew."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rows_by_weights", "rows_by_rows", "swiglu_rows"):
            patch.setattr(hopper, name, globals()[name])
        patch.setattr(hopper, "plan", lambda *shape: hopper.Plan(*[hopper.SWIGLU] * 3))
        patch.setattr(hopper, "supports", lambda rows, weights: True)
        patch.setattr(grouped_matmul, "auto", hopper.grouped_matmul)
        yield
    jax.clear_caches()
