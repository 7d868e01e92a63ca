"""Experts by the Hopper kernels and the combine behind them, with a backward pass of their own.

In it the gradients of the tokens are on their way home while the gradients of the weights are computed, which do not
depend on them. Both compute what JAX derives from the operations one by one, in another order.

    cotangents by rows -> of the projections -> of the rows -> combine_start -> weights' gradients -> combine_done

The dispatch in front of it gets tokens without a gradient, since theirs comes from here; the router weights keep it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

import xen_moe_jax as xm
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, vary_alike
from xen_moe_jax.flax import grouped_matmul, hopper
from xen_moe_jax.flax._config import MoEConfig

Weights = dict[str, Any]


def applies(config: MoEConfig, x: jax.Array, weights: Weights) -> bool:
    """Whether a layer's experts are of the kind that this is written for."""
    return (
        config.experts is None
        and config.layout == "grouped"
        and config.apply_weights_to == "activation"
        and config.activation == "swiglu"
        and not config.expert_bias
        and grouped_matmul.by_hopper(config.grouped_matmul, x, weights["up"])
    )


def back(config: MoEConfig) -> dict[str, Any]:
    """Options of a layer's combine."""
    return {
        "weighted": config.apply_weights_to == "rows",
        "wire": config.combine_wire,
        "config": config.kernel,
    }


def through_experts(config: MoEConfig, x: jax.Array, routed: xm.Routed, weights: Weights) -> jax.Array:
    """`[T, H]` from the rows that a dispatch of `x` brought, whose gradient goes to `x`.

    Args:
      x: this rank's tokens.
      routed: of their dispatch, without a gradient for the tokens.
      weights: `gate`, `up [L, H, F]`, `down [L, F, H]`.
    """
    parts = [weights[name] for name in ("gate", "up", "down")]
    x, rows, factors, *parts = vary_alike(x, routed.x, routed.weights, *parts)
    return _through(config, x, rows, factors, *parts, routed.group_sizes, routed.handle)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through(
    config: MoEConfig, x: Any, rows: Any, factors: Any, gate: Any, up: Any, down: Any, sizes: Any, handle: Any
) -> jax.Array:
    del x
    hidden = hopper.swiglu(rows, gate, up, sizes, factors)
    return xm.combine(hopper.grouped_matmul(hidden, down, sizes), handle, **back(config))


def _forward(
    config: MoEConfig, x: Any, rows: Any, factors: Any, gate: Any, up: Any, down: Any, sizes: Any, handle: Any
) -> tuple[jax.Array, Any]:
    del x
    hidden, projections = hopper.swiglu_with_projections(rows, gate, up, sizes, factors)
    out = xm.combine(hopper.grouped_matmul(hidden, down, sizes), handle, **back(config))
    return out, (rows, factors, gate, up, down, sizes, handle, hidden, projections)


def _backward(config: MoEConfig, kept: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    rows, factors, gate, up, down, sizes, handle, hidden, projections = kept
    axes = varying_axes(rows)
    # past the last group these rows are what was there before: no kernel reads them
    by_out = xm.redispatch(cotangent, handle, config=config.kernel)
    by_hidden = vary(hopper.by_rows(by_out, down, sizes), axes)
    by_projections, by_factors = hopper.through_swiglu(projections, factors, by_hidden)
    by_rows = vary(hopper.by_rows(by_projections[0], gate, sizes, (by_projections[1], up)), axes)

    def of_weights(rows: Any, hidden: Any, by_gate: Any, by_up: Any, by_out: Any) -> list[jax.Array]:
        pairs = ((rows, by_gate), (rows, by_up), (hidden, by_out))
        return [vary(hopper.by_weights(one, other, sizes), axes) for one, other in pairs]

    flight = xm.combine_start(by_rows, handle, weighted=False, config=config.kernel)
    flight, gradients = xm.overlap(flight, of_weights, rows, hidden, *by_projections, by_out)
    by_x = xm.combine_done(flight)
    return by_x, None, by_factors, *gradients, None, None


_through.defvjp(_forward, _backward)
