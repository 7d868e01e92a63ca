"""Times `xen_moe_jax.flax.nnx.MoE` as a user writes it, on every device of the host: forward, and with all gradients.

    python -m benchmarks nnx-layer --json benchmarks/results/nnx_layer_h200x2.json

Router, balancing loss, dispatch, experts and combine are the layer's own; only the fields of `MoEConfig` that a plan
names differ from the defaults. Tokens are bfloat16; weights are float32, as the layer makes them. A time is that of
`--inner` calls queued at once, divided by their number. Every plan's output is compared with that of the first, which
drops nothing; one with a capacity says how many rows it dropped, and is not compared where it dropped any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.lib import report, turns
from benchmarks.lib.options import positive
from benchmarks.lib.verify import WrongResultError
from xen_moe_jax.experts import grouped_matmul
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.nnx import MoE
from xen_moe_jax.tuning import timing

DEFAULT = "defaults"
PLANS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "4 chunks": {"num_chunks": 4},
    "4 chunks, remat all": {"num_chunks": 4, "remat": "all"},
    "capacity 1.25": {"capacity_factor": 1.25},
    "capacity 1.25, weights in front": {"capacity_factor": 1.25, "apply_weights_to": "activation"},
    "capacity 1.25, remat experts": {"capacity_factor": 1.25, "remat": "experts"},
}
"""Fields of `MoEConfig` beside the sizes."""
OPERATIONS = ("forward", "forward+backward")
COMPILING = 8
"""Programs at a time."""
TOLERANCE = 0.03
"""Tolerance relative to the largest element, in bfloat16."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=pathlib.Path)
    add("--tokens", type=positive, default=4096, help="of a device")
    add("--hidden", type=positive, default=4096)
    add("--width", type=positive, default=1536, help="of an expert")
    add("--experts", type=positive, default=64)
    add("--top-k", type=positive, default=8)
    add("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="NAME", help=f"of {list(PLANS)}")
    add("--inner", type=positive, default=10, help="calls that are queued at once")
    add("--repeats", type=positive, default=3)
    add("--lock", help="hold this file's lock while measuring: others may compile meanwhile")
    return parser.parse_args(arguments)


def layer_of(options: argparse.Namespace, fields: dict[str, Any]) -> Callable[[], MoE]:
    """Makes the layer of a plan: with the same weights in every plan."""
    config = MoEConfig(
        hidden_size=options.hidden,
        intermediate_size=options.width,
        num_experts=options.experts,
        top_k=options.top_k,
        **fields,
    )
    return lambda: MoE(config, rngs=nnx.Rngs(0))


def programs(build: Callable[[], MoE]) -> dict[str, Any]:
    """`(state, x) -> ...` of each operation."""
    graph = nnx.graphdef(nnx.eval_shape(build))

    def forward(state: Any, x: jax.Array) -> Any:
        y, metrics = nnx.merge(graph, state)(x)
        return y, metrics.num_dropped

    def with_gradients(state: Any, x: jax.Array) -> Any:
        def loss(state: Any, x: jax.Array) -> Any:
            y, metrics = nnx.merge(graph, state)(x)
            wanted = jax.lax.stop_gradient(x).astype(jnp.float32)  # random cotangents, as in training
            return jnp.mean(y.astype(jnp.float32) * wanted) + metrics.aux_loss, metrics.num_dropped

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)

    return {"forward": forward, "forward+backward": with_gradients}


def difference(y: jax.Array, expected: jax.Array) -> float:
    y, expected = y.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.abs(y - expected).max() / jnp.abs(expected).max())


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles all, then measures; returns the JSON document.

    Raises:
      WrongResultError: a plan that dropped nothing differs from the first.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = (jax.device_count() * options.tokens, options.hidden)
    results: list[dict[str, Any]] = []
    with jax.set_mesh(mesh):
        draw = jax.jit(
            lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16),
            out_shardings=jax.NamedSharding(mesh, jax.P("ep")),
        )
        x = draw()
        compiling = {}
        names = list(dict.fromkeys([DEFAULT, *options.plans]))
        state = jax.jit(lambda: nnx.state(layer_of(options, PLANS[DEFAULT])()))()
        with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
            for name in names:
                for operation, function in programs(layer_of(options, PLANS[name])).items():
                    report.progress(f"compiling {name}: {operation}")
                    compiling[name, operation] = pool.submit(jax.jit(function).lower(state, x).compile)
        compiled = {key: program.result() for key, program in compiling.items()}
        with turns.alone(options.lock):
            expected, _ = compiled[DEFAULT, "forward"](state, x)
            for (name, operation), program in compiled.items():
                report.progress(f"{name}: {operation}")
                result, dropped = jax.block_until_ready(program(state, x))
                row = {"name": name, "operation": operation, "dropped": int(dropped)}
                if operation == "forward" and not row["dropped"]:
                    row["max difference"] = difference(result, expected)
                    if not row["max difference"] <= TOLERANCE:
                        raise WrongResultError(
                            f"{name}: differs by {row['max difference']:.2g} of the largest element; "
                            f"{TOLERANCE} is allowed"
                        )
                del result
                taken = turns.queued(program, (state, x), options.inner, options.repeats)
                row |= {"us_median": statistics.median(taken), "us_min": min(taken), "us_max": max(taken)}
                results.append(row | {"memory_bytes": timing.memory_bytes(program)})
    return {
        **report.header([], None),
        "command": shlex.join(["python", "-m", "benchmarks", "nnx-layer", *sys.argv[1:]]),
        "options": {name: getattr(options, name) for name in ("tokens", "hidden", "width", "experts", "top_k")},
        "grouped_matmul": grouped_matmul.describe(jax.default_backend())["choice"],
        "results": results,
    }


def table(document: dict[str, Any]) -> str:
    rows = [
        [
            row["name"],
            row["operation"],
            f"{row['us_median'] / 1e3:.2f}",
            f"{row['us_min'] / 1e3:.2f}..{row['us_max'] / 1e3:.2f}",
            f"{row['memory_bytes'].get('temp', 0) / 2**20:.0f}",
            str(row["dropped"]),
        ]
        for row in document["results"]
    ]
    return report.format_table(["plan", "operation", "ms", "min..max", "temp MiB", "dropped"], rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        document = run(options)
    except WrongResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{report.describe(document)}\n\n{table(document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
