"""A whole MoE layer with its gradients, compiled for a TPU without one: ours, and one on `jax.lax.ragged_all_to_all`.

The peer is written as MaxText's sparse layer with expert parallelism is: every slot's row is sorted by expert, one
segment goes to each rank, rows are sorted again by local expert, and all of it back; slots are added up by an einsum in
float32. Sorts have the gradient that MaxText gives them, a gather by the inverse order. One thing differs: its buffer
has the capacity of ours, where MaxText's holds the worst case, `R*T*min(L, K)` rows, and would need many times as much.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import xen_moe_jax as xm
from benchmarks.layers import layer_programs
from benchmarks.layers.layer_programs import Layer, Weights
from benchmarks.peers.ragged import exclusive
from benchmarks.tpu import topologies as tpu_topologies
from xen_moe_jax.experts import grouped_matmul as choices
from xen_moe_jax.experts.mlp import built_in
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.tuning.problem import AXIS, RANK_SPEC
from xen_moe_jax.tuning.workload import Workload, round_up

OWN = "xen_moe_jax"
PEER = "jax.lax.ragged_all_to_all"
CAPACITY_FACTOR = 1.25
"""Rows of both layers over the mean, as a job would allocate them."""


@jax.custom_vjp
def in_order(rows: jax.Array, order: jax.Array) -> jax.Array:
    """`rows[order]`, `order` a permutation; its transpose is a gather, not a scatter."""
    return rows[order]


def _in_order_forward(rows: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rows[order], order


def _in_order_backward(order: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return cotangent[jnp.argsort(order)], None


in_order.defvjp(_in_order_forward, _in_order_backward)


def capacity(work: Workload) -> int:
    """Rows that a rank's experts take, in both layers."""
    return round_up((work.capacity_factor or CAPACITY_FACTOR) * work.tokens * work.top_k)


