"""`tpu-static`: which programs a run compiles, and how it adds to a file. Nothing is compiled here."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest

from benchmarks.lib import options
from benchmarks.tpu import budget as tpu_budget
from benchmarks.tpu import static as tpu_static
from benchmarks.tpu.programs import CASES
from benchmarks.tpu.topologies import TOPOLOGIES
from tests.support import ROOT, processes

RESULTS = ROOT / "benchmarks/results/tpu_static.json"
FIXED = {"versions": {"jax": "1"}, "sizes": {"hidden": 8}, "seed": 0, "tokens": None}


def test_arguments_name_what_there_is():
    assert list(options.TPU_GENERATIONS) == list(TOPOLOGIES)
    assert list(options.TPU_CASES) == [case.name for case in CASES]
    assert options.TPU_OPERATIONS == tpu_static.OPERATIONS


def test_rows_of_a_generation_and_of_a_case():
    assert tpu_static.wanted(["v6e"], ["low-latency"]) == [
        ("v6e", "xen_moe_jax", "low-latency", "dispatch"),
        ("v6e", "xen_moe_jax", "low-latency", "combine"),
    ]
    everything = tpu_static.wanted(None, None)
    assert len(set(everything)) == len(everything) == 5 * (4 * 2 + 1) + 2 * 4
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
        for case in CASES:
            core, wire = needs(generation, case.name, 256)
            assert core <= tpu_budget.MOST_OF_WIRE * wire, (generation, case.name, core, wire)


def test_the_hosts_of_eight_devices_have_the_same_counts():
    """tpu_hosts.json is made by another command, and kernels that change move both: neither may be older."""
    rows = json.loads(RESULTS.read_text())["results"]
    found = json.loads((RESULTS.parent / "tpu_hosts.json").read_text())["hosts"].values()
    hosts = [host for host in found if host["devices"] == 8]
    assert len(hosts) == 3
    for host in hosts:
        for case in CASES:
            pair = budgets(rows, host["generation"], case.name)[8]
            mine = [row for row in host["rows"] if row["case"] == case.name]
            for row, terms in zip(mine, pair, strict=True):
                counted = sum(row["kernels"].values()), row["xla_us"], row["wire_us"]
                known = terms["kernels_us"], terms["xla_us"], terms["wire_us"]
                assert counted == pytest.approx(known, abs=0.06), (host["topology"], row, terms)


@pytest.mark.parametrize("cases", [["low-latency-bf16"], ["throughput-bf16", "low-latency-bf16"], None])
def test_any_choice_of_cases_can_be_drawn(cases, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'xen-moe-jax[plot]'")
    rows = json.loads(RESULTS.read_text())["results"]
    path = tmp_path / "plot.png"
    tpu_budget.plot(str(path), [row for row in rows if cases is None or row["case"] in cases])
    assert path.stat().st_size > 1000


def test_a_count_that_has_moved_is_named():
    known = {"kernels": ["a"], "bundles": {"a": {"step": 1, "turn": {"send": 2}}, "b": {"step": 3}}, "temp_bytes": 5}
    again = {"kernels": ["a"], "bundles": {"a": {"step": 1, "turn": {"send": 4}}, "b": {"step": 3}}, "temp_bytes": 6}
    assert tpu_static.moved(known, known | {"compile_seconds": 9}) == []
    assert tpu_static.moved(known, again) == [
        "bundles of a: {'step': 1, 'turn': {'send': 4}}, the file has {'step': 1, 'turn': {'send': 2}}",
        "temp_bytes: 6, the file has 5",
    ]
    assert tpu_static.moved(known, known | {"hbm_bytes": 7}) == ["hbm_bytes: 7, the file has None"]
    large = known | {"largest": {"temp_bytes": 8}, "budget": [{"devices": 8, "wire_us": 1.0}, {"devices": 16}]}
    other = known | {"largest": {"temp_bytes": 9}, "budget": [{"devices": 8, "wire_us": 2.0}, {"devices": 16}]}
    assert tpu_static.moved(large, other) == [
        "budget: {'devices': 8, 'wire_us': 2.0}, the file has {'devices': 8, 'wire_us': 1.0}",
        "most devices: temp_bytes: 9, the file has 8",
    ]


def test_a_row_that_a_file_lacks_is_no_agreement(tmp_path):
    path = tmp_path / "static.json"
    path.write_text(json.dumps(FIXED | {"results": []}))
    keys = tpu_static.wanted(["v5p"], ["low-latency"], ["combine"])
    assert keys == [("v5p", "xen_moe_jax", "low-latency", "combine")]
    with pytest.raises(ValueError, match="has no row v5p xen_moe_jax low-latency combine"):
        tpu_static.check(str(path), keys, {}, FIXED, None)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_the_counts_of_the_file_are_those_of_the_kernels(generation):
    """Compiled again, every count is the same, to the last bundle; all cases by `slow`."""
    check_file(generation, "--cases", "low-latency", "--operations", "dispatch", "combine")


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_all_counts_of_the_file_are_those_of_the_kernels(generation):
    check_file(generation)


def check_file(generation: str, *arguments: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    found = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    versions = json.loads(RESULTS.read_text())["versions"]
    if found != {name: versions[name] for name in found}:
        pytest.skip(f"the file was counted with {versions}, here are {found}")
    command = [sys.executable, "-m", "benchmarks", "tpu-static", "--check", str(RESULTS), "--generations", generation]
    (done,) = processes.run_all([[*command, *arguments]], seconds=3000, env=processes.environment())
    assert done.ok, f"make the file again: python -m benchmarks tpu-static --json {RESULTS}\n{done.output[-4000:]}"
