"""`python -m benchmarks layer` and `model`: whole MoE layers of the library beside JAX's own ways, with the same
experts."""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.layers import layer_programs
from benchmarks.layers.layer_programs import MATMULS, MODEL_LAYERS, OPERATIONS, PLAIN, LayerProblem, Operands
from benchmarks.lib import options as command_options
from benchmarks.lib import report, turns
from benchmarks.lib.verify import WrongResultError
from xen_moe_jax.tuning import timing
from xen_moe_jax.tuning.problem import make_problem

TOLERANCE = {"bfloat16": 0.03, "float16": 0.01, "float32": 1e-4}
"""Largest difference from the library's plain layer, relative to the largest element."""
COMPILING = 8
"""Programs that are compiled at a time."""
FP8_TOLERANCE = 0.3
"""Allowed difference with an fp8 wire, which rounds to three bits of mantissa twice."""


def run(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Checks and measures every way; returns the JSON document."""
    work = command_options.workload(options, jax.device_count())
    if work.block_scaled:
        raise ValueError(f"--dtype {work.dtype}: the mode {options.mode} needs a floating-point dtype of matmuls")
    kernel = command_options.kernel_config(options)
    width = options.width or work.hidden * 3 // 8
    config = layer_programs.layer_config(work, width, options.grouped_matmul, kernel)
    given = LayerProblem(make_problem(work), config, MODEL_LAYERS if options.mode == "model" else 1)
    operands = layer_programs.draw_operands(given)
    head = report.header(arguments, work) | {
        "mode": options.mode,
        "width": width,
        "layers": given.layers,
        "grouped_matmul": layer_programs.name_of_matmul(options.grouped_matmul),
    }
    chosen = layer_programs.layers_of(given, options.ways)
    results = measure(given, operands, chosen, options)
    add_shares(results)
    return head | {"results": results}


def measure(
    given: LayerProblem, operands: Operands, chosen: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each way and operation; a way that does not compile or fit says so in its row.

    Raises:
      WrongResultError: a way's results are not those of the library's plain layer.
    """
    calls = options.inner or (2 if given.problem.platform == "cpu" else 20)
    pairs = [(operation, name) for operation in OPERATIONS for name in chosen]
    report.progress(f"compiling {len(pairs)} programs")
    with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
        compiling = {
            pool.submit(
                compiled, given, operation, chosen[name], layer_programs.operands_for(name, given, operands)
            ): f"{name}: {operation}"
            for operation, name in pairs
        }
        for done, future in enumerate(concurrent.futures.as_completed(compiling), 1):
            report.progress(f"  compiled {done} of {len(pairs)}: {compiling[future]}")
        programs = [future.result() for future in compiling]
    with turns.alone(options.lock):
        return list(measured(given, operands, pairs, programs, calls, options.repeats))


def measured(
    given: LayerProblem, operands: Operands, pairs: list[Any], programs: list[Any], calls: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields a row of the table for each way and operation.

    Ways with capacities of their own drop different rows, so results are compared only where neither way drops any.
    """
    expected: dict[str, Any] = {}
    for (operation, name), program in zip(pairs, programs, strict=True):
        row: dict[str, Any] = {"name": name, "operation": operation}
        report.progress(f"{name}: {operation}")
        if isinstance(program, str):
            yield row | {"error": program}
            continue
        row["memory_bytes"] = timing.memory_bytes(program)
        own = layer_programs.operands_for(name, given, operands)
        try:
            result = jax.block_until_ready(program(*own))
            if name == PLAIN:
                expected[operation] = result
            elif name != MATMULS and operation not in expected:
                yield row | {"error": f"not timed: {PLAIN}, which its results are compared with, did not run"}
                continue
            if dropped := layer_programs.dropped_rows(given, name):
                row["dropped_rows"] = dropped
            elif name not in (PLAIN, MATMULS) and not layer_programs.dropped_rows(given, PLAIN):
                row["max difference"] = compare(given, name, result, expected[operation])
            del result
            row |= times(program, own, calls, repeats, given)
        except jax.errors.JaxRuntimeError as error:  # out of memory
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def compare(given: LayerProblem, name: str, result: Any, expected: Any) -> float:
    """Returns the largest difference from the library's plain layer.

    Raises:
      WrongResultError: it is more than rounding explains.
    """
    difference = layer_programs.largest_difference(result, expected)
    tolerance = FP8_TOLERANCE if "fp8" in name else TOLERANCE[given.work.compute_dtype.name]
    if not difference <= tolerance:
        raise WrongResultError(f"{name}: differs by {difference:.2g} of the largest element; {tolerance} is allowed")
    return difference


def compiled(given: LayerProblem, operation: str, layer: Any, operands: Operands) -> Any:
    """Returns the executable of an operation on the mesh, or its error."""
    program = OPERATIONS[operation](layer_programs.stacked(layer, given.layers))
    mapped = jax.shard_map(
        program,
        mesh=given.problem.mesh,
        in_specs=layer_programs.operand_specs(given),
        out_specs=layer_programs.result_specs(given, operation),
        check_vma=False,
    )
    try:
        return jax.jit(mapped).lower(*operands).compile()
    except Exception as error:  # a refusal of XLA or of a kernel is a result
        return f"{type(error).__name__}: {error}"[:300]


def times(program: Any, operands: Operands, calls: int, repeats: int, given: LayerProblem) -> dict[str, Any]:
    """Returns the microseconds of a call, measured over `calls` calls that are queued at once."""
    taken = [timing.slowest_process(us) for us in turns.queued(program, operands, calls, repeats)]
    median = statistics.median(taken)
    return {
        "us_median": median,
        "us_min": min(taken),
        "us_max": max(taken),
        "us_repeats": taken,
        "calls_per_repeat": calls,
        "tokens_per_second_per_rank": given.work.tokens / median * 1e6,
    }


def add_shares(results: list[dict[str, Any]]) -> None:
    """Adds two ratios to each row.

    `matmul_share` is the time of the experts alone over its time, `times_own` its time over the plain layer's.
    """
    for row in results:
        same = {r["name"]: r["us_median"] for r in results if r["operation"] == row["operation"] and "us_median" in r}
        if "us_median" not in row:
            continue
        if MATMULS in same:
            row["matmul_share"] = same[MATMULS] / row["us_median"]
        if PLAIN in same:
            row["times_own"] = row["us_median"] / same[PLAIN]


def results_table(results: list[dict[str, Any]]) -> str:
    """Formats a line for each way and operation."""
    columns = ["way", "operation", "us", "min..max", "tokens/s/rank", "matmuls", "vs ours", "temp MiB", "difference"]
    columns.append("dropped")
    lines = []
    for row in results:
        if "error" in row:
            lines.append([row["name"], row["operation"], row["error"].splitlines()[0][:60], *["-"] * 7])
            continue
        lines.append(
            [
                row["name"],
                row["operation"],
                f"{row['us_median']:.0f}",
                f"{row['us_min']:.0f}..{row['us_max']:.0f}",
                f"{row['tokens_per_second_per_rank']:.0f}",
                f"{row['matmul_share']:.0%}" if "matmul_share" in row else "-",
                f"{row['times_own']:.2f}x" if "times_own" in row else "-",
                f"{row['memory_bytes']['temp'] / 2**20:.0f}" if row["memory_bytes"] else "-",
                f"{row['max difference']:.1e}" if "max difference" in row else "-",
                str(row.get("dropped_rows", 0)),
            ]
        )
    return report.format_table(columns, lines)


def describe_results(document: dict[str, Any]) -> str:
    """Machine, sizes, and the table."""
    shape = f"width={document['width']}  layers={document['layers']}  grouped_matmul={document['grouped_matmul']}"
    return "\n".join([report.describe(document), shape, "", results_table(document["results"]), "", FOOTNOTE])


FOOTNOTE = (
    "us: median per call, of calls queued at once. matmuls: the time of the experts alone, on as many\n"
    "rows in equal groups, over the layer's. temp MiB: the compiler's temporaries of a call, per device. difference:\n"
    "from the library's plain layer, of the largest element, where neither drops a row. dropped: rows of all ranks\n"
    "for which a way has no room."
)


def write_plot(path: str, document: dict[str, Any]) -> None:
    """Bars of milliseconds by way, one panel an operation, with the experts' own time as a line. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(OPERATIONS), figsize=(13, 5), sharey=True)
    for axes, operation in zip(panels, OPERATIONS, strict=True):
        rows = [r for r in document["results"] if r["operation"] == operation and "us_median" in r]
        ways = [r for r in rows if r["name"] != MATMULS]
        axes.barh([r["name"] for r in ways], [r["us_median"] / 1e3 for r in ways], color=report.colours(ways))
        axes.axvline(
            next((r["us_median"] for r in rows if r["name"] == MATMULS), 0.0) / 1e3, color="black", linestyle="--"
        )
        axes.set(xlabel=f"{operation}: ms a call (dashed: the experts alone)", xlim=(0, None))
    panels[0].invert_yaxis()
    figure.suptitle(f"{report.plot_title(document)}, width {document['width']}, {document['layers']} layer(s)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
