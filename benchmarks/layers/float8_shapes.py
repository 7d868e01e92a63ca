"""Experts in fp8 on one Hopper GPU beside the same experts in bfloat16 and `torch._scaled_grouped_mm`.

    python benchmarks/layers/float8_shapes.py --json benchmarks/results/model_shapes_h100.json [--only NAME ...]

A line has the experts of one rank with random groups, as `model_shapes`. Parts: gate and up with the activation, and
down, both of operands that are quantized already; the forward pass and all gradients, from rows as an fp8 wire brings
them and weights in bfloat16, which each call quantizes, or which `xm.quantize_weights` has quantized ("quantized
once"); `moe_mlp` on one rank, of an eighth as many tokens, with top-8 and an fp8 wire. TFLOP/s count the
multiplications of the matmuls alone. A time is the median of rounds in which all parts take turns, each with several
calls queued at once, since a GPU's first milliseconds under load are faster than the rest. torch multiplies gate and up
as one matmul with a scale a row, without an activation. With `--kernels` the time of each kernel of a part is written,
too.

Rows of the key "float8" of the JSON file are replaced. Several processes may share it, each with some of the parts and
all with one `--lock`: they compile side by side and measure one after the other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.layers.model_shapes import MODELS, machine, sizes_of
from benchmarks.lib import turns

NAMES = (
    "H 4096, I 1536, 16 experts",
    "H 4096, I 1536, 64 experts",
    "Qwen3-30B-A3B",
    "DeepSeek-V3, 32 experts",
)
MATMULS = {"gate and up": 2, "down": 1, "gradient of gate": 1, "forward": 3, "forward and backward": 9}
"""Matmuls of each part. Parts that only quantize have none."""
TOP_K = 8
CALLS, ROUNDS = 5, 7


def medians_us(calls: Mapping[str, Callable[[], Any]], wait: Callable[[Any], Any]) -> dict[str, float]:
    """Returns the median over `ROUNDS` of each call's time in us. In a round `CALLS` of each are queued at once."""
    times: dict[str, list[float]] = {part: [] for part in calls}
    for _ in range(ROUNDS):
        for part, call in calls.items():
            times[part] += turns.queued(call, (), CALLS, 1, wait)
    return {part: statistics.median(each) for part, each in times.items()}


