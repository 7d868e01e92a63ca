"""Reports of a run: machine and versions, a table for people, JSON for programs, a plot."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import statistics
from typing import Any

import jax
import numpy as np

from benchmarks.lib import accounting
from xen_moe_jax.tuning.arguments import VIRTUAL_DEVICES, format_table
from xen_moe_jax.tuning.arguments import progress as progress
from xen_moe_jax.tuning.timing import Timed
from xen_moe_jax.tuning.workload import Workload

PACKAGES = ("xen-moe-jax", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nvshmem-cu13", "libtpu", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of the packages that affect times; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "platform_version": getattr(devices[0].client, "platform_version", "").split("\n")[0],
        "devices": len(devices),
        "processes": jax.process_count(),
        "load_average": list(os.getloadavg()),
    }


def command_line(arguments: list[str]) -> str:
    """Returns the command of a mode and its arguments, as a shell takes it."""
    return shlex.join(["python", "-m", "benchmarks", *arguments])


def header(arguments: list[str], work: Workload | None) -> dict[str, Any]:
    """The part of every JSON file that describes the program and the machine."""
    head: dict[str, Any] = {
        "command": command_line(arguments),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }
    if work is not None:
        head["workload"] = {name: getattr(work, name) for name in work.__dataclass_fields__}
    return head


def result_row(timed: Timed, work: Workload, rows: accounting.OffRankRows, checks: dict[str, Any]) -> dict[str, Any]:
    """One program's figures: microseconds per call first, then rates over the same bytes for every program."""
    median = timed.median
    operation = timed.program.operation
    deduplicated = accounting.off_rank_bytes(work, rows.deduplicated, operation)
    duplicated = accounting.off_rank_bytes(work, rows.duplicated, operation)
    return {
        "name": timed.program.name,
        "operation": operation,
        "us_median": median,
        "us_min": min(timed.microseconds),
        "us_max": max(timed.microseconds),
        "us_p99": float(np.quantile(timed.microseconds, 0.99)),
        "us_spread": statistics.pstdev(timed.microseconds),
        "us_repeats": timed.microseconds,
        "calls_per_repeat": timed.inner,
        "off_rank_bytes_deduplicated": deduplicated,
        "off_rank_bytes_duplicated": duplicated,
        "gb_per_s_deduplicated": accounting.gigabytes_per_second(deduplicated, median),
        "gb_per_s_duplicated": accounting.gigabytes_per_second(duplicated, median),
        "memory_bytes": timed.memory,
        "checks": checks,
    }


def add_ratios(results: list[dict[str, Any]]) -> None:
    """`times_own`: how many times longer than the library's own program for the same operation."""
    for operation in {row["operation"] for row in results}:
        rows = [row for row in results if row["operation"] == operation]
        own = [row["us_median"] for row in rows if row["name"].startswith("xen_moe_jax")]
        for row in rows:
            if own:
                row["times_own"] = row["us_median"] / own[0]


def subtract_loop(results: list[dict[str, Any]]) -> None:
    """`us_less_loop`: the median less that of the empty loop, which was timed in turns with it. Not of a round trip,
    which has no such loop: its tokens are the chain.
    """
    (loop,) = [row["us_median"] for row in results if row["operation"] == "none"]
    for row in results:
        if row["operation"] in ("dispatch", "redispatch", "combine"):
            row["us_less_loop"] = row["us_median"] - loop


def add_link_ceiling(results: list[dict[str, Any]], ceiling: dict[str, Any] | None) -> None:
    """`of_link_ceiling`: achieved rate over the rate of a bare push, measured on the same machine in the same job.

    `ceiling` is the JSON of the link benchmark: `{"entries": [{"row_bytes", "tokens", "gb_per_s", ...}, ...]}`; the
    fastest entry whose row size and token count are nearest counts.
    """
    if ceiling is None:
        return
    for row in results:
        if row["operation"] not in ("dispatch", "combine"):
            continue

        def distance(entry, row=row):
            return abs(entry["row_bytes"] - row["wire_row_bytes"]), abs(entry["tokens"] - row["tokens"])

        nearest = min(distance(entry) for entry in ceiling["entries"])
        best = max(e["gb_per_s"] for e in ceiling["entries"] if distance(e) == nearest)
        row["link_ceiling_gb_per_s"] = best
        row["of_link_ceiling"] = row["gb_per_s_deduplicated"] / best


