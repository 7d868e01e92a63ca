"""Draws the charts of the README and of the pages on performance from benchmarks/results.

    python tools/draw_charts.py   write operations_h200x4.png, small_batches_h200x4.png and quantized_experts.png, all
                                  in docs/images

In the charts of operations a bar is the median time of an operation on the slowest rank: this library's, and that of
the fastest way with JAX's own collectives, each at its best settings (the mode jax-best of the benchmarks). The line in
a bar is the time that a bare push of the same rows takes on the same machine. In the chart of quantized experts a bar
is the time in bfloat16 divided by the time in fp8 or MXFP4, and the line in it is the goal.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER, LINK = "#3f51b5", "#9e9e9e", "#e65100"
COMPARISON, SUITE = "jax_best_h200x4.json", "ops_h200x4.json"
OPERATIONS = (
    ("dispatch", "float8_e4m3fn"),
    ("dispatch", "bfloat16"),
    ("combine", "bfloat16"),
    ("round trip", "bfloat16"),
)
CHARTS = {
    "operations_h200x4.png": (4096, ("fp8 dispatch, bf16 combine", "bf16, against JAX's own")),
    "small_batches_h200x4.png": (128, ("decode 128 fp8", "decode 128")),
}
"""File -> tokens a rank, and the documents of the suite that hold the bare push of fp8 and of bf16 rows."""


def fastest(comparison: dict[str, Any], tokens: int, operation: str, dtype: str, ours: bool) -> float:
    """Returns the least median time in us over all settings, of this library or of its peers."""
    return min(
        row["us_median"]
        for setting in comparison["settings"].values()
        for row in setting["results"]
        if (row["tokens"], row["operation"], row["dtype"]) == (tokens, operation, dtype)
        and row["name"].startswith("xen_moe_jax") == ours
    )


def bare_push(suite: dict[str, Any], document: str, operation: str) -> float | None:
    """Returns the time in us that a bare push of an operation's rows takes, or None where the suite has none."""
    for row in suite["documents"][document]["results"]:
        if row["name"].startswith("xen_moe_jax") and row["operation"] == operation and "of_link_ceiling" in row:
            return row["us_median"] * row["of_link_ceiling"]
    return None


def bar(axes: Any, y: float, length: float, colour: str, label: str | None, words: str, words_at: float) -> None:
    """Draws a horizontal bar, with words to the right of `words_at`; `label` is its line in the legend."""
    axes.barh(y, length, height=0.36, color=colour, label=label)
    axes.annotate(words, (words_at, y), xytext=(5, 0), textcoords="offset points", va="center", size=9)


def mark(axes: Any, y: float, at: float, label: str | None) -> None:
    """Draws a line across the bar at `y`."""
    axes.plot([at, at], [y - 0.18, y + 0.18], color=LINK, lw=2, label=label)


def save(figure: Any, axes: Any, name: str, unit: str, legend: str) -> None:
    """Writes the chart to docs/images; `unit` stands below its axis, and `legend` says where the legend is."""
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc=legend)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / name, dpi=110)
    plt.close(figure)


def draw(name: str) -> None:
    tokens, (fp8, bf16) = CHARTS[name]
    comparison = json.loads((RESULTS / COMPARISON).read_text())
    suite = json.loads((RESULTS / SUITE).read_text())
    figure, axes = plt.subplots(figsize=(8, 3.2))
    short = {"float8_e4m3fn": "fp8", "bfloat16": "bf16"}
    for number, (operation, dtype) in enumerate(OPERATIONS):
        for offset, ours, colour in ((0.19, True, OURS), (-0.19, False, PEER)):
            time = fastest(comparison, tokens, operation, dtype, ours)
            y = len(OPERATIONS) - 1 - number + offset
            label = ("Xen-MoE" if ours else "JAX at its best") if number == 0 else None
            bar(axes, y, time, colour, label, f"{time:,.0f} us", time)
            floor = bare_push(suite, fp8 if dtype.startswith("float8") else bf16, operation)
            if ours and floor:
                mark(axes, y, floor, "bare push" if number == 0 else None)
    axes.set_yticks(
        range(len(OPERATIONS)), [f"{operation}, {short[dtype]}" for operation, dtype in reversed(OPERATIONS)]
    )
    machine = comparison["machine"]
    axes.set_title(
        f"{tokens} tokens a rank, hidden 7168, 256 experts, top-8; {machine['devices']} x {machine['device_kind']}",
        size=10,
    )
    save(figure, axes, name, "microseconds, less is better", "upper right")


ROUND = "fp8 experts and quantized weights, 1 x H100 and 4 x H200, 2026-11-26"
BY_FORMAT = {
    "decode, 8 rows an expert": ((2, "bfloat16"), {"fp8": "fp8 blocks, before", "MXFP4": "MXFP4, after"}, 1.8, 3.0),
    "decode, 64 rows": ((0, "bfloat16"), {"fp8": "fp8 blocks, before", "MXFP4": "MXFP4, after"}, 1.8, 3.0),
    "experts forward": ((1, "forward, bf16"), {"fp8": "forward, quantized"}, 1.6, None),
    "experts, gradients": (
        (1, "forward and backward, bf16"), {"fp8": "forward and backward, quantized once, after"}, 1.4, None,
    ),
    "layer forward": ((1, "layer, bf16"), {"fp8": "layer, weights in fp8"}, 1.5, None),
    "layer, gradients": (
        (1, "layer, gradients, bf16"), {"fp8": "layer, gradients, quantized once, after"}, 1.3, None,
    ),
}  # fmt: skip
"""By the label of a line: the index and the name of the time in bfloat16 in the rows of `ROUND`, the name of the time
in each other format, and the goals for fp8 and for MXFP4."""


def draw_formats(name: str) -> None:
    """Draws the chart `name` of quantized experts from the round `ROUND` of gpu_checks.json."""
    rows = json.loads((RESULTS / "gpu_checks.json").read_text())["rounds"][ROUND]["rows"]
    kernels = "decode, 64 rows an expert and 8", "benchmarks/layers/float8_shapes.py"
    times = {key: us for row in rows if row["command"].startswith(kernels) for key, us in row["us"].items()}
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for number, ((place, base), others, *goals) in enumerate(BY_FORMAT.values()):
        for offset, colour, (kind, other), goal in zip(
            (0.19, -0.19), (OURS, PEER), others.items(), goals, strict=False
        ):
            ratio, y = times[base][place] / times[other][place], len(BY_FORMAT) - 1 - number + offset
            bar(axes, y, ratio, colour, kind if number == 0 else None, f"{ratio:.2f}", max(ratio, goal))
            mark(axes, y, goal, "goal" if (number, offset) == (0, 0.19) else None)
    axes.set_yticks(range(len(BY_FORMAT)), list(reversed(BY_FORMAT)))
    axes.set_title("DeepSeek-V3, 32 experts (decode); H 4096, I 1536, 16 experts; kernels on one H200", size=10)
    save(figure, axes, name, "times as fast as bfloat16", "lower right")


if __name__ == "__main__":
    for chart in CHARTS:
        draw(chart)
    draw_formats("quantized_experts.png")
    print(*(f"docs/images/{chart}" for chart in (*CHARTS, "quantized_experts.png")))
