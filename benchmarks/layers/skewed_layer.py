"""The routed MLP under skewed routing on every GPU of the process: experts at home, planned, and balanced exactly.

    python benchmarks/layers/skewed_layer.py [--profile] [--json FILE]

The popular experts are the first ones, on the first ranks. "uniform" has random routing without skew and room for
exactly `T * K` rows; "at home" has room for all rows; "planned" has the weights in slots of a plan of these counts,
with one eighth more slots than experts, and room for the rows that come; "by rank" has `sums="rank"`. "exact" lends
weights, as many experts in a round as the library does, and "exact, N" (`--lend N`) lends N in every product. Each time
is the median over rounds of calls that are queued at once; all programs of a pass take turns. MiB are the compiler's
temporaries. Outputs of "exact" must have the bits of "at home".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
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
from benchmarks.layers import skew
from benchmarks.lib import profile, turns
from xen_moe_jax.experts import combined, hopper, lent

ROUTINGS = {"uniform": 0.0, "Zipf 1.1": 1.1, "Zipf 1.5": 1.5}
"""Exponents of the shares of the experts."""
NAMES = ("gate", "up", "down")
PASSES = ("forward", "with backward")
PROFILED = ("uniform", "exact: uniform", "exact: Zipf 1.1")


def routing(exponent: float, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Returns int32 `[tokens, top_k]`, the experts of each token."""
    share = 1.0 / np.arange(1, experts + 1) ** exponent
    return skew.choices(share, tokens, top_k, np.random.default_rng(35)).astype(np.int32)


class Program:
    """A lowered program, whose first operand is the routing."""

    def __init__(self, lowered: Any, idx: np.ndarray, operands: tuple[Any, ...], spread: Any) -> None:
        self.lowered, self.idx, self.operands, self.spread = lowered, idx, operands, spread

    def compile(self) -> None:
        self.compiled = self.lowered.compile()
        self.MiB = round(self.compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)

    def call(self, idx: np.ndarray | None = None) -> Callable[[], Any]:
        """Returns a call, with another routing where that is given."""
        idx = self.idx if idx is None else idx
        return functools.partial(self.compiled, jax.device_put(idx, self.spread), *self.operands)


