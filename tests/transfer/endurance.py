"""The long runs of the adversary and of the kills, as a program that writes its figures to a file.

    JAX_PLATFORMS=cpu python -m tests.transfer.endurance --json benchmarks/results/transfer_endurance.json

The functions are those of `test_adversary.py` and `test_kills.py`: an array that is torn, counted twice or changed
after its commit ends the program with an error, and nothing is written. Without `--json` the figures go to standard
output alone. On GPUs (`JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false`) `--other_device 1` has the other
processes' arrays on the second GPU.
"""

import json
import os
import subprocess
import sys
import time

from absl import app, flags, logging

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = flags.FLAGS

flags.DEFINE_integer("transfers", 100_000, "through the adversary; 0 leaves it out", lower_bound=0)
flags.DEFINE_integer("kills", 500, "of senders, and as many of receivers; 0 leaves both out", lower_bound=0)
flags.DEFINE_float("kill_seconds", None, "no more kills of either kind after so long")
flags.DEFINE_integer("seed", 2, "of arrays and moments")
flags.DEFINE_integer("other_device", None, "the device of the other processes' arrays")
flags.DEFINE_string("json", None, "the file for the figures")


def commit():
    """The commit of this checkout, and whether files differ from it."""
    run = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def timed(run, *arguments):
    """Returns (its result, seconds), with an engine and other processes of its own."""
    import xen_moe_jax.transfer as xt
    from tests.transfer.other_process import Others

    begun = time.monotonic()
    with xt.Engine(name="here") as engine:
        others = Others(engine, **({} if FLAGS.other_device is None else {"device": FLAGS.other_device}))
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


def main(_):
    logging.set_verbosity(logging.INFO)
    from benchmarks.lib import report
    from tests.transfer import test_adversary, test_kills

    document = report.header(sys.argv[1:], None) | {
        "command": " ".join(["python -m tests.transfer.endurance", *sys.argv[1:]]),
        "commit": commit(),
        "seed": FLAGS.seed,
    }
    if FLAGS.transfers:
        found, seconds = timed(test_adversary.run, FLAGS.transfers, FLAGS.seed, 3000)
        names = ("writes", "failed writes", "lost connections", "generations thrown away")
        document["adversary"] = dict(zip(names, found, strict=True)) | {
            "rows in committed generations, hashed": -(-FLAGS.transfers // test_adversary.ROWS) * test_adversary.ROWS,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        logging.info("adversary: %s", json.dumps(document["adversary"]))
    if FLAGS.kills:
        numbers = Numbers(FLAGS.kills, FLAGS.kill_seconds)
        (whole, thrown), seconds = timed(test_kills.kill_senders, numbers, FLAGS.seed)
        document["killed senders"] = {
            "kills": numbers.count,
            "whole generations": whole,
            "generations thrown away": thrown,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        logging.info("killed senders: %s", json.dumps(document["killed senders"]))
        numbers = Numbers(FLAGS.kills, FLAGS.kill_seconds)
        sent, seconds = timed(test_kills.kill_receivers, numbers, FLAGS.seed + 1)
        document["killed receivers"] = {
            "kills": numbers.count,
            "generations sent": sent,
            "torn generations": 0,
            "seconds": round(seconds),
        }
        logging.info("killed receivers: %s", json.dumps(document["killed receivers"]))
    if FLAGS.json:
        report.write_json(FLAGS.json, document)
    print(json.dumps(document))


if __name__ == "__main__":
    app.run(main)
