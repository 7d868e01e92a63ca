"""The TPU backend: the operations of `xen_moe_jax.reference`, by Pallas kernels that move rows with remote DMA over ICI."""

from xen_moe_jax._pallas_backend.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax._pallas_backend.combine import combine
from xen_moe_jax._pallas_backend.dispatch import dispatch, redispatch

__all__ = ["all_to_all", "combine", "dispatch", "ragged_all_to_all", "redispatch"]
