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

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import xen_moe_jax as xm
from xen_moe_jax._mesh import platform, vary_alike
from xen_moe_jax._moe_primitives import HANDLE, ROWS
from xen_moe_jax._overlap import is_pending
from xen_moe_jax._replicated import own_sums
from xen_moe_jax.experts import float8, tpu_decode, tpu_decode_layer
from xen_moe_jax.experts.combined import rows_for_experts, run_experts, sent_as
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.experts.mlp import built_in
from xen_moe_jax.flax._config import MoEConfig

NAMES = ("gate", "up", "down")
"""Weights of an expert; those of its biases end in "_bias"."""
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
    config: MoEConfig, weights: Any, tokens: Chunk, members: Members = ALL_AT_HOME
) -> tuple[jax.Array, jax.Array]:
    """Runs dispatch, experts and combine.

    Args:
      weights: those of the experts, by name.
      tokens: all tokens of this rank.
      members: `weights` are those of the slots of its placement, where it has one.

    Returns:
      `[T, H]`, and int32 `[]`, the rows that this rank dropped.
    """
    if isinstance(config.experts, tpu_decode.Experts):
        return _few_tokens(config, weights, tokens, members)
    return _composed(config, weights, tokens, members)


def _few_tokens(config: MoEConfig, weights: Any, tokens: Chunk, members: Members) -> tuple[jax.Array, jax.Array]:
    """`through_experts` of a config of `tpu_decode`."""
    hidden = tokens.x.shape[1]

    def composed(*operands: Any) -> tuple[jax.Array, jax.Array]:
        x, topk_idx, topk_weights, weights = operands
        out, dropped = _composed(config, weights, Chunk(tpu_decode.padded(x), topk_idx, topk_weights), members)
        return out[:, :hidden], dropped

    elsewhere = members.active is not None or members.placement is not None
    if elsewhere or not tpu_decode_layer.takes_layer(config, tokens.x, weights):
        return composed(*tokens, weights)
    assert isinstance(config.experts, tpu_decode.Experts)
    out = tpu_decode_layer.layer(config.experts, lambda *operands: composed(*operands)[0], weights, *tokens)
    return out, vary_alike(tokens.x, jnp.zeros((), jnp.int32))[1]  # there is room for every row


def through_own_experts(
    config: MoEConfig, weights: Any, tokens: Chunk, *, chosen_here: bool
) -> tuple[jax.Array, jax.Array]:
    """Runs the experts for tokens that every rank has: `[T, H]`, the same on every rank, and int32 `[]`, the rows that
    this rank dropped.

    Args:
      chosen_here: the layer's router has chosen, so that no token names an expert twice, and experts are at home.
    """
    kernel = tpu_decode_layer.for_own_experts(config, tokens.x, weights) if chosen_here else None
    if kernel is None:
        return mlp(config, weights, tokens, replicated=True)

    def composed(*operands: Any) -> jax.Array:
        *given, weights = operands
        routed = xm.dispatch_replicated(*given, num_experts=config.num_experts, axis_name=config.axis_name)
        return own_sums(run_experts(config, weights, routed), routed.handle, weighted=True)

    sums = tpu_decode_layer.own_layer(kernel, composed, weights, *tokens)
    return jax.lax.psum(sums, config.axis_name).astype(tokens.x.dtype), jnp.zeros((), jnp.int32)


def _composed(config: MoEConfig, weights: Any, tokens: Chunk, members: Members) -> tuple[jax.Array, jax.Array]:
    """`through_experts` by dispatch, experts and combine."""
    num_tokens = tokens.x.shape[0]
    chunks = _split(tokens, config.num_chunks)
    overlap = (
        len(chunks) > 1 and config.remat != "all" and config.balance is None and _overlaps(config, chunks[0], members)
    )

    if len(chunks) > 1 and config.remat == "none" and config.balance is None:
        weights = _quantized_once(config, weights)

    def run(weights: Any, chunks: list[Chunk]) -> tuple[list[jax.Array], jax.Array]:
        return (_pipelined if overlap else _whole)(config, weights, chunks, members)

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


