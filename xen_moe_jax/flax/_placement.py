"""Places an MoE layer in its own `shard_map` over a mesh, in the caller's `shard_map`, or on one device.

The layer's `shard_map` is manual over every mesh axis that is not manual yet: a custom call under an automatic axis
would make XLA gather its operands first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from xen_moe_jax._float8_weight import Float8Weight, padding_of
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax.balance import Placement
from xen_moe_jax.experts.quantized_once import quantize_weights
from xen_moe_jax.flax._balance import MoEMetrics, metric_specs
from xen_moe_jax.flax._chunks import Members, not_quantized
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._layer import Tokens, moe_on_rank
from xen_moe_jax.flax._parameters import (
    check_blocks,
    check_codes,
    pad_experts,
    parameter_table,
    part_of_rank,
    rank_specs,
    weight_specs,
)
from xen_moe_jax.flax._shared_jit import shared_jit


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Static description of the layer's own `shard_map`; hashable, so that eager calls share one compilation.

    Attributes:
      mesh: concrete or abstract; None takes the current one (inside a `shard_map` over other axes).
      free_axes: axes that the `shard_map` makes manual.
      token_axes: the free axes that the tokens are split over.
      num_shards: product of the sizes of `token_axes`.
      num_ranks: product of the sizes of the expert axes.
      explicit: True if the mesh has explicit axes, whose arrays are resharded by hand.
    """

    mesh: Any
    free_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    num_shards: int
    num_ranks: int
    explicit: bool

    def reshard(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns `array` sharded by `spec` on explicit axes; a mesh other than the context's has to be named."""
        if not self.explicit:
            return array
        return jax.sharding.reshard(array, spec if self.mesh is None else NamedSharding(self.mesh, spec))


def current_mesh(config: MoEConfig, mesh: Any = None) -> Any:
    """The mesh that a layer would use for its parameters: the given mesh, else that of `jax.set_mesh`, else None.

    Raises TypeError if `mesh` is no mesh, and ValueError if the mesh lacks an expert axis or the tensor axis, or if the
    size of the tensor axis does not divide the experts' widths.
    """
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return None
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: must be a jax.sharding.Mesh, or None for the current one")
    for field, axes in (("axis_name", config.expert_axes), ("tensor_axis", config.layer_axes)):
        missing = [axis for axis in axes if axis not in mesh.shape]
        if missing:
            raise ValueError(
                f"MoEConfig.{field}={getattr(config, field)!r}: the mesh has axes {tuple(mesh.axis_names)}, without "
                f"{missing}; add the axis to the mesh (size 1 will do) or name another"
            )
    for field in ("intermediate_size", "shared_intermediate_size"):
        if config.tensor_axis and (getattr(config, field) or 0) % mesh.shape[config.tensor_axis]:
            raise ValueError(
                f"MoEConfig.{field}={getattr(config, field)}: the {mesh.shape[config.tensor_axis]} ranks of "
                f"tensor_axis={config.tensor_axis!r} must divide it"
            )
    return mesh


def apply_moe(
    config: MoEConfig,
    mesh: Any,
    weights: dict[str, jax.Array],
    x: jax.Array,
    mask: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    active: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
    placement: Placement | None = None,
    quantized: dict[str, Float8Weight] | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the MoE layer on `x [..., H]`, inside or outside `shard_map`.

    Args:
      mesh: mesh to run over; None takes the current one (`jax.set_mesh`), else that of `x` or the weights, else one
        device.
      weights: see `moe_on_rank`.
      x: floating-point tokens `[..., H]`; inside a `shard_map` over the expert axis, this rank's.
      mask, token_ids, active, topk_idx, placement, quantized: as in `nnx.MoE.__call__`.

    Returns:
      `[..., H]` of `config.dtype` or `x.dtype`, and the metrics over all ranks.
    """
    _check_input(config, x, mask, token_ids, topk_idx)
    for name, weight in weights.items():
        if not isinstance(weight, QuantizedWeight) and not jnp.issubdtype(weight.dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {weight.dtype}: must be floating point, or an xm.QuantizedWeight with scales"
            )
    context, manual, mesh = _meshes(config, mesh, weights, x)
    if quantized is not None:
        check_codes(config, context if mesh is None else mesh)
        _check_quantized(quantized, not_quantized(weights))
        pairs: dict[str, Any] = {name: (codes, weights[name]) for name, codes in quantized.items()}
        if set(config.layer_axes) <= manual:  # a rank may hold its part of the one and all of the other
            table = parameter_table(config)
            for name, pair in pairs.items():
                pairs[name] = [part_of_rank(config, name, table[name], a) for a in pair]
        weights = weights | {name: codes.of(master) for name, (codes, master) in pairs.items()}
    if active is not None and config.replicated_tokens:
        raise ValueError(
            f"active with MoEConfig.token_axes={config.token_axes}: where tokens are replicated the ranks' outputs are "
            "added up by XLA, which waits for every rank; split the tokens over the expert axis, or pass active=None"
        )
    _check_placement(config, placement)
    if config.balance is not None and placement is not None:
        raise ValueError(
            f"MoEConfig.balance={config.balance!r} with placement: it makes a placement of its own in each call; use "
            "balance=None"
        )
    members = Members(active, placement)
    given = Tokens(x, jnp.ones(x.shape[:-1], bool) if mask is None else mask, token_ids, topk_idx)
    inside = [axis for axis in config.layer_axes if axis in manual]
    if len(inside) == len(config.layer_axes):
        return moe_on_rank(config, _varying_axes(config, x), None, weights, given, members)
    if inside:
        name = "axis_name" if set(config.expert_axes) - manual else "tensor_axis"
        raise ValueError(
            f"MoEConfig.{name}={getattr(config, name)!r}: the surrounding shard_map is manual over {inside} only; "
            f"make all of {list(config.layer_axes)} manual, or none"
        )
    if mesh is None and not manual:
        return _on_one_device(config, weights, given, members)
    return _on_mesh(config, _place(config, mesh, context, manual), weights, given, members)


def quantized_weights(
    config: MoEConfig, mesh: Any, weights: dict[str, jax.Array], compute_dtype: Any = None
) -> dict[str, Float8Weight]:
    """Returns the codes of a layer's expert weights by name, for `quantized` of `apply_moe`: what `xm.quantize_weights`
    makes on every rank of the rank's own part of each weight.

    Args:
      mesh, weights: as in `apply_moe`. Weights that are a `QuantizedWeight` are left out.
      compute_dtype: as in `nnx.MoE.quantized_weights`.

    Returns:
      A `Float8Weight` without a master for each name, with as many experts as the weight.

    Raises:
      ValueError: as in `nnx.MoE.quantized_weights`.
    """
    weights = not_quantized(weights)
    context, manual, mesh = _meshes(config, mesh, weights)
    check_codes(config, context if mesh is None else mesh)
    try:
        dtype = config.dtype if compute_dtype is None else jnp.dtype(compute_dtype)
    except (TypeError, ValueError):  # JAX's message for no dtype has neither the argument nor the remedy
        raise TypeError(f"compute_dtype={compute_dtype!r}: must be None or a dtype") from None
    if dtype != (config.dtype or dtype):
        raise ValueError(
            f"compute_dtype={dtype} with MoEConfig.dtype={config.dtype}, in which the layer computes: leave "
            "compute_dtype None"
        )
    quantize = functools.partial(quantize_weights, compute_dtype=dtype)
    table = parameter_table(config)

    def on_rank(weights: dict[str, jax.Array]) -> dict[str, Float8Weight]:
        return quantize({name: part_of_rank(config, name, table[name], weight) for name, weight in weights.items()})

    if set(config.layer_axes) <= manual:
        return on_rank(weights)
    if not weights or (mesh is None and not manual):
        return quantize(weights)
    place = _place(config, mesh, context, manual)
    of_ranks, extra = rank_specs(config), -config.expert_entries % place.num_ranks
    specs = {name: of_ranks[name] for name in weights}
    if extra:
        whole = {name: place.reshard(weight, PartitionSpec()) for name, weight in weights.items()}
        weights = {name: pad_experts(config, weight, place.num_ranks) for name, weight in whole.items()}
    like = {name: Float8Weight(*(weight,) * 4, padding=padding_of(weight.shape)) for name, weight in weights.items()}
    out = {name: weight_specs(codes, specs[name]) for name, codes in like.items()}
    weights = {name: place.reshard(weight, specs[name]) for name, weight in weights.items()}
    run = jax.shard_map(on_rank, mesh=place.mesh, in_specs=(specs,), out_specs=out, axis_names=set(place.free_axes))
    codes = run(weights)
    return jax.tree.map(lambda a: place.reshard(a, PartitionSpec())[:-extra], codes) if extra else codes


def _check_input(config: MoEConfig, x: Any, mask: Any, token_ids: Any, topk_idx: Any) -> None:
    """Raises TypeError for an argument of `apply_moe` that is no array, and ValueError or TypeError for a wrong shape
    or dtype."""
    for name, value in (("x", x), ("mask", mask), ("token_ids", token_ids), ("topk_idx", topk_idx)):
        if not hasattr(value, "dtype") and (value is not None or name == "x"):
            raise TypeError(f"{name} is a {type(value).__name__}: must be an array")
    if x.ndim < 1 or x.shape[-1] != config.hidden_size:
        raise ValueError(f"x has shape {x.shape}: the last dimension must be hidden_size={config.hidden_size}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype}: must be floating point; embed the tokens first")
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_):
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}: must be bool{list(x.shape[:-1])}")
    if topk_idx is not None:
        _check_topk_idx(config, x, topk_idx)
    if (token_ids is None) == (config.choice == "hash") and (topk_idx is None or token_ids is not None):
        given = "None" if token_ids is None else "an array"
        raise ValueError(
            f"token_ids is {given} with MoEConfig.choice={config.choice!r}: 'hash' needs the ids of the tokens, and "
            "nothing else takes them"
        )
    if token_ids is not None and (token_ids.shape != x.shape[:-1] or not jnp.issubdtype(token_ids.dtype, jnp.integer)):
        raise ValueError(
            f"token_ids is {token_ids.dtype}{list(token_ids.shape)}: must be integers of shape {list(x.shape[:-1])}"
        )


def _check_quantized(quantized: Any, weights: dict[str, jax.Array]) -> None:
    """Raises TypeError or ValueError unless `quantized` has codes by the names of experts' `weights`."""
    made = "pass what quantized_weights returned"
    if not isinstance(quantized, dict):
        raise TypeError(f"quantized is a {type(quantized).__name__}: must be a dict; {made}")
    for name, codes in quantized.items():
        if name not in weights:
            raise ValueError(f"quantized has codes of {name!r}: must be one of {tuple(weights)}; {made}")
        if not isinstance(codes, Float8Weight):
            raise TypeError(f"quantized[{name!r}] is a {type(codes).__name__}: must be a Float8Weight; {made}")


def _check_placement(config: MoEConfig, placement: Any) -> None:
    """Raises ValueError or TypeError for a placement that the layer cannot take, or needs and has not got."""
    if placement is None:
        if config.num_slots is not None:
            raise ValueError(
                f"placement is None with MoEConfig.num_slots={config.num_slots}: the weights are in slots, and only a "
                "placement says which experts they are; pass it to each call"
            )
        return
    if not isinstance(placement, Placement):
        raise TypeError(f"placement is a {type(placement).__name__}: must be a Placement of xm.balance, or None")
    if config.replicated_tokens:
        raise ValueError(
            f"placement with MoEConfig.token_axes={config.token_axes}: where tokens are replicated, each rank computes "
            "its own experts; split the tokens over the expert axis, or pass placement=None"
        )
    slots = placement.num_ranks * placement.slots_per_rank
    if config.num_slots not in (None, slots):
        raise ValueError(f"placement has {slots} slots, and MoEConfig.num_slots={config.num_slots}: they must be equal")


def _check_topk_idx(config: MoEConfig, x: Any, topk_idx: Any) -> None:
    given = f"topk_idx is {topk_idx.dtype}{list(topk_idx.shape)}"
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"{given}: must be integers, the numbers of experts")
    if topk_idx.shape != (*x.shape[:-1], config.top_k):
        raise ValueError(
            f"{given}: must have shape {[*x.shape[:-1], config.top_k]}, top_k={config.top_k} experts for each token; "
            "fill up unused slots with -1"
        )
    if jnp.iinfo(topk_idx.dtype).max < config.num_experts - 1:
        raise ValueError(f"{given}: this dtype cannot name all num_experts={config.num_experts}; use a wider one")


def _varying_axes(config: MoEConfig, x: jax.Array) -> tuple[str, ...]:
    """Returns the axes that hold different tokens, inside the caller's `shard_map`."""
    tracked = jax.typeof(x).manual_axis_type
    varying = tracked.varying if tracked is not None else frozenset()
    if config.token_axes is None:
        same = [axis for axis in config.expert_axes if axis not in varying]
        if varying and same:  # without any, the types say nothing: check_vma=False
            raise ValueError(
                f"MoEConfig.token_axes=None: x varies over {sorted(varying)}, and is the same on all ranks of {same}; "
                f"split it over {same} too in the in_specs, or say with token_axes={tuple(sorted(varying))} that these "
                "ranks share their tokens"
            )
        return tuple((varying | set(config.expert_axes)) - {config.tensor_axis})
    if config.replicated_tokens and varying & set(config.layer_axes):
        raise ValueError(
            f"MoEConfig.token_axes={config.token_axes}: the tokens are to be the same on all ranks of "
            f"{config.layer_axes}, and x varies over {sorted(varying)}; check the in_specs"
        )
    return config.token_axes


def _meshes(config: MoEConfig, mesh: Any, weights: Any, x: Any = None) -> tuple[AbstractMesh, set[str], Any]:
    """Returns the context's mesh, its manual axes, and the mesh of the layer outside of any `shard_map`, or None."""
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    return context, manual, None if manual else _mesh_of(config, mesh, weights, x)


def _mesh_of(config: MoEConfig, mesh: Any, weights: dict[str, jax.Array], x: jax.Array) -> Any:
    """The mesh given or current, else the one that the types of the arrays name, tracers included; None without any."""
    mesh = current_mesh(config, mesh)
    if mesh is not None:
        return mesh
    for array in jax.tree.leaves((x, weights)):
        sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return current_mesh(config, sharding.mesh)
        if sharding is not None and len(sharding.device_set) > 1:
            raise ValueError(
                f"x lives on {len(sharding.device_set)} devices without a mesh ({type(sharding).__name__}): "
                "pass mesh=, use jax.set_mesh, or place it with a NamedSharding"
            )
        typed = jax.typeof(array).sharding.mesh
        if not typed.empty:
            return current_mesh(config, typed)
    return None


def _place(config: MoEConfig, mesh: Any, context: AbstractMesh, manual: set[str]) -> _Placement:
    shape = context if mesh is None else mesh
    if mesh is None:
        current_mesh(config, context)
    free = tuple(axis for axis in shape.axis_names if axis not in manual)
    wanted = config.token_axes
    if wanted is None:
        wanted = tuple(axis for axis in free if axis != config.tensor_axis)
    unknown = [axis for axis in wanted if axis not in shape.shape]
    if unknown:
        raise ValueError(f"MoEConfig.token_axes={config.token_axes}: the mesh has axes {shape.axis_names}")
    token_axes = tuple(axis for axis in wanted if axis in free)
    return _Placement(
        mesh=mesh,
        free_axes=free,
        token_axes=token_axes,
        num_shards=math.prod(shape.shape[axis] for axis in token_axes),
        num_ranks=math.prod(shape.shape[axis] for axis in config.expert_axes),
        explicit=any(kind == AxisType.Explicit for kind in shape.axis_types),
    )


@functools.partial(shared_jit, num_static=1)
def _on_one_device(
    config: MoEConfig, weights: dict[str, jax.Array], given: Tokens, members: Members
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the layer on a mesh of one device, so that a single rank runs the same code as many ranks."""
    axes = config.layer_axes
    place = _Placement(
        mesh=AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes)),
        free_axes=axes,
        token_axes=() if config.replicated_tokens else config.expert_axes,
        num_shards=1,
        num_ranks=1,
        explicit=False,
    )
    tokens, num_sequences = _in_shards(config, given, 1)
    results = _mapped(config, place, num_sequences, weights, tokens, members)
    return _per_token(lambda a: _as_it_came(a, given.x), *results)


def _mapped(
    config: MoEConfig,
    place: _Placement,
    num_sequences: int | None,
    weights: dict[str, jax.Array],
    given: Tokens,
    members: Members,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the layer in a `shard_map`; the mesh divides tokens and weights."""
    over_tokens = PartitionSpec(place.token_axes)
    of_ranks, specs = rank_specs(config), {}
    for name, weight in weights.items():
        check_blocks(
            name, weight, of_ranks[name], jax.sharding.get_abstract_mesh() if place.mesh is None else place.mesh
        )
        specs[name] = weight_specs(weight, of_ranks[name])
    weights = jax.tree.map(place.reshard, weights, specs)
    given = Tokens(*(a if a is None else place.reshard(a, over_tokens) for a in given))
    members = jax.tree.map(lambda a: place.reshard(jnp.asarray(a), PartitionSpec()), members)
    mapped = jax.shard_map(
        functools.partial(moe_on_rank, config, place.token_axes, num_sequences),
        mesh=place.mesh,
        in_specs=(specs, over_tokens, PartitionSpec()),
        out_specs=(over_tokens, metric_specs(config, over_tokens)),
        axis_names=set(place.free_axes),
    )
    return mapped(weights, given, members)


def _in_shards(config: MoEConfig, given: Tokens, num_shards: int) -> tuple[Tokens, int | None]:
    """Returns tokens `[N, H]` with masked ones at the end, so that every shard has the same number, at least one.

    The dimensions no longer tell where a sequence ends: the tokens then carry the numbers of their sequences, and the
    second result is the number of sequences.
    """
    num_sequences = None
    if config.sequence_loss_weight:
        length = given.x.shape[-2] if given.x.ndim > 1 else 1
        num_sequences = max(math.prod(given.x.shape[:-2]), 1)
        numbers = jnp.arange(math.prod(given.x.shape[:-1]), dtype=jnp.int32) // max(length, 1)
        given = given._replace(sequence=numbers.reshape(given.x.shape[:-1]))
    count = math.prod(given.x.shape[:-1])
    extra = max(-(-count // num_shards), 1) * num_shards - count

    def flat(array: jax.Array) -> jax.Array:  # the mask leaves padding out, so that its other entries do not matter
        array = array.reshape(count, *array.shape[given.x.ndim - 1 :])
        return jnp.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1))

    return Tokens(*(a if a is None else flat(a) for a in given)), num_sequences


def _as_it_came(out: jax.Array, x: jax.Array) -> jax.Array:
    """Undoes `_in_shards`: `out [N, ...]` with the leading dimensions of `x`."""
    return out[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], out.shape[-1])


def _per_token(
    function: Callable[[jax.Array], jax.Array], out: jax.Array, metrics: MoEMetrics
) -> tuple[jax.Array, MoEMetrics]:
    """Returns both results with `function` applied to every array that has one entry per token."""
    if metrics.topk_idx is not None:
        metrics = dataclasses.replace(metrics, topk_idx=function(metrics.topk_idx))
    return function(out), metrics


@functools.partial(shared_jit, num_static=2)
def _on_mesh(
    config: MoEConfig,
    place: _Placement,
    weights: dict[str, jax.Array],
    given: Tokens,
    members: Members,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the layer in its own `shard_map`. Dimensions that the mesh does not divide are padded; padding tokens are
    masked."""
    came, num_sequences = given.x, None
    divides = came.ndim > 1 and came.shape[0] % place.num_shards == 0 and came.size > 0
    if config.sequence_loss_weight and came.ndim == 2:
        divides = False  # one sequence, spread over the ranks
    if not divides:
        given = Tokens(*(a if a is None else place.reshard(a, PartitionSpec()) for a in given))
        given, num_sequences = _in_shards(config, given, place.num_shards)
    for name, parameter in parameter_table(config).items():
        if parameter.dims[0] == "expert" and config.expert_entries % place.num_ranks:
            whole = jax.tree.map(lambda part: place.reshard(part, PartitionSpec()), weights[name])
            padded = jax.tree.map(lambda part: pad_experts(config, part, place.num_ranks), whole)
            weights = weights | {name: padded}
    results = _mapped(config, place, num_sequences, weights, given, members)
    if not divides:
        results = _per_token(lambda a: _as_it_came(place.reshard(a, PartitionSpec()), came), *results)
    if place.explicit:
        *over_tokens, over_hidden = jax.typeof(came).sharding.spec
        out, metrics = _per_token(lambda a: place.reshard(a, PartitionSpec(*over_tokens)), *results)
        results = place.reshard(out, PartitionSpec(*over_tokens, over_hidden)), metrics
    return results
