"""`python -m benchmarks tpu-static`: counts from the programs compiled for each TPU generation, without a TPU.

Everything here is counted from a random routing, read from the compiled program, or divided by a figure from a public
sheet. Nothing is measured: the times are lower bounds of links and memory, not latencies.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib import report
from benchmarks.tpu import budget as tpu_budget
from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import topologies as tpu_topologies
from benchmarks.tpu.programs import (
    CASES,
    Case,
    capacity_for,
    collectives,
    compile_own,
    compile_peer,
    count_rows,
    kernels,
    traffic,
)

NOTICE = """\
Estimates. No TPU ran this. ici us: off-device bytes of the busiest device over the ICI injection bandwidth of the
public sheet. hbm us: the kernels' HBM bytes over HBM bandwidth. wire us: off-device bytes over the all-to-all bandwidth
of the torus. kernels us: VLIW bundles of the compiled kernels, one a cycle. xla us: XLA's estimate of its operations.
All are lower bounds, not latencies. temp MiB and metadata KiB (XLA's own collectives): from the compiled program."""
README_V5P = {
    "source": "Xen-MoE readme, TPU v5p, 8-way, published there without code: not reproduced here",
    "throughput_gb_per_s": {"dispatch": 195.0, "combine": 198.0},
    "low_latency_us": {"dispatch": 142.0, "combine": 285.0},
}
OPERATIONS = ("dispatch", "combine", "dispatch halves", "combine halves", "redispatch", "exchange")
"""The fused operations push row by row; start and done pack a send buffer and send one run of rows to each peer. A
redispatch is the gradient of a combine; the exchange is `ragged_all_to_all`, of a row for every slot."""
FOR_MOST_DEVICES = OPERATIONS[:2]
"""Operations that are compiled for the most devices, too."""
OTHERS_ON = ("v5e", "v5p")
"""Generations for which the operations behind the first two are compiled, in the case "throughput"."""
PEER_CASE = "throughput-bf16"
"""Case for which the peer is counted: bfloat16 rows, as it sends them."""


def main(options: argparse.Namespace) -> int:
    """Compiles, counts, prints the table, writes JSON and plot where asked."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
    tpu_topologies.prepare_environment()
    if not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        raise ValueError("tpu-static: compiles with libtpu, which is not installed: pip install libtpu, or make setup")
    tpu_bundles.request_dump(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")

    sizes = {"hidden": options.hidden or 7168, "experts": options.experts or 256, "top_k": options.top_k or 8}
    cases = {c.name: c if options.tokens is None else dataclasses.replace(c, tokens=options.tokens) for c in CASES}
    fixed = {"versions": report.versions(), "sizes": sizes, "seed": options.seed, "tokens": options.tokens}
    compiler = Compiler(folder, sizes)
    if options.check:
        lines = check(
            options.check, wanted(options.generations, options.cases, options.compiled), cases, fixed, compiler
        )
        print("\n".join(lines) or f"{options.check}: every count is as the kernels are")
        return int(bool(lines))
    rows = earlier_rows(options.json, fixed)
    for key in wanted(options.generations, options.cases, options.compiled):
        report.progress(" ".join(key))
        rows[key] = row_of(key, cases, fixed, compiler)
        everything = wanted(None, None)
        document = {
            "command": command(options),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "left_out": [" ".join(key) for key in everything if key not in rows],
            "notice": NOTICE,
            **fixed,
            "readme_v5p": README_V5P,
            "sources": {t.name: t.source for t in tpu_topologies.TOPOLOGIES.values()},
            "results": [rows[key] for key in everything if key in rows],
        }
        if options.json:
            report.write_json(options.json, document)  # after every program: a run that is stopped keeps its results
    print(table(document))
    if options.plot:
        tpu_budget.plot(options.plot, document["results"])
    return 0


def command(options: argparse.Namespace) -> str:
    """Returns the command that makes all rows of a results file. A run stores it in place of its own command line,
    because it may add rows to a file or replace some."""
    given = {name: getattr(options, name) for name in ("hidden", "experts", "top_k", "tokens", "seed")}
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]
    return report.command_line(["tpu-static", "--json", "FILE", *sizes])


Key = tuple[str, str, str, str]
"""Generation, program, case, operation of a row."""


def wanted(
    generations: Sequence[str] | None, cases: Sequence[str] | None, operations: Sequence[str] | None = None
) -> list[Key]:
    """Keys of the rows of these generations, cases and operations (None: all), in the order of the report."""
    names = [case.name for case in CASES if cases is None or case.name in cases]
    found: list[Key] = []
    for generation in tpu_topologies.TOPOLOGIES:
        if generations is not None and generation not in generations:
            continue
        found += [(generation, "xen_moe_jax", name, operation) for name in names for operation in OPERATIONS[:2]]
        if generation in OTHERS_ON and "throughput" in names:
            found += [(generation, "xen_moe_jax", "throughput", operation) for operation in OPERATIONS[2:]]
        if PEER_CASE in names:
            found.append((generation, "jax.lax.ragged_all_to_all", PEER_CASE, "dispatch"))
    return [key for key in found if operations is None or key[3] in operations]


def earlier_rows(path: str | None, fixed: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Rows that a file already holds, for a run that adds to it or replaces some of them.

    Raises:
      ValueError: they were counted with other versions, sizes, seed or tokens than `fixed`.
    """
    if path is None or not pathlib.Path(path).exists():
        return {}
    document = json.loads(pathlib.Path(path).read_text())
    for name, value in fixed.items():
        if document.get(name) != value:
            raise ValueError(
                f"--json {path}: holds rows of {name} {document.get(name)}, this run has {value}; name another file"
            )
    return {tuple(row[k] for k in ("generation", "program", "case", "operation")): row for row in document["results"]}


# -- rows -------------------------------------------------------------------------------------------------------------


def compiled_facts(compiled: Any, seconds: float) -> dict[str, Any]:
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        "kernels": kernels(text),
        "collective_bytes": collectives(text),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "compile_seconds": round(seconds, 2),
    }


