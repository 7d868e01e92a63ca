"""Sends the tokens of a rank through the experts and back, in one piece or in chunks.

In chunks, the dispatch of chunk i+1 and the combine of chunk i-1 are pending while the experts compute chunk i, where
the backend has asynchronous operations and gains by them (`OVERLAPPING`). Elsewhere the chunks run one after the other:
only one chunk's buffers live at a time. The order is written into the program, by barriers or by a loop, since XLA is
free to start everything at once. The loop (`_in_a_loop`) adds up the weights' gradients as it goes; it is taken where
`remat` leaves little to carry from the forward pass to the backward pass, because a loop copies the arrays that it
carries.

`MoEConfig.remat` selects the arrays that the backward pass keeps: all rows and activations, the received rows (a policy
over the `checkpoint_name`s of dispatch, under which nothing is dispatched again), or only the tokens of each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import xen_moe_jax as xm
from xen_moe_jax._mesh import platform
from xen_moe_jax._moe_primitives import HANDLE, ROWS
from xen_moe_jax._overlap import is_pending
from xen_moe_jax.experts import grouped_matmul
from xen_moe_jax.flax import tpu_decode
from xen_moe_jax.flax._config import MoEConfig

RowExperts = Callable[..., jax.Array]
"""`(rows, group_sizes, *row_weights) -> rows`, the experts' weights bound: `for_experts`."""
OVERLAPPING = ("cpu", "tpu")
"""Platforms on which asynchronous operations of chunks overlap. On GPUs this measured slower than chunks in turn,
because a pending operation takes SMs from matmuls that fill the GPU
(docs/lab/layers.md)."""
EXPERT_ROWS = "xen_moe_expert_rows"
"""`checkpoint_name` of a chunk's rows behind the barrier of `xm.overlap`, where the experts get them: remat="experts"
saves these rows, and not the rows before the barrier as well."""


class Members(NamedTuple):
    """Which ranks take part, and where the experts are: `active` and `placement` of `xm.dispatch`, or None."""

    active: jax.Array | None = None
    placement: xm.balance.Placement | None = None


