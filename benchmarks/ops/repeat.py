"""Runs the default CPU benchmark in several processes, one after the other, to see which figures repeat from process to
process.

    python -m benchmarks repeat --processes 5 --cores 62,63 --json benchmarks/results/cpu_repeated_NAME.json

The cores matter: eight virtual devices are threads, and the figures depend on how many cores they share.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.lib.options import check_writable, positive
from tools.children import bound

ROOT = pathlib.Path(__file__).resolve().parents[2]

BENCHMARK = "--platform cpu --ranks 8 --repeats 7 --inner 2"


def pinned(cores: str) -> str:
    return f"pinned to cores {cores}" if cores else "not pinned"


def run_one(cores: str, limit: float) -> dict | None:
    """One process of the benchmark; None where it did not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks", "ops", *shlex.split(BENCHMARK), "--json", str(result)]
        command = ["taskset", "-c", cores, *command] if cores else command
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        try:
            subprocess.run(bound(command), env=environment, check=True, timeout=limit, stdout=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return None
        return json.loads(result.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=positive, default=5)
    parser.add_argument("--cores", default="", help="for taskset -c; default: not pinned")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one process")
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    check_writable("--json", options.json)
    runs: list[dict[str, Any]] = []
    document = {
        "command": "python -m benchmarks repeat " + shlex.join(sys.argv[1:]),
        "benchmark": f"python -m benchmarks ops {BENCHMARK}",
        "pinned": pinned(options.cores),
        "runs": runs,
    }
    for number in range(options.processes):
        run = run_one(options.cores, options.limit)
        if run is None:
            print(f"process {number + 1} did not end in {options.limit:.0f} s", file=sys.stderr)
            continue
        runs.append(run)
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
        ratios = {row["name"]: row["times_own"] for row in run["results"] if row["operation"] == "round trip"}
        print(", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()), flush=True)
    own = [r["us_median"] for run in runs for r in run["results"] if r["operation"] == "round trip"][::4]
    if own:
        print(f"ours: {statistics.median(own) / 1e3:.0f} ms ({min(own) / 1e3:.0f} to {max(own) / 1e3:.0f})")
    return int(len(runs) < options.processes)


if __name__ == "__main__":
    sys.exit(main())