def peer_layer(
    config: MoEConfig, work: Workload, ragged: Callable[..., jax.Array] = jax.lax.ragged_all_to_all
) -> Layer:
    """The layer on `ragged`, one segment for each rank."""
    ranks, local, rows_here = work.ranks, work.local_experts, capacity(work)
    experts = built_in(config)

    def layer(weights: Weights, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        topk_weights = layer_programs.router_weights(work, weights["router"], x, topk_idx)
        me = jax.lax.axis_index(AXIS)
        flat = topk_idx.reshape(-1)
        by_expert = jnp.argsort(flat)
        rows = in_order(jnp.repeat(x, work.top_k, axis=0), by_expert)
        counts = jax.lax.all_gather(jnp.bincount(flat, length=ranks * local).astype(jnp.int32), AXIS)
        counts = counts.reshape(ranks, ranks, local)  # [source, destination, local expert]
        sizes = counts.sum(2)

        def exchange(rows: jax.Array, room: int, sizes: jax.Array) -> jax.Array:
            """`sizes [source, destination]` rows."""
            into = jnp.zeros((room, rows.shape[1]), rows.dtype)
            starts, landing = exclusive(sizes[me]), exclusive(sizes)[me]
            return ragged(rows, into, starts, sizes[me], landing, sizes[:, me], axis_name=AXIS)

        arrived = exchange(rows, rows_here, sizes)
        expert = jnp.tile(jnp.arange(local, dtype=jnp.int32), ranks)
        # unused rows come last, with the last expert's
        expert = jnp.repeat(expert, counts[:, me].reshape(-1), total_repeat_length=rows_here)
        filled = jnp.arange(rows_here) < counts[:, me].sum()
        by_local_expert = jnp.argsort(jnp.where(filled, expert, local))
        y = experts(in_order(arrived, by_local_expert), counts[:, me].sum(0), weights)
        y = in_order(y, jnp.argsort(by_local_expert))
        # landing places of the way there are where the rows of the way back begin, and the other way round
        back = exchange(y, flat.size, sizes.T)
        slots = in_order(back, jnp.argsort(by_expert)).reshape(*topk_idx.shape, -1)
        return jnp.einsum("tkh,tk->th", slots.astype(jnp.float32), topk_weights).astype(x.dtype)

    return layer


def layer_of(program: str, config: MoEConfig, work: Workload) -> Layer:
    """`OWN` or `PEER`."""
    return layer_programs.own_layer(config, work) if program == OWN else peer_layer(config, work)


def workload(ranks: int, tokens: int, sizes: dict[str, int]) -> Workload:
    return Workload(tokens, sizes["hidden"], sizes["experts"], sizes["top_k"], ranks, capacity_factor=CAPACITY_FACTOR)


def config_of(work: Workload, width: int, grouped_matmul: str) -> MoEConfig:
    kernel = xm.KernelConfig(backend="pallas")
    config = layer_programs.layer_config(work, width, grouped_matmul, kernel)
    return dataclasses.replace(config, capacity_factor=None, capacity=capacity(work))


def compile_layer(
    program: str,
    generation: str,
    topology: str | None,
    tokens: int,
    sizes: dict[str, int],
    width: int,
    grouped_matmul: str = "ragged_dot",
    *,
    chunks: int = 1,
) -> Any:
    """Output, and gradients by the tokens and all weights, in bfloat16.

    Args:
      topology: as libtpu names it; None is that of 8 devices.
      tokens: tokens of a device. sizes: `hidden`, `experts`, `top_k`. width: features inside an expert.
      chunks: of the tokens, whose exchanges travel while the experts compute other chunks.
    """
    mesh = tpu_topologies.mesh(generation, topology=topology)
    assert mesh.axis_names == (AXIS,)
    work = workload(mesh.size, tokens, sizes)
    config = config_of(work, width, grouped_matmul)
    if chunks > 1:
        config = dataclasses.replace(config, num_chunks=chunks, capacity=None)
    layer = layer_programs.stacked(layer_of(program, config, work), 1)
    specs = layer_programs.weight_specs()
    mapped = jax.shard_map(
        # only exchanges in waves could begin before their turn
        layer_programs.forward_and_backward(layer, in_turn=(program, grouped_matmul, chunks) == (OWN, "auto", 1)),
        mesh=mesh,
        in_specs=(specs, RANK_SPEC, RANK_SPEC),
        out_specs=(RANK_SPEC, RANK_SPEC, specs),
        check_vma=False,
    )

    def struct(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    experts, hidden = work.local_experts * work.ranks, work.hidden
    shapes = {"gate": (experts, hidden, width), "up": (experts, hidden, width), "down": (experts, width, hidden)}
    weights = {name: struct((1, *shape), jnp.bfloat16, specs[name]) for name, shape in shapes.items()}
    weights["router"] = struct((1, hidden, experts), jnp.float32, specs["router"])
    x = struct((work.ranks * tokens, hidden), jnp.bfloat16, RANK_SPEC)
    topk_idx = struct((work.ranks * tokens, work.top_k), jnp.int32, RANK_SPEC)
    with for_other_devices(grouped_matmul):
        return jax.jit(mapped).trace(weights, x, topk_idx).lower(lowering_platforms=("tpu",)).compile()


@contextlib.contextmanager
def for_other_devices(grouped_matmul: str) -> Iterator[None]:
    """Inside this context a layer chooses its matmuls as on a TPU, though this process has CPUs alone. With "tokamax",
    tokamax chooses its kernels for the devices of the mesh. With any other name, tokamax counts as not installed, so
    that "auto" is this library's choice."""
    if grouped_matmul == "tokamax":
        from tokamax.config import cross_compile

        with cross_compile(True):
            yield
        return
    installed = choices.installed
    choices.installed = lambda: False
    try:
        yield
    finally:
        choices.installed = installed


def matmul_kernels(text: str) -> dict[str, int]:
    """Kernels of a compiled program that are not ours: the grouped matmuls, XLA's own or tokamax's, and how many."""
    found = re.findall(r"%([\w-]+?)(?:\.\d+)*(?:\.\w+)* = [^\n]*tpu_custom_call", text)
    return dict(collections.Counter(name for name in found if not name.startswith("xen_moe")))


KERNEL = re.compile(
    r"%((xen_moe_[a-z_]+)(?:\.\w+)*) = [^\n]*custom-call\(([^)]*)\)[^\n]*tpu_custom_call"
    r"[^\n]*?operand_layout_constraints={(.*?})}"
)


def scheduled(text: str) -> list[str]:
    """Returns the names of the library's kernels in the order in which a compiled program runs them. Some have a number
    behind them: a gradient by weights that of its rows, a start that of the records in its buffer, and a done the
    number of its start, counted from 0."""
    found, starts = [], []
    for instruction, name, operands, shapes in KERNEL.findall(text[text.index("ENTRY") :]):
        if name == "xen_moe_grouped_by_weight":
            name += " " + re.findall(r"(?:bf16|f32)\[(\d+),\d+\]", shapes)[0]
        if name == "xen_moe_start":
            starts.append(instruction)
            name += " " + re.findall(r"s32\[(\d+),\d+,\d+\]", shapes)[0]
        if name == "xen_moe_done":  # its last operand is a semaphore of the start
            semaphore = re.escape(operands.split("%")[-1].strip())
            of = re.findall(rf"%{semaphore} = [^\n]*get-tuple-element\(%([\w.]+)\)", text)
            name += f" {starts.index(of[0])}"
        found.append(name)
    return found


def in_flight(names: list[str]) -> list[list[str]]:
    """Returns the kernels between each start and its own done, of the kernels that a program runs in this order."""
    begins = [at for at, name in enumerate(names) if name.startswith("xen_moe_start")]
    return [names[at + 1 : names.index(f"xen_moe_done {n}")] for n, at in enumerate(begins)]


def ragged_dots(text: str) -> list[tuple[tuple[int, int], bool, tuple[int, ...], int]]:
    """XLA's grouped matmuls in a compiled program, in the order of its text.

    Returns:
      Of each: the last two dimensions `[A, B]` of its weights; True if it makes their gradient; its tiles of rows, of
      `A` and of `B`; and the bytes of an element of its result.
    """
    found = []
    for line in (line for line in text.splitlines() if "ragged_dot_tiling=" in line):
        result, shape = re.search(r"= (\w+)\[([\d,]*)\]", line).groups()  # type: ignore[union-attr]
        given = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", line)[1]  # type: ignore[index]
        *_, left, right = ([int(n) for n in dims.split(",")] for dims in re.findall(r"\[([\d,]*)\]", given))
        tiles = tuple(int(n) for n in re.search(r'ragged_dot_tiling="([\d,]*)"', line)[1].split(","))  # type: ignore[index]
        by_weight = len(right) == 2
        sizes = (left[1], right[1]) if by_weight else (right[1], right[2])
        found.append((sizes, by_weight, tiles, 4 if result == "f32" else 2))
    return found


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of one device.

    `temp_bytes` is XLA's figure for temporaries, in which gaps between buffers count twice; `allocated_bytes` is the
    size of the buffers, with gaps counted once.
    """
    found = compiled.memory_analysis()
    given = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "temp_bytes": found.temp_size_in_bytes,
        "allocated_bytes": found.total_allocation_bytes - given,
        "argument_bytes": found.argument_size_in_bytes,
        "output_bytes": found.output_size_in_bytes,
    }
