"""Grouped matmuls that are called from PyTorch, for `grouped_matmul.py`: the speed of kernels that JAX cannot call.

Each of `KERNELS` makes three functions of one shape: rows by weights, rows by transposed weights, and the contraction
of rows by rows that is the gradient of the weights. Weights have the layout that each kernel needs; the cost of
transposing them in a training step is not in the times. Only single matmuls are timed: the experts around them would be
PyTorch's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.lib import turns

PACKAGES = ("torch", "quack-kernels", "nvidia-cutlass-dsl")
STREAMS = 4
QUACK_TILES = ((128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False))
"""(rows, columns, ping-pong), for clusters of two thread blocks along the rows: of QuACK's own list for Hopper."""


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Products of rows `[M, A]` in groups, each into a new array: `by_weights(rows, weights [L, A, B]) -> [M, B]`,
    `transposed(rows [M, B], weights [L, A, B]) -> [M, A]`, `contraction(rows [M, A], rows [M, B]) -> [L, A, B]`."""

    by_weights: Callable[[Any, Any], Any]
    transposed: Callable[[Any, Any], Any]
    contraction: Callable[[Any, Any], Any]


def grouped_mm(sizes: Any, lock: str) -> Matmuls:
    """PyTorch's own grouped matmul, a CUTLASS kernel on Hopper."""
    import torch

    ends = torch.cumsum(sizes, 0).to(torch.int32)
    matmul = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return Matmuls(
        lambda rows, weights: matmul(rows, weights, offs=ends),
        lambda rows, weights: matmul(rows, weights.mT, offs=ends),
        lambda rows, others: matmul(rows.mT, others, offs=ends),
    )


def cublas_streams(sizes: Any, lock: str) -> Matmuls:
    """A cuBLAS matmul for each group, over several streams, as TransformerEngine's grouped matmul launches them on
    Hopper without its CUTLASS kernel. The host must know the sizes."""
    import torch

    starts = [0, *torch.cumsum(sizes, 0).tolist()]
    groups = list(zip(starts[:-1], starts[1:], strict=True))
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def each(one: Callable[[int, int, int], None]) -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for number, (start, end) in enumerate(groups):
            with torch.cuda.stream(streams[number % STREAMS]):
                one(number, start, end)
        for stream in streams:
            here.wait_stream(stream)

    def by(rows: Any, weights: Any) -> Any:
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        each(lambda number, start, end: torch.mm(rows[start:end], weights[number], out=out[start:end]))
        return out

    def contraction(rows: Any, others: Any) -> Any:
        out = rows.new_empty(len(groups), rows.shape[1], others.shape[1])
        each(lambda number, start, end: torch.mm(rows[start:end].mT, others[start:end], out=out[number]))
        return out

    return Matmuls(by, lambda rows, weights: by(rows, weights.mT), contraction)


def quack(sizes: Any, lock: str) -> Matmuls:
    """QuACK's grouped matmul, written in CuTe DSL, with the fastest of `QUACK_TILES` for each of the three products."""
    import torch
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    ends = torch.nn.functional.pad(torch.cumsum(sizes, 0), (1, 0)).to(torch.int32)
    configs = [GemmConfig(m, n, pingpong=pingpong, cluster_m=2, cluster_n=1) for m, n, pingpong in QUACK_TILES]
    chosen: dict[Any, Any] = {}

    def run(key: Any, given: tuple[Any, Any, Any], **groups: Any) -> Any:
        if key not in chosen:
            chosen[key] = fastest(configs, lambda config: gemm_tuned.fn(*given, config=config, **groups), lock)
        gemm_tuned.fn(*given, config=chosen[key], **groups)
        return given[2]

    def by(rows: Any, weights: Any) -> Any:
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        return run((weights.shape, weights.stride()), (rows, weights, out), cu_seqlens_m=ends)

    def contraction(rows: Any, others: Any) -> Any:
        out = rows.new_empty(sizes.shape[0], rows.shape[1], others.shape[1])
        return run("contraction", (rows.mT, others, out), cu_seqlens_k=ends)

    return Matmuls(by, lambda rows, weights: by(rows, weights.mT), contraction)


