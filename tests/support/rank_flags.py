"""Flags and logging of the programs that run once for each rank of a job (absl).

Log messages go to standard error, each line with the time and the rank. Standard output is for the test that started
the program: `ready`, a line of JSON, PASSED.
"""

from __future__ import annotations

import logging as standard_logging

from absl import flags, logging

FLAGS = flags.FLAGS

flags.DEFINE_string("coordinator", None, "HOST:PORT of jax.distributed, the same in every process", required=True)
flags.DEFINE_integer("num_processes", None, "processes of the job", lower_bound=1, required=True)
flags.DEFINE_integer("process_id", None, "of this process, from 0", lower_bound=0, required=True)


def start_logging() -> None:
    """Has absl's log at level INFO, with the rank of this process; once flags are parsed."""
    form = f"%(levelname).1s %(asctime)s.%(msecs)03d rank {FLAGS.process_id}: %(message)s"
    logging.get_absl_handler().setFormatter(standard_logging.Formatter(form, "%H:%M:%S"))
    logging.set_verbosity(logging.INFO)
