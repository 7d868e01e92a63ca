"""A decode step of the decoder in `examples/elastic_decoder.py` in an `elastic.Group`, beside the same step in a job of
`jax.distributed`, while nothing fails.

    python benchmarks/layers/group_step.py --ranks 2 --gpus 2 [--json FILE]
    JAX_PLATFORMS=cpu python benchmarks/layers/group_step.py --ranks 2 --host

Each line has a size of the decoder and microseconds a step on rank 0, medians of `STEPS` steps in each of `--rounds`
rounds. The loops of a process take turns: in a turn every loop runs one step, and each loop is first as often as last,
so that a machine that slows down slows all loops. "job" is a job with experts at home; "job, placed" has the
placement; "job, masked" has `active` in addition, as operations in a group must; "group, bare" is a group's program
without the two calls that a loop in a group adds; and "group" has these calls, `boundary` and `check`, around every
step, as the server has. In both loops of a group a thread looks after the members. A step ends when its tokens are on
the host. "boundary and check" is the time of the two calls alone, in the loop "group", where caches are cold. `cost`
is `1 + d / b`, where `d` is the median over the turns of the time of "group" less that of "group, bare", and `b` is
the median of "group, bare"; `calls` is "boundary and check" divided by `b`. In the job the exchange is that of one
process per GPU (NVSHMEM); in the group it is CUDA IPC memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.jax_settings import ALONE  # noqa: E402
from tools.children import bound  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "the example's": {},
    "Qwen3-30B-A3B, 4 layers": {
        "HIDDEN": 2048, "LAYERS": 4, "EXPERTS": 128, "TOP_K": 8, "WIDTH": 768, "ROWS": 32, "LENGTH": 128, "SLOTS": 64,
    },
}  # fmt: skip
STEPS, WARM_STEPS = 300, 30


def example(size: str) -> Any:
    """Returns the module of the decoder, with the dimensions that `SIZES` has for this size."""
    spec = importlib.util.spec_from_file_location("elastic_decoder", ROOT / "examples" / "elastic_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in SIZES[size].items():
        setattr(module, name, value)
    return module


def weights(serve: Any) -> tuple[Any, Any]:
    """Returns the random weights that every rank has, and the experts of one rank, whose weights all have one value."""
    import jax
    import jax.numpy as jnp

    h, w = serve.HIDDEN, serve.WIDTH
    shapes = {
        "embedding": (serve.VOCAB, h),
        "position": (serve.LENGTH, h),
        "attention": (serve.LAYERS, 4, h, h),
        "router": (serve.LAYERS, h, serve.EXPERTS),
        "out": (h, serve.VOCAB),
    }
    keys = jax.random.split(jax.random.key(35), len(shapes))
    dense = {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    experts = {"gate_up": (serve.LAYERS, serve.SLOTS, h, 2 * w), "down": (serve.LAYERS, serve.SLOTS, w, h)}
    return dense, {name: jnp.full(shape, shape[-2] ** -0.5, jnp.float32) for name, shape in experts.items()}


def times_of(steps: dict[str, Any], states: dict[str, Any]) -> dict[str, list[float]]:
    """Runs the loops in turns. Returns by loop the microseconds of `STEPS` steps, which `WARM_STEPS` others precede.

    Args:
      steps: by the name of a loop, the function of one step, which takes a state and returns the next one.
      states: by the name of a loop, its first state; holds the last one afterwards.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_STEPS + STEPS):
        for name in [*steps][:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            states[name] = steps[name](states[name])
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: values[WARM_STEPS:] for name, values in times.items()}


def inputs(serve: Any) -> tuple[Any, Any, Any]:
    """Returns tokens and positions, int32 `[ROWS]`, and which rows are used, bool `[ROWS]`: all."""
    import numpy as np

    rows = serve.ROWS
    return np.arange(rows, dtype=np.int32) % serve.VOCAB, np.full(rows, 5, np.int32), np.ones(rows, bool)


