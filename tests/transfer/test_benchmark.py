"""`python -m benchmarks transfer`: its table, its JSON, and the check of arrived bytes."""

import json
import os
import subprocess
import sys

import jax
import numpy as np

from benchmarks.transfer import writes
from tests.support import HANG_S, ROOT, transfer

transfer.require()


def test_the_command(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "transfer", "--sizes", "2048"]
    done = subprocess.run(
        [*command, "--peers", "raw UCX", "--json", str(report)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    cells = {writes.key(result) for result in document["results"] if result["peer"] == "this package"}
    assert cells == {(kind, *rest) for kind, *rest in writes.cells([2048])}
    assert all(result["p99_us"] >= result["p50_us"] > 0 for result in document["results"])
    assert document["not_measured"]["raw NIXL"] == "--peers raw UCX" and "raw UCX" in done.stdout


def test_a_copy_that_fails_keeps_the_figures(monkeypatch):
    copy, not_measured = writes.transfer_peers.copy, {}
    monkeypatch.setattr(writes.transfer_peers, "copy", lambda size: copy(size) if size < 4096 else {}[size])
    rows = list(writes.measure_copies(writes.cells([2048, 4096, 8192]), not_measured))
    assert [row["bytes"] for row in rows] == [2048] and not_measured == {writes.COPY: "KeyError: 4096"}


def test_one_gpu_has_no_copy(monkeypatch):
    assert writes.transfer_peers.left_out(writes.COPY, "all") is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [None])
    assert writes.transfer_peers.left_out(writes.COPY, "all") == "a single GPU"


def test_turns_are_taken_by_all():
    order = []
    seconds = writes.time_in_turns({"a": lambda count: order.append("a" * count), "b": lambda _: order.append("b")}, 2)
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("ab", writes.MOST_REPEATS)
    turns = [name for place, name in enumerate(order) if place == 0 or order[place - 1] != name]
    assert turns == ["aa", "b"] * writes.TURNS


def test_cells_are_bounded():
    for kind, size, batch, _concurrency in writes.cells(writes.SIZES):
        assert kind == "pages" or 2 * size * batch <= writes.MOST_BYTES
    assert ("sizes", 128 << 20, 1, 16) in writes.cells(writes.SIZES)


def test_a_row_says_what_was_measured():
    result = writes.row("x", "sizes", 1000, 4, 2, [1e-3] * 98 + [2e-3] * 2)
    assert np.isclose(result["p50_us"], 1000) and np.isclose(result["p99_us"], 2000)
    assert np.isclose(result["gb_per_s"], 8000 / 1e-3 / 1e9)


def test_the_page_shows_what_the_results_say():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "transfer-table", "--check"], timeout=HANG_S, cwd=ROOT)
    assert done.returncode == 0, "run python -m benchmarks transfer-table"
