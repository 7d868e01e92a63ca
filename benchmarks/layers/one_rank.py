"""The routed MLP of one rank beside its experts alone, on one Hopper GPU: times, and every kernel by the profiler.

    python benchmarks/layers/one_rank.py [--only Qwen3-30B-A3B] [--json FILE]

Ways: `moe_mlp` as it is, whose matmuls gather ("gathered"); the same with rows that a dispatch puts in order
("dispatched"); the experts alone, on these groups and on groups of equal size. A time is the median over rounds, in
each of which the ways take turns, of calls queued at once. Results of the first two ways are compared bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax.experts import gathered, mlp
from xen_moe_jax.experts.function import ExpertFunction

SHAPES: dict[str, tuple[int, int, int, int, bool]] = {
    # hidden, width, experts, top-k; True for clipped SwiGLU with biases, False for SwiGLU without
    "H 4096, I 1536, 64 experts": (4096, 1536, 64, 8, False),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, False),
    "gpt-oss, 64 experts": (2880, 2880, 64, 4, True),
    "DeepSeek-V3, 16 experts": (7168, 2048, 16, 8, False),
}
TOKENS, CAPACITY_FACTOR = 4096, 1.25
ROUNDS, CALLS, PROFILED = 7, 4, 3
NAMES = ("gate", "up", "down")


class Programs:
    """A shape's operands, and its programs by (what, way)."""

    def __init__(self, shape: tuple[int, int, int, int, bool], tokens: int) -> None:
        hidden, width, self.experts, top_k, biased = shape
        rows = int(CAPACITY_FACTOR * tokens * top_k)
        self.options: dict[str, Any] = {
            "num_experts": self.experts,
            "capacity": rows,
            "activation": "clipped_swiglu" if biased else "swiglu",
        }
        self.function = ExpertFunction(activation=self.options["activation"], expert_bias=biased)

        @jax.jit
        def draw() -> Any:
            keys = iter(jax.random.split(jax.random.key(0), 12))

            def normal(*sizes: int) -> jax.Array:
                scale = sizes[-2] ** -0.5 if len(sizes) == 3 else 1.0
                return (jax.random.normal(next(keys), sizes) * scale).astype(jnp.bfloat16)

            weights, idx = jax.lax.top_k(jax.nn.softmax(jax.random.normal(next(keys), (tokens, self.experts))), top_k)
            matrices = [normal(self.experts, *of) for of in ((hidden, width), (hidden, width), (width, hidden))]
            biases = tuple(normal(self.experts, size) for size in (width, width, hidden)) if biased else None
            return (
                (normal(tokens, hidden), weights, *matrices),
                idx,
                biases,
                normal(tokens, hidden),
                normal(rows, hidden),
            )

        self.arrays, self.idx, self.biases, self.cotangent, self.rows = draw()
        counts = np.bincount(np.asarray(self.idx).reshape(-1), minlength=self.experts)
        self.sizes = {
            "experts, these groups": jnp.asarray(counts, jnp.int32),
            "experts, equal groups": jnp.full(self.experts, tokens * top_k // self.experts, jnp.int32),
        }
        self.compiled: dict[tuple[str, str], Callable[[], Any]] = {}
        for way in ("gathered", "dispatched"):
            with mock.patch.object(gathered, "takes", gathered.takes if way == "gathered" else lambda *_: False):
                self._add(way, functools.partial(self._layer), self.arrays, self.cotangent)
        for way, sizes in self.sizes.items():
            given = (self.rows, *self.arrays[2:])
            self._add(way, functools.partial(self._experts, sizes), given, self.rows)

    def _layer(self, x: Any, weights: Any, *matrices: Any) -> jax.Array:
        def body(x: Any, idx: Any, weights: Any, *rest: Any) -> jax.Array:
            return xm.moe_mlp(x, idx, weights, *rest[:3], biases=rest[3], axis_name="ep", **self.options)

        mapped = jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep"))
        return mapped(x, self.idx, weights, *matrices, self.biases)

    def _experts(self, sizes: jax.Array, rows: Any, *matrices: Any) -> jax.Array:
        weights = dict(zip(NAMES, matrices, strict=True))
        if self.biases is not None:
            weights |= {f"{name}_bias": bias for name, bias in zip(NAMES, self.biases, strict=True)}
        return mlp.grouped_experts(self.function, rows, sizes, weights)

    def _add(self, way: str, forward: Callable[..., Any], given: tuple[Any, ...], cotangent: Any) -> None:
        def both(cotangent: Any, *given: Any) -> Any:
            out, pull = jax.vjp(forward, *given)
            return out, pull(cotangent)

        alone = jax.jit(lambda *given: forward(*given)).lower(*given).compile()
        self.compiled["forward", way] = functools.partial(alone, *given)
        with_backward = jax.jit(both).lower(cotangent, *given).compile()
        self.compiled["forward and backward", way] = functools.partial(with_backward, cotangent, *given)


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Returns the median, the least and the most time of each way in us."""
    found: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            jax.block_until_ready(call())
            began = time.perf_counter()
            for _ in range(CALLS):
                out = call()
            jax.block_until_ready(out)
            found[way].append((time.perf_counter() - began) / CALLS * 1e6)
            del out
    return {way: [round(value) for value in (statistics.median(t), min(t), max(t))] for way, t in found.items()}


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Returns the time of each kernel of a call in us, the longest first, and that from the first kernel's start to the
    last one's end."""
    found: collections.Counter[str] = collections.Counter()
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                out = call()
            jax.block_until_ready(out)
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    found[event.name.split("<")[0]] += event.duration_ns / 1e3 / PROFILED
                    ends += [event.start_ns, event.start_ns + event.duration_ns]
    whole = {"from the first to the last": round((max(ends) - min(ends)) / 1e3 / PROFILED, 1)}
    return whole | {name: round(us, 1) for name, us in found.most_common()}


def differing(one: Any, other: Any) -> list[float]:
    """Returns, for each array of two results, the share of its elements that differ."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [float(jnp.mean(a != b)) for a, b in pairs]


def measure(shape: tuple[int, int, int, int, bool], tokens: int) -> dict[str, Any]:
    """Returns differences, times and kernels of a shape, for the forward pass and for both passes."""
    programs = Programs(shape, tokens)
    ways = ("gathered", "dispatched", *programs.sizes)
    row: dict[str, Any] = {}
    for what in ("forward", "forward and backward"):
        calls = {way: programs.compiled[what, way] for way in ways}
        row[what] = {
            "differing": differing(calls["gathered"](), calls["dispatched"]()),
            "us median, min, max": times(calls),
            "kernels, us": {way: kernels(call) for way, call in calls.items()},
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    jax.set_mesh(jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)))
    found: dict[str, Any] = {"machine": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name in options.only:
        found[name] = measure(SHAPES[name], options.tokens)
        for what, row in found[name].items():
            print(f"{name}, {what}: {row['us median, min, max']}, differing {row['differing']}", flush=True)
        if options.json:  # other commands keep rows in the same file
            kept = json.loads(options.json.read_text()) if options.json.exists() else {}
            options.json.write_text(json.dumps(kept | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
