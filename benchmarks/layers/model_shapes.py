"""The experts of published models on one Hopper GPU: this library's grouped matmuls beside `torch._grouped_mm`.

    python benchmarks/layers/model_shapes.py --json benchmarks/results/model_shapes_h100.json [--only gpt-oss-120b]

A line has the experts of one rank with 8,192 to 32,768 rows in random groups (`MODELS`): gate and up with the
activation, down, and both with all gradients. TFLOP/s count the multiplications of the matmuls alone. A time is the
median of repeats, each of several calls queued at once. torch multiplies gate and up as one matmul, without activation
and biases.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, REPEATS = 5, 5
MODELS: dict[str, tuple[int, int, int, int, str, bool]] = {
    # hidden, width, experts of the rank, rows, activation, biases
    "H 4096, I 1536, 16 experts": (4096, 1536, 16, 32768, "swiglu", False),
    "H 4096, I 1536, 64 experts": (4096, 1536, 64, 32768, "swiglu", False),
    "Mixtral 8x7B": (4096, 14336, 4, 8192, "swiglu", False),
    "Qwen3-30B-A3B": (2048, 768, 64, 32768, "swiglu", False),
    "Qwen3-235B-A22B": (4096, 1536, 32, 32768, "swiglu", False),
    "Qwen3-Next": (2048, 512, 128, 32768, "swiglu", False),
    "DeepSeek-V3, 32 experts": (7168, 2048, 32, 32768, "swiglu", False),
    "gpt-oss-20b": (2880, 2880, 16, 16384, "clipped_swiglu", True),
    "gpt-oss-120b": (2880, 2880, 64, 16384, "clipped_swiglu", True),
    "OLMoE": (2048, 1024, 32, 32768, "swiglu", False),
    "GLM-4.5": (5120, 1536, 32, 32768, "swiglu", False),
    "Kimi K2, 32 experts": (7168, 2048, 32, 16384, "swiglu", False),
    "Llama 4 Scout": (5120, 8192, 8, 8192, "swiglu", False),
}


def sizes_of(experts: int, rows: int) -> list[int]:
    """Returns random group sizes that add up to `rows`."""
    import numpy as np

    return np.random.default_rng(0).multinomial(rows, [1 / experts] * experts).tolist()


def median_us(call: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    wait(call())
    wait(call())
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            out = call()
        wait(out)
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(times)


def ours(name: str) -> dict[str, float]:
    """Times in us of a model's forward matmuls and of its forward and backward pass."""
    import jax
    import jax.numpy as jnp

    from xen_moe_jax.flax import hopper
    from xen_moe_jax.pallas_kernels.hopper.activations import Activation

    hidden, width, experts, rows, kind, biased = MODELS[name]
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    sizes = jnp.asarray(sizes_of(experts, rows), jnp.int32)
    x, gate, up = draw(rows, hidden), draw(experts, hidden, width), draw(experts, hidden, width)
    down = draw(experts, width, hidden)
    biases = (draw(experts, width), draw(experts, width)) if biased else None
    last = draw(experts, hidden) if biased else None

    @jax.jit
    def first(x: Any, gate: Any, up: Any, biases: Any) -> Any:
        return hopper.activated(x, (gate, up), sizes, biases, activation=Activation(kind))

    @jax.jit
    def second(x: Any, down: Any, last: Any) -> Any:
        return hopper.grouped_matmul(x, down, sizes, bias=last)

    @jax.jit
    def both(operands: Any, cotangent: Any) -> Any:
        def experts_of(x: Any, gate: Any, up: Any, down: Any, biases: Any, last: Any) -> Any:
            return second(first(x, gate, up, biases), down, last)

        out, pull = jax.vjp(experts_of, *operands)
        return out, pull(cotangent)

    inner, operands, wait = first(x, gate, up, biases), (x, gate, up, down, biases, last), jax.block_until_ready
    times = {
        "gate and up, us": median_us(lambda: first(x, gate, up, biases), wait),
        "down, us": median_us(lambda: second(inner, down, last), wait),
        "forward and backward, us": median_us(lambda: both(operands, x), wait),
    }
    print(f"{name}: {times}", file=sys.stderr, flush=True)
    return times


def torch_times(name: str) -> dict[str, float]:
    """Times in us of `torch._grouped_mm` for a model's two forward matmuls."""
    import torch

    hidden, width, experts, rows, _, _ = MODELS[name]
    ends = torch.tensor(sizes_of(experts, rows), device="cuda").cumsum(0).to(torch.int32)

    def time_of(depth: int, columns: int) -> float:
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(experts, columns, depth, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return median_us(lambda: torch._grouped_mm(x, w, offs=ends), lambda _: torch.cuda.synchronize())

    return {"gate and up, us": time_of(hidden, 2 * width), "down, us": time_of(width, hidden)}


def table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| model | gate and up, TFLOP/s | torch | down, TFLOP/s | torch | forward and backward, TFLOP/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, mine in found["ours"].items():
        hidden, width, _, rows, _, _ = MODELS[name]
        flop = 2 * rows * hidden * width / 1e6  # of one matmul; a time in us makes it TFLOP/s
        theirs = found["torch"].get(name, {})

        def rate(times: dict[str, float], what: str, count: int, flop: float = flop) -> str:
            return f"{count * flop / times[what]:.0f}" if what in times else ""

        cells = [
            rate(side, what, count)
            for what, count in (("gate and up, us", 2), ("down, us", 1))
            for side in (mine, theirs)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {rate(mine, 'forward and backward, us', 9)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--side", choices=("ours", "torch"), help="measure one side and print it as JSON")
    options = parser.parse_args()
    if options.side:
        measure = ours if options.side == "ours" else torch_times
        print(json.dumps({name: measure(name) for name in options.only}))
        return 0
    found: dict[str, Any] = {"command": "python " + " ".join(sys.argv), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ")}
    for side in ("ours", "torch"):
        command = [sys.executable, __file__, "--side", side, "--only", *options.only]  # each takes the GPU's memory
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=400)
        found[side] = json.loads(done.stdout) if done.returncode == 0 else {}
    print("\n".join(table(found)))
    if options.json:
        import jax

        found["machine"] = jax.devices()[0].device_kind
        found["versions"] = {"jax": jax.__version__}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not (found["ours"] and found["torch"]))


if __name__ == "__main__":
    sys.exit(main())
