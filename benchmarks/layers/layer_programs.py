"""One MoE layer, and a stack of them with attention left out, moved in the library's ways and in JAX's.

All of them have the same router weights, the same routing and the same experts; only the way of the rows to the experts
and back differs. Experts are those of the Flax layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.peers import registry as peers
from xen_moe_jax.experts import grouped_matmul
from xen_moe_jax.experts.mlp import built_in
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax._chunks import Chunk, through_experts
from xen_moe_jax.flax._logits import router_logits
from xen_moe_jax.tuning.problem import AXIS, RANK_SPEC, Problem
from xen_moe_jax.tuning.workload import Capacities, Workload, round_up, rows_per_expert

MODEL_LAYERS = 4
PLAIN = "xen_moe_jax"
"""Layer with which the results of every other layer are compared."""
OWN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "xen_moe_jax, 2 chunks": {"num_chunks": 2},
    "xen_moe_jax, 4 chunks": {"num_chunks": 4},
    "xen_moe_jax, alignment 128": {"alignment": 128},
    "xen_moe_jax, weights in front": {"apply_weights_to": "activation"},
    "xen_moe_jax, fp8 wire": {"wire": "float8_e4m3fn", "combine_wire": "float8_e4m3fn"},
    "xen_moe_jax, no capacity": {"capacity_factor": None},
    "xen_moe_jax, no capacity, 4 chunks": {"capacity_factor": None, "num_chunks": 4},
}
"""Fields of `MoEConfig` beside those of the problem."""
PEERS = ("padded all_to_all", "all_gather + psum_scatter", "ragged_all_to_all k=64")
MATMULS = "experts alone"
"""The experts on the same number of rows and groups, with nothing moved: no layer can be faster."""

Weights = dict[str, jax.Array]
Layer = Callable[[Weights, jax.Array, jax.Array], jax.Array]
"""`(this rank's weights, x [T, H], topk_idx [T, K]) -> [T, H]`, on one rank inside `shard_map`."""


class Operands(NamedTuple):
    """Operands of a layer, on the mesh: weights by name (experts split over the ranks), `x [R*T, H]`, `topk_idx [R*T,
    K]`."""

    weights: Weights
    x: jax.Array
    topk_idx: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """The problem to run: routing, the experts' width, and the number of layers in sequence."""

    problem: Problem
    config: MoEConfig
    layers: int

    @property
    def work(self) -> Workload:
        return self.problem.work


def layer_config(work: Workload, width: int, grouped_matmul: str, kernel: Any) -> MoEConfig:
    """The library's layer, with the capacity factor of the workload."""
    return MoEConfig(
        hidden_size=work.hidden,
        intermediate_size=width,
        num_experts=work.experts,
        top_k=work.top_k,
        axis_name=AXIS,
        capacity_factor=work.capacity_factor,
        grouped_matmul=grouped_matmul,
        kernel=kernel,
        param_dtype=work.compute_dtype,
    )


def name_of_matmul(chosen: str) -> str:
    """The name in `--grouped-matmul`, and for "auto" the choice on this machine."""
    return grouped_matmul.describe(jax.default_backend())["choice"] if chosen == "auto" else chosen


def weight_specs() -> dict[str, PartitionSpec]:
    split = PartitionSpec(None, AXIS)
    return {"gate": split, "up": split, "down": split, "router": PartitionSpec()}


def draw_operands(given: LayerProblem) -> Operands:
    """Weights `[layers, ...]` drawn on the devices; tokens and the first routing of the problem."""
    work, config, mesh = given.work, given.config, given.problem.mesh
    hidden, width, experts = work.hidden, config.intermediate_size, work.local_experts * work.ranks
    shapes = {
        "gate": (experts, hidden, width),
        "up": (experts, hidden, width),
        "down": (experts, width, hidden),
        "router": (hidden, experts),
    }
    placed = {name: NamedSharding(mesh, spec) for name, spec in weight_specs().items()}

    def draw() -> Weights:
        weights = {}
        for seed, (name, shape) in enumerate(shapes.items()):
            values = jax.random.normal(jax.random.key(work.seed + seed), (given.layers, *shape)) / shape[-2] ** 0.5
            weights[name] = values.astype(jnp.float32 if name == "router" else work.compute_dtype)
        return weights

    inputs = given.problem.inputs
    return Operands(jax.jit(draw, out_shardings=placed)(), inputs.x, inputs.topk_idx[0])


