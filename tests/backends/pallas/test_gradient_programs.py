"""Gradients compiled ahead of time by libtpu: the exchanges of the compiled programs of many chips, and the parts left
to XLA.
"""

from __future__ import annotations

import math
import re

import pytest

pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from xen_moe_jax.backends.pallas import headers

pytestmark = pytest.mark.tpu_aot

EXPERTS, TOP_K = 256, 8
ON_ONE_AXIS = {
    "xen_moe_push",
    "xen_moe_index_rows",
    "xen_moe_scatter",
    "xen_moe_place",
    "xen_moe_order_pairs",
    "xen_moe_reduce_slots",
    "xen_moe_reduce_ranks",
}


def gradient_program(generation: str, tokens: int, hidden: int, layout: str, **mesh_options) -> str:
    """The gradient of a dispatch and a weighted combine (ranked: weights applied between them), by rows and by router
    weights."""
    mesh = tpu_topologies.mesh(generation, **mesh_options)
    axes = mesh.axis_names
    options = {"num_experts": EXPERTS, "axis_name": axes if len(axes) > 1 else axes[0], "layout": layout}
    # not "auto", which gathers the records of few tokens on all ranks
    options["config"] = xm.KernelConfig(backend="pallas", mode="throughput")
    if layout != "padded":
        options["capacity"] = tpu_programs.capacity_for(tokens, TOP_K)

    def loss(x, weights, idx, inside):
        routed = xm.dispatch(x, idx, weights, wire="float8_e4m3fn", **options)
        y = routed.x * inside
        if layout == "ranked":
            y = y * jnp.sum(routed.topk_weights, axis=1, keepdims=True).astype(y.dtype)
        return jnp.sum(xm.combine(y, routed.handle, config=options["config"]).astype(jnp.float32) ** 2)

    def struct(shape, dtype):
        sharding = jax.NamedSharding(mesh, P(axes))
        return jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=sharding)

    mapped = jax.shard_map(
        jax.value_and_grad(loss, argnums=(0, 1, 3)),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=(P(), P(axes)),
        check_vma=False,
    )
    operands = (
        struct((tokens, hidden), jnp.bfloat16),
        struct((tokens, TOP_K), jnp.float32),
        struct((tokens, TOP_K), jnp.int32),
        struct((hidden,), jnp.bfloat16),
    )
    return jax.jit(mapped).trace(*operands).lower(lowering_platforms=("tpu",)).compile().as_text()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("generation", "topology", "tokens", "layout"),
    [
        ("v5e", "v5e:4x8", 32, "grouped"),
        slow("v5e", "v5e:4x8", 32, "padded"),
        slow("v5p", "v5p:4x4x4", 128, "ranked"),
        slow("v5e", "v5e:16x16", 4096, "grouped"),
    ],
)
def test_gradients_exchange_counts_and_their_own_slots(generation, topology, tokens, layout):
    """At 256 chips less than 1 MiB; no gather or scatter of a scalar for every (rank, token, slot)."""
    text = gradient_program(generation, tokens, 1024, layout, topology=topology)
    assert set(tpu_programs.kernels(text)) == ON_ONE_AXIS
    moved = tpu_programs.collectives(text)
    assert sum(moved.values()) <= 2**20, moved
    found = tpu_bundles.scalar_operations(text)
    assert all(found.get(kind, 0) <= tokens * TOP_K for kind in ("gather", "scatter")), found


def crossed(text: str) -> list[int]:
    """Words of each exchange between slices that is not of records: libtpu makes a receive from the host of it."""
    found = (tuple(map(int, dims.split(","))) for dims in re.findall(r"= \((?:s32|f32)\[([\d,]*)\][^=]* recv\(", text))
    return [math.prod(dims) for dims in found if not (len(dims) == 4 and dims[-1] == 128)]


@pytest.mark.parametrize(("topology", "shape", "tokens"), [("v5e:4x4", (2, 16), 64), slow("v5e:8x16", (2, 128), 4096)])
def test_gradients_on_two_slices(topology, shape, tokens):
    """Beside records and the counts of the dispatch: a bit for each (rank, token) in a combine and in its gradient, and
    a rank's own slots; less than 1 MiB at 256 chips.
    """
    text = gradient_program(
        "v5e", tokens, 1024, "grouped", axes=("dcn", "ici"), shape=shape, num_slices=2, topology=topology
    )
    slices, ranks = shape[0], math.prod(shape)
    across, within = crossed(text), sum(tpu_programs.collectives(text).values())
    counts = 4 * ranks * (EXPERTS + 2 * ranks + 2 * slices)
    assert within + 4 * sum(across) <= counts + 2**20, (within, across)
    flags, dropped = ranks * -(-tokens // 32), min(headers.DROPPED_AT_ONCE, ranks * tokens)
    assert flags in across and max(across) <= max(flags, dropped, tokens * TOP_K, 1024), across
