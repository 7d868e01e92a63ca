"""Bundles of compiled kernels stay within budgets, so that a slower kernel fails; the counter itself is checked
first."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import dump as tpu_dump
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from benchmarks.tpu.bundles import Grouping, Part, Visited, Work
from tests.support import ROOT

DUMP = """\
   0x0   :  { %1 = sld [smem:x] }
   0x1 LB: > { %2 = vld [vmem:y] } /* Start region 10 */
   0x2   : > { %3 = dma.done.wait %s }
   0x3   : > { %4 = sbr.rel (%p1) target = $region20 }
   0x4   :  {}
   0x5 LB: >> { %5 = dma.hbm_to_vmem [thread:z] } /* Start region 11 */
   0x6   :  {}
   0x7   : >> { %6 = sld [smem:x]  ;;  %7 = vst [vmem:y] }
   0x8   : > { %8 = sbr.rel (!%p2) target = $region11 }
   0x9   :  {}
   0xa PF: > { %9 = sbr.rel (%p3) target = $region30 } /* Start/End empty region 20 */
   0xb   :  {}
   0xc   : > { %10 = vwait.ge [sflag:c], 0 }
   0xd LB: >> { %11 = vsyncadd.remote %s, 1 } /* Start region 12 */
   0xe   : > { %12 = sbr.rel (!%p4) target = $region12 }
   0xf   :  {}
  0x10 LB: >> { %13 = vld [vmem:y]  ;;  %14 = vld [vmem:y] } /* Start region 13 :: Start/End empty region 30 */
  0x11   : > { %15 = sbr.rel (!%p5) target = $region13 }
  0x12   :  {}
  0x13   : > { %16 = vst [vmem:y] }
  0x14   :  { %17 = sbr.rel (!%p6) target = $region10 }
  0x15   :  {}
  0x16 PF:  { %18 = sst [smem:x] }
"""
"""Text of a kernel as libtpu writes it: a bundle behind each branch runs before the branch is taken. Bundles 0xc to
0xf, which wait for other ranks, run in one step of many."""


def test_loops_of_a_dump():
    top = tpu_dump.loops(DUMP)
    (grid,) = top.inner
    assert tpu_dump.delay_slots(DUMP) == 1
    assert (top.bundles, grid.bundles, [loop.bundles for loop in grid.inner]) == (2 + 4, 9, [5, 3])
    assert grid.inner[0].operations == {"dma.hbm_to_vmem": 1, "sld": 1, "vst": 1}
    assert grid.inner[1].operations == {"vld": 2}
    assert top.bundles + grid.bundles + 5 + 3 == len(DUMP.splitlines())


def test_a_loop_without_its_branch_is_an_error():
    with pytest.raises(ValueError, match="no branch leads back to the loops that begin at 0x5"):
        tpu_dump.loops(DUMP.replace("target = $region11", "target = $region99"))


def test_two_cores_share_a_kernel():
    shared = DUMP.replace("%1 = sld [smem:x]", "%1 = shalt.err /* scheckeq: BarrierMegacore cookie */")
    alone, both = (tpu_bundles.count(tpu_dump.loops(text), Work(10)) for text in (DUMP, shared))
    assert (alone.cores, both.cores) == (1, 2) and both.total == alone.total / 2


def test_count_of_a_dump():
    work = Work(10, (Part("fetch", tpu_bundles.FETCH, 100), Part("add", "vld", 1000, at_least=2)))
    counted = tpu_bundles.count(tpu_dump.loops(DUMP), work)
    assert (counted.step, counted.turn) == (9, {"fetch": 5, "add": 3})
    assert counted.total == 6 + 10 * 9 + 100 * 5 + 1000 * 3
    both = Work(1, (Part("all", "", 1, copies=1),))
    assert tpu_bundles.count(tpu_dump.loops(DUMP), both).turn == {"all": 5 + 3}
    with pytest.raises(ValueError, match="no loop with vperm for rotate"):
        tpu_bundles.count(tpu_dump.loops(DUMP), Work(1, (Part("rotate", "vperm", 1),)))


@pytest.mark.parametrize(("rows", "most", "turns"), [(0, 64, 0), (63, 64, 7 + 7), (340, 64, 5 + 2 + 4), (64, 32, 8)])
def test_turns_of_waiting(rows, most, turns):
    assert tpu_bundles.waits(rows, most) == turns
    assert tpu_bundles.mean_waits(10 * rows, 10, most) >= 10 * (rows // most)


def test_scalar_operations_of_a_program():
    text = "  %a = s32[8,4096]{1,0} gather(%x, %y)\n  %b = (s32[320]{0}, s32[320]{0}) sort(%c, %d)\n"
    assert tpu_bundles.scalar_operations(text) == {"gather": 8 * 4096, "sort": 320}


def test_collectives_of_a_program():
    """Two of one channel and of different results, and one in three computations, which is asynchronous."""
    text = """\
