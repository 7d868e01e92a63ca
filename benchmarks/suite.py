"""Runs a table of benchmark commands in one process, most important first, within a time budget; one JSON with every
document.

    python -m benchmarks suite gpu --json results.json --seconds 240 --link-ceiling link.json
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from benchmarks import command
from benchmarks.lib import options, report
from benchmarks.ops import operations as modes

LARGE = "--deepseek-v3 --tokens 4096"
DECODE = "low-latency --deepseek-v3 --repeats 25 --unroll 20"
SWEEP = f"sweep-sms {LARGE} --repeats 5"
OWN = "--peers none --no-compare"
PEERS = "padded all_to_all,all_gather + psum_scatter by token,ragged_all_to_all k=64"
"""Peers of the suite's larger commands. The slowest, `ragged_all_to_all k=1`, would take a minute; `jax-best` times
it."""

GPU = {
    "fp8 dispatch, bf16 combine": f"ops {LARGE} --dtype float8_e4m3fn --operations dispatch,combine --peers none",
    "bf16, against JAX's own": f"ops {LARGE} --inner 200 --repeats 3 --peers '{PEERS}'",
    "decode 128": f"{DECODE} --tokens 128 --peers '{PEERS}'",
    "decode 128 fp8": f"{DECODE} --tokens 128 --dtype float8_e4m3fn --operations dispatch {OWN}",
    "fp8 dispatch by thread blocks": f"{SWEEP} --dtype float8_e4m3fn --operations dispatch --no-compare",
    "bf16 combine by thread blocks": f"{SWEEP} --operations combine --no-compare",
    "fp8 dispatch, 64 thread blocks": f"ops {LARGE} --dtype float8_e4m3fn --num-sms 64 --operations dispatch,combine "
    f"{OWN}",
    "decode 32": f"{DECODE} --tokens 32 {OWN}",
    "decode 1": f"{DECODE} --tokens 1 {OWN}",
    "decode 32 fp8": f"{DECODE} --tokens 32 --dtype float8_e4m3fn --operations dispatch {OWN}",
    "decode 1 fp8": f"{DECODE} --tokens 1 --dtype float8_e4m3fn --operations dispatch {OWN}",
    "zipf": f"ops {LARGE} --routing zipf --operations dispatch,combine {OWN}",
    "zipf fp8": f"ops {LARGE} --routing zipf --dtype float8_e4m3fn --operations dispatch {OWN}",
    "hidden 4096": f"ops {LARGE} --hidden 4096 --operations dispatch,combine {OWN}",
    "hidden 2048": f"ops {LARGE} --hidden 2048 --operations dispatch,combine {OWN}",
    "every peer": f"ops {LARGE} --inner 100 --repeats 3 --operations 'round trip' --no-compare",
}

SMALL = f"{DECODE} --layout grouped --peers none"

DECODE_SUITE = {
    f"decode {tokens}{' fp8' if fp8 else ''}": f"{SMALL} --tokens {tokens} "
    + ("--dtype float8_e4m3fn --operations dispatch" if fp8 else "--operations dispatch,combine")
    + ("" if tokens in (1, 128) else " --no-compare")
    for tokens in (128, 1, 32, 512, 8, 256)
    for fp8 in (False, True)
} | {
    "fp8": f"ops {LARGE} --dtype float8_e4m3fn --operations dispatch --inner 200 {OWN}",
    "bf16": f"ops {LARGE} --operations dispatch,combine --inner 200 {OWN}",
    "bf16 rows, fp8 wire, 64 thread blocks": f"ops {LARGE} --wire float8_e4m3fn --combine-wire float8_e4m3fn "
    f"--num-sms 64 --operations dispatch,combine --inner 200 {OWN}",
}

# without the one-hot einsum, whose masks grow with the fullest expert: it would take half a minute a call
GATHERING = "--operations 'round trip' --peers 'padded all_to_all,all_gather + psum_scatter'"

CPU = {
    "bf16, against JAX's own": "ops --ranks 8 --tokens 1024 --hidden 1024 --experts 64 --top-k 8 --inner 2 --repeats 9",
    "zipf": f"ops --ranks 8 --routing zipf --inner 2 --repeats 5 {GATHERING}",
    "decode 32": "low-latency --ranks 8 --tokens 32 --repeats 5",
}

SUITES = {"gpu": GPU, "decode": DECODE_SUITE, "cpu": CPU}


def main() -> int:
    import shlex

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no command after this long")
    parser.add_argument("--link-ceiling", help="JSON of benchmarks/ops/link_ceiling.cu, passed on to every command")
    parser.add_argument("--ranks", type=int, help="passed on to every command")
    parser.add_argument("--lock", help="passed on to every command")
    parser.add_argument("--only", nargs="+", help="names of commands")
    chosen = parser.parse_args()
    extra = ["--platform", "cpu" if chosen.suite == "cpu" else "gpu"]
    extra += ["--ranks", str(chosen.ranks)] if chosen.ranks else []
    if chosen.link_ceiling:
        extra += ["--link-ceiling", chosen.link_ceiling]
    extra += ["--lock", chosen.lock] if chosen.lock else []

    began = time.monotonic()
    documents, failed, left_out, started = {}, {}, [], False
    for name, line in SUITES[chosen.suite].items():
        if chosen.only and name not in chosen.only:
            continue
        if time.monotonic() - began > chosen.seconds:
            left_out.append(name)
            continue
        arguments = shlex.split(line) + extra
        parsed = options.parse(arguments)
        options.check(parsed)
        if not started:
            command.start_jax(parsed)
            started = True
        print(f"== {name} ({time.monotonic() - began:.0f} s)", flush=True)
        try:
            documents[name] = modes.run(parsed, arguments)
        except Exception as error:  # one failure must not lose the figures of the next commands; the exit status tells
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
        else:
            print(modes.describe_results(documents[name]), flush=True)
        report.write_json(chosen.json, {"documents": documents, "failed": failed, "left_out": left_out})
    report.write_json(chosen.json, {"documents": documents, "failed": failed, "left_out": left_out})
    print(f"{len(documents)} measured, {len(failed)} failed {sorted(failed)}, {len(left_out)} left out {left_out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
