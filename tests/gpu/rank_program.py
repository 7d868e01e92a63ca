"""What each process of a multi-process test runs: joins the others, compares a backend with the reference, prints
PASSED.

rank_program.py --coordinator HOST:PORT --num-processes N --process-id I --backend cuda --cases grouped,padded
"""

from __future__ import annotations

import argparse
import sys

import jax
import numpy as np


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
    parser.add_argument("--cases", default="grouped,ranked,padded", help="names of the conformance table, or 'all'")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--stress-calls", type=int, default=0)
    parser.add_argument("--reverse", action="store_true", help="ranks in the opposite order of processes")
    options = parser.parse_args()

    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    local = None if options.cpu_devices else [options.process_id]
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id, local_device_ids=local)

    import xen_moe_jax as xm
    from tests.gpu import bodies, stress
    from tests.support.cases import CASES

    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if options.reverse:
        devices.reverse()
    config = xm.KernelConfig(backend=options.backend, chunk_tokens=options.chunk_tokens, timeout_s=30.0)
    wanted = set(options.cases.split(","))
    chosen = [case for case in CASES if options.cases == "all" or case.name in wanted]
    assert options.cases == "all" or len(chosen) == len(wanted), f"unknown cases among {wanted}"
    failed = []
    for case in chosen:
        if case.axes == 2:
            if len(devices) % 2:
                continue
            mesh = jax.sharding.Mesh(np.array(devices).reshape(2, -1), ("node", "gpu"))
        else:
            mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
        setup = bodies.Setup(case, mesh, mesh.axis_names, options.tokens, options.hidden)
        for routing in case.routings:
            counts = bodies.differing_elements(setup, routing, config)
            wrong = {name: count for name, count in counts.items() if count}
            print(f"{case.name}/{routing}: {wrong or 'same'}", flush=True)
            if wrong:
                failed.append(f"{case.name}/{routing}")
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
    print("FAILED " + ", ".join(failed) if failed else "PASSED", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
