"""Operands of `ragged_all_to_all`."""

from __future__ import annotations

import numpy as np


def in_pieces(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes):
    """Returns the operands of the same exchange with every segment cut into three, one of them empty: arrays of `[R, 3
    * R]`."""

    def cut(offsets, sizes):
        bounds = np.stack([0 * sizes, sizes // 2, sizes // 2, sizes], axis=-1)
        starts, lengths = offsets[..., None] + bounds[..., :-1], np.diff(bounds, axis=-1)
        return [a.reshape(len(sizes), -1).astype(np.int32) for a in (starts, lengths)]

    (sent, sizes), (landing, _), (_, received) = (
        cut(input_offsets, send_sizes), cut(output_offsets, send_sizes), cut(output_offsets, recv_sizes)
    )  # fmt: skip
    return operand, output, sent, sizes, landing, received


def ragged_operands(rng, ranks: int, kind: str, trailing: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """Returns operands of all ranks with gaps between segments, some empty, in a shuffled order at the receiver."""
    sizes = np.zeros((ranks, ranks), np.int32)  # [source, destination]
    if kind == "random":
        sizes = rng.integers(0, 4, (ranks, ranks)).astype(np.int32) * (rng.random((ranks, ranks)) < 0.7)
        sizes = sizes.astype(np.int32)
    elif kind == "one_pair":
        sizes[0, ranks - 1] = 5
    gap = rng.integers(0, 2, (ranks, ranks)).astype(np.int32)
    input_offsets = (np.cumsum(sizes + gap, axis=1) - sizes).astype(np.int32)
    output_offsets = np.zeros((ranks, ranks), np.int32)
    for dest in range(ranks):
        at = 0
        for source in rng.permutation(ranks):
            output_offsets[source, dest] = at
            at += sizes[source, dest] + gap[dest, source]
    rows = 5 * ranks + 1
    operand = rng.integers(-100, 100, (ranks, rows, *trailing)).astype(dtype)
    output = rng.integers(-100, 100, (ranks, rows + 3, *trailing)).astype(dtype)
    return operand, output, input_offsets, sizes, output_offsets, np.ascontiguousarray(sizes.T)
