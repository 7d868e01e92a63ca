"""Fills the tables of docs/lab/transfer_figures.md from the JSON files that they name.

    python -m benchmarks transfer-table            rewrite the tables
    python -m benchmarks transfer-table --check    exit status 1 when a table differs from its JSON

A table sits between `<!-- table: FILE -->` and `<!-- end -->`; `python -m benchmarks transfer
--json` wrote FILE.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lab" / "transfer_figures.md"
BLOCK = re.compile(r"<!-- table: (?P<file>\S+) -->\n.*?<!-- end -->", re.DOTALL)


def table(document: dict[str, Any]) -> str:
    """One row for each size, batch and concurrency; microseconds (median) of every measured peer."""
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


def fill(page: str) -> str:
    def block(match: re.Match) -> str:
        content = table(json.loads((ROOT / match["file"]).read_text()))
        return f"<!-- table: {match['file']} -->\n{content}\n<!-- end -->"

    return BLOCK.sub(block, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = fill(old)
    if options.check:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
