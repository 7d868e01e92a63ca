"""JAX's own collectives, tuned: every peer dispatches and combines right; every setting ends, is reported, and is
compared."""

import functools
import json
import subprocess
import sys
import time

import jax
import pytest

import xen_moe_jax as xm
from benchmarks import command as benchmarks
from benchmarks.lib import options, verify
from benchmarks.peers import jax_best, jax_settings
from benchmarks.peers import ragged as peers_ragged
from benchmarks.peers import registry as peers
from benchmarks.peers.jax_settings import OURS, SETTINGS, Setting
from tests.support import quick_compiler
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.problem import make_problem
from xen_moe_jax.tuning.workload import Workload


@functools.cache
def drawn(dtype):
    return make_problem(Workload(tokens=12, hidden=128, experts=6, top_k=3, ranks=4, pool=2, dtype=dtype))


# By the drop-in: XLA has no ragged_all_to_all for CPU. 6 experts on 4 ranks: two of a rank, and the last has none.
RAGGED = {
    f"ragged, {segments} segments": peers.Entry(
        functools.partial(peers_ragged.sorted_ragged, segments=segments, ragged=xm.ragged_all_to_all),
        ("cpu",),
        usual=False,
    )
    for segments in (1, 3, 4)
}
TESTED = [
    *((name, "bfloat16") for name, entry in peers.PEERS.items() if "cpu" in entry.platforms),
    *((name, "float8_e4m3fn") for name in ("padded all_to_all", "all_gather + psum_scatter", *list(RAGGED)[-1:])),
]


@pytest.mark.parametrize(("name", "dtype"), TESTED)
def test_dispatch_and_combine_of_every_peer(name, dtype, monkeypatch):
    """The round trip against NumPy; dispatch and combine alone run, chained, and leave finite values."""
    problem = drawn(dtype)
    monkeypatch.setattr(peers, "PEERS", peers.PEERS | RAGGED)
    found = peers.peer_programs(problem.work, problem.caps, "cpu", (name,), options.OPERATIONS)
    assert [program.operation for program in found] == list(options.OPERATIONS)
    for program in found:
        timed = timing.compile_only(program, problem, inner=2 * program.relative_cost)()
        timing.measure([timed], repeats=1)
        verify.check_timed_result(timed, problem)
        of_the_loop = timed.compiled.as_text().split("ENTRY")[0]  # not hoisted out of it
        assert any(f"{name}(" in of_the_loop for name in ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"))
        if program.round_trip:
            assert 0 < verify.check_round_trip(program, problem) <= verify.tolerance(problem.work)


def test_a_rank_cut_into_pieces_loses_no_row():
    offsets, sizes = peers_ragged.divide(jax.numpy.array([5, 20]), jax.numpy.array([7, 2]), 4)
    assert sizes.tolist() == [1, 2, 2, 2, 0, 1, 0, 1] and offsets.tolist() == [5, 6, 8, 10, 20, 20, 21, 21]


def test_settings_name_peers_that_exist_and_the_default_has_the_untuned_ones():
    for setting in SETTINGS.values():
        assert set(setting.peers) <= set(peers.PEERS)
    assert set(jax_settings.JAX_DEFAULT) <= set(SETTINGS["default"].peers) and not SETTINGS["default"].flags
    assert list(SETTINGS)[0] == OURS and not SETTINGS[OURS].peers


# ------------------------------------------------------------------------------------------------ processes and limits
def started(*programs):
    """A process for each program, with its log where `start` puts it."""

    def start(name, given, part):
        found = []
        for number, program in enumerate(programs):
            with jax_best.log_of(part, number).open("w") as stream:
                command = [sys.executable, "-c", program, str(part)]
                found.append(subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True))
        return found

    return start


ONE_ROW = (
    "import json, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(json.dumps({'head': {}, 'results': [7]}));"
)


@pytest.mark.parametrize(
    ("program", "limit", "ended", "kept"),
    [
        (ONE_ROW, 100.0, "finished", [7]),
        (ONE_ROW + "time.sleep(200)", 6.0, "did not finish in 6 s; last words: ", [7]),
        (
            ONE_ROW + "raise ValueError('no such flag')",
            100.0,
            "failed with exit status 1; last words: ValueError: no such",
            [7],
        ),
        ("import time; time.sleep(200)", 2.0, "did not finish in 2 s", []),
    ],
)
def test_what_hangs_or_dies_is_told_and_loses_only_what_was_not_measured(program, limit, ended, kept, monkeypatch):
    monkeypatch.setattr(jax_best, "start", started(program))
    began = time.monotonic()
    entry, _ = jax_best.run_in_processes("default", None, limit)
    assert entry["ended"].startswith(ended) and entry["results"] == kept
    assert time.monotonic() - began < 90


