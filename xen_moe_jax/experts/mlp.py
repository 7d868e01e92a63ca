"""Experts on the rows that a rank received, in either layout, and the shared expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax._quantized_weight import widened
from xen_moe_jax._types import experts_of_rows
from xen_moe_jax.experts import float8, grouped_matmul, hopper, hopper_float8, on_tpu, quantized
from xen_moe_jax.experts.function import ExpertFunction

Weights = dict[str, Any]
Experts = Callable[..., jax.Array]
"""`(rows, group_sizes, weights) -> rows`: see `ExpertFunction.experts`. The library's own take `row_weights` too,
float32, one for each row, where `apply_weights_to` is "activation" (factors in front of the last matmul) or "input"."""


def built_in(config: ExpertFunction) -> Experts:
    """Returns the library's experts, or the caller's with a check of the rows that they return."""
    own = functools.partial(grouped_experts if config.layout == "grouped" else padded_experts, config)
    experts = own if config.experts is None else functools.partial(_experts_of_the_caller, config.experts)
    if config.apply_weights_to != "input":
        return experts

    def on_weighted_rows(
        rows: jax.Array, group_sizes: jax.Array, weights: Weights, row_weights: jax.Array
    ) -> jax.Array:
        return experts(weighted(rows, row_weights), group_sizes, weights)

    return on_weighted_rows


def _experts_of_the_caller(
    experts: Callable[..., Any], rows: jax.Array, group_sizes: jax.Array, weights: Weights
) -> jax.Array:
    """Raises TypeError or ValueError where the callable does not return a row for every row."""
    given = f"experts={grouped_matmul.name_of(experts)}"
    return grouped_matmul.checked(
        experts(rows, group_sizes, weights), rows.shape, given, "a row of H for each of `rows`"
    )


@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    """Cumulative distribution function of the standard normal distribution. It has a derivative rule of its own: JAX
    0.12.0.1 cannot differentiate `erfc` in float32 inside a `shard_map` that checks over which axes values vary (its
    `polynomial` asks that of constants).
    """
    return 0.5 * jax.lax.erfc(-x * np.sqrt(0.5).astype(x.dtype))


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    return _normal_cdf(x), tangent * jnp.exp(-0.5 * x * x) * np.sqrt(0.5 / np.pi).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu(x, approximate=False)`."""
    return x * _normal_cdf(x)


