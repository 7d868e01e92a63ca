"""Two axes, `(slow, fast)`: DCN between slices, ICI inside one. A Pallas remote DMA reaches its own slice only.

Dispatch: a token's record crosses DCN once per (token, slice), between chips of the same index, by XLA's all-to-all
in rounds; the chip that gets it fans it out over ICI to the ranks of its slice that need it. Combine goes the other
way: partial sums of a slice are added up on the chip of the token's index before one record crosses DCN.

Shapes: `N` slices of `M` ranks, rank `r = slice * M + index`; "rail" = the `N` chips of one index.

Each operation is the work before DCN, the crossing, and the work after it: `start_done` runs them as two programs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import rounds
from xen_moe_jax.backends.pallas import hardware, headers, plan
from xen_moe_jax.backends.pallas.records import Rows, push_records, quantization
from xen_moe_jax.backends.pallas.sums import Sums
from xen_moe_jax.pallas_kernels import forward as forward_kernel
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.push import Routes
from xen_moe_jax.pallas_kernels.record import Header, Record
from xen_moe_jax.pallas_kernels.reduce_slots import Pairs


class Rail(NamedTuple):
    """Destinations of the tokens of a chip's rail, `[N, T]` of them.

    Attributes:
      own_hits: int32 `[T, N]`: does this rank's token reach the slice?
      hits: int32 `[N, T, M]`: does the rail's token reach this rank of this slice?
      crossed: int32 `[N, T]`: does it reach this slice at all?
    """

    own_hits: jax.Array
    hits: jax.Array
    crossed: jax.Array


def rail_of(topk_idx: jax.Array, spec: Spec) -> Rail:
    slices, fast = spec.axis_sizes
    hit = _layout.ranks_hit(topk_idx, spec.num_ranks, spec.local_experts).reshape(-1, slices, fast)
    hits = plan.flags_to_peers(jnp.moveaxis(hit, 1, 0), spec.axis_name[:1])  # [N, T, M], element d for slice d
    own_hits = jnp.any(hit, axis=2).astype(jnp.int32)
    return Rail(own_hits, hits, jnp.any(hits > 0, axis=2).astype(jnp.int32))


def across_slices(buffer: jax.Array, largest_pair: jax.Array, spec: Spec, config: KernelConfig) -> jax.Array:
    """`[N, T, ...]`, the first rows for each slice -> `[N, ceil(T), ...]`, the first rows from each, over DCN.

    `largest_pair` is the same on every rank.
    """
    block = rounds.block_rows(spec.num_tokens, config)
    padded = rounds.pad_to_blocks(buffer, 1, block, fill=0)
    return rounds.exchange(
        lambda first: lax.dynamic_slice_in_dim(padded, first, block, axis=1),
        largest_pair=largest_pair,
        max_rows=spec.num_tokens,
        block=block,
        axis_name=spec.axis_name[:1],
    )


def across_slices_at_once(buffer: jax.Array, spec: Spec) -> jax.Array:
    """`across_slices` by one collective, which XLA splits into start and done; it moves all `T` rows of a pair."""
    return lax.all_to_all(buffer, spec.axis_name[:1], 0, 0)


class FanOut(NamedTuple):
    """Destinations, within this slice, of the records that cross DCN in a dispatch.

    Attributes:
      order: int32 `[N, T]`, number of each of the rail's tokens among the records of its slice.
      peer, address: int32 `[N * T, M]`, as `Routes`. expected: int32 `[M]`.
    """

    order: jax.Array
    peer: jax.Array
    address: jax.Array
    expected: jax.Array


def push(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    todo: plan.SendPlan,
    positions: jax.Array,
    rows: Rows,
    spec: Spec,
    config: KernelConfig,
) -> jax.Array:
    """Sends every token's record to the staging of the ranks that need it, as `push` does on one axis."""
    buffer, largest, fan = pack(x, scales, topk_idx, todo, positions, rows, spec, config)
    received = across_slices(buffer, largest, spec, config)
    return fan_out(received, fan, plan.dispatch_staging_rows(spec), spec, config)


def pack(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    todo: plan.SendPlan,
    positions: jax.Array,
    rows: Rows,
    spec: Spec,
    config: KernelConfig,
) -> tuple[jax.Array, jax.Array, FanOut]:
    """Prepares the crossing: `[N, T, *record.shape]`, the first rows for each slice; the largest number of them; the
    tables of the next step."""
    slices, fast = spec.axis_sizes
    tokens = spec.num_tokens
    rail = rail_of(topk_idx, spec)
    buffer = pack_slices(x, scales, rail.own_hits, rows, spec, config)
    largest = _largest_anywhere(rail.own_hits, 0, spec)
    starts, sent = _regions(rail, positions, spec)
    address = starts[:, None, :] + _layout.exclusive_cumsum(sent, axis=1)  # [N, T, M]
    peer = jnp.where(sent > 0, jnp.arange(fast, dtype=jnp.int32), -1)
    fan = FanOut(
        _layout.exclusive_cumsum(rail.crossed, axis=1),
        peer.reshape(slices * tokens, fast),
        address.reshape(slices * tokens, fast),
        jnp.sum(todo.routes.expected.reshape(slices, fast), axis=0, dtype=jnp.int32),
    )
    return buffer, largest, fan


