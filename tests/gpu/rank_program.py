"""The program of each process of a multi-process test: joins the job, compares a backend with the reference, prints
PASSED.

rank_program.py --coordinator HOST:PORT --num_processes N --process_id I --backend cuda --cases grouped,padded

With --ranks_per_node the processes are virtual nodes of one host (virtual_nodes.py), or, without --network, on the real
nodes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time

import jax
import numpy as np
from absl import app, flags, logging

import xen_moe_jax as xm
from tests.gpu import gpu_flags, virtual_nodes
from tests.support import rank_flags

FLAGS = gpu_flags.FLAGS

flags.adopt_module_key_flags(gpu_flags)
flags.DEFINE_string("backend", "cuda", "of the config")
flags.DEFINE_integer("chunk_tokens", None, "of the config")
flags.DEFINE_enum("mode", "auto", ["auto", "throughput", "low_latency"], "of the config")
flags.DEFINE_integer("num_sms", None, "of the config: fewer where ranks run at once on one GPU")
flags.DEFINE_bool("reverse", False, "ranks in the opposite order of processes")
flags.DEFINE_bool("hide", False, "each process sees no GPU but its own, as GPU 0")
flags.DEFINE_integer("local_gpu", None, "the GPU of this process, where they are on several hosts")
flags.DEFINE_bool("real_nodes", False, "--ranks_per_node is of real nodes")
flags.DEFINE_bool("found", False, "the config says nothing of nodes: NCCL finds them")
flags.DEFINE_string("cases", "grouped,ranked,padded", "names of the conformance table, 'all' or 'none'")
flags.DEFINE_integer("half", None, "0 or 1: every other one of these cases", lower_bound=0, upper_bound=1)
flags.DEFINE_integer("tokens", 20, "of a rank")
flags.DEFINE_integer("hidden", 256, "size of a token")
flags.DEFINE_integer("stress_calls", 0, "back to back (stress.py)")
flags.DEFINE_integer("buffers", 0, "times that an xm.Buffer is opened, used and closed")
flags.DEFINE_bool("count_bytes", False, "that leave each rank for each other, over --network")
flags.DEFINE_bool("reset", False, "a rank stays away, all fail, and begin again")
flags.DEFINE_integer("random_calls", 0, "operations in jitted loops (random_calls.py)")
flags.DEFINE_float("random_seconds", float("inf"), "after which they may be fewer")
flags.DEFINE_bool("start_done", False, "programs by start and done (async_programs.py)")
flags.DEFINE_string("subsets", None, "names of cases that every subset of the ranks runs, by `active`")
flags.DEFINE_bool("time", False, "a round trip of 4,096 and of 128 tokens")
flags.DEFINE_string("json", None, "file for what rank 0 has seen")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    rank_flags.start_logging()
    began = time.monotonic()
    per_node = FLAGS.ranks_per_node
    if not FLAGS.real_nodes:
        gpu_flags.enter_nodes()
    gpu_flags.use_cpu()
    gpus = FLAGS.gpus or FLAGS.num_processes
    gpu = gpu_flags.own_gpu() if FLAGS.local_gpu is None else FLAGS.local_gpu
    if gpus < FLAGS.num_processes and not per_node:
        if os.environ.get("XEN_MOE_MEMORY") == "nccl":
            virtual_nodes.share_within_nodes()
        else:
            virtual_nodes.share_a_gpu(FLAGS.process_id)
    if FLAGS.hide:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    gpu_flags.join(None if FLAGS.cpu_devices else [0 if FLAGS.hide else gpu])

    from tests.gpu import bodies, node_programs, stress
    from tests.support.cases import CASES

    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if FLAGS.reverse:
        devices.reverse()
    config = xm.KernelConfig(
        backend=FLAGS.backend,
        chunk_tokens=FLAGS.chunk_tokens,
        timeout_s=30.0,
        mode=FLAGS.mode,
        num_sms=FLAGS.num_sms,
    )
    against = xm.KernelConfig(backend="reference", ranks_per_node=per_node)
    if per_node and not FLAGS.found:
        config = dataclasses.replace(config, ranks_per_node=per_node)
    wanted = set(FLAGS.cases.split(",")) - {"none"}
    chosen = [case for case in CASES if FLAGS.cases == "all" or case.name in wanted]
    assert FLAGS.cases == "all" or len(chosen) == len(wanted), f"unknown cases among {wanted}"
    if FLAGS.half is not None:
        chosen = chosen[FLAGS.half :: 2]
    failed = []
    for case in chosen:
        if case.axes == 2:
            if len(devices) % 2:
                continue
            shape = (-1, per_node) if per_node else (2, -1)
            mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), ("node", "gpu"))
        else:
            mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
        setup = bodies.Setup(case, mesh, mesh.axis_names, FLAGS.tokens, FLAGS.hidden)
        for routing in case.routings:
            counts = bodies.differing_elements(setup, routing, config, against=against)
            wrong = {name: count for name, count in counts.items() if count}
            logging.info("%s/%s: %s", case.name, routing, wrong or "same")
            if wrong:
                failed.append(f"{case.name}/{routing}")
    if FLAGS.buffers:
        failed += use_buffers(jax.sharding.Mesh(np.array(devices), ("ep",)), against)
    if FLAGS.stress_calls:
        mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
        shapes = (
            stress.SHAPES
            if not FLAGS.cpu_devices
            else tuple(s for s in stress.SHAPES if s.num_tokens * s.hidden < 20_000)
        )
        result = stress.run(mesh, config, calls=FLAGS.stress_calls, shapes=shapes)
        logging.info("stress: %d calls in %.1f s, %d mismatches", result.calls, result.seconds, len(result.mismatches))
        failed += result.mismatches[:5]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    seen = {"ranks": len(devices), "ranks_per_node": per_node, "cases": len(chosen), "counted": {}}
    if FLAGS.count_bytes:
        seen["counted"], wrong = node_programs.count_bytes(mesh, config, FLAGS.network, FLAGS.process_id)
        failed += wrong
    if FLAGS.random_calls:
        limits = FLAGS.random_calls, FLAGS.random_seconds
        seen["random"], wrong = node_programs.random_operations(mesh, config, against, *limits)
        failed += wrong
    if FLAGS.start_done:
        failed += node_programs.by_start_and_done(mesh, config)
    if FLAGS.subsets:
        names = FLAGS.subsets.split(",")
        failed += node_programs.every_subset(mesh, config, against, [c for c in CASES if c.name in names])
    if FLAGS.time:
        seen["microseconds"] = node_programs.time_round_trips(mesh, config)
    if FLAGS.reset:
        failed += node_programs.fail_and_reset(mesh, config)
    if FLAGS.backend == "cuda":
        failed += wrong_memory(across_nodes=bool(per_node and per_node < len(devices)))
    seen |= {"seconds": round(time.monotonic() - began, 1), "failed": failed}
    logging.info("seen: %s", json.dumps(seen))
    if FLAGS.json and FLAGS.process_id == 0:
        pathlib.Path(FLAGS.json).write_text(json.dumps(seen, indent=1) + "\n")
    print("FAILED " + ", ".join(failed) if failed else "PASSED", flush=True)
    return int(bool(failed))


def use_buffers(mesh: jax.sharding.Mesh, against: xm.KernelConfig) -> list[str]:
    """Opens and closes a buffer repeatedly on a channel of its own without naming nodes; returns the differences."""
    from tests.gpu import bodies
    from tests.support.cases import CASES
    from xen_moe_jax import cuda

    case = next(case for case in CASES if case.name == "grouped")
    setup = bodies.Setup(case, mesh, mesh.axis_names, FLAGS.tokens, FLAGS.hidden)
    config = xm.KernelConfig(backend=FLAGS.backend, channel=3, timeout_s=30.0)
    shape = {"top_k": case.top_k, "num_experts": setup.experts, "dtype": case.dtype, "hidden": FLAGS.hidden}
    failed = []
    for turn in range(FLAGS.buffers):
        with xm.Buffer(mesh, "ep", num_tokens=2 * FLAGS.tokens, channel=3, **shape):
            counts = bodies.differing_elements(setup, "uniform", config, against=against, gradients=False)
            failed += [f"buffer {turn}: {name}" for name, count in counts.items() if count]
        held = sum(w["staging_bytes"] for w in cuda.workspaces() if w["channel"] == 3)
        logging.info("buffer %d: %d bytes after closing", turn, held)
        failed += [f"buffer {turn}: {held} bytes held"] if held else []
    return failed


def wrong_memory(across_nodes: bool) -> list[str]:
    """Returns an error text if the memory between processes is not the kind that XEN_MOE_MEMORY asks for."""
    from xen_moe_jax import cuda

    used = sorted({w["memory"] for w in cuda.workspaces()})
    logging.info("memory: %s", ", ".join(used))
    default = "nccl" if across_nodes else "nvshmem"
    wanted = {"nvshmem": ["NVSHMEM"], "nccl": ["NCCL"]}.get(os.environ.get("XEN_MOE_MEMORY", default), used)
    return [] if used == wanted else [f"memory is {used}, not {wanted}"]


if __name__ == "__main__":
    app.run(main)
