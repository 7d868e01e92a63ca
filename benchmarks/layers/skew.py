"""How even the ranks' rows are under skewed routing: experts at home, planned, and balanced exactly.

    python -m benchmarks.layers.skew              # the table of docs/lab/layers.md, from counts: no device
    python -m benchmarks.layers.skew --record     # the trace of a router that nothing balances

The trace is of the demo's model with 64 experts, 8 of them for each byte, and `balancing="none"`: rows of each expert
in the 101 training steps of 4096 tokens after the first 100. A figure is the rows of the busiest rank over the mean of
all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from xen_moe_jax import _exact

TRACE = pathlib.Path(__file__).with_name("skewed_trace.json")
EXPERTS, TOP_K = 64, 8
SKIPPED, STEPS = 100, 101
WINDOWS = (16, 64)
"""Windows of 64 bytes in a batch: of the steps that are skipped, and of the trace."""
PLANNED_EVERY = 20
DRIFT = 0.005
"""Standard deviation of the change of an expert's log share from batch to batch."""


def loads(counts: np.ndarray, placement: xm.balance.Placement) -> np.ndarray:
    """Returns `[R]`, the rows of each rank, if the replicas of an expert share its rows, `counts [E]`, equally."""
    each = np.append(counts / placement.num_replicas, 0.0)
    return each[placement.experts].sum(axis=1)


def busiest(counts: np.ndarray, placement: xm.balance.Placement) -> float:
    """Returns the rows of the busiest rank over the mean."""
    ranks = loads(counts, placement)
    return float(ranks.max() / ranks.mean())


@functools.cache
def _divide(slots: int, most: int):
    return jax.jit(functools.partial(_exact.divide, slots=slots, most=most))


