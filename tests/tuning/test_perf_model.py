"""`perf_model`: its bytes against counted routings, its times against every measured figure."""

import dataclasses
import importlib.util
import json
import re
import statistics

import numpy as np
import pytest

import xen_moe_jax as xm
from tests.support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DEEPSEEK = {"hidden": 7168, "num_experts": 256, "top_k": 8}
FEW = 512
"""Tokens up to which the kernels for small batches run."""


def operations(rows):
    return [row for row in rows if row["operation"] in ("dispatch", "combine")]


def measured():
    """(sizes, dtype, result) of every default dispatch and combine of the library in the committed figures."""
    found = []
    suite = RESULTS / "ops_h200x4.json"
    for title, document in (json.loads(suite.read_text())["documents"] if suite.exists() else {}).items():
        work = document["workload"]
        if work["wire"] is not None or work["routing"] != "uniform" or work["layout"] == "ranked":
            continue
        sizes = {"num_ranks": work["ranks"], "hidden": work["hidden"]}
        sizes |= {"num_experts": work["experts"], "top_k": work["top_k"]}
        for row in operations(document["results"]):
            if row["name"] == "xen_moe_jax (default backend)" and row["tokens"] > 1:  # one token: all is fixed cost
                found.append(pytest.param(sizes, work["dtype"], row, id=f"{title}, {row['operation']}"))
    for path in sorted(RESULTS.glob("jax_best_*.json")):
        document = json.loads(path.read_text())
        sizes = {"num_ranks": document["machine"]["devices"], **DEEPSEEK}
        for row in operations(document["settings"]["ours"]["results"]):
            name = f"{path.stem}, {row['tokens']} {row['dtype']}, {row['operation']}"
            found.append(pytest.param(sizes, row["dtype"], row, id=name))
    return found


def test_the_figures_are_there():
    if not RESULTS.is_dir():
        pytest.skip("the results are not beside the tests")
    ranks = [parameter.values[0]["num_ranks"] for parameter in measured()]
    assert ranks.count(4) >= 16 and ranks.count(2) >= 6


@pytest.mark.parametrize(("sizes", "dtype", "result"), measured())
def test_predictions_hold_to_fifteen_percent_of_what_was_measured(sizes, dtype, result):
    """Bytes within three percent (the model expects, the file counted), times within fifteen."""
    quantized = result["operation"] == "dispatch" and dtype == "float8_e4m3fn"
    prediction = xm.perf_model(
        result["operation"],
        num_tokens=result["tokens"],
        dtype="float8_e4m3fn" if quantized else "bfloat16",
        **sizes,
    )
    assert prediction.row_bytes == result.get("wire_row_bytes", prediction.row_bytes)
    # the file has the busiest rank of one routing, which with few tokens is further from the expectation
    counted = result["off_rank_bytes_deduplicated"]
    assert prediction.bytes_fast == pytest.approx(counted, rel=0.03 if result["tokens"] > FEW else 0.05)
    assert prediction.seconds * 1e6 == pytest.approx(result["us_median"], rel=0.15)


def test_with_few_ranks_memory_bounds_and_not_the_link():
    """Two ranks send hardly more than half of the tokens, and place eight rows of each."""
    two, four = (xm.perf_model(num_tokens=4096, num_ranks=ranks, **DEEPSEEK) for ranks in (2, 4))
    assert two.bound == "memory" and four.bound == "fast" and two.bytes_local == four.bytes_local
    assert two.bytes_local == 4096 * 8 * 7168 * 2
    one_expert = np.zeros((2, 16, 1), int)
    counted = xm.perf_model(num_tokens=16, num_ranks=2, hidden=128, num_experts=2, top_k=1, topk_idx=one_expert)
    assert counted.bytes_local == 32 * 256  # all of them on rank 0


