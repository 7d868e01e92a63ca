"""Many random calls back to back, with mixed shapes, layouts and skew, no pause between: every result checked by its
hash.

A bounded set of programs is compiled ahead. The host only picks which program runs next; which routing a call takes,
and where its hash goes, is read on the device, so that calls queue up as fast as the host can issue them. Afterwards
each hash is compared with that of the same program on the reference backend: a mismatch names the call, the program,
the routing and the rank.

    python tests/gpu/stress.py --calls 20000 --seconds 90
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.gpu import bodies
from tests.gpu.bodies import Setup
from tests.gpu.random_calls import hash_of
from tests.support.cases import Case

POOL = ("uniform", "zipf", "one_hot", "empty", "duplicates", "idle_ranks", "out_of_range", "one_token")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One program: a case at a size. `mode` is `KernelConfig.mode`."""

    case: Case
    num_tokens: int
    hidden: int
    mode: str = "auto"


SHAPES = (
    Shape(Case("deepseek-fp8", experts=lambda r: 16 * r, top_k=8, wire="float8_e4m3fn", capacity=1024), 64, 7168),
    Shape(Case("deepseek-scaled", experts=lambda r: 16 * r, top_k=8, block_scaled="float8_e4m3fn"), 32, 7168),
    Shape(Case("wide-grouped", experts=lambda r: 16 * r, top_k=6, alignment=8), 128, 2048, "throughput"),
    Shape(Case("long-grouped", experts=lambda r: 4 * r, top_k=2), 700, 512, "throughput"),
    Shape(Case("uneven", experts=lambda r: 2 * r + 3, top_k=3, dtype="float32"), 33, 384),
    Shape(Case("dropping", experts=lambda r: 2 * r, top_k=4, capacity=40), 50, 256),
    Shape(Case("ranked", layout="ranked", experts=lambda r: 8 * r, top_k=8), 100, 1024),
    Shape(Case("ranked-f16", layout="ranked", experts=lambda r: r, top_k=2, dtype="float16"), 17, 256),
    Shape(Case("decode", layout="padded", experts=lambda r: 8 * r, top_k=8), 8, 4096, "low_latency"),
    Shape(
        Case("decode-fp8", layout="padded", experts=lambda r: 8 * r, top_k=8, wire="float8_e4m3fn"),
        32,
        2048,
        "low_latency",
    ),
    Shape(Case("one-token", layout="padded", experts=lambda r: 4 * r, top_k=4), 1, 7168, "low_latency"),
    Shape(Case("odd-hidden", experts=lambda r: 2 * r, top_k=2), 24, 200),
)
"""Static shapes; small enough that a call takes tens of microseconds, different enough that workspaces are shared
unevenly.
"""


def hash_results(results: dict[str, Any]) -> jax.Array:
    """Returns a hash of all specified elements, uint32 `[]`. It does not depend on the order in which the elements of a
    result are added."""
    total = jnp.uint32(0)
    for array, keep in results.values():
        total = total * jnp.uint32(31) + hash_of(array, keep)
    return total


class Program:
    """One shape compiled for one backend: `state -> state`, hashing one call into the log."""

    def __init__(self, setup: Setup, config: xm.KernelConfig):
        self.setup, self.config = setup, config
        routings = [bodies.draw_routing(setup, name) for name in POOL]
        capacity = bodies.resolve_capacity(setup, routings)
        operands = [bodies.draw_operands(setup, idx, seed) for seed, idx in enumerate(routings)]
        pool_spec = P(None, *setup.spec)
        self.pools = tuple(setup.place(np.stack(values), pool_spec) for values in zip(*operands, strict=True))

        def call(log, count, choices, *pools):
            chosen = choices[count[0]]
            results = bodies.outcome(setup, capacity, config, tuple(pool[chosen] for pool in pools), gradients=False)
            return log.at[count[0]].set(hash_results(results)), count + 1

        mapped = jax.shard_map(
            call, mesh=setup.mesh, in_specs=(setup.spec,) * 3 + (pool_spec,) * 4, out_specs=setup.spec, check_vma=False
        )
        self.jitted = jax.jit(mapped, donate_argnums=(0, 1))
        self.compiled: Any = None

    def compile(self, state: tuple) -> None:
        self.compiled = self.jitted.lower(*state, *self.pools).compile()

    def __call__(self, state: tuple) -> tuple:
        log, count, choices = state
        return (*self.compiled(log, count, choices, *self.pools), choices)


