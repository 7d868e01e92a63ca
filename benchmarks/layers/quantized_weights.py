"""Experts with few rows and weights as they are shipped, on one Hopper GPU: beside bfloat16 and `torch._grouped_mm`.

    python benchmarks/layers/quantized_weights.py --json benchmarks/results/model_shapes_h100.json [--only DeepSeek-V3]

A line has the experts of one rank (`MODELS`) with 1, 8 or 64 rows each: gate and up, activation, down, in
microseconds, and the share of the rate at which the GPU reads its memory (a reduction over as many bytes). A time is
the median of repeats, each of several passes in one program, every pass with the result of the last one. torch
multiplies gate and up as one matmul, in bfloat16, without activation, as calls queued at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

MODELS: dict[str, tuple[int, int, int]] = {
    # hidden, width, experts of the rank
    "Qwen3-30B-A3B": (2048, 768, 128),
    "gpt-oss-120b, 32 experts": (2880, 2880, 32),
    "DeepSeek-V3, 32 experts": (7168, 2048, 32),
    "Qwen3-30B-A3B, 16 experts": (2048, 768, 16),
}
ROWS = (1, 8, 64)
FORMATS = ("fp8 blocks", "MXFP4", "int8 channels", "bfloat16")
PASSES, REPEATS = 10, 5


def median_us(call: Callable[[], Any], wait: Callable[[Any], None], passes: int = PASSES) -> float:
    """Returns the median over `REPEATS` calls of the time of a pass in us, of which a call has `passes`."""
    wait(call())
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        wait(call())
        times.append((time.perf_counter() - began) / passes * 1e6)
    return statistics.median(times)


def weights_of(name: str, hidden: int, width: int, experts: int) -> dict[str, Any]:
    """Random weights of experts in a format."""
    import jax
    import jax.numpy as jnp

    import xen_moe_jax as xm

    def normal(depth: int, columns: int, seed: int) -> Any:
        shape, key = (experts, depth, columns), jax.random.key(seed)
        if name == "bfloat16":
            return (jax.random.normal(key, shape, jnp.bfloat16) * depth**-0.5).astype(jnp.bfloat16)
        if name == "MXFP4":
            codes = jax.random.bits(key, (experts, depth // 2, columns), jnp.uint8)
            return xm.QuantizedWeight(codes, jnp.full((experts, depth // 32, columns), 121, jnp.uint8), (32, 1))
        block = (128, 128) if name == "fp8 blocks" else (depth, 1)
        scales = jnp.full((experts, -(-depth // block[0]), -(-columns // block[1])), 0.02 * depth**-0.5, jnp.float32)
        values = jnp.clip(jax.random.normal(key, shape, jnp.bfloat16) * 50, -127, 127)
        dtype = "float8_e4m3fn" if name == "fp8 blocks" else "int8"
        return xm.QuantizedWeight(values.astype(dtype), scales, block)

    sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    return {n: jax.jit(functools.partial(normal, *size, seed))() for seed, (n, size) in enumerate(sizes.items())}


def ours(weights: dict[str, Any], rows: int, hidden: int, experts: int) -> float:
    """Returns the time in us of the experts of a rank, with `rows` rows each."""
    import jax
    import jax.numpy as jnp

    from xen_moe_jax.experts.function import ExpertFunction
    from xen_moe_jax.experts.mlp import grouped_experts

    x = jax.random.normal(jax.random.key(9), (rows * experts, hidden), jnp.bfloat16)
    sizes = jnp.full((experts,), rows, jnp.int32)

    @jax.jit
    def run(x: Any, weights: Any) -> Any:
        def one(_: Any, x: Any) -> Any:
            return grouped_experts(ExpertFunction(), x, sizes, weights)

        return jax.lax.fori_loop(0, PASSES, one, x)

    return median_us(lambda: run(x, weights), jax.block_until_ready)


def reading_rate(nbytes: int) -> float:
    """Returns the bytes a microsecond at which a reduction reads `PASSES` times `nbytes`."""
    import jax
    import jax.numpy as jnp

    data = jnp.ones((PASSES, nbytes // 4 // 4096, 4096), jnp.uint32)

    @jax.jit
    def run(data: Any) -> Any:
        return jnp.max(data)

    total = data.nbytes
    return total / median_us(lambda: run(data), jax.block_until_ready, 1)


def torch_time(rows: int, hidden: int, width: int, experts: int) -> float:
    """Time in us of the matmuls of experts by `torch._grouped_mm` in bfloat16."""
    import torch

    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
    x = torch.randn(rows * experts, hidden, device="cuda", dtype=torch.bfloat16)
    inner = torch.randn(rows * experts, width, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(experts, 2 * width, hidden, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    down = torch.randn(experts, hidden, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def passes() -> None:
        for _ in range(PASSES):
            torch._grouped_mm(x, both, offs=ends)
            torch._grouped_mm(inner, down, offs=ends)

    return median_us(passes, lambda _: torch.cuda.synchronize())


def nbytes_of(weights: dict[str, Any]) -> int:
    """Returns the bytes of all weights, with their scales."""
    return sum(weight.nbytes for weight in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="adds the lines to this file, under 'quantized weights'")
    parser.add_argument("--only", action="append", help="begin of a model's name; may be given several times")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows an expert (default: 1 8 64)")
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=FORMATS, help="of the weights (default: all)")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="torch._grouped_mm too")
    options = parser.parse_args()

    import jax

    lines: list[dict[str, Any]] = []
    rate = reading_rate(400 << 20)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; reads {rate / 1e6:.2f} TB/s", flush=True)
    for name, (hidden, width, experts) in MODELS.items():
        if options.only and not any(name.startswith(only) for only in options.only):
            continue
        for kind in options.formats:
            weights = weights_of(kind, hidden, width, experts)
            for rows in options.rows:
                us = ours(weights, rows, hidden, experts)
                share = nbytes_of(weights) / us / rate
                lines.append(
                    {"model": name, "weights": kind, "rows": rows, "us": round(us, 1), "share": round(share, 3)}
                )
                print(f"{name:28s} {kind:14s} {rows:3d} rows: {us:8.1f} us, {share:.2f} of reading", flush=True)
            del weights
        for rows in options.rows if options.torch else ():
            us = torch_time(rows, hidden, width, experts)
            lines.append({"model": name, "weights": "torch, bfloat16", "rows": rows, "us": round(us, 1)})
            print(f"{name:28s} torch bf16     {rows:3d} rows: {us:8.1f} us", flush=True)
        if options.json:
            whole = json.loads(options.json.read_text()) if options.json.exists() else {}
            device = jax.devices()[0].device_kind
            whole["quantized weights"] = {
                "device": device, "jax": jax.__version__, "reads_TBps": round(rate / 1e6, 3), "lines": lines,
            }  # fmt: skip
            options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