def activate(config: ExpertFunction, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """Returns an expert's activation between its matmuls, element by element, in the shape and dtype of `up`; `gate` is
    None for experts without one."""
    if gate is None:
        return _gelu(up) if config.activation == "gelu" else jnp.square(jax.nn.relu(up))
    if config.activation == "swiglu":
        return jax.nn.silu(gate) * up
    if config.activation == "geglu":
        return _gelu(gate) * up
    gate = jnp.minimum(gate, config.activation_limit)
    up = jnp.clip(up, -config.activation_limit, config.activation_limit)
    return gate * jax.nn.sigmoid(config.activation_alpha * gate) * (up + 1)


def activated(
    config: ExpertFunction, projections: Sequence[jax.Array], row_weights: jax.Array | None = None
) -> jax.Array:
    """Returns the activation of the projections, `gate` and `up` or `up` alone, times `row_weights` if given. For the
    backward pass no array of their size is kept besides the projections."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(*projections: jax.Array) -> jax.Array:
        *gate, up = projections
        return activate(config, gate[0] if gate else None, up)

    return weighted(product(*projections), row_weights)


def projection_names(config: ExpertFunction) -> tuple[str, ...]:
    """Returns the names of the projections."""
    return ("gate", "up") if config.gated else ("up",)


def weighted(rows: jax.Array, row_weights: jax.Array | None) -> jax.Array:
    """Returns each of `rows [..., H]` times its factor of float32 `row_weights [...]`, computed in float32 and rounded
    once to the rows' dtype; the rows themselves if there are no factors."""
    if row_weights is None:
        return rows

    @functools.partial(jax.checkpoint, prevent_cse=False)  # or the rows would be kept in float32
    def product(rows: jax.Array, row_weights: jax.Array) -> jax.Array:
        return (rows.astype(jnp.float32) * row_weights[..., None]).astype(rows.dtype)

    return product(rows, row_weights)


def grouped_experts(
    config: ExpertFunction, x: jax.Array, group_sizes: jax.Array, weights: Weights, row_weights: jax.Array | None = None
) -> jax.Array:
    """Returns the experts' outputs `[C, H]` for rows `x [C, H]` sorted by expert, in their dtype.

    Rows past the last group come out unspecified; `combine` does not read them, and no gradient here does.

    Args:
      x: floating point, or `ArrivedRows` for experts in fp8 or int8.
      group_sizes: int32 `[L]`.
      weights: `gate` and `up [L, H, F]`, `down [L, F, H]` by name, and biases where the function has biases.
      row_weights: float32 `[C]`, factors in front of the last matmul, or None.

    Raises:
      ValueError: the experts' grouped matmul does not take such operands.
    """
    if row_weights is None and by_float8_kernels(config, x, weights):
        operands = float8_operands(config, x, group_sizes, weights)
        return hopper_float8.experts(in_kernels(config), *operands)[: x.shape[0], : x.shape[1]]
    inner = inner_rows(config, x, group_sizes, weights, row_weights)
    return outer_rows(config, inner, group_sizes, weights, row_weights)


def by_float8_kernels(config: ExpertFunction, x: Any, weights: Weights) -> bool:
    """Returns True if kernels compute whole experts in fp8, which store no activation in 16 bits between the matmuls.

    Raises:
      ValueError: `grouped_matmul` asks for the kernels, and they cannot multiply such operands.
    """
    if config.experts is not None or config.expert_bias:
        return False
    names = (*projection_names(config), "down")
    return all(float8.by_kernels(config.grouped_matmul, x, weights[name]) for name in names)


def float8_operands(config: ExpertFunction, x: Any, group_sizes: jax.Array, weights: Weights) -> tuple[Any, ...]:
    """Returns the operands that `hopper_float8.experts` takes after the activation, in sizes that the kernels take."""
    rows, arrived, first, last, sizes = float8.vary_all(
        (*float8.parts_of(x), [weights[name] for name in projection_names(config)], weights["down"], group_sizes)
    )
    whole = hopper_float8.whole
    return whole(rows, 0, 1), arrived, tuple(whole(w, 1, 2) for w in first), whole(last, 1, 2), sizes


def inner_rows(
    config: ExpertFunction, x: jax.Array, group_sizes: jax.Array, weights: Weights, row_weights: jax.Array | None = None
) -> jax.Array:
    """Returns the first half of `grouped_experts`, `[C, F]`: the activation of the rows' projections, times
    `row_weights` if given."""
    names = projection_names(config)
    biases = _Biases(config, x, group_sizes, weights)
    given = [weights[name] for name in names]
    if quantized.by_kernel(config.grouped_matmul, x, given):
        products = quantized.grouped_matmuls(x, given, group_sizes)
        projections = [biases.add(product, name) for product, name in zip(products, names, strict=True)]
        return activated(config, projections, biases.used_weights(row_weights))
    weights = _wide(config, weights, ("gate", "up"), x.dtype)
    if all(grouped_matmul.by_hopper(config.grouped_matmul, x, weights[name]) for name in names):
        both, added = weights_and_biases(config, weights)
        return hopper.activated(x, both, group_sizes, added, row_weights, activation=in_kernels(config))
    if all(grouped_matmul.by_pallas(config.grouped_matmul, x, weights[name]) for name in names):
        both, added = weights_and_biases(config, weights)
        if added is None:
            return weighted(on_tpu.activated(x, both, group_sizes, in_kernels(config)), row_weights)
        products = list(on_tpu.products(x, both, group_sizes))
    else:
        matmul = grouped_matmul.choose(config.grouped_matmul)
        products = [matmul(x, weights[name], group_sizes) for name in names]
    projections = [biases.add(product, name) for name, product in zip(names, products, strict=True)]
    return activated(config, projections, biases.used_weights(row_weights))


def weights_and_biases(
    config: ExpertFunction, weights: Weights
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...] | None]:
    """Returns the weights of the projections, and their biases or None."""
    names = projection_names(config)
    return (
        tuple(weights[name] for name in names),
        tuple(weights[f"{name}_bias"] for name in names) if config.expert_bias else None,
    )


