"""The CUDA backend: kernels that store rows straight over NVLink.

Calls go to `xen_moe_jax._cuda` (`cuda_kernels/` and `ffi/`, compiled) through XLA's FFI: no host synchronisation,
capturable in CUDA graphs. See docs/design/cuda.md.
"""

from xen_moe_jax.backends.cuda.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax.backends.cuda.combine import combine
from xen_moe_jax.backends.cuda.dispatch import dispatch, redispatch
from xen_moe_jax.backends.cuda.memory import buffer_size_hint, failure, open_buffer, ranks_per_node
from xen_moe_jax.backends.cuda.module import compiled, registered
from xen_moe_jax.backends.cuda.start_done import (
    START_RETURNS_RESULTS,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
    redispatch_done,
    redispatch_start,
    supports_async,
)

TAKES_ACTIVE = True
TAKES_NODES = True

__all__ = [
    "START_RETURNS_RESULTS",
    "TAKES_ACTIVE",
    "TAKES_NODES",
    "all_to_all",
    "buffer_size_hint",
    "supports_async",
    "check_available",
    "combine",
    "combine_done",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "failure",
    "open_buffer",
    "ranks_per_node",
    "ragged_all_to_all",
    "redispatch",
    "redispatch_done",
    "redispatch_start",
    "register",
]


def check_available() -> None:
    """Raises `BackendUnavailable` when the compiled module is missing."""
    compiled()


def register() -> None:
    """Registers the FFI handlers. Raises `BackendUnavailable` when the compiled module cannot be loaded."""
    registered()
