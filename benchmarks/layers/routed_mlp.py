"""The routed MLP beside its experts alone, on every Hopper GPU of the process: times, and every kernel by the profiler.

    python benchmarks/layers/routed_mlp.py [--only Qwen3-30B-A3B] [--float8] [--json FILE]

Ways: `moe_mlp` as it is, whose matmuls gather on one rank ("gathered"); the same with rows that a dispatch puts in
order ("dispatched"); the experts alone, on these groups and on groups of equal size. With --float8 the experts are in
fp8: the layer's rows come by an fp8 wire, and those of the experts alone are quantized before the clock starts. A time
is the median over rounds, in each of which the ways take turns, of calls queued at once. Results of the first two ways
are compared bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from concurrent import futures
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.lib import profile, report, turns
from xen_moe_jax.experts import float8, gathered, mlp
from xen_moe_jax.experts.arrived import ArrivedRows
from xen_moe_jax.experts.function import ExpertFunction

Shape = tuple[int, int, int, int, bool]
"""Hidden size, width, experts, top-k; True for clipped SwiGLU with biases, False for SwiGLU without."""


def shapes(ranks: int) -> dict[str, Shape]:
    """The shapes, some of them with a number of experts a rank."""
    return {
        "H 4096, I 1536, 64 experts": (4096, 1536, 64, 8, False),
        "Qwen3-30B-A3B": (2048, 768, 128, 8, False),
        "gpt-oss, 64 experts a rank": (2880, 2880, 64 * ranks, 4, True),
        "DeepSeek-V3, 16 experts a rank": (7168, 2048, 16 * ranks, 8, False),
    }


TOKENS, CAPACITY_FACTOR = 4096, 1.25
ROUNDS, CALLS = 7, 4
NAMES = ("gate", "up", "down")


class Programs:
    """A shape's operands, and its programs by (what, way). With `in_float8` the experts and the wire are in fp8."""

    def __init__(self, shape: Shape, tokens: int, in_float8: bool = False) -> None:
        hidden, width, self.experts, top_k, biased = shape
        self.ranks = jax.device_count()
        rows, local = int(CAPACITY_FACTOR * tokens * top_k), self.experts // self.ranks
        self.options: dict[str, Any] = {
            "num_experts": self.experts,
            "capacity": rows,
            "activation": "clipped_swiglu" if biased else "swiglu",
        }
        matmul: Any = "auto"
        if in_float8:
            self.options |= {"experts": float8.DTYPE, "wire": float8.DTYPE}
            matmul = float8.automatic
        activation = self.options["activation"]
        self.function = ExpertFunction(activation=activation, expert_bias=biased, grouped_matmul=matmul)

        @functools.partial(jax.jit, out_shardings=jax.NamedSharding(jax.sharding.get_mesh(), P("ep")))
        def draw() -> Any:
            keys = iter(jax.random.split(jax.random.key(0), 12))

            def normal(*sizes: int) -> jax.Array:
                scale = sizes[-2] ** -0.5 if len(sizes) == 3 else 1.0
                return (jax.random.normal(next(keys), sizes) * scale).astype(jnp.bfloat16)

            logits = jax.random.normal(next(keys), (self.ranks * tokens, self.experts))
            weights, idx = jax.lax.top_k(jax.nn.softmax(logits), top_k)
            matrices = [normal(self.experts, *of) for of in ((hidden, width), (hidden, width), (width, hidden))]
            biases = tuple(normal(self.experts, size) for size in (width, width, hidden)) if biased else None
            x, cotangent = (normal(self.ranks * tokens, hidden) for _ in range(2))
            return (x, weights, *matrices), idx, biases, cotangent, normal(self.ranks * rows, hidden)

        self.arrays, self.idx, self.biases, self.cotangent, self.rows = draw()
        counts = np.bincount(np.asarray(self.idx).reshape(-1), minlength=self.experts)
        self.sizes = {
            "experts, these groups": jnp.asarray(counts, jnp.int32),
            "experts, equal groups": jnp.full(self.experts, tokens * top_k // local, jnp.int32),
        }
        self.compiling: dict[tuple[str, str], Callable[[], Callable[[], Any]]] = {}
        by_gathering = self.ranks == 1 and not in_float8
        for way in ("gathered", "dispatched") if by_gathering else ("dispatched",):
            with mock.patch.object(gathered, "takes", gathered.takes if way == "gathered" else lambda *_: False):
                self._add(way, self._layer, (self.idx, self.biases), self.arrays, self.cotangent)
        arrived = jax.jit(xm.quantize)(self.rows) if in_float8 else None
        for way, sizes in self.sizes.items():
            self._add(way, self._experts, (sizes, self.biases, arrived), (self.rows, *self.arrays[2:]), self.rows)

    def _layer(self, fixed: Any, x: Any, weights: Any, *matrices: Any) -> jax.Array:
        def body(x: Any, idx: Any, weights: Any, *rest: Any) -> jax.Array:
            return xm.moe_mlp(x, idx, weights, *rest[:3], biases=rest[3], axis_name="ep", **self.options)

        mapped = jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep"))
        idx, biases = fixed
        return mapped(x, idx, weights, *matrices, biases)

    def _experts(self, fixed: Any, rows: Any, *matrices: Any) -> jax.Array:
        def body(rows: Any, sizes: Any, biases: Any, arrived: Any, *matrices: Any) -> jax.Array:
            rows = rows if arrived is None else ArrivedRows(rows, arrived)
            weights = dict(zip(NAMES, matrices, strict=True))
            if biases is not None:
                weights |= {f"{name}_bias": bias for name, bias in zip(NAMES, biases, strict=True)}
            return mlp.grouped_experts(self.function, rows, sizes, weights)

        mapped = jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep"))
        return mapped(rows, *fixed, *matrices)

    def _add(
        self, way: str, forward: Callable[..., Any], fixed: Any, given: tuple[Any, ...], cotangent: jax.Array
    ) -> None:
        """Adds the programs of `forward(fixed, *given)`, which is differentiated by `given`."""

        def both(cotangent: Any, fixed: Any, *given: Any) -> Any:
            out, pull = jax.vjp(functools.partial(forward, fixed), *given)
            out, cotangent = jax.lax.optimization_barrier((out, cotangent))  # as a loss would: nothing comes before it
            return out, pull(cotangent)

        programs: dict[str, tuple[Any, Any]] = {
            "forward": (jax.jit(lambda *given: forward(*given)), (fixed, *given)),
            "forward and backward": (jax.jit(both), (cotangent, fixed, *given)),
        }
        for what, (program, operands) in programs.items():
            lowered = program.lower(*operands)

            def compiled(lowered: Any = lowered, operands: Any = operands) -> Callable[[], Any]:
                return functools.partial(lowered.compile(), *operands)

            self.compiling[what, way] = compiled

    def compile(self, pool: futures.Executor) -> dict[tuple[str, str], Callable[[], Any]]:
        """Compiles the programs side by side."""
        return dict(zip(self.compiling, pool.map(lambda compiled: compiled(), self.compiling.values()), strict=True))


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Returns the median, the least and the most time of each way in us."""
    found: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            found[way] += turns.queued(call, (), CALLS, 1)
    return {way: [round(value) for value in (statistics.median(t), min(t), max(t))] for way, t in found.items()}


def differing(one: Any, other: Any) -> list[float]:
    """Returns, for each array of two results, the share of its elements that differ."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [float(jnp.mean(a != b)) for a, b in pairs]


def measure(compiled: dict[tuple[str, str], Callable[[], Any]], profiled: bool) -> dict[str, Any]:
    """Returns differences, times and, if `profiled`, kernels of a shape, for the forward pass and for both passes."""
    row: dict[str, Any] = {}
    for what in ("forward", "forward and backward"):
        calls = {way: call for (of, way), call in compiled.items() if of == what}
        row[what] = {"us median, min, max": times(calls)}
        if "gathered" in calls:
            row[what]["differing"] = differing(calls["gathered"](), calls["dispatched"]())
        if profiled:
            row[what]["kernels, us"] = {way: profile.kernels(call) for way, call in calls.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=shapes(1), default=list(shapes(1)), metavar="SHAPE")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--float8", action="store_true", help="experts in fp8, of the shapes without biases")
    parser.add_argument("--no-profile", action="store_true", help="times alone")
    parser.add_argument("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    options = parser.parse_args()
    devices = jax.device_count()
    jax.set_mesh(jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)))
    found: dict[str, Any] = {"machine": f"{devices} x {jax.devices()[0].device_kind}", "jax": jax.__version__}
    with futures.ThreadPoolExecutor(8) as pool:
        for name in options.only:
            shape = shapes(devices)[name]
            if options.float8 and shape[-1]:  # the kernels in fp8 take no biases
                continue
            compiled = Programs(shape, options.tokens, options.float8).compile(pool)
            key = f"{name}, experts in fp8" if options.float8 else name
            with turns.alone(options.lock):
                found[key] = measure(compiled, not options.no_profile)
            for what, row in found[key].items():
                print(f"{key}, {what}: {row}", flush=True)
            if options.json:
                report.add_json(options.json, found)


if __name__ == "__main__":
    main()
