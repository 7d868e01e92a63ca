"""The `xen-moe-jax` command: `doctor`, `check`, `benchmark`, `autotune` and `memory`, each with its own `--help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from xen_moe_jax import __version__
from xen_moe_jax._command_line import Parser

COMMANDS = {
    "doctor": ("xen_moe_jax.doctor", "what this machine has, and which backend each platform would use"),
    "check": (
        "xen_moe_jax._check_command",
        "proves the library on this machine's TPUs, GPUs or CPU; a file to send back",
    ),
    "benchmark": ("xen_moe_jax.tuning.quick", "dispatch and combine beside jax.lax.all_to_all, timed in seconds"),
    "autotune": ("xen_moe_jax.tuning.command", "the fastest config of each shape on this machine, kept"),
    "memory": ("xen_moe_jax.flax.memory", "bytes of an MoE layer's buffers by capacity, chunks and remat"),
}
"""Subcommand -> the module whose `main(arguments)` runs it, and one line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; its exit status."""
    listing = "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items())
    parser = Parser(
        prog="xen-moe-jax",
        usage="xen-moe-jax COMMAND [ARGUMENT ...]",
        description="Mixture-of-Experts dispatch and combine for JAX.",
        epilog=f"commands (COMMAND --help says more):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xen-moe-jax {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.exit(2, parser.format_help())
    options = parser.parse_args(given[:1])
    module, _ = COMMANDS[options.command]
    return importlib.import_module(module).main(given[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
