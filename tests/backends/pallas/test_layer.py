"""A whole MoE layer with its gradients compiled for TPUs: less temporary memory than on `jax.lax.ragged_all_to_all`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import xen_moe_jax as xm

pytest.importorskip("flax", reason="the layer's configuration is the Flax layers': pip install 'xen-moe-jax[flax]'")

from benchmarks.layers import layer_programs
from benchmarks.tpu import layer as tpu_layer
from benchmarks.tpu import layer_floor
from benchmarks.tpu import layer_programs as tpu_layer_programs
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from xen_moe_jax.experts import on_tpu
from xen_moe_jax.flax import MoEConfig, linen
from xen_moe_jax.tuning.problem import RANK_SPEC

SMALLEST = {"hidden": 3584, "experts": 64, "top_k": 8}
"""Half of DeepSeek-V3's hidden size, so that records fill their tiles as its own do; 512 tokens on 8 devices."""


def test_the_peer_computes_the_same_layer():
    """Outputs and gradients by tokens, experts and router, in float32 on CPU devices."""
    work = tpu_layer_programs.workload(8, 16, {"hidden": 32, "experts": 16, "top_k": 2})
    work = dataclasses.replace(work, dtype="float32", capacity_factor=4.0)
    config = tpu_layer_programs.config_of(work, 24, "ragged_dot")
    config = dataclasses.replace(config, kernel=xm.KernelConfig(), capacity=None)
    mesh = Mesh(np.array(jax.devices()[:8]), ("ep",))
    rng = np.random.default_rng(0)
    shapes = {"gate": (16, 32, 24), "up": (16, 32, 24), "down": (16, 24, 32), "router": (32, 16)}
    weights = {name: jnp.asarray(rng.standard_normal((1, *shape)), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.standard_normal((8 * 16, 32)), jnp.float32)
    idx = jnp.asarray(np.argsort(rng.random((8 * 16, 16)), axis=1)[:, :2], jnp.int32)
    specs = layer_programs.weight_specs()

    def run(layer):
        program = layer_programs.forward_and_backward(layer_programs.stacked(layer, 1))
        mapped = jax.shard_map(
            program, mesh=mesh, in_specs=(specs, RANK_SPEC, RANK_SPEC), out_specs=(RANK_SPEC, RANK_SPEC, specs),
            check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)(weights, x, idx)

    ours = run(layer_programs.own_layer(config, work))
    theirs = run(tpu_layer_programs.peer_layer(config, work, ragged=xm.ragged_all_to_all))
    assert layer_programs.largest_difference(theirs, ours) < 1e-4
    assert float(jnp.abs(ours[2]["router"]).max()) > 0 and float(jnp.abs(ours[1]).max()) > 0


def assert_waves_travel_beside_kernels(text):
    """Five waves of the tokens' rows come and five of the outputs go home, each while kernels make the outputs of a
    window; five waves of the cotangent's rows come, each while kernels read those of the window before it; the rows'
    gradient goes home beside the gradients by gate and up. Tables are made beside the first of what comes. Nothing is
    beside the last of what goes home in the forward pass."""
    tables = ["xen_moe_order_pairs", "xen_moe_scatter"]
    every = tpu_layer_programs.scheduled(text)
    beside = tpu_layer_programs.in_flight(every)
    assert sorted(beside[0]) == [*tables[:1] * 5, tables[1]] and beside[10] == tables[:1], every
    names = [name for name in every if name not in tables]
    found = [
        [name.removeprefix("xen_moe_").split()[0] for name in kernels]
        for kernels in tpu_layer_programs.in_flight(names)
    ]
    flights = [[name for name in kernels if name not in ("start", "done")] for kernels in found]
    outputs = ["place", "grouped_products", "grouped_products", "reduce_slots_local"]
    window = ["place", "activation_gradients", "grouped_transposed", "grouped_by_weight"]
    assert flights[:10] == [[], *[outputs] * 8, []], flights
    assert flights[10] == [] and all(sorted(flight) == sorted(window) for flight in flights[11:15]), flights
    # with the last window's part of the gradient by down
    assert len(flights) == 16 and flights[15] == ["grouped_by_weight"] * 3, flights


BOTH = ((tpu_layer_programs.OWN, "auto"), (tpu_layer_programs.PEER, "ragged_dot"))
"""The two programs that are compared, each with the name of its grouped matmul."""


def assert_less_memory(ours, theirs):
    assert ours["argument_bytes"] == theirs["argument_bytes"] and ours["output_bytes"] == theirs["output_bytes"]
    # `temp_bytes` counts gaps between buffers twice
    assert 0 < ours["allocated_bytes"] < theirs["allocated_bytes"], (ours, theirs)


@pytest.mark.tpu_aot
def test_a_layer_needs_less_memory_than_the_peer(monkeypatch):
    monkeypatch.setattr(on_tpu, "ROWS", (512, 256, 128))  # so that few rows have as many windows as many
    monkeypatch.setattr(on_tpu, "WEIGHT_ROWS", {512: 1})
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    own, peer = (
        tpu_layer_programs.compile_layer(program, "v5e", None, 512, SMALLEST, 1024, matmul) for program, matmul in BOTH
    )
    assert_less_memory(tpu_layer_programs.memory(own), tpu_layer_programs.memory(peer))
    assert "xen_moe_pack" in tpu_programs.kernels(own.as_text()) and not tpu_programs.kernels(peer.as_text())
    assert_waves_travel_beside_kernels(own.as_text())
    moved = tpu_programs.collectives(own.as_text())
    slots = 512 * SMALLEST["top_k"]
    # the router's gradient is added up over the devices; each gathers the expert, order and weight of every slot
    router, numbers = 4 * SMALLEST["hidden"] * SMALLEST["experts"], 4 * 8 * slots
    beside = sum(moved.values()) - router
    assert "ragged-all-to-all" not in moved and 3 * numbers <= beside < 5 * numbers, moved
    assert tpu_programs.collectives(peer.as_text())["ragged-all-to-all"] >= 4 * slots * SMALLEST["hidden"] * 2


def test_what_runs_beside_a_flight_is_what_the_schedule_has_there():
    """Gradients by weights run in another order than they were traced in: their rows tell. Two flights overlap."""
    order = ["xen_moe_pack", "xen_moe_start 8", "xen_moe_done 0", "xen_moe_start 8", "xen_moe_start 3", "xen_moe_place"]
    order += ["xen_moe_reduce_slots_local", "xen_moe_done 1", "xen_moe_done 2", "xen_moe_start 9"]
    order += ["xen_moe_grouped_by_weight 4096", "xen_moe_grouped_by_weight 1024", "xen_moe_done 3", "xen_moe_push"]
    found = tpu_layer_programs.in_flight(order)
    assert found == [[], order[4:7], order[5:8], order[10:12]]
    outputs, cotangents = tpu_layer.Waves([1.0], [0.5], 3, home=True), tpu_layer.Waves([], [0.25, 0.75], 8)
    counted = {"xen_moe_pack": 7.0, "xen_moe_place": 10.0, "xen_moe_reduce_slots_local": 4.0, "xen_moe_push": 2.0}
    grouped = {"xen_moe_grouped_by_weight": [2.0, 4.0]}
    steps = tpu_layer.timeline(order, counted, grouped, [1024, 4096], [outputs, cotangents])
    expected = [
        ("core", 7.0),
        ("start", 0.25),
        ("done", 0),
        ("start", 0.75),
        ("start", 0.5),
        ("core", 7.0),
        ("done", 1),
    ]
    expected += [("done", 2), ("start", 1.0), ("core", 6.0), ("done", 3), ("sends", 2.0)]
    assert steps == expected
    # 2 until the first quarter is there; three quarters and a half take 10 beside 7; 8 beside 6; 8 beside 2
    assert layer_floor.waits_us(steps, 8.0) == 2 + 3 + 2 + 6
    waves = [tpu_layer.Waves([0.25, 0.75], [0.4, 0.6], 8), outputs, tpu_layer.Waves([], [], 8)]
    both_ways = ["xen_moe_start 8", "xen_moe_done 0", "xen_moe_start 8", "xen_moe_place", "xen_moe_start 3"]
    both_ways += ["xen_moe_done 1", "xen_moe_place", "xen_moe_done 2"]
    assert tpu_layer.timeline(both_ways, counted, {}, [], waves) == [
        *[("start", 0.4), ("done", 0), ("start", 0.6), ("core", 1.25)],
        *[("start", 0.5), ("done", 1), ("core", 3.75), ("done", 2)],
    ]
    with pytest.raises(ValueError, match="were traced"):
        tpu_layer.timeline(order, counted, grouped, [1024, 1024], [outputs, cotangents])


def test_a_row_takes_the_place_of_an_earlier_one():
    row = {"topology": "v5p:2x2x4", "program": "xen_moe_jax", "matmul": "ragged_dot", "temp_bytes": 1}
    others = [row | {"topology": "v4:2x2x4"}, row | {"matmul": "tokamax"}, row | {"program": tpu_layer_programs.PEER}]
    document = {"results": [*others, row], "left_out": [{"name": "v5p:2x2x4 xen_moe_jax ragged_dot", "why": "x"}]}
    tpu_layer.put(document, row | {"temp_bytes": 2})
    assert document["results"] == [row | {"temp_bytes": 2}, others[2], others[1], others[0]]
    assert document["left_out"] == [] and tpu_layer.known(document, "v4:2x2x4", "xen_moe_jax", "ragged_dot")


@pytest.mark.tpu_aot
def test_a_decode_of_the_flax_layer_is_grouped_and_gathered():
    """Defaults choose the layout and the mode that are quickest for a decode on TPU (docs/design/tpu.md)."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    mesh = tpu_topologies.mesh("v5e")
    kernel = xm.KernelConfig(backend="pallas")
    config = MoEConfig(hidden_size=1024, intermediate_size=512, num_experts=32, top_k=8, kernel=kernel)
    assert (config.layout, kernel.mode) == ("grouped", "auto")
    layer = linen.MoE(config, mesh=mesh)
    x = jax.ShapeDtypeStruct((8 * 64, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, RANK_SPEC))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def compiled(layer):
        return jax.jit(layer.apply).trace(variables, x).lower(lowering_platforms=("tpu",)).compile().as_text()

    text = compiled(layer)
    assert tpu_programs.kernels(text) == ["xen_moe_decode_layer"] and not tpu_layer_programs.matmul_kernels(text)
    text = compiled(linen.MoE(dataclasses.replace(config, wire="float8_e4m3fn"), mesh=mesh))  # not one kernel
    own = tpu_programs.kernels(text)
    assert "xen_moe_pack_tokens" in own and "xen_moe_push" not in own, own  # records leave by XLA's all-gather
    assert "all-gather" in tpu_programs.collectives(text)
    assert "xen_moe_decode_experts" in own and not tpu_layer_programs.matmul_kernels(text)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "generation, dtype, operand, sums",
    [
        ("v5e", "int8", "s8", "s32"),
        ("tpu7x", "float8_e4m3fn", "f8e4m3fn", "f32"),
        # it would convert fp8 to float32 in front of the matmul
        pytest.param("v6e", "float8_e4m3fn", "bf16", "f32", marks=pytest.mark.slow),
    ],
)
def test_quantized_experts_are_multiplied_as_they_are(generation, dtype, operand, sums):
    """Each block of 128 of the contracted dimension is a grouped matmul of XLA's, and a block of 128 rows of a gradient
    of weights is a matmul. Their operands are in the experts' dtype where the chip multiplies it."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    mesh = tpu_topologies.mesh(generation)
    config = MoEConfig(
        hidden_size=256, intermediate_size=128, num_experts=16, top_k=2, kernel=xm.KernelConfig(backend="pallas"),
        expert_dtype=dtype, wire=dtype,
    )  # fmt: skip
    layer = linen.MoE(config, mesh=mesh)
    x = jax.ShapeDtypeStruct((8 * 64, 256), jnp.bfloat16, sharding=NamedSharding(mesh, RANK_SPEC))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def total(variables, x):
        return layer.apply(variables, x)[0].astype(jnp.float32).sum()

    run = jax.jit(jax.value_and_grad(total, (0, 1)))
    text = run.trace(variables, x).lower(lowering_platforms=("tpu",)).compile().as_text()
    calls = re.findall(r"%ragged-dot-none\S* = (\w+)\[.* custom-call\(.* operand_layout_constraints=\{(.*?\})\}", text)
    # gate and up: two blocks each; down: one; cotangents by gate and by up: one each, by down: two
    assert [kind for kind, _ in calls] == [sums] * 9, calls
    assert all(len(re.findall(rf"\b{operand}\[", operands)) == 2 for _, operands in calls), calls
    kinds = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    blocks = re.findall(rf"= {sums}\[\S* convolution\((%[\w.-]+), (%[\w.-]+)\)", text)
    assert [(kinds[left], kinds[right]) for left, right in blocks].count((operand, operand)) >= 3, blocks


STEP = re.compile(r"^\s*%xen_moe_(?:(start|done)|grouped_(products|transposed|by_weight))\S* = .*tpu_custom_call")


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", ["v5p", pytest.param("v5e", marks=pytest.mark.slow)])
def test_exchanges_of_chunks_travel_while_the_experts_compute(generation):
    """In the scheduled program of a layer with its gradients, the dispatch of the second chunk starts before the
    matmuls of the first one and is done behind them. The combine of the first chunk starts before those of the second
    and is done behind them, and behind matmuls of gradients which XLA puts there."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    sizes = {"hidden": 512, "experts": 16, "top_k": 2}
    own = tpu_layer_programs.OWN
    text = tpu_layer_programs.compile_layer(own, generation, None, 256, sizes, 256, "auto", chunks=2).as_text()
    assert "is_scheduled=true" in text
    lines = text[text.index("ENTRY") :].splitlines()
    steps = [next(filter(None, match.groups())) for match in map(STEP.match, lines) if match]
    exchanges = [at for at, step in enumerate(steps) if step in ("start", "done")]
    assert [steps[at] for at in exchanges] == ["start", "done"] * 4
    assert not exchanges[0] and steps.count("products") == 2 * 2 and steps.count("by_weight") == 2 * 3, steps
    first, second, third, last = (steps[at : until + 1] for at, until in itertools.batched(exchanges, 2))
    assert second == ["start", *["products"] * 2, "done"], steps
    assert third.count("products") == 2, steps
    assert first == last == ["start", "done"], steps


def test_programs_are_those_of_the_command():
    assert tpu_layer.PROGRAMS == (tpu_layer_programs.OWN, tpu_layer_programs.PEER)


def test_the_floor_of_a_layer():
    """A layer whose wire is shorter than its matmuls: 12 us, of which the kernels that send hide 2 and 3 a pass."""
    chip = tpu_topologies.TOPOLOGIES["v5p"]
    rows, sizes = 64 * 8, {"hidden": 128, "experts": 16, "width": 64}
    least = layer_floor.matmuls_us(chip, rows, 2, 128, 64)
    assert least == 9 * 2 * (rows * 128 + rows * 64 + 2 * 128 * 64) / chip.hbm_bytes_per_s * 1e6  # bytes take longer
    many = layer_floor.matmuls_us(chip, 1 << 20, 2, 4096, 4096)
    assert many == 9 * 2 * 2**44 / chip.flops_per_s * 1e6
    row = {"devices": 8, "rows": rows, "wire_us": 12.0, "xla_us": 5.0, "ragged_us": []}
    row["by_kernel_us"] = {"xen_moe_push": 4.0, "xen_moe_reduce_slots": 6.0, "xen_moe_place": 1.0}
    found = layer_floor.floor(row, chip, sizes)
    assert found["hidden_us"] == round(least + 5 + 11, 1) and found["goal_us"] == round(1.15 * 12, 1)
    assert found["scheduled_us"] == round(least + 5 + 11 + 2, 1)
    sends = [["sends", 2.0], ["sends", 6.0], ["sends", 2.0]]
    flying = row | {"timeline": [*sends, ["start", 1.0], ["core", 2.5], ["done", 0]]}
    # the last exchange has kernels of 2.5 us beside it; the others have 2, 6 and 2
    assert layer_floor.floor(flying, chip, sizes)["scheduled_us"] == round(least + 5 + 11 + 2 + 0.5, 1)
    busy = layer_floor.floor(row | {"hbm_us": {"xen_moe_push": 3.0, "xen_moe_place": 8.0}}, chip, sizes)
    assert busy["hidden_us"] == round(least + 5 + 18, 1) and busy["kernels_us"] == 18  # HBM is the limit of one of them
    peer = layer_floor.floor(row | {"by_kernel_us": {}, "ragged_us": [least / 9 + 7, least / 18]}, chip, sizes)
    assert peer["scheduled_us"] == round(least + 5 + 7 + 12, 1)  # one of XLA's matmuls is slower than the peak
    row |= {"topology": "v5p:2x2x1", "matmul": "auto", "grouped_us": {"xen_moe_grouped_products": least / 3 + 2}}
    document = {"results": [row], "sizes": sizes}
    (line,) = layer_floor.parts(document, {"v5p:2x2x1": chip})[2:]
    assert line == f"| v5p:2x2x1 | 4 | 1 | 6 | 0 | 0 | 2 | 0 | 0 | 5 | {18 / least:.3f} |"


RAGGED = """\
%ragged-dot-none.2 = bf16[40960,2048]{1,0} custom-call(%a, /*index=5*/%b), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[33]{0}, bf16[40960,7168]{1,0}, bf16[32,7168,2048]{2,1,0}}, \
frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="128,7168,128"}
%ragged-dot-none = f32[32,7168,2048]{2,1,0} custom-call(%a, /*index=5*/%b), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[33]{0}, bf16[40960,7168]{1,0}, bf16[40960,2048]{1,0}}, \
frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="128,3968,128"}
"""


def test_the_grouped_matmuls_of_xla_are_bound_by_what_they_read_again():
    """libtpu reads the rows for each of 16 tiles of columns, in both."""
    sizes = (7168, 2048)
    assert tpu_layer_programs.ragged_dots(RAGGED) == [
        (sizes, False, (128, 7168, 128), 2),
        (sizes, True, (128, 3968, 128), 4),
    ]
    chip, rows, weight = tpu_topologies.TOPOLOGIES["v5e"], 4096 * 8, 7168 * 2048
    moved = [
        2 * (16 * rows * 7168 + 32 * weight + rows * 2048),
        2 * (16 * rows * 7168 + 2 * rows * 2048) + 4 * 32 * weight,
    ]
    found = tpu_layer.ragged_us(RAGGED, chip, (rows // 32,) * 32)
    assert np.allclose(found, [n / chip.hbm_bytes_per_s * 1e6 for n in moved], rtol=0.01)


RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks/results/tpu_layer.json"
COUNTS = ("by_kernel_us", "grouped_us", "hbm_us")


def rows_of_the_file():
    return {tuple(row[k] for k in tpu_layer.IDENTITY): row for row in json.loads(RESULTS.read_text())["results"]}


REFUSED = ("v5e:8x8", tpu_layer_programs.PEER, "ragged_dot")
"""The program that XLA does not compile: its exchange on a torus of 64 chips, for which routes are limited."""


def test_the_file_has_every_program():
    """Each row is there with all terms of the floor, but for the one program that XLA refuses."""
    everything = tpu_layer.wanted(list(tpu_layer.TARGETS), list(tpu_layer.PROGRAMS), list(tpu_layer.MATMULS))
    assert rows_of_the_file().keys() == set(everything) - {REFUSED}
    (left_out,) = json.loads(RESULTS.read_text())["left_out"]
    assert left_out["name"] == " ".join(REFUSED) and "not supported in limited ICI routing" in left_out["why"]
    for row in rows_of_the_file().values():
        assert {"rows", "ragged_us", "grouped_us", "xla_us", "wire_us"} <= set(row) and not row["uncounted"], row


def test_the_command_of_the_file_has_its_seed():
    document = json.loads(RESULTS.read_text())
    assert document["command"] == tpu_layer.command(document["seed"]) == tpu_layer.command(4).removesuffix(" --seed=4")
    fixed = {name: document[name] for name in ("versions", "sizes", "seed")}
    assert tpu_layer.earlier(str(RESULTS), fixed) == document
    assert tpu_layer.earlier(str(RESULTS), fixed | {"seed": 4}) is None


@pytest.mark.parametrize("topology", [name for name in tpu_layer.TARGETS if name != REFUSED[0]])
def test_a_full_size_layer_needs_less_memory_than_the_peer(topology):
    """This compares rows of the file; `test_the_file_is_of_these_programs` compiles the programs again."""
    rows = rows_of_the_file()
    assert_less_memory(*(rows[topology, program, matmul] for program, matmul in BOTH))


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", tpu_layer.TARGETS)
def test_the_file_is_of_these_programs(topology, tmp_path):
    """The command counts them anew, in a process of its own: libtpu takes the request for a dump when it is loaded."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    found = {}
    for program, matmul in BOTH:
        path = tmp_path / f"{matmul}.json"
        command = [sys.executable, "-m", "benchmarks.tpu.layer", "--topologies", topology, "--programs", program]
        command += ["--matmuls", matmul, "--json", str(path)]
        subprocess.run(command, cwd=RESULTS.parents[2], check=True, timeout=1800)
        document = json.loads(path.read_text())
        found |= {tuple(row[k] for k in tpu_layer.IDENTITY): row for row in document["results"]}
        refused = [left_out["name"] for left_out in document["left_out"]]
        assert refused == [" ".join(REFUSED)] * ((topology, program, matmul) == REFUSED), document["left_out"]
    known = {name: row for name, row in rows_of_the_file().items() if name in found}
    assert len(known) == len(found) == 2 - (topology == REFUSED[0])
    for name, row in known.items():
        again = found[name]
        for counts in COUNTS:
            for kernel, us in row.get(counts, {}).items():
                assert abs(again[counts][kernel] - us) <= 0.03 * us, (name, counts, kernel)
        assert again["ragged_us"] == row["ragged_us"], name
        for term in ("xla_us", "temp_bytes", "allocated_bytes"):
            assert abs(again[term] - row[term]) <= 0.03 * row[term], (name, term, again[term], row[term])