def fastest(configs: list[Any], run: Callable[[Any], Any], lock: str) -> Any:
    """The candidate that takes the least time; candidates that do not compile are left out, with their error on
    stderr."""
    compiled, taken = [], {}
    for config in configs:
        try:
            run(config)
            compiled.append(config)
        except Exception as error:  # a tiling that the kernel does not take
            print(f"  {config}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    with turns.alone(lock):
        for config in compiled:
            taken[config] = min(queued(functools.partial(run, config), 10, 2))
    print(f"  best of { ({str(config): round(us) for config, us in taken.items()}) }", file=sys.stderr)
    if not taken:
        raise RuntimeError(f"none of {len(configs)} tilings runs")
    return min(taken, key=lambda config: taken[config])


KERNELS: dict[str, Callable[[Any, str], Matmuls]] = {
    "grouped_mm": grouped_mm,
    "cublas": cublas_streams,
    "quack": quack,
}


def queued(run: Callable[[], Any], calls: int, repeats: int) -> list[float]:
    """Microseconds a call of `calls` queued at once, after two that do not count: one entry a repeat."""
    import torch

    run()
    run()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / calls * 1e3)
    return taken


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(kind: str, options: argparse.Namespace, group_sizes: Any) -> dict[str, Any]:
    """Checks and times one kernel; raises where it cannot run or is wrong."""
    import torch

    torch.manual_seed(0)
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    sizes = torch.tensor(group_sizes.tolist(), device=device)
    rows = torch.randn(options.rows, options.hidden, device=device).to(dtype)
    cotangent = torch.randn(options.rows, options.width, device=device).to(dtype)
    gate = (torch.randn(options.experts, options.hidden, options.width, device=device) / options.hidden**0.5).to(dtype)
    matmuls = KERNELS[kind](sizes, options.lock)
    programs: dict[str, Callable[[], Any]] = {
        "gate": lambda: matmuls.by_weights(rows, gate),
        "gradient of rows": lambda: matmuls.transposed(cotangent, gate),
        "gradient of weights": lambda: matmuls.contraction(rows, cotangent),
    }
    errors = {what: error_of(what, run(), rows, cotangent, gate, sizes) for what, run in programs.items()}
    wrong = {what: error for what, error in errors.items() if not error < 0.02}
    if wrong:
        raise ValueError(f"wrong results, relative errors {wrong}: it must not be used")
    flops, times = 2 * options.rows * options.hidden * options.width, {}
    taken: dict[str, list[float]] = {what: [] for what in programs}
    for _ in turns.turns(options.lock, options.repeats):
        for what, run in programs.items():
            taken[what] += queued(run, options.inner, 1)
    for what, us in taken.items():
        median = statistics.median(us)
        times[what] = {"median_us": median, "min_us": min(us), "max_us": max(us), "tflops": flops / median / 1e6}
    return {"errors": errors, "times": times, "versions": versions()}


def error_of(what: str, got: Any, rows: Any, cotangent: Any, gate: Any, sizes: Any) -> float:
    """Largest relative error of any group against a float32 product of some of its rows, or of some columns."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    worst, start = 0.0, 0
    for expert, size in enumerate(sizes.tolist()):
        group = slice(start, start + size)
        start += size
        if size == 0:
            continue
        some = torch.linspace(group.start, group.stop - 1, 4, device=rows.device).long()
        if what == "gate":
            found, expected = got[some], rows[some].float() @ gate[expert].float()
        elif what == "gradient of rows":
            found, expected = got[some], cotangent[some].float() @ gate[expert].float().mT
        else:
            found, expected = got[expert][:, :64], rows[group].float().mT @ cotangent[group, :64].float()
        error = float((found.float() - expected).norm() / expected.norm())
        worst = max(worst, error) if error == error else float("inf")
    return worst