def _quantized_once(config: MoEConfig, weights: Any) -> Any:
    """Returns the weights of experts in fp8 with codes by which all chunks multiply, and other weights as they are.
    Weights of experts in int8 are among the others: each chunk quantizes them anew.

    With `remat` this function is not called, and each chunk quantizes the weights in fp8 anew, too: codes that are kept
    for the backward pass are as large as the weights in bfloat16."""
    if config.expert_dtype != float8.DTYPE:
        return weights
    matrices = not_quantized(weights)
    return weights | {name: codes.of(matrices[name]) for name, codes in xm.quantize_weights(matrices).items()}


def not_quantized(weights: Any) -> dict[str, jax.Array]:
    """Returns the weights of experts that are arrays, by name; the others have codes, or are absent."""
    given = {name: weights[name] for name in NAMES if weights.get(name) is not None}
    return {name: weight for name, weight in given.items() if not float8.is_quantized(weight)}


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


def mlp(
    config: MoEConfig, weights: Any, chunk: Chunk, members: Members = ALL_AT_HOME, *, replicated: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Sends one chunk through the experts by `xm.moe_mlp`: `[T, H]`, and int32 `[]`, the rows that this rank dropped.

    Args:
      replicated: the chunk is the same on every rank of the expert axes, and so is the output. No capacity applies.
    """
    function = {field.name: getattr(config, field.name) for field in dataclasses.fields(ExpertFunction)}
    biases = tuple(weights.get(f"{name}_bias") for name in NAMES) if function.pop("expert_bias") else None
    sending = _options(config, chunk, members) | {"combine_wire": config.combine_wire}
    if replicated:
        sending = {name: sending[name] for name in ("num_experts", "axis_name", "layout", "alignment")}
    out, info = xm.moe_mlp(
        *chunk,
        *(weights.get(name) for name in NAMES),
        biases=biases,
        **function | sending,
        replicated=replicated,
        return_info=True,
    )
    return out, info.num_dropped


def _whole(config: MoEConfig, weights: Any, chunks: list[Chunk], members: Members) -> tuple[list[jax.Array], jax.Array]:
    """Sends one chunk through the experts."""
    (chunk,) = chunks
    out, dropped = mlp(config, weights, chunk, members)
    return [out], dropped


def _pipelined(
    config: MoEConfig, weights: Any, chunks: list[Chunk], members: Members
) -> tuple[list[jax.Array], jax.Array]:
    """Handles two chunks or more: the next chunk's dispatch and the previous chunk's combine travel while the experts
    work."""

    def work(rows: jax.Array, sizes: jax.Array, *factors: jax.Array) -> jax.Array:
        # Rows are named again behind the barrier of `overlap`, or a remat policy would repeat the starts to get them.
        rows = checkpoint_name(checkpoint_name(rows, ROWS), EXPERT_ROWS)
        named = (checkpoint_name(factor, HANDLE) for factor in factors)
        return built_in(config)(rows, checkpoint_name(sizes, HANDLE), weights, *named)

    outs: list[jax.Array] = []
    dropped = jnp.zeros((), jnp.int32)
    sending = _start(config, chunks[0], members)
    returning: xm.Flight | None = None
    for upcoming in [*chunks[1:], None]:
        routed = xm.dispatch_done(sending)
        flights = {} if returning is None else {"back": returning}
        if upcoming is not None:
            flights["there"] = _start(config, upcoming, members)
        flights, y = xm.overlap(flights, work, *rows_for_experts(config, routed))
        if returning is not None:
            outs.append(xm.combine_done(flights["back"]))
        returning = xm.combine_start(y, routed.handle, **_back(config))
        if upcoming is not None:
            sending = flights["there"]
        dropped = dropped + routed.num_dropped
    assert returning is not None  # there is a chunk
    return [*outs, xm.combine_done(returning)], dropped


def _start(config: MoEConfig, chunk: Chunk, members: Members) -> xm.Flight:
    options = _options(config, chunk, members)
    x, options["wire"] = sent_as(config, chunk.x, config.wire)
    return xm.dispatch_start(x, chunk.topk_idx, chunk.topk_weights, **options)


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


def _back(config: MoEConfig) -> dict[str, Any]:
    """Options of the combine."""
    return {
        "weighted": config.apply_weights_to == "rows",
        "wire": config.combine_wire,
        "config": config.kernel,
    }