def programs(name: str) -> tuple[Callable[[], Any], dict[str, tuple[Callable[..., Any], tuple[str, ...]]]]:
    """Returns a function that draws the operands of a model by name, and for every part a function and the names of its
    operands."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import xen_moe_jax as xm
    from xen_moe_jax.experts import hopper, hopper_float8
    from xen_moe_jax.pallas_kernels.hopper import float8_contraction, float8_quantize, float8_rows

    hidden, width, experts, rows, kind, _ = MODELS[name]
    matrices = ("gate", "up", "down")
    activation = dataclasses.replace(hopper.SWIGLU, name=kind)
    tiles = hopper_float8.TILES

    def draw() -> dict[str, Any]:
        keys = iter(jax.random.split(jax.random.key(0), 9))

        def normal(*shape: int) -> jax.Array:
            return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

        x, inner, tokens = normal(rows, hidden), normal(rows, width), normal(rows // TOP_K, hidden)
        sizes = jnp.asarray(sizes_of(experts, rows), jnp.int32)
        scores = jax.random.uniform(next(keys), (rows // TOP_K, experts))
        topk_weights, topk_idx = jax.lax.top_k(scores, TOP_K)
        gate, up, down = normal(experts, hidden, width), normal(experts, hidden, width), normal(experts, width, hidden)
        return {
            "x": x,
            "inner": inner,
            "gate": gate,
            "up": up,
            "down": down,
            "sizes": sizes,
            "tokens": tokens,
            "idx": topk_idx.astype(jnp.int32),
            "weights": topk_weights,
            "arrived": xm.quantize(x),
        }

    def quantized(drawn: dict[str, Any]) -> dict[str, Any]:
        run = functools.partial(float8_quantize.weights, product=True, gradient=False)
        of = {f"{n} in fp8": run(drawn[n])[0] for n in ("gate", "up", "down")}
        of["codes"] = xm.quantize_weights(tuple(drawn[n] for n in matrices))
        of |= {f"{n} by columns": columns(drawn[n], drawn["sizes"]) for n in ("x", "inner")}
        return drawn | of | {f"{n} in fp8": float8_quantize.rows(drawn[n]) for n in ("x", "inner")}

    def columns(x: Any, sizes: Any) -> Any:
        return float8_quantize.columns(x, float8_quantize.blocks_of_groups(sizes, rows)[0])

    def rows_and_columns(x: Any, sizes: Any) -> Any:
        return float8_quantize.both(x, float8_quantize.blocks_of_groups(sizes, rows)[0])

    def by_weight(x: Any, inner: Any, sizes: Any) -> Any:
        blocks = float8_quantize.blocks_of_groups(sizes, rows)[1]
        given: dict[str, Any] = {"height": hidden, "width": width, "dtype": jnp.bfloat16, "tiles": tiles}
        return float8_contraction.rows_by_rows(x, inner, blocks, **given)

    def first(x: Any, gate: Any, up: Any, sizes: Any) -> Any:
        return hopper.activated(x, (gate, up), sizes, activation=activation)

    def bf16(x: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        return hopper.grouped_matmul(first(x, gate, up, sizes), down, sizes)

    def fp8(x: Any, arrived: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        return hopper_float8.experts(activation, x, arrived, (gate, up), down, sizes)

    def first_fp8(rows: Any, gate: Any, up: Any, sizes: Any) -> Any:
        return float8_rows.activated_rows(
            rows, (gate, up), sizes, width=width, activation=activation, projections=None, tiles=tiles
        )

    def matmuls_fp8(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        inner, _ = first_fp8(rows, gate, up, sizes)
        return last_fp8(inner, down, sizes)

    def last_fp8(inner: Any, down: Any, sizes: Any) -> Any:
        return float8_rows.rows_by_weights(((inner, down),), sizes, columns=hidden, dtype=jnp.bfloat16, tiles=tiles)

    def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, gate: Any, up: Any, down: Any, *rest: Any) -> Any:
            out, pull = jax.vjp(lambda *given: function(*given, *rest), x, gate, up, down)
            return out, pull(jnp.cos(out) if out.shape != x.shape else x)

        return run

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `with_gradients(function)` with weights that are quantized already: their codes are its last
        operand."""

        def run(*operands: Any) -> Any:
            *given, codes = operands

            def by_codes(x: Any, gate: Any, up: Any, down: Any, *rest: Any) -> Any:
                return function(x, *(code.of(w) for code, w in zip(codes, (gate, up, down), strict=True)), *rest)

            return with_gradients(by_codes)(*given)

        return run

    def fp8_of(x: Any, gate: Any, up: Any, down: Any, arrived: Any, sizes: Any) -> Any:
        return fp8(x, arrived, gate, up, down, sizes)

    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def layer(**options: Any) -> Callable[..., Any]:
        def body(tokens: Any, gate: Any, up: Any, down: Any, idx: Any, weights: Any) -> Any:
            at: dict[str, Any] = {"num_experts": experts, "axis_name": "ep", "activation": kind}
            return xm.moe_mlp(tokens, idx, weights, gate, up, down, **at, **options)

        return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

    def of_fp8(tokens: Any, gate: Any, up: Any, down: Any, *routing: Any) -> Any:
        """The layer with weights in fp8 `[L, B, A]`; XLA leaves both transpositions out."""

        def kept(weight: Any) -> Any:
            values, scales = (a.swapaxes(1, 2) for a in (weight.values, weight.scales))
            return xm.QuantizedWeight(values, scales, (float8_rows.BLOCK,) * 2)

        return layer(**in_fp8)(tokens, kept(gate), kept(up), kept(down), *routing)

    in_fp8: dict[str, Any] = {"experts": "float8_e4m3fn", "wire": "float8_e4m3fn"}
    of_layer = ("tokens", "gate", "up", "down", "idx", "weights")
    q = {n: f"{n} in fp8" for n in ("x", "inner", *matrices)}
    parts: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
        "gate and up": (first_fp8, (q["x"], q["gate"], q["up"], "sizes")),
        "down": (last_fp8, (q["inner"], q["down"], "sizes")),
        "gradient of gate": (by_weight, ("x by columns", "inner by columns", "sizes")),
        "forward, quantized": (matmuls_fp8, (q["x"], q["gate"], q["up"], q["down"], "sizes")),
        "forward": (fp8_of, ("x", *matrices, "arrived", "sizes")),
        "forward and backward": (with_gradients(fp8_of), ("x", *matrices, "arrived", "sizes")),
        "forward and backward, quantized once": (once(fp8_of), ("x", *matrices, "arrived", "sizes", "codes")),
        "layer": (layer(**in_fp8), of_layer),
        "layer, weights in fp8": (of_fp8, ("tokens", q["gate"], q["up"], q["down"], "idx", "weights")),
        "layer, gradients": (with_gradients(layer(**in_fp8)), of_layer),
        "layer, gradients, quantized once": (once(layer(**in_fp8)), (*of_layer, "codes")),
        "gate and up, bf16": (first, ("x", "gate", "up", "sizes")),
        "down, bf16": (hopper.grouped_matmul, ("inner", "down", "sizes")),
        "forward, bf16": (bf16, ("x", *matrices, "sizes")),
        "forward and backward, bf16": (with_gradients(bf16), ("x", *matrices, "sizes")),
        "layer, bf16": (layer(), of_layer),
        "layer, gradients, bf16": (with_gradients(layer()), of_layer),
        "quantize rows": (float8_quantize.rows, ("x",)),
        "quantize weights": (functools.partial(float8_quantize.weights, product=True, gradient=True), ("gate",)),
        "quantize columns": (columns, ("x", "sizes")),
        "quantize rows and columns": (rows_and_columns, ("x", "sizes")),
        "quantize columns again": (columns, (q["x"], "sizes")),
    }
    return lambda: jax.jit(lambda: quantized(draw()))(), parts