def router_weights(work: Workload, router: jax.Array, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """Softmax scores of the experts that the problem has chosen, normalised: float32 `[T, K]`."""
    logits = router_logits(x, router)
    chosen = jnp.take_along_axis(jax.nn.softmax(logits[:, : work.experts], axis=-1), topk_idx, axis=-1)
    return chosen / chosen.sum(-1, keepdims=True)


def own_layer(config: MoEConfig, work: Workload) -> Layer:
    """Dispatch, experts and combine as the Flax layers have them."""

    def layer(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        topk_weights = router_weights(work, weights["router"], x, topk_idx)
        parts = {name: weights[name] for name in ("gate", "up", "down")}
        return through_experts(config, parts, Chunk(x, topk_idx, topk_weights))[0]

    return layer


def peer_layer(config: MoEConfig, work: Workload, caps: Capacities, name: str) -> Layer:
    """Moves the rows by one of JAX's ways, and runs the same experts on them."""
    peer = peers.PEERS[name].make(work, caps)
    experts = built_in(config)

    def layer(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        topk_weights = router_weights(work, weights["router"], x, topk_idx)
        rows, local_expert, way = peer.dispatch(x, topk_idx)
        if local_expert.ndim == 3:  # [R, L, cap, H]: groups of equal size
            ranks, local, cap, hidden = rows.shape
            grouped = rows.swapaxes(0, 1).reshape(-1, hidden)
            sizes = jnp.full((local,), ranks * cap, jnp.int32)
            y = experts(grouped, sizes, weights).reshape(local, ranks, cap, hidden).swapaxes(0, 1)
        else:  # sorted, rows that no token fills with the last expert's
            y = experts(rows, jnp.bincount(local_expert, length=work.local_experts).astype(jnp.int32), weights)
        return peer.combine(y, way, topk_weights)

    return layer


def matmuls_alone(config: MoEConfig, work: Workload, layers: int) -> Layer:
    """Experts on `T*K` rows in equal groups. A single layer gets these rows as operands (`operands_for`); in a stack
    they are this rank's tokens `K` times, and are added up by token."""
    experts = built_in(config)

    def layer(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        rows = x if layers == 1 else jnp.tile(x, (work.top_k, 1))
        local = work.local_experts
        sizes = jnp.full((local,), rows.shape[0] // local, jnp.int32).at[-1].add(rows.shape[0] % local)
        y = experts(jax.lax.optimization_barrier(rows), sizes, weights)
        return y if layers == 1 else y.reshape(work.top_k, *x.shape).sum(0)

    return layer


def operands_for(name: str, given: LayerProblem, operands: Operands) -> Operands:
    """Operands of the way `name`: the experts alone have a row for every slot instead of the tokens, since copying
    tokens into rows, and adding up the rows' gradients, is not their work."""
    if name != MATMULS or given.layers > 1:
        return operands
    copies = jax.shard_map(
        lambda x: jnp.tile(x, (given.work.top_k, 1)), mesh=given.problem.mesh, in_specs=RANK_SPEC, out_specs=RANK_SPEC
    )
    return operands._replace(x=jax.jit(copies)(operands.x))


def layers_of(given: LayerProblem, names: list[str] | None) -> dict[str, Layer]:
    """The ways to run the layer that this platform has, by name, the library's plain one first.

    Args:
      names: which; None is all.

    Raises:
      ValueError: a name is of none.
    """
    known = (PLAIN, MATMULS, *(name for name in OWN if name != PLAIN), *PEERS)
    unknown = set(names or ()) - set(known)
    if unknown:
        raise ValueError(f"--ways {' '.join(map(repr, sorted(unknown)))}: must be among {known}")
    work, config, caps = given.work, given.config, peer_capacities(given)
    found: dict[str, Layer] = {}
    for name in known:
        if names is not None and name not in (PLAIN, MATMULS, *names):
            continue
        if name == MATMULS:
            found[name] = matmuls_alone(config, work, given.layers)
        elif name in OWN:
            found[name] = own_layer(dataclasses.replace(config, **OWN[name]), work)
        elif given.problem.platform in peers.PEERS[name].platforms:
            found[name] = peer_layer(config, work, caps, name)
    return found


def peer_capacities(given: LayerProblem) -> Capacities:
    """Capacities of the problem, with grouped rows rounded up to a multiple of 128, which suits matmul kernels."""
    caps = given.problem.caps
    return dataclasses.replace(caps, grouped=round_up(caps.grouped, 128))


def dropped_rows(given: LayerProblem, name: str) -> int:
    """Rows of all ranks for which the way has no room, counted from the routing; 0 for the experts alone."""
    if name == MATMULS:
        return 0
    work, caps = given.work, peer_capacities(given)
    topk_idx = given.problem.topk_idx[0]
    if name in PEERS:
        counts = _rows_by_source(work, topk_idx)
        if name.startswith("padded"):
            return int(np.maximum(counts - caps.per_source_expert, 0).sum())
        return int(np.maximum(counts.sum((0, 2)) - caps.grouped, 0).sum())
    config = dataclasses.replace(given.config, **OWN[name])
    size, dropped = -(-work.tokens // config.num_chunks), 0
    capacity = config.chunk_capacity(size, work.ranks)
    if capacity is None:
        return 0
    for chunk in range(config.num_chunks):
        counts = _rows_by_source(work, topk_idx[:, chunk * size : (chunk + 1) * size]).sum(0)
        groups = -(-counts // config.alignment) * config.alignment
        starts = groups.cumsum(-1) - groups
        dropped += int(np.clip(starts + counts - capacity, 0, counts).sum())
    return dropped


def _rows_by_source(work: Workload, topk_idx: np.ndarray) -> np.ndarray:
    """int64 `[source, rank, local expert]` for `topk_idx [R, T, K]`."""
    counts = rows_per_expert(dataclasses.replace(work, pool=1, tokens=max(topk_idx.shape[1], 1)), topk_idx[None])[0]
    return counts.reshape(work.ranks, work.ranks, work.local_experts)


def stacked(layer: Layer, layers: int) -> Layer:
    """`layers` residual blocks, each with its own weights: `x + layer(norm(x))`; one alone is the bare layer."""

    def stack(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        if layers == 1:
            return layer({name: w[0] for name, w in weights.items()}, x, topk_idx)
        for number in range(layers):
            mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
            normed = (x.astype(jnp.float32) * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)
            x = x + layer({name: w[number] for name, w in weights.items()}, normed, topk_idx)
        return x

    return stack


def result_specs(given: LayerProblem, operation: str) -> Any:
    return RANK_SPEC if operation == "forward" else (RANK_SPEC, RANK_SPEC, weight_specs())


def operand_specs(given: LayerProblem) -> tuple[Any, ...]:
    return weight_specs(), RANK_SPEC, RANK_SPEC


def forward(stack: Layer) -> Callable[..., Any]:
    return stack


def forward_and_backward(stack: Layer, *, in_turn: bool = False) -> Callable[..., Any]:
    """The output, and gradients for the tokens and all weights. With `in_turn` nothing of the backward pass begins
    before the output is there, as in a model."""

    def run(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> Any:
        def loss(weights: Weights, x: jax.Array) -> Any:
            y = stack(weights, x, topk_idx)
            # the tokens as cotangents: random ones, since a GPU multiplies constants faster
            cotangent = jnp.tile(jax.lax.stop_gradient(x), (y.shape[0] // x.shape[0], 1))
            if in_turn:
                y, cotangent = jax.lax.optimization_barrier((y, cotangent))
            return jnp.sum(y.astype(jnp.float32) * cotangent.astype(jnp.float32)), y

        # the output is a result: XLA would not compute the last matmul for gradients alone
        (_, y), (by_weights, by_x) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)
        return y, by_x, by_weights | {"router": jax.lax.psum(by_weights["router"], AXIS)}

    return run


OPERATIONS: dict[str, Callable[[Layer], Callable[..., Any]]] = {
    "forward": forward,
    "forward+backward": forward_and_backward,
}


def largest_difference(got: Any, expected: Any) -> float:
    """Difference of two results, relative to the largest element of the second: tokens, or gradients by tokens and
    weights."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = (jnp.asarray(a, jnp.float32) for a in (one, other))
        scale = float(jnp.maximum(jnp.abs(other).max(), 1e-20))
        worst = float(np.fmax(worst, float(jnp.abs(one - other).max()) / scale))
        if not np.isfinite(float(jnp.abs(one).max())):
            return float("nan")
    return worst
