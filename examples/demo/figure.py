"""The demo's picture: loss over time, and the load of every expert over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw(
    path: Path,
    *,
    losses: list[float],
    held_out: list[tuple[int, float]],
    bigram: float,
    load: np.ndarray,
    layers: tuple[int, ...],
    num_ranks: int,
    title: str,
) -> None:
    """Writes a PNG.

    Args:
      losses: training loss of each step.
      held_out: (step, loss) pairs.
      bigram: the baseline's loss.
      load: int `[steps, MoE layers, E]`.
      layers: numbers of the MoE layers.
      num_ranks: ranks that the experts are split over.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2 + 2.3 * len(layers)), dpi=120, layout="constrained")
    axes = figure.subplots(1 + len(layers), 1, height_ratios=[1.7] + [1.0] * len(layers))
    steps = np.arange(1, len(losses) + 1)
    figure.suptitle(title, fontsize=11)

    top = axes[0]
    top.plot(steps, losses, color="#9ecae1", linewidth=0.9, label="training, one batch")
    if held_out:
        top.plot(
            *zip(*held_out, strict=True),
            color="#08519c",
            marker="o",
            markersize=4,
            linewidth=1.6,
            label="held out",
            clip_on=False,
        )
        step, loss = held_out[-1]
        top.annotate(
            f"{loss:.2f}", (step, loss), xytext=(-4, 8), textcoords="offset points", ha="right", color="#08519c"
        )
    top.axhline(bigram, color="#cb181d", linestyle="--", linewidth=1.2, label=f"byte bigram, held out ({bigram:.2f})")
    top.set(ylabel="nats per byte", xlim=(1, max(2, len(losses))), ylim=(0, None))
    top.grid(alpha=0.25)
    top.legend(frameon=False)

    share = load / np.maximum(load.sum(-1, keepdims=True), 1) * load.shape[-1]
    experts = load.shape[-1]
    local = -(-experts // num_ranks)
    image: Any = None
    for axis, layer, values in zip(axes[1:], layers, share.transpose(1, 2, 0), strict=True):
        image = axis.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(0.5, len(losses) + 0.5, experts - 0.5, -0.5),
        )
        for edge in range(local, experts, local):
            axis.axhline(edge - 0.5, color="black", linewidth=0.6)
        ranks = range(0, experts, local)
        axis.set_yticks([first + (min(local, experts - first) - 1) / 2 for first in ranks])
        axis.set_yticklabels([f"rank {i}" for i in range(len(ranks))])
        axis.set_xlim(1, max(2, len(losses)))
        axis.set_title(f"layer {layer}: rows routed to each of the {experts} experts", fontsize=9, loc="left")
    axes[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(axes[1:]), extend="max", pad=0.01)
    bar.set_label("load over the mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
