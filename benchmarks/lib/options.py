"""What the benchmark command is asked to do: its arguments, what is wrong with them, and what they stand for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import re
from typing import Any

from benchmarks.peers import jax_settings
from xen_moe_jax.tuning.arguments import (
    MOST_VIRTUAL_DEVICES,
    Parser,
    check_writable,
    default_inner,
    factor,
    model_sizes,
    not_negative,
    positive,
    seed,
)

MODES = (
    "normal",
    "low-latency",
    "sweep-sms",
    "overlap",
    "jax-best",
    "layer",
    "model",
    "decode-step",
    "tpu-static",
    "transfer",
)
TPU_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
TPU_CASES = ("throughput", "throughput-bf16", "low-latency", "low-latency-bf16")
LAYER_MODES = ("layer", "model")
NOTHING_TO_DRAW = ("overlap", "decode-step")
NOTHING_TO_TUNE = (*LAYER_MODES, "overlap", "decode-step", "tpu-static", "transfer")
OPERATIONS = ("dispatch", "combine", "round trip")
DEFAULT_SMS = (8, 12, 16, 24, 32, 48, 64, 96, 132)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Times dispatch and combine beside the ways JAX has without this library; checks what it times.",
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="normal",
        help="normal: throughput; low-latency: few tokens, padded layout; sweep-sms: thread blocks against time; "
        "jax-best: beside JAX's own collectives tuned, a process for each setting of XLA; "
        "layer: a whole MoE layer, forward and backward; model: a stack of four; "
        "overlap: dispatch and combine in halves, with matmuls between them; "
        "tpu-static: what the compiled TPU programs say, no TPU needed; "
        "transfer: writes to another process (xen_moe_jax.transfer); "
        "decode-step: many MoE layers in one program, replayed and checked")  # fmt: skip
    sizes = parser.add_argument_group("sizes (per rank unless said otherwise)")
    size = sizes.add_argument
    size("--tokens", type=positive, help="tokens per rank (default 1024; low-latency 128)")
    size("--hidden", type=positive, help="elements of a token (default 1024)")
    size("--experts", type=positive, help="global number of experts (default 64)")
    size("--top-k", type=positive, help="experts per token (default 8)")
    size(
        "--sizes",
        type=positive,
        nargs="+",
        metavar="BYTES",
        help="--mode transfer: sizes of a piece (default: a table)",
    )
    size("--width", type=positive, help="--mode layer, model: features inside an expert (default 3/8 of hidden)")
    size("--deepseek-v3", action="store_true", help="defaults of hidden 7168, 256 experts, top-8")
    size("--ranks", type=positive, help="expert-parallel ranks (default: 8 on CPU, else every device)")
    size("--dtype", default="bfloat16", help="bfloat16, float16, float32, or float8_e4m3fn / int8 (BlockScaled tokens)")
    size("--wire", help="quantized wire of dispatch: float8_e4m3fn or int8")
    size("--combine-wire", help="quantized wire of combine: float8_e4m3fn or int8")
    size("--routing", default="uniform", help="uniform, zipf or one-hot")
    size("--layout", help="grouped, ranked or padded (default grouped; low-latency padded)")
    size("--capacity-factor", type=factor, help="rows over the mean; default: the least that drops nothing")
    size("--seed", type=seed, default=0)
    runs = parser.add_argument_group("running")
    run = runs.add_argument
    run("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")
    run("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    run("--num-sms", type=positive, nargs="+", help="thread blocks; several with --mode sweep-sms or overlap")
    run("--chunk-tokens", type=positive, help="tokens that share an arrival flag or a round")
    run("--operations", default="dispatch,combine,round trip", help="comma-separated")
    run("--peers", default="all", help="'all', 'none', or comma-separated names")
    run("--grouped-matmul", default="auto", help="--mode layer, model, decode-step: as in MoEConfig (default auto)")
    run("--ways", nargs="+", metavar="NAME", help="--mode layer, model: which to measure (default all)")
    run("--lock", metavar="FILE", help="--mode layer, model: hold this file's lock while measuring")
    run("--inner", type=positive, help="calls inside one compiled program (default by platform and size)")
    run("--unroll", type=positive, default=1, help="calls per loop iteration")
    run("--repeats", type=positive, default=7, help="timed repeats, interleaved over programs")
    run("--no-compare", action="store_true", help="skip the bitwise comparison with the reference backend")
    run("--peer-operations", help="comma-separated, of the peers (default round trip; --mode jax-best all)")
    run("--coordinator", help="HOST:PORT of jax.distributed: one process per device")
    run("--num-processes", type=positive, default=1)
    run("--process-id", type=not_negative, default=0)
    run("--tune", action="store_true", help="measure candidate KernelConfigs and report them, best first")
    steps = parser.add_argument_group("--mode decode-step").add_argument
    steps("--layers", type=positive, default=60, help="MoE layers of the step")
    steps("--intermediate", type=positive, default=128, help="width of an expert")
    steps("--batches", type=positive, nargs="+", metavar="T", help="tokens per rank (default 1 32 128)")
    steps("--replays", type=positive, default=10_000, help="of the library's own step; all are checked")
    steps("--peer-replays", type=positive, default=200, help="of the others, at the most")
    steps("--replay-seconds", type=factor, default=600.0, help="of each program, at the most; fewer replays then")
    tuned_jax = parser.add_argument_group("--mode jax-best").add_argument
    tuned_jax("--settings", nargs="+", metavar="NAME", help="settings of XLA to run (default: all)")
    tuned_jax("--seconds", type=factor, default=600.0, help="for all settings; the last are left out")
    tuned_jax("--setting-seconds", type=factor, default=60.0, help="the most that one setting may take")
    tuned_jax("--setting", help=argparse.SUPPRESS)  # set in the processes that the command starts
    tuned_jax("--part", help=argparse.SUPPRESS)
    static = parser.add_argument_group("--mode tpu-static").add_argument
    static("--generations", nargs="+", choices=TPU_GENERATIONS, help="to compile for (default: all)")
    static("--cases", nargs="+", choices=TPU_CASES, help="to compile (default: all)")
    out = parser.add_argument_group("output").add_argument
    out("--json", metavar="FILE", help="--mode tpu-static adds to the file, or replaces what it holds of the same")
    out("--plot", metavar="FILE")
    out("--tuned", metavar="FILE", help="with --tune: JSON file that keeps the best, for xen_moe_jax.autotune.load")
    out(
        "--link-ceiling",
        metavar="FILE",
        help="JSON of the link benchmark of this machine, to report the fraction reached",
    )
    return parser


def check(options: argparse.Namespace) -> None:
    """Everything that can be wrong before JAX starts, so that hours of work do not end in an error.

    Raises:
      ValueError: names the argument, its value and the remedy.
    """
    if options.tuned and not options.tune:
        raise ValueError(f"--tuned {options.tuned}: keeps what --tune finds; add --tune, or leave --tuned out")
    if options.tune and set(operations(options)) == {"round trip"}:
        raise ValueError(f"--operations {options.operations!r}: --tune measures dispatch and combine")
    if options.tune and options.plot:
        raise ValueError(f"--plot {options.plot}: --tune draws nothing; leave one of the two out")
    if options.num_processes > 1 and not options.coordinator:
        raise ValueError(f"--num-processes {options.num_processes}: needs --coordinator HOST:PORT")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        raise ValueError(f"--coordinator {options.coordinator}: must be HOST:PORT, the same in every process")
    if options.process_id >= options.num_processes:
        raise ValueError(
            f"--process-id {options.process_id}: must be less than --num-processes {options.num_processes}"
        )
    if options.platform == "cpu" and (options.ranks or 0) > MOST_VIRTUAL_DEVICES:
        raise ValueError(f"--ranks {options.ranks}: must be at most {MOST_VIRTUAL_DEVICES} virtual CPU devices")
    if options.num_sms and len(options.num_sms) > 1 and options.mode not in ("sweep-sms", "overlap"):
        several = " ".join(map(str, options.num_sms))
        raise ValueError(f"--num-sms {several}: several need --mode sweep-sms or overlap; give one")
    if options.sizes and options.mode != "transfer":
        raise ValueError(f"--sizes {' '.join(map(str, options.sizes))}: needs --mode transfer")
    for name in ("generations", "cases"):
        if getattr(options, name) and options.mode != "tpu-static":
            raise ValueError(f"--{name} {' '.join(getattr(options, name))}: needs --mode tpu-static")
    if options.mode == "decode-step" and options.tokens:
        raise ValueError(f"--tokens {options.tokens}: --mode decode-step takes --batches, one or several")
    if options.mode == "decode-step" and options.layout == "ranked":
        raise ValueError("--layout ranked: --mode decode-step multiplies rows by expert; give grouped or padded")
    if options.mode == "jax-best":
        jax_settings.check(options)
        for name in ("plot", "tune", "link_ceiling"):
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')}: --mode jax-best has none; leave it out")
    elif options.settings:
        raise ValueError(f"--settings {' '.join(options.settings)}: needs --mode jax-best")
    if options.mode not in LAYER_MODES:
        for name in ("width", "ways", "lock"):
            if getattr(options, name):
                raise ValueError(f"--{name} {getattr(options, name)}: needs --mode layer or --mode model")
    if options.mode not in (*LAYER_MODES, "decode-step") and options.grouped_matmul != "auto":
        raise ValueError(f"--grouped-matmul {options.grouped_matmul}: needs --mode layer, model or decode-step")
    if options.mode in NOTHING_TO_TUNE and options.tune:
        raise ValueError(f"--tune: --mode {options.mode} has nothing to tune; leave it out")
    if options.mode in NOTHING_TO_DRAW and options.plot:
        raise ValueError(f"--plot {options.plot}: --mode {options.mode} draws nothing; leave it out, and take --json")
    if options.mode == "tpu-static" and not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        raise ValueError("--mode tpu-static: compiles with libtpu, which is not installed: pip install libtpu")
    operations(options)
    operations(options, "peer_operations")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {options.plot}: needs matplotlib: pip install 'xen-moe-jax[plot]'")
    if options.plot:
        check_picture("--plot", options.plot)
    for name in ("json", "plot", "tuned"):
        if getattr(options, name) is not None:
            check_writable(f"--{name}", getattr(options, name))
    link_ceiling(options)


def check_picture(name: str, path: str) -> None:
    """Raises ValueError for a file whose ending matplotlib knows no format for; one without an ending is a PNG."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    ending = pathlib.Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        raise ValueError(f"{name} {path}: '.{ending}' is no format of a picture; must be one of {', '.join(formats)}")


