"""Decode layers compiled for TPUs without one: bundles and bytes of the experts' kernel, and what XLA adds."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import jax
import pytest

pytest.importorskip("flax", reason="the layer's configuration is the Flax layers': pip install 'xen-moe-jax[flax]'")

from benchmarks.lib import report
from benchmarks.tpu import decode
from tests.support import HANG_S, ROOT

RESULTS = ROOT / "benchmarks" / "results" / "tpu_decode.json"


def counted(generation, model, tokens, weights, path):
    """Returns the row of a layer, compiled in a process of its own: libtpu writes bundles only where it is asked before
    it is loaded. With the jax that counted the file, it is the file's."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    options = ["--generations", generation, "--models", model, "--tokens", str(tokens)]
    options += ["--weights", weights, "--json", str(path)]
    counted_with = json.loads(RESULTS.read_text())["versions"]["jax"]  # another jax makes other programs
    if generation != "v4" and jax.__version__ == counted_with:  # the file has no v4
        options += ["--check", str(RESULTS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu.decode", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(path.read_text())["results"]
    return row


def test_a_run_keeps_the_other_layers_of_a_file(tmp_path):
    row = {
        "generation": "v5p",
        "devices": 8,
        "model": "DeepSeek-V3",
        "tokens": 8,
        "weights": "int8",
        "matmul": "auto",
        "ratio": 1.0,
    }
    other = row | {"generation": "v5e", "model": "Qwen3-30B-A3B", "weights": "bfloat16"}
    document = {"versions": {"jax": "1", "libtpu": "1"}, "seed": 0, "results": [row, other]}
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(document))
    again = document | {"results": [row | {"ratio": 2.0}]}
    assert decode.merged(str(path), again) == [other, row | {"ratio": 2.0}]
    for changed in ({"versions": {"jax": "2"}}, {"seed": 1}):
        assert decode.merged(str(path), again | changed) == again["results"]
    assert decode.moved(str(path), again) == [f"{decode.key(row)}: ratio: 2.0, the file has 1.0"]
    with pytest.raises(ValueError, match="--check: the file was counted with --seed=0, not 1"):
        decode.moved(str(path), again | {"seed": 1})


def test_a_file_of_an_older_version_is_an_error_that_names_the_remedy(tmp_path):
    path = tmp_path / "decode.json"
    old = {"generation": "v5p", "model": "DeepSeek-V3", "tokens": 8, "weights": "int8", "matmul": "auto"}
    document = {"versions": report.versions(), "seed": 5, "results": [old]}
    without = {name: document[name] for name in ("versions", "results")}
    for option, (written, lacks) in itertools.product(
        ("--json", "--check"), ((document, "row 0 lacks devices: .*=5"), (without, "the file lacks seed: "))
    ):
        path.write_text(json.dumps(written))
        with pytest.raises(ValueError, match=f"decode.json: {lacks}"):
            decode.main(["--seed=5", option, str(path)])
        assert json.loads(path.read_text()) == written


def test_the_commands_of_a_file_have_its_seed():
    document = json.loads(RESULTS.read_text())
    assert document["command"] == decode.command(document["seed"]) and "--seed" not in document["command"]
    assert decode.command(3).count("--seed=3") == len(decode.PARTS)


def test_the_file_has_every_layer_of_the_page():
    """The file has bfloat16 for all models, weights of one byte for DeepSeek-V3, the layer that sglang-jax has
    measured, and the four chips of a v5p-8. One layer, whose wire alone takes longer, needs more than 1.15 times the
    time of its weights."""
    rows = {decode.key(row): row for row in json.loads(RESULTS.read_text())["results"]}
    chips = ("v5e", "v5p", "v6e", "tpu7x")
    layers = {(model, "bfloat16") for model in decode.SHOWN} | {("DeepSeek-V3", weights) for weights in decode.WEIGHTS}
    wanted = {(c, 8, m, t, w, "auto") for c, (m, w), t in itertools.product(chips, layers, decode.TOKENS)}
    wanted |= {("v5p", 4, m, t, w, "auto") for (m, w), t in itertools.product(layers, decode.TOKENS)}
    assert rows.keys() == wanted | {("tpu7x", 8, decode.ANCHOR, tokens, "bfloat16", "auto") for tokens in (1, 8)}
    anchor = rows["tpu7x", 8, decode.ANCHOR, 1, "bfloat16", "auto"]
    over = {name: row for name, row in rows.items() if row["ratio"] > 1.15}
    assert over.keys() == {("tpu7x", 8, "Qwen3-30B-A3B", 128, "bfloat16", "auto")}
    assert all(row["wire_us"] > 1.15 * row["weights_us"] for row in over.values())
    assert anchor["weights_us"] < anchor["layer_us"] < 98, anchor  # microseconds that sglang-jax has measured


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("generation", "model", "tokens", "weights"),
    [
        ("v4", "gpt-oss-120b", 8, "bfloat16"),
        ("v5e", "Qwen3-30B-A3B", 8, "bfloat16"),
        ("v5p", "gpt-oss-120b", 32, "bfloat16"),
        ("v6e", "DeepSeek-V3", 128, "bfloat16"),
        ("tpu7x", "Qwen3-30B-A3B", 32, "bfloat16"),
        ("v5e", "DeepSeek-V3", 128, "int8"),
        ("v5p", "DeepSeek-V3", 8, "int8"),
        ("v6e", "DeepSeek-V3", 32, "float8_e4m3fn"),
        ("tpu7x", "DeepSeek-V3", 8, "float8_e4m3fn"),
    ],
)
def test_the_experts_wait_for_their_weights(generation, model, tokens, weights, tmp_path):
    """The core needs less time than HBM for the weights, nothing copies rows or weights between the kernels, and with
    the jax that counted the file every figure is the file's."""
    row = counted(generation, model, tokens, weights, tmp_path / "counts.json")
    assert row["core_us"] < row["weights_us"], row
    assert row["weights_us"] < row["experts_us"] < 1.08 * row["weights_us"], row
    if row.get("one_call"):
        assert row["layer_us"] < 1.15 * row["weights_us"], row
    # Tokens are copied where a program takes and returns them; the rows of all capacity, 25 MB, and weights are not.
    assert row["largest_copy"] < 2**21, row
    # With more ranks than slots (gpt-oss), too, kernels make the tables: XLA would need 74 to 143 us.
    assert row["xla_us"] < 30, row


@pytest.mark.tpu_aot
def test_two_cores_keep_up_with_the_weights(tmp_path):
    """One core's matrix units alone need as long as HBM for Qwen3-30B's rows of 128 tokens: two cores share them."""
    row = counted("v5p", "Qwen3-30B-A3B", 128, "bfloat16", tmp_path / "counts.json")
    assert row["one_call"] and row["sums_us"] > 0, row
    assert row["weights_us"] < row["experts_us"] < 1.08 * row["weights_us"], row
    assert row["layer_us"] < 1.15 * row["weights_us"], row
    assert row["largest_copy"] == row["xla_us"] == 0, row
