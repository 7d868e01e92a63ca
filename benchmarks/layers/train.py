"""Trains the demo's language model at a billion parameters on the GPUs of a host, and reports the share of their peak.

    python -m benchmarks train --json benchmarks/results/train_h200x4.json

Tokens are split over all devices, and so are float32 weights and AdamW: experts by expert, other large matrices by
rows. The computation is bfloat16, with copies of the weights that the kernels of AdamW write. Of the matrices that all
devices multiply by, gradients are reduced and scattered, and new copies gathered, both in bfloat16. A step is timed
from the first of `--steps` to the end of the last, after `--warm-up` others. In its first steps the model routes
nearly all tokens to the same experts, and ranks wait for the one that has more of these; `--routing uniform` takes
other experts for each token, as balanced routers would: their choice by the scores is then not made, the rest is.

    FLOPs of a step = 6 * (weights a token is multiplied with) * tokens  +  6 * layers * hidden * context * tokens

The first term is forward and backward of every matmul that a token takes part in (top-k experts, not all; no embedding,
nothing computed again); the second is causal attention, half of `context` positions in the mean, twice forward and
twice backward of that. MFU = FLOPs of a step / seconds / (devices * peak).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shlex
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.layers import skew
from benchmarks.lib import profile, report, turns
from examples.demo import text
from examples.demo.model import LanguageModel, ModelConfig, next_byte_losses
from xen_moe_jax.experts import grouped_matmul
from xen_moe_jax.flax import MoEConfig

PROFILED = 3
COMBINED = tuple(f"--xla_gpu_{name}_combine_threshold_bytes={1 << 30}" for name in ("reduce_scatter", "all_gather"))
"""XLA's flags that have it make one reduce-scatter, and one all-gather, of all: they run beside other kernels."""
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense bfloat16, from the data sheets."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=pathlib.Path)
    add("--layers", type=int, default=8, help="every second one is a mixture of experts")
    add("--hidden", type=int, default=2048)
    add("--heads", type=int, default=16)
    add("--dense-size", type=int, default=5632)
    add("--experts", type=int, default=32)
    add("--width", type=int, default=1024, help="of an expert")
    add("--top-k", type=int, default=8)
    add("--context", type=int, default=2048)
    add("--batch", type=int, default=8, help="sequences a device")
    add("--steps", type=int, default=20)
    add("--warm-up", type=int, default=4)
    add("--capacity-factor", type=float, default=1.25)
    add("--num-chunks", type=int, default=1)
    add("--alignment", type=int, default=1)
    add("--routing", choices=("learned", "uniform"), default="learned", help="uniform: experts drawn for each token")
    add("--remat", default="none", help="as MoEConfig.remat")
    add("--apply-weights-to", default="rows", help="as MoEConfig.apply_weights_to")
    add("--grouped-matmul", default="auto", help="as MoEConfig.grouped_matmul")
    add("--kernels", action="store_true", help="also profile three steps, and report every kernel")
    add("--lock", help="hold this file's lock while training: others may compile meanwhile")
    options = parser.parse_args(arguments)
    if min(options.layers, options.batch, options.steps, options.warm_up) < 1:
        parser.error("--layers, --batch, --steps and --warm-up must be at least 1")
    return options


def model_config(options: argparse.Namespace) -> ModelConfig:
    moe = MoEConfig(
        hidden_size=options.hidden,
        intermediate_size=options.width,
        num_experts=options.experts,
        top_k=options.top_k,
        capacity_factor=options.capacity_factor,
        num_chunks=options.num_chunks,
        alignment=options.alignment,
        remat=options.remat,
        apply_weights_to=options.apply_weights_to,
        grouped_matmul=options.grouped_matmul,
    )
    attention = "cudnn" if jax.default_backend() == "gpu" else None
    return ModelConfig(options.layers, options.heads, options.context, options.dense_size, moe, attention)


