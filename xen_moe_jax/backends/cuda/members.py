"""Symmetric memory of an `elastic.Group` for the kernels: each process makes its own, and the members of a view map
each other's memory by CUDA's IPC handles (ffi/ipc_memory.h). A process makes its memory before it joins; the memory
cannot grow while the process is a member.
"""

from __future__ import annotations

import base64
import threading
from typing import Any, ClassVar

import jax
import numpy as np

from xen_moe_jax.backends.cuda import job, module, processes

SECONDS = 30.0
"""Seconds that the GPU has to become idle, once kernels of this library that wait have been told to end."""
AHEAD = 64
"""Epochs, the numbers of operations, between the latest epoch of any member of a view and the first one of the next
view. No flag that is still on its way has an epoch of the next view, because an operation needs all members: a process
that is left out is one operation ahead of the members at most."""


class Alone:
    """The agreement (ffi/agreement.h) of a process that makes memory by itself: it asks no other process.

    Attributes:
      here: that of this process, if it has one.
      member: True once the process is a member of a group, whose memory cannot change.
    """

    here: ClassVar[Alone | None] = None

    def __init__(self) -> None:
        self.member = False
        self._ticket = 0
        self._lock = threading.Lock()

    def __call__(
        self, key: str, payload: bytes, seconds: float, without_dead: bool = False
    ) -> tuple[int, list[bytes], list[int]]:
        del key, seconds, without_dead
        self.check()
        with self._lock:
            self._ticket += 1
            return self._ticket, [payload], []

    def check(self) -> None:
        """Raises RuntimeError if the process is a member, or was one: members may still have its memory mapped."""
        if self.member:
            raise RuntimeError(
                "elastic.Group: the memory of the kernels cannot change while this process is a member: compile and "
                "run every program, of every shape, before join(), open and close xm.Buffer before it, and call "
                "group.recover(step), not xen_moe_jax.cuda.reset(), after a failure"
            )


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
        self._compiled, self._rank, self._num_ranks = compiled, rank, num_ranks
        ordinal = jax.local_devices()[0].local_hardware_id or 0
        per_process = compiled.devices_per_process
        self.keys = np.asarray([[r * per_process + ordinal for r in range(num_ranks)]], np.int64)
        job.describe_as(compiled, rank, num_ranks, self.keys[0].tolist())
        compiled.ipc_start(rank, num_ranks, ordinal)
        self._alone, self._view = Alone(), 1
        Alone.here = self._alone
        compiled.set_agreement(self._alone)
        processes.started_by_a_group()

    def arrive(self) -> list[Any]:
        """Ends operations that still wait, and returns what the other members need to map this rank's memory: for each
        workspace its name, two IPC handles as text, two sizes in bytes, and its latest epoch. JSON can hold it.

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
          RuntimeError: memory cannot be mapped.
        """
        self._alone.member, self._view = True, view
        by_name = {rank: {entry[0]: entry[1:] for entry in entries} for rank, entries in shown.items()}
        for name in by_name[min(by_name)]:  # the same names and sizes on all members: `programs`
            mailboxes, stagings = ([b""] * self._num_ranks for _ in range(2))
            for rank, entries in by_name.items():
                mailboxes[rank], stagings[rank] = map(_bytes, entries[name][:2])
            epoch = max(entries[name][4] for entries in by_name.values())
            self._compiled.ipc_adopt(name, mailboxes, stagings, _following(epoch), view % (1 << 32), SECONDS)

    def programs(self) -> dict[str, list[int]]:
        """Returns what must be the same on all members: the sizes in bytes of each workspace, by its name."""
        return {name: list(sizes) for name, _, _, *sizes, _ in self._compiled.ipc_show()}

    def leave(self) -> None:
        """Ends operations that still wait, and forgets the other members' memory and failures.

        Raises:
          RuntimeError: the GPU did not become idle.
        """
        self.adopt(self._view, {self._rank: self.arrive()})

    def mark_dead(self, rank: int) -> None:
        """Lets operations that wait for rank `rank` fail."""
        self._compiled.mark_dead(rank, False)

    def failure(self) -> str:
        """Returns why an operation has failed, or ""."""
        return self._compiled.failure()

    def interrupt(self) -> None:
        """Lets all operations that wait fail, because a member, mostly another one, has given up the step."""
        self._compiled.ipc_interrupt(SECONDS)


def _following(epoch: int) -> int:
    """Returns the first epoch of a view after a view in which `epoch`, uint32, was the latest one. All flags are
    cleared between them, so that epochs may begin again near the end of their range."""
    return 2 if epoch > 0xFFFF0000 else epoch + AHEAD


def _text(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