def simulated():
    """(tokens, case of slow_link_h100x2.json, its median, the time of the puts alone beyond the link)."""
    path = RESULTS / "slow_link_h100x2.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    found = []
    for tokens, chunk_tokens in ((4096, 16), (8192, 32)):
        runs = {"now": [], "link alone": []}
        for row in rows:
            if (row["layout"], row["tokens"], row["chunk_tokens"]) == ("2x1", tokens, chunk_tokens):
                runs.get(row["kernels"], []).extend((row["link_us"], start["us"]) for start in row["us"])
        for i, case in enumerate(rows[0]["cases"] if rows else ()):
            median = statistics.median(us[i] for _, us in runs["now"])
            own = statistics.median(us[i] - link[i] for link, us in runs["link alone"])
            found.append(pytest.param(tokens, case, median, own, id=f"{case}, {tokens} tokens"))
    return found


def test_the_figures_of_the_simulated_link_are_there():
    if not RESULTS.is_dir():
        pytest.skip("the results are not beside the tests")
    assert len(simulated()) == 12


@pytest.mark.parametrize(("tokens", "case", "median", "own"), simulated())
def test_predictions_hold_to_six_percent_of_a_simulated_link(tokens, case, median, own):
    """Two nodes of one GPU: 50 GB/s between them, and the time of the simulation itself."""
    operation, dtype, nodes = re.fullmatch(r"(\w+) (\w+), (\d) nodes a token", case).groups()
    prediction = xm.perf_model(
        operation,
        num_tokens=tokens,
        num_ranks=2,
        ranks_per_node=1,
        nodes_per_token=int(nodes),
        dtype={"fp8": "float8_e4m3fn", "bf16": "bfloat16"}[dtype],
        links=xm.Links(slow=50e9),
        **DEEPSEEK,
    )
    assert prediction.bound == "slow"
    assert prediction.seconds * 1e6 + own == pytest.approx(median, rel=0.06)


@pytest.mark.parametrize("ranks_per_node", [4, 8, 16])
def test_expected_bytes_are_those_of_drawn_routings(ranks_per_node):
    ranks, tokens = 16, 256
    rng = np.random.default_rng(0)
    idx = np.argsort(rng.random((ranks, tokens, 256)), axis=2)[..., :8]
    sizes = {"num_tokens": tokens, "num_ranks": ranks, "ranks_per_node": ranks_per_node, **DEEPSEEK}
    counted, expected = xm.perf_model(topk_idx=idx, **sizes), xm.perf_model(**sizes)
    # the busiest of sixteen ranks is a little over the mean
    assert expected.bytes_fast <= counted.bytes_fast <= 1.1 * expected.bytes_fast
    assert expected.bytes_slow <= counted.bytes_slow <= 1.1 * expected.bytes_slow + 1
    assert (expected.bytes_slow == 0) == (ranks_per_node == ranks)


@pytest.mark.parametrize("ranks, experts, top_k, per_node", [(8, 3, 3, 8), (8, 9, 2, 8), (4, 7, 3, 2), (16, 3, 2, 4)])
def test_expected_bytes_where_the_ranks_do_not_divide_the_experts(ranks, experts, top_k, per_node):
    """Ranks without experts counted as owners, and a token sent more rows than it has slots."""
    idx = np.argsort(np.random.default_rng(0).random((ranks, 512, experts)), axis=2)[..., :top_k]
    sizes = {"num_tokens": 512, "hidden": 128, "num_ranks": ranks, "num_experts": experts, "top_k": top_k}
    counted = xm.perf_model(topk_idx=idx, ranks_per_node=per_node, **sizes)
    expected = xm.perf_model(ranks_per_node=per_node, **sizes)
    for name in ("bytes_fast", "bytes_slow", "bytes_local"):
        assert getattr(expected, name) == pytest.approx(getattr(counted, name), rel=0.05), name


