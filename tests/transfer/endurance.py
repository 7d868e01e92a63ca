"""The long runs of the adversary and of the kills, as a program that writes its figures to a file.

    JAX_PLATFORMS=cpu python -m tests.transfer.endurance --json benchmarks/results/transfer_endurance.json

The functions are those of `test_adversary.py` and `test_kills.py`: an array that is torn, counted twice or changed
after its commit ends the program with an error, and nothing is written. Without `--json` the figures go to standard
output alone. On GPUs (`JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false`) `--other-device 1` has the other
processes' arrays on the second GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def commit():
    """The commit of this checkout, and whether files differ from it."""
    run = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def timed(options, run, *arguments):
    """Returns (its result, seconds), with an engine and other processes of its own."""
    import xen_moe_jax.transfer as xt
    from tests.transfer.other_process import Others

    begun = time.monotonic()
    with xt.Engine(name="here") as engine:
        others = Others(engine, **({} if options.other_device is None else {"device": options.other_device}))
        try:
            return run(engine, others, *arguments), time.monotonic() - begun
        finally:
            others.end()


class Numbers:
    """0 to `most`, or those that are begun before `seconds` are over; `count` of them so far."""

    def __init__(self, most, seconds):
        self._most, self._until, self.count = most, None if seconds is None else time.monotonic() + seconds, 0

    def __iter__(self):
        while self.count < self._most and (self._until is None or time.monotonic() < self._until):
            self.count += 1
            yield self.count


def main():
    from benchmarks.lib import report
    from tests.transfer import test_adversary, test_kills

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transfers", type=int, default=100_000, help="through the adversary; 0 leaves it out")
    parser.add_argument(
        "--kills", type=int, default=500, help="of senders, and as many of receivers; 0 leaves both out"
    )
    parser.add_argument("--kill-seconds", type=float, help="no more kills of either kind after so long")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--other-device", type=int, help="the device of the other processes' arrays")
    parser.add_argument("--json", help="the file for the figures")
    options = parser.parse_args()
    document = report.header(sys.argv[1:], None) | {
        "command": " ".join(["python -m tests.transfer.endurance", *sys.argv[1:]]),
        "commit": commit(),
        "seed": options.seed,
    }
    if options.transfers:
        found, seconds = timed(options, test_adversary.run, options.transfers, options.seed, 3000)
        names = ("writes", "failed writes", "lost connections", "generations thrown away")
        document["adversary"] = dict(zip(names, found, strict=True)) | {
            "rows in committed generations, hashed": -(-options.transfers // test_adversary.ROWS) * test_adversary.ROWS,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        print(json.dumps(document["adversary"]), flush=True)
    if options.kills:
        numbers = Numbers(options.kills, options.kill_seconds)
        (whole, thrown), seconds = timed(options, test_kills.kill_senders, numbers, options.seed)
        document["killed senders"] = {
            "kills": numbers.count,
            "whole generations": whole,
            "generations thrown away": thrown,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        print(json.dumps(document["killed senders"]), flush=True)
        numbers = Numbers(options.kills, options.kill_seconds)
        sent, seconds = timed(options, test_kills.kill_receivers, numbers, options.seed + 1)
        document["killed receivers"] = {
            "kills": numbers.count,
            "generations sent": sent,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        print(json.dumps(document["killed receivers"]), flush=True)
    if options.json:
        report.write_json(options.json, document)


if __name__ == "__main__":
    main()
