"""The experts of published models on one Hopper GPU: this library's grouped matmuls beside `torch._grouped_mm`.

    python benchmarks/layers/model_shapes.py --json benchmarks/results/model_shapes_h100.json [--only gpt-oss-120b]

A line has the experts of one rank with 8,192 to 32,768 rows in random groups (`MODELS`): gate and up with the
activation, down, and both with all gradients. TFLOP/s count the multiplications of the matmuls alone. torch multiplies
gate and up as one matmul, without activation and biases, forward and with its gradients.

A GPU under this load is limited by its power, and the first milliseconds are up to 20 % faster than the rest. So a time
is that of calls queued one after the other when as many have run before. This library and torch take turns, and the
table has the medians of `ROUNDS` such times.

Every model has a process of its own, which compiles while others do, and all processes measure one after the other. The
JSON file is written after every line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_SECONDS, SECONDS, ROUNDS = 0.04, 0.05, 3
MODELS: dict[str, tuple[int, int, int, int, str, bool]] = {
    # hidden, width, experts of the rank, rows, activation, biases
    "H 4096, I 1536, 64 experts": (4096, 1536, 64, 32768, "swiglu", False),
    "gpt-oss-120b": (2880, 2880, 64, 16384, "clipped_swiglu", True),
    "Qwen3-30B-A3B": (2048, 768, 64, 32768, "swiglu", False),
    "DeepSeek-V3, 32 experts": (7168, 2048, 32, 32768, "swiglu", False),
    "Mixtral 8x7B": (4096, 14336, 4, 8192, "swiglu", False),
    "H 4096, I 1536, 16 experts": (4096, 1536, 16, 32768, "swiglu", False),
    "gpt-oss-20b": (2880, 2880, 16, 16384, "clipped_swiglu", True),
    "Qwen3-235B-A22B": (4096, 1536, 32, 32768, "swiglu", False),
    "Qwen3-Next": (2048, 512, 128, 32768, "swiglu", False),
    "OLMoE": (2048, 1024, 32, 32768, "swiglu", False),
    "GLM-4.5": (5120, 1536, 32, 32768, "swiglu", False),
    "Kimi K2, 32 experts": (7168, 2048, 32, 16384, "swiglu", False),
    "Llama 4 Scout": (5120, 8192, 8, 8192, "swiglu", False),
}
PARTS = ("gate and up", "down", "forward and backward")
MATMULS = {"gate and up": 2, "down": 1, "forward and backward": 9}


def sizes_of(experts: int, rows: int) -> list[int]:
    """Returns random group sizes that add up to `rows`."""
    import numpy as np

    return np.random.default_rng(0).multinomial(rows, [1 / experts] * experts).tolist()


def steady_us(call: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """The time of a call among many."""
    wait(call())
    began = time.perf_counter()
    wait(call())
    each = time.perf_counter() - began
    for seconds in (WARM_SECONDS, SECONDS):
        count = max(2, round(seconds / each))
        began = time.perf_counter()
        for _ in range(count):
            out = call()
        wait(out)
        each = (time.perf_counter() - began) / count
    return each * 1e6


def ours(name: str) -> Callable[[], dict[str, float]]:
    """Compiles a model's experts. The result measures them, in us."""
    import jax
    import jax.numpy as jnp

    from xen_moe_jax.experts import hopper

    hidden, width, experts, rows, kind, biased = MODELS[name]
    activation = dataclasses.replace(hopper.SWIGLU, name=kind)

    @jax.jit
    def draw() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 9))

        def normal(*shape: int) -> jax.Array:
            return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

        biases = (normal(experts, width), normal(experts, width), normal(experts, hidden)) if biased else None
        projections = normal(experts, hidden, width), normal(experts, hidden, width)
        x, inner = normal(rows, hidden), normal(rows, width)
        sizes = jnp.asarray(sizes_of(experts, rows), jnp.int32)
        return x, inner, projections, normal(experts, width, hidden), biases, sizes

    def first(x: Any, projections: Any, biases: Any, sizes: Any) -> Any:
        return hopper.activated(x, projections, sizes, biases and biases[:2], activation=activation)

    def second(x: Any, down: Any, biases: Any, sizes: Any) -> Any:
        return hopper.grouped_matmul(x, down, sizes, bias=biases and biases[2])

    def both(x: Any, projections: Any, down: Any, biases: Any, sizes: Any) -> Any:
        def experts_of(x: Any, projections: Any, down: Any, biases: Any) -> Any:
            return second(first(x, projections, biases, sizes), down, biases, sizes)

        out, pull = jax.vjp(experts_of, x, projections, down, biases)
        return out, pull(x)

    drawing = draw.lower().compile()
    x, inner, projections, down, biases, sizes = draw.eval_shape()
    given: dict[str, tuple[Any, Any]] = {
        "gate and up": (first, (x, projections, biases, sizes)),
        "down": (second, (inner, down, biases, sizes)),
        "forward and backward": (both, (x, projections, down, biases, sizes)),
    }
    compiled: dict[str, Any] = {
        part: jax.jit(program).lower(*shapes).compile() for part, (program, shapes) in given.items()
    }

    @functools.cache
    def operands() -> dict[str, tuple[Any, ...]]:
        x, inner, projections, down, biases, sizes = drawing()
        return {
            "gate and up": (x, projections, biases, sizes),
            "down": (inner, down, biases, sizes),
            "forward and backward": (x, projections, down, biases, sizes),
        }

    def measure() -> dict[str, float]:
        given = operands()
        return {
            part: steady_us(functools.partial(compiled[part], *given[part]), jax.block_until_ready) for part in PARTS
        }

    return measure


