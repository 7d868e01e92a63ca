"""The command line: what to measure, on which backend, and where to write it."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

MODES = ("normal", "low-latency", "sweep-sms", "tpu-static")
DEFAULT_SMS = (8, 12, 16, 24, 32, 48, 64, 96, 132)
DEEPSEEK_V3 = {"hidden": 7168, "experts": 256, "top_k": 8}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xen_moe_jax.benchmark",
        description="Times dispatch and combine beside the ways JAX has without this library; checks what it times.",
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="normal",
        help="normal: throughput; low-latency: few tokens, padded layout; sweep-sms: thread blocks against time; "
        "tpu-static: what the compiled TPU programs say, no TPU needed")  # fmt: skip
    sizes = parser.add_argument_group("sizes (per rank unless said otherwise)")
    size = sizes.add_argument
    size("--tokens", type=int, help="tokens per rank (default 1024; low-latency 128)")
    size("--hidden", type=int, help="elements of a token (default 1024)")
    size("--experts", type=int, help="global number of experts (default 64)")
    size("--top-k", type=int, help="experts per token (default 8)")
    size("--deepseek-v3", action="store_true", help="defaults of hidden 7168, 256 experts, top-8")
    size("--ranks", type=int, help="expert-parallel ranks (default: 8 on CPU, else every device)")
    size("--dtype", default="bfloat16", help="bfloat16, float16, float32, or float8_e4m3fn / int8 (BlockScaled tokens)")
    size("--wire", help="quantised wire of dispatch: float8_e4m3fn or int8")
    size("--combine-wire", help="quantised wire of combine: float8_e4m3fn or int8")
    size("--routing", default="uniform", help="uniform, zipf or one-hot")
    size("--layout", help="grouped, ranked or padded (default grouped; low-latency padded)")
    size("--capacity-factor", type=float, help="rows over the mean; default: the least that drops nothing, peers alike")
    size("--seed", type=int, default=0)
    runs = parser.add_argument_group("running")
    run = runs.add_argument
    run("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")
    run("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    run("--num-sms", type=int, nargs="+", help="thread blocks; several with --mode sweep-sms")
    run("--chunk-tokens", type=int, help="tokens that share an arrival flag or a round")
    run("--operations", default="dispatch,combine,round trip", help="comma-separated")
    run("--peers", default="all", help="'all', 'none', or comma-separated names")
    run("--inner", type=int, help="calls inside one compiled program (default by platform and size)")
    run("--unroll", type=int, default=1, help="calls per loop iteration")
    run("--repeats", type=int, default=7, help="timed repeats, interleaved over programs")
    run("--no-compare", action="store_true", help="skip the bitwise comparison with the reference backend")
    run("--coordinator", help="HOST:PORT of jax.distributed: one process per device")
    run("--num-processes", type=int, default=1)
    run("--process-id", type=int, default=0)
    run("--tune", action="store_true", help="measure candidate KernelConfigs and report them, best first")
    out = parser.add_argument_group("output").add_argument
    out("--json", metavar="FILE")
    out("--plot", metavar="FILE")
    out("--tuned", metavar="FILE", help="with --tune: JSON file that keeps the best, for xen_moe_jax.autotune.load")
    out(
        "--link-ceiling",
        metavar="FILE",
        help="JSON of the link benchmark of this machine, to report the fraction reached",
    )
    return parser


def start_jax(options: argparse.Namespace) -> None:
    """Chooses the platform and, on CPU, the number of virtual devices: must run before JAX makes its devices."""
    import jax

    if options.platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.platform, options.platform))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", (options.ranks or 8) // options.num_processes)
    if options.coordinator:
        jax.distributed.initialize(
            options.coordinator, options.num_processes, options.process_id, local_device_ids=gpu_of_process(options)
        )


def gpu_of_process(options: argparse.Namespace) -> list[int] | None:
    """One GPU for each process of this host; CPU processes keep all of their virtual devices."""
    return None if options.platform == "cpu" else [options.process_id]


def make_workload(options: argparse.Namespace, num_devices: int) -> Any:
    from xen_moe_jax.benchmark.workload import Workload

    low_latency = options.mode == "low-latency"
    model = DEEPSEEK_V3 if options.deepseek_v3 else {"hidden": 1024, "experts": 64, "top_k": 8}
    return Workload(
        tokens=options.tokens or (128 if low_latency else 1024),
        hidden=options.hidden or model["hidden"],
        experts=options.experts or model["experts"],
        top_k=options.top_k or model["top_k"],
        ranks=options.ranks or num_devices,
        dtype=options.dtype,
        wire=options.wire,
        combine_wire=options.combine_wire,
        routing=options.routing,
        layout=options.layout or ("padded" if low_latency else "grouped"),
        capacity_factor=options.capacity_factor,
        seed=options.seed,
    )


def default_inner(platform: str, tokens: int) -> int:
    """Calls in one program: enough that starting the program does not count."""
    if platform == "cpu":
        return 4
    return 400 if tokens >= 1024 else 1000  # starting a program on four GPUs takes more than a millisecond


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 1 when a check failed or the arguments cannot be measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(arguments)
    if options.mode == "tpu-static":
        from xen_moe_jax.benchmark import tpu_static

        return tpu_static.main(options) or 0
    start_jax(options)
    from xen_moe_jax import BackendUnavailable
    from xen_moe_jax.benchmark import modes, report
    from xen_moe_jax.benchmark.verify import WrongResultError

    try:
        document = modes.run(options, arguments)
    except (ValueError, BackendUnavailable, WrongResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if document["machine"]["processes"] > 1 and options.process_id != 0:
        return 0
    print(modes.describe_results(document))
    if options.json:
        report.write_json(options.json, document)
    if options.plot:
        report.write_plot(options.plot, document)
    return 0


def read_link_ceiling(options: argparse.Namespace) -> dict[str, Any] | None:
    if not options.link_ceiling:
        return None
    return json.loads(pathlib.Path(options.link_ceiling).read_text())
