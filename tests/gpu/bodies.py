"""Test bodies that run on any backend and mesh, in one process or many, and compare two backends bit for bit on the
devices.

The conformance class compares with the oracle from one process. These bodies compare a kernel backend with the
reference backend inside one compiled program instead, so that only a count of differing elements leaves the devices:
large shapes, meshes with further axes, permuted devices and several processes all run the same code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.lib.verify import defined_rows, local_total, unequal_bits
from tests.support import oracle
from tests.support.cases import ROUTINGS, Case

REFERENCE = xm.KernelConfig(backend="reference")
REDISPATCH_HIDDEN = 128


@dataclasses.dataclass(frozen=True)
class Setup:
    """A case on a mesh.

    Attributes:
      axis_name: the expert-parallel axes; the mesh may have others, each of whose positions is an independent group.
      num_groups: independent groups of ranks.
      num_ranks: ranks of one group.
    """

    case: Case
    mesh: Mesh
    axis_name: tuple[str, ...]
    num_tokens: int
    hidden: int

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.axis_name)

    @property
    def num_groups(self) -> int:
        return self.mesh.size // self.num_ranks

    @property
    def experts(self) -> int:
        return self.case.experts(self.num_ranks)

    @property
    def spec(self) -> P:
        """Every mesh position has tokens of its own; groups are the slow index."""
        others = tuple(name for name in self.mesh.axis_names if name not in self.axis_name)
        return P((*others, *self.axis_name))

    def place(self, values: np.ndarray, spec: P | None = None) -> jax.Array:
        sharding = NamedSharding(self.mesh, self.spec if spec is None else spec)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def draw_routing(setup: Setup, routing: str) -> np.ndarray:
    """int32 `[groups * R, T, K]`."""
    rng = np.random.default_rng(zlib.crc32(f"{setup.case.name}/{routing}".encode()))
    shape = (setup.num_ranks, setup.num_tokens, setup.case.top_k)
    groups = [ROUTINGS[routing](rng, shape, setup.experts) for _ in range(setup.num_groups)]
    return np.concatenate(groups).astype(np.int32)


def resolve_capacity(setup: Setup, routings: list[np.ndarray]) -> int | None:
    """A number for "exact" (the largest need of any group and routing) and "one_below"."""
    case = setup.case
    if not isinstance(case.capacity, str):
        return case.capacity
    groups = [g for idx in routings for g in np.split(idx, setup.num_groups)]
    need = max(oracle.needed_rows(g, setup.experts, case.layout, case.alignment) for g in groups)
    return need if case.capacity == "exact" else need - 1


def outcome(
    setup: Setup, capacity: int | None, config: xm.KernelConfig, operands: tuple, gradients: bool
) -> dict[str, Any]:
    """Every result of the operations on one rank: name -> (array, which of its leading entries are specified).

    `operands`: `x [T,H], topk_idx [T,K], topk_weights [T,K], seed uint32[1]`; expert outputs are drawn from the seed,
    and rows that no token owns are NaN, so that an operation that reads one shows it.
    """
    case = setup.case
    x, topk_idx, topk_weights, seed = operands
    wire, _ = case.wire_parts
    scaled, scale_format = case.block_scaled_parts
    tokens = xm.quantize(x, dtype=scaled, scale_format=scale_format) if scaled else x
    options = {
        "num_experts": setup.experts,
        "axis_name": setup.axis_name,
        "layout": case.layout,
        "capacity": capacity,
        "alignment": case.alignment,
        "config": config,
    }
    routed = xm.dispatch(tokens, topk_idx, topk_weights if case.weights else None, wire=case.wire, **options)
    handle = routed.handle
    keep = defined_rows(case.layout, routed)
    results: dict[str, Any] = {f"rows {i}": (leaf, keep) for i, leaf in enumerate(jax.tree.leaves(routed.x))}
    for name in ("positions", "recv_counts"):
        results[name] = getattr(handle, name), None
    results["num_dropped"] = routed.num_dropped.reshape(1), None
    if case.layout == "ranked":
        results |= {"topk_idx": (routed.topk_idx, None), "topk_weights": (routed.topk_weights, keep)}
    else:
        results["weights"] = routed.weights, keep

    y = draw_outputs(jax.tree.leaves(routed.x)[0].shape, x.dtype, seed)
    owned = (
        jnp.zeros(keep.size, bool)
        .at[jnp.where(handle.positions >= 0, handle.positions, keep.size).reshape(-1)]
        .set(True, mode="drop")
    )
    y = jnp.where(owned.reshape(*keep.shape, 1), y, jnp.nan)
    x2 = x[:, :REDISPATCH_HIDDEN]
    results["redispatch"] = xm.redispatch(x2, handle, config=config), keep
    for weighted in (False, True) if case.layout != "ranked" else (False,):
        out = xm.combine(y, handle, weighted=weighted, wire=case.wire, config=config)
        results[f"combine weighted={weighted}"] = out, None
    if gradients and wire is None and scaled is None:
        results |= gradient_outcome(x, topk_idx, topk_weights, y, handle, keep, options)
    return results


def gradient_outcome(x, topk_idx, topk_weights, y, handle, keep, options) -> dict[str, Any]:
    """Cotangents of dispatch (through a combine) and of combine (through a redispatch)."""

    def rows(x):
        return xm.dispatch(x, topk_idx, topk_weights, **options).x

    (dx,) = jax.vjp(rows, x)[1](y)
    (dy,) = jax.vjp(lambda y: xm.combine(y, handle, weighted=False, config=options["config"]), y)[1](x)
    return {"gradient of x": (dx, None), "gradient of y": (dy, keep)}


def draw_outputs(shape: tuple[int, ...], dtype: Any, seed: jax.Array) -> jax.Array:
    """Expert outputs in [-2, 2): a hash of the element's number, exact in every dtype and the same on every backend."""
    number = jnp.arange(math.prod(shape), dtype=jnp.uint32) + seed[0]
    mixed = (number ^ (number >> 15)) * jnp.uint32(0x2C1B3C6D)
    mixed = mixed ^ (mixed >> 12)
    return (((mixed & 0xFF).astype(jnp.float32) - 128.0) / 64.0).astype(dtype).reshape(shape)


