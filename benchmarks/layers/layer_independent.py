"""Measures a layer whose transfers and matmuls do not wait for one another: the limit of every order of these kernels.

    python -m benchmarks layer-independent --json benchmarks/results/independent_layer_h200x4.json

The programs do all work of a layer but the router's gradients, with the sizes of a real routing. But the experts
multiply rows that an earlier dispatch has brought, and the combine sends rows that are there before the experts end. So
every asynchronous operation has matmuls beside it from its start: the dispatch has the two projections, the combine the
last matmul, and in the backward pass each has their transposes. No layer can do that, because rows must come before
they are multiplied; no layer that is made of these kernels, in any order, is faster than the best of these programs.

With `--seconds` each program also runs that long without a pause, and the energy that the GPUs took is read from NVML:
a GPU at the limit of its power cannot run a program in less than its energy over that limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from benchmarks.layers import layer_programs
from benchmarks.layers.layer_bound import (
    DEALT,
    PASSES,
    add_layer_options,
    compile_all,
    experts_on,
    in_turns,
    layer_of,
    summary,
)
from benchmarks.lib import report, turns
from benchmarks.lib.options import positive
from benchmarks.lib.verify import WrongResultError
from xen_moe_jax.experts import grouped_matmul, mlp
from xen_moe_jax.experts.mlp import activate
from xen_moe_jax.tuning.problem import AXIS, RANK_SPEC

TOLERANCE = 0.01
"""Tolerance relative to the largest element."""


class Ready(NamedTuple):
    """Arrays that an earlier dispatch has left on a rank."""

    rows: jax.Array
    sizes: jax.Array
    factors: jax.Array
    handle: Any


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=pathlib.Path)
    add_layer_options(add)
    add("--inner", type=positive, default=20, help="calls that are queued at once")
    add("--repeats", type=positive, default=5)
    add("--seconds", type=float, default=0.0, help="of each program without a pause, for its energy; 0: none")
    add("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    return parser.parse_args(arguments)


# -- the programs ------------------------------------------------------------------------------------------------------


def dispatch_arguments(given: layer_programs.LayerProblem, blocks: int | None) -> dict[str, Any]:
    config = given.config
    return {
        "num_experts": config.num_experts,
        "axis_name": AXIS,
        "capacity": config.chunk_capacity(given.work.tokens, given.work.ranks),
        "config": xm.KernelConfig(num_sms=blocks),
    }


def ready_program(given: layer_programs.LayerProblem) -> Callable[..., Ready]:
    def prepare(weights: Any, x: jax.Array, topk_idx: jax.Array) -> Ready:
        factors = layer_programs.router_weights(given.work, weights["router"], x, topk_idx)
        routed = xm.dispatch(x, topk_idx, factors, **dispatch_arguments(given, None))
        return Ready(routed.x, routed.group_sizes, routed.weights, routed.handle)

    return prepare


def program(given: layer_programs.LayerProblem, operation: str, blocks: int | None, what: str) -> Callable[..., Any]:
    """`(weights, x, topk_idx, ready) -> results`, on one rank.

    Args:
      blocks: thread blocks of an asynchronous operation; None is the library's choice.
      what: "independent": matmuls and transfers side by side; "in turn": matmuls and synchronous transfers one after
        the other; "experts": matmuls alone; "transfers": transfers alone.
    """
    start, sms = dispatch_arguments(given, blocks), xm.KernelConfig(num_sms=blocks)
    matmuls, moves = what != "transfers", what != "experts"
    multiply = grouped_matmul.choose(given.config.grouped_matmul)

    def run(weights: Any, x: jax.Array, topk_idx: jax.Array, ready: Ready) -> Any:
        results: list[Any] = []

        def stage(whole: Callable[[], Any], half: Callable[[], Any], done: Any, work: Any, *args: Any) -> Any:
            """One transfer and the matmuls beside it."""
            if not matmuls or not moves or what == "in turn":
                if moves:
                    results.append(whole())
                    args = jax.lax.optimization_barrier((args, results[-1]))[0]
                return work(*args) if matmuls else None
            flight, out = xm.overlap(half(), work, *args)
            results.append(done(flight))
            return out

        def there(x: jax.Array, work: Any, *args: Any) -> Any:
            """Runs a dispatch, which begins when the last of the results are there."""
            x, _ = jax.lax.optimization_barrier((x, results[-1:]))
            factors = layer_programs.router_weights(given.work, weights["router"], x, topk_idx)
            landed = lambda flight: xm.dispatch_done(flight).x  # noqa: E731
            return stage(
                lambda: xm.dispatch(x, topk_idx, factors, **start).x,
                lambda: xm.dispatch_start(x, topk_idx, factors, **start), landed, work, *args,
            )  # fmt: skip

        def back(work: Any, *args: Any) -> Any:
            """Runs a combine of the rows that are ready."""
            y, _ = jax.lax.optimization_barrier((ready.rows, results[-1:]))
            whole = lambda: xm.combine(y, ready.handle, weighted=False, config=sms)  # noqa: E731
            half = lambda: xm.combine_start(y, ready.handle, weighted=False, config=sms)  # noqa: E731
            return stage(whole, half, xm.combine_done, work, *args)

        pulls: list[Any] = []

        def project(rows: jax.Array) -> jax.Array:
            def both(rows: jax.Array, gate: jax.Array, up: jax.Array, factors: jax.Array) -> jax.Array:
                one = dict(weights, gate=gate, up=up)
                return projected(given, rows, ready.sizes, one, factors)

            hidden, pull = jax.vjp(both, rows, weights["gate"], weights["up"], ready.factors)
            pulls.append(pull)
            return hidden

        def last(hidden: jax.Array) -> jax.Array:
            y, pull = jax.vjp(lambda h, w: multiply(h, w, ready.sizes), hidden, weights["down"])
            pulls.append(pull)
            return y

        hidden = there(x, project, ready.rows)
        y = back(last, hidden)
        if operation == "forward":
            return [*results, y]
        of_projections, of_last = pulls or [None, None]  # asked for only where there are matmuls
        gradients = there(x, lambda c: of_last(c), ready.rows)
        of_rows = back(lambda c: of_projections(c), gradients[0] if matmuls else None)
        return [*results, y, gradients, of_rows]

    return run


def projected(given: Any, rows: jax.Array, sizes: jax.Array, weights: Any, factors: jax.Array) -> jax.Array:
    """Rows that enter the experts' last matmul."""
    config = given.config
    if grouped_matmul.by_hopper(config.grouped_matmul, rows, weights["gate"]):
        return mlp.hopper.activated(rows, (weights["gate"], weights["up"]), sizes, row_weights=factors)
    multiply = grouped_matmul.choose(config.grouped_matmul)
    activation = activate(config, *(multiply(rows, weights[name], sizes) for name in ("gate", "up")))
    return (activation.astype(jnp.float32) * factors[:, None]).astype(rows.dtype)


