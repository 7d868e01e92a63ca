"""Arguments, the start of JAX and plain-text tables, as every command that measures has them."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import Any

from xen_moe_jax._command_line import Parser as Parser

DEEPSEEK_V3 = {"hidden": 7168, "experts": 256, "top_k": 8}
MOST_VIRTUAL_DEVICES = 64
"""Each virtual CPU device is a thread that waits for all others: with more of them one exchange takes minutes."""


def positive(text: str) -> int:
    """Parses a count; 0 is an error and not a default."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Parses a number that may be 0."""
    return _at_least(0, text)


def seed(text: str) -> int:
    """Parses the seed of random numbers; JAX's generators take 63 bits."""
    value = _at_least(0, text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text}: must be below 2**63")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {least}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
    return value


def factor(text: str) -> float:
    """Parses a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be positive and finite")
    return value


factor.__name__ = "float"


def add_sizes(add: Any) -> None:
    """Adds --hidden, --experts, --top-k and --deepseek-v3; `model_sizes` reads them."""
    add("--hidden", type=positive, help="elements of a token (default 1024)")
    add("--experts", type=positive, help="global number of experts (default 64)")
    add("--top-k", type=positive, help="experts per token (default 8)")
    add("--deepseek-v3", action="store_true", help="defaults of hidden 7168, 256 experts, top-8")


def model_sizes(options: argparse.Namespace, defaults: dict[str, int] | None = None) -> dict[str, Any]:
    """Returns `hidden`, `experts` and `top_k`: the given values, else the sizes of the named model."""
    model = DEEPSEEK_V3 if options.deepseek_v3 else defaults or {"hidden": 1024, "experts": 64, "top_k": 8}
    return {name: getattr(options, name) or size for name, size in model.items()}


def check_writable(name: str, path: str) -> None:
    """Opens the file for appending and leaves it as it was; raises ValueError where that fails."""
    target = pathlib.Path(path)
    existed = target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a"):
            pass
        if not existed:
            target.unlink()
    except OSError as error:
        raise ValueError(f"{name} {path}: cannot be written ({error.strerror}); name another file") from error


def choose_devices(platform: str | None, ranks: int | None, processes: int = 1) -> None:
    """Sets the platform and the number of virtual CPU devices; must run before JAX makes its devices."""
    import jax

    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        virtual = min(ranks or 8, MOST_VIRTUAL_DEVICES)
        jax.config.update("jax_num_cpu_devices", max(1, virtual // processes))


def make_devices(platform: str | None) -> None:
    """Lets JAX make its devices; raises ValueError where it cannot start the platform."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a backend
        reason = str(error).strip().split("\n")[0] or "it has no plugin for it"
        raise ValueError(
            f"--platform {platform or 'of JAX_PLATFORMS'}: JAX cannot start it here ({reason}); "
            "`xen-moe-jax doctor` shows what this machine has, --platform cpu always works"
        ) from error


def start_jax(platform: str | None, ranks: int | None) -> None:
    """Starts JAX in one process. Raises ValueError where it cannot start the platform."""
    choose_devices(platform, ranks)
    make_devices(platform)


def default_inner(platform: str, tokens: int) -> int:
    """Returns the number of calls in one timed program, high enough that starting the program does not count."""
    if platform == "cpu":
        return 4
    return 400 if tokens >= 1024 else 1000  # starting a program on four GPUs takes more than a millisecond


VIRTUAL_DEVICES = "Virtual CPU devices share the cores of one machine: these times say nothing about GPUs or TPUs."
"""Stands above every table and in every picture of times that were taken on CPU devices."""


def format_table(columns: list[str], lines: list[list[str]]) -> str:
    """Formats plain text, the first column left-aligned and the rest right-aligned."""
    widths = [max(len(row[i]) for row in [columns, *lines]) for i in range(len(columns))]
    return "\n".join([table_line(row, widths) for row in [columns, ["-" * w for w in widths], *lines]])


def table_line(cells: list[str], widths: list[int]) -> str:
    """Formats one line of a table."""
    return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))


def progress(message: str) -> None:
    """Prints one line on standard error, so that standard output stays a table."""
    print(message, file=sys.stderr, flush=True)
