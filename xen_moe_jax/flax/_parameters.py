"""Names, shapes, initialisers and shardings of an MoE layer's parameters: the same for both Flax front ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xen_moe_jax._float8_weight import BLOCK, DTYPE, Float8Weight
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax.flax._config import MoEConfig

ROUTER_PARAMETERS = ("router", "logits_bias", "shared_router")
"""Parameters that stay in float32 and on every rank."""
ROUTER_BIAS = "router_bias"
"""float32 `[E]`, moved by `updated_bias` instead of by a gradient; exists with balancing="bias"."""

_experts_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)
_matrix_init = jax.nn.initializers.lecun_normal()
_zeros = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Describes one parameter: `initializer(key, shape, dtype)` makes it.

    Attributes:
      sharding: the mesh axis (or logical name) of each dimension, for the parameter's metadata.
      dims: the meaning of each dimension: "expert", "hidden", "intermediate" or None. It decides with which part a rank
        computes: its experts, and of "intermediate" its part along `tensor_axis`.
    """

    shape: tuple[int, ...]
    dtype: Any
    initializer: Callable[..., jax.Array]
    sharding: tuple[Any, ...]
    dims: tuple[str | None, ...]


def parameter_table(config: MoEConfig, mesh: Any = None) -> dict[str, Parameter]:
    """The parameters of a layer by name.

    An expert dimension that the ranks of `mesh` do not divide is replicated: JAX has no uneven shards.
    """
    expert, hidden, inner = config.expert_sharding or (config.axis_name, None, config.tensor_axis)
    if mesh is not None and expert == config.axis_name:
        ranks = math.prod(mesh.shape[axis] for axis in config.expert_axes)
        expert = expert if config.expert_entries % ranks == 0 else None
    names = {"expert": expert, "hidden": hidden, "intermediate": inner, None: None}
    sizes = {"expert": config.expert_entries, "hidden": config.hidden_size}
    wide = config.shared_features

    def parameter(
        initializer: Callable[..., jax.Array], *dims: str, inner: int = config.intermediate_size
    ) -> Parameter:
        shape = tuple((sizes | {"intermediate": inner})[dim] for dim in dims)
        return Parameter(shape, config.param_dtype, initializer, tuple(names[dim] for dim in dims), dims)

    def router(initializer: Callable[..., jax.Array], *shape: int) -> Parameter:
        # The router is replicated, even if the experts' hidden dimension has a name.
        return Parameter(shape, jnp.float32, initializer, (None,) * len(shape), (None,) * len(shape))

    table = {}
    if config.score != "uniform":
        table["router"] = router(_matrix_init, config.hidden_size, config.num_experts)
    if config.logits_bias:
        table["logits_bias"] = router(_zeros, config.num_experts)
    if config.shared_expert_gate:
        table["shared_router"] = router(_matrix_init, config.hidden_size, 1)
    for name in ("gate", "up") if config.gated else ("up",):
        table[name] = parameter(_experts_init, "expert", "hidden", "intermediate")
        if config.expert_bias:
            table[f"{name}_bias"] = parameter(_zeros, "expert", "intermediate")
        if wide:
            table[f"shared_{name}"] = parameter(_matrix_init, "hidden", "intermediate", inner=wide)
    table["down"] = parameter(_experts_init, "expert", "intermediate", "hidden")
    if config.expert_bias:
        table["down_bias"] = parameter(_zeros, "expert", "hidden")
    if wide:
        table["shared_down"] = parameter(_matrix_init, "intermediate", "hidden", inner=wide)
    return table


def rank_specs(config: MoEConfig) -> dict[str, PartitionSpec]:
    """Specs by which the layer's own `shard_map` splits each parameter, the router bias included."""
    axes: dict[str | None, Any] = {"expert": config.axis_name, "intermediate": config.tensor_axis}
    table = parameter_table(config)
    specs = {name: PartitionSpec(*(axes.get(dim) for dim in p.dims)) for name, p in table.items()}
    return specs | {ROUTER_BIAS: PartitionSpec()}


def weight_specs(weight: Any, spec: PartitionSpec) -> Any:
    """Returns the spec by which a parameter is split, `spec` for an array. For a `QuantizedWeight` or a `Float8Weight`
    the result is one of the same kind that holds the spec of each of its arrays."""
    if not isinstance(weight, QuantizedWeight | Float8Weight):
        return spec
    names = [*spec, *[None] * (weight.ndim - len(spec))]
    if isinstance(weight, Float8Weight):
        turned = PartitionSpec(*names[:-2], *names[:-3:-1])
        return Float8Weight(spec, spec, turned, turned, None if weight.master is None else spec, weight.padding)
    # One scale for a whole dimension is on every rank.
    of_scales = [
        None if axis >= weight.ndim - 2 and weight.scales.shape[axis] == 1 else n for axis, n in enumerate(names)
    ]
    return QuantizedWeight(PartitionSpec(*names), PartitionSpec(*of_scales), weight.block)


