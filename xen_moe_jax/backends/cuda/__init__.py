"""The CUDA backend: kernels that store rows straight over NVLink.

Calls go to `xen_moe_jax._cuda` (`cuda_kernels/` and `ffi/`, compiled) through XLA's FFI: no host synchronisation,
capturable in CUDA graphs. See docs/design/cuda.md.
"""

from typing import Any

from xen_moe_jax.backends.base import Backend
from xen_moe_jax.backends.cuda import collectives, combine, dispatch, gather, gather_matmul, memory, module, start_done

MOVES = ("move_weights", "move_weights_start", "move_weights_done", "reduce_gradients")
"""Operations that the kernels run for some weights and ranks alone (`collectives.moves`)."""


def _runs(operation: str, avals: Any, static: Any) -> bool:
    """Returns whether the kernels run this operation on operands of shapes and dtypes `avals`; `static` is its `Call`,
    `Move` or `Exchange`. A start and its done get the same weights first, so that they agree."""
    if operation == "combine_at_home":
        return combine.combines_at_home(static, avals[0])
    return operation not in MOVES or collectives.moves(static, avals[0])


BACKEND = Backend(
    name="cuda",
    dispatch=dispatch.dispatch,
    combine=combine.combine,
    redispatch=dispatch.redispatch,
    all_to_all=collectives.all_to_all,
    ragged_all_to_all=collectives.ragged_all_to_all,
    combine_at_home=combine.combine_at_home,
    move_weights=collectives.move_weights,
    reduce_gradients=collectives.reduce_gradients,
    all_gather=collectives.all_gather,
    all_gather_matmul=gather_matmul.all_gather_matmul,
    gather_words=gather.gather_words,
    runs=_runs,
    check_available=module.compiled,
    register=module.registered,
    takes_active=True,
    takes_nodes=True,
    supports_async=start_done.supports_async,
    dispatch_start=start_done.dispatch_start,
    dispatch_done=start_done.dispatch_done,
    combine_start=start_done.combine_start,
    combine_done=start_done.combine_done,
    move_weights_start=start_done.move_weights_start,
    move_weights_done=start_done.combine_done,
    open_buffer=memory.open_buffer,
    buffer_size_hint=memory.buffer_size_hint,
    ranks_per_node=memory.ranks_per_node,
    failure=memory.failure,
)
