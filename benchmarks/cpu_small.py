"""The benchmark command from end to end at a size that takes seconds, on 8 virtual CPU devices: it must check its results,
print its table and write JSON that a program can read. The times it prints mean nothing at this size.
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from xen_moe_jax.benchmark.command import main

SIZES = ["--tokens", "32", "--hidden", "256", "--experts", "16", "--top-k", "2"]
EFFORT = ["--inner", "2", "--repeats", "2"]


def run() -> int:
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        status = main(["--mode", "normal", *SIZES, *EFFORT, "--json", str(result)])
        if status:
            return status
        if not json.loads(result.read_text()):
            print("the benchmark wrote an empty JSON", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
