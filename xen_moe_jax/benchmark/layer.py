"""`benchmark --mode layer` and `--mode model`: whole MoE layers, ours beside JAX's ways, with the same experts."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax

from xen_moe_jax.benchmark import layer_programs, report, timing
from xen_moe_jax.benchmark import options as command_options
from xen_moe_jax.benchmark.layer_programs import MATMULS, MODEL_LAYERS, OPERATIONS, LayerProblem, Operands
from xen_moe_jax.benchmark.problem import RANK_SPEC, make_problem
from xen_moe_jax.benchmark.verify import WrongResultError
from xen_moe_jax.flax import grouped_matmul

TOLERANCE = {"bfloat16": 0.03, "float16": 0.01, "float32": 1e-4}
"""Largest difference from the library's plain layer, relative to the largest element."""
FP8_TOLERANCE = 0.3
"""With an fp8 wire: three bits of mantissa, there and back."""


def run(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Checks and measures every way; returns the JSON document."""
    work = command_options.workload(options, jax.device_count())
    if work.block_scaled:
        raise ValueError(f"--dtype {work.dtype}: --mode {options.mode} needs a floating-point dtype of matmuls")
    kernel = command_options.kernel_config(options)
    width = options.width or work.hidden * 3 // 8
    config = layer_programs.layer_config(work, width, options.grouped_matmul, kernel)
    given = LayerProblem(make_problem(work), config, MODEL_LAYERS if options.mode == "model" else 1)
    operands = layer_programs.draw_operands(given)
    head = report.header(arguments, work) | {
        "mode": options.mode,
        "width": width,
        "layers": given.layers,
        "grouped_matmul": grouped_matmul.describe(given.problem.platform)["choice"]
        if options.grouped_matmul == "auto"
        else options.grouped_matmul,
    }
    chosen = layer_programs.layers_of(given, command_options.peer_names(options))
    results = measure(given, operands, chosen, options)
    add_shares(results)
    return head | {"results": results}


def measure(
    given: LayerProblem, operands: Operands, chosen: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each way and operation; a way that fails to compile, or gives other results, says so in its row."""
    inner = options.inner or (2 if given.problem.platform == "cpu" else 10)
    began = time.monotonic()
    results = []
    for operation, make in OPERATIONS.items():
        expected = None
        for name in ("xen_moe_jax", *(other for other in chosen if other != "xen_moe_jax")):
            row: dict[str, Any] = {"name": name, "operation": operation}
            results.append(row)
            if time.monotonic() - began > options.seconds:
                row["error"] = "no time was left"
                continue
            report.progress(f"{name}: {operation}")
            program = make(layer_programs.stacked(chosen[name], given.layers))
            try:
                single, loop = compiled(given, operation, program, operands, inner)
            except Exception as error:  # a way that XLA cannot compile or fit here is a result
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                continue
            row["memory_bytes"] = timing.memory_bytes(single)
            try:
                result = jax.block_until_ready(single(*operands))
                if name == "xen_moe_jax":
                    expected = result
                elif name != MATMULS:
                    row["max difference"] = compare(given, name, result, expected)
                del result
                row |= times(loop, operands, inner, options.repeats, given)
            except jax.errors.JaxRuntimeError as error:  # out of memory
                row["error"] = f"{type(error).__name__}: {error}"[:300]
    return results


def compare(given: LayerProblem, name: str, result: Any, expected: Any) -> float:
    """The largest difference from the library's plain layer.

    Raises:
      WrongResultError: it is more than rounding explains.
    """
    difference = layer_programs.largest_difference(result, expected)
    tolerance = FP8_TOLERANCE if "fp8" in name else TOLERANCE[given.work.compute_dtype.name]
    if not difference <= tolerance:
        raise WrongResultError(f"{name}: differs by {difference:.2g} of the largest element; {tolerance} is allowed")
    return difference


def compiled(given: LayerProblem, operation: str, program: Any, operands: Operands, inner: int) -> tuple[Any, Any]:
    """One call, and a loop of `inner` calls of which each has one element of the tokens from the last result."""
    specs = layer_programs.operand_specs(given)
    mesh = given.problem.mesh

    def loop(weights: Any, x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            first, *_ = jax.tree.leaves(jax.lax.optimization_barrier(program(weights, x, topk_idx)))
            return x.at[0, 0].add((first.reshape(-1)[0] * 0).astype(x.dtype))

        return jax.lax.fori_loop(0, inner, body, x)

    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=specs, out_specs=layer_programs.result_specs(given, operation), check_vma=False
    )
    looped = jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=RANK_SPEC, check_vma=False)
    return jax.jit(mapped).lower(*operands).compile(), jax.jit(looped).lower(*operands).compile()


def times(loop: Any, operands: Operands, inner: int, repeats: int, given: LayerProblem) -> dict[str, Any]:
    jax.block_until_ready(loop(*operands))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(loop(*operands))
        taken.append(timing.slowest_process((time.perf_counter() - began) / inner * 1e6))
    median = statistics.median(taken)
    return {
        "us_median": median,
        "us_min": min(taken),
        "us_max": max(taken),
        "us_repeats": taken,
        "calls_per_repeat": inner,
        "tokens_per_second_per_rank": given.work.tokens / median * 1e6,
    }


def add_shares(results: list[dict[str, Any]]) -> None:
    """`matmul_share`: the experts' own time over the layer's; `times_own`: over the library's plain layer's time."""
    for row in results:
        same = {r["name"]: r["us_median"] for r in results if r["operation"] == row["operation"] and "us_median" in r}
        if "us_median" not in row:
            continue
        if MATMULS in same:
            row["matmul_share"] = same[MATMULS] / row["us_median"]
        if "xen_moe_jax" in same:
            row["times_own"] = row["us_median"] / same["xen_moe_jax"]


def results_table(results: list[dict[str, Any]]) -> str:
    """A line for each way and operation."""
    columns = ["way", "operation", "us", "min..max", "tokens/s/rank", "matmuls", "vs ours", "temp MiB", "difference"]
    lines = []
    for row in results:
        if "error" in row:
            lines.append([row["name"], row["operation"], row["error"].splitlines()[0][:60], *["-"] * 6])
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
            ]
        )
    return report.format_table(columns, lines)


def describe_results(document: dict[str, Any]) -> str:
    """Machine, sizes, and the table."""
    shape = f"width={document['width']}  layers={document['layers']}  grouped_matmul={document['grouped_matmul']}"
    return "\n".join([report.describe(document), shape, "", results_table(document["results"]), "", FOOTNOTE])


FOOTNOTE = (
    "us: median per call, dependent calls inside one program. matmuls: the time of the experts alone, on as many\n"
    "rows in equal groups, over the layer's. temp MiB: the compiler's temporaries of a call, per device. difference:\n"
    "from the library's plain layer, of the largest element."
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
        axes.barh([r["name"] for r in ways], [r["us_median"] / 1e3 for r in ways])
        axes.axvline(
            next((r["us_median"] for r in rows if r["name"] == MATMULS), 0.0) / 1e3, color="black", linestyle="--"
        )
        axes.set(xlabel=f"{operation}: ms a call (dashed: the experts alone)", xlim=(0, None))
    panels[0].invert_yaxis()
    figure.suptitle(f"{report.plot_title(document)}, width {document['width']}, {document['layers']} layer(s)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