def start_state(setup: Setup, choices: np.ndarray) -> tuple:
    """An empty log, a call counter and the routing that each call takes, one copy for each rank."""
    positions = setup.mesh.size
    return (
        setup.place(np.zeros(positions * len(choices), np.uint32)),
        setup.place(np.zeros(positions, np.int32)),
        setup.place(np.tile(choices.astype(np.int32), positions)),
    )


def local_rows(values: jax.Array) -> dict[int, np.ndarray]:
    """Rank -> its share, for the ranks of this process."""
    shares = {}
    for shard in values.addressable_shards:
        length = shard.data.shape[0]
        shares[(shard.index[0].start or 0) // length] = np.asarray(shard.data)
    return shares


@dataclasses.dataclass
class Result:
    """`seconds` is the time of the random calls alone, without compilation and without the reference."""

    calls: int
    seconds: float
    compile_seconds: float
    mismatches: list[str]


def run(
    mesh: Mesh,
    config: xm.KernelConfig,
    *,
    calls: int,
    against: xm.KernelConfig = bodies.REFERENCE,
    shapes: tuple[Shape, ...] = SHAPES,
    seed: int = 0,
    seconds: float = float("inf"),
    compile_threads: int = 1,
) -> Result:
    """Issues `calls` random calls; stops early, with fewer calls in the result, when `seconds` have passed.

    No call waits for the one before, except on CPU: XLA's CPU collectives may starve each other of threads when two
    programs are in flight.
    """
    rng = np.random.default_rng(seed)
    order = rng.integers(0, len(shapes), calls)
    choices = rng.integers(0, len(POOL), calls)
    axis_name = mesh.axis_names
    setups = [Setup(s.case, mesh, axis_name, s.num_tokens, s.hidden) for s in shapes]
    ours = [Program(s, dataclasses.replace(config, mode=shape.mode)) for s, shape in zip(setups, shapes, strict=True)]
    theirs = [Program(s, against) for s in setups]
    state, short = start_state(setups[0], choices), start_state(setups[0], np.arange(len(POOL)))

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(compile_threads) as pool:
        jobs = [pool.submit(p.compile, state) for p in ours] + [pool.submit(p.compile, short) for p in theirs]
        for job in jobs:
            job.result()
    expected = []
    for program in theirs:
        one = start_state(setups[0], np.arange(len(POOL)))
        for _ in POOL:
            one = jax.block_until_ready(program(one))
        expected.append(local_rows(one[0]))
    for program in ours:  # first runs load kernels and grow buffers
        jax.block_until_ready(program(start_state(setups[0], choices)))
    compile_seconds = time.perf_counter() - began

    began = time.perf_counter()
    done = 0
    for done in range(1, calls + 1):
        state = ours[order[done - 1]](state)
        if mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(state)
        if done % 256 == 0 and time.perf_counter() - began > seconds:
            break
    jax.block_until_ready(state)
    elapsed = time.perf_counter() - began
    return Result(
        done, elapsed, compile_seconds, mismatches(local_rows(state[0]), expected, order, choices, done, shapes)
    )


def mismatches(logs, expected, order, choices, done: int, shapes) -> list[str]:
    """One line for each call whose hash is wrong."""
    wrong = []
    for rank, log in sorted(logs.items()):
        table = np.stack([e[rank] for e in expected])
        for call in np.flatnonzero(log[:done] != table[order[:done], choices[:done]]):
            wrong.append(f"call {call}: {shapes[order[call]].case.name}/{POOL[choices[call]]}, rank {rank}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=0, help="default: every device")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="give up, and fail, after this long")
    parser.add_argument("--threads", type=int, default=8, help="compilations at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    devices = jax.devices()[: options.ranks or None]
    mesh = Mesh(np.array(devices), ("ep",))
    result = run(
        mesh,
        xm.KernelConfig(backend=options.backend),
        calls=options.calls,
        seed=options.seed,
        seconds=options.seconds,
        compile_threads=options.threads,
    )
    summary = dataclasses.asdict(result) | {
        "ranks": len(devices),
        "device": devices[0].device_kind,
        "wanted": options.calls,
    }
    summary["mismatches"] = result.mismatches[:20]
    summary["num_mismatches"] = len(result.mismatches)
    print(json.dumps(summary, indent=1))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(result.mismatches) or result.calls < options.calls)


if __name__ == "__main__":
    sys.exit(main())