def in_kernels(config: ExpertFunction) -> hopper.Activation:
    """Returns the experts' activation in the form in which the kernels take it."""
    return hopper.Activation(config.activation, config.activation_limit, config.activation_alpha)


def inner_rows_and_projections(
    config: ExpertFunction, x: jax.Array, group_sizes: jax.Array, weights: Weights
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns `inner_rows` by the Hopper kernels, and the projections `[C, F]`, which `projections_again` takes."""
    both, biases = weights_and_biases(config, weights)
    return hopper.activated_and_projections(x, both, group_sizes, biases, activation=in_kernels(config))


def projections_again(
    config: ExpertFunction, x: jax.Array, group_sizes: jax.Array, weights: Weights, projections: list[jax.Array]
) -> list[jax.Array]:
    """Returns `projections`, `[C, F]` each, which `inner_rows_and_projections` has returned for the same operands. The
    results have derivatives by `x` and by the weights and biases of the projections."""
    both, biases = weights_and_biases(config, weights)
    return hopper.projected_again(x, both, group_sizes, biases, projections, activation=in_kernels(config))


def behind_activation(
    activation: hopper.Activation, by_weighted: jax.Array, projections: Sequence[jax.Array], row_weights: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Computes the part of a backward pass that lies between its matmuls.

    Args:
      activation: from `in_kernels`.
      by_weighted: `[C, F]`, the gradient of the weighted activation.
      projections: `[C, F]` each, in the dtype of the rows.
      row_weights: float32 `[C]`.

    Returns:
      The gradients of the projections and the weighted activation, `[C, F]` each in the dtype of the projections, and
      the gradient of `row_weights`.
    """
    inner = hopper.from_projections(activation, projections)
    out, of_weighted = jax.vjp(weighted, inner, row_weights)
    by_inner, by_row_weights = of_weighted(by_weighted)
    wide = (a.astype(jnp.float32) for a in (by_inner, *projections))
    by_projections = [a.astype(inner.dtype) for a in activation.gradients(*wide)]
    return by_projections, out, by_row_weights


def outer_rows(
    config: ExpertFunction,
    inner: jax.Array,
    group_sizes: jax.Array,
    weights: Weights,
    row_weights: jax.Array | None = None,
) -> jax.Array:
    """Returns the second half of `grouped_experts`, `[C, H]`: `inner [C, F]` times `down`, plus its bias times
    `row_weights` if given."""
    biases = _Biases(config, inner, group_sizes, weights)
    if quantized.by_kernel(config.grouped_matmul, inner, [weights["down"]]):
        (out,) = quantized.grouped_matmuls(inner, [weights["down"]], group_sizes)
        return biases.add(out, "down", biases.used_weights(row_weights))
    weights = _wide(config, weights, ("down",), inner.dtype)
    if config.expert_bias and grouped_matmul.by_hopper(config.grouped_matmul, inner, weights["down"]):
        bias = weights["down_bias"]
        return hopper.grouped_matmul(inner, weights["down"], group_sizes, bias=bias, row_weights=row_weights)
    out = grouped_matmul.choose(config.grouped_matmul)(inner, weights["down"], group_sizes)
    return biases.add(out, "down", biases.used_weights(row_weights))


def _wide(config: ExpertFunction, weights: Weights, names: tuple[str, ...], dtype: Any) -> Weights:
    """Returns all weights; each `QuantizedWeight` that has one of `names` is widened to `dtype`, unless the grouped
    matmul is a function of the caller's, which gets it as it is."""
    if callable(config.grouped_matmul):
        return weights
    return weights | {name: widened(weights[name], dtype) for name in names if name in weights}


class _Biases:
    """Biases of grouped rows: each row gets the bias of its expert."""

    def __init__(self, config: ExpertFunction, rows: jax.Array, group_sizes: jax.Array, weights: Weights) -> None:
        self.given = config.expert_bias
        if self.given:
            ids = experts_of_rows(group_sizes, rows.shape[0])[:, None]
            experts = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)[None, :]
            self.weights = weights
            # A matmul selects the biases, not a gather: its transpose adds up in float32, without scattered additions.
            # The weights may be those of one half of the experts, with its biases alone.
            given = next(bias for name, bias in weights.items() if name.endswith("_bias"))
            dtype = given.dtype  # the dtype of the rows, but for rows that arrive quantized
            self.one_hot, self.used = (ids == experts).astype(dtype), ids < experts.shape[1]

    def used_weights(self, row_weights: jax.Array | None) -> jax.Array | None:
        """Returns `row_weights`; where there are biases, with zeros past the last group. Values there may be NaN, which
        the bias' gradient of zero would not silence."""
        return row_weights if row_weights is None or not self.given else jnp.where(self.used[:, 0], row_weights, 0)

    def add(self, out: jax.Array, name: str, factors: jax.Array | None = None) -> jax.Array:
        """Returns `out [C, B]` plus the biases of the weight `name`, times `factors [C]` if given. No array `[C, B]` is
        kept for the backward pass."""
        if not self.given:
            return out

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def added(out: jax.Array, bias: jax.Array) -> jax.Array:
            bias = jnp.dot(self.one_hot, bias, preferred_element_type=jnp.float32)
            bias = weighted(bias, factors).astype(out.dtype)
            # The mask keeps the unspecified rows past the last group out of the bias' gradient.
            return out + jnp.where(self.used, bias, jnp.zeros((), out.dtype))

        return added(out, self.weights[f"{name}_bias"])