def torch_times(name: str) -> dict[str, float]:
    """Times in us of `torch._grouped_mm` for a model's matmuls, forward and with both gradients."""
    import torch

    hidden, width, experts, rows, _, _ = MODELS[name]
    ends = torch.tensor(sizes_of(experts, rows), device="cuda").cumsum(0).to(torch.int32)

    def times_of(depth: int, columns: int) -> tuple[float, float]:
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(experts, columns, depth, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        cotangent = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

        def forward() -> Any:
            return torch._grouped_mm(x, w, offs=ends)

        def with_gradients() -> Any:
            return torch.autograd.grad(forward(), (x, w), cotangent)

        alone = steady_us(forward, lambda _: torch.cuda.synchronize())
        x.requires_grad_()
        w.requires_grad_()
        return alone, steady_us(with_gradients, lambda _: torch.cuda.synchronize())

    projections, down = times_of(hidden, 2 * width), times_of(width, hidden)
    torch.cuda.empty_cache()
    return dict(zip(PARTS, (projections[0], down[0], projections[1] + down[1]), strict=True))


def serve(name: str | None) -> None:
    """Compiles this library's experts of a model, says so, and measures them for each line read; without a name
    measures torch's matmuls of the model that a line names."""
    compiled = None if name is None else ours(name)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(torch_times(line.strip()) if compiled is None else compiled()), flush=True)


class Side:
    """A process that `serve`s."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve"]
        command += ["--only", name] if name else []
        # the processes share the GPU's memory, and none takes it all beforehand
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.is_ready: bool | None = None

    def ready(self) -> bool:
        """Waits until the process has compiled; False if it has failed."""
        if self.is_ready is None:
            assert self.process.stdout is not None
            self.is_ready = self.process.stdout.readline().strip() == "ready"
        return self.is_ready

    def measured(self, name: str) -> dict[str, float] | None:
        """The times of a model, or None if the process has failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.ready():
            return None
        try:
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def rates(name: str, times: dict[str, float]) -> dict[str, int]:
    """TFLOP/s of each part."""
    hidden, width, _, rows, _, _ = MODELS[name]
    flop = 2 * rows * hidden * width / 1e6  # of one matmul; a time in us makes it TFLOP/s
    return {part: round(MATMULS[part] * flop / times[part]) for part in PARTS}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"| model, TFLOP/s | {' | torch | '.join(PARTS)} | torch |", "|---|" + "---:|" * 2 * len(PARTS)]
    for row in rows:
        cells = [str(row.get(side, {}).get(part, "")) for part in PARTS for side in ("TFLOP/s", "torch, TFLOP/s")]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines


def compare(names: list[str], write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Measures the models one after the other, and returns their rows. After each model it calls `write` with all rows
    so far."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as running:
        theirs, *sides = [running.enter_context(Side(name)) for name in (None, *names)]
        for side in (*sides, theirs):  # nothing else uses the cores or the GPU while one process measures
            side.ready()
        for side in sides:
            rows.append(measured(side, theirs))
            print(f"{rows[-1]['model']}: {rows[-1]}", file=sys.stderr, flush=True)
            write(rows)
    return rows


def measured(side: Side, theirs: Side) -> dict[str, Any]:
    """Returns the row of a model: this library's times, and torch's."""
    assert side.name is not None
    row: dict[str, Any] = {"model": side.name}
    sides = {"": side, "torch, ": theirs}
    rounds: list[dict[str, dict[str, float] | None]] = []
    for _ in range(ROUNDS):
        rounds.append({key: one.measured(side.name) for key, one in sides.items()})
    side.end()  # and gives its memory back
    for key in sides:
        times = [found for one in rounds if (found := one[key]) is not None]
        if times:
            us = {part: round(statistics.median(one[part] for one in times), 1) for part in PARTS}
            row |= {f"{key}us": us, f"{key}TFLOP/s": rates(side.name, us)}
    return row


def machine() -> str | None:
    """The GPU's name. This process leaves the GPU's memory to the others, so that it does not ask JAX."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=None, metavar="MODEL")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # in the processes of `Side`
    options = parser.parse_args()
    if options.serve:
        serve(options.only[0] if options.only else None)
        return 0
    found: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
    }

    def write(rows: list[dict[str, Any]]) -> None:
        if options.json:  # other commands keep rows in the same file
            kept = json.loads(options.json.read_text()) if options.json.exists() else {}
            options.json.write_text(json.dumps(kept | found | {"rows": rows}, indent=1) + "\n")

    rows = compare(options.only or list(MODELS), write)
    print("\n".join(table(rows)))
    return int(not all("us" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
