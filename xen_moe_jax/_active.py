"""Inactive ranks: masks the entries of a routing that do not move.

`active` is an operand, bool `[R]`, or the literal `EVERY_RANK` where a call has none: no residual holds it then, and
XLA's compiler crashes on arrays without elements that leave a scan inside `jax.shard_map`. An entry of `topk_idx`
counts as an unused slot if the rank of its expert is inactive. All entries of an inactive rank count as unused, too.
A backend that does not take `active` gets operands that are masked here. A backend that takes it
(`Backend.takes_active`) does not wait for inactive ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _layout, _ranks
from xen_moe_jax._spec import Spec

EVERY_RANK = np.True_
"""`active` of a call that was given none."""


def given(active: Any) -> bool:
    """Returns True if the call was given a mask of ranks; static."""
    return active.ndim > 0


def _mine(active: jax.Array, spec: Spec) -> jax.Array:
    """bool `[R]`: the ranks that this rank exchanges rows with; all False on an inactive rank."""
    return active & active[_ranks.index(spec.axis_name)]


def entries(topk_idx: jax.Array, active: jax.Array, spec: Spec) -> jax.Array:
    """Sanitised `topk_idx [T, K]` with `-1` for slots that send no row."""
    if not given(active):
        return topk_idx
    owner = _layout.owners(topk_idx, spec.local_experts)[..., None]
    here = owner == lax.broadcasted_iota(jnp.int32, (*topk_idx.shape, spec.num_ranks), topk_idx.ndim)
    return jnp.where(jnp.any(here & _mine(active, spec)[None, None], axis=-1), topk_idx, -1)  # a gather is slow on TPUs


def positions_of(positions: jax.Array, active: jax.Array, spec: Spec) -> jax.Array:
    """`positions [R, T, slots]` with `-1` for every inactive source."""
    return jnp.where(_mine(active, spec)[:, None, None], positions, -1) if given(active) else positions


def withheld(topk_idx: jax.Array, kept: jax.Array, spec: Spec) -> jax.Array:
    """int32 `[]`: rows of this rank's tokens that are not sent; `kept` is `topk_idx` after `entries`."""
    if spec.layout == "ranked":
        pairs = [_layout.ranks_hit(idx, spec.num_ranks, spec.local_experts) for idx in (topk_idx, kept)]
        return jnp.sum(pairs[0] & ~pairs[1], dtype=jnp.int32)
    return jnp.sum((topk_idx >= 0) & (kept < 0), dtype=jnp.int32)


# -- operands of the primitives, for a backend that does not take `active` ---------------------------------------------


def mask_dispatch(operands: Sequence[Any], spec: Spec) -> list[Any]:
    x, scales, topk_idx, topk_weights, active = operands
    if given(active):
        topk_idx = entries(_layout.sanitize(topk_idx, spec.num_experts), active, spec)
    return [x, scales, topk_idx, topk_weights]


def mask_handle(operands: Sequence[Any], spec: Spec) -> list[Any]:
    """Masks the operands of an operation on a handle: `x` or `y`, the handle's arrays, `active`, and further ones."""
    first, topk_idx, positions, recv_counts, active, *rest = operands
    topk_idx, positions = entries(topk_idx, active, spec), positions_of(positions, active, spec)
    return [first, topk_idx, positions, recv_counts, *rest]


def zero_left_out(rows: jax.Array, operands: Sequence[Any], spec: Spec) -> jax.Array:
    """Zeroes rows whose source rank is inactive: the handle counts them as used, but no rank sends them."""
    if not given(operands[4]):
        return rows
    return jnp.where(left_out(operands[2], operands[4], spec)[..., None], jnp.zeros((), rows.dtype), rows)


def left_out(positions: jax.Array, active: jax.Array, spec: Spec) -> jax.Array:
    """bool `spec.row_dims`: rows whose source rank is inactive."""
    num_rows = math.prod(spec.row_dims)
    lost = (positions >= 0) & (positions_of(positions, active, spec) < 0)
    mask = jnp.zeros(num_rows, jnp.bool_).at[jnp.where(lost, positions, num_rows)].set(True, mode="drop")
    return mask.reshape(spec.row_dims)
