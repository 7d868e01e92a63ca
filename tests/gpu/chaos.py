"""Stops and kills processes at random: the remaining ranks wait for a stopped rank, and each of them names a killed
one.

Each job is a process per GPU that repeats a checked step. Ranks are stopped for random times, a few times each job;
then one is killed. Every survivor must then end by itself within ten seconds, with an error that names that rank, and
must never have seen a wrong row that was not poison.

    python -m tests.gpu.chaos --ranks 4 --kills 40 --stalls 200 --together 6 --seconds 900

Starting a job takes most of its time, so several run side by side on the same GPUs. With `--gpus` fewer than ranks, the
processes of a job share GPUs too, in turns that the driver deals out: a job of four then needs only one, and a step
takes some 15 ms.

Process 0 is not killed: it keeps `jax.distributed`'s service, and JAX ends every process that loses it. The ranks are
in another order in each job, so that every rank is killed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

from absl import app, flags, logging

from tests.gpu import chaos_jobs, processes

FLAGS = flags.FLAGS

flags.DEFINE_integer("ranks", None, "of a job", lower_bound=2, required=True)
flags.DEFINE_integer("kills", 40, "at the least")
flags.DEFINE_integer("stalls", 200, "at the least")
flags.DEFINE_float("seconds", 900.0, "no further job is started after this long")
flags.DEFINE_integer("together", 1, "jobs side by side on the same GPUs", lower_bound=1)
flags.DEFINE_integer("gpus", None, "that the ranks share; default: one each", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of the random moments")
flags.DEFINE_integer("ranks_per_node", None, "of virtual nodes (virtual_nodes.py)", lower_bound=1)
flags.DEFINE_string("network", None, "between virtual nodes")
flags.DEFINE_string("json", None, "file for the counts so far, after every job")


def main(_: list[str]) -> int:
    logging.set_verbosity(logging.INFO)
    gpus = FLAGS.gpus or FLAGS.ranks
    on_each = FLAGS.together * -(-FLAGS.ranks // gpus)
    share = f"{0.2 if on_each == 1 else min(0.08, 0.6 / on_each):.3f}"
    environment = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION=share)
    limits = FLAGS.ranks, FLAGS.kills, FLAGS.stalls, FLAGS.seconds

    def report(tally: chaos_jobs.Tally) -> None:  # after every job, so that a run that is stopped leaves its counts
        seen = tally.jobs, tally.kills, tally.stalls, len(tally.faults)
        logging.info("%d jobs, %d kills, %d stalls, %d faults", *seen)
        summary = dataclasses.asdict(tally) | {"ranks": FLAGS.ranks, "gpus": gpus, "together": FLAGS.together}
        if FLAGS.json:
            pathlib.Path(FLAGS.json).write_text(json.dumps(summary, indent=1) + "\n")

    shared = ["--gpus", str(gpus)] + (["--network", FLAGS.network] if FLAGS.network else [])
    how = {"seed": FLAGS.seed, "together": FLAGS.together, "per_node": FLAGS.ranks_per_node, "report": report}
    tally = chaos_jobs.run(*limits, *shared, environment=environment, **how)
    print(json.dumps(dataclasses.asdict(tally), indent=1))
    return int(bool(tally.faults) or not tally.kills)


if __name__ == "__main__":
    app.run(main)
