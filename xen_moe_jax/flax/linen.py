"""`MoE` for Flax Linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._float8_weight import Float8Weight
from xen_moe_jax._quantized_weight import QuantizedWeight, adopted_by_name, check_format
from xen_moe_jax.balance import Placement
from xen_moe_jax.flax._balance import MoEMetrics, updated_bias
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._missing import named
from xen_moe_jax.flax._parameters import ROUTER_BIAS, parameter_table
from xen_moe_jax.flax._placement import apply_moe, current_mesh, quantized_weights

try:
    import flax.linen as nn
except ModuleNotFoundError as error:
    raise named(error) from error

ROUTER_STATE = "router_state"
"""Collection of the router bias."""
QUANTIZED = "quantized"
"""Collection of the weights that are an `xm.QuantizedWeight`."""


def _sharded_as_named(initializer: Callable[..., jax.Array], sharding: tuple[Any, ...]) -> Callable[..., jax.Array]:
    """Makes an initializer return the parameter with its sharding: on a mesh with explicit axes Flax asserts it."""

    def init(*args: Any) -> jax.Array:
        value = initializer(*args)
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.are_all_axes_explicit:
            value = jax.sharding.reshard(value, jax.sharding.PartitionSpec(*sharding))
        return value

    return init


def variables_of(weights: dict[str, jax.Array | QuantizedWeight]) -> dict[str, dict[str, Any]]:
    """Weights by name, the router bias included, as the variables of a `MoE`; quantized ones have a collection of their
    own."""
    weights = adopted_by_name(weights)
    kept = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
    params = {name: array for name, array in weights.items() if name != ROUTER_BIAS and name not in kept}
    state = {ROUTER_STATE: {ROUTER_BIAS: weights[ROUTER_BIAS]}} if ROUTER_BIAS in weights else {}
    return {"params": params, **state, **({QUANTIZED: kept} if kept else {})}


def _quantized(name: str, weight: Any, shape: tuple[int, ...]) -> QuantizedWeight:
    """Raises TypeError or ValueError where the weight is of another type, format or shape."""
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"{QUANTIZED}[{name!r}] is a {type(weight).__name__}: must be an xm.QuantizedWeight")
    check_format(name, weight)
    if weight.shape != shape:
        raise ValueError(f"{QUANTIZED}[{name!r}] is {weight.shape} and must be {shape}")
    return weight


class MoE(nn.Module):
    """A mixture of experts, spread over the mesh axis `config.axis_name`.

    The same layer as `xen_moe_jax.flax.nnx.MoE`, with the same parameter names; each parameter is boxed in
    `nn.Partitioned` with its sharding (`nn.get_partition_spec` reads it). With balancing="bias" the bias lives in the
    collection "router_state" and moves at each call that makes that collection mutable, as batch statistics do.

        moe = MoE(MoEConfig(hidden_size=64, intermediate_size=128, num_experts=16, top_k=2))
        variables = nn.unbox(moe.init(jax.random.key(0), x))
        y, metrics = moe.apply(variables, x)    # x, y: [..., 64]

    Attributes:
      config: sizes, routing, communication.
      mesh: mesh to run over; None takes the current one at each call.
    """

    config: MoEConfig
    mesh: Any = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        token_ids: jax.Array | None = None,
        active: jax.Array | None = None,
        topk_idx: jax.Array | None = None,
        placement: Placement | None = None,
        quantized: dict[str, Float8Weight] | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Applies the layer. Arguments and results are those of `xen_moe_jax.flax.nnx.MoE.__call__`."""
        config = self.config
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config={config!r}: must be a xen_moe_jax.flax.MoEConfig")
        weights: dict[str, Any] = {}
        for name, p in parameter_table(config, current_mesh(config, self.mesh)).items():
            if self.has_variable(QUANTIZED, name):
                weights[name] = _quantized(name, self.get_variable(QUANTIZED, name), p.shape)
                continue
            init = nn.with_partitioning(_sharded_as_named(p.initializer, p.sharding), p.sharding)
            weights[name] = self.param(name, init, p.shape, p.dtype)
        bias = None
        if config.balancing == "bias":
            bias = self.variable(ROUTER_STATE, ROUTER_BIAS, jnp.zeros, (config.num_experts,), jnp.float32)
            weights[ROUTER_BIAS] = bias.value
        out, metrics = apply_moe(config, self.mesh, weights, x, mask, token_ids, active, topk_idx, placement, quantized)
        if bias is not None and self.is_mutable_collection(ROUTER_STATE) and not self.is_initializing():
            bias.value = updated_bias(bias.value, metrics.tokens_per_expert, config.bias_update_rate)
        return out, metrics

    def quantized_weights(self, compute_dtype: Any = None) -> dict[str, Float8Weight]:
        """Does the same as `nnx.MoE.quantized_weights`: `moe.apply(variables, method="quantized_weights")`."""
        names = (name for name in parameter_table(self.config) if self.has_variable("params", name))
        weights = {name: nn.unbox(self.get_variable("params", name)) for name in names}
        return quantized_weights(self.config, self.mesh, weights, compute_dtype)
