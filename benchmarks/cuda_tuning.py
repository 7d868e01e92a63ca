"""Times the CUDA operations over numbers of thread blocks and their roles: what the defaults in
xen_moe_jax/_cuda_backend/schedule.py were chosen from.

    python benchmarks/cuda_tuning.py --json FILE --seconds 150 [--only fp8-4096 ...]

One process, all GPUs as one axis. Each figure is a loop of dependent calls inside one jit, divided by its length: best
and median of the repeats. Routing is uniform and fixed; results are not checked here (tests/gpu does that).
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import xen_moe_jax as xm
from xen_moe_jax.backends.cuda import schedule

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
LARGE = [(64, 16), (64, 12), (64, 24), (64, 32), (32, 8), (32, 16), (132, 32), (16, 8), (8, 4)]
COMBINE = [(64, 40), (64, 32), (64, 24), (32, 20), (32, 16), (132, 80), (132, 64), (16, 10), (8, 5)]
SMALL = [(64, 32, 1), (64, 32, 2), (64, 32, 4), (64, 16, 2), (132, 64, 4), (132, 64, 8), (32, 16, 2)]
TABLE = {  # name: (operation, dtype, tokens, [(blocks, push blocks, parts)])
    "fp8-4096": ("dispatch", "float8_e4m3fn", 4096, [(b, p, 1) for b, p in LARGE]),
    "combine-4096": ("combine", "bfloat16", 4096, [(b, p, 1) for b, p in COMBINE]),
    "bf16-4096": ("dispatch", "bfloat16", 4096, [(b, p, 1) for b, p in LARGE[:6]]),
    "redispatch-4096": ("redispatch", "bfloat16", 4096, [(64, 16, 1), (64, 12, 1)]),
    "fp8wire-4096": ("fp8 wire", "bfloat16", 4096, [(64, 16, 1), (64, 24, 1), (132, 32, 1)]),
    "fp8-128": ("dispatch", "float8_e4m3fn", 128, SMALL),
    "combine-128": ("combine", "bfloat16", 128, SMALL),
    "bf16-128": ("dispatch", "bfloat16", 128, SMALL[:5]),
    "fp8-1": ("dispatch", "float8_e4m3fn", 1, [(64, 32, 8), (16, 8, 8), (16, 4, 2)]),
    "combine-1": ("combine", "bfloat16", 1, [(64, 32, 8), (16, 8, 8), (16, 8, 2)]),
}  # fmt: skip


def routing(tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.argpartition(rng.random((tokens, EXPERTS)), TOP_K, axis=1)[:, :TOP_K].astype(np.int32)


def off_rank_rows(idx: np.ndarray, ranks: int) -> int:
    """Rows that leave the busiest rank: one per token and other rank."""
    owner = idx.reshape(ranks, -1, TOP_K) // (EXPERTS // ranks)
    sent = [sum(len(set(row) - {rank}) for row in owner[rank]) for rank in range(ranks)]
    return max(sent)


def loop(operation: str, inner: int, config: xm.KernelConfig, x, idx, weights):
    """`inner` dependent calls; returns something small that depends on all."""
    make = functools.partial(xm.dispatch, num_experts=EXPERTS, axis_name="ep", config=config)

    def depend(x, out):
        """x, with one element of its first array taken from `out`: the next call cannot be hoisted or dropped."""
        leaves, tree = jax.tree.flatten(x)
        leaves[0] = jax.lax.dynamic_update_slice(leaves[0], out[:1, :1].astype(leaves[0].dtype), (0, 0))
        return tree.unflatten(leaves)

    if operation in ("dispatch", "fp8 wire"):
        wire = "float8_e4m3fn" if operation == "fp8 wire" else None

        def body(_, x):
            return depend(x, jax.tree.leaves(make(x, idx, weights, wire=wire).x)[0])

        return jax.tree.leaves(jax.lax.fori_loop(0, inner, body, x))[0][:1]
    routed = make(x, idx, weights)
    if operation == "redispatch":

        def body(_, x):
            return depend(x, xm.redispatch(x, routed.handle, config=config))

        return jax.lax.fori_loop(0, inner, body, x)[:1]

    def body(_, carry):
        y, out = carry
        y = depend(y, out)
        return y, xm.combine(y, routed.handle, config=config)

    return jax.lax.fori_loop(0, inner, body, (routed.x, x))[1][:1]


def measure(mesh, operation, dtype, tokens, blocks, push, parts, repeats=4):
    ranks = mesh.size
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    idx = routing(ranks * tokens)
    rng = np.random.default_rng(1)
    x = jax.device_put(rng.standard_normal((ranks * tokens, HIDDEN), np.float32).astype(jnp.bfloat16), sharding)
    if dtype == "float8_e4m3fn":
        x = xm.quantize(x)
    operands = (x, jax.device_put(idx, sharding), jax.device_put(np.full(idx.shape, 0.125, np.float32), sharding))
    config = xm.KernelConfig(backend="cuda", num_sms=blocks, timeout_s=10.0)
    inner = 400 if tokens > 512 else 1000  # starting a program on four GPUs takes more than a millisecond
    run = functools.partial(loop, operation, inner, config)
    spec = PartitionSpec("ep")
    with schedule.tuned(push_blocks=push, parts=parts):
        compiled = (
            jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False))
            .lower(*operands)
            .compile()
        )
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append((time.perf_counter() - began) / inner * 1e6)
    value_bytes = 1 if dtype == "float8_e4m3fn" or operation == "fp8 wire" else 2
    row = HIDDEN * value_bytes + (HIDDEN // 128 * 4 if value_bytes == 1 else 0)
    sent = off_rank_rows(idx, ranks) * row
    best, median = min(times[1:]), statistics.median(times[1:])
    return {
        "operation": operation, "dtype": dtype, "tokens": tokens, "blocks": blocks, "push_blocks": push, "parts": parts,
        "microseconds_best": round(best, 2), "microseconds_median": round(median, 2), "off_rank_bytes": sent,
        "gigabytes_per_second": round(sent / median / 1e3, 1), "inner": inner, "repeats": repeats,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", nargs="+", choices=TABLE)
    options = parser.parse_args()
    began = time.monotonic()
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    document = {
        "jax": jax.__version__, "device": jax.devices()[0].device_kind, "ranks": mesh.size, "hidden": HIDDEN,
        "experts": EXPERTS, "top_k": TOP_K, "figures": [], "left_out": 0,
    }  # fmt: skip
    for name in options.only or TABLE:
        operation, dtype, tokens, cuts = TABLE[name]
        for blocks, push, parts in cuts:
            if time.monotonic() - began > options.seconds:
                document["left_out"] += 1
                continue
            figure = {"name": name, **measure(mesh, operation, dtype, tokens, blocks, push, parts)}
            document["figures"].append(figure)
            print(
                f"{name:<16} blocks {blocks:>3} push {push:>3} parts {parts}: best {figure['microseconds_best']:8.1f} "
                f"median {figure['microseconds_median']:8.1f} us {figure['gigabytes_per_second']:6.1f} GB/s",
                flush=True,
            )
            pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