class Layer:
    """The operands of a layer, and its programs."""

    def __init__(self, given: argparse.Namespace, mesh: Any) -> None:
        self.given, self.mesh, self.ranks = given, mesh, mesh.size
        tokens, hidden, width, experts = self.ranks * given.tokens, given.hidden, given.width, given.experts
        self.spread = jax.NamedSharding(mesh, P("ep"))

        @functools.partial(jax.jit, out_shardings=self.spread)
        def draw() -> Any:
            keys = iter(jax.random.split(jax.random.key(0), 6))

            def normal(*sizes: int, scale: float = 1.0) -> jax.Array:
                return (jax.random.normal(next(keys), sizes) * scale).astype(jnp.bfloat16)

            matrices = [
                normal(experts, *size, scale=size[0] ** -0.5)
                for size in ((hidden, width), (hidden, width), (width, hidden))
            ]
            weights = jax.nn.softmax(jax.random.normal(next(keys), (tokens, given.top_k)))
            return (normal(tokens, hidden), weights, *matrices), normal(tokens, hidden)

        self.operands, self.cotangent = draw()
        self.idx = {name: routing(a, tokens, experts, given.top_k) for name, a in ROUTINGS.items()}

    def counts(self, name: str) -> np.ndarray:
        """Returns `[E]`, the rows of each expert in a routing."""
        return np.bincount(self.idx[name].ravel(), minlength=self.given.experts)

    def program(self, backward: bool, idx: np.ndarray, matrices: Any, **options: Any) -> Program:
        """Lowers a pass."""

        def body(idx: Any, x: Any, weights: Any, *matrices: Any) -> jax.Array:
            options_of_call = {"num_experts": self.given.experts, "axis_name": "ep", **options}
            return xm.moe_mlp(x, idx, weights, *matrices, **options_of_call)

        def layer(idx: Any, *given: Any) -> jax.Array:
            return jax.shard_map(body, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"))(idx, *given)

        def both(idx: Any, cotangent: Any, *given: Any) -> Any:
            out, pull = jax.vjp(functools.partial(layer, idx), *given)
            out, cotangent = jax.lax.optimization_barrier((out, cotangent))  # as a loss would: nothing comes before it
            return out, pull(cotangent)

        operands = *([self.cotangent] if backward else []), *self.operands[:2], *matrices
        traced = jax.jit(both if backward else lambda *given: layer(*given))
        return Program(traced.lower(jax.device_put(idx, self.spread), *operands), idx, operands, self.spread)

    def planned(self, name: str) -> tuple[Any, dict[str, Any]]:
        """Returns the matrices in the slots of a plan of a routing's counts, and the options of their call."""
        counts = self.counts(name)
        plan = xm.balance.plan(counts, self.ranks, self.given.experts // self.ranks * 9 // 8)
        room = -(-int(skew.loads(counts, plan).max() * 1.01) // 128) * 128

        def move(plan: Any, *matrices: Any) -> Any:
            return plan.move(matrices, None, plan, axis_name="ep")

        in_specs = (P(), *[P("ep")] * len(NAMES))
        mapped = jax.shard_map(move, mesh=self.mesh, in_specs=in_specs, out_specs=P("ep"))
        moved = jax.jit(mapped)(plan, *self.operands[2:])
        return jax.block_until_ready(moved), {"placement": plan, "capacity": room}

    def programs(self, backward: bool, chosen: list[str], lend: list[int]) -> dict[str, Program]:
        """Returns the programs of a pass by the names of their ways."""
        each, matrices, found = self.given.tokens * self.given.top_k, self.operands[2:], {}
        uniform = self.idx["uniform"]
        if "uniform" in chosen:
            found["uniform"] = self.program(backward, uniform, matrices, capacity=each)
        if "exact" in chosen:
            found["exact"] = self.program(backward, uniform, matrices, balance="exact")
        for number in lend:
            with (
                mock.patch.object(lent, "AT_ONCE", number),
                mock.patch.object(combined, "one_at_once", lambda weights: weights),
                mock.patch.object(hopper, "one_at_once", lambda weights: weights),
            ):
                jax.clear_caches()
                found[f"exact, {number}"] = self.program(backward, uniform, matrices, balance="exact")
            jax.clear_caches()
        for name, idx in self.idx.items():
            if "at home" in chosen and idx is not uniform:
                found[f"at home, {name}"] = self.program(backward, idx, matrices, capacity=self.ranks * each)
            if "planned" in chosen and idx is not uniform:
                in_slots, options = self.planned(name)
                found[f"planned, {name}"] = self.program(backward, idx, in_slots, **options)
                options["placement"] = dataclasses.replace(options["placement"], sums="rank")
                found[f"planned, {name}, by rank"] = self.program(backward, idx, in_slots, **options)
        return found


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median time of each call in ms; the calls take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in [*calls][:: 1 if turn % 2 else -1]:
            found[name] += turns.queued(calls[name], (), 4, 1)
    return {name: round(statistics.median(times) / 1e3, 3) for name, times in found.items()}


def measure(layer: Layer, what: str, programs: dict[str, Program], given: argparse.Namespace) -> dict[str, Any]:
    """Returns memory, times and, with `--profile`, kernels of a pass, and prints them."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, program in programs.items():
        if name.startswith("exact"):
            calls |= {f"{name}: {routing}": program.call(idx) for routing, idx in layer.idx.items()}
        else:
            calls[name] = program.call()
    for routing in layer.idx:
        if (home := f"at home, {routing}") not in calls:
            continue
        expected = jax.tree.leaves(calls[home]())[0]
        for name in [name for name in calls if name.endswith(f": {routing}")]:
            if not jnp.array_equal(jax.tree.leaves(calls[name]())[0], expected):
                raise RuntimeError(f"{what}, {name}: the output differs from that of experts at home")
    result: dict[str, Any] = {"MiB": {name: program.MiB for name, program in programs.items()}}
    result["ms"] = medians(calls, given.rounds)
    print(what, json.dumps(result), flush=True)
    for name in PROFILED if given.profile else ():
        if name in calls:
            result[f"kernels, us, {name}"] = kernels = profile.kernels(calls[name])
            print(what, name, json.dumps(kernels), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 4096, "hidden": 4096, "width": 1536, "experts": 64, "top_k": 8}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lend", type=int, nargs="+", default=[], metavar="N", help="experts in a round, in addition")
    parser.add_argument("--ways", nargs="+", default=["uniform", "exact", "at home", "planned"])
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--profile", action="store_true", help="every kernel of some calls")
    parser.add_argument("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = Layer(given, mesh)
    result: dict[str, Any] = {"machine": f"{devices} x {jax.devices()[0].device_kind}", "jax": jax.__version__}
    home = xm.balance.home(given.experts, devices)
    result["busiest over mean at home"] = {name: round(skew.busiest(layer.counts(name), home), 3) for name in ROUTINGS}
    print(result, flush=True)
    passes = {what: layer.programs(what == PASSES[1], given.ways, given.lend) for what in given.passes}
    print("lowered", flush=True)
    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(Program.compile, [program for programs in passes.values() for program in programs.values()]))
    print("compiled", flush=True)
    with turns.alone(given.lock):
        for what, programs in passes.items():
            result[what] = measure(layer, what, programs, given)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    xm.check()


if __name__ == "__main__":
    main()
