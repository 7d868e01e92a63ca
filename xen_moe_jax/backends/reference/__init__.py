"""The backend in plain JAX: the meaning of every operation, on any platform, from existing `lax` collectives."""

from xen_moe_jax.backends.reference.collectives import all_to_all, ragged_all_to_all
from xen_moe_jax.backends.reference.combine import combine
from xen_moe_jax.backends.reference.dispatch import dispatch, redispatch

__all__ = ["all_to_all", "combine", "dispatch", "ragged_all_to_all", "redispatch"]
