"""Trains the demo's language model on the CPU with quantized experts or wires, and compares losses with bfloat16's.

    python -m benchmarks.layers.accuracy --seeds 0 1 2 --json benchmarks/results/model_shapes_h100.json
    python -m benchmarks.layers.accuracy --cosines

Every variant has the weights, batches and held-out text of `python -m examples.demo` with the same seed, and computes
its MoE layers in bfloat16 but for what `VARIANTS` says. A line is the held-out loss in nats per byte after training
without drops in evaluation, and its ratio to bfloat16's.

`--cosines` prints how near to float64 one expert of normally distributed operands is, output and gradients, if only
some operands are rounded to e4m3: a scale for 128 elements along the contracted dimension, for 128 x 128 of a weight.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.lib import report
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
OPERANDS = ("rows", "weights", "activation", "cotangents", "contracted")
"""Operands of an expert's matmuls: of the forward pass; cotangents for the gradients of rows; both factors of the
gradients of weights."""
ROUNDED: dict[str, tuple[tuple[str, ...], int]] = {
    "all: the rule": (OPERANDS, 128),
    "all, cotangents in blocks of 32": (OPERANDS, 32),
    "all but cotangents for the gradients of rows": (("rows", "weights", "activation", "contracted"), 128),
    "all but both factors of the gradients of weights": (("rows", "weights", "activation", "cotangents"), 128),
    "the forward pass's": (("rows", "weights", "activation"), 128),
    "all but weights": (("rows", "activation", "cotangents", "contracted"), 128),
    "weights alone": (("weights",), 128),
    "rows alone": (("rows",), 128),
}
"""By line, the operands that are rounded, and elements of a cotangent that share a scale."""


def expert(rounded: tuple[str, ...], block: int = 128) -> dict[str, np.ndarray]:
    """Returns output and gradients of 1024 rows of 768, width 512, in float64 but for the `rounded` operands."""
    rng = np.random.default_rng(0)
    x, cotangent = (rng.standard_normal((1024, 768)) for _ in range(2))
    gate, up, down = (rng.standard_normal(shape) * shape[0] ** -0.5 for shape in ((768, 512), (768, 512), (512, 768)))

    def nearest(name: str, a: np.ndarray, axis: int, size: int = 128) -> np.ndarray:
        """Returns `a` rounded, with a scale for `size` elements along an axis."""
        if name not in rounded:
            return a
        moved = np.moveaxis(a, axis, -1)
        parts = moved.reshape(*moved.shape[:-1], -1, size)
        scales = np.abs(parts).max(axis=-1, keepdims=True) / 448
        values = (parts / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
        return np.moveaxis(values.reshape(moved.shape), -1, axis)

    def weight(w: np.ndarray) -> np.ndarray:
        tiles = w.reshape(w.shape[0] // 128, 128, -1, 128).swapaxes(1, 2)
        flat = nearest("weights", tiles.reshape(*tiles.shape[:2], -1), 2, 128 * 128)
        return flat.reshape(tiles.shape).swapaxes(1, 2).reshape(w.shape)

    matrices = [weight(w) for w in (gate, up, down)]
    g, u = (nearest("rows", x, 1) @ w for w in matrices[:2])
    sigmoid = 1 / (1 + np.exp(-g))
    inner = g * sigmoid * u
    by_inner = nearest("cotangents", cotangent, 1, block) @ matrices[2].T
    by = by_inner * u * sigmoid * (1 + g * (1 - sigmoid)), by_inner * g * sigmoid
    found = {
        "output": nearest("activation", inner, 1) @ matrices[2],
        "x": sum(nearest("cotangents", a, 1, block) @ w.T for a, w in zip(by, matrices[:2], strict=True)),
    }
    for name, left, right in (("gate", x, by[0]), ("up", x, by[1]), ("down", inner, cotangent)):
        found[name] = nearest("contracted", left, 0).T @ nearest("contracted", right, 0, block)
    return found


def print_cosines() -> None:
    """Prints the cosines of `ROUNDED` to float64."""
    exact = expert(())
    for name, (rounded, block) in ROUNDED.items():
        each = [f"{what} {cosine(got, exact[what]):.5f}" for what, got in expert(rounded, block).items()]
        print(f"{name:50s}", *each)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


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
    parser.add_argument("--cosines", action="store_true", help="one expert beside float64, without training")
    options = parser.parse_args(arguments)
    if options.cosines:
        print_cosines()
        return 0
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
        measured = {"steps": options.steps, "seeds": options.seeds, "jax": jax.__version__, "lines": lines}
        report.add_json(options.json, {"accuracy": measured})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
