"""Symmetric memory of an `elastic.Group` for the kernels: each process makes its own, and the members of a view map
each other's by CUDA's IPC handles (ffi/ipc_memory.h). Memory is made before a process joins: it cannot grow in the
group.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

import jax
import numpy as np

from xen_moe_jax.backends.cuda import job, module, processes

SECONDS = 30.0
"""Time for the GPU to become idle: kernels of this library that wait are told to end."""
EPOCHS = 1 << 16
"""Numbers of operations that a view has for itself: the first one of a view is larger than any that a flag holds."""


class Alone:
    """The agreement of a process that makes memory by itself: with nobody."""

    def __init__(self) -> None:
        self._ticket = 0
        self._lock = threading.Lock()

    def __call__(
        self, key: str, payload: bytes, seconds: float, without_dead: bool = False
    ) -> tuple[int, list[bytes], list[int]]:
        del key, seconds, without_dead
        with self._lock:
            self._ticket += 1
            return self._ticket, [payload], []


class Members:
    """The memory of rank `rank` of `num_ranks`.

    Raises:
      BackendUnavailable: there are no kernels here. ValueError: this process has several GPUs, or another group.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        compiled = module.registered()
        if jax.local_device_count() != 1:
            raise ValueError(
                f"elastic.Group: this process owns {jax.local_device_count()} GPUs: a rank has one; start it with "
                "CUDA_VISIBLE_DEVICES set to one of them"
            )
        self._compiled, self._num_ranks = compiled, num_ranks
        ordinal = jax.local_devices()[0].local_hardware_id or 0
        per_process = compiled.devices_per_process
        self.keys = np.asarray([[r * per_process + ordinal for r in range(num_ranks)]], np.int64)
        job.describe_as(compiled, rank, num_ranks, self.keys[0].tolist())
        compiled.ipc_start(rank, num_ranks, ordinal)
        compiled.set_agreement(Alone())
        processes.started_by_a_group()

    def arrive(self) -> list[Any]:
        """Ends what still waits, and returns what the other members need to map this rank's memory; JSON can hold it.

        Raises:
          RuntimeError: the GPU did not become idle.
        """
        self._compiled.ipc_quiet(SECONDS)
        shown = self._compiled.ipc_show()
        return [[name, _text(mailbox), _text(staging), *sizes] for name, mailbox, staging, *sizes in shown]

    def adopt(self, view: int, shown: dict[int, list[Any]]) -> None:
        """Maps the memory of the members, by rank as `arrive` gave it, and starts again with them.

        Raises:
          RuntimeError: ranks have compiled other programs, or memory cannot be mapped.
        """
        names = {rank: {entry[0]: entry[3:] for entry in entries} for rank, entries in shown.items()}
        first = min(names)
        for rank, sizes in names.items():
            if sizes != names[first]:
                raise RuntimeError(
                    f"elastic.Group: rank {rank} has symmetric memory {sizes} and rank {first} {names[first]}: every "
                    "rank must compile the same programs, before it joins"
                )
        for name in names[first]:
            handles = [[b"", b""] for _ in range(self._num_ranks)]
            for rank, entries in shown.items():
                handles[rank] = next([_bytes(e[1]), _bytes(e[2])] for e in entries if e[0] == name)
            mailboxes, stagings = ([pair[i] for pair in handles] for i in (0, 1))
            epoch = (view % (EPOCHS - 1) + 1) * EPOCHS + 2
            self._compiled.ipc_adopt(name, mailboxes, stagings, epoch % (1 << 32), view, SECONDS)

    def mark_dead(self, rank: int) -> None:
        """Operations that wait for this rank fail."""
        self._compiled.mark_dead(rank, False)

    def failure(self) -> str:
        """Why an operation has failed, or ""."""
        return self._compiled.failure()

    def interrupt(self) -> None:
        """Operations that wait fail: the other members have given up the step."""
        self._compiled.ipc_interrupt(SECONDS)


def _text(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