def link_ceiling(options: argparse.Namespace) -> dict[str, Any] | None:
    """The JSON that `--link-ceiling` names.

    Raises:
      ValueError: there is none, or it is not what benchmarks/ops/link_ceiling.cu writes.
    """
    if not options.link_ceiling:
        return None
    remedy = "make it with benchmarks/ops/link_ceiling.cu on this machine"
    try:
        found = json.loads(pathlib.Path(options.link_ceiling).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--link-ceiling {options.link_ceiling}: cannot be read ({error}); {remedy}") from error
    fields = ("row_bytes", "tokens", "gb_per_s")
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries or not all(_positive(e, fields) for e in entries):
        raise ValueError(
            f"--link-ceiling {options.link_ceiling}: must hold 'entries', each with positive {', '.join(fields)}; "
            f"{remedy}"
        )
    return found


def _positive(entry: Any, fields: tuple[str, ...]) -> bool:
    values = [entry.get(field) for field in fields] if isinstance(entry, dict) else [None]
    return all(isinstance(value, int | float) and value > 0 for value in values)


def workload(options: argparse.Namespace, num_devices: int) -> Any:
    """The `Workload` that the sizes describe; `num_devices` is the default number of ranks."""
    from xen_moe_jax.tuning.workload import Workload

    low_latency = options.mode == "low-latency"
    sizes = model_sizes(options)
    return Workload(
        tokens=options.tokens or (128 if low_latency else 1024),
        hidden=sizes["hidden"],
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        ranks=options.ranks or num_devices,
        dtype=options.dtype,
        wire=options.wire,
        combine_wire=options.combine_wire,
        routing=options.routing,
        layout=options.layout or ("padded" if low_latency else "grouped"),
        capacity_factor=options.capacity_factor,
        seed=options.seed,
    )


def kernel_config(options: argparse.Namespace) -> Any:
    """The `KernelConfig` of the library's own programs."""
    from xen_moe_jax import KernelConfig

    mode = {"normal": "throughput", "low-latency": "low_latency"}.get(options.mode, "auto")
    num_sms = options.num_sms[0] if options.num_sms and options.mode not in ("sweep-sms", "overlap") else None
    return KernelConfig(backend=options.backend, mode=mode, num_sms=num_sms, chunk_tokens=options.chunk_tokens)


def operations(options: argparse.Namespace, argument: str = "operations") -> tuple[str, ...]:
    """Of the library's own programs, or of the peers where `argument` is "peer_operations"."""
    given = getattr(options, argument)
    if given is None:
        given = ",".join(OPERATIONS) if options.mode == "jax-best" else "round trip"
    chosen = tuple(name.strip() for name in given.split(","))
    if not set(chosen) <= set(OPERATIONS):
        raise ValueError(f"--{argument.replace('_', '-')} {given!r}: must be among {OPERATIONS}")
    return chosen


def peer_names(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Names of the peers to run; None is all of them."""
    if options.peers == "none" or options.mode == "sweep-sms":
        return ()
    return None if options.peers == "all" else tuple(name.strip() for name in options.peers.split(","))


def inner_calls(options: argparse.Namespace, platform: str, tokens: int) -> int:
    return options.inner or default_inner(platform, tokens)