def multiplied_weights(config: ModelConfig) -> int:
    """Number of weights that multiply one token: attention, dense layers, the router and top-k experts, the head."""
    moe, hidden = config.moe, config.moe.hidden_size
    attention = 4 * hidden * hidden
    dense = 3 * hidden * config.dense_size
    experts = 3 * hidden * moe.intermediate_size * moe.top_k + hidden * moe.num_experts
    sparse = len(config.moe_layers)
    return config.layers * attention + (config.layers - sparse) * dense + sparse * experts + hidden * 256


def step_flops(config: ModelConfig, tokens: int) -> int:
    attention = 6 * config.layers * config.moe.hidden_size * config.context
    return (6 * multiplied_weights(config) + attention) * tokens


def in_bfloat16(state: Any) -> Any:
    """Parameters as the forward pass reads them: all are cast but the routers, which compute in float32."""

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if "router" in jax.tree_util.keystr(path) else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, state)


def places(tree: Any, mesh: jax.sharding.Mesh, *, split: bool) -> Any:
    """Shardings of weights or of AdamW's state: experts are split, and with `split` all matrices but the routers."""

    def place(path: Any, leaf: Any) -> jax.NamedSharding:
        matrix = leaf.ndim == 2 and leaf.shape[0] % mesh.size == 0 and "router" not in jax.tree_util.keystr(path)
        return jax.NamedSharding(mesh, jax.P("ep") if leaf.ndim == 3 or (split and matrix) else jax.P())

    return jax.tree_util.tree_map_with_path(place, tree)


class Seen(NamedTuple):
    """A step reports this: its loss, how many rows it dropped, and `[MoE layers, E]`, the rows of each expert."""

    loss: Any
    dropped: Any
    load: Any


def fullest(load: np.ndarray, parts: int) -> float:
    """Returns the rows of the fullest of `parts` equal parts of the experts over those of all in the mean: the mean
    over `load [..., E]`."""
    rows = load.reshape(*load.shape[:-1], parts, -1).sum(-1)
    return float((rows.max(-1) / rows.mean(-1)).mean())


