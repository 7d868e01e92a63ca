"""The programs that are compiled for a TPU without one: their sizes, their traffic, and the counts read from their
texts."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
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
    Case("low-latency-bf16", 128, "padded", None, None),
)

SENDING = ("push", "reduce_slots", "exchange", "forward", "done")
"""Kernels that end when rows have travelled to other ranks. The kernel of a start half is not among them: its done half
waits."""

# -- counting ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counts:
    """Rows of the busiest rank in one random routing.

    Attributes:
      off_rank: the larger number of records that leave the rank and of records that reach it; a token counts once per
        destination rank.
      off_rank_duplicated: this number counted once per slot, as a plain all-to-all of rows moves them.
      records: records that it receives, its own included. rows: rows that it places, once per slot.
    """

    off_rank: int
    off_rank_duplicated: int
    records: int
    rows: int


def count_rows(tokens: int, ranks: int, experts: int, top_k: int, seed: int) -> Counts:
    """Counts the rows of a uniform routing with distinct experts of a token."""
    rng = np.random.default_rng(seed)
    idx = np.argpartition(rng.random((ranks, tokens, experts), np.float32), top_k, axis=2)[..., :top_k]
    owner = idx // -(-experts // ranks)
    duplicated = np.stack([(owner == r).sum((1, 2)) for r in range(ranks)], axis=1)
    reached = np.stack([(owner == r).any(2).sum(1) for r in range(ranks)], axis=1)

    def busiest(pairs: np.ndarray) -> int:
        off = pairs * ~np.eye(ranks, dtype=bool)
        return int(max(off.sum(0).max(), off.sum(1).max()))

    return Counts(busiest(reached), busiest(duplicated), int(reached.sum(0).max()), int(duplicated.sum(0).max()))


def dispatch_record(case: Case, hidden: int, top_k: int) -> Any:
    """The record of a token in a dispatch of bfloat16."""
    from xen_moe_jax._quantize import parse_wire
    from xen_moe_jax.backends.pallas.records import record_of
    from xen_moe_jax.pallas_kernels.record import Header

    return record_of(hidden, "bfloat16", False, parse_wire(case.dispatch_wire), Header(top_k).words)


def gathered(case: Case, operation: str, ranks: int, top_k: int, hidden: int) -> bool:
    """Returns True if a dispatch gathers its records on all ranks (`backends.pallas.all_gather_dispatch`)."""
    from xen_moe_jax.backends.pallas.all_gather_dispatch import few_records
    from xen_moe_jax.backends.pallas.hardware import LOW_LATENCY_TOKENS

    if operation != "dispatch" or case.tokens > LOW_LATENCY_TOKENS:
        return False
    return few_records(ranks, case.tokens, top_k, dispatch_record(case, hidden, top_k))


def traffic(case: Case, operation: str, counts: Counts, hidden: int, top_k: int = 8, ranks: int = 8) -> dict[str, int]:
    """Bytes and DMAs of the library's kernels on the busiest rank.

    HBM passes. Dispatch and redispatch: tokens read once, records written by arriving DMAs, records read once per row,
    rows written once.
    Combine: rows of y read (a bfloat16 row arrives with the row that shares its words), records written, records
      read, out.
    Start and done: the send buffer besides, written and read. A rank sends as many records as it receives, to within
      the routing's noise.
    Exchange (`ragged_all_to_all`): a row for every slot, read once and written once.
    """
    from xen_moe_jax._quantize import parse_wire
    from xen_moe_jax._spec import scale_blocks
    from xen_moe_jax.backends.pallas.records import record_of
    from xen_moe_jax.pallas_kernels.record import Header

    operation, _, halves = operation.partition(" ")
    if operation == "exchange":
        row = 2 * hidden
        return {
            "record_bytes": row,
            "ici_bytes": counts.off_rank_duplicated * row,
            "ici_bytes_minimum": counts.off_rank_duplicated * row,
            "hbm_bytes": 2 * counts.rows * row,
            "remote_dmas": ranks,
            "local_dmas": 0,
        }
    wire = {"dispatch": case.dispatch_wire, "combine": case.combine_wire}.get(operation)
    header = Header(top_k).words if operation == "dispatch" else 0
    record = record_of(hidden, "bfloat16", False, parse_wire(wire), header).bytes
    minimum = hidden + 4 * scale_blocks(hidden) if wire else 2 * hidden
    gathers = not halves and gathered(case, operation, ranks, top_k, hidden)
    if gathers:
        counts = dataclasses.replace(counts, off_rank=(ranks - 1) * case.tokens, records=ranks * case.tokens)
    tokens, rows = case.tokens * hidden * 2, counts.rows * hidden * 2
    if operation != "combine":
        hbm = tokens + counts.records * record + counts.rows * record + rows
        local = counts.rows
    else:
        hbm = 2 * rows + 2 * counts.records * record + tokens
        local = counts.rows + counts.records
    remote = 0 if gathers else counts.records
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


def bytes_us(
    chip: Any, case: Case, operation: str, counts: Counts, hidden: int, top_k: int = 8, ranks: int = 8
) -> dict[str, float]:
    """Microseconds that HBM and the wire need for the bytes of each kernel that moves rows, the longer of both. A
    kernel of a dispatch, a combine, their halves or an exchange takes at least this long, however few its bundles.

    Args:
      chip: a `topologies.Topology`. operation: one of `static.OPERATIONS`.
    """
    moved = traffic(case, operation, counts, hidden, top_k, ranks)
    record, row = moved["record_bytes"], 2 * hidden
    tokens, records, rows = case.tokens * row, counts.records * record, counts.rows * row
    if operation == "exchange":
        of_kernel = {"exchange": 2 * rows}
    elif operation.startswith("combine"):
        of_kernel = {"reduce_slots": 2 * rows + records, "reduce_ranks": records + tokens}
        of_kernel |= {"reduce_slots_local": of_kernel["reduce_slots"]}
    else:
        of_kernel = {"push": tokens + records, "pack": tokens + records, "forward": 2 * records}
        of_kernel |= {"place": counts.rows * record + rows}
    wire = chip.all_to_all_us(moved["ici_bytes"], ranks)
    found = {name: size / chip.hbm_bytes_per_s * 1e6 for name, size in of_kernel.items()}
    for name in SENDING:
        if name in found or name == "done":
            found[name] = max(found.get(name, 0.0), wire)
    return {f"xen_moe_{name}": round(us, 3) for name, us in found.items()}


# -- compiling --------------------------------------------------------------------------------------------------------


def capacity_for(tokens: int, top_k: int) -> int:
    """Capacity of a quarter over the mean, as a job would allocate."""
    return tokens * top_k * 5 // 4


def compile_own(generation: str, case: Case, operation: str, sizes: dict[str, int], **mesh_options: Any) -> Any:
    """The operation through the public API, compiled for a topology."""
    import jax
    import jax.numpy as jnp

    import xen_moe_jax as xm
    from benchmarks.tpu import topologies as tpu_topologies
    from xen_moe_jax._spec import Spec, worst_case_capacity

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
        if halves:
            return xm.combine_done(xm.combine_start(routed.x, routed.handle, wire=case.combine_wire, config=config))
        return xm.combine(routed.x, routed.handle, wire=case.combine_wire, config=config)

    operation, _, halves = operation.partition(" ")
    config = xm.KernelConfig(backend="pallas")

    def handle_of(idx, positions, recv_counts, weights):
        rows = worst_case_capacity(
            layout=case.layout, num_ranks=ranks, num_tokens=tokens, top_k=top_k, num_experts=experts, alignment=1
        )
        spec = Spec(axes, tuple(mesh.shape.values()), experts, tokens, top_k, case.layout, capacity or rows)
        return xm.Handle(idx, positions, recv_counts, weights, spec)

    def combine(y, *handle):
        if halves:
            return xm.combine_done(xm.combine_start(y, handle_of(*handle), wire=case.combine_wire, config=config))
        return xm.combine(y, handle_of(*handle), wire=case.combine_wire, config=config)

    def redispatch(x, *handle):
        return xm.redispatch(x, handle_of(*handle), config=config)

    def exchange(x, output, *segments):
        return xm.ragged_all_to_all(x, output, *segments, axis_name=name, config=config)

    tables = [struct((tokens, top_k), jnp.int32)]
    body: Callable[..., Any]
    if operation == "exchange":
        body = exchange
        operands = [struct((tokens * top_k, hidden), jnp.bfloat16), struct((capacity or tokens, hidden), jnp.bfloat16)]
        operands += [struct((ranks,), jnp.int32)] * 4
    elif operation in ("combine", "redispatch"):
        local = -(-experts // ranks)
        rows = (capacity,) if case.layout == "grouped" else (local, ranks * tokens)
        body = combine if operation == "combine" else redispatch
        payload = rows if operation == "combine" else (tokens,)
        operands = [struct((*payload, hidden), jnp.bfloat16), *tables]
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

    from benchmarks.tpu import topologies as tpu_topologies

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
    """The library's kernels in a compiled program, in the order of its text."""
    return list(dict.fromkeys(re.findall(r"%(xen_moe_\w+?)(?:\.\d+)*(?:\.\w+)* = [^\n]*tpu_custom_call", text)))


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of XLA's own collectives, by kind: metadata only, in our programs.

    Start, steps and end of one asynchronous collective are in computations of their own: a collective with the same
    channel and result in several computations is counted in one of them. Different collectives may share a channel.
    """
    seen: dict[tuple[str, ...], collections.Counter[str]] = {}
    computation = ""
    for number, line in enumerate(text.splitlines()):
        if begins := COMPUTATION.match(line):
            computation = begins[1]
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        channel = re.search(r"channel_id=(\d+)", line)
        # exchanges of all to all are in one computation each, and may be repeated by others
        own = match[2] in ("all-to-all", "ragged-all-to-all") or channel is None
        key = (match[1], match[2], match[3] or "", str(number) if own or channel is None else channel[1])
        seen.setdefault(key, collections.Counter())[computation] += 1
    found: collections.Counter[str] = collections.Counter()
    for (shapes, kind, started, _), computations in seen.items():
        sizes = []
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            elements = int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
            sizes.append(elements * BITS.get(dtype, 32) // 8)
        # a tuple: several collectives in one; or, of some that only start, the operand beside the result
        beside = started and kind in ("all-gather", "collective-permute")
        found[kind] += max(computations.values()) * (max(sizes) if beside else sum(sizes))
    return dict(found)
