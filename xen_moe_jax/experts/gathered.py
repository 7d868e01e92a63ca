"""The routed MLP of one rank, whose matmuls read the tokens' rows where they lie.

Where an axis has one rank, no row crosses a link, and the rows `[C, H]` that a dispatch would write are those of `x` in
another order. A dispatch of the tokens' numbers alone gives this order, with the groups, the router weights and the
handle of any dispatch. The first matmul gathers its rows from `x`. In the backward pass, the matmul by `down` gathers
rows of the result's cotangent, and the gradients of weights gather rows of `x` or of the cotangent. So neither is ever
copied into the order of the groups.

The value has the bits of `dispatch -> experts -> combine`, since every kernel multiplies the same rows in the same
order. The gradients have the bits of `combined.py`'s gradients, except for the router weights where `down` has a bias:
another matmul sums the part of the bias.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._api import combine
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, vary_alike
from xen_moe_jax._overlap import define_derivative
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax._types import Handle, Routed, experts_of_rows
from xen_moe_jax.experts import grouped_matmul, hopper, mlp
from xen_moe_jax.experts.function import ExpertFunction

NUMBERS = 4
"""Float32 elements of a row that carries a token's number: 16 bytes."""
EVERY_SM = 1024
"""Multiprocessors that an operation asks for to get all of them: a backend takes as many as the GPU has."""
MOST_TOKENS = 2**24 - 1
"""Most tokens of a rank: whole numbers up to this one are exact in float32."""


def takes(function: ExpertFunction, weights: mlp.Weights, x: jax.Array, topk_idx: Any, capacity: Any) -> bool:
    """Returns True if tokens `x [T, H]` of the only rank of an axis can be multiplied where they lie.

    For that, the experts must be the library's own on grouped rows, with weights that are arrays and not quantized, and
    with router weights that the combine applies; and the Hopper kernels must take the operands and be able to gather
    them.
    """
    if capacity == 0 or np.size(topk_idx) == 0:
        return False
    if function.experts is not None or function.layout != "grouped" or function.apply_weights_to != "rows":
        return False
    if any(isinstance(weight, QuantizedWeight) for weight in weights.values()) or not x.shape[0] <= MOST_TOKENS:
        return False
    names = mlp.projection_names(function)
    if not all(grouped_matmul.by_hopper(function.grouped_matmul, x, weights[name]) for name in names):
        return False
    return hopper.gathers(x.shape[1], weights["up"].shape[2])


def alone(config: KernelConfig | None) -> KernelConfig:
    """Returns the configuration of an operation that waits for no other rank, and may therefore take every
    multiprocessor, unless `config` says how many."""
    config = config or KernelConfig()
    return config if config.num_sms else dataclasses.replace(config, num_sms=EVERY_SM)


