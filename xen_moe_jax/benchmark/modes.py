"""What each mode measures."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import xen_moe_jax as xm
from xen_moe_jax.benchmark import accounting, command, peers, programs, report, timing, verify
from xen_moe_jax.benchmark.workload import Capacities, Workload, capacities, draw_topk_idx, draw_topk_weights

OPERATIONS = ("dispatch", "combine", "round trip")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A workload placed on a mesh."""

    work: Workload
    mesh: Mesh
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    caps: Capacities
    inputs: timing.Inputs

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform


def make_mesh(ranks: int) -> Mesh:
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if len(devices) < ranks:
        raise ValueError(
            f"ranks={ranks}: JAX sees {len(devices)} {devices[0].platform} device(s); "
            "use --ranks with at most that many, or --platform cpu for virtual devices"
        )
    return Mesh(np.array(devices[:ranks]), (programs.AXIS,))


def make_problem(work: Workload, mesh: Mesh | None = None) -> Problem:
    """Draws the workload and places it; `mesh` is one axis of `work.ranks` devices, None takes the first ones."""
    mesh = make_mesh(work.ranks) if mesh is None else mesh
    if mesh.axis_names != (programs.AXIS,) or mesh.size != work.ranks:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: must have the one axis {programs.AXIS!r} of ranks={work.ranks} devices"
        )
    topk_idx, topk_weights = draw_topk_idx(work), draw_topk_weights(work)
    inputs = timing.place_inputs(work, mesh, topk_idx, topk_weights)
    return Problem(work, mesh, topk_idx, topk_weights, capacities(work, topk_idx), inputs)


def base_config(options: argparse.Namespace) -> xm.KernelConfig:
    mode = {"normal": "throughput", "low-latency": "low_latency"}.get(options.mode, "auto")
    num_sms = options.num_sms[0] if options.num_sms and options.mode != "sweep-sms" else None
    return xm.KernelConfig(backend=options.backend, mode=mode, num_sms=num_sms, chunk_tokens=options.chunk_tokens)


def chosen_operations(options: argparse.Namespace) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in options.operations.split(","))
    if not set(chosen) <= set(OPERATIONS):
        raise ValueError(f"--operations {options.operations!r}: must be among {OPERATIONS}")
    return chosen


def chosen_peers(options: argparse.Namespace, problem: Problem) -> list[programs.Program]:
    if options.peers == "none" or options.mode == "sweep-sms":
        return []
    names = None if options.peers == "all" else tuple(name.strip() for name in options.peers.split(","))
    return peers.peer_programs(problem.work, problem.caps, problem.platform, names)


def measure_programs(
    problem: Problem, chosen: list[programs.Program], options: argparse.Namespace, checks: dict[str, Any]
) -> list[dict[str, Any]]:
    """Checks, compiles and times `chosen`; one result row each."""
    work, mesh, inputs = problem.work, problem.mesh, problem.inputs
    inner = options.inner or command.default_inner(problem.platform, work.tokens)
    timed, errors = [], []
    for program in chosen:
        report.progress(f"compiling {program.name}: {program.operation}")
        error = {}
        if program.round_trip is not None:
            error = {
                "max error": verify.check_round_trip(
                    program, work, mesh, inputs, problem.topk_idx, problem.topk_weights
                )
            }
        elif program.name.startswith("xen_moe_jax"):
            error = checks
        errors.append(error)
        timed.append(timing.compile_program(program, mesh, inputs, inner, options.unroll))
    report.progress(f"timing {len(timed)} programs, {options.repeats} repeats")
    timing.measure(timed, options.repeats)
    rows = accounting.off_rank_rows(work, problem.topk_idx)
    results = []
    for entry, error in zip(timed, errors, strict=True):
        verify.check_timed_result(entry, work, inputs)
        row = report.result_row(entry, work, rows, error)
        wire = work.return_wire if entry.program.operation == "combine" else work.dispatch_wire
        results.append(row | {"tokens": work.tokens, "wire_row_bytes": accounting.wire_row_bytes(work.hidden, wire)})
    return results


