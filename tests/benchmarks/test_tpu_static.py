"""`tpu-static`: which programs a run compiles, and how it adds to a file. Nothing is compiled here."""

from __future__ import annotations

import json

import pytest

from benchmarks.lib import options
from benchmarks.tpu import budget as tpu_budget
from benchmarks.tpu import static as tpu_static
from benchmarks.tpu.programs import CASES
from benchmarks.tpu.topologies import TOPOLOGIES
from tests.support import ROOT

RESULTS = ROOT / "benchmarks/results/tpu_static.json"
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
    assert len(set(everything)) == len(everything) == 5 * (4 * 2 + 1) + 2 * 2
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


def budgets(rows, generation, case):
    """(dispatch, combine) of the file by number of devices."""
    mine = [r for r in rows if (r["generation"], r["case"]) == (generation, case) and r.get("budget")]
    assert [r["operation"] for r in mine] == ["dispatch", "combine"]
    return {pair[0]["devices"]: pair for pair in zip(*(r["budget"] for r in mine), strict=True)}


def test_the_file_names_the_bound_of_every_combination():
    rows = json.loads(RESULTS.read_text())["results"]
    for generation in TOPOLOGIES:
        for case in CASES:
            found = budgets(rows, generation, case.name)
            assert list(found) == list(tpu_budget.CHIPS), (generation, case)
            for devices, pair in found.items():
                for terms in pair:
                    known = {name: terms[f"{name}_us"] for name in tpu_budget.TERMS if terms[f"{name}_us"] is not None}
                    assert terms["bound"] == max(known, key=lambda name: known[name])
                    assert ("xla" in known) == (devices in (tpu_budget.CHIPS[0], tpu_budget.CHIPS[-1]))


def test_the_targets_hold_in_the_file():
    """Counted, in microseconds: kernels and XLA's estimate of its tables, of a dispatch and a combine together."""
    rows = json.loads(RESULTS.read_text())["results"]

    def needs(generation, case, devices):
        found = tpu_budget.core_and_wire(rows, generation, case, devices)
        pair = budgets(rows, generation, case)[devices]
        assert found == (sum(b["kernels_us"] + b["xla_us"] for b in pair), sum(b["wire_us"] for b in pair))
        return found

    for generation, case, most in tpu_budget.TARGETS:
        assert needs(generation, case, 8)[0] <= most, (generation, case)
    for generation in TOPOLOGIES:
        for case in ("throughput", "throughput-bf16"):
            core, wire = needs(generation, case, 256)
            assert core <= 1.5 * wire, (generation, case, core, wire)


@pytest.mark.parametrize("cases", [["low-latency-bf16"], ["throughput-bf16", "low-latency-bf16"], None])
def test_any_choice_of_cases_can_be_drawn(cases, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'xen-moe-jax[plot]'")
    rows = json.loads(RESULTS.read_text())["results"]
    path = tmp_path / "plot.png"
    tpu_budget.plot(str(path), [row for row in rows if cases is None or row["case"] in cases])
    assert path.stat().st_size > 1000