def make_step(graph: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Any:
    def objective(copies: Any, windows: jax.Array, experts: Any) -> tuple[jax.Array, Any]:
        drawn = iter(experts or ())
        apply_moe = (lambda layer, x: layer(x, topk_idx=next(drawn))) if experts else None
        logits, metrics = nnx.merge(graph, copies)(windows[:, :-1], apply_moe)
        loss = next_byte_losses(logits, windows[:, 1:]).mean()
        return loss + sum(m.aux_loss for m in metrics), (loss, metrics)

    def step(copies: Any, weights: Any, moments: Any, windows: jax.Array, experts: Any) -> tuple[Any, ...]:
        gradients, (loss, metrics) = jax.grad(objective, has_aux=True)(copies, windows, experts)
        seen = Seen(loss, sum(m.num_dropped for m in metrics), jnp.stack([m.tokens_per_expert for m in metrics]))
        gradients = jax.lax.with_sharding_constraint(gradients, places(weights, mesh, split=True))
        gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
        updates, moments = optimizer.update(gradients, moments, weights)
        after = optax.apply_updates(weights, updates), moments
        weights, moments = jax.lax.with_sharding_constraint(after, places(after, mesh, split=True))
        copies = jax.lax.with_sharding_constraint(in_bfloat16(weights), places(weights, mesh, split=False))
        return copies, weights, moments, seen

    return jax.jit(step, donate_argnums=(0, 1, 2))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures; returns the JSON document."""
    config = model_config(options)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=auto)
    batch = options.batch * jax.device_count()
    tokens = batch * options.context
    source = text.load(None)
    rng = np.random.default_rng(0)
    data = jax.NamedSharding(mesh, jax.P("ep"))

    def windows() -> jax.Array:
        return jax.device_put(text.random_windows(source.train, batch, options.context, rng), data)

    def drawn() -> jax.Array:
        """Returns the experts of each token, all as likely as each other."""
        chosen = skew.choices(np.ones(options.experts), tokens, options.top_k, rng).astype(np.int32)
        return jax.device_put(chosen.reshape(batch, options.context, options.top_k), data)

    experts = [drawn() for _ in config.moe_layers] if options.routing == "uniform" else None
    with jax.set_mesh(mesh):
        build = lambda: LanguageModel(config, rngs=nnx.Rngs(0))  # noqa: E731
        graph, shapes = nnx.split(nnx.eval_shape(build))
        weights = jax.device_put(jax.jit(lambda: nnx.state(build()))(), places(shapes, mesh, split=True))
        # the routers' copies are float32, too, but arrays of their own: a step overwrites all that it is given
        copies = jax.tree.map(jnp.copy, jax.device_put(in_bfloat16(weights), places(shapes, mesh, split=False)))
        optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
        moments = optimizer.init(weights)  # eagerly: sharded as the weights are
        parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
        began = time.perf_counter()
        step = make_step(graph, optimizer, mesh).lower(copies, weights, moments, windows(), experts).compile()
        compile_seconds = time.perf_counter() - began
        batches = [windows() for _ in range(4)]
        steps_seen: list[Seen] = []

        def go(steps: int) -> float:
            nonlocal copies, weights, moments
            began = time.perf_counter()
            for number in range(steps):
                given = batches[number % len(batches)]
                copies, weights, moments, seen = step(copies, weights, moments, given, experts)
                steps_seen.append(seen)
            jax.block_until_ready((copies, weights, moments, seen))
            return (time.perf_counter() - began) / steps

        with turns.alone(options.lock):
            go(options.warm_up)
            seconds = go(options.steps)
            kernels = profile.kernels(lambda: go(1), PROFILED) if options.kernels else None
    analysis = step.memory_analysis()
    peak = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    flops = step_flops(config, tokens)
    achieved = flops / seconds / jax.device_count() / 1e12
    losses = [float(seen.loss) for seen in steps_seen]
    load = np.stack([seen.load for seen in steps_seen[options.warm_up :][: options.steps]])
    if not all(map(math.isfinite, losses)):
        raise RuntimeError("a loss is not finite")
    rows = tokens * options.top_k * len(config.moe_layers)
    return {
        **report.header([], None),
        "command": shlex.join(["python", "-m", "benchmarks", "train", *sys.argv[1:]]),
        "options": {name: str(value) if name == "json" else value for name, value in vars(options).items()},
        "grouped_matmul": grouped_matmul.describe(jax.default_backend())["choice"]
        if options.grouped_matmul == "auto"
        else options.grouped_matmul,
        "parameters": int(parameters),
        "multiplied_weights_per_token": multiplied_weights(config),
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "compile_seconds": compile_seconds,
        "seconds_per_step": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_device": achieved,
        "mfu": achieved / peak if peak else None,
        "peak_tflops": peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "dropped_share": float(np.mean([seen.dropped for seen in steps_seen]) / rows),
        "fullest_expert": fullest(load, load.shape[-1]),
        "fullest_rank": fullest(load, jax.device_count()),
        "temporary_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
        "kernels, us": kernels,
        "argument_bytes": None if analysis is None else int(analysis.argument_size_in_bytes),
    }


def combine_collectives() -> None:
    """Has XLA combine reduce-scatters, and all-gathers, to one each; the user's own setting wins."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in COMBINED if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    combine_collectives()
    document = run(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    mfu = "no peak is known for this device" if document["mfu"] is None else f"MFU {document['mfu']:.1%}"
    print(
        f"{document['parameters'] / 1e9:.2f} B parameters, {document['seconds_per_step'] * 1e3:.1f} ms a step of "
        f"{document['tokens_per_step']} tokens, {document['tokens_per_second']:.0f} tokens/s, "
        f"{document['tflops_per_device']:.1f} TFLOP/s a device, {mfu}; loss {document['first_loss']:.3f} -> "
        f"{document['last_loss']:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
