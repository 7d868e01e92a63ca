"""Grouped matmuls for the experts of one rank, measured side by side on one GPU: forward, both gradients, all experts.

    python -m benchmarks grouped-matmul --json benchmarks/results/grouped_matmul_h200.json --seconds 480 \
        [--path FOLDER_WITH_TOKAMAX] [--only ragged_dot tokamax]

The shape is that of the layer benchmark: hidden 4096, expert width 1536, 64 experts over 4 ranks, 32768 rows a rank in
random groups. Every candidate runs in a process of its own, because XLA reads its flags once and a kernel that fails
may take the process with it. `--jobs` of them compile side by side and then measure in turns, one repeat each: the
speed of a GPU depends on its work just before. A time is that of N calls queued at once, divided by N. Before it is
timed a candidate is checked against float32 products of some rows of every group, with NaN in the rows past the last
group where `--capacity` leaves any. A candidate that cannot run on this machine is in the file with the reason. Kernels
that JAX cannot call are measured from PyTorch, one matmul at a time (`grouped_matmul_torch.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.lib import turns
from tools.children import bound

ROOT = pathlib.Path(__file__).resolve().parents[2]

OWN = "xen_moe_jax hopper"
CANDIDATES = {  # name: (candidate to build, XLA flags)
    "ragged_dot": ("ragged_dot", ""),
    "ragged_dot, XLA grouped gemm": ("ragged_dot", "--xla_gpu_experimental_use_ragged_dot_grouped_gemm=true"),
    OWN: ("hopper", ""),
    "tokamax": ("tokamax", ""),
    "jax mosaic gpu": ("jax mosaic gpu", ""),
    "padded einsum": ("padded einsum", ""),
    "one dense matmul": ("dense", ""),
    "torch grouped_mm (CUTLASS)": ("torch:grouped_mm", ""),
    "cuBLAS on four streams": ("torch:cublas", ""),
    "QuACK (CuTe DSL)": ("torch:quack", ""),
}
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense bfloat16, from the data sheets."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=480, help="no candidate begins after this")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--path", help="folder with packages that are not installed")
    parser.add_argument("--rows", type=int, default=32768, help="rows in groups")
    parser.add_argument("--capacity", type=int, help="rows of the buffer; default: as many as are in groups")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--experts", type=int, default=16, help="of one rank")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--inner", type=int, default=20, help="calls that are queued at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240, help="seconds that one candidate may take")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--lock", help="file whose lock is held while measuring; default: one beside the JSON file")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)  # set in the child processes
    options = parser.parse_args(arguments)
    options.capacity = options.capacity or options.rows
    options.lock = options.lock or str(options.json.with_suffix(".lock"))
    if min(options.rows, options.hidden, options.width, options.experts, options.inner, options.repeats) < 1:
        parser.error("sizes and counts must be at least 1")
    if options.capacity < options.rows:
        parser.error(f"--capacity {options.capacity}: must be at least --rows {options.rows}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs every candidate in a child process and writes the results of all; returns 1 if none ran."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if options.path:
        sys.path.insert(0, options.path)
    if options.candidate:
        options.json.write_text(json.dumps(run_candidate(options)))
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": "python -m benchmarks grouped-matmul " + " ".join(given), "candidates": {}}
    ends = time.monotonic() + options.seconds

    def run(name: str) -> dict[str, Any]:
        left = min(ends - time.monotonic(), options.limit)
        return {"error": "no time was left"} if left <= 0 else run_child(name, given, options, left)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(run, name): name for name in options.only}
        for done in concurrent.futures.as_completed(waiting):
            name, result = waiting[done], done.result()
            report |= result.pop("machine", {})
            report["candidates"][name] = result
            options.json.write_text(json.dumps(report, indent=1))  # the results so far outlive a crash
            print(line(name, result), flush=True)
    return int(all("error" in result for result in report["candidates"].values()))


def run_child(name: str, given: list[str], options: argparse.Namespace, limit: float) -> dict[str, Any]:
    part = options.json.with_suffix("." + re.sub(r"\W+", "_", name))
    part.unlink(missing_ok=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} {CANDIDATES[name][1]}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "benchmarks", "grouped-matmul", *given, "--candidate", name, "--json", str(part)]
    try:
        done = subprocess.run(
            bound(command), env=environment, stderr=subprocess.PIPE, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as expired:
        said = (expired.stderr or b"").decode(errors="replace").strip().splitlines()[-3:]
        return {"error": f"did not end within {limit:.0f} s; it said {said}"}
    log = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    print("\n".join(log), end="\n" if log else "", flush=True)
    if not part.exists():
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-600:]}"}
    result = json.loads(part.read_text())
    part.unlink()
    return result


def line(name: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{name:<30} {result['error'].splitlines()[-1][:300]}"
    times = {
        what: f"{entry['median_us']:.0f} us {entry['tflops']:.0f} TFLOP/s" for what, entry in result["times"].items()
    }
    return f"{name:<30} " + ", ".join(f"{what} {text}" for what, text in times.items())


# -- in a child process: one candidate ---------------------------------------------------------------------------------


def run_candidate(options: argparse.Namespace) -> dict[str, Any]:
    """Checks and times one candidate; `error` says why there are no times."""
    kind, _, kernel = CANDIDATES[options.candidate][0].partition(":")
    if kind == "torch":
        return run_torch(kernel, options)
    import jax

    machine = {
        "device": jax.devices()[0].device_kind,
        "versions": {p: version(p) for p in ("jax", "jaxlib", "tokamax")},
        "shape": {n: getattr(options, n) for n in ("rows", "capacity", "hidden", "width", "experts", "dtype")},
    }
    try:
        matmul = build(CANDIDATES[options.candidate][0], options)
        result = {} if options.candidate == "one dense matmul" else check(matmul, options)
        result["times"] = timed(matmul, options)
    except Exception as error:  # whatever a library raises is the candidate's result
        return {"machine": machine, "error": f"{type(error).__name__}: {error}"[:1500]}
    peak = PEAK_TFLOPS.get(machine["device"])
    for entry in result["times"].values():
        entry["share_of_peak"] = entry["tflops"] / peak if peak else None
    return {"machine": machine, **result}


def run_torch(kernel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures single matmuls of a kernel that is called from PyTorch."""
    import torch

    from benchmarks.layers import grouped_matmul_torch

    try:
        result = grouped_matmul_torch.measure(kernel, options, group_sizes(options))
    except Exception as error:  # whatever a library raises is the candidate's result
        return {"error": f"{type(error).__name__}: {error}"[:1500], "versions": grouped_matmul_torch.versions()}
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name())
    for entry in result["times"].values():
        entry["share_of_peak"] = entry["tflops"] / peak if peak else None
    return result


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build(kind: str, options: argparse.Namespace) -> Callable[..., Any]:
    """Returns the candidate's function `(rows, weights, group_sizes) -> rows`."""
    import jax

    if kind == "ragged_dot":
        return jax.lax.ragged_dot
    if kind == "hopper":
        from xen_moe_jax.experts import hopper

        return hopper.grouped_matmul
    if kind == "dense":
        return dense
    if kind == "padded einsum":
        return functools.partial(padded_einsum, room(options))
    if kind == "jax mosaic gpu":
        return best_of(mosaic_gpu_tiles(), options)
    import tokamax

    return tokamax.ragged_dot


