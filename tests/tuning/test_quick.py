"""`xen-moe-jax benchmark`: its rows as they come, the check of results, and the note on virtual devices."""

import json

import numpy as np
import pytest

from xen_moe_jax.tuning import arguments, quick

SIZES = "--tokens 8 --hidden 128 --experts 8 --top-k 2 --ranks 2 --inner 1 --repeats 1".split()


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """JAX has devices already."""
    monkeypatch.setattr(arguments, "start_jax", lambda *_: None)


def test_every_row_is_printed_as_soon_as_it_is_known(tmp_path, capsys, monkeypatch):
    path, seen = tmp_path / "out.json", []
    genuine = quick.cells
    monkeypatch.setattr(quick, "cells", lambda row: seen.append(capsys.readouterr().out) or genuine(row))
    assert quick.main([*SIZES, "--json", str(path)]) == 0
    head, *before = seen
    assert arguments.VIRTUAL_DEVICES in head and "vs all_to_all" in head and "round trip" not in head
    assert all(text.count("\n") == 1 for text in before), "one row between one program and the next"
    rows = json.loads(path.read_text())["results"]
    assert [row["operation"] for row in rows] == ["round trip", "dispatch", "combine", "round trip"]
    assert rows[0]["of_all_to_all"] == 1 and rows[-1]["of_all_to_all"] > 0


def test_what_is_known_stays_after_ctrl_c(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.json"
    row = {"name": "x", "operation": "dispatch", "us_median": 2.0, "us_min": 1.0, "us_max": 3.0}

    def stopped(options):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(quick, "measured", stopped)
    assert quick.main(["--json", str(path)]) == 130
    said = capsys.readouterr()
    assert "2.0" in said.out and "interrupted: 1 of 4 programs" in said.err
    assert json.loads(path.read_text())["results"] == [row]


def test_a_wrong_result_is_an_error(capsys, monkeypatch):
    from xen_moe_jax.tuning import programs

    genuine = programs.own_round_trip
    monkeypatch.setattr(
        programs, "own_round_trip", lambda *a: lambda x, idx, w, experts: genuine(*a)(x, idx, w, experts) * 1.5
    )
    assert quick.main(SIZES) == 1
    assert "the round trip is off by" in capsys.readouterr().err


def test_a_problem_that_does_not_fit_into_memory_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr("xen_moe_jax.tuning.problem.make_problem", lambda work: np.empty((1 << 46, 8)))
    assert quick.main(SIZES) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Unable to allocate") and said.count("\n") == 1


@pytest.mark.parametrize("given", [["--tokens", "0"], ["--dtype", "bfloat16"], ["--mode", "layer"]])
def test_errors_are_one_line(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        quick.main(given)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and given[0] in said
