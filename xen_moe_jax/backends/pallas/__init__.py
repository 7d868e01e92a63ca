"""The TPU backend: Pallas kernels that move rows with remote DMA over ICI, whole and in halves."""

from xen_moe_jax.backends.pallas.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax.backends.pallas.combine import combine
from xen_moe_jax.backends.pallas.dispatch import dispatch, redispatch
from xen_moe_jax.backends.pallas.start_done import (
    combine_done,
    combine_pending,
    combine_start,
    dispatch_done,
    dispatch_pending,
    dispatch_start,
    operand_avals,
    received_by_xla,
    supports_async,
)
from xen_moe_jax.backends.pallas.weights import weights_from_rows, weights_to_rows

__all__ = [
    "all_to_all",
    "received_by_xla",
    "supports_async",
    "combine",
    "combine_done",
    "combine_pending",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_pending",
    "dispatch_start",
    "operand_avals",
    "ragged_all_to_all",
    "redispatch",
    "weights_from_rows",
    "weights_to_rows",
]
