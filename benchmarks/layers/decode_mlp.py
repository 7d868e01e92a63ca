"""`moe_mlp` of a decode step on every GPU of the process, beside the time in which the GPU reads the weights.

    python benchmarks/layers/decode_mlp.py [--json FILE] [--only Qwen3-30B-A3B] [--tokens 128 16]

A program has some layers with weights of their own, one after the other: normalise, `moe_mlp`, add. CUDA graphs are
XLA's own. A time is the median over rounds of calls queued at once, divided by the layers. The bytes of weights are
those of the experts that have a token; the rate is that of a reduction over the weights of all layers.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.lib import profile, report, turns
from xen_moe_jax.experts import mlp
from xen_moe_jax.experts.function import ExpertFunction

SHAPES: dict[str, tuple[int, int, int, int, bool, int]] = {
    # hidden, width, experts, top-k, biased as in routed_mlp, layers
    "Qwen3-30B-A3B": (2048, 768, 128, 8, False, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4, True, 4),
}
ROUNDS, CALLS = 9, 20
NAMES = ("gate", "up", "down")


class Step:
    """A shape's weights, and its programs for a number of tokens."""

    def __init__(self, name: str) -> None:
        hidden, width, self.experts, self.top_k, biased, self.layers = SHAPES[name]
        self.hidden, self.ranks = hidden, jax.device_count()
        activation = "clipped_swiglu" if biased else "swiglu"
        self.options: dict[str, Any] = {"num_experts": self.experts, "activation": activation}
        self.function = ExpertFunction(activation=activation, expert_bias=biased)
        sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}

        @functools.partial(jax.jit, out_shardings=jax.NamedSharding(jax.sharding.get_mesh(), P("ep")))
        def draw(key: Any) -> dict[str, jax.Array]:
            keys = iter(jax.random.split(key, 6))
            one = {n: jax.random.normal(next(keys), (self.experts, *s), jnp.bfloat16) for n, s in sizes.items()}
            weights = {n: (w * w.shape[1] ** -0.5).astype(jnp.bfloat16) for n, w in one.items()}
            if biased:
                for n in NAMES:
                    bias = jax.random.normal(next(keys), (self.experts, weights[n].shape[2]))
                    weights[f"{n}_bias"] = bias.astype(jnp.bfloat16)
            return weights

        self.weights = [draw(key) for key in jax.random.split(jax.random.key(1), self.layers)]
        self.bytes_of_expert = sum(w.nbytes for w in self.weights[0].values()) // self.experts

    def inputs(self, tokens: int) -> Any:
        """x `[R*T, H]`, indices and router weights `[layers, R*T, K]`; sizes `[layers, E]`."""

        @jax.jit
        def draw() -> Any:
            a, b = jax.random.split(jax.random.key(2))
            x = jax.random.normal(a, (self.ranks * tokens, self.hidden)).astype(jnp.bfloat16)
            logits = jax.random.normal(b, (self.layers, self.ranks * tokens, self.experts))
            weights, idx = jax.lax.top_k(jax.nn.softmax(logits), self.top_k)
            return x, idx, weights

        x, idx, weights = draw()
        mesh = jax.sharding.get_mesh()
        x, idx, weights = (
            jax.device_put(a, jax.NamedSharding(mesh, spec))
            for a, spec in ((x, P("ep")), (idx, P(None, "ep")), (weights, P(None, "ep")))
        )
        counts = np.stack([np.bincount(layer.reshape(-1), minlength=self.experts) for layer in np.asarray(idx)])
        return x, idx, weights, jnp.asarray(counts, jnp.int32)

    def layer(self, x: Any, idx: Any, router: Any, counts: Any, own: Any) -> jax.Array:
        biases = tuple(own[f"{n}_bias"] for n in NAMES) if self.function.expert_bias else None
        return xm.moe_mlp(x, idx, router, *(own[n] for n in NAMES), biases=biases, axis_name="ep", **self.options)

    def experts_alone(self, x: Any, idx: Any, router: Any, counts: Any, own: Any) -> jax.Array:
        rows = jnp.tile(x, (self.ranks * self.top_k, 1))
        return mlp.grouped_experts(self.function, rows, counts, own)[: x.shape[0]]

    def program(self, way: str, tokens: int) -> Any:
        """The program of a way, lowered, and its operands."""
        one = self.layer if way == "moe_mlp" else self.experts_alone

        def body(x: Any, idx: Any, router: Any, counts: Any, weights: Any) -> jax.Array:
            for number, own in enumerate(weights):
                wide = x.astype(jnp.float32)
                normal = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
                x = x + one(normal, idx[number], router[number], counts[number], own)
            return x

        specs = (P("ep"), P(None, "ep"), P(None, "ep"), P(None, "ep"), P("ep"))
        operands = (*self.inputs(tokens), self.weights)
        return jax.jit(jax.shard_map(body, in_specs=specs, out_specs=P("ep"))).lower(*operands), operands

    def reading(self) -> Any:
        """A program that reads all weights of a rank and does nothing else."""

        def body(weights: Any) -> jax.Array:
            matrices = [layer[n].reshape(-1) for layer in weights for n in NAMES]
            return jnp.stack([jnp.max(jax.lax.bitcast_convert_type(m, jnp.uint16)) for m in matrices])

        return jax.jit(jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep"))).lower(self.weights), (self.weights,)


def median_us(call: Any) -> list[float]:
    """Median, least and most time of a call in us."""
    found = turns.queued(call, (), CALLS, ROUNDS)
    return [round(value, 1) for value in (statistics.median(found), min(found), max(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 16], help="of a rank")
    parser.add_argument("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    parser.add_argument("--no-profile", action="store_true")
    options = parser.parse_args()
    jax.set_mesh(jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)))
    found: dict[str, Any] = {"machine": f"{jax.device_count()} x {jax.devices()[0].device_kind}"}
    for name in options.only:
        step = Step(name)
        ways = [(way, tokens) for tokens in options.tokens for way in ("moe_mlp", "experts")]
        lowered = [step.reading(), *(step.program(*way) for way in ways)]
        with futures.ThreadPoolExecutor(8) as pool:
            compiled = list(pool.map(lambda pair: functools.partial(pair[0].compile(), *pair[1]), lowered))
        whole = sum(layer[n].nbytes for n in NAMES for layer in step.weights) // step.ranks
        with turns.alone(options.lock):
            rate = whole / median_us(compiled[0])[0]
            row: dict[str, Any] = {"TB/s of a reduction": round(rate / 1e6, 3)}
            for (way, tokens), call in zip(ways, compiled[1:], strict=True):
                counts = np.asarray(step.inputs(tokens)[3]).reshape(step.layers, step.ranks, -1)
                hit = (counts > 0).sum(axis=2).max(axis=1).mean()
                us = [round(value / step.layers, 1) for value in median_us(call)]
                least = hit * step.bytes_of_expert / rate
                row[f"{way}, {tokens} tokens"] = {
                    "us a layer: median, min, max": us,
                    "experts with a token": round(float(hit), 1),
                    "us to read them": round(float(least), 1),
                    "ratio": round(float(us[0] / least), 3),
                }
                print(name, way, tokens, row[f"{way}, {tokens} tokens"], row["TB/s of a reduction"], flush=True)
            if not options.no_profile:
                for (way, tokens), call in zip(ways, compiled[1:], strict=True):
                    row[f"{way}, {tokens} tokens"]["kernels, us of all layers"] = profile.kernels(call)
                    print(name, way, tokens, row[f"{way}, {tokens} tokens"]["kernels, us of all layers"], flush=True)
        found[name] = row
        if options.json:
            report.add_json(options.json, found)


if __name__ == "__main__":
    main()
