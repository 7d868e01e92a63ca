"""The benchmark command from end to end at a size that takes seconds, on 8 virtual CPU devices.

It checks its own results, prints its table and writes JSON that a program can read. Its times mean nothing here.
"""

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # most of its time was compiling
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX is imported

from benchmarks.__main__ import main

SIZES = ["--tokens", "32", "--hidden", "256", "--experts", "16", "--top-k", "2"]
EFFORT = ["--inner", "2", "--repeats", "2"]


def test_ops_prints_its_table_and_writes_json(tmp_path, capsys):
    result = tmp_path / "result.json"
    assert not main(["ops", *SIZES, *EFFORT, "--json", str(result)])
    assert "round trip" in capsys.readouterr().out
    assert json.loads(result.read_text())
