"""The tokens of a rank through its experts and back, in one piece or in chunks.

In chunks, the dispatch of chunk i+1 and the combine of chunk i-1 are under way while the experts compute chunk i, where
the backend has halves that may be ordered so (`OVERLAPPING`). Elsewhere a chunk follows the other: only one chunk's
buffers live at a time. Either way the order is written into the program by barriers, since XLA is free to start
everything at once.

`MoEConfig.remat` says what the backward pass keeps: all rows and activations, the received rows (a policy over the
`checkpoint_name`s of dispatch, under which nothing is dispatched again), or only the tokens of each chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import xen_moe_jax as xm
from xen_moe_jax._mesh import platform
from xen_moe_jax._moe_primitives import HANDLE, ROWS
from xen_moe_jax._overlap import under_way
from xen_moe_jax.flax._config import MoEConfig

RowExperts = Callable[[jax.Array, jax.Array], jax.Array]
"""`(rows, group_sizes) -> rows`, the weights bound."""
OVERLAPPING = ("cpu", "tpu")
"""Platforms on which the flights of chunks overlap. On GPUs XLA copies what is in flight between the halves of two
flights, and the done half refuses a copy."""
SAVED_NAMES = (ROWS, HANDLE)
"""`checkpoint_name`s that remat="experts" saves: with them no dispatch runs again in the backward pass."""


class Chunk(NamedTuple):
    """A part of a rank's tokens: `x [T/c, H]`, `topk_idx` int32 `[T/c, K]`, `topk_weights` float32 `[T/c, K]`."""

    x: jax.Array
    topk_idx: jax.Array
    topk_weights: jax.Array


def through_experts(
    config: MoEConfig,
    experts: Callable[..., jax.Array],
    weights: Any,
    tokens: Chunk,
    active: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Dispatch, experts, combine.

    Args:
      experts: `(rows, group_sizes, weights) -> rows`.
      weights: its third argument; derivatives go to it.
      tokens: of this rank, all of them.
      active: as in `xm.dispatch`.

    Returns:
      `[T, H]`, and int32 `[]`, the rows that this rank dropped.
    """
    num_tokens = tokens.x.shape[0]
    chunks = _split(tokens, config.num_chunks)

    def run(weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
        return _pipelined(config, lambda rows, sizes: experts(rows, sizes, weights), chunks, active)

    if config.remat == "all":
        run = jax.checkpoint(run)
    elif config.remat == "experts":
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES))
    in_turn = config.remat == "all" or platform() not in OVERLAPPING
    outs, dropped = (_one_by_one if in_turn else _all_at_once)(run, weights, chunks)
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return out[:num_tokens], dropped


def _split(tokens: Chunk, num_chunks: int) -> list[Chunk]:
    """Equal parts; the last one is filled up with tokens whose slots are all unused."""
    size = -(-tokens.x.shape[0] // num_chunks)
    extra = size * num_chunks - tokens.x.shape[0]
    if extra:
        rows = ((0, extra), (0, 0))
        unused = jnp.pad(tokens.topk_idx, rows, constant_values=-1)
        tokens = Chunk(jnp.pad(tokens.x, rows), unused, jnp.pad(tokens.topk_weights, rows))
    return [Chunk(*(a[i * size : (i + 1) * size] for a in tokens)) for i in range(num_chunks)]


def _all_at_once(run: Callable[..., Any], weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
    return run(weights, chunks)


def _one_by_one(run: Callable[..., Any], weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
    """`run` on each chunk alone, the next after the last: the barrier orders the backward pass too, in reverse."""
    outs: list[jax.Array] = []
    dropped = jnp.zeros((), jnp.int32)
    for chunk in chunks:
        if outs:
            outs[-1], x = jax.lax.optimization_barrier((outs[-1], chunk.x))
            chunk = chunk._replace(x=x)
        (out,), lost = run(weights, [chunk])
        outs.append(out)
        dropped = dropped + lost
    return outs, dropped


def _pipelined(
    config: MoEConfig, experts: RowExperts, chunks: list[Chunk], active: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    def work(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        # named again behind the barrier of `overlap`, or a remat policy would start the flights again to get them
        return experts(checkpoint_name(rows, ROWS), checkpoint_name(sizes, HANDLE))

    if len(chunks) == 1:  # nothing to overlap with
        routed = xm.dispatch(
            chunks[0].x, chunks[0].topk_idx, chunks[0].topk_weights, **_options(config, chunks[0], active)
        )
        y = experts(routed.x, _sizes(config, routed))
        out = xm.combine(y, routed.handle, weighted=True, wire=config.combine_wire, config=config.kernel)
        return [out], routed.num_dropped
    outs: list[jax.Array] = []
    dropped = jnp.zeros((), jnp.int32)
    sending = _start(config, chunks[0], active)
    returning: xm.Flight | None = None
    for upcoming in [*chunks[1:], None]:
        splits = under_way(sending)
        routed = xm.dispatch_done(sending)
        sizes = _sizes(config, routed)
        flights = {} if returning is None else {"back": returning}
        if upcoming is not None and splits:
            flights["there"] = _start(config, upcoming, active)
        if flights:
            flights, y = xm.overlap(flights, work, routed.x, sizes)
        else:
            y = work(routed.x, sizes)
        if returning is not None:
            outs.append(xm.combine_done(flights["back"]))
        returning = xm.combine_start(y, routed.handle, weighted=True, wire=config.combine_wire, config=config.kernel)
        if upcoming is not None:
            sending = flights["there"] if splits else _start(config, upcoming, active, after=returning.state)
        dropped = dropped + routed.num_dropped
    assert returning is not None  # there is a chunk
    return [*outs, xm.combine_done(returning)], dropped


def _start(config: MoEConfig, chunk: Chunk, active: jax.Array | None, after: jax.Array | None = None) -> xm.Flight:
    """Puts a chunk on its way, not before `after` is known."""
    x, topk_idx = chunk.x, chunk.topk_idx
    if after is not None:
        x, topk_idx, _ = jax.lax.optimization_barrier((x, topk_idx, _evidence(after)))
    return xm.dispatch_start(x, topk_idx, chunk.topk_weights, **_options(config, chunk, active))


def _options(config: MoEConfig, chunk: Chunk, active: jax.Array | None) -> dict[str, Any]:
    """Of the dispatch of a chunk."""
    return {
        "num_experts": config.num_experts,
        "axis_name": config.axis_name,
        "layout": config.layout,
        "capacity": config.chunk_capacity(chunk.x.shape[0], jax.lax.axis_size(config.axis_name)),
        "alignment": config.alignment,
        "wire": config.wire,
        "active": active,
        "config": config.kernel,
    }


def _sizes(config: MoEConfig, routed: xm.Routed) -> jax.Array:
    return routed.group_sizes if config.layout == "grouped" else routed.num_tokens_per_expert


def _evidence(array: jax.Array) -> jax.Array:
    """All of `array` (of a part of it XLA would compute just that part), with nothing to differentiate."""
    return jax.lax.stop_gradient(array)