def results_table(results: list[dict[str, Any]]) -> str:
    columns = ["program", "operation", "us", "min..max", "GB/s", "vs ours", "MiB", "check"]
    if any("of_link_ceiling" in row for row in results):
        columns.insert(5, "of link")
    if any("us_less_loop" in row for row in results):
        columns[3:3] = ["less loop", "p99"]
    lines = []
    for row in results:
        memory = row["memory_bytes"].get("total")
        cells = {
            "program": row["name"],
            "operation": row["operation"],
            "us": f"{row['us_median']:.1f}",
            "less loop": f"{row['us_less_loop']:.1f}" if "us_less_loop" in row else "-",
            "p99": f"{row['us_p99']:.1f}",
            "min..max": f"{row['us_min']:.1f}..{row['us_max']:.1f}",
            "GB/s": f"{row['gb_per_s_deduplicated']:.2f}",
            "of link": f"{row['of_link_ceiling']:.0%}" if "of_link_ceiling" in row else "-",
            "vs ours": f"{row['times_own']:.2f}x" if "times_own" in row else "-",
            "MiB": "-" if memory is None else f"{memory / 2**20:.1f}",
            "check": ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in row["checks"].items())
            or "-",
        }
        lines.append([cells[c] for c in columns])
    return format_table(columns, lines)


def describe(head: dict[str, Any]) -> str:
    m = head["machine"]
    lines = [
        f"{m['devices']} x {m['device_kind']} ({m['platform']}), {m['processes']} process(es); "
        f"{m['processor']}, {m['cores']} cores, load {m['load_average'][0]:.1f}",
        "  ".join(f"{name} {version}" for name, version in head["versions"].items()),
        head["command"],
    ]
    if m["platform"] == "cpu":
        lines.insert(1, VIRTUAL_DEVICES)
    if "workload" in head:
        lines.append("  ".join(f"{name}={value}" for name, value in head["workload"].items()))
    return "\n".join(lines)


FOOTNOTE = (
    "us: median per call on the slowest rank, dependent calls inside one program. GB/s: off-rank bytes of the busiest\n"
    "rank, a token counted once per destination rank, over us. MiB: arguments, results and temporaries of one call,\n"
    "per device, from the compiler."
)


def write_json(path: str, document: dict[str, Any]) -> None:
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")


def add_json(path: str | pathlib.Path, document: dict[str, Any]) -> None:
    """Writes the keys of `document` into a JSON file, which may exist. Keys of the file that `document` lacks stay:
    several programs share one file."""
    target = pathlib.Path(path)
    write_json(str(path), (json.loads(target.read_text()) if target.exists() else {}) | document)


OURS, THEIRS = "tab:blue", "tab:gray"
"""Colours of the library's own programs and of its peers."""

PLOTTED_SIZES = (
    ("tokens", "tokens per rank"),
    ("hidden", "hidden"),
    ("experts", "experts"),
    ("top_k", "per token"),
    ("ranks", "ranks"),
)


def write_plot(path: str, document: dict[str, Any]) -> None:
    """Bars of microseconds, or microseconds over thread blocks for a sweep. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    results = document["results"]
    if all("num_sms" in row for row in results):
        for operation in sorted({row["operation"] for row in results}):
            rows = [row for row in results if row["operation"] == operation]
            axes.plot([r["num_sms"] for r in rows], [r["us_median"] for r in rows], marker="o", label=operation)
        axes.set(xlabel="thread blocks (num_sms)", ylabel="microseconds per call", xlim=(0, None), ylim=(0, None))
        axes.legend()
    else:
        names = [f"{row['name']}\n{row['operation']}" for row in results]
        values = [row["us_median"] for row in results]
        errors = [[v - row["us_min"] for v, row in zip(values, results, strict=True)],
                  [row["us_max"] - v for v, row in zip(values, results, strict=True)]]  # fmt: skip
        axes.barh(names, values, xerr=errors, color=colours(results))
        axes.invert_yaxis()
        axes.set(xlabel="microseconds per call: median, and the range over the repeats", xlim=(0, None))
    axes.set_title(plot_title(document), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_title(document: dict[str, Any]) -> str:
    """Returns the machine, the sizes of the timed programs, and for a CPU the limits of its times."""
    machine, work = document["machine"], document["workload"]
    sizes = ", ".join(f"{work[name]} {text}" for name, text in PLOTTED_SIZES)
    title = f"{machine['devices']} x {machine['device_kind']}\n{sizes}, {work['dtype']}, {work['layout']}"
    return f"{title}\n{VIRTUAL_DEVICES}" if machine["device_kind"] == "cpu" else title


def colours(results: list[dict[str, Any]]) -> list[str]:
    """Returns one colour for the library's own programs and another for its peers, a row each."""
    return [OURS if row["name"].startswith("xen_moe_jax") else THEIRS for row in results]
