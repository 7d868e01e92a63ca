"""Writes docs/lab/benchmark_tables.md, a page of generated tables, from the JSON files in benchmarks/results/.

python -m benchmarks table            rewrite the page
python -m benchmarks table --check    exit status 1 when the page differs from the files
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import layer_tables
from benchmarks.peers import jax_best, jax_settings
from benchmarks.tpu import budget as tpu_budget
from benchmarks.tpu import layer as tpu_layer
from tools import perf_curves

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "benchmark_tables.md"
RESULTS = ROOT / "benchmarks" / "results"
QUOTING = [ROOT / "README.md", *(path for path in sorted(ROOT.glob("docs/**/*.md")) if path != PAGE)]
BLOCK = re.compile(r"<!-- generated: (?P<name>[^>]+) -->\n.*?<!-- end -->", re.DOTALL)

HEAD = """# Benchmark tables

![Dispatch, combine and round trip beside JAX and a bare push](../images/operations_h200x4.png)

This page is generated: `python -m benchmarks table` writes it from the files in `benchmarks/results/`, and a test
compares the two. [How it is measured](benchmarks.md) explains the columns. Every table names the command that prints
its figures again.
"""


def cells(row: dict[str, Any]) -> list[str]:
    memory = row["memory_bytes"].get("total")
    checks = ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in row["checks"].items())
    return [
        row["name"],
        row["operation"],
        f"{row['us_median']:,.1f}",
        f"{row['us_min']:,.1f} to {row['us_max']:,.1f}",
        f"{row['gb_per_s_deduplicated']:.1f}" if row["gb_per_s_deduplicated"] >= 1 else "-",
        f"{row['of_link_ceiling']:.0%}" if "of_link_ceiling" in row else "-",
        f"{row['times_own']:.2f}x" if "times_own" in row else "-",
        "-" if memory is None else f"{memory / 2**20:,.1f}",
        checks or "-",
    ]


COLUMNS = ["program", "operation", "us", "range", "GB/s", "of the link", "against ours", "MiB", "check"]


def document_table(name: str | None, document: dict[str, Any]) -> str:
    """Heading, machine, command and the table of one run; columns without an entry are left out."""
    machine, work = document["machine"], document["workload"]
    rows = [cells(row) for row in document["results"]]
    shown = [i for i in range(len(COLUMNS)) if any(row[i] != "-" for row in rows)]
    sizes = f"T={work['tokens']} H={work['hidden']} E={work['experts']} K={work['top_k']} R={work['ranks']}"
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items() if k in ("jax", "jaxlib", "python"))
    lines = [f"### {name}\n"] if name else []
    lines += [
        f"{sizes}, {work['dtype']}, {work['routing']} routing, {work['layout']} layout. {machine['devices']} x "
        f"{machine['device_kind']} ({machine['processes']} process), {machine['processor']}, {machine['cores']} cores, "
        f"load {machine['load_average'][0]:.1f}; {versions}; {document['time'][:10]}.\n",
        f"`{document['command']}`\n",
        "| " + " | ".join(COLUMNS[i] for i in shown) + " |",
        "|" + "|".join("---" if i < 2 else "---:" for i in shown) + "|",
        *("| " + " | ".join(row[i] for i in shown) + " |" for row in rows),
    ]
    return "\n".join(lines)


def file_tables(path: pathlib.Path) -> str:
    if not path.exists():
        return "Not measured yet: the file is not there."
    content = json.loads(path.read_text())
    if "documents" not in content:
        return document_table(None, content)
    parts = [document_table(name, document) for name, document in content["documents"].items()]
    for name, error in content["failed"].items():
        parts.append(f"### {name}\n\nFailed: {error}")
    if content["left_out"]:
        parts.append("Not run, out of time: " + ", ".join(content["left_out"]) + ".")
    return "\n\n".join(parts)


def jax_table(path: pathlib.Path) -> str:
    """The library beside untuned and tuned JAX, the end of every setting, and every round trip."""
    content = json.loads(path.read_text())
    machine = content["machine"]
    days = " and ".join(sorted({entry["time"][:10] for entry in content["settings"].values() if entry.get("time")}))
    lines = [
        f"{machine['devices']} x {machine['device_kind']}, jax {content['versions']['jax']}; {days}.\n",
        *commands(content),
        jax_best.goal_line(content) + "\n",
        "| " + " | ".join(jax_best.COLUMNS) + " |",
        "|---|" + "---:|" * (len(jax_best.COLUMNS) - 2) + "---|",
        *("| " + " | ".join(jax_best.cells(line)) + " |" for line in jax_best.compare(content)),
        "",
        "Every setting: the XLA flags that it adds, how it ended, and the round trips that it gave in us.\n",
        "| setting | flags | how it ended | peer | 4096 bf16 | 128 bf16 | 4096 fp8 | 128 fp8 |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for name, entry in content["settings"].items():
        trips = [row for row in entry["results"] if row["operation"] == "round trip"]
        process = "one process per device" if entry["process_per_device"] else ""
        told = entry["flags"].split() + entry.get("environment", "").split()
        flags = " ".join(filter(None, [*(f"`{flag}`" for flag in told), process])) or "-"
        ended = ended_in_words(entry["ended"])
        if not trips:
            lines.append(f"| {name} | {flags} | {ended} | - | - | - | - | - |")
        for peer in dict.fromkeys(row["name"] for row in trips):
            cells = [one_trip(trips, peer, n, dtype) for dtype in ("bfloat16", "float8_e4m3fn") for n in (4096, 128)]
            lines.append(f"| {name} | {flags} | {ended} | {peer} | " + " | ".join(cells) + " |")
    if left := [name for name in jax_settings.SETTINGS if name not in content["settings"]]:
        lines.append(f"\nNot run, no time was left: {'; '.join(left)}.")
    return "\n".join(lines)


def commands(content: dict[str, Any]) -> list[str]:
    """Every command of the file. Where there are several, each with the settings that it measured last."""
    measured: dict[str, list[str]] = {}
    for name, entry in content["settings"].items():
        measured.setdefault(entry.get("command", content["command"]), []).append(name)
    if len(measured) == 1:
        return [f"`{command}`\n" for command in measured]
    return [f"{'; '.join(names)}:\n`{command}`\n" for command, names in measured.items()]


def one_trip(trips: list[dict[str, Any]], peer: str, tokens: int, dtype: str) -> str:
    found = [r for r in trips if (r["name"], r["tokens"], r["dtype"]) == (peer, tokens, dtype)]
    return f"{found[0]['us_median']:,.0f}" if found else "-"


def ended_in_words(ended: str) -> str:
    """Returns a text for a cell: without the pipes of a log, which would break the table, and not too long."""
    text = ended.replace("|", " ").replace("<", "(").replace(">", ")").replace("\n", " ")
    return text if len(text) <= 300 else text[:297] + "..."


def page() -> str:
    parts = [HEAD, "## GPU: beside JAX's own collectives, tuned\n"]
    parts += [jax_table(path) + "\n" for path in sorted(RESULTS.glob("jax_best_*.json"))]
    parts += ["## GPU: the suite\n", file_tables(RESULTS / "ops_h200x4.json") + "\n"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def tuned_comparisons() -> list[dict[str, Any]]:
    """The files of `python -m benchmarks jax-best`, the file of the most devices first; "file" is a link to each."""
    found = [
        json.loads(path.read_text()) | {"file": f"[file](../../benchmarks/results/{path.name})"}
        for path in RESULTS.glob("jax_best_*.json")
    ]
    return sorted(found, key=lambda content: -content["machine"]["devices"])


def compared() -> str:
    """The comparisons with JAX, each with a verdict on the goal."""
    parts = []
    for content in tuned_comparisons():
        machine = content["machine"]
        parts += [
            f"{machine['devices']} x {machine['device_kind']}, {content['time'][:10]} ({content['file']}):\n",
            "| " + " | ".join(jax_best.COLUMNS) + " |",
            "|---|" + "---:|" * (len(jax_best.COLUMNS) - 2) + "---|",
            *("| " + " | ".join(jax_best.cells(line)) + " |" for line in jax_best.compare(content)),
            "",
            jax_best.goal_line(content) + "\n",
        ]
    return "\n".join(parts).rstrip()


def tpu_layer_floor() -> str:
    """The static floor of the same layer."""
    content = json.loads((RESULTS / "tpu_layer.json").read_text())
    return "\n".join(tpu_layer.floors(content))


def tpu_layers() -> str:
    """The whole layer, compiled for TPUs."""
    path = RESULTS / "tpu_layer.json"
    if not path.exists():
        return "Not compiled yet: the file is not there."
    content = json.loads(path.read_text())
    return "\n".join([*tpu_layer.table(content), "", *(line + "\n" for line in tpu_layer.left_out(content))]).rstrip()


def tpu_static(lines: Callable[[list[dict[str, Any]]], list[str]]) -> str:
    """Lines about the compiled TPU programs."""
    return "\n".join(lines(json.loads((RESULTS / "tpu_static.json").read_text())["results"]))


def tpu_hosts() -> str:
    """Returns the static estimate of a dispatch and a combine together, for one host of each generation."""
    document = json.loads((RESULTS / "tpu_hosts.json").read_text())
    shown = (
        ("throughput-bf16", "4096, bf16"),
        ("throughput", "4096, fp8 dispatch"),
        ("low-latency", "128, fp8 dispatch"),
    )
    lines = [
        "| host | devices | tokens, wire | wire us | HBM us | kernels us | XLA us | at least, us |",
        "|" + "---|" * 8,
    ]
    for host, found in document["hosts"].items():
        for case, label in shown:
            rows = [row for row in found["rows"] if row["case"] == case]
            terms = [sum(row[name] for row in rows) for name in ("wire_us", "hbm_us")]
            terms += [sum(sum(row["kernels"].values()) for row in rows), sum(row["xla_us"] for row in rows)]
            terms.append(sum(row["floor_us"] for row in rows))
            cells = [host, str(found["devices"]), label, *(f"{us:.0f}" for us in terms)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tpu_left_out() -> str:
    missing = json.loads((RESULTS / "tpu_static.json").read_text())["left_out"]
    return f"Not compiled for this file: {', '.join(missing)}." if missing else "Every program was compiled."


HEADLINES = (  # document of the suite, operation, its name in a table
    (
        "fp8 dispatch, bf16 combine",
        "dispatch",
        "fp8 dispatch, input already quantized, layout work included",
    ),
    ("bf16, against JAX's own", "dispatch", "bf16 dispatch"),
    ("bf16, against JAX's own", "combine", "bf16 weighted combine"),
    ("bf16, against JAX's own", "round trip", "bf16 round trip"),
)


def own_row(document: str, operation: str) -> dict[str, Any]:
    """This library's row of the suite on 4 x H200."""
    results = json.loads((RESULTS / "ops_h200x4.json").read_text())["documents"][document]["results"]
    return next(r for r in results if r["name"].startswith("xen_moe_jax") and r["operation"] == operation)