def numbers(x: jax.Array) -> jax.Array:
    """Returns float32 `[..., 4]` for tokens `x [..., H]`: four copies of each token's number, counted from 1."""
    tokens = x.shape[:-1]
    count = jnp.arange(1, 1 + x.size // x.shape[-1], dtype=jnp.float32).reshape(*tokens, 1)
    return jnp.broadcast_to(count, (*tokens, NUMBERS))


def experts_and_combine(
    function: ExpertFunction, weights: mlp.Weights, x: jax.Array, routed: Routed, config: KernelConfig | None
) -> jax.Array:
    """Returns `[..., H]` in `x.dtype`: the experts' outputs for tokens `x`, weighted and added up for each token.

    Args:
      weights: `gate`, `up` `[L, H, F]`, `down [L, F, H]`, and their biases where the function has biases.
      x: `[..., H]`, bfloat16 or float16, for which `takes` holds.
      routed: the dispatch of `numbers(x)`.
    """
    # Rows of alignment padding hold the number zero, which no token has. Rows past the last group may hold any number.
    # For the number of a token that does not exist, the kernels multiply a row of zeros.
    index = _whole(routed.x[:, 0].astype(jnp.int32)) - 1
    x, index, routed, weights = vary_alike(x, index, routed, weights)
    last = {name: weights.pop(name) for name in list(weights) if name.startswith("down")}
    handle = jax.lax.stop_gradient(routed.handle)
    step = _Step(function, alone(config))
    return _run(step, x, routed.handle.weights, weights, last, index, routed.group_sizes, handle)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Static arguments of `_run`, and the parts of its value."""

    function: ExpertFunction
    config: KernelConfig

    @property
    def activation(self) -> hopper.Activation:
        return mlp.in_kernels(self.function)

    def plans(self, x: Any, up: Any, index: Any) -> tuple[hopper.Plan, hopper.Plan]:
        """Returns tiles for the matmuls in front of the activation, and for the one behind it."""
        groups, width = up.shape[0], up.shape[2]
        hidden, rows = x.shape[1], index.shape[0]
        return hopper.plan(hidden, width, rows, groups), hopper.plan(width, hidden, rows, groups)

    def inner(self, x: Any, first: Any, index: Any, sizes: Any, *, projections: bool) -> tuple[Any, list[Any]]:
        """Returns the activation `[C, F]`, and with `projections` these, `[C, F]` each, else none."""
        both, biases = mlp.weights_and_biases(self.function, first)
        plan, _ = self.plans(x, both[0], index)
        tiles = plan.projections_gathered if self.activation.gated else plan.forward
        out, *rest = hopper.activated_rows(
            x, both, sizes, biases, None, index, activation=self.activation, projections=projections, tiles=tiles
        )
        return _vary(out, x), [_vary(projection, x) for projection in rest]

    def value(self, inner: Any, last: Any, sizes: Any, handle: Handle, row_weights: Any) -> Any:
        """Returns `[..., H]`: `inner [C, F]` times `down`, combined with `row_weights`."""
        y = mlp.outer_rows(self.function, inner, sizes, last)[: row_weights.shape[0]]
        return combine(y, dataclasses.replace(handle, weights=row_weights), weighted=True, config=self.config)


def _whole(rows: jax.Array) -> jax.Array:
    """Appends zeros up to a number of rows that the kernels take, a multiple of 8."""
    extra = -rows.shape[0] % hopper.ROW_ALIGNMENT
    return jnp.pad(rows, [(0, extra)] + [(0, 0)] * (rows.ndim - 1)) if extra else rows


def _rows(x: jax.Array) -> jax.Array:
    """Returns tokens `[..., H]` as `[T, H]`."""
    return x.reshape(-1, x.shape[-1])


def _vary(array: Any, like: Any) -> Any:
    return vary(array, varying_axes(like))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(step: _Step, x: Any, row_weights: Any, first: Any, last: Any, index: Any, sizes: Any, handle: Any) -> Any:
    """Returns `[..., H]` in the dtype of `x`: the experts' outputs, weighted and added up for each token.

    Args:
      x: `[..., H]`, bfloat16 or float16.
      row_weights: float32 `[C]`, router weights of the rows.
      first: weights and biases of the projections by name.
      last: weight and bias of `down` by name.
      index: int32 `[C']`, `C` rounded up to a multiple of 8: the number of each row's token, counted from 0. Any other
        number stands for a row of zeros.
      sizes: int32 `[L]`, rows of each group.
      handle: of the dispatch.
    """
    inner, _ = step.inner(_rows(x), first, index, sizes, projections=False)
    return step.value(inner, last, sizes, handle, row_weights)


def _forward(step: _Step, *operands: Any) -> tuple[Any, Any]:
    x, row_weights, first, last, index, sizes, handle = operands
    inner, projections = step.inner(_rows(x), first, index, sizes, projections=True)
    return step.value(inner, last, sizes, handle, row_weights), (projections, *operands)


def _backward(step: _Step, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    projections, x, row_weights, first, last, index, sizes, handle = kept
    projections, row_weights, cotangent = jax.tree.map(hopper.first_order, (projections, row_weights, cotangent))
    x, cotangent = _rows(x), _rows(cotangent)
    weights, biases = mlp.weights_and_biases(step.function, first)
    plan, plan_of_last = step.plans(x, weights[0], index)
    by_weighted = hopper.rows_by_weights(
        cotangent, last["down"], sizes, index=index, transposed=True, tiles=plan_of_last.rows
    )
    count = row_weights.shape[0]
    row_weights = _whole(row_weights)
    by_projections, weighted, by_row_weights = mlp.behind_activation(
        step.activation, _vary(by_weighted, projections[0]), projections, row_weights
    )
    tiles = plan_of_last.columns_gathered
    by_down = hopper.rows_by_rows(weighted, cotangent, sizes, index, gathered="others", tiles=tiles)
    by_last = {"down": _vary(by_down, x)}
    if biases is not None:
        by_last["down_bias"] = hopper.sum_of_groups(plan_of_last, cotangent, sizes, row_weights, index)
        by_row_weights = by_row_weights + _by_bias(last["down_bias"], sizes, index, cotangent)
    one, *more = zip(by_projections, weights, strict=True)
    by_rows = hopper.rows_by_weights(*one, sizes, more[0] if more else None, transposed=True, tiles=plan.rows)
    by_x = combine(_vary(by_rows, x)[:count], handle, weighted=False, config=step.config)
    by_weights = [_vary(hopper.rows_by_rows(x, by, sizes, index, tiles=plan.weights), x) for by in by_projections]
    by_first = dict(zip(mlp.projection_names(step.function), by_weights, strict=True))
    if biases is not None:
        for name, by in zip(mlp.projection_names(step.function), by_projections, strict=True):
            by_first[f"{name}_bias"] = hopper.sum_of_groups(plan, by, sizes)
    return by_x, by_row_weights[:count], by_first, by_last, None, None, None


def _by_bias(bias: jax.Array, sizes: jax.Array, index: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the part of the gradient of the rows' router weights that comes from the `bias [L, H]`, of which they are
    factors: float32 `[C]`.

    A matmul multiplies every token of `cotangent [T, H]` by every group's bias. Each row takes the product of its token
    and its group; a row without a token, or past the last group, gets zero.
    """
    products = jnp.dot(cotangent, bias.T, preferred_element_type=jnp.float32)
    group = experts_of_rows(sizes, index.shape[0])
    used = (group < bias.shape[0]) & (index >= 0) & (index < cotangent.shape[0])
    at = jnp.where(used, index * bias.shape[0] + group, 0)
    return jnp.where(used, products.reshape(-1)[at], 0)


define_derivative(_run, _forward, _backward)