# -- energy ------------------------------------------------------------------------------------------------------------


class Energy:
    """Energy of all GPUs that NVML shows, in joules since some time; `limit` is the sum of their power limits in
    watts."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self.handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            self.handles.append(handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.nvml, name)(*arguments):
            raise OSError(f"{name} failed with NVML's error {code}")

    def _read(self, name: str, kind: Any, *arguments: Any) -> list[int]:
        values = []
        for handle in self.handles:
            value = kind()
            self._call(name, handle, *arguments, ctypes.byref(value))
            values.append(int(value.value))
        return values

    def joules(self) -> list[float]:
        return [mj / 1e3 for mj in self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)]

    def limits(self) -> list[float]:
        return [mw / 1e3 for mw in self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint)]

    def clocks(self) -> list[int]:
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_uint(1))  # 1: SM


def sustained(energy: Energy, run: Any, operands: Any, seconds: float, us: float) -> dict[str, Any]:
    """Time, energy and clocks of calls without a pause, after a third as many that do not count."""

    def calls(count: int) -> None:
        for _ in range(count):
            result = run(*operands)
        jax.block_until_ready(result)

    count = max(3, round(seconds * 1e6 / us))
    calls(count // 3)
    before, began = energy.joules(), time.perf_counter()
    calls(count // 2)
    clocks = energy.clocks()  # between two queues, within microseconds of work
    calls(count - count // 2)
    took, after = time.perf_counter() - began, energy.joules()
    return {
        "sustained_us": took / count * 1e6,
        "joules": [(b - a) / count for a, b in zip(before, after, strict=True)],
        "watts": [(b - a) / took for a, b in zip(before, after, strict=True)],
        "sm_mhz": clocks,
    }


# -- run ---------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict[str, Any]:
    given = layer_of(options)
    operands = layer_programs.draw_operands(given)
    specs = layer_programs.operand_specs(given)

    def on_ranks(function: Callable[..., Any], in_specs: Any) -> Any:
        inner = lambda weights, *rest: function({n: w[0] for n, w in weights.items()}, *rest)  # noqa: E731
        return jax.jit(
            jax.shard_map(inner, mesh=given.problem.mesh, in_specs=in_specs, out_specs=RANK_SPEC, check_vma=False)
        )

    ready = on_ranks(ready_program(given), specs)(*operands)
    tiles: list[str | None] = [None, *([DEALT] if given.problem.platform == "gpu" else [])]
    cases: list[Any] = [(what, None, None) for what in ("experts", "transfers", "in turn")]
    cases += [("independent", blocks, how) for blocks in options.blocks for how in tiles]
    lowered = {}
    for what, blocks, matmul in cases:
        for operation in PASSES:
            with experts_on(matmul):
                made = on_ranks(program(given, operation, blocks, what), (*specs, RANK_SPEC))
                lowered[what, blocks, matmul, operation] = made.lower(*operands, ready)
    document = report.header([], given.work) | {
        "command": shlex.join(["python", "-m", "benchmarks", "layer-independent", *sys.argv[1:]]),
        "width": options.width,
        "rows": [],
    }
    programs = compile_all(lowered)
    rows = {key: {"what": key[0], "blocks": key[1], "matmul_blocks": key[2], "operation": key[3]} for key in programs}
    everything = (*operands, ready)
    with turns.alone(options.lock):
        runnable = {}
        expected: dict[str, Any] = {}
        for key, made in programs.items():
            if isinstance(made, Exception):
                rows[key]["error"] = f"{type(made).__name__}: {made}"[:300]
                continue
            try:
                compare(rows[key], jax.block_until_ready(made(*everything)), expected, ready.rows.shape[0])
                runnable[key] = made, everything
            except (RuntimeError, WrongResultError) as error:
                rows[key]["error"] = f"{type(error).__name__}: {error}"[:300]
        for key, us in in_turns(runnable, options).items():
            rows[key] |= summary(us)
        document["rows"] = list(rows.values())
        write(options, document)
        if options.seconds:
            measure_energy(options, document, rows, runnable)
    write(options, document)
    return document


def compare(row: dict[str, Any], results: Any, expected: dict[str, Any], rows: int) -> None:
    """Compares the results with those of the program in turn, except arrays of `rows` rows, which have unspecified rows
    past the groups.

    Raises:
      WrongResultError: they differ by more than rounding.
    """
    specified = [leaf for leaf in jax.tree.leaves(results) if leaf.shape[0] != rows]
    if row["what"] == "in turn":
        expected[row["operation"]] = specified
    elif row["what"] == "independent":
        difference = layer_programs.largest_difference(specified, expected[row["operation"]])
        row["max difference"] = difference
        if not difference < TOLERANCE:
            raise WrongResultError(f"differs by {difference:.2g} of the largest element")


def measure_energy(options: argparse.Namespace, document: Any, rows: Any, runnable: Any) -> None:
    """Energies of the parts, and of the fastest independent program of each operation."""
    try:
        energy = Energy()
        document["power_limit_watts"] = energy.limits()
    except OSError as error:
        document["no_energy"] = str(error)
        return
    for operation in PASSES:
        of = [key for key in runnable if key[3] == operation]
        best = min((key for key in of if key[0] == "independent"), key=lambda key: rows[key]["us"], default=None)
        for key in of:
            if key[0] != "independent" or key == best:
                report.progress(f"energy of {key}")
                run, operands = runnable[key]
                rows[key] |= sustained(energy, run, operands, options.seconds, rows[key]["us"])


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for row in run(options)["rows"]:
        where = (
            f"{row['what']:11s} {row['operation']:17s} blocks {row['blocks'] or '-'} of {row['matmul_blocks'] or '-'}"
        )
        power = f", {sum(row['joules']):.2f} J, {max(row['watts']):.0f} W" if "joules" in row else ""
        print(f"{where}: {row['us']:.0f} us{power}" if "us" in row else f"{where}: {row['error']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
