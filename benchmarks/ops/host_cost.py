"""Measures the host's time for an operation: that of its custom call in XLA's thunk executor, from a profile, per call.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks host-cost --json host.json

Without CUDA graphs every run of the program calls the handler of every operation. The rows are one token each, so that
copies do not matter. `returns` is the time until JAX has taken the program, `ends` until it has run, both divided by
the round trips in it. `events` are the host's events of the profile, by name: how many, and how long one lasted, median
and mean, in microseconds. It needs the public API alone, and so runs on older versions too.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

HIDDEN, EXPERTS, TOP_K = 256, 8, 2


def program(mesh: jax.sharding.Mesh, trips: int):
    def body(x, idx, weights):
        for _ in range(trips):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
            x = xm.combine(routed.x, routed.handle)
        return x

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3, out_specs=P("ep"), check_vma=False))


def host_events(folder: str) -> dict[str, list[float]]:
    """Durations in microseconds, by name, of everything on the host's threads."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/host:"):
            continue
        for line in plane.lines:
            for event in line.events:
                found[event.name].append(event.duration_ns * 1e-3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=100, help="round trips in one program")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    rng = np.random.default_rng(0)
    shard = jax.sharding.NamedSharding(mesh, P("ep"))
    x = jax.device_put(rng.normal(size=(len(devices), HIDDEN)).astype(jnp.bfloat16), shard)
    idx = jax.device_put(rng.integers(0, EXPERTS, (len(devices), TOP_K)).astype(np.int32), shard)
    weights = jax.device_put(np.full((len(devices), TOP_K), 0.5, np.float32), shard)
    run = program(mesh, options.trips)
    for _ in range(3):
        jax.block_until_ready(run(x, idx, weights))
    returns, ends = [], []
    for _ in range(options.repeats):
        began = time.perf_counter()
        out = run(x, idx, weights)
        returns.append((time.perf_counter() - began) * 1e6 / options.trips)
        jax.block_until_ready(out)
        ends.append((time.perf_counter() - began) * 1e6 / options.trips)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                jax.block_until_ready(run(x, idx, weights))
        events = host_events(folder)
    rows = {
        name: {"count": len(d), "median_us": round(statistics.median(d), 3), "mean_us": round(statistics.fmean(d), 3)}
        for name, d in sorted(events.items(), key=lambda item: -sum(item[1]))[:40]
    }
    result = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "library": xm.__version__,
        "round_trips": options.trips,
        "returns_us": round(statistics.median(returns), 3),
        "ends_us": round(statistics.median(ends), 3),
        "events": rows,
    }
    pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "events"}))
    for name, row in rows.items():
        print(f"{row['median_us']:>10.2f} us median {row['mean_us']:>10.2f} mean {row['count']:>7} x {name[:90]}")


if __name__ == "__main__":
    main()