def draw_operands(setup: Setup, routing: np.ndarray, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Host arrays, leading axis all mesh positions times tokens; weights negative too; one seed each."""
    rng = np.random.default_rng(seed)
    positions = setup.mesh.size
    x = rng.standard_normal((positions * setup.num_tokens, setup.hidden), np.float32)
    dtype = "bfloat16" if setup.case.block_scaled else setup.case.dtype
    weights = rng.uniform(-1.5, 1.5, (positions * setup.num_tokens, setup.case.top_k)).astype(np.float32)
    flat = routing.reshape(positions * setup.num_tokens, setup.case.top_k)
    return x.astype(jnp.dtype(dtype)), flat, weights, np.arange(positions, dtype=np.uint32) + np.uint32(seed)


def differing_elements(
    setup: Setup,
    routing: str,
    config: xm.KernelConfig,
    *,
    against: xm.KernelConfig = REFERENCE,
    gradients: bool = True,
) -> dict[str, int]:
    """Elements that differ in any bit between `config` and `against`, by result, over the ranks of this process."""
    idx = draw_routing(setup, routing)
    program = comparison(setup, resolve_capacity(setup, [idx]), config, against, gradients, outcome)
    counts = jax.block_until_ready(program(*(setup.place(a) for a in draw_operands(setup, idx))))
    return {name: local_total(count) for name, count in counts.items()}


@functools.lru_cache(maxsize=64)
def comparison(
    setup: Setup, capacity: int | None, config: xm.KernelConfig, against: xm.KernelConfig, gradients, results
):
    """The jitted comparison; routings of one shape share it. `results` is `outcome`."""

    def compare(*operands):
        ours = results(setup, capacity, config, operands, gradients)
        theirs = results(setup, capacity, against, operands, gradients)
        counts = {}
        for name, (expected, keep) in theirs.items():
            where = jnp.ones((), bool) if keep is None else keep
            counts[name] = unequal_bits(ours[name][0], expected, where)
        return counts

    return jax.jit(
        jax.shard_map(compare, mesh=setup.mesh, in_specs=(setup.spec,) * 4, out_specs=setup.spec, check_vma=False)
    )


def assert_same(setup: Setup, routing: str, config: xm.KernelConfig, **options: Any) -> None:
    """Fails naming the results that differ."""
    counts = differing_elements(setup, routing, config, **options)
    wrong = {name: count for name, count in counts.items() if count}
    assert counts and not wrong, f"{setup.case.name}/{routing}, {config}: elements that differ: {wrong}"
