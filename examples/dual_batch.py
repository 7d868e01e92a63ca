"""Two micro-batches, each one's communication under the other's matmuls: a decode step, and a training step.

`xm.overlap(flight, work, *args)` runs `work` while an asynchronous operation (a `Flight`) is pending. The dispatch of
the first micro-batch flies under the attention of the second, its combine under the experts of the second, and so on,
from layer to layer; the backward pass does the same by itself. The results are those of one micro-batch after the
other, but for the rounding of matmuls that XLA cuts differently.

    python examples/dual_batch.py                     on CPU: small sizes, where nothing overlaps
    JAX_PLATFORMS=cuda python examples/dual_batch.py  on GPUs: DeepSeek-V3's hidden size, times
    ... --trace DIR                                   also a profile of both steps; tools/draw_timeline.py draws it
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a rank and a micro-batch. A rank's experts share weights: one matmul stands for a grouped one."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    layers: int

    @property
    def capacity(self) -> int:
        """Rows of a rank's experts: half as many again as an even routing brings."""
        return self.tokens * self.top_k * 3 // 2


TINY = {"decode": Sizes(8, 64, 32, 16, 4, 3), "training": Sizes(32, 64, 32, 16, 4, 2)}
LARGE = {"decode": Sizes(64, 7168, 2048, 256, 8, 4), "training": Sizes(2048, 7168, 2048, 256, 8, 2)}


