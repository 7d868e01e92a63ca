"""`python -m examples.demo`: train, check against a dense model and a byte bigram, sample, draw."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.demo import bigram, text
from xen_moe_jax._command_line import Parser

DATA_RANKS, EXPERT_RANKS = 2, 4
DEVICES = DATA_RANKS * EXPERT_RANKS
BATCH = 32
LEARNING_RATE = 5e-3
EVALUATIONS = 8
"""Times that the held-out loss is taken, the last one after training."""
STEPS = 200
"""Steps by default, and the fewest after which the loss is judged: a shorter run cannot have learned enough."""
MARGIN = 0.4
"""Nats per byte that the model must be under the bigram model."""
PROMPTS = ("The ", "If a", "A cl", "This", "For ", "When", "Note", "Each")
SAMPLES_SHOWN = 4


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m examples.demo",
        description="Trains a small byte-level mixture-of-experts language model on 8 virtual CPU devices (dp=2 x "
        "ep=4), checks it, samples from it, and draws its loss and expert load. The exit status is 1 if a check fails.",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="text to learn (default: the Python reference, pydoc_data.topics)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="optimiser steps (default: %(default)s); fewer are not judged by their loss",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed {options.seed}: must be at least 0 and below 2**63")
    for package in ("flax", "optax"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"the demo needs {package}: pip install 'xen-moe-jax[flax]'")
    try:  # before minutes of training, not after
        options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output):
            pass
    except OSError as error:
        parser.error(f"--output {options.output}: cannot be written ({error.strerror}); name another folder")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 0 if the checks passed."""
    options = parse(arguments)
    try:
        split = text.load(options.text)
    except OSError as error:
        print(f"demo: --text {options.text}: cannot be read ({error.strerror}); name another file")
        return 2
    except ValueError as error:
        print(f"demo: {error}")
        return 2
    mesh = virtual_mesh()
    with jax.set_mesh(mesh):
        return _run(options, split, mesh)


def virtual_mesh() -> jax.sharding.Mesh:
    """Makes eight CPU devices as dp=2 x ep=4, even on a machine with accelerators."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    except RuntimeError:
        pass  # JAX runs already: the check below counts its devices
    devices = jax.devices("cpu")
    if len(devices) < DEVICES:
        raise RuntimeError(
            f"the demo needs {DEVICES} virtual CPU devices and JAX was started with {len(devices)}: run it in a "
            "process of its own (python -m examples.demo), or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((DATA_RANKS, EXPERT_RANKS), ("dp", "ep"), axis_types=auto, devices=devices[:DEVICES])


def model_config() -> Any:
    """Four layers, of which 1 and 3 are mixtures of 16 experts, two of them for each byte."""
    from examples.demo.model import ModelConfig
    from xen_moe_jax.flax import MoEConfig

    moe = MoEConfig(hidden_size=128, intermediate_size=64, num_experts=16, top_k=2, capacity_factor=1.5)
    return ModelConfig(layers=4, heads=4, context=64, dense_size=384, moe=moe)


def _run(options: argparse.Namespace, split: text.Split, mesh: jax.sharding.Mesh) -> int:
    from examples.demo.report import load_table
    from examples.demo.sampling import sample
    from examples.demo.training import Trainer, optimizer

    began = time.monotonic()
    config = model_config()
    windows = text.consecutive_windows(split.held_out, config.context)
    windows = windows[: len(windows) // BATCH * BATCH]
    baseline = bigram.held_out_loss(split.train, windows)
    trainer = Trainer(config, mesh, optimizer(LEARNING_RATE, options.steps), options.seed)
    moe = config.moe
    print(f"text      {split.source}: {len(split.train):,} bytes to train on, {len(split.held_out):,} held out")
    print(
        f"model     {config.layers} layers, {len(config.moe_layers)} of them MoE with {moe.num_experts} experts, "
        f"top-{moe.top_k}; {trainer.num_parameters:,} parameters"
    )
    print(f"mesh      dp={DATA_RANKS} x ep={EXPERT_RANKS}, {DEVICES} virtual CPU devices, jax {jax.__version__}")
    print(f"baseline  byte bigram (Kneser-Ney): {baseline:.3f} nats per byte on the held-out text\n", flush=True)

    history = _train(options, split, windows, trainer, config.context)
    comparison, load = _compare_with_dense(trainer, windows)

    print(f"\nexpert load on the held-out text\n{load_table(load, config.moe_layers, EXPERT_RANKS)}\n")
    samples = sample(trainer.exact_graph, trainer.state, list(PROMPTS), config.context, options.seed)
    for number, written in enumerate(samples[:SAMPLES_SHOWN], 1):
        print(f"sample {number}\n{textwrap.indent(written, '  | ', lambda line: True)}")

    judged = options.steps >= STEPS
    learned = comparison.loss < baseline - MARGIN
    print(
        f"\n{'PASS' if comparison.equal else 'FAIL'}  expert-parallel equals dense: logits differ by at most "
        f"{comparison.max_difference:.1e} on {comparison.compared:.0%} of the held-out text (the rest follows a router "
        f"near-tie), losses by {abs(comparison.loss - comparison.dense_loss):.1e}"
    )
    if judged:
        print(
            f"{'PASS' if learned else 'FAIL'}  held-out loss {comparison.loss:.3f} nats per byte: a byte bigram has "
            f"{baseline:.3f}, and under {baseline - MARGIN:.3f} was needed"
        )
    else:
        print(
            f"----  held-out loss {comparison.loss:.3f} nats per byte, not judged after {options.steps} steps: "
            f"after {STEPS} it must be under {baseline - MARGIN:.3f}"
        )
    history.held_out.append((options.steps, comparison.loss))
    _draw(options, config, history, baseline)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if comparison.equal and (learned or not judged) else 1


class _History:
    """Caption of the picture."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.load: list[np.ndarray] = []
        self.dropped = 0


