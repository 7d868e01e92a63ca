"""Symmetric memory of an `elastic.Group` for the kernels: each process makes its own, and the members of a view map
each other's memory by CUDA's IPC handles (ffi/ipc_memory.h). A process makes its memory before it joins; the memory
cannot grow while the process is a member.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

import jax
import numpy as np

from xen_moe_jax.backends.cuda import job, module, processes

SECONDS = 30.0
"""Seconds that the GPU has to become idle, once kernels of this library that wait have been told to end."""
EPOCHS = 1 << 16
"""Epochs, the numbers of operations, that a view has for itself: the first epoch of a view is larger than every epoch
that a flag holds."""


class Alone:
    """The agreement (ffi/agreement.h) of a process that makes memory by itself: it asks no other process."""

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
    """The memory of rank `rank` of `num_ranks`. `keys`, int64 `[1, R]`, are the devices of all ranks.

    Raises:
      BackendUnavailable: the compiled kernels cannot be loaded.
      ValueError: this process has several GPUs, or has run operations on its GPU outside the group.
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
        """Ends operations that still wait, and returns what the other members need to map this rank's memory: for each
        workspace its name, two IPC handles as text, and two sizes in bytes. JSON can hold it.

        Raises:
          RuntimeError: the GPU did not become idle.
        """
        self._compiled.ipc_quiet(SECONDS)
        shown = self._compiled.ipc_show()
        return [[name, _text(mailbox), _text(staging), *sizes] for name, mailbox, staging, *sizes in shown]

    def adopt(self, view: int, shown: dict[int, list[Any]]) -> None:
        """Maps the memory of the members of view `view`, and starts again with them. `shown`: by rank, what `arrive`
        returned there.

        Raises:
          RuntimeError: the ranks have compiled different programs, or memory cannot be mapped.
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
        """Lets operations that wait for rank `rank` fail."""
        self._compiled.mark_dead(rank, False)

    def failure(self) -> str:
        """Returns why an operation has failed, or ""."""
        return self._compiled.failure()

    def interrupt(self) -> None:
        """Lets all operations that wait fail, because the other members have given up the step."""
        self._compiled.ipc_interrupt(SECONDS)


def _text(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
