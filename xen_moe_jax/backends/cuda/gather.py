"""Gathers words of all ranks on every rank by one dispatch: it waits for no inactive rank, and fails as a dispatch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _active
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.cuda import module
from xen_moe_jax.backends.cuda.dispatch import dispatch

ROW_WORDS = 1024
"""Words that travel as one row. A warp copies a row, so many short rows keep many warps busy."""
MOST_ROWS = 4096
"""Most rows of a rank; with more words, rows are longer. Between nodes the kernels take 8192 rows of a rank."""


def gather_words(call: Call, words: jax.Array, active: Any) -> jax.Array:
    """int32 `[N]` -> `[R, N]`, zeros for an inactive rank: each rank is an expert, and every row names all experts.

    A row names at most `max_top_k` experts. With more ranks, a collective of XLA gathers, which waits for all ranks.

    Raises:
      ValueError: there are more ranks than that, and some may be inactive.
    """
    ranks, most = call.spec.num_ranks, module.compiled().max_top_k
    if ranks <= most:
        return gather_by(dispatch, call, words, active)
    if _active.given(active):
        raise ValueError(
            f"active with a `drop` other than 'position', or with a balance, on {ranks} ranks: the CUDA backend then "
            f"gathers what these need from at most {most} ranks; pass drop='position' and balance=None, or active=None"
        )
    return lax.all_gather(words, call.spec.axis_name)


def gather_by(dispatch: Any, call: Call, words: jax.Array, active: Any) -> jax.Array:
    """`gather_words` by the `dispatch` of any backend, for at most as many ranks as a token may name experts."""
    given, ranks = call.spec, call.spec.num_ranks
    size = min(ROW_WORDS * -(-words.size // (ROW_WORDS * MOST_ROWS)), words.size)
    num_rows = -(-words.size // size)
    rows = jnp.pad(words, (0, num_rows * size - words.size)).reshape(num_rows, size)
    spec = Spec(given.axis_name, given.axis_sizes, ranks, num_rows, ranks, "padded", ranks * num_rows)
    every = jnp.broadcast_to(jnp.arange(ranks, dtype=jnp.int32), (num_rows, ranks))
    operands = (
        lax.bitcast_convert_type(rows, jnp.float32),
        jnp.zeros((num_rows, 0), jnp.float32),
        _active.entries(every, active, spec),
        jnp.ones(every.shape, jnp.float32),
    )
    came, _, positions, *_ = dispatch(Call(spec, call.config), *operands, active)
    mine = lax.dynamic_index_in_dim(positions, lax.axis_index(given.axis_name), 2, keepdims=False)
    found = lax.bitcast_convert_type(came.reshape(-1, size), jnp.int32)[jnp.maximum(mine, 0)]
    return jnp.where(mine[..., None] >= 0, found, 0).reshape(ranks, -1)[:, : words.size]
