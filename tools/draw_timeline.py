"""Draws the work of one GPU, stream by stream, from profiles that `jax.profiler.trace` wrote.

    python tools/draw_timeline.py PROFILE [PROFILE ...] --out docs/images/overlap.png [--device 0]

A profile is a folder that was given to `jax.profiler.trace`, or a *.trace.json.gz. The last run in it is drawn: kernels
as bars, communication of this library above, everything else below. All profiles share one scale of microseconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib
import re
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {  # pattern of a kernel's name, label, colour; the first match counts
    "dispatch": (r"xen_moe.*Dispatch", "#d1495b"),
    "combine": (r"xen_moe.*Combine", "#edae49"),
    "matmul": (r"gemm|cutlass|nvjet|cublas|_dot", "#30638e"),
    "other": (r"", "#b8b8b8"),
}


def events(profile: pathlib.Path, device: int) -> list[dict[str, Any]]:
    """Kernels of GPU `device`: name, stream, start and end in microseconds."""
    file = profile if profile.is_file() else max(profile.rglob("*.trace.json.gz"), key=lambda f: f.stat().st_mtime)
    found = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = [e for e in found if e.get("ph") == "M" and "args" in e]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and f"GPU:{device} " in e["args"]["name"] + " "}
    streams = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in named
        if e["name"] == "thread_name" and e["pid"] in gpus and e["args"]["name"].startswith("Stream")
    }
    return sorted(
        (
            {"name": e["name"], "stream": streams[e["pid"], e["tid"]], "start": e["ts"], "end": e["ts"] + e["dur"]}
            for e in found
            if e.get("ph") == "X" and (e["pid"], e.get("tid")) in streams and "Memset" not in e["name"]
        ),
        key=lambda e: e["start"],
    )


def kind_of(name: str) -> str:
    return next(kind for kind, (pattern, _) in KINDS.items() if re.search(pattern, name))


def last_run(kernels: list[dict[str, Any]], gap_us: float = 100.0) -> list[dict[str, Any]]:
    """The kernels behind the last pause of the GPU."""
    first, busy_until = 0, kernels[0]["end"]
    for i, kernel in enumerate(kernels):
        if kernel["start"] - busy_until > gap_us and any(kind_of(k["name"]) != "other" for k in kernels[i:]):
            first = i
        busy_until = max(busy_until, kernel["end"])
    return kernels[first:]


def draw(profiles: list[tuple[str, list[dict[str, Any]]]], out: pathlib.Path) -> None:
    figure, axes = plt.subplots(len(profiles), 1, figsize=(12, 1.6 * len(profiles) + 0.6), sharex=True, squeeze=False)
    for axis, (title, kernels) in zip(axes[:, 0], profiles, strict=True):
        begin = kernels[0]["start"]
        for kernel in kernels:
            kind = kind_of(kernel["name"])
            lane = 1 if kind in ("dispatch", "combine") else 0
            span = (kernel["start"] - begin, kernel["end"] - kernel["start"])
            axis.broken_barh([span], (lane * 1.1, 1.0), facecolors=KINDS[kind][1], linewidth=0)
        total = max(k["end"] for k in kernels) - begin
        axis.set_yticks([0.5, 1.6], ["compute", "communication"])
        axis.set_title(f"{title}: {total:.0f} us", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("microseconds, one GPU")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in KINDS.values()]
    figure.legend(handles, list(KINDS), loc="upper right", ncols=len(KINDS), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profiles", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    runs = []
    for profile in options.profiles:
        title = profile.name.removesuffix(".trace.json.gz").replace("_", " ")
        runs.append((title, last_run(events(profile, options.device))))
    draw(runs, options.out)


if __name__ == "__main__":
    main()
