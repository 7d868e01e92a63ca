"""Runs the modes that share their arguments: checks them, starts JAX, measures, prints and writes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.lib import options as command_options
from benchmarks.lib import report
from xen_moe_jax.tuning import arguments

GRAPH_FLAGS = ("--xla_gpu_enable_command_buffer=+FUSION,+CUSTOM_CALL", "--xla_gpu_graph_min_graph_size=1")


def start_jax(options: argparse.Namespace) -> None:
    """Chooses the platform and, on CPU, the number of virtual devices: must run before JAX makes its devices.

    Raises:
      ValueError: JAX cannot start the platform, or more virtual devices are asked for than can work.
    """
    import jax

    arguments.choose_devices(options.platform, vars(options).get("ranks"), vars(options).get("num_processes", 1))
    if vars(options).get("coordinator"):
        jax.distributed.initialize(
            options.coordinator, options.num_processes, options.process_id, local_device_ids=gpu_of_process(options)
        )
    arguments.make_devices(options.platform)


def force_graphs() -> None:
    """Switches on CUDA graphs for every program, as a server has them; the user's own setting wins."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in GRAPH_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def gpu_of_process(options: argparse.Namespace) -> list[int] | None:
    """Returns one GPU for each process of this host; CPU processes keep all of their virtual devices."""
    return None if options.platform == "cpu" else [options.process_id]


def main(mode: str, given: Sequence[str]) -> int:
    """Runs a mode; returns its exit status: 0, or 1 when a check failed or the arguments cannot be measured."""
    options = command_options.build_parser(mode).parse_args(given)
    from benchmarks.lib.verify import WrongResultError
    from xen_moe_jax import BackendUnavailable

    try:
        check(options)
        return RUN.get(mode, measure)(options, [mode, *given])
    except (ValueError, ImportError, BackendUnavailable, WrongResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check(options: argparse.Namespace) -> None:
    """Checks everything that can be wrong before JAX starts; raises ValueError."""
    command_options.check(options)
    if options.mode == "jax-best":
        from benchmarks.peers import jax_settings

        jax_settings.check(options)


def tpu_static(options: argparse.Namespace, line: list[str]) -> int:
    """Reads compiled TPU programs; JAX starts on the CPU."""
    from benchmarks.tpu import static

    return static.main(options)


def transfer(options: argparse.Namespace, line: list[str]) -> int:
    """Measures transfers, which print and write by themselves as they go."""
    from benchmarks.transfer import writes

    start_jax(options)
    return writes.main(options, line)


def jax_best(options: argparse.Namespace, line: list[str]) -> int:
    """Starts a process for each setting of XLA, or is such a process."""
    from benchmarks.peers import jax_best as settings

    if not options.setting:
        return settings.main(options, line)
    start_jax(options)
    return settings.run_setting(options)


def measure(options: argparse.Namespace, line: list[str]) -> int:
    """Measures in this process, prints the table and writes the files; only the first of several processes does."""
    if options.mode in command_options.LAYER_MODES:
        from benchmarks.layers import layer as measured

        run, describe, plot = measured.run, measured.describe_results, measured.write_plot
    elif options.mode == "decode-step":
        from benchmarks.layers import decode_step

        force_graphs()
        run, describe, plot = decode_step.main, decode_step.describe, None
    else:
        from benchmarks.ops import operations

        run, describe, plot = operations.run, operations.describe_results, report.write_plot
    start_jax(options)
    document = run(options, line)
    if document["machine"]["processes"] > 1 and options.process_id != 0:
        return 0
    print(describe(document))
    if options.json:
        write = report.add_json if options.mode in command_options.LAYER_MODES else report.write_json
        write(options.json, document)
    if plot is not None and vars(options).get("plot"):
        plot(options.plot, document)
    return 0


RUN = {"tpu-static": tpu_static, "transfer": transfer, "jax-best": jax_best}
"""Modes that do not end in one document of one process."""
