"""An independent NumPy oracle of the public contract: plain loops, no JAX, no code of the library.

Every array is *stacked*: axis 0 is the rank that holds it, so `x` is `[R, T, H]` and `topk_idx` is `[R, T, K]`. Written
from the contract (docs/design/internals.md, "Numerics, in words that every backend follows"), sentence by sentence.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np

SCALE_BLOCK = 128
QMAX = {"float8_e4m3fn": np.float32(448.0), "int8": np.float32(127.0)}
WIRE_DTYPE = {"float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
F32 = np.float32


# -- quantization ----------------------------------------------------------------------------------
def quantize(x: np.ndarray, wire: str, scale_format: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Quantizes `x [..., H]` by blocks of 128: `(values [..., H], scales f32[..., ceil(H/128)])`."""
    hidden = x.shape[-1]
    blocks = -(-hidden // SCALE_BLOCK)
    qmax = QMAX[wire]
    values = np.zeros(x.shape, WIRE_DTYPE[wire])
    scales = np.zeros((*x.shape[:-1], blocks), F32)
    for row in np.ndindex(*x.shape[:-1]):
        for b in range(blocks):
            part = slice(b * SCALE_BLOCK, min(hidden, (b + 1) * SCALE_BLOCK))
            values[row][part], scales[(*row, b)] = _quantize_block(x[row][part].astype(F32), wire, qmax, scale_format)
    return values, scales


def _quantize_block(block: np.ndarray, wire: str, qmax: np.float32, scale_format: str) -> tuple[np.ndarray, np.float32]:
    if not np.all(np.isfinite(block)):
        return np.zeros(block.shape, WIRE_DTYPE[wire]), F32(np.nan)
    amax = max(np.max(np.abs(block)), F32(2.0**-96))
    ratio = F32(amax / qmax)
    if scale_format == "float32":
        scale, inverse = ratio, F32(qmax / amax)
    elif scale_format == "ue8m0":
        mantissa, exponent = math.frexp(float(ratio))  # ratio = mantissa * 2**exponent, mantissa in [0.5, 1)
        ceil_log2 = exponent - 1 if mantissa == 0.5 else exponent
        scale, inverse = F32(2.0**ceil_log2), F32(2.0**-ceil_log2)
    else:
        raise ValueError(scale_format)
    product = block * inverse
    if wire == "int8":
        return np.clip(np.rint(product), -127, 127).astype(np.int8), scale
    return product.astype(WIRE_DTYPE[wire]), scale


def dequantize(values: np.ndarray, scales: np.ndarray, dtype=F32) -> np.ndarray:
    """`float32(values) * scale of the block`, rounded to `dtype`."""
    hidden = values.shape[-1]
    wide = np.repeat(scales, SCALE_BLOCK, axis=-1)[..., :hidden]
    return (values.astype(F32) * wide).astype(dtype)


def mxfp4(x: np.ndarray) -> np.ndarray:
    """Returns `x [..., H]` in E2M1 with a power of two for 32 elements, of which none exceeds 6 times it: float32."""
    out = np.empty(x.shape, F32)
    for row in np.ndindex(*x.shape[:-1]):
        for at in range(0, x.shape[-1], 32):
            block = x[row][at : at + 32].astype(F32)
            if not np.all(np.isfinite(block)):
                out[row][at : at + 32] = np.nan
                continue
            mantissa, exponent = math.frexp(float(F32(max(np.max(np.abs(block)), F32(2.0**-96)) / F32(6))))
            scale = F32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
            out[row][at : at + 32] = (block / scale).astype(ml_dtypes.float4_e2m1fn).astype(F32) * scale
    return out


def through_wire(x: np.ndarray, wire: str | None, scale_format: str, dtype) -> np.ndarray:
    """Returns `x` as it arrives, in `dtype`: rounded to `dtype`, or quantized and dequantized."""
    if wire is None:
        return x.astype(dtype)
    if wire == "mxfp4":
        return mxfp4(x).astype(dtype)
    return dequantize(*quantize(x, wire, scale_format), dtype)


# -- dispatch --------------------------------------------------------------------------------------
@dataclasses.dataclass
class Dispatched:
    """Every output of a dispatch, for all ranks. `specified` marks the rows whose contents the contract fixes."""

    layout: str
    num_ranks: int
    num_experts: int
    rows: np.ndarray  # [R, C, H]; padded [R, L, R*T, H]
    row_scales: np.ndarray | None  # [R, C, blocks], BlockScaled input only
    positions: np.ndarray  # i32[R, R, T, slots]: [holder, source, token, slot]
    recv_counts: np.ndarray  # i32[R, R, L]
    weights: np.ndarray  # f32[R, C] (padded [R, L, R*T]; ranked [R, C, K])
    local_idx: np.ndarray | None  # i32[R, C, K], ranked only
    group_sizes: np.ndarray | None  # i32[R, L], grouped only
    num_tokens_per_expert: np.ndarray  # i32[R, L]
    num_dropped: np.ndarray  # i32[R]
    specified: np.ndarray  # bool[R, C] (padded [R, L, R*T])
    topk_idx: np.ndarray  # i32[R, T, K], sanitised

    @property
    def local_experts(self) -> int:
        return -(-self.num_experts // self.num_ranks)


def sanitize(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    """Replaces every entry outside `[0, E)`, an unused slot, by -1."""
    return np.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, -1).astype(np.int32)


def worst_case_capacity(
    layout: str, num_ranks: int, num_tokens: int, top_k: int, num_experts: int, alignment: int
) -> int:
    """Rows of `routed.x` for `capacity=None`, from the words of the contract."""
    local = -(-num_experts // num_ranks)
    if layout == "grouped":
        rows = num_ranks * num_tokens * min(top_k, local)
        # A group that holds a row wastes at most alignment - 1 rows; the total is a sum of multiples of the alignment.
        return (rows + min(local, rows) * (alignment - 1)) // alignment * alignment
    if layout == "ranked":
        return num_ranks * num_tokens
    return local * num_ranks * num_tokens


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def needed_rows(topk_idx: np.ndarray, num_experts: int, layout: str, alignment: int = 1) -> int:
    """The smallest capacity (grouped, ranked) at which no rank drops a row."""
    num_ranks = topk_idx.shape[0]
    local = -(-num_experts // num_ranks)
    idx = sanitize(topk_idx, num_experts)
    need = 0
    for rank in range(num_ranks):
        if layout == "ranked":
            rows = sum(bool(np.any((t >= 0) & (t // local == rank))) for t in idx.reshape(-1, idx.shape[-1]))
            need = max(need, rows)
        else:
            counts = [int(np.sum(idx == rank * local + e)) for e in range(local)]
            last = max((e for e in range(local) if counts[e]), default=-1)
            if last >= 0:  # the last group's own padding need not fit
                need = max(need, sum(_round_up(c, alignment) for c in counts[:last]) + counts[last])
    return need


def dispatch(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray | None,
    *,
    num_experts: int,
    layout: str = "grouped",
    capacity: int | None = None,
    alignment: int = 1,
    wire: str | None = None,
    scale_format: str = "float32",
    scales: np.ndarray | None = None,
    active: np.ndarray | None = None,
    drop: str = "position",
) -> Dispatched:
    """Dispatch of all ranks. Weights default to one; with `scales`, `x` is `BlockScaled` and travels as it is."""
    num_ranks, num_tokens, hidden = x.shape
    top_k = topk_idx.shape[-1]
    idx = sanitize(topk_idx, num_experts)
    withheld = np.zeros(num_ranks, np.int32)
    if active is not None:
        idx, withheld = leave_out(idx, active, num_experts, layout)
    local = -(-num_experts // num_ranks)
    if capacity is None or layout == "padded":
        capacity = worst_case_capacity(layout, num_ranks, num_tokens, top_k, num_experts, alignment)
    idx, kept_home = keep_rows(idx, topk_weights, num_experts, layout, capacity, alignment, drop)
    slots = 1 if layout == "ranked" else top_k
    positions = np.full((num_ranks, num_ranks, num_tokens, slots), -1, np.int32)
    recv_counts = np.zeros((num_ranks, num_ranks, local), np.int32)
    occupied = np.zeros((num_ranks, capacity), bool)  # real rows
    padding = np.zeros((num_ranks, capacity), bool)  # alignment padding
    kept = np.zeros((num_ranks, local), np.int32)
    group_sizes = np.zeros((num_ranks, local), np.int32)
    num_dropped = withheld + kept_home

    for rank in range(num_ranks):
        if layout == "ranked":
            _place_ranked(rank, idx, local, capacity, positions, recv_counts, kept, occupied, num_dropped)
        elif layout == "grouped":
            _place_grouped(rank, idx, local, capacity, alignment, positions, recv_counts, kept, occupied, num_dropped)
            # A group is its real rows rounded up; rows past the capacity do not exist.
            start = 0
            for e in range(local):
                end = start + _round_up(int(recv_counts[rank, :, e].sum()), alignment)
                group_sizes[rank, e] = min(end, capacity) - min(start, capacity)
                padding[rank, start:end] = True
                start = end
            padding[rank] &= ~occupied[rank]
        else:
            _place_padded(rank, idx, local, positions, recv_counts, kept, occupied, num_dropped)

    travelled = x if scales is not None else through_wire(x, wire, scale_format, x.dtype)
    weights_in = np.ones(idx.shape, F32) if topk_weights is None else topk_weights.astype(F32)
    rows = _gather_rows(travelled, positions, capacity)
    row_scales = None if scales is None else _gather_rows(scales, positions, capacity)
    weights = np.zeros((num_ranks, capacity), F32)
    local_idx = None
    if layout == "ranked":
        weights = np.zeros((num_ranks, capacity, top_k), F32)
        local_idx = np.full((num_ranks, capacity, top_k), -1, np.int32)
    for rank, source, token, slot in np.ndindex(*positions.shape):
        row = positions[rank, source, token, slot]
        if row < 0:
            continue
        if layout == "ranked":
            for k in range(top_k):
                expert = idx[source, token, k]
                if expert >= 0 and expert // local == rank:
                    local_idx[rank, row, k] = expert - rank * local
                    weights[rank, row, k] = weights_in[source, token, k]
        else:
            weights[rank, row] = weights_in[source, token, slot]

    specified = occupied | padding
    if layout == "padded":
        shape = (num_ranks, local, num_ranks * num_tokens)
        rows, weights, specified = rows.reshape(*shape, hidden), weights.reshape(shape), specified.reshape(shape)
        row_scales = None if row_scales is None else row_scales.reshape(*shape, -1)
    return Dispatched(
        layout=layout,
        num_ranks=num_ranks,
        num_experts=num_experts,
        rows=rows,
        row_scales=row_scales,
        positions=positions,
        recv_counts=recv_counts,
        weights=weights,
        local_idx=local_idx,
        group_sizes=group_sizes if layout == "grouped" else None,
        num_tokens_per_expert=kept,
        num_dropped=num_dropped,
        specified=specified,
        topk_idx=idx,
    )


def leave_out(idx: np.ndarray, active: np.ndarray, num_experts: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns sanitised `idx [R, T, K]` without the slots that `active` leaves out, and the rows that each source keeps
    back."""
    num_ranks = idx.shape[0]
    local = -(-num_experts // num_ranks)
    kept, withheld = idx.copy(), np.zeros(num_ranks, np.int32)
    for source, token in np.ndindex(*idx.shape[:2]):
        refused = []
        for slot, expert in enumerate(idx[source, token]):
            if expert >= 0 and not (active[source] and active[expert // local]):
                kept[source, token, slot] = -1
                refused.append(expert // local)
        withheld[source] += len(set(refused)) if layout == "ranked" else len(refused)
    return kept, withheld


def keep_rows(idx, topk_weights, num_experts, layout, capacity, alignment, drop) -> tuple[np.ndarray, np.ndarray]:
    """Returns sanitised `idx [R, T, K]` without the rows that `drop` leaves out, and the number of rows that each
    receiver loses.

    A receiver lists the rows that are sent to it in the order of the rule, and takes them one by one while they fit.
    """
    num_ranks, _, top_k = idx.shape
    local = -(-num_experts // num_ranks)
    kept, lost = idx.copy(), np.zeros(num_ranks, np.int32)
    if drop == "position" or (drop == "source" and layout != "grouped"):
        return kept, lost  # ranked and padded rows lie in the order of their sources
    rooms = [(rank, [e], num_ranks * idx.shape[1]) for rank in range(num_ranks) for e in range(local)]
    if layout != "padded":
        rooms = [(rank, list(range(local)), capacity) for rank in range(num_ranks)]
    for rank, experts, room in rooms:
        rows = []  # (source, token, slots, local experts, weight)
        for source, token in np.ndindex(*idx.shape[:2]):
            slots = [
                k
                for k in range(top_k)
                if idx[source, token, k] - rank * local in experts and idx[source, token, k] >= 0
            ]
            for group in [slots] * bool(slots) if layout == "ranked" else [[k] for k in slots]:
                weight = F32(0)
                for k in group:
                    weight = F32(weight + (1 if topk_weights is None else F32(topk_weights[source, token, k])))
                rows.append((source, token, group, [int(idx[source, token, k]) - rank * local for k in group], weight))
        if drop == "weight":
            rows.sort(key=lambda row: -math.inf if np.isnan(row[4]) else row[4], reverse=True)  # keeps ties in order
        else:
            rows.sort(key=lambda row: (row[0], row[3][0], row[1], row[2][0]))
        counts = np.zeros(local, int)
        full = False
        for source, token, slots, names, _ in rows:
            after = counts.copy()
            after[names[0]] += 1
            full = full or _rows_of_layout(after, alignment) > room
            if full:
                kept[source, token, slots] = -1
                lost[rank] += 1
            else:
                counts = after
    return kept, lost


def _rows_of_layout(counts: np.ndarray, alignment: int) -> int:
    """Rows of groups of these sizes, one after the other; the padding behind the last one does not count."""
    last = int(np.flatnonzero(counts)[-1])
    return sum(_round_up(int(count), alignment) for count in counts[:last]) + int(counts[last])


def without(routed: Dispatched, active: np.ndarray) -> Dispatched:
    """Returns a dispatch among all ranks as an operation on its handle with `active` sees it."""
    positions = routed.positions.copy()
    for holder, source in np.ndindex(*positions.shape[:2]):
        if not (active[holder] and active[source]):
            positions[holder, source] = -1
    return dataclasses.replace(routed, positions=positions)


def _place_grouped(rank, idx, local, capacity, alignment, positions, recv_counts, kept, occupied, num_dropped) -> None:
    num_ranks, num_tokens, top_k = idx.shape
    start = 0
    for e in range(local):
        count = 0
        for source, token, slot in itertools.product(range(num_ranks), range(num_tokens), range(top_k)):
            if idx[source, token, slot] != rank * local + e:
                continue
            recv_counts[rank, source, e] += 1
            row = start + count
            count += 1
            if row < capacity:
                positions[rank, source, token, slot] = row
                occupied[rank, row] = True
                kept[rank, e] += 1
            else:
                positions[rank, source, token, slot] = -2
                num_dropped[rank] += 1
        start += _round_up(count, alignment)


def _place_ranked(rank, idx, local, capacity, positions, recv_counts, kept, occupied, num_dropped) -> None:
    num_ranks, num_tokens, top_k = idx.shape
    row = 0
    for source, token in itertools.product(range(num_ranks), range(num_tokens)):
        mine = [e - rank * local for e in idx[source, token] if e >= 0 and e // local == rank]
        if not mine:
            continue
        recv_counts[rank, source, 0] += 1
        if row < capacity:
            positions[rank, source, token, 0] = row
            occupied[rank, row] = True
            for e in mine:
                kept[rank, e] += 1
        else:
            positions[rank, source, token, 0] = -2
            num_dropped[rank] += 1
        row += 1


def _place_padded(rank, idx, local, positions, recv_counts, kept, occupied, num_dropped) -> None:
    num_ranks, num_tokens, top_k = idx.shape
    depth = num_ranks * num_tokens
    for e in range(local):
        count = 0
        for source, token, slot in itertools.product(range(num_ranks), range(num_tokens), range(top_k)):
            if idx[source, token, slot] != rank * local + e:
                continue
            recv_counts[rank, source, e] += 1
            if count < depth:
                positions[rank, source, token, slot] = e * depth + count
                occupied[rank, e * depth + count] = True
                kept[rank, e] += 1
            else:
                positions[rank, source, token, slot] = -2
                num_dropped[rank] += 1
            count += 1


def _gather_rows(tokens: np.ndarray, positions: np.ndarray, capacity: int) -> np.ndarray:
    """`rows [R, capacity, ...]` with `tokens[source, token]` at every position that holds it, zero elsewhere."""
    rows = np.zeros((positions.shape[0], capacity, tokens.shape[-1]), tokens.dtype)
    for rank, source, token, slot in np.ndindex(*positions.shape):
        if (row := positions[rank, source, token, slot]) >= 0:
            rows[rank, row] = tokens[source, token]
    return rows


def redispatch(x: np.ndarray, routed: Dispatched) -> np.ndarray:
    """Sends a new payload `x [R, T, H2]` along the same routing."""
    capacity = routed.specified[0].size
    return _gather_rows(x, routed.positions, capacity).reshape(*routed.specified.shape, x.shape[-1])


def weights_from_rows(values: np.ndarray, routed: Dispatched) -> np.ndarray:
    """A number for each row (ranked: for each of a row's slots, used where the expert is local) -> its token's slot,
    `[R, T, K]`; 0 for a slot without a row.
    """
    ranks = routed.num_ranks
    flat = values.reshape(ranks, routed.specified[0].size, -1)
    out = np.zeros(routed.topk_idx.shape, values.dtype)
    for rank, source, token, slot in np.ndindex(ranks, *out.shape):
        ranked = routed.layout == "ranked"
        row = routed.positions[rank, source, token, 0 if ranked else slot]
        if row >= 0 and (not ranked or routed.local_idx[rank, row, slot] >= 0):
            out[source, token, slot] = flat[rank, row, slot if ranked else 0]
    return out


# -- combine ---------------------------------------------------------------------------------------
def combine(
    y: np.ndarray,
    routed: Dispatched,
    *,
    weighted: bool,
    wire: str | None = None,
    scale_format: str = "float32",
    axis_sizes: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Sum of a token's rows, `[R, T, H]` of `y.dtype`. Two `axis_sizes` (nodes, ranks of a node) add one level."""
    num_ranks = routed.num_ranks
    sources, tokens = routed.positions.shape[1:3]
    hidden = y.shape[-1]
    flat = y.reshape(num_ranks, -1, hidden)
    flat_weights = None if routed.layout == "ranked" else routed.weights.reshape(num_ranks, -1)
    out = np.zeros((sources, tokens, hidden), y.dtype)
    nodes = [list(range(num_ranks))]
    if axis_sizes is not None and len(axis_sizes) == 2:
        nodes = [list(range(n * axis_sizes[1], (n + 1) * axis_sizes[1])) for n in range(axis_sizes[0])]
    for source in range(sources):
        for token in range(tokens):
            total = np.zeros(hidden, F32)
            for node in nodes:
                node_total = np.zeros(hidden, F32)
                for rank in node:
                    held = [int(p) for p in routed.positions[rank, source, token] if p >= 0]
                    if not held:
                        continue
                    partial = np.zeros(hidden, F32)
                    for row in held:  # slot order
                        value = flat[rank, row].astype(F32)
                        partial = partial + (flat_weights[rank, row] * value if weighted else value)
                    arrived = through_wire(partial, wire, scale_format, F32 if wire else y.dtype)
                    node_total = node_total + arrived.astype(F32)
                if len(nodes) > 1:
                    node_total = through_wire(node_total, wire, scale_format, F32 if wire else y.dtype).astype(F32)
                total = total + node_total
            out[source, token] = total.astype(y.dtype)
    return out


# -- layout, drop-ins ------------------------------------------------------------------------------
@dataclasses.dataclass
class Layout:
    """One rank's view of its own routing, before anything is sent."""

    num_tokens_per_rank: np.ndarray  # i32[R]: tokens with at least one expert on that rank
    num_tokens_per_node: np.ndarray | None  # i32[R / ranks_per_node]
    num_tokens_per_expert: np.ndarray  # i32[E]: (token, slot) pairs
    is_token_in_rank: np.ndarray  # bool[T, R]


def dispatch_layout(
    topk_idx: np.ndarray, num_experts: int, num_ranks: int, ranks_per_node: int | None = None
) -> Layout:
    """`get_dispatch_layout` of one rank's `topk_idx [T, K]`."""
    local = -(-num_experts // num_ranks)
    idx = sanitize(topk_idx, num_experts)
    in_rank = np.zeros((idx.shape[0], num_ranks), bool)
    per_expert = np.zeros(num_experts, np.int32)
    for token, slot in np.ndindex(*idx.shape):
        if (expert := idx[token, slot]) >= 0:
            in_rank[token, expert // local] = True
            per_expert[expert] += 1
    per_node = None
    if ranks_per_node is not None:
        per_node = in_rank.reshape(idx.shape[0], -1, ranks_per_node).any(-1).sum(0).astype(np.int32)
    return Layout(in_rank.sum(0).astype(np.int32), per_node, per_expert, in_rank)


def all_to_all(x: np.ndarray, split_axis: int, concat_axis: int, *, groups=None, tiled: bool = False) -> np.ndarray:
    """`jax.lax.all_to_all` of all ranks: part `j` of rank `i` of a group becomes part `i` of rank `j`."""
    groups = [list(range(x.shape[0]))] if groups is None else groups
    out: list = [None] * x.shape[0]
    for group in groups:
        parts = {rank: np.split(x[rank], len(group), axis=split_axis) for rank in group}
        for j, rank in enumerate(group):
            received = [parts[source][j] for source in group]
            if tiled:
                out[rank] = np.concatenate(received, axis=concat_axis)
            else:
                out[rank] = np.stack([np.squeeze(p, split_axis) for p in received], axis=concat_axis)
    return np.stack(out)


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, groups=None
) -> np.ndarray:
    """`jax.lax.ragged_all_to_all` of all ranks: slice `i` of a rank goes to the `i // slices`-th rank of its group."""
    result = output.copy()
    groups = [list(range(operand.shape[0]))] if groups is None else groups
    for group in groups:
        slices = input_offsets.shape[1] // len(group)
        for me, source in enumerate(group):
            for i in range(input_offsets.shape[1]):
                dest, j = group[i // slices], me * slices + i % slices
                size, at, to = (int(a[source, i]) for a in (send_sizes, input_offsets, output_offsets))
                assert recv_sizes[dest, j] == size, "send_sizes and recv_sizes disagree"
                first, end = max(0, -at, -to), min(size, operand.shape[1] - at, output.shape[1] - to)
                if first < end:  # rows outside of either are left out
                    result[dest, to + first : to + end] = operand[source, at + first : at + end]
    return result
