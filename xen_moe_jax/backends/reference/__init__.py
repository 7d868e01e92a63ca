"""The backend in plain JAX: the meaning of every operation, on any platform, from existing `lax` collectives."""

from xen_moe_jax.backends.base import Backend
from xen_moe_jax.backends.reference import collectives, combine, dispatch, start_done

BACKEND = Backend(
    name="reference",
    dispatch=dispatch.dispatch,
    combine=combine.combine,
    redispatch=dispatch.redispatch,
    all_to_all=collectives.all_to_all,
    ragged_all_to_all=collectives.ragged_all_to_all,
    takes_nodes=True,
    dispatch_start=start_done.dispatch_start,
    dispatch_done=start_done.dispatch_done,
    combine_start=start_done.combine_start,
    combine_done=start_done.combine_done,
)
