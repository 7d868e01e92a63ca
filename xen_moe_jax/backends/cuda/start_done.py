"""Start and done of an operation as two FFI calls: see "Start and done" in docs/design/cuda.md.

A start launches the whole operation on a stream of the library's own and on few SMs (with few tokens between nodes, on
none while rows travel), and returns at once. Its results are pending, and only the done may read them. The done passes
the results through, aliased, and makes XLA's stream wait for the operation. It takes the operands of the start too, so
that XLA does not reuse their memory before the operation has ended.
"""

from __future__ import annotations

from typing import Any

import jax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import BackendUnavailable, Call, Move
from xen_moe_jax.backends.cuda import module
from xen_moe_jax.backends.cuda.call import apart
from xen_moe_jax.backends.cuda.collectives import move_weights
from xen_moe_jax.backends.cuda.combine import combine
from xen_moe_jax.backends.cuda.dispatch import dispatch


def supports_async(spec: Spec, config: KernelConfig) -> bool:
    """Returns True wherever the kernels run, unless there are no tokens."""
    del config
    try:
        module.compiled()
    except BackendUnavailable:
        return False
    return spec.num_tokens > 0


def dispatch_start(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Takes the operands of a dispatch; returns its results, pending."""
    return dispatch(call, *apart(*operands), start=True)


def dispatch_done(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Takes the operands and the results of the start; returns the results of the dispatch."""
    first = len(operands) - (7 if call.spec.layout == "ranked" else 6)
    return tuple(_wait(operands[first:], operands[:first]))


def combine_start(call: Call, *operands: jax.Array) -> jax.Array:
    """Takes the operands of a combine; returns its result, pending."""
    return combine(call, *apart(*operands), start=True)


def move_weights_start(move: Move, weights: jax.Array, source: jax.Array, active: jax.Array) -> jax.Array:
    """Takes the operands of `move_weights`; returns its result `[S_new, ...]`, pending."""
    weights, source, active = apart(weights, source, active)
    return move_weights(move, weights, source, active, start=True)


def combine_done(_: Call | Move, *operands: jax.Array) -> jax.Array:
    """Takes the operands and the one result of the start of a combine, or of `move_weights`; returns this result."""
    *alive, out = operands
    return _wait([out], alive)[0]


def _wait(results: Any, alive: Any) -> list[jax.Array]:
    """Returns the pending `results` after they have arrived. XLA keeps the memory of the arrays `alive` until then.
    Empty results have nothing to wait for."""
    real = [i for i, array in enumerate(results) if array.size]
    function = jax.ffi.ffi_call(
        "xen_moe_done",
        [jax.ShapeDtypeStruct(results[i].shape, results[i].dtype) for i in real],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(real))},
    )
    done = list(results)
    arrived = function(*(results[i] for i in real), *apart(*alive))
    for i, array in zip(real, apart(*arrived), strict=True):
        done[i] = array
    return done