%begin (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} all-reduce(%p), channel_id=3
}
%end (p: f32[8]) -> f32[8] {
  %b = f32[8]{0} all-reduce(%p), channel_id=3
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %c = (s32[]{:T(128)}, s32[]) all-reduce(%x, %y), channel_id=1
  %d = f32[4,2]{1,0} all-reduce(%z), channel_id=1
  %e = s32[16,1]{1,0} all-to-all(%z), channel_id=1
  %f = s32[16,1]{1,0} all-to-all(%z), channel_id=1
  %g = (bf16[2], bf16[4]) all-gather-start(%z), channel_id=4
}
"""
    assert tpu_programs.collectives(text) == {"all-reduce": 32 + 8 + 32, "all-to-all": 128, "all-gather": 8}


def test_an_operation_without_an_estimate_adds_nothing():
    text = '%a = fusion() {"estimated_cycles":"70"}\n%b = fusion() {"estimated_cycles":"9223372036854775807"}\n'
    assert tpu_bundles.xla_cycles(text) == 70


def test_random_routing_counts_what_it_says():
    routing = tpu_bundles.random_routing(256, 8, 64, 8, Grouping(16), seed=0)
    assert 256 * 8 * 0.9 < routing.placed < 256 * 8 * 1.1
    assert routing.sent < routing.placed
    pairs = routing.pairs
    assert pairs.blocks == 8 and 8 * pairs.tiles + pairs.singles == routing.placed
    assert routing.sent / 16 <= pairs.groups <= routing.sent / 16 + pairs.blocks
    assert routing.placed / 16 <= pairs.turns <= 8 * pairs.groups
    assert len(routing.sources) == 8 and sum(routing.sources) == routing.sent
    assert len(routing.experts) == 8 and sum(routing.experts) == routing.placed
    assert routing.placed <= routing.visited(32, padded=False) <= routing.visited(32, padded=True)


def test_visited_pairs_of_a_few_depths():
    """Twenty pairs of three rows, one of one: two groups, of 3 + 3 turns, the second with 5, 4 and 4 pairs. Waits: 48
    rows and 16 records, then 13 and 5, by eights and by ones.
    """
    depths = np.zeros(100, int)
    depths[:20], depths[50] = 3, 1
    expected = Visited(1, 1, 2, 6, 6, 5 + 4 + 4, 1, 6 + 2 + 1 + 5 + 5)
    assert tpu_bundles.visited_pairs(depths, Grouping(16)) == expected
    few = np.zeros(5 * 256, int)
    few[::256], few[1200] = 2, 1
    assert tpu_bundles.visited_pairs(few, Grouping(16)).blocks == 5
    # three blocks of the first core have three pairs, two of the second one three
    assert tpu_bundles.visited_pairs(few, Grouping(16, parts=2)) == Visited(5, 2, 2, 4, 0, 6 + 5, 6, 6 + 3 + 5 + 3)


def test_tables_of_sources_that_send_little():
    """32 of 256 sources with 4 records each share a table of 128; a source with more than a table has several."""
    routing = tpu_bundles.uniform_routing(128, 256, 256, 8, Grouping(16), seed=0)
    even = dataclasses.replace(routing, sources=(4,) * 256)
    assert tpu_bundles.tables_of(even) == (8, 256)
    assert tpu_bundles.tables_of(dataclasses.replace(even, sources=(120, 9) + (0,) * 254)) == (2, 256)
    few = dataclasses.replace(routing, tokens=512, ranks=8, sources=(500,) * 8)
    assert tpu_bundles.tables_of(few) == (16, 16)


@pytest.mark.parametrize(
    ("generation", "gb_per_s"), [("v4", 87.5), ("v5e", 43.75), ("v5p", 175.0), ("v6e", 87.5), ("tpu7x", 87.5)]
)
def test_all_to_all_bandwidth_of_a_torus(generation, gb_per_s):
    assert np.isclose(1e9 / tpu_topologies.TOPOLOGIES[generation].all_to_all_us(1e9) / 1e3, gb_per_s)


@pytest.mark.parametrize(
    ("generation", "devices", "gb_per_s"),
    # a ring of 16 carries twice the bytes that a chip sends, a ring of 8 and a line of 4 once, a ring of 4 half of them
    [("v5e", 16, 46.9), ("v5e", 256, 24.9), ("v5p", 64, 196.9), ("v5p", 256, 99.6), ("tpu7x", 128, 99.2)],
)
def test_all_to_all_bandwidth_of_larger_tori(generation, devices, gb_per_s):
    us = tpu_topologies.TOPOLOGIES[generation].all_to_all_us(1e9, devices)
    assert np.isclose(1e9 / us / 1e3, gb_per_s, rtol=2e-3)


def test_uniform_routing_is_like_a_random_one():
    model = tpu_bundles.uniform_routing(512, 8, 256, 8, Grouping(16), seed=0)
    drawn = tpu_bundles.random_routing(512, 8, 256, 8, Grouping(16), seed=0)
    for name in ("sent", "placed"):
        assert np.isclose(getattr(model, name), getattr(drawn, name), rtol=0.05)
    for name in ("blocks", "groups", "turns", "tiles"):
        assert np.isclose(getattr(model.pairs, name), getattr(drawn.pairs, name), rtol=0.08)
    assert sum(model.experts) == model.placed and sum(model.sources) == model.sent


XLA = "XLA (its own estimate)"
RESULTS = ROOT / "benchmarks/results/tpu_static.json"
SUMS = {"group": 830, "turn": 40, "fetch": 122, "fetch one": 32, "add": 375, "send": 52, "send one": 28, "wait": 11}
BUDGETS = {  # bundles of a step and of a turn of each loop; a few percent over those of jax 0.11.2, libtpu 0.0.48
    "throughput": {
        "xen_moe_push": {"step": 160, "encode": 1750, "send": 101, "wait": 10},
        "xen_moe_place": {"step": 190, "fetch": 28, "decode": 462, "wait": 10},
        "xen_moe_index_rows": {"step": 96, "run": 31, "fill": 12, "table": 860, "column": 32, "slots": 84},
        "xen_moe_order_pairs": {"step": 400, "leave": 725},
        "xen_moe_reduce_slots": {"step": 113} | SUMS | {"add": 390},  # on each of two cores
        "xen_moe_reduce_ranks": {"step": 145, "fetch": 27, "add": 148, "wait": 10},
    },
    "low-latency": {
        "xen_moe_pack_tokens": {"step": 1790},
        "xen_moe_index_tokens": {"step": 650, "slots": 61},
        "xen_moe_place": {"step": 540, "fetch": 39, "wait": 10},
        "xen_moe_order_tokens": {"step": 630},
        "xen_moe_reduce_slots": {"step": 123} | SUMS,
        "xen_moe_reduce_ranks": {"step": 116, "fetch": 37, "add": 148, "wait": 10},
    },
}
REDISPATCH, EXCHANGE = "redispatch", "exchange"
OTHER_BUDGETS = {  # of the gradient of a combine, and of `ragged_all_to_all`
    "xen_moe_push": {"step": 155, "encode": 475, "send": 101, "wait": 10},
    "xen_moe_scatter": {"step": 565, "slots": 86},
    "xen_moe_place": {"step": 190, "fetch": 28, "decode": 126, "wait": 10},
    "xen_moe_exchange": {"step": 0, "start": 35, "wait": 18},
}
MOST_US = {"throughput": 2330.0, "low-latency": 70.0}
"""Most microseconds of all kernels and XLA's tables of a dispatch and a combine, on v5p; the wire needs 2402 and 71."""
MOST_XLA = {"throughput": 410_000, "low-latency": 2200}
"""Cycles of XLA's tables, by its own estimate: a decode's are left with the check of expert numbers."""
LARGEST_SCALAR_OPERATION = 4096
"""Elements of a gather, scatter or sort that XLA may keep: lists of blocks, not of tokens."""


