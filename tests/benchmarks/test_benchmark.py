"""The benchmark command: its counts, wrong programs that it must notice, and every mode end to end."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks import command
from benchmarks.layers import decode_step, layer_programs
from benchmarks.lib import accounting, options, report, verify
from benchmarks.ops import overlap
from benchmarks.peers import registry as peers
from benchmarks.tpu import static, topologies
from tests.support import HANG_S, ROOT, oracle, quick_compiler
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.problem import SPECS, make_problem
from xen_moe_jax.tuning.workload import Workload, capacities, draw_tokens, draw_topk_idx, draw_topk_weights

SMALL = Workload(tokens=24, hidden=128, experts=8, top_k=3, ranks=4, pool=3)
REFERENCE = xm.KernelConfig(backend="reference")


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    """The command as a user runs it: its own process, its own number of virtual devices."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_compiler.flags(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )


SIZES = ("--tokens", "16", "--hidden", "128", "--experts", "8", "--top-k", "2", "--ranks", "2")
QUICK = ("--inner", "2", "--repeats", "2")


# ---------------------------------------------------------------------------------------------------- workload
@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot"])
def test_routing_names_distinct_experts_in_range(routing):
    idx = draw_topk_idx(dataclasses.replace(SMALL, routing=routing))
    chex.assert_shape(idx, (3, 4, 24, 3))
    chex.assert_type(idx, np.int32)
    assert idx.min() >= 0 and idx.max() < SMALL.experts
    assert all(len(set(token)) == 3 for token in idx.reshape(-1, 3))


def test_routing_skew():
    work = dataclasses.replace(SMALL, tokens=500, experts=32, top_k=2)
    share = {}
    for routing in ("uniform", "zipf", "one-hot"):
        counts = np.bincount(draw_topk_idx(dataclasses.replace(work, routing=routing)).reshape(-1), minlength=32)
        share[routing] = counts.max() / counts.sum()
    assert share["uniform"] < 0.05 < 0.12 < share["zipf"] < 0.4 < share["one-hot"] == 0.5


