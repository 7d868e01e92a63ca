"""Fills the tables of docs/benchmarks.md and docs/transfer.md from the JSON files that they name.

    python benchmarks/table.py            rewrite the tables
    python benchmarks/table.py --check    exit status 1 when a table is not what its JSON says

A table sits between `<!-- table: FILE -->` and `<!-- end -->`; FILE is the JSON of the benchmark command or of a suite.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("benchmarks.md", "transfer.md")]
BLOCK = re.compile(r"<!-- table: (?P<file>\S+) -->\n.*?<!-- end -->", re.DOTALL)


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
    """Heading, machine, command and the table of one run; columns that say nothing are left out."""
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


def transfer_table(document: dict[str, Any]) -> str:
    """One row for each size, batch and concurrency; microseconds (median) of everybody who was measured."""
    machine, results = document["machine"], document["results"]
    peers = list(dict.fromkeys(row["peer"] for row in results))
    rows: dict[tuple, dict[str, dict]] = {}
    for row in results:
        rows.setdefault((row["table"], row["batch"], row["concurrency"], row["bytes"]), {})[row["peer"]] = row
    raw = [peer for peer in peers if peer.startswith("raw")]
    columns = ["bytes", "pieces", "in flight", *(f"{peer}, us" for peer in peers), "GB/s"]
    columns += [f"rate of {peer}" for peer in raw]
    lines = []
    for (_, batch, concurrency, size), by_peer in sorted(
        rows.items(), key=lambda item: (item[0][0] != "sizes", item[0])
    ):
        ours = by_peer["this package"]
        times = [f"{by_peer[peer]['p50_us']:,.1f}" if peer in by_peer else "-" for peer in peers]
        parts = [f"{by_peer[peer]['p50_us'] / ours['p50_us']:.0%}" if peer in by_peer else "-" for peer in raw]
        lines.append([f"{size:,}", str(batch), str(concurrency), *times, f"{ours['gb_per_s']:.2f}", *parts])
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items() if k in ("jax", "jaxlib", "python"))
    text = [
        f"{machine['devices']} x {machine['device_kind']}, {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_average'][0]:.1f}; {versions}; {document['time'][:10]}.\n",
        f"`{document['command']}`\n",
        "| " + " | ".join(columns) + " |",
        "|" + "---:|" * len(columns),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    if document["not_measured"]:
        text.append("\nNot measured: " + "; ".join(f"{k} ({v})" for k, v in document["not_measured"].items()) + ".")
    return "\n".join(text)


def file_tables(path: pathlib.Path) -> str:
    if not path.exists():
        return "Not measured yet: the file is not there."
    content = json.loads(path.read_text())
    if "not_measured" in content:
        return transfer_table(content)
    if "documents" not in content:
        return document_table(None, content)
    parts = [document_table(name, document) for name, document in content["documents"].items()]
    for name, error in content["failed"].items():
        parts.append(f"### {name}\n\nFailed: {error}")
    if content["left_out"]:
        parts.append("Not run, out of time: " + ", ".join(content["left_out"]) + ".")
    return "\n\n".join(parts)


def fill(page: str) -> str:
    def block(match: re.Match) -> str:
        return f"<!-- table: {match['file']} -->\n{file_tables(ROOT / match['file'])}\n<!-- end -->"

    return BLOCK.sub(block, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [page for page in PAGES if fill(page.read_text()) != page.read_text()]
    if options.check:
        return int(bool(stale))
    for page in stale:
        page.write_text(fill(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