def pack_slices(
    x: jax.Array,
    scales: jax.Array | None,
    own_hits: jax.Array,
    rows: Rows,
    spec: Spec,
    config: KernelConfig,
    header: jax.Array | None = None,
) -> jax.Array:
    """int32 `[N, T, *record.shape]`: the records of tokens that `own_hits [T, N]` names, the first for each slice."""
    slices, tokens = spec.axis_sizes[0], spec.num_tokens
    slice_of = jnp.arange(slices, dtype=jnp.int32)
    routes = Routes(
        jnp.where(own_hits > 0, slice_of, -1),
        slice_of * tokens + _layout.exclusive_cumsum(own_hits, axis=0),
        jnp.zeros((1,), jnp.int32),
        slices * tokens,
    )
    records = push_records(x, scales, routes, rows, axes=None, spec=spec, config=config, header=header)
    return records.reshape(slices, tokens, *rows.record.shape)


def _largest_anywhere(hits: jax.Array, axis: int, spec: Spec) -> jax.Array:
    """The most rows of any pair, from the rows that this rank sends."""
    return lax.pmax(jnp.max(jnp.sum(hits, axis=axis, dtype=jnp.int32)), spec.axis_name)


def fan_out_by_headers(
    received: jax.Array, known: headers.Arrivals, record: Record, spec: Spec, config: KernelConfig
) -> jax.Array:
    """Does the work of `fan_out` for records with headers, which name the ranks that need them."""
    slices, fast = spec.axis_sizes
    here = lax.axis_index(spec.axis_name[0])
    header, top_k, rows = Header(spec.top_k), spec.top_k, received.shape[1]
    words = received[:, :, record.header_row]
    experts = words[..., header.experts : header.experts + top_k]
    kept = experts >= 0
    if plan.packs_staging(spec):
        kept &= words[..., header.rows : header.rows + top_k] >= 0
    number = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (slices, rows))
    kept &= (number < known.came[:, None])[..., None]  # behind them lie old values
    index = jnp.where(kept, experts // spec.local_experts - here * fast, -1)
    sent = jnp.any(index[..., None] == jnp.arange(fast, dtype=jnp.int32), axis=2)
    address = known.starts[:, None, :] + _layout.exclusive_cumsum(sent.astype(jnp.int32), axis=1)
    fan = FanOut(
        number,
        jnp.where(sent, jnp.arange(fast, dtype=jnp.int32), -1).reshape(slices * rows, fast),
        address.reshape(slices * rows, fast),
        jnp.sum(known.expected.reshape(slices, fast), axis=0, dtype=jnp.int32),
    )
    return fan_out(received, fan, headers.staging_rows(spec), spec, config)


def fan_out(received: jax.Array, fan: FanOut, staging_rows: int, spec: Spec, config: KernelConfig) -> jax.Array:
    """After DCN: sends `received [N, rows, ...]` to the staging of the ranks of this slice."""
    slices, stride = received.shape[:2]
    source = jnp.arange(slices, dtype=jnp.int32)[:, None] * stride + fan.order
    return forward_kernel.forward(
        received.reshape(slices * stride, *received.shape[2:]),
        source.reshape(-1),
        Routes(fan.peer, fan.address, fan.expected, staging_rows),
        axes=plan.kernel_axes(spec),
        launch=_table_launch(spec, config),
    )


def _regions(rail: Rail, positions: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Returns where ranks of this slice put the rail's records, `starts [N, M]`, and which come, `sent [N, T, M]`."""
    slices, fast = spec.axis_sizes
    tokens = spec.num_tokens
    index = lax.axis_index(spec.axis_name[1])
    if not plan.packs_staging(spec):
        rank = jnp.arange(slices, dtype=jnp.int32) * fast + index
        return jnp.broadcast_to((rank * tokens)[:, None], (slices, fast)), rail.hits
    came = jnp.any(positions >= 0, axis=-1)
    start = _layout.exclusive_cumsum(jnp.sum(came, axis=1, dtype=jnp.int32), axis=0)
    starts = plan.to_peers(start.reshape(slices, fast).T, spec.axis_name[1:])  # [M, N]
    wanted = came.reshape(slices, fast, tokens).transpose(1, 2, 0)  # [M, T, N]
    hits = rail.hits.transpose(2, 1, 0)
    sent = plan.flags_to_peers_if(plan.any_dropped(positions, spec), wanted, hits, spec.axis_name[1:])
    return starts.T, sent.transpose(2, 1, 0)


def combine(
    sums: Sums, rows: jax.Array, weights: jax.Array, topk_idx: jax.Array, positions: jax.Array, zero: jax.Array
) -> jax.Array:
    """`[T, hidden]` from `rows` and `zero`, as `Sums.prepared` returns them."""
    buffer, largest, last = partial_sums(sums, rows, weights, topk_idx, positions, zero)
    received = across_slices(buffer, largest, sums.call.spec, sums.call.config)
    return add_slices(sums, received, last, zero)


def partial_sums(
    sums: Sums, rows: jax.Array, weights: jax.Array, topk_idx: jax.Array, positions: jax.Array, zero: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Before DCN: `[N, T, *record.shape]`, the first rows for each slice; the largest number of them; and
    `last [T, N]`, which of the records that come from a slice is a token's, `-1` for none.
    """
    spec, record = sums.call.spec, sums.record
    slices, fast = spec.axis_sizes
    tokens = spec.num_tokens
    rail = rail_of(topk_idx, spec)
    index = lax.axis_index(spec.axis_name[1])

    # An expert's rank sends to the chip of the token's index in this slice. Each pair of an expert's rank and a source
    # slice has a region of staging.
    counts = jnp.sum(rail.hits, axis=1, dtype=jnp.int32).T  # [M, N]
    few = fast <= spec.top_k
    if few:
        starts = (jnp.arange(fast * slices, dtype=jnp.int32) * tokens).reshape(fast, slices)
        remote = jnp.broadcast_to(starts[index], (fast, slices))  # [M (chip), N (source slice)]
    else:
        starts = _layout.exclusive_cumsum(counts.reshape(-1), axis=0).reshape(fast, slices)
        remote = plan.to_peers(starts, spec.axis_name[1:])
    came = jnp.any(positions != -1, axis=-1).reshape(slices, fast, tokens)
    address = remote.T[:, :, None] + _layout.exclusive_cumsum(came.astype(jnp.int32), axis=2)
    peer = jnp.where(came, jnp.arange(fast, dtype=jnp.int32)[:, None], -1)
    pairs = Pairs(
        rows=positions.reshape(slices * fast * tokens, -1),
        peer=peer.reshape(-1),
        address=address.reshape(-1),
        expected=jnp.sum(counts, axis=1, dtype=jnp.int32),
        staging_rows=slices * tokens * min(fast, spec.top_k),
    )
    staged = sums.of_slots(rows, pairs, weights, zero, sums.slots_launch(), axes=plan.kernel_axes(spec))

    # The partial sums of this slice are packed in token order for each source slice.
    summand = starts.T[:, None, :] + _layout.exclusive_cumsum(rail.hits, axis=1)  # [N, T, M]
    summand = jnp.where(rail.hits > 0, summand, -1)
    order = jnp.argsort(rail.crossed == 0, axis=1, stable=True)
    summand = jnp.take_along_axis(summand, order[:, :, None], axis=1)
    buffer = ranks_kernel.reduce_ranks(
        staged,
        summand.reshape(slices * tokens, fast),
        zero,
        record=record,
        out_dtype=sums.dtype,
        quantize=quantization(sums.call.wire),
        as_records=True,
        launch=sums.ranks_launch(fast, slices * tokens),
    )
    largest = _largest_anywhere(rail.crossed, 1, spec)
    last = jnp.where(rail.own_hits > 0, _layout.exclusive_cumsum(rail.own_hits, axis=0), -1)
    return buffer.reshape(slices, tokens, *record.shape), largest, last


def add_slices(sums: Sums, received: jax.Array, last: jax.Array, zero: jax.Array) -> jax.Array:
    """After DCN: `[T, hidden]` from `received [N, rows, ...]`."""
    slices, stride = received.shape[:2]
    summand = jnp.arange(slices, dtype=jnp.int32) * stride + last
    staged = received.reshape(slices * stride, *sums.record.shape)
    return sums.of_ranks(staged, jnp.where(last >= 0, summand, -1), zero, sums.ranks_launch(slices, last.shape[0]))


def _table_launch(spec: Spec, config: KernelConfig) -> Launch:
    """`forward` keeps nothing in VMEM; its block only sizes the tables in SMEM."""
    return hardware.launch(
        "forward", lambda block: 0, preferred=256, smallest=1, available=256, config=config, axes=plan.kernel_axes(spec)
    )