def group_sizes(options: argparse.Namespace) -> Any:
    """Rows of each expert when tokens choose evenly at random."""
    import numpy as np

    return np.random.default_rng(0).multinomial(options.rows, [1 / options.experts] * options.experts).astype(np.int32)


def room(options: argparse.Namespace) -> int:
    """Rows that every expert of the padded einsum gets: those of the busiest expert, rounded up to a multiple of
    128."""
    return -(-int(group_sizes(options).max()) // 128) * 128


def operands(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Rows `[capacity, H]` with NaN past the last group, gate `[L, H, F]`, down `[L, F, H]`, group sizes."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    dtype, hidden, width = options.dtype, options.hidden, options.width
    rows = jax.random.normal(keys[0], (options.capacity, hidden), jnp.float32).astype(dtype)
    rows = jnp.where(jnp.arange(options.capacity)[:, None] < options.rows, rows, jnp.nan).astype(dtype)
    gate = (jax.random.normal(keys[1], (options.experts, hidden, width)) / hidden**0.5).astype(dtype)
    down = (jax.random.normal(keys[2], (options.experts, width, hidden)) / width**0.5).astype(dtype)
    return rows, gate, down, jnp.asarray(group_sizes(options))


def experts(matmul: Callable[..., Any], rows: Any, weights: tuple[Any, Any, Any], sizes: Any) -> Any:
    """Computes the experts with SwiGLU, as the layer does: this library's kernels multiply both projections and apply
    SwiGLU in one kernel."""
    import jax

    from xen_moe_jax.experts import hopper

    gate, up, down = weights
    if matmul is hopper.grouped_matmul:
        return matmul(hopper.activated(rows, (gate, up), sizes), down, sizes)
    return matmul(jax.nn.silu(matmul(rows, gate, sizes)) * matmul(rows, up, sizes), down, sizes)


def padded_einsum(places: int, rows: Any, weights: Any, sizes: Any) -> Any:
    """Copies every group into `places` rows, runs one batched matmul, and copies the rows back."""
    import jax.numpy as jnp

    starts = jnp.cumsum(sizes) - sizes
    at = starts[:, None] + jnp.arange(places)[None, :]
    used = jnp.arange(places)[None, :] < sizes[:, None]
    packed = jnp.where(used[..., None], rows[jnp.minimum(at, rows.shape[0] - 1)], 0)
    out = jnp.einsum("lma,lab->lmb", packed, weights)
    empty = jnp.zeros((rows.shape[0], out.shape[-1]), out.dtype)
    return empty.at[jnp.where(used, at, rows.shape[0])].set(out, mode="drop", unique_indices=False)


def dense(rows: Any, weights: Any, sizes: Any) -> Any:
    """Multiplies all rows by the first group's weights: no grouped matmul, but the GPU's speed for a dense one of this
    size."""
    return rows @ weights[0]


def best_of(candidates: dict[str, Callable[..., Any]], options: argparse.Namespace) -> Callable[..., Any]:
    """The candidate that is fastest forward; candidates that do not compile are left out. Raises RuntimeError with the
    last compiler's error if none compiles."""
    import jax

    rows, gate, _, sizes = operands(options)
    compiled, taken, reason = {}, {}, ""
    for name, matmul in candidates.items():
        try:
            compiled[name] = jax.jit(matmul).lower(rows, gate, sizes).compile()
        except Exception as error:  # too much shared memory, a tiling that the kernel does not know
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"  {name}: {reason}", file=sys.stderr)
    if not compiled:
        raise RuntimeError(f"no tiling of the kernel compiles: {reason}")
    with turns.alone(options.lock):
        for name, program in compiled.items():
            taken[name] = min(turns.queued(program, (rows, gate, sizes), options.inner, options.repeats))
    print(f"  best of { ({name: round(us) for name, us in taken.items()}) }", file=sys.stderr)
    return candidates[min(taken, key=lambda name: taken[name])]


def with_gradients(forward: Any, by_rows: Any, by_weights: Any) -> Callable[..., Any]:
    """A differentiable `(rows, weights, sizes) -> rows` of three kernels."""
    import jax

    @jax.custom_vjp
    def matmul(rows: Any, weights: Any, sizes: Any) -> Any:
        return forward(rows, weights, sizes)

    def backward(kept: Any, cotangent: Any) -> Any:
        rows, weights, sizes = kept
        return (
            by_rows(cotangent, weights, sizes).astype(rows.dtype),
            by_weights(rows, cotangent, sizes).astype(weights.dtype),
            None,
        )

    matmul.defvjp(lambda *given: (matmul(*given), given), backward)
    return matmul


def mosaic_gpu_tiles() -> dict[str, Callable[..., Any]]:
    """The Hopper kernels that jax ships as examples, with the derivative that they leave to the caller."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    def of(m: int, n: int, steps: int, grid: int) -> Callable[..., Any]:
        tiles: dict[str, Any] = {
            "block_m": m,
            "block_n": n,
            "block_k": 64,
            "max_concurrent_steps": steps,
            "grid_block_n": grid,
        }
        # its contraction keeps a mask in registers: smaller tiles
        small = tiles | {"block_n": min(n, 128), "block_m": 64, "grid_block_n": 1}
        return with_gradients(
            lambda r, w, s: ragged_dot(r, w, group_sizes=s, **tiles),
            lambda c, w, s: ragged_dot(c, w, group_sizes=s, transpose_rhs=True, **tiles),
            lambda r, c, s: transposed_ragged_dot(r, c, group_sizes=s, **small),
        )

    sizes = ((128, 128, 4, 4), (128, 128, 6, 1), (64, 256, 4, 2), (64, 128, 5, 4), (128, 128, 4, 12))
    return {str(size): of(*size) for size in sizes}


def check(matmul: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Largest relative errors of outputs and gradients; raises ValueError where they are wrong."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rows, gate, _, sizes = operands(options)
    cotangent = jax.random.normal(jax.random.key(5), (options.capacity, options.width)).astype(rows.dtype)
    # rows past the last group are unspecified in the result too
    cotangent = jnp.where(jnp.arange(options.capacity)[:, None] < options.rows, cotangent, 0)

    def both(rows: Any, gate: Any) -> Any:
        out, pull = jax.vjp(lambda r, w: matmul(r, w, sizes), rows, gate)
        return out, *pull(cotangent.astype(out.dtype))

    out, by_rows, by_gate = jax.jit(both)(rows, gate)
    starts = np.cumsum(np.asarray(sizes)) - np.asarray(sizes)
    errors = {"forward": 0.0, "gradient of rows": 0.0, "gradient of weights": 0.0}
    exact = functools.partial(jnp.matmul, precision="highest")
    for expert, (start, size) in enumerate(zip(starts.tolist(), np.asarray(sizes).tolist(), strict=True)):
        if size == 0:
            continue
        some = np.unique(np.linspace(start, start + size - 1, 4).astype(int))
        r, c, w = (a.astype(jnp.float32) for a in (rows[some], cotangent[some], gate[expert]))
        columns = slice(0, 64)
        part = exact(
            rows[start : start + size].astype(jnp.float32).T,
            cotangent[start : start + size, columns].astype(jnp.float32),
        )
        for what, got, expected in (
            ("forward", out[some], exact(r, w)),
            ("gradient of rows", by_rows[some], exact(c, w.T)),
            ("gradient of weights", by_gate[expert][:, columns], part),
        ):
            error = float(jnp.linalg.norm(got.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
            errors[what] = float(np.fmax(errors[what], error)) if np.isfinite(error) else float("nan")
    wrong = {what: error for what, error in errors.items() if not error < 0.02}
    if wrong:
        raise ValueError(f"wrong results, relative errors {wrong}: it must not be used")
    return {"errors": errors}


def timed(matmul: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Median and spread of each program."""
    import jax
    import jax.numpy as jnp

    rows, gate, down, sizes = operands(options)
    rows = jnp.nan_to_num(rows)
    flops = 2 * options.rows * options.hidden * options.width
    weights = (gate, gate[:, ::-1], down)
    hidden = jax.random.normal(jax.random.key(7), (options.capacity, options.width)).astype(rows.dtype)
    cotangent = jax.random.normal(jax.random.key(8), rows.shape).astype(rows.dtype)

    def gradient_of(which: int) -> Callable[..., Any]:
        def run(rows: Any, gate: Any, sizes: Any, cotangent: Any) -> Any:
            _, pull = jax.vjp(lambda r, w: matmul(r, w, sizes), rows, gate)
            return pull(cotangent)[which]

        return run

    def forward_and_backward(rows: Any, weights: Any, sizes: Any, cotangent: Any) -> Any:
        # the output is a result: XLA would not compute the last matmul for gradients alone
        y, pull = jax.vjp(lambda r, w: experts(matmul, r, w, sizes), rows, weights)
        return y, pull(cotangent)

    programs: dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]] = {
        "gate": (matmul, flops, (gate, sizes)),
        "gradient of rows": (gradient_of(0), flops, (gate, sizes, hidden)),
        "gradient of weights": (gradient_of(1), flops, (gate, sizes, hidden)),
        "experts": (functools.partial(experts, matmul), 3 * flops, (weights, sizes)),
        "experts with gradients": (forward_and_backward, 9 * flops, (weights, sizes, cotangent)),
    }
    compiled = {
        name: jax.jit(program).lower(rows, *others).compile() for name, (program, _, others) in programs.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in turns.turns(options.lock, options.repeats):
        for name, (_, _, others) in programs.items():
            taken[name] += turns.queued(compiled[name], (rows, *others), options.inner, 1)
    times = {}
    for name, (_, work, _) in programs.items():
        median = statistics.median(taken[name])
        analysis = compiled[name].memory_analysis()
        times[name] = {
            "median_us": median,
            "min_us": min(taken[name]),
            "max_us": max(taken[name]),
            "tflops": work / median / 1e6,
            "temporary_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
        }
    return times


if __name__ == "__main__":
    sys.exit(main())
