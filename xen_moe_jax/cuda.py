"""The CUDA backend: the operations of `xen_moe_jax.reference`, by kernels that store rows straight over NVLink.

Calls go to `xen_moe_jax._cuda` through XLA's FFI: no host synchronisation, capturable in CUDA graphs. See docs/cuda.md.
"""

from xen_moe_jax._cuda_backend.exchange import all_to_all, ragged_all_to_all
from xen_moe_jax._cuda_backend.memory import buffer_size_hint, open_buffer, reset, workspaces
from xen_moe_jax._cuda_backend.module import compiled
from xen_moe_jax._cuda_backend.routing import combine, dispatch, redispatch

__all__ = [
    "all_to_all",
    "buffer_size_hint",
    "check_available",
    "combine",
    "dispatch",
    "open_buffer",
    "ragged_all_to_all",
    "redispatch",
    "reset",
    "workspaces",
]


def check_available() -> None:
    """Raises `BackendUnavailable` when the compiled module is missing."""
    compiled()
