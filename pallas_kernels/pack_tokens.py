"""Token rows -> records with their routing, token by token, which an all-gather then sends to every rank.

What moves: blocks of `x` through VMEM, which leave as blocks of records. Block rows come first, `[S, T, 128]`: a vector
register is then one block row of eight records, and XLA gathers the array as it lies. The routing comes as XLA keeps
it, slots by tokens, is turned over once and stays in VMEM. Where a device has two cores, each packs one half.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax.pallas_kernels.launch import Launch, block_rows, divided, for_row_groups, tile_rows
from xen_moe_jax.pallas_kernels.push import encode_rows
from xen_moe_jax.pallas_kernels.record import LANES, Header, Quantization, Record


@dataclasses.dataclass(frozen=True)
class _Refs:
    experts: Any
    weights: Any
    x: Any
    out: Any
    upright: Any
    headers: Any
    header: Any
    scales: Any = None


def _body(refs: _Refs, *, record: Record, quantize: Quantization | None, each: int, steps: int) -> None:
    core, turn = pl.program_id(0), pl.program_id(1)
    top_k, tokens = refs.experts.shape
    block = refs.x.shape[0]

    @pl.when(turn == 0)
    def _() -> None:
        header = Header(top_k)
        refs.upright[...] = jnp.zeros(refs.upright.shape, jnp.int32)
        refs.upright[header.experts : header.rows, :] = refs.experts[...]
        refs.upright[header.weights : header.token, :] = lax.bitcast_convert_type(refs.weights[...], jnp.int32)
        refs.upright[header.token :, :] = lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
        refs.headers[0:tokens, :] = jnp.transpose(refs.upright[...])

    first = jnp.minimum(core * each + turn, steps - 1) * block
    refs.header[...] = refs.headers[pl.ds(first, block), :]

    def encode(rows: Any) -> None:
        def put(j: int, words: jax.Array) -> None:
            refs.out[j, rows, :] = words

        encode_rows(refs, put, rows, record, quantize)

    for_row_groups(block, tile_rows(refs.x.dtype), encode)


def vmem_bytes(record: Record, x_dtype: Any, has_scales: bool, tokens: int, block: int) -> int:
    """VMEM that a block size needs: two blocks of tokens and of records (pipelined), and the routing of all tokens."""
    row = record.hidden * jnp.dtype(x_dtype).itemsize + (4 * LANES * max(1, record.scale_rows) if has_scales else 0)
    return 2 * block * (row + record.bytes) + 4 * LANES * (block + 2 * (-(-tokens // LANES) * LANES + block))


def pack_tokens(
    x: jax.Array,
    scales: jax.Array | None,
    experts: jax.Array,
    weights: jax.Array,
    *,
    record: Record,
    quantize: Quantization | None,
    launch: Launch,
) -> jax.Array:
    """Packs every token and its routing.

    Args:
      x: `[T, hidden]`.
      scales: float32 `[T, chunks]` that travel with `x`, or None.
      experts: int32 `[K, T]`, `-1` for none. weights: float32 `[K, T]`.
      record: has a header for `K` slots; its rows stay zero.
      quantize: how to quantize, or None to send `x` as it is.

    Returns:
      int32 `[S, T, 128]`, the records of block rows `S`.
    """
    tokens = x.shape[0]
    block = block_rows(launch.block, tokens, tile_rows(x.dtype))
    steps = -(-tokens // block)
    each = divided(steps, launch.cores)
    wide = -(-tokens // LANES) * LANES
    experts, weights = (jnp.pad(a, ((0, 0), (0, wide - tokens))) for a in (experts, weights))

    def visited(core: Any, turn: Any) -> Any:
        return jnp.minimum(core * each + turn, steps - 1)

    whole = pl.BlockSpec(experts.shape, lambda core, turn: (0, 0))
    in_specs = [whole, whole, pl.BlockSpec((block, record.hidden), lambda core, turn: (visited(core, turn), 0))]
    names = ["experts", "weights", "x"]
    operands = [experts, weights, x]
    if scales is not None:
        in_specs.append(pl.BlockSpec((block, record.chunks), lambda core, turn: (visited(core, turn), 0)))
        names.append("scales")
        operands.append(scales)
    return launch.call(
        functools.partial(_body, record=record, quantize=quantize, each=each, steps=steps),
        _Refs,
        [*names, "out", "upright", "headers", "header"],
        name="xen_moe_pack_tokens",
        remote=False,
        by_dma=False,
        shared=True,
        grid_spec=pl.GridSpec(
            grid=(launch.cores, each),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((record.shape[0], block, LANES), lambda core, turn: (0, visited(core, turn), 0)),
            scratch_shapes=[
                pltpu.VMEM((LANES, wide), jnp.int32),
                pltpu.VMEM((wide + block, LANES), jnp.int32),
                pltpu.VMEM((block, LANES), jnp.int32),
            ],
        ),
        out_shape=((record.shape[0], tokens, LANES), jnp.int32),
    )(*operands)