def headlines() -> str:
    lines = ["| | time | of the link |", "|---|---:|---:|"]
    for document, operation, words in HEADLINES:
        row = own_row(document, operation)
        time = f"{row['us_median']:.0f}" if row["us_median"] >= 100 else f"{row['us_median']:.1f}"
        link = f"{row['of_link_ceiling']:.0%}" if "of_link_ceiling" in row else ""
        lines.append(f"| {words} | {time} us | {link} |")
    return "\n".join(lines)


def overlap() -> str:
    """Operations beside a chain of matmuls, by the thread blocks of the asynchronous operation."""
    lines = [
        "| | blocks in flight | whole, us | halves alone | matmuls | in turn | overlapped | over the longer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    parts = ("whole", "in halves", "matmuls", "in turn", "overlapped")
    for tokens, document in json.loads((RESULTS / "overlap_h200x4.json").read_text()).items():
        for row in document["overlap"]:
            dtype = "fp8" if row["operation"] == "dispatch" else "bf16"
            times = " | ".join(f"{row['us'][part]:,.{0 if row['us'][part] >= 100 else 1}f}" for part in parts)
            lines.append(
                f"| {tokens}, {dtype} {row['operation']} | {row['num_sms']} | {times} | {row['over_longer']:.2f} |"
            )
    return "\n".join(lines)


def decode_step() -> str:
    """Each program's time of a decode step, by the batch of a rank."""
    document = json.loads((RESULTS / "decode_step_h200x2.json").read_text())
    lines = [
        "| program | batch a rank | us a step | us a layer | against ours | replays, results that differ |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in document["results"]:
        layer = row["us_median"] / document["layers"]
        lines.append(
            f"| {row['name']} | {row['tokens']} | {row['us_median']:,.0f} | {layer:,.0f} | {row['times_own']:.2f}x | "
            f"{row['replays']:,}, {row['wrong'] or 'none'} |"
        )
    return "\n".join(lines)


def most_possible(content: dict[str, Any]) -> str:
    """The limit of a bf16 round trip that sends the same rows, as a multiple of the speed of the best of JAX."""
    devices = content["machine"]["devices"]
    if devices != 4:  # of other numbers there is no floor in the suite's file
        return ""
    document = "bf16, against JAX's own"
    floor = sum(
        row["us_median"] * row["of_link_ceiling"] for row in (own_row(document, o) for o in ("dispatch", "combine"))
    )
    line = next(
        line
        for line in jax_best.compare(content)
        if (line.tokens, line.dtype, line.operation) == (4096, "bfloat16", "round trip")
    )
    if line.best is None:
        return ""
    best = line.best["us_median"]
    return (
        "With 4096 bf16 tokens on four GPUs a token goes\nto 2.7 of the three other ranks on average, so `all_gather`, "
        "which sends it to all three, moves hardly more bytes. The rows of that\nround trip take "
        f"{floor:,.0f} us as bare pushes without any bookkeeping (measured in another job), and the best of JAX takes\n"
        f"{best:,.0f} us: no program that sends these rows over this link can be more than {best / floor:.2f} times as "
        "fast."
    )


def jax_so_far() -> str:
    """The goal, and the limit that the link sets to it."""
    return "The goal is a round trip 2.5 times as fast as the best that JAX gives. " + most_possible(
        tuned_comparisons()[0]
    )


def other_shapes() -> str:
    lines = ["| | dispatch, us | combine, us |", "|---|---:|---:|"]
    for document, quantized, words in (
        ("zipf", "zipf fp8", "Zipf routing, bf16 (fp8)"),
        ("hidden 4096", None, "hidden 4096, bf16"),
        ("hidden 2048", None, "hidden 2048, bf16"),
    ):
        fp8 = f" ({own_row(quantized, 'dispatch')['us_median']:.0f})" if quantized else ""
        dispatch, combine = (own_row(document, operation)["us_median"] for operation in ("dispatch", "combine"))
        lines.append(f"| {words} | {dispatch:.0f}{fp8} | {combine:.0f} |")
    return "\n".join(lines)


def thread_blocks() -> str:
    documents = json.loads((RESULTS / "ops_h200x4.json").read_text())["documents"]
    lines: list[str] = []
    for name in ("fp8 dispatch", "bf16 combine"):
        results = documents[f"{name} by thread blocks"]["results"]
        if not lines:
            lines = [
                "| | " + " | ".join(str(row["num_sms"]) for row in results) + " |",
                "|---|" + "---:|" * len(results),
            ]
        lines.append(f"| {name} | " + " | ".join(f"{row['us_median']:.0f}" for row in results) + " |")
    return "\n".join(lines)


def quoted(match: re.Match) -> str:
    return f"<!-- generated: {match['name']} -->\n{QUOTES[match['name']]()}\n<!-- end -->"


QUOTES = {
    "headlines": headlines,
    "overlap": overlap,
    "decode step": decode_step,
    "JAX so far": jax_so_far,
    "other shapes": other_shapes,
    "thread blocks": thread_blocks,
    "JAX operations": compared,
    "whole layer on TPU": tpu_layers,
    "floor of a layer on TPU": tpu_layer_floor,
    "TPU devices": lambda: tpu_static(lambda rows: tpu_budget.by_devices(rows, "v5p", "throughput")),
    "TPU targets": lambda: tpu_static(tpu_budget.by_target),
    "TPU left out": tpu_left_out,
    "TPU hosts": tpu_hosts,
    "on paper": perf_curves.tables,
    **layer_tables.TABLES,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    new = {PAGE: page()} | {path: BLOCK.sub(quoted, path.read_text()) for path in QUOTING}
    stale = [path for path, text in new.items() if not path.exists() or path.read_text() != text]
    if options.check:
        return int(bool(stale))
    for path in stale:
        path.write_text(new[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
