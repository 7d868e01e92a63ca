"""Times the CUDA operations over numbers of thread blocks and their roles: the source of the defaults in
xen_moe_jax/backends/cuda/schedule.py.

    python -m benchmarks cuda-tuning --json FILE --seconds 150 [--only fp8-4096 ...]

One process, all GPUs as one axis. The programs, the timing loop and the bytes are those of the benchmark command;
results are not checked here (tests/gpu does that).
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
from typing import Any

import jax

import xen_moe_jax as xm
from benchmarks.lib import accounting
from xen_moe_jax.backends.cuda import schedule
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.arguments import DEEPSEEK_V3, check_writable, default_inner
from xen_moe_jax.tuning.problem import Problem, make_problem
from xen_moe_jax.tuning.workload import Workload

LARGE = [(64, 16), (64, 12), (64, 24), (64, 32), (32, 8), (32, 16), (132, 32), (16, 8), (8, 4)]
COMBINE = [(64, 40), (64, 32), (64, 24), (32, 20), (32, 16), (132, 80), (132, 64), (16, 10), (8, 5)]
SMALL = [(64, 32, 1), (64, 32, 2), (64, 32, 4), (64, 16, 2), (132, 64, 4), (132, 64, 8), (32, 16, 2)]
WIRE = "float8_e4m3fn"
TABLE = {  # name: (operation, dtype, wire, tokens, [(blocks, push blocks, parts)])
    "fp8-4096": ("dispatch", WIRE, None, 4096, [(b, p, 1) for b, p in LARGE]),
    "combine-4096": ("combine", "bfloat16", None, 4096, [(b, p, 1) for b, p in COMBINE]),
    "bf16-4096": ("dispatch", "bfloat16", None, 4096, [(b, p, 1) for b, p in LARGE[:6]]),
    "redispatch-4096": ("redispatch", "bfloat16", None, 4096, [(64, 16, 1), (64, 12, 1)]),
    "fp8wire-4096": ("dispatch", "bfloat16", WIRE, 4096, [(64, 16, 1), (64, 24, 1), (132, 32, 1)]),
    "fp8-128": ("dispatch", WIRE, None, 128, SMALL),
    "combine-128": ("combine", "bfloat16", None, 128, SMALL),
    "bf16-128": ("dispatch", "bfloat16", None, 128, SMALL[:5]),
    "fp8-1": ("dispatch", WIRE, None, 1, [(64, 32, 8), (16, 8, 8), (16, 4, 2)]),
    "combine-1": ("combine", "bfloat16", None, 1, [(64, 32, 8), (16, 8, 8), (16, 8, 2)]),
}  # fmt: skip


@functools.lru_cache(maxsize=1)  # the schedules of one entry share a problem; the next one frees it
def problem(dtype: str, wire: str | None, tokens: int, ranks: int) -> Problem:
    sizes: dict[str, Any] = {**DEEPSEEK_V3, "dtype": dtype, "wire": wire, "ranks": ranks, "pool": 1}
    return make_problem(Workload(tokens, **sizes))


def measure(name: str, ranks: int, blocks: int, push: int, parts: int, repeats: int = 4) -> dict[str, object]:
    """One figure of entry `name` of the table."""
    operation, dtype, wire, tokens, _ = TABLE[name]
    given = problem(dtype, wire, tokens, ranks)
    config = xm.KernelConfig(backend="cuda", num_sms=blocks, timeout_s=10.0)
    (program,) = programs.own_programs(given.work, given.caps, config, (operation,))
    inner = default_inner("gpu", tokens)
    with schedule.tuned(push_blocks=push, parts=parts):
        timed = timing.compile_program(program, given, inner)
    timing.measure([timed], repeats)
    rows = accounting.off_rank_rows(given.work, given.topk_idx).deduplicated
    sent = accounting.off_rank_bytes(given.work, rows, operation)
    return {
        "name": name, "operation": operation, "dtype": dtype, "wire": wire, "tokens": tokens, "blocks": blocks,
        "push_blocks": push, "parts": parts, "microseconds_best": round(min(timed.microseconds), 2),
        "microseconds_median": round(timed.median, 2), "off_rank_bytes": sent,
        "gigabytes_per_second": round(accounting.gigabytes_per_second(sent, timed.median), 1), "inner": inner,
        "repeats": repeats,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", nargs="+", choices=TABLE)
    chosen = parser.parse_args()
    check_writable("--json", chosen.json)
    began = time.monotonic()
    ranks = jax.device_count()
    document: dict[str, Any] = {
        "jax": jax.__version__, "device": jax.devices()[0].device_kind, "ranks": ranks, **DEEPSEEK_V3,
        "figures": [], "left_out": 0,
    }  # fmt: skip
    for name in chosen.only or TABLE:
        for blocks, push, parts in TABLE[name][-1]:
            if time.monotonic() - began > chosen.seconds:
                document["left_out"] += 1
                continue
            figure = measure(name, ranks, blocks, push, parts)
            document["figures"].append(figure)
            print(
                f"{name:<16} blocks {blocks:>3} push {push:>3} parts {parts}: best {figure['microseconds_best']:8.1f} "
                f"median {figure['microseconds_median']:8.1f} us {figure['gigabytes_per_second']:6.1f} GB/s",
                flush=True,
            )
            pathlib.Path(chosen.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
