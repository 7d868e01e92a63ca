"""The modes layer and model, and the training benchmark: they run, and notice wrong results."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import xen_moe_jax as xm
from benchmarks import layer_tables
from benchmarks.layers import layer, layer_programs
from benchmarks.lib import options
from benchmarks.lib.verify import WrongResultError
from tests.support import HANG_S, ROOT, quick_compiler
from xen_moe_jax.flax._chunks import Chunk, through_experts
from xen_moe_jax.tuning.problem import make_problem

SIZES = "--platform cpu --tokens 16 --hidden 128 --experts 8 --top-k 2 --ranks 2 --capacity-factor 4 --dtype float32"
WAYS = ("xen_moe_jax, 2 chunks", "padded all_to_all", "all_gather + psum_scatter")


def run(*command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": quick_compiler.flags(2),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = (sys.executable, *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment, check=False)


def test_layers_of_every_way_agree(tmp_path):
    out, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    out.write_text(json.dumps({"moe_mlp": "another program's rows", "results": "of the last run"}))
    command = ["-m", "benchmarks", "layer", *SIZES.split(), "--ways", *WAYS]
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    done = run(*command, "--repeats", "1", "--inner", "1", "--lock", str(tmp_path / "lock"), "--json", str(out), *plot)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    assert document["layers"] == 1 and document["width"] == 48
    assert document["moe_mlp"] == "another program's rows"
    for operation in ("forward", "forward+backward"):
        rows = {row["name"]: row for row in document["results"] if row["operation"] == operation}
        assert set(rows) == {"xen_moe_jax", "experts alone", *WAYS}
        for name, row in rows.items():
            assert row["us_median"] > 0 and row["tokens_per_second_per_rank"] > 0 and row["matmul_share"] > 0, row
            assert ("max difference" in row) is (name in WAYS)
            assert row.get("max difference", 0) < 1e-4
    assert "tokens/s/rank" in done.stdout and (not plot or picture.stat().st_size > 10_000)


def test_a_stack_of_layers(tmp_path):
    out = tmp_path / "model.json"
    command = ["-m", "benchmarks", "model", *SIZES.split(), "--ways", "padded all_to_all"]
    done = run(*command, "--repeats", "1", "--inner", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    assert document["layers"] == layer_programs.MODEL_LAYERS
    assert all("us_median" in row for row in document["results"]) and len(document["results"]) == 6
    lines = layer_tables.layers(document)
    assert "capacity factor 4.0, 4 layers" in lines[0] and len(lines) == 4 + 3
    assert lines[-1].startswith("| padded all_to_all | ") and lines[-1].count("|") == lines[2].count("|")


def test_results_that_differ_are_an_error():
    class Given:
        class work:
            compute_dtype = jnp.dtype("float32")

    expected = {"a": jnp.ones((4, 3)), "b": 2 * jnp.ones(3)}
    same = {"a": jnp.ones((4, 3)) * (1 + 1e-6), "b": 2 * jnp.ones(3)}
    assert layer.compare(Given, "a way", same, expected) < 1e-5  # type: ignore[arg-type]
    for wrong in (same | {"b": jnp.zeros(3)}, same | {"a": jnp.full((4, 3), jnp.nan)}):
        with pytest.raises(WrongResultError, match="a way: differs by"):
            layer.compare(Given, "a way", wrong, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["xen_moe_jax", "xen_moe_jax, 4 chunks", "xen_moe_jax, alignment 128"])
def test_dropped_rows_are_those_of_the_layer(name):
    sizes = SIZES.replace("--capacity-factor 4", "--capacity-factor 0.6 --routing zipf").split()
    asked = options.parse(["layer", *sizes])
    work = options.workload(asked, 2)
    config = layer_programs.layer_config(work, 48, "ragged_dot", xm.KernelConfig())
    given = layer_programs.LayerProblem(make_problem(work), config, 1)
    config = dataclasses.replace(config, **layer_programs.OWN[name], experts=lambda rows, *_: rows)

    @jax.jit
    @jax.shard_map(mesh=given.problem.mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"))
    def dropped(x, topk_idx):
        tokens = Chunk(x, topk_idx, jnp.ones_like(topk_idx, jnp.float32))
        return through_experts(config, dict.fromkeys(("gate", "up", "down"), x), tokens)[1][None]

    inputs = given.problem.inputs
    expected = int(dropped(inputs.x, inputs.topk_idx[0]).sum())
    assert layer_programs.dropped_rows(given, name) == expected
    assert (expected > 0) == (name != "xen_moe_jax, alignment 128"), "its padding has room for all rows here"


def test_ways_that_drop_rows_are_timed_and_not_compared(monkeypatch):
    """By their capacities two ways drop different rows: they differ, and neither is wrong."""
    work = options.workload(options.parse(["layer", *SIZES.split()]), 2)
    given = layer_programs.LayerProblem(
        make_problem(work), layer_programs.layer_config(work, 48, "auto", xm.KernelConfig()), 1
    )
    monkeypatch.setattr(layer_programs, "operands_for", lambda *_: ())
    pairs = [("forward", name) for name in ("xen_moe_jax", "padded all_to_all")]
    programs = [jax.jit(lambda n=n: n * jnp.ones(3)).lower().compile() for n in (1, 2)]
    with pytest.raises(WrongResultError, match="padded all_to_all: differs by 1"):
        list(layer.measured(given, (), pairs, programs, 1, 1))  # type: ignore[arg-type]
    monkeypatch.setattr(layer_programs, "dropped_rows", lambda given, name: 3 * (name == "padded all_to_all"))
    plain, padded = layer.measured(given, (), pairs, programs, 1, 1)  # type: ignore[arg-type]
    assert "dropped_rows" not in plain and padded["dropped_rows"] == 3
    assert "us_median" in padded and "max difference" not in padded
    assert layer.results_table([plain, padded]).splitlines()[-1].split()[-2:] == ["-", "3"]


def test_without_the_plain_layer_nothing_is_timed_unchecked():
    ways = (layer_programs.PLAIN, "another")
    programs = ["XlaRuntimeError: out of memory", jax.jit(lambda: jnp.ones(3)).lower().compile()]
    pairs = [("forward", name) for name in ways]
    plain, another = layer.measured(None, (), pairs, programs, 1, 1)  # type: ignore[arg-type]
    assert plain["error"] == "XlaRuntimeError: out of memory"
    assert another["error"].startswith("not timed: xen_moe_jax, ") and "us_median" not in another


@pytest.mark.parametrize("routing", ["learned", "uniform"])
def test_the_training_benchmark(tmp_path, routing):
    out = tmp_path / "train.json"
    sizes = "--layers 2 --hidden 64 --heads 2 --dense-size 128 --experts 8 --width 32 --top-k 2 --context 32 --batch 2"
    options = f"{sizes} --steps 2 --warm-up 1 --routing {routing}"
    done = run("-m", "benchmarks", "train", *options.split(), "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    tokens = 2 * 2 * 32
    # attention and head of 2 layers, one of them dense, one with 2 of 8 experts
    weights = 2 * 4 * 64 * 64 + 3 * 64 * 128 + 3 * 64 * 32 * 2 + 64 * 8 + 64 * 256
    assert document["tokens_per_step"] == tokens and document["multiplied_weights_per_token"] == weights
    assert document["flops_per_step"] == (6 * weights + 6 * 2 * 64 * 32) * tokens
    assert document["seconds_per_step"] > 0 and document["mfu"] is None
    assert document["last_loss"] < document["first_loss"] and document["time"]
    assert 1 <= document["fullest_rank"] <= document["fullest_expert"] < (1.4 if routing == "uniform" else 4)
    assert "| MFU | unknown |" in layer_tables.training(document | {"mfu": None})


def test_the_nnx_layer_as_a_user_writes_it(tmp_path):
    out = tmp_path / "nnx.json"
    sizes = "--tokens 16 --hidden 64 --width 32 --experts 8 --top-k 2 --inner 1 --repeats 1"
    plans = ("4 chunks", "capacity 1.25")
    done = run("-m", "benchmarks", "nnx-layer", *sizes.split(), "--plans", *plans, "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    rows = {(row["name"], row["operation"]): row for row in document["results"]}
    assert set(rows) == {(name, op) for name in ("defaults", *plans) for op in ("forward", "forward+backward")}
    assert rows["4 chunks", "forward"]["max difference"] < 0.03 and rows["defaults", "forward"]["dropped"] == 0
    limited = rows["capacity 1.25", "forward"]
    assert ("max difference" in limited) == (limited["dropped"] == 0)
    lines = layer_tables.nnx_layers(document)
    assert len(lines) == 4 + 3 and lines[-1].startswith("| capacity 1.25 | ")


def test_tables_name_what_failed_and_what_was_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_tables, "RESULTS", tmp_path)
    assert layer_tables.TABLES["experts"]() == "**Not measured on GPUs yet** (`python -m benchmarks grouped-matmul`)."
    row = {"us_median": 2000.0, "tokens_per_second_per_rank": 5e5, "memory_bytes": {"temp": 2**20}, "matmul_share": 0.5}
    document = {
        "command": "a command", "device": "A GPU", "versions": {"jax": "1"}, "width": 8, "layers": 1, "notes": ["slow"],
        "workload": dict.fromkeys(("tokens", "hidden", "experts", "top_k", "ranks", "capacity_factor"), 1),
        "results": [
            {"name": "a way", "operation": "forward", **row},
            {"name": "a way", "operation": "forward+backward", "error": "Error: a | b\nmore"},
        ],
    }  # fmt: skip
    (tmp_path / "layer_a.json").write_text(json.dumps(document))
    text = layer_tables.TABLES["whole layers"]()
    assert "| a way | 2.00 | 500 | 50% | 1 | - | - | - | - |" in text
    assert "- a way, forward+backward: Error: a / b more" in text and "- slow." in text and "`a command`" in text