ALL_AT_HOME = Members()
"""Every rank takes part, and experts are where they are without a placement."""


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
    members: Members = ALL_AT_HOME,
) -> tuple[jax.Array, jax.Array]:
    """Runs dispatch, experts and combine.

    Args:
      experts: `(rows, group_sizes, weights) -> rows`, with `row_weights` as a fourth argument where
        `apply_weights_to` is "activation" or "input".
      weights: its third argument; derivatives go to it.
      tokens: all tokens of this rank.
      members: `weights` are those of the slots of its placement, where it has one.

    Returns:
      `[T, H]`, and int32 `[]`, the rows that this rank dropped.
    """
    num_tokens = tokens.x.shape[0]
    chunks = _split(tokens, config.num_chunks)
    overlap = (
        len(chunks) > 1 and config.remat != "all" and config.balance is None and _overlaps(config, chunks[0], members)
    )

    def run(weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
        def bound(
            rows: jax.Array, sizes: jax.Array, *factors: jax.Array, lent: xm.balance.Placement | None = None
        ) -> jax.Array:
            held = weights
            if lent is not None:
                held = lent.move(weights, None, lent, axis_name=config.axis_name, config=config.kernel)
            return experts(rows, sizes, held, *factors)

        run_here = _pipelined if overlap else functools.partial(_whole, add_up=_adder(config, weights, tokens.x))
        return run_here(config, bound, chunks, members)

    if config.remat == "all":
        run = jax.checkpoint(run)
    elif config.remat == "experts":
        saved = jax.checkpoint_policies.save_only_these_names(EXPERT_ROWS if overlap else ROWS, HANDLE)
        run = jax.checkpoint(run, policy=saved)
    if overlap:
        outs, dropped = run(weights, chunks)
    elif config.remat != "none" and len(chunks) > 1:
        outs, dropped = _in_a_loop(run, weights, chunks)
    else:
        outs, dropped = _one_by_one(run, weights, chunks)
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return out[:num_tokens], dropped


def _overlaps(config: MoEConfig, chunk: Chunk, members: Members) -> bool:
    """True where start and done of such a chunk's operations are two programs, which `_pipelined` can put in order."""
    if platform() not in OVERLAPPING:
        return False
    return is_pending(jax.eval_shape(lambda chunk, members: _start(config, chunk, members), chunk, members))


def _split(tokens: Chunk, num_chunks: int) -> list[Chunk]:
    """Splits tokens into equal parts; the last one is filled up with tokens whose slots are all unused."""
    size = -(-tokens.x.shape[0] // num_chunks)
    extra = size * num_chunks - tokens.x.shape[0]
    if extra:
        rows = ((0, extra), (0, 0))
        unused = jnp.pad(tokens.topk_idx, rows, constant_values=-1)
        tokens = Chunk(jnp.pad(tokens.x, rows), unused, jnp.pad(tokens.topk_weights, rows))
    return [Chunk(*(a[i * size : (i + 1) * size] for a in tokens)) for i in range(num_chunks)]


def _one_by_one(run: Callable[..., Any], weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
    """Calls `run` on each chunk alone, one after the other: the barrier orders the backward pass too, in reverse."""
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


def _in_a_loop(run: Callable[..., Any], weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
    """Does the work of `_one_by_one` in a loop, which adds each chunk's part of the weights' gradients to one sum at
    its turn. Barriers do not achieve this: XLA adds up the gradients of all chunks in one go, when the last one is
    there."""

    def turn(nothing: None, chunk: Chunk) -> tuple[None, tuple[jax.Array, jax.Array]]:
        (out,), lost = run(weights, [chunk])
        return nothing, (out, lost)

    stacked = Chunk(*(jnp.stack(parts) for parts in zip(*chunks, strict=True)))
    _, (outs, lost) = jax.lax.scan(turn, None, stacked)
    return [outs.reshape(-1, outs.shape[-1])], lost.sum()


def _whole(
    config: MoEConfig, experts: RowExperts, chunks: list[Chunk], members: Members, add_up: Callable[..., Any]
) -> tuple[list[jax.Array], jax.Array]:
    """Sends one chunk through the experts; `add_up(config, rows, handle)` is a combine."""
    (chunk,) = chunks
    routed = xm.dispatch(chunk.x, chunk.topk_idx, chunk.topk_weights, **_options(config, chunk, members))
    lent = {} if config.balance is None else {"lent": routed.handle.placement}
    y = experts(*for_experts(config, routed), **lent)
    return [add_up(config, y, routed.handle)], routed.num_dropped


def _adder(config: MoEConfig, weights: Any, x: jax.Array) -> Callable[..., Any]:
    """Returns the combine whose gradient is the cheapest behind these experts."""
    own = config.experts is None and config.layout == "grouped" and config.apply_weights_to != "rows"
    return _unweighted if own and grouped_matmul.by_hopper(config.grouped_matmul, x, weights["up"]) else _add_up


def _add_up(config: MoEConfig, y: jax.Array, handle: Any) -> jax.Array:
    return xm.combine(y, handle, **_back(config))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unweighted(config: MoEConfig, y: jax.Array, handle: Any) -> jax.Array:
    """A combine without weights. `xm.combine` gives rows past the last group a gradient of zero, and a pass over all
    rows for it; the Hopper kernels do not read such rows, so that here they keep their values from the wire."""
    return _add_up(config, y, handle)


def _unweighted_forward(config: MoEConfig, y: jax.Array, handle: Any) -> tuple[jax.Array, Any]:
    return _add_up(config, y, handle), handle


def _unweighted_backward(config: MoEConfig, handle: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return xm.redispatch(cotangent, handle, config=config.kernel), None


_unweighted.defvjp(_unweighted_forward, _unweighted_backward)


def _pipelined(
    config: MoEConfig, experts: RowExperts, chunks: list[Chunk], members: Members
) -> tuple[list[jax.Array], jax.Array]:
    """Handles two chunks or more: the next chunk's dispatch and the previous chunk's combine travel while the experts
    work."""

    def work(rows: jax.Array, *others: jax.Array) -> jax.Array:
        # named again behind the barrier of `overlap`, or a remat policy would repeat the starts to get them
        rows = checkpoint_name(checkpoint_name(rows, ROWS), EXPERT_ROWS)
        return experts(rows, *(checkpoint_name(other, HANDLE) for other in others))

    outs: list[jax.Array] = []
    dropped = jnp.zeros((), jnp.int32)
    sending = _start(config, chunks[0], members)
    returning: xm.Flight | None = None
    for upcoming in [*chunks[1:], None]:
        routed = xm.dispatch_done(sending)
        flights = {} if returning is None else {"back": returning}
        if upcoming is not None:
            flights["there"] = _start(config, upcoming, members)
        flights, y = xm.overlap(flights, work, *for_experts(config, routed))
        if returning is not None:
            outs.append(xm.combine_done(flights["back"]))
        returning = xm.combine_start(y, routed.handle, **_back(config))
        if upcoming is not None:
            sending = flights["there"]
        dropped = dropped + routed.num_dropped
    assert returning is not None  # there is a chunk
    return [*outs, xm.combine_done(returning)], dropped


def _start(config: MoEConfig, chunk: Chunk, members: Members) -> xm.Flight:
    return xm.dispatch_start(chunk.x, chunk.topk_idx, chunk.topk_weights, **_options(config, chunk, members))


def _options(config: MoEConfig, chunk: Chunk, members: Members) -> dict[str, Any]:
    """Options of the dispatch of a chunk."""
    num_ranks = jax.lax.axis_size(config.axis_name)
    placement = members.placement
    entries = config.num_experts if placement is None else num_ranks * placement.slots_per_rank
    return {
        "num_experts": config.num_experts,
        "axis_name": config.axis_name,
        "layout": config.layout,
        "capacity": config.chunk_capacity(chunk.x.shape[0], num_ranks, entries),
        "alignment": config.alignment,
        "drop": config.drop,
        "wire": config.wire,
        "active": members.active,
        "placement": placement,
        "balance": config.balance,
        "slots_per_rank": config.slots_per_rank,
        "config": config.kernel,
    }


def for_experts(config: MoEConfig, routed: xm.Routed) -> tuple[jax.Array, ...]:
    """Arguments of the experts: rows, group sizes, and the rows' router weights where the experts apply them."""
    sizes = routed.group_sizes if config.layout == "grouped" else routed.num_tokens_per_expert
    if isinstance(config.experts, tpu_decode.Experts):
        sizes = routed.handle.recv_counts
    return routed.x, sizes, *([] if config.apply_weights_to == "rows" else [routed.weights])


def _back(config: MoEConfig) -> dict[str, Any]:
    """Options of the combine."""
    return {
        "weighted": config.apply_weights_to == "rows",
        "wire": config.combine_wire,
        "config": config.kernel,
    }