def in_a_group(size: str, rank: int, ranks: int, folder: str, host: bool) -> dict[str, list[float]]:
    """Runs the loops "group" and "group, bare" on one rank. Returns their times as `times_of` does, and under "boundary
    and check" the microseconds of these two calls in each step of the loop "group"."""
    import jax
    import numpy as np

    import xen_moe_jax as xm

    serve = example(size)
    base = xm.balance.plan(np.ones(serve.EXPERTS), num_ranks=ranks, slots_per_rank=serve.SLOTS)
    with xm.elastic.Group(folder, ranks, slot=rank, placement=base, timeout_s=60.0) as group:
        run, tokens = serve.make_step(group.axis_name, not host), jax.device_put(inputs(serve))
        dense, experts = weights(serve)
        members = jax.device_put((group.active(), group.placement))
        out, cache = run(dense, experts, serve.empty_cache(serve.ROWS), *tokens, *members)
        jax.block_until_ready(cache)
        group.join(start_with=ranks)
        members, number = jax.device_put((group.active(), group.placement)), 0
        calls: list[float] = []

        def bare(cache: Any) -> Any:
            out, cache = run(dense, experts, cache, *tokens, *members)
            np.asarray(out)  # as in the job: `jax.device_get` takes 50 us longer
            return cache

        def whole(cache: Any) -> Any:
            nonlocal number
            began = time.perf_counter()
            if group.boundary(number) is not None:
                raise RuntimeError("the members have changed")
            ready = time.perf_counter()
            cache = bare(cache)
            ended = time.perf_counter()
            xm.check()
            calls.append((time.perf_counter() - ended + ready - began) * 1e6)
            number += 1
            return cache

        steps = {"group": whole, "group, bare": bare}
        found = times_of(steps, {name: serve.empty_cache(serve.ROWS) for name in steps})
        xm.check()
    return {**found, "boundary and check": calls}


def in_a_job(size: str, rank: int, ranks: int, port: str, host: bool) -> dict[str, list[float]]:
    """Runs the loops "job", "job, placed" and "job, masked" on one rank; returns what `times_of` does."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import xen_moe_jax as xm

    jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank)
    serve = example(size)
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    placement = xm.balance.plan(np.ones(serve.EXPERTS), num_ranks=ranks, slots_per_rank=serve.SLOTS)
    config = None if host else xm.KernelConfig(backend="cuda", timeout_s=60.0)

    def spread(local: Any, axis: int | None = None) -> Any:
        """Returns the array that has this process's `local` as its part along `axis`; None: the same on every rank."""
        shape, part = list(local.shape), P()
        if axis is not None:
            shape[axis], part = ranks * shape[axis], P(*[None] * axis, "ep")
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, part), [jnp.asarray(local)])

    def new_cache() -> Any:
        cache = serve.empty_cache(serve.ROWS)
        return {"kv": spread(cache["kv"], 2), "counts": spread(cache["counts"], 0)}

    def step(dense: Any, experts: Any, cache: Any, tokens: Any, positions: Any, used: Any, options: Any) -> Any:
        def moe(layer: int, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
            routed = xm.dispatch(
                x, topk_idx, topk_weights, num_experts=serve.EXPERTS, axis_name="ep", config=config, **options
            )
            hidden = jax.lax.ragged_dot(routed.x, experts["gate_up"][layer], routed.group_sizes)
            gate, up = hidden[:, : serve.WIDTH], hidden[:, serve.WIDTH :]
            y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts["down"][layer], routed.group_sizes)
            return xm.combine(y, routed.handle, config=config)

        return serve.decode_step(dense, cache, tokens, positions, used, moe)

    dense, experts = weights(serve)
    dense = {name: spread(array) for name, array in dense.items()}
    experts = {name: spread(array, 1) for name, array in experts.items()}
    tokens, steps = [spread(array, 0) for array in inputs(serve)], {}
    options = {"active": jnp.ones(ranks, bool), "placement": placement}
    of_cache = {"kv": P(None, None, "ep"), "counts": P("ep")}
    specs = (P(), P(None, "ep"), of_cache, P("ep"), P("ep"), P("ep"), P())
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("ep"), of_cache), check_vma=False)
    traced = jax.jit(mapped, donate_argnums=2)
    names = {"job": (), "job, placed": ("placement",), "job, masked": ("active", "placement")}
    given = [
        jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), {n: options[n] for n in of})
        for of in names.values()
    ]
    lowered = [traced.lower(dense, experts, new_cache(), *tokens, chosen) for chosen in given]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda one: one.compile(), lowered))
    for name, run, chosen in zip(names, programs, given, strict=True):

        def one(cache: Any, run: Any = run, chosen: Any = chosen) -> Any:
            out, cache = run(dense, experts, cache, *tokens, chosen)
            np.asarray(out.addressable_shards[0].data)
            xm.check()
            return cache

        steps[name] = one
    return times_of(steps, {name: new_cache() for name in steps})


