"""Names, shapes, initialisers and shardings of an MoE layer's parameters: the same for both Flax front ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.flax._config import MoEConfig

EXPERT_PARAMETERS = ("gate", "up", "down")
ROUTER_BIAS = "router_bias"
"""float32 `[E]`, moved by `updated_bias` instead of by a gradient; exists with balancing="bias"."""

_experts_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)
_matrix_init = jax.nn.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter: `initializer(key, shape, dtype)` makes it; `sharding` names the mesh axis of each dimension."""

    shape: tuple[int, ...]
    dtype: Any
    initializer: Callable[..., jax.Array]
    sharding: tuple[Any, ...]


def parameter_table(config: MoEConfig, mesh: Any = None) -> dict[str, Parameter]:
    """The parameters of a layer by name.

    An expert dimension that the ranks of `mesh` do not divide is replicated: JAX has no uneven shards.
    """
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    expert, embed, mlp = config.expert_sharding or (config.axis_name, None, None)
    if mesh is not None and expert == config.axis_name:
        ranks = math.prod(mesh.shape[axis] for axis in config.expert_axes)
        expert = expert if experts % ranks == 0 else None
    dtype = config.param_dtype
    wide = Parameter((experts, hidden, inner), dtype, _experts_init, (expert, embed, mlp))
    table = {
        "router": Parameter((hidden, experts), jnp.float32, _matrix_init, (None, None)),
        "gate": wide,
        "up": wide,
        "down": Parameter((experts, inner, hidden), dtype, _experts_init, (expert, mlp, embed)),
    }
    if config.num_shared_experts:
        inner = config.num_shared_experts * inner
        table["shared_gate"] = Parameter((hidden, inner), dtype, _matrix_init, (embed, mlp))
        table["shared_up"] = table["shared_gate"]
        table["shared_down"] = Parameter((inner, hidden), dtype, _matrix_init, (mlp, embed))
    return table
