"""Decode on TPU: a whole layer with few tokens as one kernel, where its tables and rows fit the chip.

The layers of `tpu_decode.adapted` take it where nothing but plain rows and weights travels (`takes_layer`); elsewhere
the experts alone are a kernel, between a dispatch and a combine. The backward pass is that of dispatch, grouped matmuls
and combine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._mesh import vary_alike
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax.backends.pallas import all_gather_dispatch, barriers, hardware
from xen_moe_jax.experts import mlp
from xen_moe_jax.experts.tpu_decode import Experts, Matrices, Scaled, adapted, biases_of, gradients, slab_rows
from xen_moe_jax.pallas_kernels.decode_experts import GROUP, Pieces
from xen_moe_jax.pallas_kernels.decode_layer import decode_layer, record_of, vmem_bytes
from xen_moe_jax.pallas_kernels.decode_routing import Sizes
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import BLOCK as MOST_TOKENS
from xen_moe_jax.pallas_kernels.peers import Axes

MOST_ROWS = 96
"""Most rows of a matrix product of a whole layer: sums of 512 columns fill three quarters of the registers."""
FEW_ROWS, ROWS_OF_ONE_CORE = 32, 64
"""On a chip with two cores both share a layer whose matrix products have more rows than `FEW_ROWS`, if it fits them,
because a core is busy with other work than products, too: for 48 rows two cores of v5p need 1.05 times the time in
which HBM gives the weights, one core needs 1.12 to 1.32 times this time. With at most `ROWS_OF_ONE_CORE` rows, one core
takes a layer that does not fit two. The matrix units of one core of v5p need as long for the products of 83 rows as HBM
needs for the weights. Two cores always share weights of one byte, or leave them to `decode_experts`: HBM gives twice as
many of them in the same time, and one core of v5p needs 1.2 times this time to convert int8."""
MOST_AHEAD, LEAST_AHEAD, AMPLE_AHEAD = 96, 2, 4
"""Slabs of weights that travel while a layer's rows do, at most and at least. Where VMEM is short, smaller slabs are
taken rather than fewer than `AMPLE_AHEAD`, but none of 128 rows, which fill half of a matrix unit on some chips."""
LEAST_KEPT = 512
"""Rows that each core of a rank has room for at least."""
ROOM = (2.0, 1.5)
"""Where that is more, a rank has room for the rows that come to it by uniform routing, times the first of these factors
with which the layer fits."""
IDLE_EXPERTS = 0.01
"""A core reads weights of its first experts before the routing is known, also those of experts without rows. Random
routing leaves as many experts of this prefix without rows, on average, as this part of all experts of the core, or
fewer."""


def layer(
    experts: Experts,
    composed: Callable[..., jax.Array],
    weights: dict[str, jax.Array],
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
) -> jax.Array:
    """Runs a layer as one kernel, or as dispatch, experts and combine where that does not fit the chip.

    Args:
      composed: `(x, topk_idx, topk_weights, weights) -> [T, H]`, the layer by dispatch, experts and combine, of which
        the gradients are.
      weights: of the experts.
      x: `[T, H]`. topk_idx: int32 `[T, K]`. topk_weights: float32 `[T, K]`.

    Returns:
      `[T, H]` in `x.dtype`.
    """
    experts, names, operands = _reading(experts, weights, x)
    given = vary_alike(x, topk_idx, topk_weights.astype(jnp.float32), *operands)
    return _run_layer(experts, composed, names, False, *given)


def _reading(experts: Experts, weights: dict[str, Any], x: jax.Array) -> tuple[Experts, tuple[str, ...], list[Any]]:
    read = experts.reading(weights, x.dtype)
    assert read is not None  # `takes_layer`
    return read


def for_own_experts(config: Any, x: jax.Array, weights: dict[str, Any]) -> Experts | None:
    """Returns the experts of `own_layer`, for tokens that every rank has, or None: then take grouped matmuls."""
    chosen = adapted(config, x.shape[0])
    return chosen.experts if isinstance(chosen.experts, Experts) and takes_layer(chosen, x, weights) else None


def own_layer(
    experts: Experts,
    composed: Callable[..., jax.Array],
    weights: dict[str, jax.Array],
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
) -> jax.Array:
    """Runs this rank's experts for tokens that every rank has, as one kernel where it fits the chip.

    Args:
      composed, weights, x, topk_idx, topk_weights: as in `layer`; the tokens are the same on every rank, and `composed`
        returns what this function does.

    Returns:
      float32 `[T, H]`, this rank's part of the weighted sums.
    """
    experts, names, operands = _reading(experts, weights, x)
    local = weights["up"].shape[0]

    def first_expert() -> jax.Array:
        return jax.lax.axis_index(experts.config.axis_name) * local

    first = first_expert()
    # a slot of another rank's expert, or an unused one, names no expert, in the kernel as in a dispatch
    mine = (topk_idx >= first) & (topk_idx < jnp.minimum(first + local, experts.config.num_experts))
    own = jnp.where(mine, topk_idx - first, -1)
    given = vary_alike(x, own, topk_weights.astype(jnp.float32), *operands)

    def from_local(x: jax.Array, own: jax.Array, *rest: Any) -> jax.Array:
        return composed(x, jnp.where(own >= 0, own + first_expert(), -1), *rest)

    return _run_layer(experts, from_local, names, True, *given)


def takes_layer(config: Any, x: jax.Array, weights: dict[str, Any]) -> bool:
    """Returns True if `layer` may be one kernel: one chunk, one mesh axis, rows that travel as they are, and weights
    that kernels read."""
    one_axis = isinstance(config.axis_name, str) or len(config.axis_name) == 1
    plain = config.num_chunks == 1 and config.wire is None and config.combine_wire is None
    plain = plain and config.balance is None and config.num_slots is None
    fits = one_axis and plain and 0 < x.shape[0] <= MOST_TOKENS
    return fits and isinstance(config.experts, Experts) and config.experts.reading(weights, x.dtype) is not None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _run_layer(
    experts: Experts, composed: Callable[..., Any], names: tuple[str, ...], alone: bool, *operands: Any
) -> Any:
    (out,) = _layer_p.bind(
        *operands, names=names, experts=experts, composed=composed, alone=alone, config=experts.config.kernel
    )
    return out


def _layer_forward(*args: Any) -> tuple[Any, Any]:
    return _run_layer(*args), args[4:]


def _layer_backward(
    experts: Experts, composed: Callable[..., Any], names: tuple[str, ...], alone: bool, operands: Any, cotangent: Any
) -> tuple[Any, ...]:
    x, topk_idx, topk_weights, *given = operands

    def of(x: Any, topk_weights: Any, weights: Any) -> Any:
        return composed(x, topk_idx, topk_weights, weights)

    by_x, by_topk_weights, *by_given = gradients(experts, names, given, of, (x, topk_weights), cotangent)
    return by_x, None, by_topk_weights, *by_given


_run_layer.defvjp(_layer_forward, _layer_backward)


def _lowered_layer(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *weights: jax.Array,
    names: tuple[str, ...],
    experts: Experts,
    composed: Callable[..., Any],
    alone: bool,
    config: KernelConfig,
) -> tuple[jax.Array]:
    by_name = dict(zip(names, weights, strict=True))
    axis = experts.config.axis_name if isinstance(experts.config.axis_name, str) else experts.config.axis_name[0]
    axes = None if alone else Axes((axis,), (jax.lax.axis_size(axis),))
    tokens, top_k = topk_idx.shape
    part, chip = jax.lax.axis_size(axis) if alone else 1, hardware.generation()
    scaled = Scaled(0, any(block is None for _, block in experts.blocks)) if experts.blocks else None
    chosen = layer_pieces(
        config.vmem_limit_bytes or chip.vmem_bytes,
        chip.cores,
        axes.num_ranks if axes else 1,
        (tokens, top_k),
        Matrices.of(by_name, x, scaled),
        part,
    )
    if chosen is None or not hardware.lowers_flat_arrays(config):
        return (composed(x, topk_idx, topk_weights, experts.together(names, weights)),)
    if axes is not None:
        hardware.check_one_slice((axis,), "give the slices a mesh axis of their own, or use another grouped_matmul")
    beyond = -tokens % GROUP if tokens > GROUP else 0
    out = decode_layer(
        jnp.pad(x, ((0, beyond), (0, 0))),
        jnp.pad(topk_idx.T, ((0, 0), (0, beyond)), constant_values=-1),
        jnp.pad(topk_weights.T, ((0, 0), (0, beyond))),
        by_name.get("gate"),
        by_name["up"],
        by_name["down"],
        biases_of(names, by_name),
        activate=functools.partial(mlp.activate, experts.config),
        pieces=dataclasses.replace(chosen.pieces, widened=not chip.multiplies_float8),
        kept=chosen.kept,
        certain=chosen.certain,
        in_hbm=chosen.in_hbm,
        scales=experts.scales_of(by_name),
        axes=axes,
        launch=Launch(
            1,
            chosen.vmem_limit_bytes,
            0 if axes is None else barriers.collective_id(axes, None, config),
            hardware.interpret(config),
            chosen.cores,
        ),
    )
    return (out[:tokens],)


def _layer_shapes(x: Any, *_: Any, alone: bool, **__: Any) -> Sequence[ShapeDtype]:
    return [(x.shape, jnp.dtype(jnp.float32) if alone else x.dtype)]


_layer_p = declare_composite("decode_layer", _layer_shapes, _lowered_layer, multiplies=True)


class LayerPieces(NamedTuple):
    """How `decode_layer` divides its work.

    Attributes:
      kept: rows that there is room for. certain: experts whose weights come before the routing is known.
      in_hbm: rows come back into HBM.
      cores: that share a rank's experts; with two, `kept` and `certain` are of each.
    """

    pieces: Pieces
    kept: int
    certain: int
    vmem_limit_bytes: int
    in_hbm: bool
    cores: int = 1


def layer_pieces(
    limit: int, chip_cores: int, ranks: int, slots: tuple[int, int], matrices: Matrices, part: int = 1
) -> LayerPieces | None:
    """Returns pieces with as many slabs on their way as `limit` bytes of VMEM allow; for two cores where `FEW_ROWS`
    asks for them and the layer fits them.

    None where not even `LEAST_AHEAD` slabs fit, where tables do not fit SMEM, where there are more ranks than
    `all_gather_dispatch.GATHERED_RANKS`, and where weights of one byte or more than `ROWS_OF_ONE_CORE` rows need two
    cores that cannot share the experts: their number is odd, or there is one rank.

    Args:
      limit: bytes of VMEM of a core. chip_cores: cores of the chip.
      slots: tokens of a rank, and slots of a token.
      part: ranks that the slots of these tokens are divided among, where every rank has the tokens.
    """
    (local, hidden, width), (tokens, top_k) = matrices.shape, slots
    tokens = tokens if tokens <= GROUP else -(-tokens // GROUP) * GROUP
    if ranks > all_gather_dispatch.GATHERED_RANKS:
        return None
    mean = tokens * top_k / (local * part)
    rows = min(max(1, -(-int(mean + 2 * math.sqrt(mean)) // GROUP)) * GROUP, MOST_ROWS)
    scaled = matrices.scaled is not None
    both = chip_cores > 1 and (scaled or rows > FEW_ROWS) and local % chip_cores == 0 and ranks > 1
    sharing = [chip_cores] * both + [1] * (chip_cores == 1 or rows <= ROWS_OF_ONE_CORE and not scaled)
    record, reserved = record_of(hidden, matrices.dtype), matrices.bytes_beside(hidden)
    choices = [(False, size, LEAST_AHEAD) for size in (512, 256, 128)]
    choices += [(True, size, AMPLE_AHEAD) for size in (512, 256)]
    choices += [(True, size, LEAST_AHEAD) for size in (512, 256, 128)]
    for cores, room, (in_hbm, size, least) in itertools.product(sharing, ROOM, choices):
        if in_hbm and ranks == 1 or cores > 1 and not in_hbm:
            continue
        own = local // cores
        kept = max(int(room * tokens * top_k) // cores, LEAST_KEPT)
        slabs = Pieces(2 * rows, rows, slab_rows(hidden, size), slab_rows(width, size))
        each = sum(slabs.slabs(hidden, width))
        for ahead in range(min(MOST_AHEAD, own * each - 1), least - 1, -1):
            pieces = dataclasses.replace(slabs, ahead=ahead)
            certain = min(-(-ahead // each), int(IDLE_EXPERTS * own * math.exp(min(mean, 20.0))))
            sizes = Sizes(ranks, tokens, top_k, own, pieces.rows_at_once, kept, certain, cores, in_hbm)
            inside = vmem_bytes(pieces, record, sizes, matrices.shape, matrices.gated, matrices.weight_bytes)
            need = reserved + inside
            if need + need // 16 <= limit and sizes.smem_bytes() <= hardware.SMEM_BUDGET:
                return LayerPieces(pieces, kept, certain, need + need // 16, in_hbm, cores)
    return None