class Compiler:
    """Compiles the library's operations, each program once: two cases that differ in the other operation's wire share
    one.

    Attributes:
      folder: gets libtpu's dump. sizes: `hidden`, `experts`, `top_k`.
    """

    def __init__(self, folder: str, sizes: dict[str, int]):
        self.folder, self.sizes = folder, sizes
        self.found: dict[tuple[Any, ...], tuple[tpu_bundles.Program, float]] = {}

    def __call__(self, generation: str, case: Case, operation: str, devices: int) -> tuple[tpu_bundles.Program, float]:
        """The program, and the seconds that it took to compile."""
        wires = {"dispatch": (case.dispatch_wire, None), "combine": (None, case.combine_wire)}
        key: tuple[Any, ...] = (generation, devices, case.tokens, case.layout, operation)
        key += wires.get(operation, (case.dispatch_wire, case.combine_wire))
        if key not in self.found:
            sides = tpu_topologies.TOPOLOGIES[generation].shape(devices).sides
            topology = None if devices == 8 else f"{generation}:{'x'.join(map(str, sides))}"
            begin = time.monotonic()
            program = tpu_bundles.compile_counted(
                functools.partial(compile_own, generation, case, operation, self.sizes, topology=topology), self.folder
            )
            self.found[key] = program, time.monotonic() - begin
        return self.found[key]


