"""Start and done halves as two FFI calls: see "In two halves" in docs/design/cuda.md.

A start is the whole operation, on a stream of the library's own and on few SMs (of few tokens between nodes, none while
rows are on their way), and returns at once; its results are
under way, and nobody but the done half reads them. That has them aliased through, and makes XLA's stream wait for the
operation. It takes the operands of the start too, so that XLA leaves their memory alone as long.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.availability import BackendUnavailable
from xen_moe_jax.backends.cuda import module
from xen_moe_jax.backends.cuda.combine import combine
from xen_moe_jax.backends.cuda.dispatch import dispatch, redispatch

START_RETURNS_RESULTS = True
HELD = 2
"""Arrays of no meaning behind the results of a dispatch, and then `x`."""


def supports_async(spec: Spec, config: KernelConfig) -> bool:
    """Wherever the kernels run."""
    try:
        module.compiled()
    except BackendUnavailable:
        return False
    return spec.num_tokens > 0


def dispatch_start(x: jax.Array, *operands: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
    """Results of the dispatch, under way, two held arrays, `x`."""
    return (*dispatch(*_apart(x, *operands), flight=True, **params), x)


def dispatch_done(*operands: jax.Array, spec: Spec, **_: Any) -> tuple[jax.Array, ...]:
    """The operands of the start and what it returned -> the results of the dispatch."""
    results = 7 if spec.layout == "ranked" else 6
    first = len(operands) - results - HELD - 1
    return tuple(_wait(operands[first : first + results], operands[:first]))


def combine_start(y: jax.Array, *operands: jax.Array, **params: Any) -> tuple[jax.Array, jax.Array]:
    """`out`, under way, and `y`."""
    return combine(*_apart(y, *operands), flight=True, **params), y


def combine_done(*operands: jax.Array, **_: Any) -> jax.Array:
    *alive, out, _y = operands
    return _wait([out], alive)[0]


def redispatch_start(*operands: jax.Array, **params: Any) -> jax.Array:
    return redispatch(*_apart(*operands), flight=True, **params)


def redispatch_done(*operands: jax.Array, **_: Any) -> jax.Array:
    *alive, rows = operands
    return _wait([rows], alive)[0]


def _apart(*operands: jax.Array) -> list[jax.Array]:
    """The same arrays: XLA fuses a slice with the call that it feeds, and the fusion forgets what the call aliases."""
    return list(lax.optimization_barrier(operands))


def _wait(results: Any, alive: Any) -> list[jax.Array]:
    """`results` when they have arrived. Empty ones have nothing to wait for."""
    real = [i for i, array in enumerate(results) if array.size]
    function = jax.ffi.ffi_call(
        "xen_moe_done",
        [jax.ShapeDtypeStruct(results[i].shape, results[i].dtype) for i in real],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(real))},
    )
    done = list(results)
    arrived = function(*(results[i] for i in real), *_apart(*alive))
    for i, array in zip(real, _apart(*arrived), strict=True):
        done[i] = array
    return done
