"""Settings of XLA for timing JAX's own collectives: flags, processes, and the peers that each one concerns.

XLA reads its flags once, when it starts, so every setting is a process of its own (`jax_best`). The flags are XLA's own
(`xla/xla.proto`); "unsupported" and "experimental" are part of their names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

ALL_TO_ALL = ("padded all_to_all",)
GATHER = ("all_gather + psum_scatter", "all_gather + psum_scatter by token")
RAGGED = tuple(f"ragged_all_to_all k={segments}" for segments in (1, 8, 32, 64, 128, 256))
JAX_DEFAULT = ("padded all_to_all", "ragged_all_to_all k=1")
"""Peers that a user who does not tune gets, with no flag set: "JAX default" in the tables."""
OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Attributes:
    peers: names in `peers.PEERS`; none for the library's own programs.
    flags: added to XLA_FLAGS.
    processes: one process for each device, joined by `jax.distributed`, where else one process has all devices.
    seconds: the most that it may take; None is `--setting-seconds`.
    environment: further variables for its processes, as NAME=VALUE with blanks between.
    """

    peers: tuple[str, ...]
    flags: str = ""
    process_per_device: bool = False
    seconds: float | None = None
    environment: str = ""


SYMMETRIC = "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"
NCCL_RAGGED = (
    "--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false "
    "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"
)
SYMMETRIC_RAGGED = "--xla_gpu_ragged_all_to_all_mode=symmetric"
GRAPHS = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
ALONE = "--xla_gpu_shard_autotuning=false"
"""Flag of settings with a process for each device: these processes compile side by side, each in its own order, and
would wait for one another if they shared the search for the fastest kernels."""

SETTINGS: dict[str, Setting] = {
    OURS: Setting(()),
    "default": Setting((*ALL_TO_ALL, *GATHER, *RAGGED), seconds=90),
    # without more flags XLA refuses ragged_all_to_all there: its kernel wants all devices in one process
    "one process per device": Setting((*ALL_TO_ALL, *GATHER), ALONE, process_per_device=True),
    "symmetric buffers": Setting((*ALL_TO_ALL, *GATHER, RAGGED[3]), SYMMETRIC),
    "memcpy p2p": Setting(ALL_TO_ALL, "--xla_gpu_use_memcpy_local_p2p=true"),
    "user buffers": Setting((*ALL_TO_ALL, GATHER[1]), "--xla_gpu_enable_nccl_user_buffers=true"),
    "ragged by NCCL send/recv": Setting(RAGGED[:1], NCCL_RAGGED),
    # reported remedies for the hang of that path on jax 0.11: neither CUDA graphs nor NCCL's own virtual memory
    "ragged by NCCL send/recv, without CUDA graphs": Setting(
        RAGGED[:1], f"{NCCL_RAGGED} --xla_gpu_enable_command_buffer=", environment="NCCL_CUMEM_ENABLE=0"
    ),
    "ragged in segments by NCCL send/recv": Setting(RAGGED[3:4], NCCL_RAGGED),
    "symmetric buffers, one process per device": Setting(
        (*ALL_TO_ALL, *GATHER), f"{SYMMETRIC} {ALONE}", process_per_device=True
    ),
    "collectives in CUDA graphs": Setting((*ALL_TO_ALL, GATHER[1]), GRAPHS),
    "ragged in CUDA graphs": Setting(RAGGED[5:], GRAPHS),  # by itself: a kernel that fails there ends its process
    "ragged in symmetric memory": Setting(RAGGED[3::2], SYMMETRIC_RAGGED),
    "ragged in peer memory": Setting(RAGGED[3::2], "--xla_gpu_ragged_all_to_all_mode=peer"),
    "ragged by NCCL send/recv, one process per device": Setting(
        RAGGED[:1], f"{NCCL_RAGGED} {ALONE}", process_per_device=True
    ),
    "ragged in symmetric memory, one process per device": Setting(
        RAGGED[3::2],
        f"{SYMMETRIC_RAGGED} --xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl=true {ALONE}",
        process_per_device=True,
    ),
    "all_gather in symmetric memory": Setting(GATHER[1:], "--xla_gpu_all_gather_mode=symmetric"),
    "ragged as a dense all_to_all": Setting(
        RAGGED[:1], "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
    ),
    "ragged by a device kernel": Setting(  # which wants both buffers in symmetric memory
        (RAGGED[0], RAGGED[3]),
        f"{SYMMETRIC_RAGGED} --xla_gpu_experimental_ragged_all_to_all_use_device_kernel=true",
    ),
}
"""In the order in which they are run: the most informative settings come first."""


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for settings that do not exist, and for a file that another mode wrote."""
    unknown = set(options.settings or ()) - set(SETTINGS)
    if unknown:
        raise ValueError(f"--settings {sorted(unknown)}: must be among {list(SETTINGS)}")
    if options.json and pathlib.Path(options.json).exists():
        text = pathlib.Path(options.json).read_text()
        try:
            known = not text.strip() or set(json.loads(text)["settings"]) <= set(SETTINGS)
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise ValueError(f"--json {options.json}: is no file of jax-best, and would be lost; name another")
