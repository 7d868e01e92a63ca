"""One rank of chaos.py: the same checked step again and again, until told to stop or an operation fails.

Prints `ready`, and at the end one line of JSON: how many steps, wrong elements that were not poison, and the failure
with the time at which it was known.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from tests.gpu import gpu_flags
from tests.support import rank_flags

FLAGS = gpu_flags.FLAGS

flags.adopt_module_key_flags(gpu_flags)
flags.DEFINE_string("order", None, "processes in rank order: 2,0,1", required=True)
flags.DEFINE_string("backend", "cuda", "of the config")


def main(_: list[str]) -> None:
    rank_flags.start_logging()
    gpu_flags.enter_nodes()
    gpu_flags.use_cpu()
    gpu_flags.join(None if FLAGS.cpu_devices else [gpu_flags.own_gpu()])

    import xen_moe_jax as xm
    from tests.gpu import programs

    by_process = {d.process_index: d for d in jax.devices()}
    mesh = jax.sharding.Mesh(np.array([by_process[int(p)] for p in FLAGS.order.split(",")]), ("ep",))
    config = xm.KernelConfig(backend=FLAGS.backend)  # the default timeout: ten minutes

    def body(x, idx, weights):
        out = programs.round_trip(config)(x, idx, weights)
        wrong = jnp.sum((out != x) & ~jnp.isnan(out))
        return (jnp.roll(x, 1, axis=0) + 1) % 8, wrong.reshape(1), jnp.sum(jnp.isnan(out)).reshape(1)

    x, idx, weights = programs.distributed_operands(mesh)
    program = programs.over(mesh, body)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    result = {"steps": 0, "wrong": 0, "poisoned": 0, "failure": "", "at": 0.0}
    x, wrong, poisoned = jax.block_until_ready(program(x, idx, weights))
    print("ready", flush=True)
    try:
        while True:
            x, wrong, poisoned = program(x, idx, weights)
            result["wrong"] += int(wrong.addressable_shards[0].data[0])
            result["poisoned"] += int(poisoned.addressable_shards[0].data[0])
            xm.check()
            if result["poisoned"]:
                time.sleep(1.0)
                xm.check()
                break  # poison without an error: the parent test reports it
            result["steps"] += 1
            if stop.is_set():
                break
    except Exception as error:  # OperationFailed, or JAX's own with the same text
        result["failure"] = str(error)
    result["at"] = time.time()
    print(json.dumps(result), flush=True)
    # jax.distributed ends every process that loses process 0, so no process leaves before all of them have printed:
    # chaos.py ends them all. At exit jax.distributed would wait for the dead.
    time.sleep(60.0)
    os._exit(0)


if __name__ == "__main__":
    app.run(main)