def exact(counts: np.ndarray, ranks: int, slots: int) -> tuple[float, int]:
    """Returns the rows of the busiest rank over the mean with `balance="exact"`, where every rank has equally many
    tokens, and the most experts that a rank fetches."""
    experts = len(counts)
    rows = np.repeat(np.arange(experts), counts)
    most = -(-len(rows) // ranks)
    by_source = np.stack([np.bincount(rows[rank::ranks], minlength=experts) for rank in range(ranks)])
    parts = np.asarray(_divide(slots, most)(jnp.asarray(by_source, jnp.int32)))
    away = np.arange(experts) // -(-experts // ranks) != np.arange(ranks)[:, None]
    return float(parts.sum(axis=1).max() / (len(rows) / ranks)), int(((parts > 0) & away).sum(axis=1).max())


def zipf(exponent: float, experts: int, seed: int) -> np.ndarray:
    """Shares of the experts, in random order."""
    return np.random.default_rng(seed).permutation(1.0 / np.arange(1, experts + 1) ** exponent)


def choices(share: np.ndarray, tokens: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """int64 `[T, K]`: the experts of `tokens` tokens, each of which chooses `top_k` different ones."""
    noise = np.log(share) + rng.gumbel(size=(tokens, len(share)))
    return np.argpartition(-noise, top_k, axis=1)[:, :top_k]


def draw(share: np.ndarray, tokens: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """int64 `[E]`: rows of each expert among `choices`."""
    return np.bincount(choices(share, tokens, top_k, rng).ravel(), minlength=len(share))


def drifting(share: np.ndarray, batches: int, seed: int, tokens: int = 2048) -> np.ndarray:
    """int64 `[batches, E]`, as `draw`, from shares that drift."""
    rng = np.random.default_rng(seed)
    logits, out = np.log(share), []
    for _ in range(batches):
        out.append(draw(np.exp(logits), tokens, TOP_K, rng))
        logits = logits + DRIFT * rng.standard_normal(len(share))
    return np.stack(out)


@functools.cache
def traces() -> dict[str, np.ndarray]:
    """int64 `[101, 64]` each: the recorded ones, and drawn ones whose shares drift."""
    recorded = np.asarray(json.loads(TRACE.read_text())["counts"])  # [step, layer, expert]
    out = {f"demo, MoE layer {layer + 1}": recorded[:, layer] for layer in range(recorded.shape[1])}
    return out | {f"Zipf {a}, drifting": drifting(zipf(a, EXPERTS, 3), STEPS, 3) for a in (1.1, 1.5)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Ratios are rows of the busiest rank over the mean of all ranks.

    Attributes:
      home, planned: ratio of the first batch of a trace with experts at home, and with the plan made of this batch.
      next_mean, next_worst: mean and largest ratio of the batches after it with the same plan.
      hindsight_mean: their mean ratio with a plan made of all of them.
      replanned_mean: their mean ratio with a plan made again every `PLANNED_EVERY` batches, of the batch in front.
      twice_mean: their mean ratio with a plan of the first batch that puts every expert on two ranks at least.
      exact_worst: their largest ratio with `balance="exact"`.
      fetched: the most experts that a rank then fetches.
    """

    home: float
    planned: float
    next_mean: float
    next_worst: float
    hindsight_mean: float
    replanned_mean: float
    twice_mean: float
    exact_worst: float
    fetched: int


def measure(trace: np.ndarray, ranks: int = 8, slots: int = 9) -> Row:
    """Plans on the first batch of `trace`, int `[batches, E]`, and measures on the others: with `slots` on each rank, a
    redundancy of 12.5% for 64 experts on 8 ranks, and with every expert on two ranks at least."""
    first, *others = trace
    placement = xm.balance.plan(first, ranks, slots)
    planned, later = busiest(first, placement), [busiest(counts, placement) for counts in others]
    hindsight = xm.balance.plan(np.stack(others), ranks, slots)  # no plan of one batch can know more
    twice = xm.balance.plan(first, ranks, 2 * -(-len(first) // ranks), min_replicas=2)
    again = []
    for step, counts in enumerate(others):
        if step % PLANNED_EVERY == 0:
            placement = xm.balance.plan(trace[step], ranks, slots)
        again.append(busiest(counts, placement))
    exactly = [exact(counts, ranks, _exact.slots_at_home(len(first), ranks)) for counts in others]
    home = busiest(first, xm.balance.home(len(first), ranks))
    ratios, fetched = zip(*exactly, strict=True)
    known, two = (float(np.mean([busiest(counts, p) for counts in others])) for p in (hindsight, twice))
    means = float(np.mean(later)), float(np.max(later)), known, float(np.mean(again)), two
    return Row(home, planned, *means, max(ratios), max(fetched))


def record() -> None:
    """Trains the demo's model without balancing and writes the trace. What its router chooses does not depend on the
    number of devices, so it trains on one."""
    from examples.demo import command, text
    from examples.demo.training import Trainer, optimizer
    from xen_moe_jax.flax import MoEConfig

    mesh = jax.make_mesh((1, 1), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])
    split = text.load(None)
    moe = MoEConfig(hidden_size=64, intermediate_size=16, num_experts=EXPERTS, top_k=TOP_K, balancing="none")
    config = dataclasses.replace(command.model_config(), moe=moe, layers=2, heads=4, dense_size=128)
    rng = np.random.default_rng(0)
    counts = []
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh, optimizer(3e-3, SKIPPED + STEPS), seed=0)
        for step in range(SKIPPED + STEPS):
            done = trainer.step(text.random_windows(split.train, WINDOWS[step >= SKIPPED], config.context, rng))
            if step >= SKIPPED:
                counts.append(done.load.tolist())
            if step % 10 == 0:
                print(f"step {step}: {done.loss:.3f} nats a byte", flush=True)
    TRACE.write_text(json.dumps({"command": "python -m benchmarks.layers.skew --record", "counts": counts}) + "\n")


def table() -> str:
    """Returns the table of docs/lab/layers.md in Markdown: a line for each trace."""
    lines = [
        "| 64 experts on 8 ranks | at home | planned | its next 100: mean | worst "
        "| in hindsight | every 20: mean | two of each: mean | exact | lent |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, trace in traces().items():
        row = measure(trace)
        ratios = [getattr(row, field.name) for field in dataclasses.fields(row)][:-1]
        lines.append(f"| {name} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} | {row.fetched} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or records the trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers.skew", description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="train the demo's model and write its trace")
    if parser.parse_args(arguments).record:
        record()
    else:
        print(table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
