"""Programs of the CUDA backend, compiled ahead of time for H100s by XLA's GPU compiler: the order of their calls, and
their copies. No GPU is needed, but the library's CUDA module and the plugin of `jax[cuda13]`. CI runs it over the wheel
(test_wheel.py).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.gpu import async_programs
from tests.support import HANG_S, gpu_topology, processes
from xen_moe_jax.backends import load
from xen_moe_jax.backends.base import BackendUnavailable

pytestmark = pytest.mark.gpu_aot

RANKS = 4
CONFIG = xm.KernelConfig(backend="cuda")
NAMES = jax.checkpoint_policies.save_only_these_names("xen_moe_rows", "xen_moe_handle")
LITTLE = 4 * async_programs.TOKENS * async_programs.TOP_K
"""Bytes: of a rank's routing. Nothing larger is ever copied."""


def absent(reason: str) -> None:
    assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), reason
    pytest.skip(reason)


@pytest.fixture(scope="module")
def mesh():
    """Four H100s."""
    if jax.default_backend() == "gpu":
        pytest.skip("JAX has GPUs here, and these programs are for others: run this file without a GPU")
    try:
        load("cuda").check_available()
        return gpu_topology.mesh(RANKS, "ep")
    except (BackendUnavailable, RuntimeError) as reason:
        absent(str(reason))


@pytest.fixture(scope="module")
def program(mesh):
    """`(body, way, config) -> str`: the schedule of one of the bodies of `async_programs`."""
    here = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS])
    sharding = NamedSharding(mesh, P("ep"))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in async_programs.arguments(here)]

    def compiled(body, way=async_programs.SPLIT, config=CONFIG):
        on_rank = lambda *args: body(way, config, *args)  # noqa: E731
        mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        text = jax.jit(mapped).lower(*given).compile().as_text()
        assert "is_scheduled=true" in text
        return text

    return compiled


def computations(text):
    """Computations with calls of this library: the program, or the body of its loop."""
    return [part for part in text.split("\n\n") if 'custom_call_target="xen_moe_' in part]


def schedules(text):
    """For each such computation: these calls and the matmuls, in their order."""
    ours, matmul = r'custom_call_target="xen_moe_(\w+)"', r'%gemm_fusion\S* = .* fusion\(|"__cublas\$|(?<= )dot\('
    return [[call or "matmul" for call in re.findall(f"{ours}|{matmul}", part)] for part in computations(text)]


def between_start_and_done(order):
    """Returns the calls between each start and the next done."""
    ends = [order.index("done", at) for at, name in enumerate(order) if name.endswith("_start")]
    starts = [at for at, name in enumerate(order) if name.endswith("_start")]
    return [order[start + 1 : end] for start, end in zip(starts, ends, strict=True)]


def training(remat):
    """A layer's loss and gradients. All matmuls of the forward pass are needed."""

    def body(way, config, x, idx, weights, a, w):
        def loss(x, weights, a, w):
            out, after = async_programs.one_layer(way, config, x, idx, weights, a, w)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(after))

        again = {"none": loss, "all": jax.checkpoint(loss), "names": jax.checkpoint(loss, policy=NAMES)}[remat]
        return [v[None] for v in jax.tree.leaves(jax.value_and_grad(again, (0, 1, 2, 3))(x, weights, a, w))]

    return body


def test_a_matmul_runs_between_start_and_done(program):
    layer = ["dispatch_start", "matmul", "done", "combine_start", "matmul", "done"]
    assert schedules(program(async_programs.one_layer)) == [layer]
    assert schedules(program(async_programs.layers_in_a_scan)) == [layer]  # the body of the loop


def test_vmap_fuses_no_slices_with_an_exchange_that_writes_into_its_output(mesh):
    """XLA's fusion of slices with a call forgets that the call's result is its operand with more rows."""

    def exchange(rows, output, sizes):
        options = {"axis_name": "ep", "config": CONFIG}
        return xm.ragged_all_to_all(rows, output, sizes * 0, sizes, sizes * 0, sizes, **options)

    mapped = jax.shard_map(jax.vmap(exchange), mesh=mesh, in_specs=P(None, "ep"), out_specs=P(None, "ep"))
    rows, sizes = ((3, 4 * 64, 32), jnp.float32), ((3, 4 * RANKS), jnp.int32)
    sharding = NamedSharding(mesh, P(None, "ep"))
    given = [jax.ShapeDtypeStruct(*of, sharding=sharding) for of in (rows, rows, sizes)]
    text = jax.jit(mapped).lower(*given).compile().as_text()
    (found,) = [part for part in text.split("\n\n") if "output_to_operand_aliasing" in part]
    assert not found.lstrip().startswith("%dynamic-slice-fusion"), found


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_start_and_done_between_nodes_are_as_far_apart(program, mode):
    nodes = xm.KernelConfig(backend="cuda", ranks_per_node=2, mode=mode)
    assert schedules(program(async_programs.one_layer, config=nodes)) == schedules(program(async_programs.one_layer))


