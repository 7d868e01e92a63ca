"""`xen-moe-jax benchmark`: dispatch, combine and their round trip beside `jax.lax.all_to_all`, in seconds.

Each program is compiled, checked where it is a round trip, timed and printed before the next one begins. The folder
`benchmarks/` of the repository measures more: other peers, whole layers, compiled TPU programs, transfers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import Any

from xen_moe_jax.tuning import arguments
from xen_moe_jax.tuning.arguments import positive

COLUMNS = ["program", "operation", "us", "min..max", "vs all_to_all"]
WIDTHS = [29, 10, 10, 20, 13]
ALL_TO_ALL = "padded all_to_all"
SMALL = {"hidden": 256, "experts": 16, "top_k": 2}
"""Sizes on a CPU, where nothing else was asked for: all programs together take seconds."""
TOLERANCE = 2.0**-4
"""Largest error of a bfloat16 round trip, relative to the largest element."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = arguments.Parser(
        prog="xen-moe-jax benchmark",
        description="Times dispatch, combine and their round trip beside jax.lax.all_to_all, and checks the results. "
        "Without arguments it takes seconds on a CPU.",
    )
    add = parser.add_argument
    add("--tokens", type=positive, help="tokens per rank (default 4096; 128 on a CPU)")
    arguments.add_sizes(add)
    add("--ranks", type=positive, help="expert-parallel ranks (default: 8 on a CPU, else every device)")
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")
    add("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    add("--inner", type=positive, help="calls inside one compiled program (default by platform and size)")
    add("--repeats", type=positive, default=5, help="timed runs of each program")
    add("--seed", type=arguments.seed, default=0)
    add("--json", metavar="FILE", help="write the table as JSON too")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 for a wrong result or arguments that cannot be measured, 130 after Ctrl-C."""
    options = build_parser().parse_args(list(sys.argv[1:] if given is None else given))
    from xen_moe_jax import BackendUnavailable

    rows: list[dict[str, Any]] = []
    status = 0
    try:
        if options.platform == "cpu" and (options.ranks or 0) > arguments.MOST_VIRTUAL_DEVICES:
            most = arguments.MOST_VIRTUAL_DEVICES
            raise ValueError(f"--ranks {options.ranks}: must be at most {most} virtual CPU devices")
        if options.json:
            arguments.check_writable("--json", options.json)
        arguments.start_jax(options.platform, options.ranks)
        for row in measured(options):
            rows.append(row)
            print(arguments.table_line(cells(row), WIDTHS), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(rows)} of 4 programs were timed", file=sys.stderr)
        status = 130
    except (ValueError, BackendUnavailable, AssertionError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    if options.json and rows:
        pathlib.Path(options.json).write_text(json.dumps({"results": rows}, indent=1) + "\n")
    return status


def cells(row: dict[str, Any]) -> list[str]:
    """Returns one line of the table."""
    ratio = f"{row['of_all_to_all']:.2f}x" if "of_all_to_all" in row else "-"
    spread = f"{row['us_min']:.1f}..{row['us_max']:.1f}"
    return [row["name"], row["operation"], f"{row['us_median']:.1f}", spread, ratio]


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prints the head of the table and yields one row for each program, as soon as it is known."""
    import jax

    from xen_moe_jax import KernelConfig
    from xen_moe_jax.tuning import peer, programs, timing
    from xen_moe_jax.tuning.problem import make_problem
    from xen_moe_jax.tuning.workload import Workload

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    sizes = arguments.model_sizes(options, SMALL if on_cpu else None)
    tokens = options.tokens or (128 if on_cpu else 4096)
    ranks = options.ranks or jax.device_count()
    problem = make_problem(Workload(tokens=tokens, ranks=ranks, seed=options.seed, **sizes))
    work, caps = problem.work, problem.caps
    own = programs.own_programs(
        work, caps, KernelConfig(backend=options.backend), ("dispatch", "combine", "round trip")
    )
    theirs = peer.peer_round_trip(work, peer.padded_all_to_all(work, caps))
    chosen = [programs.round_trip_program(ALL_TO_ALL, theirs), *own]
    shape = ", ".join(f"{name} {value}" for name, value in (("tokens per rank", tokens), *sizes.items()))
    print(f"{ranks} x {device.device_kind} ({device.platform}): {shape}, {work.dtype}")
    if on_cpu:
        print(arguments.VIRTUAL_DEVICES)
    print("\n" + arguments.table_line(COLUMNS, WIDTHS) + "\n" + arguments.table_line(["-" * w for w in WIDTHS], WIDTHS))
    inner = options.inner or arguments.default_inner(device.platform, tokens)
    base = None
    for program in chosen:
        with futures.ThreadPoolExecutor(2) as pool:  # the two programs compile side by side; a timed program runs alone
            started = pool.submit(timing.compile_only, program, problem, inner)
            checked = pool.submit(check, program, problem)
        checked.result()
        timed = started.result()()
        timing.measure([timed], options.repeats)
        row: dict[str, Any] = {"name": program.name, "operation": program.operation, "us_median": timed.median}
        row |= {"us_min": min(timed.microseconds), "us_max": max(timed.microseconds)}
        base = timed.median if base is None else base
        yield row | ({"of_all_to_all": timed.median / base} if program.operation == "round trip" else {})


def check(program: Any, problem: Any) -> None:
    """Compares the round trip of the last routing with a sum in NumPy; every expert multiplies by a factor of its own.

    Other programs are not checked here: the round trip is made of them.

    Raises:
      AssertionError: the results differ.
    """
    import numpy as np

    from xen_moe_jax.tuning import programs, timing
    from xen_moe_jax.tuning.problem import SPECS
    from xen_moe_jax.tuning.workload import draw_tokens

    if program.round_trip is None:
        return
    work = problem.work
    experts = partial(programs.scaling_experts, local_experts=work.local_experts)

    def run(x, idx, weights):
        return program.round_trip(x, idx[-1], weights[-1], experts)

    out = timing.on_ranks(run, problem.mesh, SPECS)(*problem.inputs.arrays())
    for shard in out.addressable_shards:
        rank = (shard.index[0].start or 0) // work.tokens
        scale = (problem.topk_weights[-1, rank] * programs.expert_scale(problem.topk_idx[-1, rank])).sum(1)
        want = draw_tokens(work, rank).astype(np.float32) * scale[:, None]
        error = np.abs(np.asarray(shard.data, np.float32) - want).max() / np.abs(want).max()
        if not error <= TOLERANCE:
            raise AssertionError(f"{program.name}: the round trip is off by {error:.2e} of the largest element")


if __name__ == "__main__":
    sys.exit(main())
