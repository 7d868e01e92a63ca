"""`--mode tpu-static`: which programs a run compiles, and how it adds to a file. Nothing is compiled here."""

from __future__ import annotations

import json
import pathlib

import pytest

from xen_moe_jax.benchmark import command, options, tpu_static
from xen_moe_jax.benchmark.tpu_programs import CASES
from xen_moe_jax.benchmark.tpu_topologies import TOPOLOGIES

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks/results/tpu_static.json"
FIXED = {"versions": {"jax": "1"}, "sizes": {"hidden": 8}, "seed": 0, "tokens": None}


def test_arguments_name_what_there_is():
    assert list(options.TPU_GENERATIONS) == list(TOPOLOGIES)
    assert list(options.TPU_CASES) == [case.name for case in CASES]


def test_rows_of_a_generation_and_of_a_case():
    assert tpu_static.wanted(["v6e"], ["low-latency"]) == [
        ("v6e", "xen_moe_jax", "low-latency", "dispatch"),
        ("v6e", "xen_moe_jax", "low-latency", "combine"),
    ]
    everything = tpu_static.wanted(None, None)
    assert len(set(everything)) == len(everything) == 5 * (3 * 2 + 1) + 2 * 2
    parts = [key for g in TOPOLOGIES for case in CASES for key in tpu_static.wanted([g], [case.name])]
    assert sorted(parts) == sorted(everything)


def test_a_run_keeps_what_a_file_holds(tmp_path):
    path = tmp_path / "static.json"
    assert tpu_static.earlier_rows(str(path), FIXED) == {} == tpu_static.earlier_rows(None, FIXED)
    row = {"generation": "v4", "program": "xen_moe_jax", "case": "throughput", "operation": "combine", "hbm_us": 1.0}
    path.write_text(json.dumps(FIXED | {"results": [row]}))
    assert tpu_static.earlier_rows(str(path), FIXED) == {("v4", "xen_moe_jax", "throughput", "combine"): row}
    with pytest.raises(ValueError, match=r"holds rows of versions .*'jax': '1'.*this run has .*'jax': '2'"):
        tpu_static.earlier_rows(str(path), FIXED | {"versions": {"jax": "2"}})


def test_the_file_of_the_project_says_what_it_lacks():
    document = json.loads(RESULTS.read_text())
    keys = [tuple(row[k] for k in ("generation", "program", "case", "operation")) for row in document["results"]]
    everything = tpu_static.wanted(None, None)
    assert keys == [key for key in everything if key in keys]
    assert document["left_out"] == [" ".join(key) for key in everything if key not in keys]


def test_generations_need_their_mode(capsys):
    assert command.main(["--generations", "v4"]) == 1
    assert "--generations v4: needs --mode tpu-static" in capsys.readouterr().err