def own_row(generation: str, case: Case, operation: str, seed: int, compiler: Compiler) -> dict[str, Any]:
    """Compiles one operation of the library for 8 devices, and some operations for the most devices too, and counts
    it."""
    sizes, topology = compiler.sizes, tpu_topologies.TOPOLOGIES[generation]
    program, seconds = compiler(generation, case, operation, 8)
    counts = count_rows(case.tokens, 8, sizes["experts"], sizes["top_k"], seed)
    row: dict[str, Any] = {
        "generation": generation, "program": "xen_moe_jax", "case": case.name, "operation": operation
    }  # fmt: skip
    row |= dataclasses.asdict(case) | traffic(case, operation, counts, sizes["hidden"], sizes["top_k"])
    row |= compiled_facts(program.compiled, seconds)
    row["scalar_operations"] = tpu_bundles.scalar_operations(program.text)
    if "halves" not in operation:
        routing = tpu_bundles.random_routing(
            case.tokens, 8, sizes["experts"], sizes["top_k"], tpu_bundles.grouping(program), seed
        )
        found = tpu_bundles.counts(program, routing, case.layout == "padded")
        row["bundles"] = {name: {"step": c.step, "turn": c.turn, "cores": c.cores} for name, c in found.items()}
    if operation in FOR_MOST_DEVICES:
        most = tpu_budget.CHIPS[-1]
        large, seconds = compiler(generation, case, operation, most)
        facts = compiled_facts(large.compiled, seconds)
        row["largest"] = {"devices": most} | facts | {"scalar_operations": tpu_bundles.scalar_operations(large.text)}
        row["budget"] = tpu_budget.rows(topology, case, operation, {8: program, most: large}, sizes, seed)
    return row | lower_bounds(row, topology)


COUNTED = (
    "kernels",
    "collective_bytes",
    "scalar_operations",
    "bundles",
    "remote_dmas",
    "local_dmas",
    "ici_bytes",
    "hbm_bytes",
    "temp_bytes",
    "argument_bytes",
    "output_bytes",
    "budget",
)
"""Counts that a second compilation of the same program repeats, to the last bundle and byte."""