def torch_times(name: str) -> dict[str, float]:
    """Times in us of `torch._scaled_grouped_mm`, with a scale a row and a column."""
    import torch

    hidden, width, experts, rows, _, _ = MODELS[name]
    ends = torch.tensor(sizes_of(experts, rows), device="cuda").cumsum(0).to(torch.int32)

    def call_of(depth: int, columns: int) -> Callable[[], Any]:
        x = torch.randn(rows, depth, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(experts, columns, depth, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scales = torch.rand(rows, device="cuda"), torch.rand(experts, columns, device="cuda")

        def run() -> Any:
            return torch._scaled_grouped_mm(
                x, w.transpose(1, 2), *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return run

    calls = {"gate and up, torch": call_of(hidden, 2 * width), "down, torch": call_of(width, hidden)}
    found = medians_us(calls, lambda _: torch.cuda.synchronize())
    calls.clear()
    torch.cuda.empty_cache()
    return found


def rate(name: str, part: str, us: float) -> int | None:
    """Returns the TFLOP/s of a part that took `us`, or None where it has no matmuls."""
    hidden, width, _, rows, _, _ = MODELS[name]
    if part.startswith("layer, gradients"):
        part = "forward and backward"
    elif part.startswith(("layer", "forward,")):
        part = "forward"
    count = MATMULS.get(part.split(",")[0])
    return count and round(count * 2 * rows * hidden * width / 1e6 / us)


def measured(
    name: str,
    only: list[str] | None,
    profiled: bool,
    alone: Callable[[], Any],
    write: Callable[..., None],
) -> None:
    """Compiles the parts of a model, then measures them; `write` gets the model, the time of each part, and those of
    its kernels where they are `profiled`."""
    import jax

    from benchmarks.lib.profile import kernels

    draw, parts = programs(name)
    shapes = jax.eval_shape(draw)

    def compiled(part: str) -> Any:
        function, given = parts[part]
        try:
            return jax.jit(function).lower(*(shapes[n] for n in given)).compile()
        except Exception as error:
            return error

    chosen = [part for part in parts if only is None or part in only]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ready = dict(zip(chosen, pool.map(compiled, chosen), strict=True))
    with alone():
        operands, calls = draw() if chosen else {}, {}
        for part, program in ready.items():
            if isinstance(program, Exception):
                print(f"{name}: {part}: {program!r}"[:2000], file=sys.stderr, flush=True)
                continue
            calls[part] = functools.partial(program, *(operands[n] for n in parts[part][1]))
        write(name, medians_us(calls, jax.block_until_ready))
        for part, call in calls.items() if profiled else ():
            write(name, {}, {part: kernels(call)})
        del operands, calls
        if only is None or "torch" in only:
            write(name, torch_times(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="MODEL")
    parser.add_argument("--parts", nargs="+", default=None, metavar="PART", help='"torch" is one of them')
    parser.add_argument("--kernels", action="store_true", help="the time of each kernel, too")
    parser.add_argument("--lock", help="processes with this file measure one after the other")
    options = parser.parse_args()

    def write(name: str, times: dict[str, float], kernels: dict[str, dict[str, float]] | None = None) -> None:
        for part, us in times.items():
            print(f"{name}: {part}: {us:.0f} us, {rate(name, part, us)} TFLOP/s", flush=True)
        for part, each in (kernels or {}).items():
            print(f"{name}: {part}: {each}", flush=True)
        if not options.json:
            return
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        entry = found.setdefault("float8", {"rows": {}})
        entry["command"], entry["machine"] = "python benchmarks/layers/float8_shapes.py", machine()
        entry["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for part, us in times.items():
            row = {"us": round(us, 1)} | ({"TFLOP/s": rate(name, part, us)} if rate(name, part, us) else {})
            entry["rows"].setdefault(name, {})[part] = row
        for part, each in (kernels or {}).items():
            entry["rows"].setdefault(name, {}).setdefault(part, {})["kernels, us"] = each
        options.json.write_text(json.dumps(found, indent=1) + "\n")

    for name in options.only:
        measured(name, options.parts, options.kernels, functools.partial(turns.alone, options.lock), write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
