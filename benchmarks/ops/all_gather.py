"""`xm.all_gather` (in jitted loops) and `xm.all_gather_matmul` (call by call) beside JAX's own operations.

python -m benchmarks all-gather --platform gpu --json benchmarks/results/all_gather.json
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.lib import report
from xen_moe_jax.tuning import arguments

WINDOWED = {"xla_gpu_threshold_for_windowed_einsum_mib": 0, "xla_gpu_multi_streamed_windowed_einsum": True}
"""Flags for XLA's own collective matmul: the partitioner cuts the product of a gathered operand into steps."""


def repeated(step: Callable[..., jax.Array], inner: int, unroll: int) -> Callable[..., jax.Array]:
    """Returns a function that calls `step(x, *fixed)` `inner` times, `unroll` times in each turn of a loop.

    One element of each `x` comes from the result of the call before, so that XLA can neither merge nor reorder calls.
    """

    def calls(x: jax.Array, *fixed: jax.Array) -> jax.Array:
        def turn(_: Any, x: jax.Array) -> jax.Array:
            for _ in range(unroll):
                out = step(x, *fixed)
                last = lax.slice(out, [n - 1 for n in out.shape], out.shape).reshape((1,) * x.ndim)
                x = lax.optimization_barrier(lax.dynamic_update_slice(x, last.astype(x.dtype), (0,) * x.ndim))
            return x

        return lax.fori_loop(0, inner // unroll, turn, x)

    return calls


def microseconds(programs: dict[str, tuple[Any, tuple[Any, ...]]], inner: int, repeats: int) -> dict[str, list[float]]:
    """Returns the times of each program in ascending order, in microseconds for each of its `inner` calls.

    The programs take turns in every repeat, and the first turn of each is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, (program, operands) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*operands))
            if repeat:
                times[name].append((time.perf_counter() - began) * 1e6 / inner)
    return {name: sorted(found) for name, found in times.items()}


def _compiled(lowered: list[Any]) -> list[Any]:
    """Compiles the programs side by side."""
    with futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


def _placed(
    mesh: Any, seed: int, shape: tuple[int, ...], spec: Any, scale: float = 1.0, dtype: Any = "bfloat16"
) -> Any:
    """Random numbers, made on the devices."""
    sharding = jax.NamedSharding(mesh, spec)
    make = lambda key: (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)  # noqa: E731
    return jax.jit(make, out_shardings=sharding)(jax.random.key(seed))


def gathers(mesh: Any, rows: int, hidden: int, wires: list[str | None], options: Any) -> list[dict[str, Any]]:
    """Returns a record for each way to gather bfloat16 `[rows, hidden]` of every rank: times in microseconds, and the
    bytes that a rank receives a second."""
    ranks = mesh.size
    x = _placed(mesh, rows, (ranks * rows, hidden), P("ep"))
    ways: dict[str, Callable[..., jax.Array]] = {
        f"xm.all_gather{'' if wire is None else f' wire={wire}'}": functools.partial(
            xm.all_gather, axis_name="ep", tiled=True, wire=wire
        )
        for wire in wires
    }
    tuned: list[dict[str, Any]] = [{"mode": mode} for mode in options.modes]
    tuned += [{"num_sms": count} for count in options.num_sms]
    for field in tuned:
        ((name, value),) = field.items()
        config = xm.KernelConfig(**field)
        ways[f"xm.all_gather {name}={value}"] = functools.partial(
            xm.all_gather, axis_name="ep", tiled=True, config=config
        )
    ways["jax.lax.all_gather"] = functools.partial(lax.all_gather, axis_name="ep", tiled=True)
    ways["the loop alone"] = lambda x: x
    inner = options.inner or (1000 if rows <= 512 else 100)
    unroll = math.gcd(10, inner)
    spec = {"mesh": mesh, "in_specs": P("ep"), "out_specs": P("ep")}
    lowered = [jax.jit(jax.shard_map(repeated(step, inner, unroll), **spec)).lower(x) for step in ways.values()]
    programs = {name: (program, (x,)) for name, program in zip(ways, _compiled(lowered), strict=True)}
    _check_gathers(mesh, x, ways)
    times = microseconds(programs, inner, options.repeats)
    received = (ranks - 1) * rows * hidden * 2
    return [
        {
            "operation": "all_gather",
            "rows": rows,
            "hidden": hidden,
            "name": name,
            "microseconds": found[len(found) // 2],
            "fastest": found[0],
            "slowest": found[-1],
            "gb_per_s": received / found[len(found) // 2] * 1e-3,
        }
        for name, found in times.items()
    ]


def _check_gathers(mesh: Any, x: jax.Array, ways: dict[str, Callable[..., jax.Array]]) -> None:
    """Raises AssertionError unless every way without a wire gives the bits of `jax.lax.all_gather`."""

    def all_equal(x: jax.Array) -> jax.Array:
        expected = lax.all_gather(x, "ep", tiled=True)
        exact = [step for name, step in ways.items() if "wire" not in name and "loop" not in name]
        return jnp.stack([jnp.array_equal(step(x), expected) for step in exact])[None]

    equal = jax.jit(jax.shard_map(all_equal, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x)
    if not np.asarray(equal).all():
        raise AssertionError(f"all_gather differs from jax.lax.all_gather: {np.asarray(equal)}")


def matmuls(mesh: Any, shape: Sequence[int], options: Any) -> list[dict[str, Any]]:
    """Returns a record for each way to gather `[rows, depth]` of every rank and to multiply by `[depth, columns]`.

    `shape` has these three sizes. The host queues calls one after the other: a call lasts longer than the host needs to
    queue it.
    """
    (rows, depth, columns), ranks = shape, mesh.size
    specs: dict[str, Any] = {"in_specs": (P("ep"), P(None, "ep")), "out_specs": P(None, "ep")}
    x = _placed(mesh, 1, (ranks * rows, depth), P("ep"))
    w = _placed(mesh, 2, (depth, ranks * columns), P(None, "ep"), scale=depth**-0.5)
    whole = _placed(mesh, 3, (ranks * ranks * rows, depth), P("ep"))
    ours = functools.partial(xm.all_gather_matmul, axis_name="ep")
    ways: dict[str, tuple[Any, jax.Array]] = {
        "xm.all_gather_matmul": (ours, x),
        "xm.all_gather, then matmul": (lambda x, w: jnp.matmul(xm.all_gather(x, "ep", tiled=True), w), x),
        "jax.lax.all_gather, then matmul": (lambda x, w: jnp.matmul(lax.all_gather(x, "ep", tiled=True), w), x),
        "the matmul alone": (jnp.matmul, whole),
    }
    for count in options.num_sms:
        ways[f"xm.all_gather_matmul num_sms={count}"] = (
            functools.partial(ours, config=xm.KernelConfig(num_sms=count)),
            x,
        )
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    lowered = [jax.jit(jax.shard_map(step, mesh=mesh, **specs)).lower(operand, w) for step, operand in ways.values()]
    for (name, (_, operand)), program in zip(ways.items(), _compiled(lowered), strict=True):
        programs[name] = (program, (operand, w))
    auto = jax.make_mesh((ranks,), ("ep",), devices=mesh.devices.ravel(), axis_types=(jax.sharding.AxisType.Auto,))
    given = tuple(jax.device_put(a, jax.NamedSharding(auto, a.sharding.spec)) for a in (x, w))
    partitioned = jax.jit(jnp.matmul, out_shardings=jax.NamedSharding(auto, P(None, "ep"))).lower(*given)
    for name, flags in (("XLA's collective matmul", WINDOWED), ("XLA's partitioner", {})):
        try:
            programs[name] = (partitioned.compile(compiler_options=flags), given)
        except Exception as error:  # a flag that this XLA does not have
            arguments.progress(f"{name}: {error}")
    bits = _matmul_bits(mesh, x, w, ours, ways["xm.all_gather, then matmul"][0])
    inner = options.inner or 20
    times = microseconds({n: (_queued(p, inner), o) for n, (p, o) in programs.items()}, inner, options.repeats)
    alone = statistics.median(times["the matmul alone"])
    return [
        {
            "operation": "all_gather_matmul",
            "rows": rows,
            "hidden": depth,
            "columns": columns,
            "name": name,
            "microseconds": statistics.median(found),
            "fastest": found[0],
            "slowest": found[-1],
            "of the matmul alone": statistics.median(found) / alone,
            "elements with the bits of the composition": bits,
        }
        for name, found in times.items()
    ]


def _queued(program: Any, calls: int) -> Callable[..., jax.Array]:
    """Returns a function that queues `program` as many times, and returns the last result."""

    def run(*operands: jax.Array) -> jax.Array:
        for _ in range(calls):
            out = program(*operands)
        return out

    return run


def _matmul_bits(mesh: Any, x: jax.Array, w: jax.Array, ours: Any, composed: Any) -> float:
    """Returns the share of elements with the bits of the composition, on the rank where it is least."""

    def equal(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.mean((ours(x, w) == composed(x, w)).astype(jnp.float32))[None]

    shares = jax.jit(jax.shard_map(equal, mesh=mesh, in_specs=(P("ep"), P(None, "ep")), out_specs=P("ep")))(x, w)
    return float(np.min(np.asarray(shares)))


def main() -> None:
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--platform", choices=("gpu", "cpu"), help="JAX chooses unless given")
    parser.add_argument("--ranks", type=int, default=None, help="devices; all of them unless given")
    parser.add_argument("--rows", type=int, nargs="*", default=[128, 1, 16, 4096], help="rows of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--wires", nargs="*", default=["float8_e4m3fn"], help="formats to gather through, too")
    parser.add_argument("--modes", nargs="*", default=[], help="modes of KernelConfig to time beside 'auto'")
    parser.add_argument("--num-sms", type=int, nargs="*", default=[], help="thread blocks to time beside the default")
    parser.add_argument(
        "--matmul", type=int, nargs=3, action="append", metavar=("ROWS", "DEPTH", "COLUMNS"), default=None,
        help="shapes of all_gather_matmul, of each rank",
    )  # fmt: skip
    parser.add_argument("--only", choices=("all_gather", "all_gather_matmul"))
    parser.add_argument("--inner", type=int, default=0, help="calls of a loop; 0: by the size")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    arguments.start_jax(options.platform, options.ranks)
    devices = jax.devices()[: options.ranks]
    mesh = jax.make_mesh((len(devices),), ("ep",), devices=devices)
    results: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> None:
        for row in found:
            ratio = row.get("of the matmul alone")
            last = f"{row['gb_per_s']:9.1f} GB/s" if ratio is None else f"{ratio:9.3f} of the matmul alone"
            print(
                f"{row['operation']:18} {row['rows']:6} x {row['hidden']:<6} {row['name']:36} "
                f"{row['microseconds']:10.2f} us ({row['fastest']:.2f} to {row['slowest']:.2f}) {last}",
                flush=True,
            )
        results.extend(found)

    for rows in options.rows if options.only != "all_gather_matmul" else []:
        keep(gathers(mesh, rows, options.hidden, [None, *options.wires], options))
    for shape in (options.matmul or [(4096, 4096, 7168)]) if options.only != "all_gather" else []:
        keep(matmuls(mesh, shape, options))
    if options.json:
        report.write_json(options.json, {**report.header(["all-gather", *sys.argv[1:]], None), "results": results})


if __name__ == "__main__":
    main()