def parameters(sizes: Sizes, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Attention (two matmuls stand for it) and router on every rank, experts `[R, ...]` one set a rank."""
    h, f, ranks = sizes.hidden, sizes.inner, mesh.size
    shapes = {"a": (h, f), "b": (f, h), "router": (h, sizes.experts), "up": (ranks, h, f), "down": (ranks, f, h)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    out = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        values = jax.random.normal(key, shape, jnp.bfloat16) / shape[-2] ** 0.5
        out[name] = jax.device_put(values, NamedSharding(mesh, specs(name)))
    return out


def specs(name: str) -> P:
    return P("ep") if name in ("up", "down") else P()


@dataclasses.dataclass(frozen=True)
class Model:
    sizes: Sizes
    weights: dict[str, jax.Array]

    def attention(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.weights["a"]) @ self.weights["b"]

    def dispatch(self, h: jax.Array) -> xm.Flight:
        logits = h.astype(jnp.float32) @ self.weights["router"].astype(jnp.float32)
        idx, weights = xm.routing.top_k(logits, self.sizes.top_k)
        return xm.dispatch_start(
            h, idx, weights, num_experts=self.sizes.experts, axis_name="ep", capacity=self.sizes.capacity
        )

    def experts(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        used = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)  # unused rows may hold any values
        rows = jnp.where(used[:, None], rows, 0)
        return jnp.tanh(rows @ self.weights["up"][0]) @ self.weights["down"][0]


def in_turn(model: Model, xs: list[jax.Array]) -> list[jax.Array]:
    """One micro-batch after the other."""
    for _ in range(model.sizes.layers):
        outs: list[jax.Array] = []
        for x in xs:
            if outs:  # XLA may not mix the two by itself
                x, outs[-1] = jax.lax.optimization_barrier((x, outs[-1]))
            h = model.attention(x)
            routed = xm.dispatch_done(model.dispatch(h))
            outs.append(
                h + xm.combine_done(xm.combine_start(model.experts(routed.x, routed.group_sizes), routed.handle))
            )
        xs = outs
    return xs


def overlapped(model: Model, xs: list[jax.Array]) -> list[jax.Array]:
    """Every operation but the first and the last is pending while the other micro-batch's matmuls run."""
    first, second = xs
    h1 = model.attention(first)
    flight = model.dispatch(h1)
    returning, h2 = None, second
    for layer in range(model.sizes.layers):
        # dispatch of the first, while the second computes until its own dispatch
        if returning is not None:
            second = h2 + xm.combine_done(returning)
        flight, h2 = xm.overlap(flight, model.attention, second)
        routed1 = xm.dispatch_done(flight)
        # dispatch of the second, under the experts of the first
        flight, y1 = xm.overlap(model.dispatch(h2), model.experts, routed1.x, routed1.group_sizes)
        routed2 = xm.dispatch_done(flight)
        # combine of the first, under the experts of the second
        returning, y2 = xm.overlap(xm.combine_start(y1, routed1.handle), model.experts, routed2.x, routed2.group_sizes)
        first = h1 + xm.combine_done(returning)
        # combine of the second, under the attention of the first in the next layer
        returning = xm.combine_start(y2, routed2.handle)
        if layer + 1 < model.sizes.layers:
            returning, h1 = xm.overlap(returning, model.attention, first)
            flight = model.dispatch(h1)
    return [first, h2 + xm.combine_done(returning)]


def steps(kind: str, sizes: Sizes, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Compiled programs of both schedules, and their operands."""
    weights = parameters(sizes, mesh)
    shape = (2, mesh.size * sizes.tokens, sizes.hidden)
    tokens = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(None, "ep")))

    def program(schedule: Any) -> Any:
        def forward(weights, xs):
            return jnp.stack(schedule(Model(sizes, weights), [xs[0], xs[1]]))

        def loss(weights, xs):
            return jnp.sum(jnp.square(forward(weights, xs).astype(jnp.float32))) / xs.size

        def gradients(weights, xs):
            grads, moved = jax.grad(loss, (0, 1))(weights, xs)
            return jax.tree.map(lambda g: g[None], {**grads, "x": moved})

        body = gradients if kind == "training" else lambda weights, xs: forward(weights, xs)[None]
        in_specs = ({name: specs(name) for name in weights}, P(None, "ep"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P("ep"), check_vma=False)
        return jax.jit(mapped)

    return {"in turn": program(in_turn), "overlapped": program(overlapped), "operands": (weights, tokens)}


def relative_difference(a: jax.Array, b: jax.Array) -> float:
    x, y = (np.asarray(v, np.float64) for v in (a, b))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def microseconds(program: Any, operands: Any, repeats: int, calls: int) -> float:
    """Median of repeats; the calls of a repeat are queued one behind the other."""
    jax.block_until_ready(program(*operands))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            out = program(*operands)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times)


def main(
    trace: str | None = None, kinds: tuple[str, ...] = ("decode", "training"), repeats: int = 5, calls: int = 20
) -> dict[str, dict[str, float]]:
    """Returns microseconds of a step for each kind and schedule, and the relative difference of their results."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    on_cpu = jax.default_backend() == "cpu"
    report = {}
    for kind in kinds:
        sizes = (TINY if on_cpu else LARGE)[kind]
        made = steps(kind, sizes, mesh)
        schedules = ("in turn", "overlapped")
        results = [jax.tree.leaves(made[name](*made["operands"])) for name in schedules]
        differ = max(relative_difference(a, b) for a, b in zip(*results, strict=True))
        if on_cpu:
            repeats, calls = 1, 1
        us = {name: microseconds(made[name], made["operands"], repeats, calls) for name in schedules}
        report[kind] = {**us, "relative difference": differ}
        print(
            f"{kind}: {sizes.layers} layers, two micro-batches of {sizes.tokens} tokens a rank: one after the other "
            f"{us['in turn']:.0f} us, overlapped {us['overlapped']:.0f} us ({us['in turn'] / us['overlapped']:.2f} "
            f"times as fast), results differ by {differ:.1e}"
        )
        if trace is not None:
            for name in schedules:
                with jax.profiler.trace(f"{trace}/{kind}_{name.replace(' ', '_')}"):
                    for _ in range(3):
                        jax.block_until_ready(made[name](*made["operands"]))
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", metavar="DIR")
    parser.add_argument("--kind", choices=("decode", "training"), nargs="+", default=["decode", "training"])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    main(options.trace, tuple(options.kind))
