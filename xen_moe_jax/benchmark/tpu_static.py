"""`--mode tpu-static`: what the programs compiled for each TPU generation say, without a TPU.

Everything here is counted from a random routing, read from the compiled program, or divided by a figure from a public
sheet. Nothing is measured: the times are lower bounds of what links and memory need, not latencies.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import re
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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
COLLECTIVE = re.compile(
    r"= (\S+) (all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "f8e4m3fn": 8}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem of the report: tokens per rank, layout, wires, in DeepSeek-V3's sizes unless the command line
    differs.
    """

    name: str
    tokens: int
    layout: str
    dispatch_wire: str | None
    combine_wire: str | None


CASES = (
    Case("throughput", 4096, "grouped", "float8_e4m3fn", None),
    Case("throughput-bf16", 4096, "grouped", None, None),
    Case("low-latency", 128, "padded", "float8_e4m3fn", None),
)

OPERATIONS = ("dispatch", "combine", "dispatch halves", "combine halves")
"""The fused operations push row by row; the halves pack a send buffer and send one run of rows to each peer."""
HALVES_ON = ("v5e", "v5p")


def main(options: argparse.Namespace) -> int:
    """Compiles, counts, prints the table, writes JSON and plot where asked."""
    import tempfile

    from xen_moe_jax.benchmark import report, tpu_budget, tpu_bundles, tpu_topologies

    folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
    tpu_topologies.prepare_environment()
    tpu_bundles.request_dump(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")

    sizes = {"hidden": options.hidden or 7168, "experts": options.experts or 256, "top_k": options.top_k or 8}
    cases = [c if options.tokens is None else dataclasses.replace(c, tokens=options.tokens) for c in CASES]
    rows = []
    for generation in tpu_topologies.TOPOLOGIES:
        for case in cases:
            for operation in OPERATIONS if generation in HALVES_ON and case.name == "throughput" else OPERATIONS[:2]:
                report.progress(f"{generation} {case.name} {operation}")
                rows.append(own_row(generation, case, operation, sizes, options.seed, folder))
        report.progress(f"{generation} jax.lax.ragged_all_to_all")
        rows.append(peer_row(generation, cases[1], sizes, options.seed))
    document = {
        "command": "python -m xen_moe_jax.benchmark " + shlex.join(sys.argv[1:]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "notice": NOTICE,
        "versions": report.versions(),
        "sizes": sizes,
        "readme_v5p": README_V5P,
        "sources": {t.name: t.source for t in tpu_topologies.TOPOLOGIES.values()},
        "results": rows,
    }
    print(table(document))
    if options.json:
        report.write_json(options.json, document)
    if options.plot:
        tpu_budget.plot(options.plot, rows)
    return 0


# -- counting ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counts:
    """Rows of the busiest rank in one random routing.

    Attributes:
      off_rank: records that leave it or reach it, whichever are more; a token counts once per destination rank.
      off_rank_duplicated: the same, once per slot: what a plain all-to-all of rows moves.
      records: records that it receives, its own included. rows: rows that it places, once per slot.
    """

    off_rank: int
    off_rank_duplicated: int
    records: int
    rows: int


def count_rows(tokens: int, ranks: int, experts: int, top_k: int, seed: int) -> Counts:
    """Uniform routing, distinct experts of a token."""
    rng = np.random.default_rng(seed)
    idx = np.argpartition(rng.random((ranks, tokens, experts), np.float32), top_k, axis=2)[..., :top_k]
    owner = idx // -(-experts // ranks)
    duplicated = np.stack([(owner == r).sum((1, 2)) for r in range(ranks)], axis=1)
    reached = np.stack([(owner == r).any(2).sum(1) for r in range(ranks)], axis=1)

    def busiest(pairs: np.ndarray) -> int:
        off = pairs * ~np.eye(ranks, dtype=bool)
        return int(max(off.sum(0).max(), off.sum(1).max()))

    return Counts(busiest(reached), busiest(duplicated), int(reached.sum(0).max()), int(duplicated.sum(0).max()))


def gathered(case: Case, operation: str, ranks: int, top_k: int) -> bool:
    """Whether a dispatch sends its records to everybody, as `backends.pallas.dispatch.gathers` decides."""
    from xen_moe_jax.backends.pallas.dispatch import LOW_LATENCY_TOKENS

    return operation == "dispatch" and case.tokens <= LOW_LATENCY_TOKENS and ranks <= top_k


def traffic(case: Case, operation: str, counts: Counts, hidden: int, top_k: int = 8, ranks: int = 8) -> dict[str, int]:
    """Bytes and DMAs of our kernels on the busiest rank.

    HBM passes. Dispatch: tokens read once, records written by arriving DMAs, records read once per row, rows written
    once.
    Combine: rows of y read (a bfloat16 row arrives with the row that shares its words), records written, records
      read, out.
    Halves: the send buffer besides, written and read. A rank sends as many records as it receives, to within the
      routing's noise.
    """
    from xen_moe_jax._quantize import parse_wire
    from xen_moe_jax._spec import scale_blocks
    from xen_moe_jax.backends.pallas.dispatch import record_of
    from xen_moe_jax.pallas_kernels.record import Header

    operation, _, halves = operation.partition(" ")
    wire = case.dispatch_wire if operation == "dispatch" else case.combine_wire
    header = Header(top_k).words if operation == "dispatch" and not halves else 0
    record = record_of(hidden, "bfloat16", False, parse_wire(wire), header).bytes
    minimum = hidden + 4 * scale_blocks(hidden) if wire else 2 * hidden
    everybody = not halves and gathered(case, operation, ranks, top_k)
    if everybody:
        counts = dataclasses.replace(counts, off_rank=(ranks - 1) * case.tokens, records=ranks * case.tokens)
    tokens, rows = case.tokens * hidden * 2, counts.rows * hidden * 2
    if operation == "dispatch":
        hbm = tokens + counts.records * record + counts.rows * record + rows
        local = counts.rows
    else:
        hbm = 2 * rows + 2 * counts.records * record + tokens
        local = counts.rows + counts.records
    remote = 0 if everybody else counts.records
    if halves:  # the send buffer is written and read once, by local DMAs
        hbm, local, remote = hbm + 2 * counts.records * record, local + counts.records, 8
    return {
        "record_bytes": record,
        "ici_bytes": counts.off_rank * record,
        "ici_bytes_minimum": counts.off_rank * minimum,
        "hbm_bytes": hbm,
        "remote_dmas": remote,
        "local_dmas": local,
    }


# -- compiling --------------------------------------------------------------------------------------------------------


def capacity_for(tokens: int, top_k: int) -> int:
    """A quarter over the mean: what a job would allocate."""
    return tokens * top_k * 5 // 4


def compile_own(generation: str, case: Case, operation: str, sizes: dict[str, int], **mesh_options: Any) -> Any:
    """The operation through the public API, compiled for a topology."""
    import jax
    import jax.numpy as jnp

    import xen_moe_jax as xm
    from xen_moe_jax._spec import Spec, worst_case_capacity
    from xen_moe_jax.benchmark import tpu_topologies

    mesh = tpu_topologies.mesh(generation, **mesh_options)
    axes = mesh.axis_names
    ranks, tokens, hidden = mesh.size, case.tokens, sizes["hidden"]
    experts, top_k = sizes["experts"], sizes["top_k"]
    capacity = capacity_for(tokens, top_k) if case.layout == "grouped" else None
    name = axes if len(axes) > 1 else axes[0]

    def struct(shape, dtype):
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))
        return jax.ShapeDtypeStruct((shape[0] * ranks, *shape[1:]), dtype, sharding=sharding)

    def dispatch(x, idx, weights):
        options = {"num_experts": experts, "axis_name": name, "layout": case.layout, "capacity": capacity}
        options |= {"wire": case.dispatch_wire, "config": config}
        if halves:
            return xm.dispatch_done(xm.dispatch_start(x, idx, weights, **options))
        return xm.dispatch(x, idx, weights, **options)

    def both(x, idx, weights):
        routed = dispatch(x, idx, weights)
        return xm.combine(routed.x, routed.handle, wire=case.combine_wire, config=config)

    operation, _, halves = operation.partition(" ")
    config = xm.KernelConfig(backend="pallas")

    def combine(y, idx, positions, recv_counts, weights):
        rows = worst_case_capacity(
            layout=case.layout, num_ranks=ranks, num_tokens=tokens, top_k=top_k, num_experts=experts, alignment=1
        )
        spec = Spec(axes, tuple(mesh.shape.values()), experts, tokens, top_k, case.layout, capacity or rows)
        handle = xm.Handle(idx, positions, recv_counts, weights, spec)
        if halves:
            return xm.combine_done(xm.combine_start(y, handle, wire=case.combine_wire, config=config))
        return xm.combine(y, handle, wire=case.combine_wire, config=config)

    tables = [struct((tokens, top_k), jnp.int32)]
    body: Callable[..., Any]
    if operation == "combine":
        local = -(-experts // ranks)
        rows = (capacity,) if case.layout == "grouped" else (local, ranks * tokens)
        body = combine
        operands = [struct((*rows, hidden), jnp.bfloat16), *tables]
        operands += [
            struct((ranks, tokens, top_k), jnp.int32),
            struct((ranks, local), jnp.int32),
            struct(rows, jnp.float32),
        ]
    else:
        body = dispatch if operation == "dispatch" else both
        operands = [struct((tokens, hidden), jnp.bfloat16), *tables, struct((tokens, top_k), jnp.float32)]
    spec = jax.sharding.PartitionSpec(axes)

    def outputs(*args):
        out = body(*args)
        return (out.x, out.handle.positions) if operation == "dispatch" else out

    program = jax.jit(jax.shard_map(outputs, mesh=mesh, in_specs=spec, out_specs=spec))
    return program.trace(*operands).lower(lowering_platforms=("tpu",)).compile()


def compile_peer(generation: str, case: Case, sizes: dict[str, int]) -> Any:
    """`jax.lax.ragged_all_to_all` of rows sorted by expert, one way, bfloat16, nothing deduplicated."""
    import jax
    import jax.numpy as jnp

    from xen_moe_jax.benchmark import tpu_topologies

    mesh = tpu_topologies.mesh(generation)
    ranks, tokens, hidden, top_k = mesh.size, case.tokens, sizes["hidden"], sizes["top_k"]
    rows = capacity_for(tokens, top_k)
    spec = jax.sharding.PartitionSpec("ep")

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct((shape[0] * ranks, *shape[1:]), dtype, sharding=jax.NamedSharding(mesh, spec))

    def body(x, idx, *offsets):
        order = jnp.argsort(idx.reshape(-1), stable=True)
        return jax.lax.ragged_all_to_all(
            x[order // top_k], jnp.zeros((rows, hidden), x.dtype), *offsets, axis_name="ep"
        )

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    operands = [struct((tokens, hidden), jnp.bfloat16), struct((tokens, top_k), jnp.int32)]
    operands += [struct((ranks,), jnp.int32)] * 4
    return program.trace(*operands).lower(lowering_platforms=("tpu",)).compile()


def kernels(text: str) -> list[str]:
    """Our kernels in a compiled program, in the order of its text."""
    return list(dict.fromkeys(re.findall(r"%(xen_moe_\w+?)(?:\.\d+)*(?:\.\w+)* = [^\n]*tpu_custom_call", text)))


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of XLA's own collectives, by kind: metadata only, in our programs."""
    found: collections.Counter[str] = collections.Counter()
    channels = set()
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        shapes, kind = match.groups()
        channel = re.search(r"channel_id=(\d+)", line)
        if channel is not None:
            if channel[1] in channels:  # start, steps and end of one asynchronous collective
                continue
            channels.add(channel[1])
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            elements = int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
            found[kind] += elements * BITS.get(dtype, 32) // 8
    return dict(found)


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


def own_row(
    generation: str, case: Case, operation: str, sizes: dict[str, int], seed: int, folder: str
) -> dict[str, Any]:
    """One operation of ours: compiled for 8 devices, counted for them and for more. `folder` gets libtpu's dump."""
    from xen_moe_jax.benchmark import tpu_budget, tpu_bundles
    from xen_moe_jax.benchmark.tpu_topologies import TOPOLOGIES

    topology = TOPOLOGIES[generation]
    begin = time.monotonic()
    compile_one = functools.partial(compile_own, generation, case, operation, sizes)
    program = tpu_bundles.compile_counted(compile_one, folder)
    facts = compiled_facts(program.compiled, time.monotonic() - begin)
    counts = count_rows(case.tokens, 8, sizes["experts"], sizes["top_k"], seed)
    row: dict[str, Any] = {
        "generation": generation, "program": "xen_moe_jax", "case": case.name, "operation": operation
    }  # fmt: skip
    row |= dataclasses.asdict(case) | traffic(case, operation, counts, sizes["hidden"], sizes["top_k"]) | facts
    row["scalar_operations"] = tpu_bundles.scalar_operations(program.text)
    if "halves" not in operation:
        routing = tpu_bundles.random_routing(case.tokens, 8, sizes["experts"], sizes["top_k"], 16, seed)
        found = tpu_bundles.counts(program, routing, case.layout == "padded")
        row["bundles"] = {name: {"step": c.step, "turn": c.turn, "cores": c.cores} for name, c in found.items()}
        row["budget"] = tpu_budget.rows(topology, case, operation, program, sizes, seed)
    return row | lower_bounds(row, topology)


def peer_row(generation: str, case: Case, sizes: dict[str, int], seed: int) -> dict[str, Any]:
    from xen_moe_jax.benchmark.tpu_topologies import TOPOLOGIES

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
    return row | lower_bounds(row, TOPOLOGIES[generation])


def lower_bounds(row: dict[str, Any], topology: Any) -> dict[str, float]:
    return {
        "ici_us": row["ici_bytes"] / topology.ici_bytes_per_s * 1e6,
        "hbm_us": row["hbm_bytes"] / topology.hbm_bytes_per_s * 1e6,
    }


# -- showing ----------------------------------------------------------------------------------------------------------


def table(document: dict[str, Any]) -> str:
    from xen_moe_jax.benchmark.report import format_table

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
        us = document_bytes(document, operation) / rate / 1e3
        published.append(f"  throughput {operation}: {rate:.0f} GB/s, {us:.0f} us for the bytes above (throughput)")
    for operation, us in readme["low_latency_us"].items():
        published.append(f"  low latency {operation}: {us:.0f} us")
    return "\n".join([format_table(columns, lines), "", format_table(budget, terms), "", NOTICE, "", *published])


def document_bytes(document: dict[str, Any], operation: str) -> float:
    """ICI bytes of our throughput operation on v5p."""
    wanted = ("v5p", "xen_moe_jax", "throughput", operation)
    keys = ("generation", "program", "case", "operation")
    return next(r["ici_bytes"] for r in document["results"] if tuple(r[k] for k in keys) == wanted)
