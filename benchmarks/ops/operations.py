"""Measurements of each mode."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import xen_moe_jax as xm
from benchmarks.lib import accounting, report, turns, verify
from benchmarks.lib import options as command_options
from benchmarks.lib import programs as loops
from benchmarks.ops import overlap
from benchmarks.peers import registry as peers
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.problem import Problem, make_problem
from xen_moe_jax.tuning.workload import Workload


def measure_programs(
    problem: Problem,
    chosen: list[programs.Program],
    options: argparse.Namespace,
    check: Callable[[], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Compiles `chosen`, and in a turn of its own runs `check` and times the programs; one result row each."""
    work = problem.work
    inner = command_options.inner_calls(options, problem.platform, work.tokens)
    timed, errors = [], []
    report.progress(f"compiling {len(chosen)} programs")
    starts = timing.compile_all(chosen, problem, inner, options.unroll, with_memory=True)
    with turns.alone(options.lock):
        checks = check()
        for program, start in zip(chosen, starts, strict=True):
            report.progress(f"preparing {program.name}: {program.operation}")
            error = {}
            if program.round_trip is not None:
                error = {"max error": verify.check_round_trip(program, problem)}
            elif program.name.startswith("xen_moe_jax"):
                error = checks
            errors.append(error)
            timed.append(start())
        report.progress(f"timing {len(timed)} programs, {options.repeats} repeats")
        timing.measure(timed, options.repeats, progress=report.progress)
        for entry in timed:
            verify.check_timed_result(entry, problem)
    rows = accounting.off_rank_rows(work, problem.topk_idx)
    results = []
    for entry, error in zip(timed, errors, strict=True):
        row = report.result_row(entry, work, rows, error)
        wire = work.return_wire if entry.program.operation == "combine" else work.dispatch_wire
        results.append(row | {"tokens": work.tokens, "wire_row_bytes": accounting.wire_row_bytes(work.hidden, wire)})
    return results


def own_checks(problem: Problem, config: xm.KernelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Drops (none allowed without a capacity factor) and, for a kernel backend, the bitwise comparison."""
    work = problem.work
    dropped = verify.num_dropped(problem, config)
    if dropped and work.capacity_factor is None:
        raise verify.WrongResultError(f"{dropped} rows were dropped at a capacity that holds every row")
    checks: dict[str, Any] = {"dropped": dropped}
    is_reference = config.backend == "reference" or (config.backend is None and problem.platform == "cpu")
    if not is_reference and not options.no_compare:
        counts = verify.differing_bits(problem, config)
        checks["bits differing"] = sum(counts.values())
    return checks


def run(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Measures the operations of `options`; returns the JSON document."""
    ceiling = command_options.link_ceiling(options)
    work = command_options.workload(options, jax.device_count())
    problem = make_problem(work)
    config = command_options.kernel_config(options)
    head = report.header(arguments, work) | {
        "mode": options.mode,
        "capacities": dataclasses.asdict(problem.caps),
        "symmetric_bytes_per_rank": symmetric_bytes(work, config),
    }
    check = functools.partial(own_checks, problem, config, options)
    if options.mode == "overlap":
        with turns.alone(options.lock):
            check()
            return head | {"overlap": overlap.run(problem, config, options), "results": []}
    operations = command_options.operations(options)
    if options.mode == "sweep-sms":
        results = sweep(problem, config, operations, options, check)
    else:
        chosen = programs.own_programs(work, problem.caps, config, operations)
        names = command_options.peer_names(options)
        theirs = command_options.operations(options, "peer_operations")
        chosen += peers.peer_programs(work, problem.caps, problem.platform, names, theirs)
        if options.mode == "low-latency":
            by_barriers = options.unroll > 1 and problem.platform == "gpu"
            chosen.append(loops.empty_chain() if by_barriers else loops.empty_loop())
        results = measure_programs(problem, chosen, options, check)
        if options.mode == "low-latency":
            report.subtract_loop(results)
        report.add_ratios(results)
    report.add_link_ceiling(results, ceiling)
    return head | {
        "off_rank_rows": dataclasses.asdict(accounting.off_rank_rows(work, problem.topk_idx)),
        "results": results,
    }


def symmetric_bytes(work: Workload, config: xm.KernelConfig) -> dict[str, int]:
    """Bytes that the library's operations of this workload need per rank, and the bound that the library promises."""
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
    check: Callable[[], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Every operation at every number of thread blocks, repeats interleaved over all of them."""
    chosen, sms = [], []
    for count in options.num_sms or command_options.DEFAULT_SMS:
        configured = dataclasses.replace(config, num_sms=count)
        for program in programs.own_programs(problem.work, problem.caps, configured, operations):
            chosen.append(program)
            sms.append(count)
    results = measure_programs(problem, chosen, options, check)
    for row, count in zip(results, sms, strict=True):
        row["num_sms"] = count
        row["name"] += f" num_sms={count}"
    return results


def describe_results(document: dict[str, Any]) -> str:
    parts = [report.describe(document), ""]
    if "overlap" in document:
        return "\n".join([*parts, overlap.table(document["overlap"]), ""])
    parts += [report.results_table(document["results"]), "", report.FOOTNOTE]
    return "\n".join(parts)