def own_checks(problem: Problem, config: xm.KernelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Drops (none allowed without a capacity factor) and, for a kernel backend, the bitwise comparison."""
    work = problem.work
    dropped = verify.num_dropped(work, problem.caps, config, problem.mesh, problem.inputs)
    if dropped and work.capacity_factor is None:
        raise verify.WrongResultError(f"{dropped} rows were dropped at a capacity that holds every row")
    checks: dict[str, Any] = {"dropped": dropped}
    is_reference = config.backend == "reference" or (config.backend is None and problem.platform == "cpu")
    if not is_reference and not options.no_compare:
        counts = verify.differing_bits(work, problem.caps, config, problem.mesh, problem.inputs)
        checks["bits differing"] = sum(counts.values())
    return checks


def run(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Measures what `options` ask for; returns the JSON document."""
    work = command.make_workload(options, jax.device_count())
    problem = make_problem(work)
    config = base_config(options)
    head = report.header(arguments, work) | {
        "mode": options.mode,
        "capacities": dataclasses.asdict(problem.caps),
        "symmetric_bytes_per_rank": symmetric_bytes(work, config),
    }
    if options.tune:
        return head | tune(problem, config, options)
    checks = own_checks(problem, config, options)
    operations = chosen_operations(options)
    if options.mode == "sweep-sms":
        results = sweep(problem, config, operations, options, checks)
    else:
        chosen = programs.own_programs(work, problem.caps, config, operations) + chosen_peers(options, problem)
        if options.mode == "low-latency":
            chosen.append(programs.empty_loop())
        results = measure_programs(problem, chosen, options, checks)
        report.add_ratios(results)
    report.add_link_ceiling(results, command.read_link_ceiling(options))
    return head | {
        "off_rank_rows": dataclasses.asdict(accounting.off_rank_rows(work, problem.topk_idx)),
        "results": results,
    }


def symmetric_bytes(work: Workload, config: xm.KernelConfig) -> dict[str, int]:
    """What the library's operations of this workload need per rank, and the bound that it promises to stay under."""
    row = max(accounting.wire_row_bytes(work.hidden, wire) for wire in (work.dispatch_wire, work.return_wire))
    need = [
        xm.buffer_size_hint(
            num_tokens=work.tokens,
            hidden=work.hidden,
            num_ranks=work.ranks,
            top_k=work.top_k,
            num_experts=work.experts,
            dtype=dtype,
            wire=wire,
            backend=config.backend,
        )
        for dtype, wire in ((work.dtype, work.wire), (work.compute_dtype, work.combine_wire))
    ]
    return {"hint": max(need), "bound": 2 * work.ranks * work.tokens * row + (64 << 20)}


def sweep(
    problem: Problem,
    config: xm.KernelConfig,
    operations: tuple[str, ...],
    options: argparse.Namespace,
    checks: dict[str, Any],
) -> list[dict[str, Any]]:
    """Every operation at every number of thread blocks, repeats interleaved over all of them."""
    chosen, sms = [], []
    for count in options.num_sms or command.DEFAULT_SMS:
        configured = dataclasses.replace(config, num_sms=count)
        for program in programs.own_programs(problem.work, problem.caps, configured, operations):
            chosen.append(program)
            sms.append(count)
    results = measure_programs(problem, chosen, options, checks)
    for row, count in zip(results, sms, strict=True):
        row["num_sms"] = count
        row["name"] += f" num_sms={count}"
    return results


def tune(problem: Problem, config: xm.KernelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Measures candidate configs; the best of each operation first. `--tuned FILE` keeps them."""
    from xen_moe_jax import autotune

    inner = options.inner or command.default_inner(problem.platform, problem.work.tokens)
    operations = tuple(name for name in chosen_operations(options) if name in autotune.OPERATIONS)
    tuned = autotune.autotune(
        problem.work, mesh=problem.mesh, base=config, operations=operations, inner=inner, repeats=options.repeats
    )
    if options.tuned:
        autotune.save(options.tuned, problem.work, tuned)

    def row(m: autotune.Measured) -> dict[str, Any]:
        fields = {name: getattr(m.config, name) for name in autotune.TUNED_FIELDS}
        return {"config": fields, "us_median": m.us_median, "us_min": m.us_min, "us_max": m.us_max}

    return {"tuned": {name: [row(m) for m in entry.measured] for name, entry in tuned.items()}, "results": []}


def describe_results(document: dict[str, Any]) -> str:
    parts = [report.describe(document), ""]
    if "tuned" in document:
        for operation, rows in document["tuned"].items():
            lines = [
                [
                    ", ".join(f"{name}={value}" for name, value in row["config"].items()),
                    f"{row['us_median']:.1f}",
                    f"{row['us_min']:.1f}..{row['us_max']:.1f}",
                ]
                for row in rows
            ]
            parts += [report.format_table([f"{operation}: best first", "us", "min..max"], lines), ""]
        return "\n".join(parts)
    parts += [report.results_table(document["results"]), "", report.FOOTNOTE]
    return "\n".join(parts)