def compiled_operations(generation, case, tmp_path, operations=("dispatch", "combine")):
    """In a process of its own: libtpu takes the request for a dump when it is loaded."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    out = tmp_path / "bundles.json"
    command = [sys.executable, "-m", "benchmarks.tpu.bundles", "--generation", generation, "--case", case]
    command += ["--operations", *operations]
    done = subprocess.run(
        [*command, "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())["operations"]


def loops_of(operations):
    """Bundles of every step and loop, by kernel."""
    return {k: {"step": o["step"][k], **turn} for o in operations.values() for k, turn in o["turn"].items()}


def loops_in_the_file(generation, case, operations):
    rows = json.loads(RESULTS.read_text())["results"]
    mine = [r for r in rows if (r["generation"], r["case"]) == (generation, case) and "bundles" in r]
    mine = [r for r in mine if r["operation"] in operations]
    return {k: {"step": b["step"], **b["turn"]} for r in mine for k, b in r["bundles"].items()}


def assert_the_file_is_of_these_kernels(found, generation, case, operations=("dispatch", "combine")):
    """The published figures are of the kernels as they are, in both directions."""
    known = loops_in_the_file(generation, case, operations)
    assert {k: set(v) for k, v in found.items()} == {k: set(v) for k, v in known.items()}
    for kernel, counted in found.items():
        for loop, n in counted.items():
            assert abs(n - known[kernel][loop]) <= max(0.03 * n, 2), (kernel, loop, n, known[kernel][loop])


def assert_within(counted, budgets):
    """Every loop has a budget, and stays within it."""
    assert {k: set(v) for k, v in counted.items()} == {k: set(v) for k, v in budgets.items()}
    for kernel, budget in budgets.items():
        for loop, most in budget.items():
            assert counted[kernel][loop] <= most, (kernel, loop, counted[kernel])


@pytest.mark.tpu_aot
def test_scatter_and_exchange_stay_within_their_budgets(tmp_path):
    """On v5p; their program is a redispatch, and `ragged_all_to_all`."""
    others = (REDISPATCH, EXCHANGE)
    counted = loops_of(compiled_operations("v5p", "throughput", tmp_path, others))
    assert_within(counted, OTHER_BUDGETS)
    assert_the_file_is_of_these_kernels(counted, "v5p", "throughput", others)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("case", BUDGETS)
def test_kernels_stay_within_their_budgets(case, tmp_path):
    """On v5p. Every loop has a budget."""
    operations = compiled_operations("v5p", case, tmp_path)
    counted = loops_of(operations)
    assert_within(counted, BUDGETS[case])
    for name, o in operations.items():
        assert all(n <= LARGEST_SCALAR_OPERATION for n in o["scalar_operations"].values()), (name, o)
    cycles = [o["cycles"] for o in operations.values()]
    assert sum(c[XLA] for c in cycles) <= MOST_XLA[case], cycles
    us = sum(sum(c.values()) for c in cycles) / tpu_topologies.TOPOLOGIES["v5p"].clock_hz * 1e6
    assert us <= MOST_US[case], us
    assert_the_file_is_of_these_kernels(counted, "v5p", case)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("case", BUDGETS)
@pytest.mark.parametrize("generation", [name for name in tpu_topologies.TOPOLOGIES if name != "v5p"])
def test_kernels_of_other_generations_are_those_of_the_file(generation, case, tmp_path):
    """The figures of `tpu_static.json` are their budget."""
    assert_the_file_is_of_these_kernels(loops_of(compiled_operations(generation, case, tmp_path)), generation, case)
