"""Tables of whole layers, stacks, the NNX layer, training runs and the experts' matmuls, from the files in results/.

`table.py` puts them where the documents ask for them. Every file of a pattern is a table of its own, with its machine,
its command and its notes; a failed program stands in its row with the reason.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
FORWARD, BOTH = "forward", "forward+backward"
THESE, EQUAL = "experts, these groups", "experts, equal groups"
MEGA = 2**20
EXPERTS = {
    "gate": "forward",
    "gradient of rows": "gradient of rows",
    "gradient of weights": "gradient of weights",
    "experts": "experts forward",
    "experts with gradients": "experts, forward and backward",
}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def files(pattern: str, lines: Callable[[dict[str, Any]], list[str]], none: str) -> str:
    """Renders one part for each file of the pattern; `none` where there is none."""
    parts = []
    for path in sorted(RESULTS.glob(pattern)):
        content = json.loads(path.read_text())
        notes = ["", "Of this run:", "", *(f"- {note}." for note in content["notes"])] if content.get("notes") else []
        parts.append("\n".join([*head(content, path), "", *lines(content), *notes]).rstrip())
    return "\n\n".join(parts) or none


def head(content: dict[str, Any], path: pathlib.Path) -> list[str]:
    machine = content.get("machine")
    where = f"{machine['devices']} x {machine['device_kind']}" if machine else content["device"]
    versions, time = content["versions"], content.get("time")
    return [
        f"{where}, jax {versions['jax']}{f'; {time[:10]}' if time else ''}. "
        f"[The file](../../benchmarks/results/{path.name}); its command:",
        "",
        f"`{content['command']}`",
    ]


def reason(error: str) -> str:
    """Returns the text of an error, short enough for a cell and without characters that would break the table."""
    text = " ".join(error.replace("|", "/").replace("<", "(").replace(">", ")").split())
    return text if len(text) <= 120 else text[:117] + "..."


def milliseconds(row: dict[str, Any] | None) -> str:
    return "-" if row is None or "us_median" not in row else f"{row['us_median'] / 1e3:.2f}"


def temporaries(row: dict[str, Any] | None) -> str:
    return "-" if row is None or not row.get("memory_bytes") else f"{row['memory_bytes']['temp'] / MEGA:,.0f}"


def layers(content: dict[str, Any]) -> list[str]:
    """Table of the modes `layer` and `model`: a line for each way, forward and with gradients side by side."""
    work = content["workload"]
    rows: list[list[str]] = []
    failed: list[str] = []
    for name in dict.fromkeys(row["name"] for row in content["results"]):
        found = {row["operation"]: row for row in content["results"] if row["name"] == name}
        failed += [f"- {name}, {row['operation']}: {reason(row['error'])}" for row in found.values() if "error" in row]
        cells = [name]
        for operation in (FORWARD, BOTH):
            row = found.get(operation, {})
            share = f"{row['matmul_share']:.0%}" if "matmul_share" in row else "-"
            rate = f"{row['tokens_per_second_per_rank'] / 1e3:,.0f}" if "us_median" in row else "-"
            cells += [milliseconds(row), rate, share, temporaries(row) if "us_median" in row else "-"]
        rows.append(cells)
    columns = ["way", "forward, ms", "1000 tokens/s a GPU", "matmuls", "MiB"]
    columns += ["with backward, ms", *columns[2:]]
    sizes = (
        f"{work['tokens']} tokens a rank, hidden {work['hidden']}, width {content['width']}, {work['experts']} "
        f"experts, top-{work['top_k']}, {work['ranks']} ranks, capacity factor {work['capacity_factor']}, "
        f"{content['layers']} layer{'s' * (content['layers'] > 1)}."
    )
    return [sizes, "", *table(columns, rows), *(["", *failed] if failed else [])]


def routed_mlp(file: str, way: str = "dispatched") -> str:
    """Table of `benchmarks/layers/routed_mlp.py`: medians in us, and the ratios of the layer's median to those of its
    experts alone; and by the profiler, where the file has that."""
    content = json.loads((RESULTS / file).read_text())["moe_mlp"]
    profiled = content.get("us from the first kernel to the last, by the profiler")
    rows = []
    for shape, found in content["us, median, least and most of a round"].items():
        for what, ways in found.items():
            layer, these, equal = (ways[w][0] for w in (way, THESE, EQUAL))
            times = [f"{us:,.0f}" for us in (layer, these, equal)]
            cells = [shape if what == FORWARD else "", what, *times, f"{layer / these:.2f}", f"{layer / equal:.2f}"]
            if profiled:
                kernels = profiled[shape][what]
                cells.append(f"{kernels[way] / kernels[THESE]:.2f}")
            rows.append(cells)
    columns = ["", "", "layer", THESE, EQUAL, "over these", "over equal"]
    return "\n".join(table(columns + ["over these, profiler"] * bool(profiled), rows))


def nnx_layers(content: dict[str, Any]) -> list[str]:
    """Table of `python -m benchmarks nnx-layer`."""
    rows = []
    for name in dict.fromkeys(row["name"] for row in content["results"]):
        found = {row["operation"]: row for row in content["results"] if row["name"] == name}
        forward, both = found[FORWARD], found[BOTH]
        times = [milliseconds(forward), temporaries(forward), milliseconds(both), temporaries(both)]
        rows.append([name, *times, str(forward["dropped"])])
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in content["options"].items())
    columns = ["`MoEConfig`", "forward, ms", "MiB", "with backward, ms", "MiB", "rows dropped"]
    return [f"{sizes[0].upper()}{sizes[1:]}.", "", *table(columns, rows)]


def training(content: dict[str, Any]) -> list[str]:
    """Table of `python -m benchmarks train`."""
    mfu = "unknown" if content["mfu"] is None else f"{content['mfu']:.1%} of {content['peak_tflops']:.0f} TFLOP/s"
    memory = "-" if content["temporary_bytes"] is None else f"{content['temporary_bytes'] / 2**30:.1f}"
    rows = [
        ["parameters", f"{content['parameters'] / 1e9:.2f} billion"],
        ["tokens of a step", f"{content['tokens_per_step']:,}"],
        ["a step", f"{content['seconds_per_step'] * 1e3:,.1f} ms"],
        ["tokens a second", f"{content['tokens_per_second']:,.0f}"],
        ["FLOPs of a step (see the benchmark's first lines)", f"{content['flops_per_step']:.3g}"],
        ["MFU", mfu],
        ["temporaries of a step, a GPU", f"{memory} GiB"],
        ["loss, first step and last", f"{content['first_loss']:.3f}, {content['last_loss']:.3f}"],
        ["rows dropped", f"{content['dropped_share']:.2%}"],
    ]
    return table(["", "figure"], rows)


def experts(content: dict[str, Any]) -> list[str]:
    """Table of `python -m benchmarks grouped-matmul`: TFLOP/s; the last two columns in ms with their share of the
    peak."""
    shape = content["shape"]
    rows, left_out = [], []
    for name, found in content["candidates"].items():
        times = found.get("times")
        if not times:
            if "error" in found:
                left_out.append(f"- {name}: {reason(found['error'])}.")
            continue
        cells = [f"{times[what]['tflops']:.0f}" if what in times else "-" for what in list(EXPERTS)[:3]]
        for what in list(EXPERTS)[3:]:
            if what not in times:  # kernels called from PyTorch: single matmuls only
                cells.append("-")
                continue
            peak = times[what].get("share_of_peak")
            cells.append(f"{times[what]['median_us'] / 1e3:.2f} ms" + (f", {peak:.0%}" if peak else ""))
        rows.append([name, *cells])
    sizes = (
        f"Hidden {shape['hidden']}, width {shape['width']}, {shape['experts']} experts of a rank, {shape['rows']} rows "
        f"in random groups, {shape['dtype']}. TFLOP/s, the experts in ms and as a share of the data sheet's peak:"
    )
    return [sizes, "", *table(["", *EXPERTS.values()], rows), *(["", "No times:", "", *left_out] if left_out else [])]


def absent(what: str) -> str:
    return f"**Not measured on GPUs yet** (`{what}`)."


TABLES: dict[str, Callable[[], str]] = {
    "whole layers": lambda: files("layer_*.json", layers, absent("python -m benchmarks layer")),
    "moe_mlp on one GPU": lambda: routed_mlp("model_shapes_h100.json", "gathered"),
    "moe_mlp on two GPUs": lambda: routed_mlp("layer_h200x2.json"),
    "moe_mlp on four GPUs": lambda: routed_mlp("layer_h200x4.json"),
    "stacks of layers": lambda: files("model_h*.json", layers, absent("python -m benchmarks model")),
    "NNX layer": lambda: files("nnx_layer_*.json", nnx_layers, absent("python -m benchmarks nnx-layer")),
    "training": lambda: files("train_*.json", training, absent("python -m benchmarks train")),
    "experts": lambda: files("grouped_matmul_*.json", experts, absent("python -m benchmarks grouped-matmul")),
}
"""By the name that a document gives."""
