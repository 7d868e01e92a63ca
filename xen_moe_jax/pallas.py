"""The TPU backend: the operations of `xen_moe_jax.reference`, by Pallas kernels that move rows with remote DMA over
ICI, and their start and done halves.
"""

from xen_moe_jax._pallas_backend.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax._pallas_backend.combine import combine
from xen_moe_jax._pallas_backend.dispatch import dispatch, redispatch
from xen_moe_jax._pallas_backend.halves import combine_done, combine_start, dispatch_done, dispatch_start

__all__ = [
    "all_to_all",
    "combine",
    "combine_done",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "ragged_all_to_all",
    "redispatch",
]