def test_the_curves_on_paper(tmp_path):
    """Their bandwidth is that of the bounding link, published figures stand in the lines of their ranks, a picture."""
    if not (RESULTS.parents[1] / "tools" / "perf_curves.py").exists():
        pytest.skip("tools/perf_curves.py is not beside the tests")
    from tools import perf_curves

    far, near = (perf_curves.predicted("dispatch", ranks, 4096) for ranks in (1024, 8))
    assert far.bound == "slow" and 0.9 * 45 < perf_curves.bottleneck(far) <= 45
    assert near.bytes_slow == 0 and 0.9 * 333 < perf_curves.bottleneck(near) <= 333
    lines = {line.split(" | ")[0]: line for line in perf_curves.table(128).splitlines()}
    assert "| 194 |" in lines["| 256"] and lines["| 512"].count("|  |") == 2
    if importlib.util.find_spec("matplotlib") is not None:
        perf_curves.draw(str(tmp_path / "curves.png"))
        assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_group_limited_routing_crosses_less():
    sizes = {"num_tokens": 4096, "num_ranks": 64, "ranks_per_node": 8, **DEEPSEEK}
    anywhere, limited = xm.perf_model(**sizes), xm.perf_model(nodes_per_token=4, **sizes)
    assert limited.rows_slow < 0.75 * anywhere.rows_slow
    assert limited.rows_slow <= 4096 * 4 and anywhere.bound == "slow"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": 0}, "num_tokens=0: must be >= 1"),
        ({"ranks_per_node": 3}, "ranks_per_node=3: must divide num_ranks=8"),
        ({"top_k": 300}, "top_k=300: must be at most num_experts=256"),
        ({"topk_idx": np.zeros((8, 5, 8), int)}, r"topk_idx has shape \(8, 5, 8\)"),
        ({"operation": "shuffle"}, "operation='shuffle'"),
        ({"wire": "fp4"}, "wire='fp4'"),
        ({"dtype": "float7"}, "dtype='float7': must be one of"),
        ({"nodes_per_token": 0}, "nodes_per_token=0: must be >= 1"),
        ({"topk_idx": np.zeros((8, 4096, 8))}, "topk_idx has dtype float64: must be an integer dtype"),
        ({"links": "H100"}, "links='H100': must be an xm.Links"),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        xm.perf_model(**({"num_tokens": 4096, "num_ranks": 8, **DEEPSEEK} | wrong))


# -- the weights of balance="exact" ------------------------------------------------------------------------------------
def skewed(tokens, hot):
    """int32 `[4, tokens, 2]` over 16 experts: the first `hot` tokens of a rank name experts 0 and 1, others all."""
    idx = np.arange(4 * tokens * 2, dtype=np.int32).reshape(4, tokens, 2) % 16
    idx[:, :hot] = [0, 1]
    return idx


def balance(tokens, hot, **options):
    sizes = {"num_tokens": tokens, "hidden": 4096, "intermediate": 1536, "num_ranks": 4, "num_experts": 16, "top_k": 2}
    return xm.perf_model("balance", topk_idx=skewed(tokens, hot), **(sizes | options))


def test_balance_pays_where_the_busiest_rank_has_many_rows_more():
    expert = 3 * 4096 * 1536 * 2
    many = balance(4096, 4096, slots_per_rank=6)
    assert many.row_bytes == expert and many.rows_slow == 0
    assert many.bytes_fast == many.rows_fast * expert and 1 <= many.rows_fast <= 2
    # rank 0 had all 32768 rows and keeps 8192; a row is six times H * F operations
    assert many.seconds_saved == pytest.approx((32768 - 8192) * 6 * 4096 * 1536 / xm.Links().flops)
    assert many.pays
    few = balance(32, 32, slots_per_rank=6)
    assert few.bytes_fast == many.bytes_fast and not few.pays
    even = balance(4096, 0)
    assert even.bytes_fast == even.bytes_slow == even.seconds_saved == 0 and not even.pays
    assert even.bytes_local == 0 and even.bound == "fixed"  # every expert stays where it is
    assert balance(4096, 0, slots_per_rank=6).bytes_local == 4 * expert  # every rank copies its own four
    lent = balance(4096, 4096)
    assert lent.bytes_fast == lent.rows_fast * expert and lent.bytes_local == 0 and lent.pays


