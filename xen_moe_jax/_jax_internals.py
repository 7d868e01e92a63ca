"""Everything here that JAX does not promise to keep: the only file that imports `jax._src`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src import dispatch as jax_dispatch
from jax._src import distributed, effects, xla_bridge
from jax._src.ad_checkpoint import name_p
from jax._src.interpreters import batching
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lax import lax
from jax.interpreters import ad, mlir

RAGGED_DOT = lax.ragged_dot_general_p
"""The primitive of `jax.lax.ragged_dot` and of its transposes."""


def without_varying_checks() -> AbstractContextManager[Any]:
    """Inside this context, tracing does not check over which mesh axes values vary."""
    return jax_config._check_vma(False)


def without_varying(aval: Any) -> Any:
    """Returns `aval` as one that varies over no mesh axis."""
    return aval.update(manual_axis_type=type(aval.mat)())


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes that an array varies over."""
    return jax.typeof(x).manual_axis_type.varying


def is_mapped(x: Any) -> bool:
    """Returns True for one entry of a batch, as a function under `jax.vmap` sees it."""
    return isinstance(x, batching.BatchTracer)


def checks_varying(axis: str) -> bool:
    """Returns True under `check_vma=True`: only then does an axis index vary over its axis."""
    index = jax.eval_shape(lambda: jax.lax.axis_index(axis))
    return index.manual_axis_type is not None and axis in index.manual_axis_type.varying


def lower_per_device_order(primitives: Any) -> None:
    """Makes the mesh's devices part of these primitives' programs: no lowering is reused for another device order."""
    jax_dispatch.prim_requires_devices_during_lowering.update(primitives)


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms that an operation is being lowered for: several in a `jax.export` for several."""
    return jax_mlir._platforms_for_eqn(ctx)


def lowers_for_export(ctx: Any) -> bool:
    """Returns whether an operation is being lowered by `jax.export`, for devices that are not known yet."""
    return ctx.module_context.lowering_parameters.for_export


def key_value_client() -> Any:
    """The client of `jax.distributed`'s key-value store; None before `jax.distributed.initialize()`."""
    return distributed.global_state.client


def when_plugins_are_found(call: Callable[[frozenset[str]], None]) -> None:
    """Calls `call` with the names of the platforms that have a plugin, once for each plugin, when JAX has found them:
    now or later. `call` must not ask for devices, and nothing may be raised: JAX holds its lock meanwhile."""
    xla_bridge.register_plugin_callbacks(lambda c_api: call(frozenset(xla_bridge._backend_factories)))


def interpret_effects() -> Any:
    """Effects of Pallas' TPU interpret mode, which orders its callbacks by them; remat allows them from now on."""
    interpret = importlib.import_module("jax._src.pallas.mosaic.interpret.params")
    found = interpret.get_interpret_effects()
    for allowed in (effects.custom_derivatives_allowed_effects, effects.remat_allowed_effects):
        for effect in found:
            allowed.add_type(type(effect))
    return found


# `checkpoint_name` has no transpose rule in JAX 0.11.2: a function with a named result could not go through
# `jax.linear_transpose`. It is the identity; a rule of JAX's own would stay.
ad.primitive_transposes.setdefault(name_p, lambda cotangent, x, *, name: [cotangent])


class OrderedExchange(effects.Effect):
    """Effect of an exchange between processes: XLA runs them in program order, the same in every process."""

    def __str__(self) -> str:
        return "OrderedExchange"


for _allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(OrderedExchange)

ORDERED_EXCHANGE = OrderedExchange()


def emit_ordered_callback(ctx: Any, call: Callable[..., Any], *operands: Any) -> Any:
    """Lowers an operation with the effect `ORDERED_EXCHANGE` to a call of the host; returns the results' values."""
    token = ctx.tokens_in.get(ORDERED_EXCHANGE)
    results, token, _ = mlir.emit_python_callback(
        ctx, call, token, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(jax_mlir.TokenSet({ORDERED_EXCHANGE: token})))
    return results
