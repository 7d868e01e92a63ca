"""Where an MoE layer runs: its own `shard_map` over a mesh, the caller's `shard_map`, or one device.

The layer's `shard_map` is manual over every mesh axis that is not manual yet: a custom call under an automatic axis
would make XLA gather its operands first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._layer import moe_on_rank, pad_experts
from xen_moe_jax.flax._parameters import EXPERT_PARAMETERS
from xen_moe_jax.flax._router import MoEMetrics


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Static description of the layer's own `shard_map`; hashable, so that eager calls share one compilation.

    Attributes:
      mesh: concrete or abstract; None takes the current one (inside a `shard_map` over other axes).
      free_axes: axes that the `shard_map` makes manual.
      token_axes: those of them that the tokens are split over.
      num_shards: product of the sizes of `token_axes`.
      num_ranks: product of the sizes of the expert axes.
      explicit: whether the mesh has explicit axes, whose arrays are resharded by hand.
    """

    mesh: Any
    free_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    num_shards: int
    num_ranks: int
    explicit: bool

    def reshard(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """On explicit axes, `array` sharded by `spec`; a mesh that is not the context's has to be named."""
        if not self.explicit:
            return array
        return jax.sharding.reshard(array, spec if self.mesh is None else NamedSharding(self.mesh, spec))


def current_mesh(config: MoEConfig, mesh: Any = None) -> Any:
    """The mesh a layer would use for its parameters: the one given, else `jax.set_mesh`'s, else None.

    Raises ValueError if it lacks an expert axis.
    """
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return None
    missing = [axis for axis in config.expert_axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"MoEConfig.axis_name={config.axis_name!r}: the mesh has axes {tuple(mesh.axis_names)}, without {missing}; "
            f"add the axis to the mesh (size 1 will do) or name another"
        )
    return mesh


def apply_moe(
    config: MoEConfig, mesh: Any, weights: dict[str, jax.Array], x: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, MoEMetrics]:
    """The MoE layer on `x [..., H]`, wherever it is called.

    Args:
      mesh: mesh to run over; None takes the current one (`jax.set_mesh`), else that of `x`, else one device.
      weights: see `moe_on_rank`.
      x: floating-point tokens `[..., H]`; inside a `shard_map` over the expert axis, this rank's.
      mask: bool, `x.shape[:-1]`; False leaves a token out.

    Returns:
      `[..., H]` of `config.dtype` or `x.dtype`, and the metrics over all ranks.
    """
    _check_input(config, x, mask)
    if mask is None:
        mask = jnp.ones(x.shape[:-1], bool)
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    inside = [axis for axis in config.expert_axes if axis in manual]
    if len(inside) == len(config.expert_axes):
        return moe_on_rank(config, _varying_axes(config, x), weights, x, mask)
    if inside:
        raise ValueError(
            f"MoEConfig.axis_name={config.axis_name!r}: the surrounding shard_map is manual over {inside} only; "
            "make all the expert axes manual, or none"
        )
    mesh = None if manual else _mesh_of(config, mesh, weights, x)
    if mesh is None and not manual:
        return _on_one_device(config, weights, x, mask)
    return _on_mesh(config, _place(config, mesh, context, manual), weights, x, mask)


def _check_input(config: MoEConfig, x: Any, mask: Any) -> None:
    if x.ndim < 1 or x.shape[-1] != config.hidden_size:
        raise ValueError(f"x has shape {x.shape}: the last dimension must be hidden_size={config.hidden_size}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype}: must be floating point; embed the tokens first")
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_):
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}: must be bool{list(x.shape[:-1])}")


def _varying_axes(config: MoEConfig, x: jax.Array) -> tuple[str, ...]:
    """Inside the caller's `shard_map`: the axes that hold different tokens."""
    if config.token_axes is not None:
        return config.token_axes
    tracked = jax.typeof(x).manual_axis_type
    return tuple((tracked.varying if tracked is not None else frozenset()) | set(config.expert_axes))


def _mesh_of(config: MoEConfig, mesh: Any, weights: dict[str, jax.Array], x: jax.Array) -> Any:
    """The mesh given or current, else the one that the types of the arrays name, tracers included; None without any."""
    mesh = current_mesh(config, mesh)
    if mesh is not None:
        return mesh
    for array in (x, *weights.values()):
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
    wanted = free if config.token_axes is None else config.token_axes
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


@functools.partial(jax.jit, static_argnums=0)
def _on_one_device(
    config: MoEConfig, weights: dict[str, jax.Array], x: jax.Array, mask: jax.Array
) -> tuple[jax.Array, MoEMetrics]:
    """A mesh of one, so that a single rank runs the very same code as many."""
    axes = config.expert_axes
    mesh = AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
    experts, tokens = PartitionSpec(config.axis_name), PartitionSpec(config.axis_name)
    mapped = jax.shard_map(
        functools.partial(moe_on_rank, config, axes),
        mesh=mesh,
        in_specs=(
            {name: experts if name in EXPERT_PARAMETERS else PartitionSpec() for name in weights},
            tokens,
            tokens,
        ),
        out_specs=(tokens, PartitionSpec()),
    )
    out, metrics = mapped(weights, *_in_shards(x, mask, 1))
    return _as_it_came(out, x), metrics


def _in_shards(x: jax.Array, mask: jax.Array, num_shards: int) -> tuple[jax.Array, jax.Array]:
    """Tokens `[N, H]` and their mask, with left-out ones at the end until every shard has as many, one at least."""
    x, mask = x.reshape(-1, x.shape[-1]), mask.reshape(-1)
    extra = max(-(-x.shape[0] // num_shards), 1) * num_shards - x.shape[0]
    return jnp.pad(x, ((0, extra), (0, 0))), jnp.pad(mask, (0, extra))


def _as_it_came(out: jax.Array, x: jax.Array) -> jax.Array:
    """Undoes `_in_shards`: `out` in the shape of `x`."""
    return out[: math.prod(x.shape[:-1])].reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(
    config: MoEConfig, place: _Placement, weights: dict[str, jax.Array], x: jax.Array, mask: jax.Array
) -> tuple[jax.Array, MoEMetrics]:
    """The layer's own `shard_map`; tokens are padded with left-out ones where the mesh does not divide them."""
    came = x
    divides = x.ndim > 1 and x.shape[0] % place.num_shards == 0 and x.size > 0
    if not divides:
        x, mask = (place.reshard(a, PartitionSpec()) for a in (x, mask))
        x, mask = _in_shards(x, mask, place.num_shards)

    tokens = PartitionSpec(place.token_axes)
    specs = {}
    for name in weights:
        specs[name] = PartitionSpec(config.axis_name) if name in EXPERT_PARAMETERS else PartitionSpec()
        if name in EXPERT_PARAMETERS and config.num_experts % place.num_ranks:
            whole = place.reshard(weights[name], PartitionSpec())
            weights = weights | {name: pad_experts(config, whole, place.num_ranks)}
    weights = {name: place.reshard(w, specs[name]) for name, w in weights.items()}
    mapped = jax.shard_map(
        functools.partial(moe_on_rank, config, place.token_axes),
        mesh=place.mesh,
        in_specs=(specs, tokens, tokens),
        out_specs=(tokens, PartitionSpec()),
        axis_names=set(place.free_axes),
    )
    out, metrics = mapped(weights, place.reshard(x, tokens), place.reshard(mask, tokens))
    if not divides:
        out = _as_it_came(place.reshard(out, PartitionSpec()), came)
    if place.explicit:
        out = place.reshard(out, jax.typeof(came).sharding.spec)
    return out, metrics