MEASURED = {(0.0, 64): 0.88, (1.1, 64): 2.22, (1.5, 64): 2.41, (0.0, 32): 4.88}
"""(Zipf exponent, experts that tokens name) -> ms by which a forward pass with `balance="exact"` and lent weights takes
longer than with uniform routing: 2 x H200, 4096 tokens of 4096 a rank, top-8 of 64 experts of 1536
(docs/lab/layers.md)."""


@pytest.mark.parametrize(("exponent", "named"), MEASURED)
def test_lent_weights_take_what_was_measured(exponent, named):
    share = np.where(np.arange(64) < named, 1 / np.arange(1, 65) ** exponent, 1e-30)
    noise = np.log(share) + np.random.default_rng(0).gumbel(size=(8192, 64))
    idx = np.argpartition(-noise, 8, axis=1)[:, :8].reshape(2, 4096, 8)
    sizes = {"num_tokens": 4096, "hidden": 4096, "intermediate": 1536, "num_ranks": 2, "num_experts": 64, "top_k": 8}
    found = xm.perf_model("balance", topk_idx=idx, **sizes)
    assert found.seconds * 1e3 == pytest.approx(MEASURED[exponent, named], rel=0.1)
    assert not found.pays, "experts at home took 3.40 ms with Zipf 1.1, and lent ones 4.37"


def test_balance_between_nodes_counts_the_slow_link():
    apart = balance(4096, 4096, slots_per_rank=6, ranks_per_node=1)
    assert apart.bytes_fast == 0 and apart.bytes_slow == balance(4096, 4096, slots_per_rank=6).bytes_fast


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topk_idx": None}, "topk_idx=None"),
        ({"intermediate": 0}, "intermediate=0"),
        ({"slots_per_rank": 4}, "slots_per_rank=4: must be >= 5"),
        ({"topk_idx": np.zeros((4, 3, 2), int)}, "topk_idx has shape"),
    ],
)
def test_balance_needs_the_routing_and_the_size_of_an_expert(changes, text):
    sizes = {"num_tokens": 8, "hidden": 16, "intermediate": 8, "num_ranks": 4, "num_experts": 16, "top_k": 2}
    with pytest.raises(ValueError, match=text):
        xm.perf_model("balance", **({"topk_idx": skewed(8, 2)} | sizes | changes))


def test_a_placement_is_counted_and_its_combine_by_rows():
    """Rank 0 holds both experts that tokens name: two rows of a token go there as one and come back one by one."""
    sizes = {"num_tokens": 8, "hidden": 16, "num_ranks": 4, "num_experts": 16, "top_k": 2}
    placement = xm.balance.from_experts([[0, 1, 2, 3], [*range(4, 8)], [*range(8, 12)], [*range(12, 16)]], 16)
    idx = np.broadcast_to(np.array([0, 1], np.int32), (4, 8, 2))
    assert xm.perf_model("dispatch", topk_idx=idx, placement=placement, **sizes).rows_fast == 8
    assert xm.perf_model("combine", topk_idx=idx, **sizes).rows_fast == 8
    assert xm.perf_model("combine", topk_idx=idx, placement=placement, **sizes).rows_fast == 16
    by_rank = dataclasses.replace(placement, sums="rank")
    assert xm.perf_model("combine", topk_idx=idx, placement=by_rank, **sizes).rows_fast == 8
    spread = xm.balance.plan([99, 99, *[1] * 14], 4, 5)
    assert (spread.num_replicas[:2] > 1).all()
    slots = np.stack([spread.route(idx[rank], rank) for rank in range(4)])
    busiest = np.bincount(slots.ravel() // 5, minlength=4).max()
    assert xm.perf_model("combine", topk_idx=idx, placement=spread, **sizes).bytes_local == busiest * 32
    with pytest.raises(ValueError, match="placement with topk_idx=None"):
        xm.perf_model(placement=placement, **sizes)