def test_weights_sum_to_one_and_tokens_are_random():
    np.testing.assert_allclose(draw_topk_weights(SMALL).sum(-1), 1, rtol=1e-6)
    a, b = (draw_tokens(SMALL, rank).astype(np.float32) for rank in (0, 1))
    assert a.std() > 0.9 and not np.array_equal(a, b)
    np.testing.assert_array_equal(a, draw_tokens(SMALL, 0).astype(np.float32))


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot"])
def test_capacities_are_the_smallest_that_drop_nothing(routing):
    work = dataclasses.replace(SMALL, routing=routing)
    idx = draw_topk_idx(work)
    caps = capacities(work, idx)
    grouped = max(oracle.needed_rows(idx[p], work.experts, "grouped") for p in range(work.pool))
    ranked = max(oracle.needed_rows(idx[p], work.experts, "ranked") for p in range(work.pool))
    most = max(np.bincount(row.reshape(-1)).max() for pool in idx for row in pool)
    assert (caps.grouped, caps.ranked, caps.per_source_expert) == tuple(-(-n // 8) * 8 for n in (grouped, ranked, most))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"top_k": 9}, "top_k=9"),
        ({"routing": "best"}, "routing='best'"),
        ({"wire": "float16"}, "wire='float16'"),
        ({"dtype": "int8", "wire": "int8"}, "must be None"),
        ({"capacity_factor": -1.0}, "capacity_factor"),
    ],
)
def test_bad_workloads(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(SMALL, **change)


# -------------------------------------------------------------------------------------------------- accounting
def test_off_rank_rows_by_hand():
    """Two ranks, two experts each. Rank 0 sends token 0 to both of rank 1's experts, rank 1 keeps all but one slot."""
    work = Workload(tokens=2, hidden=128, experts=4, top_k=2, ranks=2, pool=1)
    idx = np.array([[[[2, 3], [0, 1]], [[0, 2], [2, 3]]]], np.int32)
    rows = accounting.off_rank_rows(work, idx)
    assert rows == accounting.OffRankRows(deduplicated=1.0, duplicated=2.0)
    assert accounting.off_rank_bytes(work, rows.duplicated, "dispatch") == 2 * 256
    assert accounting.off_rank_bytes(work, 1, "round trip") == 512


def test_off_rank_rows_against_plain_loops():
    idx = draw_topk_idx(dataclasses.replace(SMALL, routing="zipf"))
    per_routing = []
    for pool in idx:
        sent, received = np.zeros(4), np.zeros(4)
        for source, tokens in enumerate(pool):
            for token in tokens:
                for destination in {int(e) // 2 for e in token} - {source}:
                    sent[source] += 1
                    received[destination] += 1
        per_routing.append(max(sent.max(), received.max()))
    assert accounting.off_rank_rows(SMALL, idx).deduplicated == np.mean(per_routing)


def test_wire_bytes_include_scales():
    assert accounting.wire_row_bytes(7168, "bfloat16") == 14336
    assert accounting.wire_row_bytes(7168, "float8_e4m3fn") == 7168 + 4 * 56
    assert accounting.wire_row_bytes(200, "int8") == 200 + 8
    assert accounting.wire_row_bytes(7168, "mxfp4") == 3584 + 224
    assert accounting.gigabytes_per_second(330e3, 1.0) == 330.0


# ------------------------------------------------------------------------------------------------ verification
@pytest.fixture(scope="module")
def problem():
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, has {jax.device_count()}")
    return make_problem(SMALL)


def check(problem, program):
    return verify.check_round_trip(program, problem)


def every_round_trip(problem):
    own = programs.own_programs(problem.work, problem.caps, REFERENCE, ("round trip",))
    return own + peers.peer_programs(problem.work, problem.caps, "cpu")


def test_every_program_computes_the_same_round_trip(problem):
    found = every_round_trip(problem)
    assert len(found) == 4
    for program in found:
        assert 0 < check(problem, program) < 0.02


@pytest.mark.parametrize("layout", ["ranked", "padded"])
def test_round_trip_of_other_layouts(layout):
    problem = make_problem(dataclasses.replace(SMALL, layout=layout, wire="float8_e4m3fn"))
    (program,) = programs.own_programs(problem.work, problem.caps, REFERENCE, ("round trip",))
    assert check(problem, program) < verify.QUANTIZED_TOLERANCE


def test_a_wrong_round_trip_is_noticed(problem):
    """Swapped experts, lost weights, a lost row, a NaN: each is an error. One program takes the mistake as an
    argument."""
    (program,) = programs.own_programs(problem.work, problem.caps, REFERENCE, ("round trip",))
    experts = functools.partial(programs.scaling_experts, local_experts=SMALL.local_experts)

    def run(fault, x, idx_pool, weights_pool):
        next_expert, no_weights, lost, nan = fault
        idx = jnp.where(next_expert, (idx_pool[-1] + 1) % SMALL.experts, idx_pool[-1])
        idx = idx.at[0, 0].set(jnp.where(lost, -1, idx[0, 0]))
        out = program.round_trip(x, idx, jnp.where(no_weights, 1 / 3, weights_pool[-1]), experts)
        return out.at[0, 0].set(jnp.where(nan, jnp.nan, out[0, 0]))

    compiled = timing.on_ranks(run, problem.mesh, (P(), *SPECS))
    verify.check_round_trip(program, problem, functools.partial(compiled, jnp.zeros(4, bool)))
    for fault in jnp.eye(4, dtype=bool):
        with pytest.raises(verify.WrongResultError):
            verify.check_round_trip(program, problem, functools.partial(compiled, fault))


def test_a_backend_that_differs_is_noticed(problem, monkeypatch):
    config = dataclasses.replace(REFERENCE, chunk_tokens=5)
    assert set(verify.differing_bits(problem, config).values()) == {0}
    genuine = xm.combine

    def off_by_a_bit(y, handle, *, config, **options):
        out = genuine(y, handle, config=config, **options)
        return out if config.chunk_tokens is None else out.at[0, 0].multiply(-1)

    monkeypatch.setattr(xm, "combine", off_by_a_bit)
    with pytest.raises(verify.WrongResultError, match="'combine': 4"):  # one element on each rank
        verify.differing_bits(problem, config)


def test_drops_are_counted(problem):
    few = dataclasses.replace(problem, caps=dataclasses.replace(problem.caps, grouped=16))
    assert verify.num_dropped(problem, REFERENCE) == 0
    rows = SMALL.pool * SMALL.ranks * SMALL.tokens * SMALL.top_k
    assert verify.num_dropped(few, REFERENCE) == rows - SMALL.pool * SMALL.ranks * 16


# ------------------------------------------------------------------------------------------------------ timing
def counting_program() -> programs.Program:
    """A program that counts its calls and adds up the routings that it saw."""
    return programs.Program(
        "counting",
        "dispatch",
        prepare=lambda x, idx, w: x[:1, :1].astype(jnp.float32) * 0,
        initial=lambda operands, idx, w: (operands, jnp.zeros((1,), jnp.int32)),
        step=lambda operands, carry, idx, w: (carry[0] + 1, carry[1] + idx.sum()),
        chain=lambda carry: programs.never(carry[0]),
    )


def test_timed_loop_runs_every_call_and_cycles_through_routings(problem):
    timed = timing.compile_only(counting_program(), problem, inner=5)()
    timing.measure([timed], repeats=3)
    calls, seen = timed.result
    assert len(timed.microseconds) == 3 and all(us > 0 for us in timed.microseconds)
    np.testing.assert_array_equal(np.asarray(calls).reshape(-1), 5)
    np.testing.assert_array_equal(np.asarray(seen), sum(problem.topk_idx[i % 3].sum((1, 2)) for i in range(5)))


def test_calls_chained_by_barriers_all_run(problem):
    """The loop has the form of loops on GPUs: eleven calls, four in a turn, each turn beginning with the first
    routing."""
    counting = counting_program()

    def loop(x, idx_pool, weights_pool):
        operands = counting.prepare(x, idx_pool[0], weights_pool[0])
        carry = counting.initial(operands, idx_pool[0], weights_pool[0])
        return timing.chained_by_barriers(counting, operands, carry, idx_pool, weights_pool, 11, 4)

    calls, seen = timing.on_ranks(loop, problem.mesh, timing.specs(problem.mesh))(*problem.inputs.arrays())
    np.testing.assert_array_equal(np.asarray(calls).reshape(-1), 11)
    of_calls = [i % 4 % 3 for i in range(11)]
    np.testing.assert_array_equal(np.asarray(seen), sum(problem.topk_idx[p].sum((1, 2)) for p in of_calls))


def test_calls_in_the_loop_are_not_optimised_away(problem):
    """The compiled loop of each of the library's programs still holds its all-to-all."""
    for program in programs.own_programs(problem.work, problem.caps, REFERENCE, (*options.OPERATIONS, "redispatch")):
        timed = timing.compile_only(program, problem, inner=3, with_memory=True)()
        assert "all-to-all" in timed.compiled.as_text()
        assert timed.memory["total"] > 0


def test_a_timed_loop_that_loses_its_tokens_is_noticed(problem):
    (program,) = programs.own_programs(problem.work, problem.caps, REFERENCE, ("round trip",))
    timed = timing.compile_only(program, problem, inner=3)()
    timed.run_once()
    verify.check_timed_result(timed, problem)
    timed.result = timed.result * 1.5
    with pytest.raises(verify.WrongResultError, match="chained"):
        verify.check_timed_result(timed, problem)


# ----------------------------------------------------------------------------------------------------- command
def test_normal_mode_end_to_end(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = run_command("ops", *SIZES, *QUICK, "--json", str(path), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    rows = document["results"]
    assert [row["operation"] for row in rows] == ["dispatch", "combine", *["round trip"] * 4]
    usual = {name for name, entry in peers.PEERS.items() if entry.usual and "cpu" in entry.platforms}
    assert {row["name"] for row in rows[3:]} == usual and len(usual) == 3
    for row in rows:
        assert row["us_min"] <= row["us_median"] <= row["us_max"] and len(row["us_repeats"]) == 2
        assert row["memory_bytes"]["total"] > 0
        assert row["gb_per_s_deduplicated"] == pytest.approx(
            row["off_rank_bytes_deduplicated"] / row["us_median"] / 1e3
        )
        assert row["name"] in done.stdout
    assert rows[0]["checks"] == {"dropped": 0} and 0 < rows[3]["checks"]["max error"] < 0.05
    assert document["versions"]["jax"] == jax.__version__ and document["machine"]["devices"] == 2
    assert document["command"].endswith(f"--plot {plot}") and plot.stat().st_size > 1000


def test_low_latency_and_sweep_modes(tmp_path):
    path = tmp_path / "out.json"
    done = run_command(
        "low-latency", *SIZES, *QUICK, "--peers", "none", "--dtype", "float8_e4m3fn", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["workload"]["layout"] == "padded"
    sweep = ("sweep-sms", "--num-sms", "2", "4", "--operations", "combine", "--json", str(path))
    done = run_command(*sweep, *SIZES, *QUICK)
    assert done.returncode == 0, done.stderr
    assert [row["num_sms"] for row in json.loads(path.read_text())["results"]] == [2, 4]


def test_the_mode_of_gathers(tmp_path):
    path = tmp_path / "out.json"
    small = ("--ranks", "2", "--rows", "4", "--hidden", "256", "--matmul", "16", "64", "128", *QUICK)
    done = run_command("all-gather", "--platform", "cpu", *small, "--json", str(path))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document["machine"]["devices"] == 2
    found = {row["operation"]: [r["name"] for r in document["results"] if r["operation"] == row["operation"]]
             for row in document["results"]}  # fmt: skip
    assert "jax.lax.all_gather" in found["all_gather"] and "the matmul alone" in found["all_gather_matmul"]
    for row in document["results"]:
        assert 0 < row["fastest"] <= row["microseconds"] <= row["slowest"] and row["name"] in done.stdout
        assert row.get("elements with the bits of the composition", 1.0) == 1.0


def test_a_gather_with_other_bits_is_noticed(mesh4):
    from benchmarks.ops import all_gather

    x = all_gather._placed(mesh4, 0, (8, 16), P("ep"))
    right = {"ours": lambda x: xm.all_gather(x, "ep", tiled=True), "the loop alone": lambda x: x}
    all_gather._check_gathers(mesh4, x, right)
    with pytest.raises(AssertionError, match="differs from jax.lax.all_gather"):
        all_gather._check_gathers(mesh4, x, right | {"wrong": lambda x: xm.all_gather(-x, "ep", tiled=True)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-k", "99"), "top_k=99"),
        (("--peers", "mpi"), "mpi"),
        (("--backend", "cuda"), "cuda"),
        (("--platform", "gpu"), "--platform gpu: JAX cannot start it here"),
        (("--ranks", "999"), "ranks=999: JAX sees 64 cpu device(s); use at most that many"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_status_1(arguments, message):
    if "gpu" in arguments and pathlib.Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver: JAX may well start the platform")
    done = run_command("ops", *SIZES, *QUICK, *arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == "" and done.stderr.strip().splitlines()[-1].startswith("error: ")


def checked(*arguments, mode="ops"):
    options.check(options.parse([mode, *arguments]))


@pytest.mark.parametrize("value", ["-1", "many", str(2**63)])
def test_a_seed_that_no_generator_takes_is_an_error(value, capsys):
    with pytest.raises(SystemExit):
        checked("--seed", value)
    message = capsys.readouterr().err
    assert "--seed" in message and value in message and "must be" in message


@pytest.mark.parametrize(
    "argument",
    ["--tokens", "--hidden", "--experts", "--top-k", "--ranks", "--num-sms", "--chunk-tokens", "--inner", "--unroll"]
    + ["--repeats", "--num-processes", "--capacity-factor"],
)
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_zero_means_zero_and_is_an_error(argument, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        checked(argument, value)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and argument in message and value in message and "must be" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operations", "sort"), "--operations 'sort'"),
        (("--platform", "cpu", "--ranks", "65"), "--ranks 65: must be at most 64 virtual CPU devices"),
        (("--num-processes", "2"), "--num-processes 2: needs --coordinator"),
        (("--num-processes", "2", "--coordinator", "here"), "--coordinator here: must be HOST:PORT"),
        (("--process-id", "1"), "--process-id 1: must be less than --num-processes 1"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError) as error:
        checked(*arguments)
    assert message in str(error.value)


def test_tpu_programs_are_not_begun_without_their_compiler(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(topologies, "prepare_environment", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tpu-static: compiles with libtpu, which is not installed"):
        static.main(options.parse(["tpu-static"]))


def test_the_libtpu_beside_the_packages_is_found(monkeypatch, tmp_path):
    """`make setup` puts it there, so that JAX looks for no TPU in other programs."""
    folder = tmp_path / "libtpu"
    folder.mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    topologies.prepare_environment()
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    "line",
    [
        "jax-best --dtype foo",
        "jax-best --plot a.png",
        "ops --width 8",
        "ops --num-sms 8 16",
        "ops --tune",
        "ops --generations v4",
        "ops --settings default",
        "ops --grouped-matmul hopper",
        "overlap --plot a.png",
        "decode-step --tokens 4",
        "layer --operations dispatch",
        "transfer --tokens 4",
    ],
)
def test_a_mode_refuses_the_arguments_of_another_at_once(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(line.split()[0], line.split()[1:])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1, "one line, not pages of usage"
    assert f"python -m benchmarks {line.split()[0]}: error: unrecognized arguments: {line.split()[1]}" in said or (
        "unrecognized arguments: 16" in said
    )


def test_a_dtype_that_does_not_exist_is_refused_before_jax_starts():
    with pytest.raises(ValueError, match="dtype='foo'"):
        checked("--dtype", "foo")


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'xen-moe-jax[plot]'")
    checked("--plot", str(tmp_path / "times.SVG"))
    with pytest.raises(ValueError, match=r"--plot .*times.xyz: '.xyz' is no format of a picture; must be one of .*png"):
        checked("--plot", str(tmp_path / "times.xyz"))


@pytest.mark.parametrize("argument", ["--json", "--plot"])
def test_outputs_are_opened_before_the_work(argument, tmp_path):
    kept, new, inside = tmp_path / "kept", tmp_path / "folder" / "new", tmp_path / "kept" / "file"
    kept.write_text("{}")
    for good in (kept, new):
        checked(argument, str(good))
    assert kept.read_text() == "{}" and not new.exists(), "the check itself writes nothing"
    for bad in (inside, tmp_path, ""):
        with pytest.raises(ValueError, match=f"{argument} .*cannot be written .*; name another file"):
            checked(argument, str(bad))


@pytest.mark.parametrize(
    "content",
    [None, "not json", "[1, 2]", "{}", '{"entries": []}', '{"entries": [{"row_bytes": 1}]}', '{"entries": [3]}']
    + ['{"entries": [{"row_bytes": 1, "tokens": 1, "gb_per_s": 0}]}', '{"entries": [{"row_bytes": "a", "tokens": 1}]}'],
)
def test_a_foreign_link_ceiling_is_refused(content, tmp_path):
    path = tmp_path / "link.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="--link-ceiling .*link.json: .*make it with benchmarks/ops/link_ceiling.cu"):
        checked("--link-ceiling", str(path))


def test_the_link_ceiling_of_the_results_is_accepted():
    path = ROOT / "benchmarks" / "results" / "link_ceiling_h200x4.json"
    if not path.exists():
        pytest.skip("benchmarks/results is not beside the tests")
    checked("--link-ceiling", str(path))


def test_progress_is_told_after_every_repeat(problem):
    told = []
    (program,) = programs.own_programs(problem.work, problem.caps, REFERENCE, ("dispatch",))
    timing.measure([timing.compile_only(program, problem, inner=1)()], repeats=3, progress=told.append)
    assert [line.split(",")[0].strip() for line in told] == [f"repeat {i} of 3" for i in (1, 2, 3)]
    assert all(line.endswith("s left") for line in told)


def document_of(sms=False):
    rows = [
        {"name": "ours", "operation": "dispatch", "us_median": us, "us_min": us - 1, "us_max": us + 1}
        | ({"num_sms": n} if sms else {})
        for n, us in ((8, 900.0), (16, 400.0))
    ]
    work = dataclasses.asdict(dataclasses.replace(SMALL, tokens=4096, hidden=7168))
    return {"results": rows, "machine": {"devices": 4, "device_kind": "chip"}, "workload": work}


@pytest.mark.parametrize("sms", [True, False], ids=["sweep", "bars"])
def test_plots_start_at_zero_and_name_their_sizes(sms, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    report.write_plot(str(tmp_path / "plot.png"), document_of(sms))
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[0] == 0 and axes.get_xscale() == "linear" and (not sms or axes.get_ylim()[0] == 0)
    for part in ("4 x chip", "4096 tokens per rank", "7168 hidden", "8 experts", "3 per token", "4 ranks", "grouped"):
        assert part in axes.get_title()
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_link_ceiling_ratio():
    rows = [{"operation": "dispatch", "gb_per_s_deduplicated": 150.0, "wire_row_bytes": 7392, "tokens": 4096}]
    entries = [
        {"row_bytes": 7392, "tokens": 4096, "gb_per_s": 300.0},
        {"row_bytes": 7392, "tokens": 4096, "gb_per_s": 290.0},
        {"row_bytes": 7392, "tokens": 128, "gb_per_s": 900.0},
        {"row_bytes": 14336, "tokens": 4096, "gb_per_s": 900.0},
    ]
    report.add_link_ceiling(rows, {"entries": entries})
    assert rows[0]["link_ceiling_gb_per_s"] == 300.0 and rows[0]["of_link_ceiling"] == 0.5


def test_tables_of_the_document_are_what_their_json_files_say():
    if not (ROOT / "docs" / "lab" / "benchmarks.md").exists() or not (ROOT / "benchmarks" / "results").exists():
        pytest.skip("docs/lab/benchmarks.md or benchmarks/results is not beside the tests")
    done = subprocess.run([sys.executable, "-m", "benchmarks", "table", "--check"], timeout=HANG_S, cwd=ROOT)
    assert done.returncode == 0, "run python -m benchmarks table"


def test_every_command_of_the_suites_parses():
    path = ROOT / "benchmarks" / "suite.py"
    if not path.exists():
        pytest.skip("benchmarks/suite.py is not beside the tests")
    spec = importlib.util.spec_from_file_location("suite", path)
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    for line in (line for lines in suite.SUITES.values() for line in lines.values()):
        parsed = options.parse(shlex.split(line))
        options.check(parsed)
        assert options.workload(parsed, 4).tokens > 0
        assert set(options.peer_names(parsed) or ()) <= set(peers.PEERS), line


# ----------------------------------------------------------------------------------------------------- decode step
STEP = ("decode-step", "--layers", "3", "--intermediate", "16", "--hidden", "128", "--experts", "6")


@pytest.mark.parametrize(
    "shape, us, link_us, rows, links",
    [
        ((16384, 2048), 296.0, 202.0, 12288, 2),  # 0.75 of 202 us, twice
        ((16384, 2048), 522.0, 202.0, 21504, 2),
        ((16384, 2048), 1010.0, 202.0, 20480, 4),
        ((16384, 2048), 1.0, 202.0, 1024, 2),  # never nothing
        ((128, 4096), 31.0, 21.0, 128, 2),  # a decode step's rows stay as they are
        ((128, 4096), 60.0, 10.0, 128, 6),
        ((128, 4096), 9000.0, 10.0, 128, 64),
    ],
)
def test_the_chain_of_overlap_is_as_long_as_the_operation(shape, us, link_us, rows, links):
    chain = overlap.chain_of(shape, us, link_us)
    assert (chain.rows, chain.columns, chain.links) == (rows, shape[1], links)


def test_overlap_mode_end_to_end(tmp_path):
    path = tmp_path / "overlap.json"
    command = ["overlap", *SIZES, "--inner", "2", "--repeats", "1", "--num-sms", "4", "8"]
    finished = run_command(*command, "--dtype", "float8_e4m3fn", "--json", str(path))
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(path.read_text())["overlap"]
    assert [(row["operation"], row["num_sms"]) for row in rows] == [
        (operation, sms) for operation in ("dispatch", "combine") for sms in (4, 8)
    ]
    for row in rows:
        us = row["us"]
        assert set(us) == {"whole", "in halves", "matmuls", "in turn", "overlapped"} and min(us.values()) > 0
        assert row["over_longer"] == pytest.approx(us["overlapped"] / max(us["whole"], us["matmuls"]))
    assert "over the longer" in finished.stdout


def test_a_decode_step_end_to_end(tmp_path):
    out = tmp_path / "step.json"
    sizes = ("--top-k", "2", "--ranks", "2", "--batches", "1", "5", "--replays", "9", "--peer-replays", "6")
    done = run_command(*STEP, *sizes, "--platform", "cpu", "--json", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["layers"] == 3 and document["weight_bytes_per_layer_and_rank"] == 3 * 3 * 128 * 16 * 2
    assert {row["tokens"] for row in document["results"]} == {1, 5}
    for row in document["results"]:
        own = row["name"] == "xen_moe_jax"
        assert row["replays"] == (9 if own else 6) and row["wrong"] == 0 and row["relative_error"] < 0.1
    assert "9, 0 wrong" in done.stdout and "us a layer" in done.stdout


def test_a_decode_step_takes_batches():
    done = run_command(*STEP, "--tokens", "4", "--platform", "cpu")
    assert done.returncode == 2 and "unrecognized arguments: --tokens 4" in done.stderr


@pytest.fixture(scope="module")
def small_step():
    problem = make_problem(dataclasses.replace(SMALL, experts=7, tokens=3))
    weights = decode_step.make_weights(problem.work, problem.mesh, layers=2, width=8)
    config = layer_programs.layer_config(problem.work, 8, "auto", REFERENCE)
    own = programs.own_round_trip(problem.work, problem.caps, REFERENCE)
    return decode_step.lower_step("own", own, problem, config, weights)(), config, weights


def test_a_replay_with_another_result_is_an_error(small_step, monkeypatch):
    step, config, weights = small_step
    truth = decode_step.plain_results(step.problem, config, weights)
    row = decode_step.measure(step, weights, truth, 8)
    assert row["wrong"] == 0 and row["relative_error"] < 0.02
    genuine = decode_step.first_results

    def one_bit_off(step, weights):
        found, state = genuine(step, weights)
        return found, state._replace(hashes=state.hashes ^ (jnp.arange(state.hashes.size, dtype=jnp.uint32) == 1))

    monkeypatch.setattr(decode_step, "first_results", one_bit_off)
    wrong = len(range(1, 8, SMALL.pool))
    with pytest.raises(verify.WrongResultError, match=f"{wrong} results of 8 replays"):
        decode_step.measure(step, weights, truth, 8)
    peer = decode_step.measure(step, weights, truth, 8, must_agree=False)
    assert (peer["wrong"], peer["replays"]) == (wrong, 8)


def test_a_wrong_first_result_is_an_error(small_step):
    step, _, weights = small_step
    truth, _ = decode_step.first_results(step, weights)
    with pytest.raises(verify.WrongResultError, match="relative error .* against plain JAX"):
        decode_step.measure(step, weights, [t + 1 for t in truth], 4)


def test_the_digest_sees_every_bit_and_its_place():
    values = jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8)
    digests = {int(decode_step.digest(values))}
    for flip in (values.at[0, 0].set(-0.0), values.at[3, 7].add(1), values[::-1], values[:, ::-1]):
        digests.add(int(decode_step.digest(flip)))
    assert len(digests) == 5


def test_experts_are_the_same_in_every_layout_of_rows():
    """By expert, counted or not, in blocks, and as the padded exchange brings them: against a loop over the rows."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (3, 8, 5), "up": (3, 8, 5), "down": (3, 5, 8)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    config = MoEConfig(hidden_size=8, intermediate_size=5, num_experts=3, top_k=2)
    experts = decode_step.on_any_rows(config, jax.tree.map(jnp.asarray, weights))
    rows = rng.standard_normal((7, 8)).astype(np.float32)
    local = np.array([0, 0, 2, 2, 2, 3, 3])  # none for 1; two rows past the last group

    def one(row, expert):
        gate, value = row @ weights["gate"][expert], row @ weights["up"][expert]
        return (gate / (1 + np.exp(-gate)) * value) @ weights["down"][expert]

    want = np.stack([one(rows[i], local[i]) for i in range(5)])
    for sizes in (None, jnp.array([2, 0, 3], jnp.int32)):
        got = experts(jnp.asarray(rows), jnp.asarray(local), sizes)[:5]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    blocks = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    want = np.stack([[[one(row, e) for row in blocks[r, e]] for e in range(3)] for r in range(2)])
    np.testing.assert_allclose(experts(jnp.asarray(blocks), None), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(experts(jnp.asarray(blocks[0]), None), want[0], rtol=1e-4, atol=1e-4)
