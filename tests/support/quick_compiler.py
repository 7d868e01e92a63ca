"""The quickest way in which XLA compiles for the CPU, for programs that run once, on a few rows."""

import os

QUICK = "xla_cpu_disable_new_fusion_emitters"
FLAGS = f"--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options={QUICK}"
"""Loops straight to LLVM's language, without MLIR between: half of the suite's time with jax 0.11. The jaxlib of
jax 0.12 no longer has the short way and passes over its name. One thread for each program saves the cost of sharing
work out among threads.
"""


def use() -> None:
    """Sets the flags for this process, which has compiled nothing yet, and for the processes that it starts."""
    if not wanted():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


def wanted() -> bool:
    """True if `use` has set the flags, in this process or in the one that started it."""
    return FLAGS in os.environ.get("XLA_FLAGS", "")


def taken() -> bool:
    """True if XLA has the flags. It reads them once in a process, which may happen before `use` sets them."""
    # Only here: programs import this module before they set variables that JAX reads when it is imported.
    from jax._src.lib import xla_client  # noqa: TID251  the library imports nothing of it

    options = xla_client.CompileOptions()
    _ = options.executable_build_options.debug_options  # a copy of XLA's flags, a part of the options from now on
    return QUICK.encode() in options.SerializeAsString()


def flags(devices: int | None = None) -> str:
    """XLA_FLAGS for a child with `devices` CPU devices of its own: compiled as this process's programs are."""
    quick = [FLAGS] * wanted()
    return " ".join([f"--xla_force_host_platform_device_count={devices}"] * (devices is not None) + quick)
