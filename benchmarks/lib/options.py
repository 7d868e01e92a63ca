"""The arguments of the modes: groups that a mode can take, checks, and the objects that they stand for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from xen_moe_jax.tuning.arguments import (
    MOST_VIRTUAL_DEVICES,
    Parser,
    add_sizes,
    check_writable,
    default_inner,
    factor,
    model_sizes,
    not_negative,
    positive,
    seed,
)

TPU_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
TPU_CASES = ("throughput", "throughput-bf16", "low-latency", "low-latency-bf16")
TPU_OPERATIONS = ("dispatch", "combine", "dispatch halves", "combine halves", "redispatch", "exchange")
LAYER_MODES = ("layer", "model")
OPERATIONS = ("dispatch", "combine", "round trip")
DEFAULT_SMS = (8, 12, 16, 24, 32, 48, 64, 96, 132)

Add = Callable[..., Any]


def sizes(add: Add) -> None:
    """Sizes of the problem; per rank unless the text says otherwise."""
    add_sizes(add)
    add("--ranks", type=positive, help="expert-parallel ranks (default: 8 on CPU, else every device)")
    add("--seed", type=seed, default=0)


def tokens(add: Add) -> None:
    """Tokens of a rank."""
    add("--tokens", type=positive, help="tokens per rank (default 1024; low-latency 128)")


def rows(add: Add) -> None:
    """The rows that travel."""
    add("--dtype", default="bfloat16", help="bfloat16, float16, float32, or float8_e4m3fn / int8 (BlockScaled tokens)")
    add("--wire", help="quantized wire of dispatch: float8_e4m3fn, int8 or mxfp4")
    add("--combine-wire", help="quantized wire of combine: float8_e4m3fn, int8 or mxfp4")
    add("--routing", default="uniform", help="uniform, zipf or one-hot")
    add("--layout", help="grouped, ranked or padded (default grouped; low-latency padded)")
    add("--capacity-factor", type=factor, help="rows over the mean; default: the least that drops nothing")


def devices(add: Add) -> None:
    """The platform that JAX runs on."""
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")


def kernels(add: Add) -> None:
    """The library's own kernels."""
    add("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    add("--chunk-tokens", type=positive, help="tokens that share an arrival flag or a round")


def thread_blocks(add: Add) -> None:
    """One number of thread blocks."""
    add("--num-sms", type=positive, help="thread blocks (default: the library's)")


def several_thread_blocks(add: Add) -> None:
    """Several numbers of thread blocks."""
    add("--num-sms", type=positive, nargs="+", help="numbers of thread blocks, each measured")


def lock(add: Add) -> None:
    """Turns of processes that compile side by side and measure one after the other."""
    add("--lock", metavar="FILE", help="hold this file's lock while measuring: others may compile meanwhile")


def timing(add: Add) -> None:
    """Numbers of calls and repeats."""
    add("--inner", type=positive, help="calls inside one compiled program (default by platform and size)")
    add("--repeats", type=positive, default=7, help="timed repeats, interleaved over programs")
    lock(add)


def ours(add: Add) -> None:
    """The library's own operations."""
    add("--operations", default="dispatch,combine,round trip", help="comma-separated")


def checks(add: Add) -> None:
    """Loops and checks of single operations."""
    add("--unroll", type=positive, default=1, help="calls per loop iteration")
    add("--no-compare", action="store_true", help="skip the bitwise comparison with the reference backend")
    add("--link-ceiling", metavar="FILE", help="JSON of benchmarks/ops/link_ceiling.cu, to report the fraction reached")


def peers(add: Add) -> None:
    """Names of the peers."""
    add("--peers", default="all", help="'all', 'none', or comma-separated names")


def peer_operations(add: Add) -> None:
    """Operations of the peers."""
    add("--peer-operations", help="comma-separated, of the peers (default round trip; jax-best all)")


def processes(add: Add) -> None:
    """One process for each device."""
    add("--coordinator", help="HOST:PORT of jax.distributed: one process per device")
    add("--num-processes", type=positive, default=1)
    add("--process-id", type=not_negative, default=0)


def matmul(add: Add) -> None:
    """The experts' matmul."""
    add("--grouped-matmul", default="auto", help="as in MoEConfig (default auto)")


def layers(add: Add) -> None:
    """Whole layers."""
    add("--width", type=positive, help="features inside an expert (default 3/8 of hidden)")
    add("--ways", nargs="+", metavar="NAME", help="which ways to measure (default all)")


def decode_step(add: Add) -> None:
    """A decode step."""
    add("--layers", type=positive, default=60, help="MoE layers of the step")
    add("--intermediate", type=positive, default=128, help="width of an expert")
    add("--batches", type=positive, nargs="+", metavar="T", help="tokens per rank (default 1 32 128)")
    add("--replays", type=positive, default=10_000, help="of the library's own step; all are checked")
    add("--peer-replays", type=positive, default=200, help="of the others, at the most")
    add("--replay-seconds", type=factor, default=600.0, help="of each program, at the most; fewer replays then")
    lock(add)


def jax_best(add: Add) -> None:
    """JAX's collectives, tuned."""
    add("--routing", default="uniform", help="uniform, zipf or one-hot")
    add("--settings", nargs="+", metavar="NAME", help="settings of XLA to run (default: all)")
    add("--seconds", type=factor, default=600.0, help="for all settings; the last are left out")
    add("--setting-seconds", type=factor, default=60.0, help="the most that one setting may take")
    add("--setting", help=argparse.SUPPRESS)  # set in the processes that the command starts
    add("--part", help=argparse.SUPPRESS)


def tpu_static(add: Add) -> None:
    """Compiled TPU programs."""
    add("--generations", nargs="+", choices=TPU_GENERATIONS, help="to compile for (default: all)")
    add("--cases", nargs="+", choices=TPU_CASES, help="to compile (default: all)")
    add("--operations", nargs="+", dest="compiled", choices=TPU_OPERATIONS, help="to compile (default: all)")
    add("--check", metavar="FILE", help="write nothing; compile for 8 devices, exit status 1 where a count has moved")


def transfer(add: Add) -> None:
    """Writes to another process."""
    add("--sizes", type=positive, nargs="+", metavar="BYTES", help="sizes of a piece (default: a table)")


def json_file(add: Add) -> None:
    """Output for programs."""
    add("--json", metavar="FILE", help="write the result there; jax-best and tpu-static add to what it holds")


def picture(add: Add) -> None:
    """Output for people."""
    add("--plot", metavar="FILE", help="draw the result (needs matplotlib)")


PROBLEM = (tokens, sizes, rows, devices, kernels)
BESIDE_PEERS = (*PROBLEM, thread_blocks, timing, ours, checks, peers, peer_operations, processes, json_file, picture)
MODES: dict[str, tuple[Callable[[Add], None], ...]] = {
    "ops": BESIDE_PEERS,
    "low-latency": BESIDE_PEERS,
    "sweep-sms": (*PROBLEM, several_thread_blocks, timing, ours, checks, processes, json_file, picture),
    "overlap": (*PROBLEM, several_thread_blocks, timing, ours, checks, processes, json_file),
    "layer": (*PROBLEM, thread_blocks, timing, layers, matmul, processes, json_file, picture),
    "model": (*PROBLEM, thread_blocks, timing, layers, matmul, processes, json_file, picture),
    "decode-step": (*PROBLEM[1:], thread_blocks, decode_step, peers, matmul, processes, json_file),
    "jax-best": (tokens, sizes, devices, timing, peer_operations, jax_best, processes, json_file),
    "tpu-static": (tokens, sizes, tpu_static, json_file, picture),
    "transfer": (devices, transfer, peers, json_file, picture),
}
"""The arguments of each mode, by groups."""


def build_parser(mode: str) -> argparse.ArgumentParser:
    """Returns the parser of a mode; it knows the arguments of this mode alone."""
    parser = Parser(prog=f"python -m benchmarks {mode}")
    for group in MODES[mode]:
        group(parser.add_argument_group((group.__doc__ or "").rstrip(".")).add_argument)
    parser.set_defaults(mode=mode)
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Parses a mode and its arguments."""
    return build_parser(words[0]).parse_args(words[1:])


def check(options: argparse.Namespace) -> None:
    """Checks everything that can be wrong before JAX starts, so that hours of work do not end in an error.

    Raises:
      ValueError: names the argument, its value and the remedy.
    """
    given = vars(options)
    if given.get("num_processes", 1) > 1 and not options.coordinator:
        raise ValueError(f"--num-processes {options.num_processes}: needs --coordinator HOST:PORT")
    if given.get("coordinator") and not re.fullmatch(r".+:\d+", options.coordinator):
        raise ValueError(f"--coordinator {options.coordinator}: must be HOST:PORT, the same in every process")
    if given.get("process_id", 0) >= given.get("num_processes", 1):
        raise ValueError(
            f"--process-id {options.process_id}: must be less than --num-processes {options.num_processes}"
        )
    if given.get("platform") == "cpu" and (given.get("ranks") or 0) > MOST_VIRTUAL_DEVICES:
        raise ValueError(f"--ranks {options.ranks}: must be at most {MOST_VIRTUAL_DEVICES} virtual CPU devices")
    if options.mode == "decode-step" and options.layout == "ranked":
        raise ValueError("--layout ranked: decode-step multiplies rows by expert; give grouped or padded")
    if options.mode in LAYER_MODES and importlib.util.find_spec("flax") is None:
        raise ValueError(f"{options.mode}: needs flax: pip install 'xen-moe-jax[flax]'")
    operations(options)
    operations(options, "peer_operations")
    if "routing" in given:
        workload(options, options.ranks or 8)  # a dtype, routing or layout that does not exist is an error now
    if given.get("plot"):
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--plot {options.plot}: needs matplotlib: pip install 'xen-moe-jax[plot]'")
        check_picture("--plot", options.plot)
    for name in ("json", "plot"):
        if given.get(name) is not None:
            check_writable(f"--{name}", given[name])
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
      ValueError: there is none, or it is not a file that benchmarks/ops/link_ceiling.cu writes.
    """
    if not vars(options).get("link_ceiling"):
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
    """Returns the `Workload` that the sizes describe; `num_devices` is the default number of ranks."""
    from xen_moe_jax.tuning.workload import Workload

    low_latency = options.mode == "low-latency"
    given = vars(options)
    rows_given = ("dtype", "wire", "combine_wire", "routing", "capacity_factor")
    return Workload(
        tokens=given.get("tokens") or (128 if low_latency else 1024),
        ranks=options.ranks or num_devices,
        layout=given.get("layout") or ("padded" if low_latency else "grouped"),
        seed=options.seed,
        **model_sizes(options),
        **{name: given[name] for name in rows_given if name in given},
    )


def kernel_config(options: argparse.Namespace) -> Any:
    """Returns the `KernelConfig` of the library's own programs."""
    from xen_moe_jax import KernelConfig

    mode = {"ops": "throughput", "low-latency": "low_latency"}.get(options.mode, "auto")
    given = vars(options)
    num_sms = given.get("num_sms")
    return KernelConfig(
        backend=given.get("backend"),
        mode=mode,
        num_sms=num_sms if isinstance(num_sms, int) else None,
        chunk_tokens=given.get("chunk_tokens"),
    )


def operations(options: argparse.Namespace, argument: str = "operations") -> tuple[str, ...]:
    """Returns the library's own operations to run, or the peers' where `argument` is "peer_operations".

    Raises:
      ValueError: an operation does not exist.
    """
    given = vars(options).get(argument)
    if given is None:
        given = ",".join(OPERATIONS) if options.mode == "jax-best" else "round trip"
    chosen = tuple(name.strip() for name in given.split(","))
    if not set(chosen) <= set(OPERATIONS):
        raise ValueError(f"--{argument.replace('_', '-')} {given!r}: must be among {OPERATIONS}")
    return chosen


def peer_names(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Returns the names of the peers to run; None is all of them."""
    given = vars(options).get("peers", "none")
    if given == "none":
        return ()
    return None if given == "all" else tuple(name.strip() for name in given.split(","))


def inner_calls(options: argparse.Namespace, platform: str, tokens: int) -> int:
    return options.inner or default_inner(platform, tokens)