def test_the_process_that_raised_is_told_apart_from_the_one_that_lost_it(monkeypatch):
    """The other ends too, of an error that says nothing of why: each has its words."""
    raised = "raise ValueError('fallback is not allowed')"
    lost = "print('gRPC error information'); print('grpc_util.h:89'); raise SystemExit(1)"
    monkeypatch.setattr(jax_best, "start", started(raised, lost))
    entry, _ = jax_best.run_in_processes("default", None, 20.0)
    first, second = entry["ended"].split("; last words: ")[1].split("; ")
    assert first == "process 0: ValueError: fallback is not allowed"
    assert second in (
        "process 1: gRPC error information / grpc_util.h:89",
        "process 1: nothing",
    )  # ended before it spoke


def test_a_peer_that_a_setting_rules_out_is_told_and_the_others_go_on(monkeypatch):
    def refuse(work, caps):
        def dispatch(tokens, topk_idx):
            raise NotImplementedError("fallback is not allowed")

        return peers.Peer(dispatch, dispatch)

    monkeypatch.setitem(peers.PEERS, "padded all_to_all", peers.Entry(refuse))
    names = ("padded all_to_all", "all_gather + psum_scatter")
    sizes = "--ranks 4 --tokens 8 --hidden 128 --experts 4 --top-k 2 --inner 1 --repeats 1".split()
    parsed = options.parse(["jax-best", "--setting", "default", *sizes])
    groups = list(jax_best.figures(parsed, Setting(names)))
    refused = [row for rows in groups for row in rows if "error" in row]
    assert [(row["name"], row["operation"]) for row in refused] == [(names[0], "round trip")]
    assert "8 tokens, bfloat16, round trip does not run: NotImplementedError: fallback" in jax_best.failure(refused[0])
    timed = [row for rows in groups for row in rows if "error" not in row]
    assert {row["name"] for row in timed} == {names[1]} and len(timed) == 5

    parsed = options.parse(["jax-best", *sizes, "--peer-operations", "round trip"])
    monkeypatch.setattr(
        jax_best,
        "measure",
        lambda options, tokens, dtype, names, operations: [
            {"name": name, "us_median": 1.0, "operation": operation, "dtype": dtype}
            for name in names
            for operation in operations
        ],
    )
    asked = [(row["dtype"], row["operation"]) for rows in jax_best.figures(parsed, Setting(names)) for row in rows]
    assert set(asked) == {("bfloat16", "round trip"), ("float8_e4m3fn", "round trip")}


def test_the_librarys_own_program_must_run(monkeypatch):
    monkeypatch.setattr(programs, "own_programs", lambda *_: [broken])
    broken = programs.round_trip_program("own", lambda *_: 1 / 0)
    parsed = options.parse(
        "jax-best --ranks 2 --tokens 8 --hidden 128 --experts 4 --top-k 2 --inner 1 --repeats 1".split()
    )
    with pytest.raises(ZeroDivisionError):
        list(jax_best.figures(parsed, SETTINGS[OURS]))


def test_flags_and_processes_reach_the_child(monkeypatch, tmp_path):
    given = []

    def popen(command, env, **_):
        given.append((command, env["XLA_FLAGS"]))
        assert (env["FIRST"], env["SECOND"]) == ("1", "a=b") and env["PYTHONPATH"]

    monkeypatch.setattr(jax_best.subprocess, "Popen", popen)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_caller=1")
    parsed = options.parse("jax-best --deepseek-v3 --ranks 3".split())
    monkeypatch.setitem(SETTINGS, "x", Setting((), "--xla_a=1", True, environment="FIRST=1 SECOND=a=b"))
    part = tmp_path / "part"
    jax_best.start("x", parsed, part)
    assert len(given) == 3 and all(flags == "--xla_of_the_caller=1 --xla_a=1" for _, flags in given)
    for number, (command, _) in enumerate(given):
        child = options.parse(command[command.index("jax-best") :])
        assert (child.setting, child.process_id, child.num_processes, child.part) == ("x", number, 3, str(part))
        assert child.deepseek_v3 and child.ranks == 3


