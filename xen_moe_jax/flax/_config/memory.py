"""Fields of `MoEConfig` about memory: the size of the row buffers, and which arrays the backward pass keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from xen_moe_jax._spec import DROPS
from xen_moe_jax.flax._config.checks import is_int, is_number, require, require_choices, require_positive_ints

LAYER_LAYOUTS = ("grouped", "padded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFields:
    """Memory: the size of the row buffers, and which arrays the backward pass keeps.

    Attributes:
      layout: "grouped" (a grouped matmul; on a TPU for decode too) or "padded" (decode: masked batched matmul).
      capacity: rows per rank in the grouped layout; None with `capacity_factor=None` can never overflow.
      capacity_factor: the same relative to balanced routing: `ceil(capacity_factor * T * K)` rows, `T` tokens a rank,
        and room for the padding of `alignment`.
      drop: the rule that chooses the rows to drop where a rank has more than its capacity: "position", "source" or
        "weight", as in `xm.dispatch`. Each of the `num_chunks` parts chooses by itself.
      alignment: rows of each expert's group are rounded up to a multiple of this (grouped layout).
      num_chunks: a rank's tokens are sent in this many parts, one after the other: buffers shrink by it, and on a
        backend with asynchronous operations a part travels while the experts compute another. A capacity is divided by
        it too.
      remat: the arrays that the backward pass computes again instead of keeping: "none", "experts" (the experts from
        the received rows: nothing is dispatched again), or "all" (each chunk, its dispatch included).
    """

    layout: str = "grouped"
    capacity: int | None = None
    capacity_factor: float | None = None
    drop: str = "position"
    alignment: int = 1
    num_chunks: int = 1
    remat: str = "none"


def check_memory(config: Any) -> None:
    """Raises ValueError for the first of these fields of a `MoEConfig` that is wrong."""
    require(
        config.layout in LAYER_LAYOUTS,
        "layout",
        config.layout,
        f"must be one of {LAYER_LAYOUTS}; for 'ranked' call xm.dispatch and write the experts yourself",
    )
    require_positive_ints(config, "alignment", "num_chunks")
    rows, factor = config.capacity, config.capacity_factor
    require(rows is None or (is_int(rows) and rows >= 0), "capacity", rows, "must be None or an int >= 0")
    require(
        factor is None or (is_number(factor) and factor > 0),
        "capacity_factor",
        factor,
        "must be None or a finite number > 0",
    )
    require(rows is None or factor is None, "capacity", rows, "give capacity or capacity_factor, not both")
    for name, unset in (("capacity", None), ("capacity_factor", None), ("alignment", 1)):
        value = getattr(config, name)
        allowed = value == unset or config.layout == "grouped"
        require(allowed, name, value, f"only layout='grouped' has one; leave it {unset}")
    require_choices(config, "drop", DROPS)
    remedy = "layout='padded' multiplies its batches by XLA; use 'auto'"
    require(config.calls_its_matmul, "grouped_matmul", config.grouped_matmul, remedy)
    allowed = config.drop == "position" or config.layout == "grouped"
    require(allowed, "drop", config.drop, "only layout='grouped' has a capacity; leave it 'position'")
    require_choices(config, "remat", ("none", "experts", "all"))