def moved(known: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """Returns a line for each count of a row that is another one when its program is compiled again."""
    lines = []
    for name in (n for n in COUNTED if n in known or n in again):
        if name == "bundles" and known.get(name) and again.get(name):
            pairs = [(kernel, known[name].get(kernel), again[name].get(kernel)) for kernel in known[name] | again[name]]
            lines += [f"bundles of {kernel}: {now}, the file has {old}" for kernel, old, now in pairs if old != now]
        elif name == "budget" and known.get(name) and again.get(name):
            both = zip(known[name], again[name], strict=True)
            lines += [f"budget: {now}, the file has {old}" for old, now in both if old != now]
        elif known.get(name) != again.get(name):
            lines.append(f"{name}: {again.get(name)}, the file has {known.get(name)}")
    if "largest" in known or "largest" in again:
        largest = moved(known.get("largest", {}), again.get("largest", {}))
        lines += [f"most devices: {line}" for line in largest]
    return lines


def check(path: str, keys: list[Key], cases: dict[str, Case], fixed: dict[str, Any], compiler: Compiler) -> list[str]:
    """Compiles these rows of a file again; returns a line for each count that has moved.

    Raises:
      ValueError: the file is of other versions, sizes, seed or tokens, or lacks a row.
    """
    rows, lines = earlier_rows(path, fixed), []
    for key in keys:
        if key not in rows:
            raise ValueError(f"--check {path}: has no row {' '.join(key)}; make it with --json {path}")
        again = json.loads(json.dumps(row_of(key, cases, fixed, compiler)))
        lines += [f"{' '.join(key)}: {line}" for line in moved(rows[key], again)]
    return lines


def row_of(key: Key, cases: dict[str, Case], fixed: dict[str, Any], compiler: Compiler) -> dict[str, Any]:
    """Compiles and counts one row."""
    generation, program, case, operation = key
    if program == "xen_moe_jax":
        return own_row(generation, cases[case], operation, fixed["seed"], compiler)
    return peer_row(generation, cases[case], fixed["sizes"], fixed["seed"])


def peer_row(generation: str, case: Case, sizes: dict[str, int], seed: int) -> dict[str, Any]:
    begin = time.monotonic()
    row: dict[str, Any] = {
        "generation": generation, "program": "jax.lax.ragged_all_to_all", "case": case.name, "operation": "dispatch"
    }  # fmt: skip
    row |= dataclasses.asdict(case)
    row |= compiled_facts(compile_peer(generation, case, sizes), time.monotonic() - begin)
    counts = count_rows(case.tokens, 8, sizes["experts"], sizes["top_k"], seed)
    width = sizes["hidden"] * 2
    sent = case.tokens * sizes["top_k"]
    # read tokens once per slot, write the sorted operand, read it to send, zero and fill the result
    hbm = width * (3 * sent + counts.rows + capacity_for(case.tokens, sizes["top_k"]))
    row |= {"record_bytes": width, "ici_bytes": counts.off_rank_duplicated * width, "hbm_bytes": hbm}
    return row | lower_bounds(row, tpu_topologies.TOPOLOGIES[generation])


def lower_bounds(row: dict[str, Any], topology: Any) -> dict[str, float]:
    return {
        "ici_us": row["ici_bytes"] / topology.ici_bytes_per_s * 1e6,
        "hbm_us": row["hbm_bytes"] / topology.hbm_bytes_per_s * 1e6,
    }


# -- showing ----------------------------------------------------------------------------------------------------------


def table(document: dict[str, Any]) -> str:
    columns = ["chip", "program", "case", "operation", "ICI MB", "HBM MB", "remote DMAs", "local DMAs", "temp MiB"]
    columns += ["metadata KiB", "ici us", "hbm us"]
    lines = []
    for row in document["results"]:
        metadata = sum(v for k, v in row["collective_bytes"].items() if k != "ragged-all-to-all")
        cells = [row["generation"], row["program"], row["case"], row["operation"]]
        cells += [f"{row[name] / 1e6:.1f}" for name in ("ici_bytes", "hbm_bytes")]
        cells += [str(row.get(name, "-")) for name in ("remote_dmas", "local_dmas")]
        cells += [f"{row['temp_bytes'] / 2**20:.0f}", f"{metadata / 2**10:.0f}"]
        cells += [f"{row['ici_us']:.0f}", f"{row['hbm_us']:.0f}"]
        lines.append(cells)
    budget = [
        "chip",
        "case",
        "operation",
        "devices",
        "wire us",
        "HBM us",
        "kernels us",
        "of it DMA issue",
        "XLA us",
        "bound",
    ]
    terms = []
    for row in document["results"]:
        for b in row.get("budget", []):
            cells = [row["generation"], row["case"], row["operation"], str(b["devices"])]
            cells += [f"{b[name]:.0f}" for name in ("wire_us", "hbm_us", "kernels_us", "dma_issue_us")]
            terms.append([*cells, "-" if b["xla_us"] is None else f"{b['xla_us']:.0f}", b["bound"]])
    readme = document["readme_v5p"]
    published = [f"{readme['source']}:"]
    for operation, rate in readme["throughput_gb_per_s"].items():
        sent = document_bytes(document, operation)
        needs = "" if sent is None else f", {sent / rate / 1e3:.0f} us for the bytes above (throughput)"
        published.append(f"  throughput {operation}: {rate:.0f} GB/s{needs}")
    for operation, us in readme["low_latency_us"].items():
        published.append(f"  low latency {operation}: {us:.0f} us")
    return "\n".join(
        [report.format_table(columns, lines), "", report.format_table(budget, terms), "", NOTICE, "", *published]
    )


def document_bytes(document: dict[str, Any], operation: str) -> float | None:
    """ICI bytes of the library's throughput operation on v5p; None where it was left out."""
    wanted = ("v5p", "xen_moe_jax", "throughput", operation)
    keys = ("generation", "program", "case", "operation")
    return next((r["ici_bytes"] for r in document["results"] if tuple(r[k] for k in keys) == wanted), None)