def rank_main(given: argparse.Namespace) -> None:
    """Runs the process of one rank; rank 0 prints its times."""
    import jax

    if given.gpus > 1:  # one GPU for JAX; kernels reach the memory of the others
        jax.config.update("jax_cuda_visible_devices", "0")
    run = in_a_group if given.what == "group" else in_a_job
    found = run(given.size, given.rank, given.ranks, given.where, given.host)
    if given.rank == 0:
        kind = jax.devices()[0].device_kind
        print("RESULT " + json.dumps({"device": kind, "us": found}), flush=True)


def run(size: str, what: str, ranks: int, gpus: int, host: bool) -> dict[str, Any]:
    """Starts the ranks; returns what rank 0 has found."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"{folder}/group" if what == "group" else str(s.getsockname()[1])
        s.close()
        processes = []
        for rank in range(ranks):
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            if what == "job":
                env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {ALONE}"
            if not host:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
                order = [visible[(rank + i) % gpus] for i in range(gpus if what == "group" else 1)]
                env["CUDA_VISIBLE_DEVICES"] = ",".join(order)
            command = [sys.executable, __file__, "--what", what, "--rank", str(rank), "--where", where, "--size", size]
            command += ["--ranks", str(ranks), "--gpus", str(gpus if what == "group" else 1)] + ["--host"] * host
            processes.append(subprocess.Popen(bound(command), env=env, stdout=subprocess.PIPE, text=True))
        try:
            texts = [process.communicate(timeout=240)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{what}: ranks ended with {[process.returncode for process in processes]}")
    return json.loads(
        next(line for line in texts[0].splitlines() if line.startswith("RESULT ")).removeprefix("RESULT ")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--host", action="store_true", help="exchange through the host in the group, plain JAX in both")
    parser.add_argument("--size", choices=SIZES, help="this size alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    for hidden in ("--what", "--where"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return rank_main(given)
    lines = []
    for size in [given.size] if given.size else SIZES:
        found: dict[str, list[float]] = {}
        device = ""
        for _ in range(given.rounds):
            for what in ("group", "job"):
                one = run(size, what, given.ranks, given.gpus, given.host)
                device = one["device"]
                for name, values in one["us"].items():
                    print(f"{size}: {name}: {statistics.median(values):.1f} us", flush=True)
                    found.setdefault(name, []).extend(values)
        us = {name: round(statistics.median(values), 1) for name, values in found.items()}
        pairs = zip(found["group"], found["group, bare"], strict=True)
        cost = round(1 + statistics.median(a - b for a, b in pairs) / us["group, bare"], 4)
        share = us["boundary and check"] / us["group, bare"]
        line = {"size": size, "device": device, "ranks": given.ranks, "us": us}
        lines.append({**line, "cost": cost, "calls": round(share, 4)})
        print(json.dumps(lines[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
