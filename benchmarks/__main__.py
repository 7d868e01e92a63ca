"""The command `python -m benchmarks MODE ...`: one mode a program, each with its own `--help`."""

from __future__ import annotations

import argparse
import importlib
import sys

from xen_moe_jax.tuning.arguments import Parser

MODES = {
    "ops": ("benchmarks.command", "dispatch and combine beside JAX's own ways, checked"),
    "low-latency": ("benchmarks.command", "the same with few tokens and the padded layout"),
    "sweep-sms": ("benchmarks.command", "time over the number of thread blocks"),
    "overlap": ("benchmarks.command", "dispatch and combine in halves, with matmuls between them"),
    "jax-best": ("benchmarks.command", "beside JAX's collectives tuned: a process for each setting of XLA"),
    "layer": ("benchmarks.command", "a whole MoE layer, forward and backward, beside JAX's ways"),
    "model": ("benchmarks.command", "the same for a stack of four layers"),
    "decode-step": ("benchmarks.command", "many MoE layers in one program, replayed and checked"),
    "transfer": ("benchmarks.command", "writes to another process (xen_moe_jax.transfer)"),
    "tpu-static": ("benchmarks.command", "what compiled TPU programs say; no TPU needed"),
    "tpu-bundles": ("benchmarks.tpu.bundles", "issue cycles of compiled TPU kernels; no TPU needed"),
    "tpu-chip": ("benchmarks.tpu.chip", "times on TPUs, beside the counts of the same chip"),
    "tpu-layer": ("benchmarks.tpu.layer", "a compiled layer with its gradients for TPUs; no TPU needed"),
    "all-gather": ("benchmarks.ops.all_gather", "all_gather and all_gather_matmul beside JAX's own"),
    "grouped-matmul": ("benchmarks.layers.grouped_matmul", "grouped matmuls for the experts of one rank"),
    "nnx-layer": ("benchmarks.layers.nnx_layer", "the NNX layer with its router and losses"),
    "train": ("benchmarks.layers.train", "training of a model with a billion parameters"),
    "suite": ("benchmarks.suite", "a table of these commands within a time budget"),
    "table": ("benchmarks.table", "writes or checks docs/lab/benchmark_tables.md"),
    "transfer-table": ("benchmarks.transfer.tables", "writes or checks the tables of docs/lab/transfer_figures.md"),
}
"""Mode -> the module whose `main()` runs it, and one line of help."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one mode; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {name:<18} {line}" for name, (_, line) in MODES.items())
    parser = Parser(
        prog="python -m benchmarks",
        usage="python -m benchmarks MODE [ARGUMENT ...]",
        description="What measures Xen-MoE for JAX; the quick benchmark of the package is `xen-moe-jax benchmark`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"modes (MODE --help says more):\n{listing}",
    )
    parser.add_argument("mode", metavar="MODE", choices=MODES, help="one of the modes below")
    if not given:
        parser.exit(2, parser.format_help())
    mode = parser.parse_args(given[:1]).mode
    module, _ = MODES[mode]
    if module == "benchmarks.command":
        return importlib.import_module(module).main(mode, given[1:])
    sys.argv = [f"python -m benchmarks {mode}", *given[1:]]
    return importlib.import_module(module).main() or 0


if __name__ == "__main__":
    sys.exit(main())
