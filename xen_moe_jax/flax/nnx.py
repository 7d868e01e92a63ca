"""`MoE` for Flax NNX."""

from __future__ import annotations

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
    from flax import nnx
except ModuleNotFoundError as error:
    raise named(error) from error


class RouterBias(nnx.Variable):
    """The router bias: state of the layer, but no parameter of the optimiser."""


class QuantizedParam(nnx.Variable):
    """A weight that is an `xm.QuantizedWeight`: no parameter of the optimiser, and `nnx.grad` does not see it."""


class MoE(nnx.Module):
    """A mixture of experts, spread over the mesh axis `config.axis_name`.

    Call it under `jit` on a mesh (`jax.set_mesh` or `mesh=`), inside your own `shard_map`, or on one device. The
    weights are `nnx.Param`s `router [H, E]`, `gate` and `up [E, H, F]`, `down [E, F, H]` and those of docs/user/flax.md
    that the config asks for, each with its sharding in `out_sharding`; balancing="bias" adds the `RouterBias`
    `router_bias [E]`.

    A plain `nnx.jit` copies all weights at every call, because it returns the module's state. Where nothing is
    assigned, `nnx.jit(..., graph_updates=False)`, or `nnx.split` and `jax.jit`, does not.

        moe = MoE(MoEConfig(hidden_size=64, intermediate_size=128, num_experts=16, top_k=2), rngs=nnx.Rngs(0))
        y, metrics = moe(x)                     # x, y: [..., 64]
        loss = task_loss(y) + metrics.aux_loss

    Args:
      config: sizes, routing, communication.
      mesh: mesh to run over; None takes the current one at each call.
      rngs: source of the initial weights.
    """

    router: nnx.Param[jax.Array]
    gate: nnx.Param[jax.Array]
    up: nnx.Param[jax.Array]
    down: nnx.Param[jax.Array]

    def __init__(self, config: MoEConfig, *, mesh: Any = None, rngs: nnx.Rngs) -> None:
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config={config!r}: must be a xen_moe_jax.flax.MoEConfig")
        self.config = config
        self.mesh = mesh
        on_mesh = current_mesh(config, mesh)
        table = parameter_table(config, on_mesh)
        self.weight_names = tuple(table)
        for name, p in table.items():
            metadata: dict[str, Any] = {"out_sharding": p.sharding}
            if on_mesh is None:
                metadata["eager_sharding"] = False  # the names are for later: there is no mesh to place the array on
            elif mesh is not None:
                metadata["mesh"] = mesh
            setattr(self, name, nnx.Param(p.initializer(rngs.params(), p.shape, p.dtype), **metadata))
        if config.balancing == "bias":
            self.router_bias = RouterBias(jnp.zeros(config.num_experts, jnp.float32))

    @classmethod
    def from_weights(
        cls, config: MoEConfig, weights: dict[str, jax.Array | QuantizedWeight], *, mesh: Any = None
    ) -> MoE:
        """Makes a layer around existing weights, by name, such as the weights of `load_hugging_face`.

        An `xm.QuantizedWeight`, or a `qwix.QArray` of its formats, becomes a `QuantizedParam`.

        Raises ValueError if a name is missing or unknown, or a shape is another, and TypeError if a weight is no array.
        """
        weights = adopted_by_name(weights)
        graph, state = nnx.split(nnx.eval_shape(lambda: cls(config, mesh=mesh, rngs=nnx.Rngs(0))))
        wanted = {name: tuple(leaf.shape) for name, leaf in nnx.to_pure_dict(state).items()}
        given = {name: tuple(array.shape) for name, array in weights.items()}
        if wanted != given:
            wrong = sorted(name for name in wanted | given if wanted.get(name) != given.get(name))
            raise ValueError(
                f"weights: {', '.join(f'{n} is {given.get(n)} and must be {wanted.get(n)}' for n in wrong)} by {config}"
            )
        kept = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
        nnx.replace_by_pure_dict(state, {name: array for name, array in weights.items() if name not in kept})
        layer = nnx.merge(graph, state)
        for name, weight in kept.items():
            check_format(name, weight)
            setattr(layer, name, QuantizedParam(weight))
        return layer

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
        """Applies the layer.

        Args:
          x: tokens `[..., hidden_size]`, floating point.
          mask: bool `[...]`; False leaves a token out (padding): it goes to no expert, counts nowhere,
            and its output is zero.
          token_ids: integer `[...]`, with `MoEConfig(choice="hash")` only.
          active: bool, one entry for every rank of `config.axis_name`, as in `xm.dispatch`: inactive ranks get no
            tokens, and their own come back zero (plus the output of shared experts). The metrics are XLA's sums over
            all ranks: a program that has to run without some of them must not use them.
          topk_idx: integer `[..., top_k]`, the experts to use in place of the router's choice (router replay), of a
            dtype that can name every expert; -1 is an unused slot. Their weights are the router's present scores of
            these experts, and its gradient flows through them. choice="hash" then needs no `token_ids`.
          placement: where the experts are (`xm.balance.plan`), as in `xm.dispatch`: an array like any other. Weights at
            home are moved to their slots in each call, and their gradients back; `MoEConfig.num_slots` has them there.
            Weights at home on an inactive rank cannot be moved: rows for such an expert are dropped and counted.
          quantized: the codes that `quantized_weights` returned for these weights: experts in fp8 multiply by them, and
            this call quantizes no weights, except weights that it moves to slots. None: it quantizes all.

        Returns:
          `[..., hidden_size]` and `MoEMetrics` over the tokens of all ranks.
        """
        weights = {name: getattr(self, name).get_value() for name in self.weight_names}
        if self.config.balancing == "bias":
            weights[ROUTER_BIAS] = self.router_bias[...]
        return apply_moe(self.config, self.mesh, weights, x, mask, token_ids, active, topk_idx, placement, quantized)

    def quantized_weights(self, compute_dtype: Any = None) -> dict[str, Float8Weight]:
        """Quantizes the weights of experts in fp8 for several calls: for example once for a step of the optimizer, in
        front of the batches of gradient accumulation. Gradients go to the weights.

            codes = moe.quantized_weights()
            y, metrics = moe(x, quantized=codes)

        Args:
          compute_dtype: dtype to which the weights are rounded first, with `MoEConfig.dtype=None`: that of the tokens.
            None takes `MoEConfig.dtype`, or else the weights as they are. Codes that are rounded to another dtype than
            the tokens' differ from those that a call without codes makes.

        Returns:
          A `Float8Weight` by name for each weight of the experts that is not quantized yet.

        Raises:
          ValueError: `MoEConfig.expert_dtype` is not "float8_e4m3fn"; the ranks of `tensor_axis` cut blocks of
            128 x 128; or `compute_dtype` is not `MoEConfig.dtype`.
        """
        weights = {name: getattr(self, name).get_value() for name in self.weight_names}
        return quantized_weights(self.config, self.mesh, weights, compute_dtype)

    def update_bias(self, metrics: MoEMetrics) -> None:
        """Moves the router bias by one step; call it once per optimiser step, with that step's metrics.

        Raises:
          ValueError: `MoEConfig.balancing` is not "bias". TypeError: `metrics` is no `MoEMetrics`.
        """
        if self.config.balancing != "bias":
            raise ValueError(f"MoEConfig.balancing={self.config.balancing!r}: update_bias needs balancing='bias'")
        if not isinstance(metrics, MoEMetrics):
            raise TypeError(f"update_bias: metrics is a {type(metrics).__name__}: must be the MoEMetrics of a call")
        bias = updated_bias(self.router_bias[...], metrics.tokens_per_expert, self.config.bias_update_rate)
        self.router_bias[...] = bias