def check_blocks(name: str, weight: Any, spec: PartitionSpec, mesh: Any) -> None:
    """Raises ValueError where the ranks of `mesh` cut blocks of a `QuantizedWeight`."""
    if not isinstance(weight, QuantizedWeight):
        return
    names = [*spec, *[None] * (weight.ndim - len(spec))]
    sizes = zip(names[-2:], weight.shape[-2:], weight.scales.shape[-2:], weight.block, strict=True)
    for axes, size, count, block in sizes:
        ranks = math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes or ()))
        if ranks > 1 and count > 1 and size % (ranks * block):
            raise ValueError(
                f"{name} has blocks of {weight.block} with a scale each, which {ranks} ranks of {axes!r} cut in a "
                f"dimension of {size}: load it for this mesh (load_hugging_face(..., mesh=mesh) makes smaller blocks)"
            )


def check_codes(config: MoEConfig, mesh: Any) -> None:
    """Raises ValueError where a layer on `mesh` cannot take codes from `quantized_weights`."""
    if config.expert_dtype != DTYPE:
        raise ValueError(
            f"quantized weights with MoEConfig.expert_dtype={config.expert_dtype!r}: set {DTYPE!r}, or give no codes"
        )
    ranks = mesh.shape.get(config.tensor_axis, 1)
    if ranks > 1 and config.intermediate_size % (ranks * BLOCK):
        raise ValueError(
            f"quantized weights with MoEConfig.intermediate_size={config.intermediate_size}: the {ranks} ranks of "
            f"tensor_axis={config.tensor_axis!r} cut blocks of {BLOCK} with a scale each; use a multiple of "
            f"{ranks * BLOCK}, or give no codes"
        )


def part_of_rank(config: MoEConfig, name: str, parameter: Parameter, weights: Any) -> Any:
    """Returns this rank's part of a parameter (own experts, own features); the rank may hold this part already, or all
    of it. For a `QuantizedWeight` or a `Float8Weight` the result has this rank's part of each array.

    Raises ValueError if the rank holds neither.
    """
    if isinstance(weights, QuantizedWeight):
        values, scales = (
            _part_of_rank(config, name, dataclasses.replace(parameter, shape=shape), leaf)
            for leaf, shape in zip((weights.values, weights.scales), weights.part_shapes(parameter.shape), strict=True)
        )
        return QuantizedWeight(values, scales, weights.block)
    if isinstance(weights, Float8Weight):
        local, *sizes = parameter.shape
        blocks = [-(-size // BLOCK) for size in sizes]  # `check_codes` has seen that ranks hold whole ones
        lying = dataclasses.replace(parameter, shape=(local, *(BLOCK * count for count in blocks)))
        of_scales = dataclasses.replace(parameter, shape=(local, *blocks))
        wanted = {"values": lying, "scales": of_scales, "turned": _turned(lying), "turned_scales": _turned(of_scales)}
        wanted |= {} if weights.master is None else {"master": parameter}
        parts: dict[str, Any] = {
            leaf: _part_of_rank(config, name, p, getattr(weights, leaf)) for leaf, p in wanted.items()
        }
        return dataclasses.replace(weights, **parts)
    return _part_of_rank(config, name, parameter, weights)


def _turned(parameter: Parameter) -> Parameter:
    """Returns the parameter with its last two dimensions swapped."""
    shape, dims = ((*a[:-2], a[-1], a[-2]) for a in (parameter.shape, parameter.dims))
    return dataclasses.replace(parameter, shape=shape, dims=dims)


def _part_of_rank(config: MoEConfig, name: str, parameter: Parameter, weights: jax.Array) -> jax.Array:
    for axis, dim in enumerate(parameter.dims):
        if dim == "intermediate" and parameter.shape[axis] == 1:
            continue  # one scale for all features
        if dim == "expert":
            weights = _own(name, weights, axis, parameter.shape[axis], config.axis_name, "experts", config)
        elif dim == "intermediate" and config.tensor_axis:
            weights = _own(name, weights, axis, parameter.shape[axis], config.tensor_axis, "features", config)
    return weights


def _own(
    name: str, weights: jax.Array, axis: int, total: int, over: str | tuple[str, ...], what: str, config: MoEConfig
) -> jax.Array:
    num_ranks = jax.lax.axis_size(over)
    part = -(-total // num_ranks)
    held = weights.shape[axis]
    if what == "features" and total % num_ranks:
        raise ValueError(
            f"{name} has {total} features inside an expert: the {num_ranks} ranks of tensor_axis={over!r} must divide "
            "intermediate_size"
        )
    if held == part:
        return weights
    if held != total:
        raise ValueError(
            f"{name} holds {held} {what} on this rank: expected {part} ({total} over {num_ranks} ranks of axis "
            f"{over!r}) or all {total}; check the in_specs"
        )
    if what == "experts":
        weights = pad_experts(config, weights, num_ranks)
    return jax.lax.dynamic_slice_in_dim(weights, jax.lax.axis_index(over) * part, part, axis)


def pad_experts(config: MoEConfig, weights: jax.Array, num_ranks: int) -> jax.Array:
    """Expert weights `[E, ...]` with zeros up to `R * ceil(E / R)` experts, so that every rank owns as many."""
    extra = -config.expert_entries % num_ranks
    return jnp.pad(weights, [(0, extra)] + [(0, 0)] * (weights.ndim - 1)) if extra else weights
