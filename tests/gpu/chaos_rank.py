"""One rank of chaos.py: the same checked step again and again, until told to stop or an operation fails.

Prints `ready`, and at the end one line of JSON: how many steps, wrong elements that were not poison, and the failure
with the time at which it was known.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from tests.gpu import virtual_nodes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--order", required=True, help="processes in rank order: 2,0,1")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--gpus", type=int, help="that the processes share (default: one each)")
    parser.add_argument("--ranks-per-node", type=int, help="of virtual nodes (virtual_nodes.py)")
    parser.add_argument("--network", help="between them")
    parser.add_argument("--faults", default=virtual_nodes.FAULTS)
    parser.add_argument("--cpu", action="store_true", help="one virtual CPU device instead of a GPU")
    options = parser.parse_args()
    if options.ranks_per_node:
        enter = options.process_id, options.ranks_per_node, options.network, options.faults, options.gpus
        virtual_nodes.enter(*enter)
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
    local = None if options.cpu else [options.process_id % (options.gpus or options.num_processes)]
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id, local_device_ids=local)

    import xen_moe_jax as xm
    from tests.gpu import programs

    by_process = {d.process_index: d for d in jax.devices()}
    mesh = jax.sharding.Mesh(np.array([by_process[int(p)] for p in options.order.split(",")]), ("ep",))
    config = xm.KernelConfig(backend=options.backend)  # the default timeout: ten minutes

    def body(x, idx, weights):
        out = programs.round_trip(config)(x, idx, weights)
        wrong = jnp.sum((out != x) & ~jnp.isnan(out))
        return (jnp.roll(x, 1, axis=0) + 1) % 8, wrong.reshape(1), jnp.sum(jnp.isnan(out)).reshape(1)

    x, idx, weights = distributed_operands(mesh)
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


def distributed_operands(mesh):
    from tests.gpu import programs

    sizes = programs.SIZES
    rng = np.random.default_rng(0)
    rows = mesh.size * sizes.tokens
    idx = np.argsort(rng.random((rows, sizes.experts)), axis=1)[:, : sizes.top_k].astype(np.int32)
    values = (
        rng.integers(0, 8, (rows, sizes.hidden)).astype(np.float32),
        idx,
        np.full((rows, sizes.top_k), 0.25, np.float32),
    )
    sharding = jax.sharding.NamedSharding(mesh, programs.EP)
    return tuple(jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i]) for v in values)


if __name__ == "__main__":
    main()
