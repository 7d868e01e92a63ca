"""The quickest way in which XLA compiles for the CPU, for programs that run once, on a few rows."""

import os

FLAGS = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""Loops straight to LLVM's language, without MLIR between: a third of the compiling time of jax 0.11. The jaxlib of
jax 0.12 no longer has the short way and passes over its name. One thread for each program saves the cost of sharing
work out among threads.
"""


def use() -> None:
    """Sets the flags for this process, which has compiled nothing yet, and for the processes that it starts."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


def flags(devices: int | None = None) -> str:
    """XLA_FLAGS for a child with `devices` CPU devices of its own: compiled as this process's programs are."""
    quick = [FLAGS] * (FLAGS in os.environ.get("XLA_FLAGS", ""))
    return " ".join([f"--xla_force_host_platform_device_count={devices}"] * (devices is not None) + quick)
