"""Flags that the programs of tests/gpu share, and how a process of them joins its job (tests/support/rank_flags.py)."""

from __future__ import annotations

import jax
from absl import flags

from tests.gpu import virtual_nodes
from tests.support import rank_flags

FLAGS = rank_flags.FLAGS

flags.adopt_module_key_flags(rank_flags)

flags.DEFINE_integer("gpus", None, "that the processes share; default: one each", lower_bound=1)
flags.DEFINE_integer("ranks_per_node", None, "of virtual nodes (virtual_nodes.py)", lower_bound=1)
flags.DEFINE_string("network", None, "between virtual nodes: the library that virtual_nodes.py builds")
flags.DEFINE_string("faults", virtual_nodes.FAULTS, "what --network does to puts")
flags.DEFINE_integer("cpu_devices", 0, "virtual CPU devices of each process instead of one GPU", lower_bound=0)


def enter_nodes() -> None:
    """Makes this process a rank of a virtual node where --ranks_per_node says so; before JAX starts."""
    if FLAGS.ranks_per_node:
        enter = FLAGS.process_id, FLAGS.ranks_per_node, FLAGS.network, FLAGS.faults, FLAGS.gpus
        virtual_nodes.enter(*enter)


def use_cpu() -> None:
    """Gives this process virtual CPU devices where --cpu_devices says so; before JAX starts."""
    if FLAGS.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)


def own_gpu() -> int:
    """Returns the number of the GPU that this process uses."""
    return FLAGS.process_id % (FLAGS.gpus or FLAGS.num_processes)


def join(local: list[int] | None) -> None:
    """Joins the job with the GPUs `local`, or, where it is None, with what JAX finds."""
    jax.distributed.initialize(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id, local_device_ids=local)