def _train(options: argparse.Namespace, split: text.Split, windows: np.ndarray, trainer: Any, context: int) -> _History:
    from examples.demo.report import Progress

    rng = np.random.default_rng(options.seed)
    history = _History()
    progress = Progress(options.steps, BATCH * context)
    every = -(-options.steps // EVALUATIONS)
    held_out = None
    for step in range(1, options.steps + 1):
        report = trainer.step(text.random_windows(split.train, BATCH, context, rng))
        history.losses.append(report.loss)
        history.load.append(report.load)
        history.dropped += report.dropped
        if step % every == 0 and step < options.steps:
            held_out = trainer.held_out_loss(windows, BATCH)
            history.held_out.append((step, held_out))
        progress.show(step, report.loss, held_out)
    rows = sum(int(load.sum()) for load in history.load)
    print(f"\ncapacity  {history.dropped:,} of {rows:,} rows dropped while training ({history.dropped / rows:.2%})")
    return history


def _compare_with_dense(trainer: Any, windows: np.ndarray) -> tuple[Any, np.ndarray]:
    """The whole held-out text through the expert-parallel and the dense model; also the expert load."""
    from examples.demo.dense import Comparison, DenseModel, comparable
    from examples.demo.model import next_byte_losses

    dense = DenseModel(trainer.exact_graph, trainer.state)
    largest, compared, losses, dense_losses, load = 0.0, [], [], [], 0
    for first in range(0, len(windows), BATCH):
        batch = windows[first : first + BATCH]
        batch_losses, logits, batch_load = trainer.evaluate(batch)
        dense_logits, gap = dense(batch[:, :-1])
        clear = comparable(gap)
        difference = np.abs(logits - dense_logits)[clear]
        largest = max(largest, float(difference.max())) if np.isfinite(difference).all() else float("nan")
        compared.append(clear.mean())
        losses.append(batch_losses.mean(dtype=np.float64))
        dense_losses.append(np.asarray(next_byte_losses(dense_logits, batch[:, 1:])).mean(dtype=np.float64))
        load = load + batch_load
    comparison = Comparison(largest, float(np.mean(compared)), float(np.mean(losses)), float(np.mean(dense_losses)))
    return comparison, np.asarray(load)


def _draw(options: argparse.Namespace, config: Any, history: _History, baseline: float) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    from examples.demo.figure import draw

    path = options.output / "training.png"
    moe = config.moe
    draw(
        path,
        losses=history.losses,
        held_out=history.held_out,
        bigram=baseline,
        load=np.stack(history.load),
        layers=config.moe_layers,
        num_ranks=EXPERT_RANKS,
        title=f"{config.layers}-layer byte model, {moe.num_experts} experts over {EXPERT_RANKS} ranks, top-{moe.top_k}",
    )
    print(f"picture   {path}")