def test_whole_operations_run_where_nothing_is_to_overlap(program):
    (order,) = schedules(program(async_programs.one_layer, async_programs.WHOLE))
    assert sorted(order) == ["combine", "dispatch", "matmul", "matmul"]


def test_one_matmul_runs_between_start_and_done_of_two_batches(program):
    (order,) = schedules(program(async_programs.two_batches))
    two = ["matmul", "done", "done"]
    starts_and_dones = ["dispatch_start", "dispatch_start", *two, "combine_start", "combine_start", *two]
    assert [name for name in order if name not in ("dispatch", "combine")] == starts_and_dones


@pytest.mark.parametrize(("remat", "starts"), [("none", 2), ("all", 4), ("names", 3)])
def test_every_async_operation_of_a_training_step_has_a_matmul_to_itself(program, remat, starts):
    """Whole operations transpose the two of the forward pass. With remat these start again, but for a dispatch whose
    names are saved.
    """
    (order,) = schedules(program(training(remat)))
    gaps = between_start_and_done(order)
    assert len(gaps) == starts and all("matmul" in gap for gap in gaps), order
    assert len([name for name in order if name in ("combine", "redispatch", "dispatch")]) == 2, order


@pytest.mark.parametrize("body", [*async_programs.BODIES.values(), training("none")], ids=lambda f: f.__name__)
def test_nothing_is_copied(program, body):
    """Start and done alias the pending arrays through their calls, and operands stay where they are."""
    (part,) = computations(program(body))
    copies = re.findall(r"%(\S+) = (?:f|s|u|bf)(\d+)\[([\d,]*)\]\S* copy(?:-start)?\(", part)
    bits = {name: int(width) * math.prod(map(int, filter(None, shape.split(",")))) for name, width, shape in copies}
    assert not {name: size for name, size in bits.items() if size > 8 * LITTLE}


# -- programs of another process ---------------------------------------------------------------------------------------

LOADER = """
import pathlib, sys
import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P
import xen_moe_jax  # nothing else of the library is used here
from tests.support import gpu_topology, processes

program = export.deserialize(pathlib.Path(sys.argv[1]).read_bytes())
sharding = NamedSharding(gpu_topology.mesh(program.nr_devices, "ep"), P("ep"))
given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in program.in_avals]
print(jax.jit(program.call).lower(*given).compile().as_text())
"""


def exported(devices, body=async_programs.one_layer):
    here = jax.make_mesh((RANKS,), ("ep",), devices=devices)
    sharding = NamedSharding(here, P("ep"))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in async_programs.arguments(here)]
    on_rank = lambda *args: body(async_programs.WHOLE, CONFIG, *args)  # noqa: E731
    mapped = jax.jit(jax.shard_map(on_rank, mesh=here, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    names = ("dispatch", "combine", "dispatch_start", "combine_start", "done")
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"xen_moe_{name}") for name in names]
    return jax.export.export(mapped, platforms=("cuda",), disabled_checks=checks)(*given)


def test_an_exported_program_compiles_in_a_process_that_lowered_nothing(mesh, tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with flatbuffers")
    path = tmp_path / "program"
    path.write_bytes(exported(jax.devices()[:RANKS]).serialize())
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(path)],
        env=processes.environment(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (order,) = schedules(result.stdout)
    assert sorted(order) == ["combine", "dispatch", "matmul", "matmul"]


def test_programs_for_elsewhere_name_devices_by_their_place(mesh, program):
    """By id where XLA places the program by ids, by place in the mesh where `jax.export` knows no ids."""
    places = [-1 - i for i in range(RANKS)]
    given = (exported(jax.devices()[:RANKS][::-1]).mlir_module(), program(async_programs.one_layer))
    for text in given:
        lists = re.findall(r"devices = (?:dense<|array<i64: )\[?([-\d, ]+)", text)
        assert lists and all([int(key) for key in keys.split(",")] == places for keys in lists), text[:2000]
