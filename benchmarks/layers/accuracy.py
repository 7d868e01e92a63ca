"""Trains the demo's language model on the CPU with quantized experts or wires, and compares losses with bfloat16's.

    python -m benchmarks.layers.accuracy --seeds 0 1 2 --json benchmarks/results/model_shapes_h100.json

Every variant has the weights, batches and held-out text of `python -m examples.demo` with the same seed, and computes
its MoE layers in bfloat16 but for what `VARIANTS` says. A line is the held-out loss in nats per byte after training
without drops in evaluation, and its ratio to bfloat16's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.demo import command, text

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8 experts": {"expert_dtype": "float8_e4m3fn"},
    "fp8 experts and wires": {
        "expert_dtype": "float8_e4m3fn",
        "wire": "float8_e4m3fn",
        "combine_wire": "float8_e4m3fn",
    },
    "MXFP4 wires": {"wire": "mxfp4", "combine_wire": "mxfp4"},
}
"""Changes of the demo's `MoEConfig`."""


def held_out_loss(changes: dict[str, Any], seed: int, steps: int, split: text.Split, mesh: Any) -> float:
    """Trains for `steps` and returns the loss on the held-out text."""
    from examples.demo.training import Trainer, optimizer

    config = command.model_config()
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dtype=jnp.bfloat16, **changes))
    trainer = Trainer(config, mesh, optimizer(command.LEARNING_RATE, steps), seed)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        trainer.step(text.random_windows(split.train, command.BATCH, config.context, rng))
    return trainer.held_out_loss(text.consecutive_windows(split.held_out, config.context), command.BATCH)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=command.STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="variant beside bfloat16")
    parser.add_argument("--json", type=pathlib.Path, help="adds the lines to this file, under 'accuracy'")
    options = parser.parse_args(arguments)
    mesh, split = command.virtual_mesh(), text.load(None)
    losses: dict[str, list[float]] = {}
    with jax.set_mesh(mesh):
        for seed in options.seeds:
            for name, changes in VARIANTS.items():
                if changes and options.only and name not in options.only:
                    continue
                began = time.monotonic()
                losses.setdefault(name, []).append(held_out_loss(changes, seed, options.steps, split, mesh))
                ratio = losses[name][-1] / losses["bfloat16"][-1]
                seconds = time.monotonic() - began
                print(f"seed {seed}  {name:22s} {losses[name][-1]:.4f}  {ratio - 1:+.2%}  {seconds:.0f} s", flush=True)
    lines = []
    for name, found in losses.items():
        ratios = [one / other for one, other in zip(found, losses["bfloat16"], strict=True)]
        rounded = [round(loss, 4) for loss in found]
        lines.append({"variant": name, "losses": rounded, "ratio": round(statistics.mean(ratios), 5)})
        print(f"{name:22s} {statistics.mean(found):.4f}  {statistics.mean(ratios) - 1:+.2%} in the mean")
    if options.json:
        whole = json.loads(options.json.read_text()) if options.json.exists() else {}
        whole["accuracy"] = {"steps": options.steps, "seeds": options.seeds, "jax": jax.__version__, "lines": lines}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