def test_a_run_adds_to_the_file_and_overwrites_no_other(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    made = {"results": [], "failed": [], "ended": "finished", "seconds": 1.0}
    monkeypatch.setattr(jax_best, "run_in_processes", lambda name, *_: (made, {"time": f"of {name}"}))

    def run(setting):
        parsed = options.parse(["jax-best", "--settings", setting, "--json", str(path)])
        benchmarks.check(parsed)
        jax_best.main(parsed, [])
        return {name: entry["time"] for name, entry in json.loads(path.read_text())["settings"].items()}

    assert run("default") == {"default": "of default"}
    assert run("memcpy p2p") == {"default": "of default", "memcpy p2p": "of memcpy p2p"}
    path.write_text('{"results": []}')
    with pytest.raises(ValueError, match="is no file of jax-best"):
        run("default")


def test_no_setting_starts_without_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jax_best, "run_in_processes", lambda *_: pytest.fail("started"))
    path = tmp_path / "out.json"
    parsed = options.parse(["jax-best", "--seconds", "10", "--json", str(path)])
    benchmarks.check(parsed)
    jax_best.main(parsed, [])
    assert json.loads(path.read_text())["left_out"] == list(SETTINGS)
    assert "left out, no time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "warp speed"], r"--settings \['warp speed'\]: must be among"),
        (["--peer-operations", "sort"], "--peer-operations 'sort': must be among"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmarks.check(options.parse(["jax-best", *arguments]))


# --------------------------------------------------------------------------------------------------- the comparison
def row(name, us, operation="round trip", dtype="bfloat16", tokens=4096):
    return {"name": name, "us_median": us, "operation": operation, "dtype": dtype, "tokens": tokens}


def document(**settings):
    entries = {name: {"results": rows, "ended": "finished", "seconds": 1.0} for name, rows in settings.items()}
    return {"settings": entries, "left_out": []}


def test_the_best_of_every_setting_is_compared_and_the_default_is_untuned():
    given = document(
        ours=[row("xen_moe_jax (default backend)", 100.0)],
        default=[row("padded all_to_all", 400.0), row("ragged_all_to_all k=64", 300.0)],
        flag=[row("padded all_to_all", 240.0), row("padded all_to_all", 90.0, "dispatch")],
    )
    dispatch, trip = jax_best.compare(given)
    assert (dispatch.operation, dispatch.ratio) == ("dispatch", None)
    assert [r["us_median"] for r in trip.default] == [400.0] and trip.best["setting"] == "flag"
    assert trip.ratio == 2.4
    assert jax_best.goal_line(given).endswith("is missed: 4096 tokens bfloat16 2.40x.")
    given["settings"]["flag"]["results"][0]["us_median"] = 250.0
    assert jax_best.goal_line(given).endswith("is met in all 1 cases.")
    assert "2.50x" in jax_best.describe(given) and "finished" in jax_best.describe(given)


def test_nothing_is_claimed_where_nothing_was_measured():
    assert jax_best.goal_line(document(ours=[row("xen_moe_jax", 1.0)])).endswith("not measured.")


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_end_to_end(count, tmp_path, monkeypatch, capsys):
    """One process with two devices, and two processes with one: the figures of both come back."""
    monkeypatch.setenv("XLA_FLAGS", quick_compiler.flags())  # the suite's eight devices for each process are too many
    sizes = "--platform cpu --ranks 2 --tokens 8 --hidden 128 --experts 4 --top-k 2 --inner 1 --repeats 1".split()
    path = tmp_path / "out.json"
    setting = "memcpy p2p" if count == 1 else "one process per device"
    arguments = ["jax-best", *sizes, "--settings", setting, "--json", str(path)]
    parsed = options.parse([*arguments, "--setting-seconds", "200"])
    assert jax_best.main(parsed, arguments) == 0
    written = json.loads(path.read_text())
    (entry,) = written["settings"].values()
    assert entry["ended"] == "finished", entry
    assert {(r["operation"], r["dtype"]) for r in entry["results"]} == {
        ("round trip", "bfloat16"), ("dispatch", "bfloat16"), ("combine", "bfloat16"),
        ("dispatch", "float8_e4m3fn"), ("round trip", "float8_e4m3fn"),
    }  # fmt: skip
    assert written["machine"]["platform"] == "cpu" and written["machine"]["processes"] == count
    assert "not measured" in capsys.readouterr().out
