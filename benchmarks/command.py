"""The benchmark command: checks its arguments, starts JAX, measures, prints and writes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from benchmarks.lib import options as command_options
from xen_moe_jax.tuning import arguments

GRAPH_FLAGS = ("--xla_gpu_enable_command_buffer=+FUSION,+CUSTOM_CALL", "--xla_gpu_graph_min_graph_size=1")


def start_jax(options: argparse.Namespace) -> None:
    """Chooses the platform and, on CPU, the number of virtual devices: must run before JAX makes its devices.

    Raises:
      ValueError: JAX cannot start the platform, or more virtual devices are asked for than can work.
    """
    import jax

    arguments.choose_devices(options.platform, options.ranks, options.num_processes)
    if options.coordinator:
        jax.distributed.initialize(
            options.coordinator, options.num_processes, options.process_id, local_device_ids=gpu_of_process(options)
        )
    arguments.make_devices(options.platform)


def force_graphs() -> None:
    """CUDA graphs for every program, as a server has them; what the user has set stays."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in GRAPH_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def gpu_of_process(options: argparse.Namespace) -> list[int] | None:
    """One GPU for each process of this host; CPU processes keep all of their virtual devices."""
    return None if options.platform == "cpu" else [options.process_id]


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 1 when a check failed or the arguments cannot be measured."""
    given = list(sys.argv[1:] if given is None else given)
    options = command_options.build_parser().parse_args(given)
    try:
        command_options.check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.mode == "tpu-static":
        from benchmarks.tpu import static as tpu_static

        return tpu_static.main(options) or 0
    if options.mode == "transfer":
        from benchmarks.transfer import writes as transfer

        try:
            start_jax(options)
            return transfer.main(options, given)
        except (ValueError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if options.mode in command_options.LAYER_MODES and importlib.util.find_spec("flax") is None:
        print(f"error: --mode {options.mode}: needs flax: pip install 'xen-moe-jax[flax]'", file=sys.stderr)
        return 1
    if options.mode == "jax-best":
        from benchmarks.peers import jax_best

        if not options.setting:
            return jax_best.main(options, given)
        start_jax(options)
        return jax_best.run_setting(options)
    from benchmarks.layers import decode_step
    from benchmarks.lib import report
    from benchmarks.lib.verify import WrongResultError
    from benchmarks.ops import operations as modes
    from xen_moe_jax import BackendUnavailable

    run, describe, plot = modes.run, modes.describe_results, report.write_plot
    if options.mode in command_options.LAYER_MODES:
        from benchmarks.layers import layer

        run, describe, plot = layer.run, layer.describe_results, layer.write_plot
    elif options.mode == "decode-step":
        run, describe = decode_step.main, decode_step.describe
    try:
        if options.mode == "decode-step":
            force_graphs()
        start_jax(options)
        document = run(options, given)
    except (ValueError, BackendUnavailable, WrongResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if document["machine"]["processes"] > 1 and options.process_id != 0:
        return 0
    print(describe(document))
    if options.json:
        report.write_json(options.json, document)
    if options.plot:
        plot(options.plot, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
