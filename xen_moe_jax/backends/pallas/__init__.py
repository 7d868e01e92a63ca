"""The TPU backend: Pallas kernels that move rows with remote DMA over ICI, whole and in halves."""

from xen_moe_jax.backends.pallas.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax.backends.pallas.combine import combine
from xen_moe_jax.backends.pallas.dispatch import dispatch, redispatch
from xen_moe_jax.backends.pallas.halves import (
    brought_by_xla,
    can_split,
    combine_done,
    combine_in_flight,
    combine_start,
    dispatch_done,
    dispatch_in_flight,
    dispatch_start,
    operand_avals,
)
from xen_moe_jax.backends.pallas.weights import weights_from_rows, weights_to_rows

__all__ = [
    "all_to_all",
    "brought_by_xla",
    "can_split",
    "combine",
    "combine_done",
    "combine_in_flight",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_in_flight",
    "dispatch_start",
    "operand_avals",
    "ragged_all_to_all",
    "redispatch",
    "weights_from_rows",
    "weights_to_rows",
]
