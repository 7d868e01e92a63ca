"""The backend in plain JAX: the meaning of every operation, on any platform, from existing `lax` collectives."""

from xen_moe_jax.backends.reference.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax.backends.reference.combine import combine
from xen_moe_jax.backends.reference.dispatch import dispatch, redispatch
from xen_moe_jax.backends.reference.start_done import (
    START_RETURNS_RESULTS,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
    redispatch_done,
    redispatch_start,
)

TAKES_NODES = True

__all__ = [
    "START_RETURNS_RESULTS",
    "TAKES_NODES",
    "all_to_all",
    "combine",
    "combine_done",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "ragged_all_to_all",
    "redispatch",
    "redispatch_done",
    "redispatch_start",
]
