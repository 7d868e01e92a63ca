"""The TPU backend: Pallas kernels that move rows by remote DMA over ICI, synchronously and as start and done."""

from xen_moe_jax._quantize import QMAX
from xen_moe_jax.backends.base import Backend
from xen_moe_jax.backends.pallas import collectives, combine, dispatch, start_done, weights

BACKEND = Backend(
    name="pallas",
    in_32_bits=True,
    wires=tuple(QMAX),
    dispatch=dispatch.dispatch,
    combine=combine.combine,
    redispatch=dispatch.redispatch,
    all_to_all=collectives.all_to_all,
    ragged_all_to_all=collectives.ragged_all_to_all,
    weights_to_rows=weights.weights_to_rows,
    weights_from_rows=weights.weights_from_rows,
    supports_async=start_done.supports_async,
    dispatch_start=start_done.dispatch_start,
    dispatch_done=start_done.dispatch_done,
    combine_start=start_done.combine_start,
    combine_done=start_done.combine_done,
    dispatch_pending=start_done.dispatch_pending,
    combine_pending=start_done.combine_pending,
    received_by_xla=start_done.received_by_xla,
    operand_avals=start_done.operand_avals,
)
