"""The predictions of `xm.perf_model` from 8 to 1,024 ranks beside published tables, for docs/lab/performance_model.md.

    python tools/perf_curves.py [--plot docs/images/perf_curves.png]

DeepSeek-V3 shape: hidden 7168, 256 experts, top-8 (from 512 ranks on, two experts a rank), fp8 dispatch and bf16
combine, nodes of eight GPUs. On paper: nothing beyond one node of four GPUs has been run. `python -m benchmarks table`
puts the tables into the document.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import xen_moe_jax as xm

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
OPERATIONS = {"dispatch": "float8_e4m3fn", "combine": "bfloat16"}
PUBLISHED_BANDWIDTH = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
"""GB/s at the bottleneck of (dispatch, combine) by ranks, 4096 tokens, top-4 groups; Xen-MoE's readme, on H800."""
PUBLISHED_LATENCY = {8: (163, 318), 16: (173, 329), 32: (182, 350), 64: (186, 353), 128: (192, 369), 256: (194, 360)}
"""Microseconds of (dispatch, combine) by ranks, 128 tokens, over the network alone; the same source."""
TITLES = {
    4096: "4096 tokens a rank, experts of a token on at most 4 nodes",
    128: "128 tokens a rank, experts anywhere",
}


def predicted(operation: str, ranks: int, tokens: int) -> xm.Prediction:
    return xm.perf_model(
        operation,
        num_tokens=tokens,
        hidden=7168,
        num_ranks=ranks,
        num_experts=max(256, 2 * ranks),
        top_k=8,
        ranks_per_node=8,
        nodes_per_token=4 if tokens == 4096 else None,
        dtype=OPERATIONS[operation],
    )


def bottleneck(p: xm.Prediction) -> float:
    """GB/s of the link that bounds the operation, over the whole of its time."""
    return (p.bytes_slow if p.bound == "slow" else p.bytes_fast) / p.seconds / 1e9


def row(ranks: int, tokens: int) -> str:
    cells = [str(ranks)]
    for number, operation in enumerate(OPERATIONS):
        p = predicted(operation, ranks, tokens)
        cells += [f"{p.seconds * 1e6:,.0f}", f"{p.bytes_fast / 1e6:,.1f}", f"{p.bytes_slow / 1e6:,.1f}", p.bound]
        if tokens == 4096:
            cells.append(f"{bottleneck(p):.0f}")
        published = (PUBLISHED_BANDWIDTH if tokens == 4096 else PUBLISHED_LATENCY).get(ranks)
        cells.append("" if published is None else str(published[number]))
    return "| " + " | ".join(cells) + " |"


def table(tokens: int) -> str:
    beside = ["GB/s", "published GB/s"] if tokens == 4096 else ["published us"]
    columns = ["ranks"]
    for operation in OPERATIONS:
        columns += [f"{operation} us", "MB NVLink", "MB network", "bound", *beside]
    head = "| " + " | ".join(columns) + " |\n|" + "|".join("---" if c == "bound" else "---:" for c in columns) + "|"
    return "\n".join([f"{TITLES[tokens]}:\n", head, *(row(ranks, tokens) for ranks in RANKS)])


def tables() -> str:
    return "\n\n".join(map(table, TITLES))


def draw(path: str) -> None:
    """Times over ranks, a panel for each batch; published results appear as points where they are times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TITLES), figsize=(11, 4))
    for axes, (tokens, title) in zip(panels, TITLES.items(), strict=True):
        for number, (operation, dtype) in enumerate(OPERATIONS.items()):
            times = [predicted(operation, ranks, tokens).seconds * 1e6 for ranks in RANKS]
            (line,) = axes.plot(RANKS, times, marker=".", label=f"{operation}, {dtype}, predicted")
            if tokens == 128:
                measured = [times[number] for times in PUBLISHED_LATENCY.values()]
                axes.plot(
                    list(PUBLISHED_LATENCY), measured, "x", color=line.get_color(), label=f"{operation}, published"
                )
        axes.set(xscale="log", xlabel="ranks", ylabel="us", title=title, ylim=(0, None))
        axes.set_xticks(RANKS, labels=[str(ranks) for ranks in RANKS])
        axes.minorticks_off()
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    print(tables())
    if options.plot:
        draw(options.plot)


if __name__ == "__main__":
    main()