def padded_experts(
    config: ExpertFunction, x: jax.Array, num_rows: jax.Array, weights: Weights, row_weights: jax.Array | None = None
) -> jax.Array:
    """Returns the experts' outputs `[L, M, H]` for rows `x [L, M, H]`: expert `l` uses its first `num_rows[l]` rows.

    Args:
      num_rows: int32 `[L]`.
      weights: as in `grouped_experts`.
      row_weights: float32 `[L, M]`, factors in front of the last matmul, or None.
    """
    used = jnp.arange(x.shape[1])[None, :] < num_rows[:, None]
    # Unused rows are unspecified and may be NaN, which a zero gradient would not silence in the weights' gradient.
    x = jnp.where(used[..., None], x, 0)
    if row_weights is not None:
        row_weights = jnp.where(used, row_weights, 0)

    everywhere = jax.P(None, None, None) if jax.sharding.get_abstract_mesh().explicit_axes else None

    def project(rows: jax.Array, name: str, factors: jax.Array | None = None) -> jax.Array:
        out = jnp.einsum("lma,lab->lmb", rows, widened(weights[name], rows.dtype), out_sharding=everywhere)
        if not config.expert_bias:
            return out
        bias = weights[f"{name}_bias"][:, None, :]
        return out + (bias if factors is None else weighted(bias, factors))

    inner = activated(config, [project(x, name) for name in projection_names(config)], row_weights)
    return project(inner, "down", row_weights)


def shared_expert(config: ExpertFunction, x: jax.Array, weights: Weights, share: jax.Array | None = None) -> jax.Array:
    """Returns the output `[T, H]` of the expert that every token of `x [T, H]` uses. It has no bias.

    Args:
      share: float32 `[T]`, a factor of each token's output: `shared_share`. None is 1.
    """

    def project(rows: jax.Array, name: str) -> jax.Array:
        return rows @ widened(weights[f"shared_{name}"], rows.dtype)

    return weighted(project(activated(config, [project(x, name) for name in projection_names(config)]), "down"), share)
