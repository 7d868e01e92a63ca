"""The program of each process of a multi-process test: joins the job, compares a backend with the reference, prints
PASSED.

rank_program.py --coordinator HOST:PORT --num-processes N --process-id I --backend cuda --cases grouped,padded

With --ranks-per-node the processes are virtual nodes of one host (virtual_nodes.py), or, without --network, on the real
nodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np

import xen_moe_jax as xm
from tests.gpu import virtual_nodes


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--chunk-tokens", type=int)
    parser.add_argument(
        "--cpu-devices", type=int, default=0, help="virtual CPU devices of each process instead of one GPU"
    )
    parser.add_argument(
        "--cases", default="grouped,ranked,padded", help="names of the conformance table, 'all' or 'none'"
    )
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--stress-calls", type=int, default=0)
    parser.add_argument("--buffers", type=int, default=0, help="times that an xm.Buffer is opened, used and closed")
    parser.add_argument("--reverse", action="store_true", help="ranks in the opposite order of processes")
    parser.add_argument("--gpus", type=int, help="that the processes share (default: one each)")
    parser.add_argument("--hide", action="store_true", help="each process sees no GPU but its own, as GPU 0")
    parser.add_argument("--local-gpu", type=int, help="the GPU of this process, where they are on several hosts")
    parser.add_argument("--ranks-per-node", type=int, help="of virtual nodes, unless --real-nodes")
    parser.add_argument("--real-nodes", action="store_true")
    parser.add_argument("--network", help="the library that virtual_nodes.py builds")
    parser.add_argument("--faults", default=virtual_nodes.FAULTS, help="what --network does to puts")
    parser.add_argument("--found", action="store_true", help="the config says nothing of nodes: NCCL finds them")
    parser.add_argument(
        "--count-bytes", action="store_true", help="that leave each rank for each other, over --network"
    )
    parser.add_argument("--reset", action="store_true", help="a rank stays away, all fail, and begin again")
    parser.add_argument("--random-calls", type=int, default=0, help="operations in jitted loops (random_calls.py)")
    parser.add_argument("--mode", default="auto", choices=("auto", "throughput", "low_latency"), help="of the config")
    parser.add_argument("--num-sms", type=int, help="of the config: fewer where ranks run at once on one GPU")
    parser.add_argument("--start-done", action="store_true", help="programs by start and done (async_programs.py)")
    parser.add_argument("--subsets", help="names of cases that every subset of the ranks runs, by `active`")
    parser.add_argument("--random-seconds", type=float, default=float("inf"), help="after which they may be fewer")
    parser.add_argument("--time", action="store_true", help="a round trip of 4,096 and of 128 tokens")
    parser.add_argument("--json", help="file for what rank 0 has seen")
    options = parser.parse_args()
    began = time.monotonic()
    per_node = options.ranks_per_node
    if per_node and not options.real_nodes:
        virtual_nodes.enter(options.process_id, per_node, options.network, options.faults, options.gpus)

    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    gpus = options.gpus or options.num_processes
    gpu = options.process_id % gpus
    if options.local_gpu is not None:
        gpu = options.local_gpu
    if gpus < options.num_processes and not per_node:
        if os.environ.get("XEN_MOE_MEMORY") == "nccl":
            virtual_nodes.share_within_nodes()
        else:
            virtual_nodes.share_a_gpu(options.process_id)
    if options.hide:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    local = None if options.cpu_devices else [0 if options.hide else gpu]
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id, local_device_ids=local)

    from tests.gpu import bodies, node_programs, stress
    from tests.support.cases import CASES

    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if options.reverse:
        devices.reverse()
    config = xm.KernelConfig(
        backend=options.backend,
        chunk_tokens=options.chunk_tokens,
        timeout_s=30.0,
        mode=options.mode,
        num_sms=options.num_sms,
    )
    against = xm.KernelConfig(backend="reference", ranks_per_node=per_node)
    if per_node and not options.found:
        config = dataclasses.replace(config, ranks_per_node=per_node)
    wanted = set(options.cases.split(",")) - {"none"}
    chosen = [case for case in CASES if options.cases == "all" or case.name in wanted]
    assert options.cases == "all" or len(chosen) == len(wanted), f"unknown cases among {wanted}"
    failed = []
    for case in chosen:
        if case.axes == 2:
            if len(devices) % 2:
                continue
            shape = (-1, per_node) if per_node else (2, -1)
            mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), ("node", "gpu"))
        else:
            mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
        setup = bodies.Setup(case, mesh, mesh.axis_names, options.tokens, options.hidden)
        for routing in case.routings:
            counts = bodies.differing_elements(setup, routing, config, against=against)
            wrong = {name: count for name, count in counts.items() if count}
            print(f"{case.name}/{routing}: {wrong or 'same'}", flush=True)
            if wrong:
                failed.append(f"{case.name}/{routing}")
    if options.buffers:
        failed += use_buffers(jax.sharding.Mesh(np.array(devices), ("ep",)), options, against)
    if options.stress_calls:
        mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
        shapes = (
            stress.SHAPES
            if not options.cpu_devices
            else tuple(s for s in stress.SHAPES if s.num_tokens * s.hidden < 20_000)
        )
        result = stress.run(mesh, config, calls=options.stress_calls, shapes=shapes)
        print(
            f"stress: {result.calls} calls in {result.seconds:.1f} s, {len(result.mismatches)} mismatches", flush=True
        )
        failed += result.mismatches[:5]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    seen = {"ranks": len(devices), "ranks_per_node": per_node, "cases": len(chosen), "counted": {}}
    if options.count_bytes:
        seen["counted"], wrong = node_programs.count_bytes(mesh, config, options.network, options.process_id)
        failed += wrong
    if options.random_calls:
        limits = options.random_calls, options.random_seconds
        seen["random"], wrong = node_programs.random_operations(mesh, config, against, *limits)
        failed += wrong
    if options.start_done:
        failed += node_programs.by_start_and_done(mesh, config)
    if options.subsets:
        names = options.subsets.split(",")
        failed += node_programs.every_subset(mesh, config, against, [c for c in CASES if c.name in names])
    if options.time:
        seen["microseconds"] = node_programs.time_round_trips(mesh, config)
    if options.reset:
        failed += node_programs.fail_and_reset(mesh, config)
    if options.backend == "cuda":
        failed += wrong_memory(across_nodes=bool(per_node and per_node < len(devices)))
    seen |= {"seconds": round(time.monotonic() - began, 1), "failed": failed}
    print(f"seen: {json.dumps(seen)}", flush=True)
    if options.json and options.process_id == 0:
        pathlib.Path(options.json).write_text(json.dumps(seen, indent=1) + "\n")
    print("FAILED " + ", ".join(failed) if failed else "PASSED", flush=True)
    return int(bool(failed))


def use_buffers(mesh: jax.sharding.Mesh, options: argparse.Namespace, against: xm.KernelConfig) -> list[str]:
    """Opens and closes a buffer repeatedly on a channel of its own without naming nodes; returns the differences."""
    from tests.gpu import bodies
    from tests.support.cases import CASES
    from xen_moe_jax import cuda

    case = next(case for case in CASES if case.name == "grouped")
    setup = bodies.Setup(case, mesh, mesh.axis_names, options.tokens, options.hidden)
    config = xm.KernelConfig(backend=options.backend, channel=3, timeout_s=30.0)
    shape = {"top_k": case.top_k, "num_experts": setup.experts, "dtype": case.dtype, "hidden": options.hidden}
    failed = []
    for turn in range(options.buffers):
        with xm.Buffer(mesh, "ep", num_tokens=2 * options.tokens, channel=3, **shape):
            counts = bodies.differing_elements(setup, "uniform", config, against=against, gradients=False)
            failed += [f"buffer {turn}: {name}" for name, count in counts.items() if count]
        held = sum(w["staging_bytes"] for w in cuda.workspaces() if w["channel"] == 3)
        print(f"buffer {turn}: {held} bytes after closing", flush=True)
        failed += [f"buffer {turn}: {held} bytes held"] if held else []
    return failed


def wrong_memory(across_nodes: bool) -> list[str]:
    """Returns an error text if the memory between processes is not the kind that XEN_MOE_MEMORY asks for."""
    from xen_moe_jax import cuda

    used = sorted({w["memory"] for w in cuda.workspaces()})
    print(f"memory: {', '.join(used)}", flush=True)
    default = "nccl" if across_nodes else "nvshmem"
    wanted = {"nvshmem": ["NVSHMEM"], "nccl": ["NCCL"]}.get(os.environ.get("XEN_MOE_MEMORY", default), used)
    return [] if used == wanted else [f"memory is {used}, not {wanted}"]


if __name__ == "__main__":
    sys.exit(main())
