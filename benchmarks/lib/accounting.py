"""Bytes that cross the link, counted from a routing: the same bytes for every program that is timed.

A row that leaves its rank costs the bytes of its elements and scales on the wire. Deduplicated counts a
token once per destination rank; duplicated counts it once per slot. A rank's own rows never count.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from xen_moe_jax._quantize import WIRES, Wire
from xen_moe_jax.tuning.workload import Workload, ranks_reached


def wire_row_bytes(hidden: int, wire: str) -> int:
    """Bytes of one row on the wire, scales included."""
    return Wire(wire).row_bytes(hidden) if wire in WIRES else hidden * jnp.dtype(wire).itemsize


@dataclasses.dataclass(frozen=True)
class OffRankRows:
    """Rows that leave (dispatch) or return to (combine) a rank in one call, mean over the routings, of the busiest
    rank.

    The busiest rank has the largest maximum of rows sent and rows received: the link is full duplex.
    """

    deduplicated: float
    duplicated: float


def off_rank_rows(work: Workload, topk_idx: np.ndarray) -> OffRankRows:
    """Counts for `topk_idx [pool, R, T, K]` with every entry in `[0, E)`."""
    own = np.eye(work.ranks, dtype=bool)
    deduplicated = ranks_reached(work, topk_idx).sum(2)  # [pool, source, destination]
    duplicated = np.zeros_like(deduplicated)
    for destination in range(work.ranks):
        duplicated[..., destination] = (topk_idx // work.local_experts == destination).sum((2, 3))

    def busiest(rows: np.ndarray) -> float:
        rows = np.where(own, 0, rows)
        return float(np.maximum(rows.sum(2).max(1), rows.sum(1).max(1)).mean())

    return OffRankRows(busiest(deduplicated), busiest(duplicated))


def off_rank_bytes(work: Workload, rows: float, operation: str) -> float:
    """Bytes of `rows` for operation "dispatch", "redispatch", "combine" or "round trip" (there and back); 0 for
    "none".
    """
    there = rows * wire_row_bytes(work.hidden, work.dispatch_wire)
    back = rows * wire_row_bytes(work.hidden, work.return_wire)
    return {"dispatch": there, "redispatch": there, "combine": back, "round trip": there + back, "none": 0.0}[operation]


def gigabytes_per_second(num_bytes: float, microseconds: float) -> float:
    """1 GB is 1e9 bytes."""
    return num_bytes / microseconds / 1e3
