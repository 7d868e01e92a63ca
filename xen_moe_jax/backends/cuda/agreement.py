"""Agreement of a job's processes, through `jax.distributed`'s store, before they change symmetric memory together.

Memory between processes is allocated collectively: a process that enters alone waits for ever. So each process first
publishes its needs and whether it can meet them. No process goes on before all can, and all go on in one order for the
whole job. Every wait has a limit, and ends early when a process is known to be dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

PREFIX = "xen_moe_jax/agreement"
SLICE_S = 1.0
"""Interval in which a waiting process looks for dead processes."""


class Store(Protocol):
    """The key-value store of a job."""

    def set(self, key: str, value: bytes) -> None: ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """Sets `key` unless a process has set it; returns the stored value, which is the same for every process."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of the key; None if it has not been set after `seconds`."""


class JaxStore:
    """The store of `jax.distributed`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def set_once(self, key: str, value: bytes) -> bytes:
        try:
            self._client.key_value_set_bytes(key, value)
            return value
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return bytes(self._client.blocking_key_value_get_bytes(key, 10_000))

    def get(self, key: str, seconds: float) -> bytes | None:
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, max(1, round(seconds * 1000))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise


class Agreement:
    """Called by every process with the same `key`s; a key is used once."""

    def __init__(
        self,
        store: Store,
        process: int,
        count: int,
        dead: Callable[[], Collection[int]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._process, self._count, self._dead, self._clock = store, process, count, dead, clock
        self._next = 1
        self._order = threading.Lock()

    def __call__(
        self, key: str, payload: bytes, seconds: float, without_dead: bool = False
    ) -> tuple[int, list[bytes], list[int]]:
        """Returns a ticket, every process's payload, by process, and the processes that the job goes on without.

        Tickets count the agreements of the job, 1, 2, ...: processes that act in ticket order all act in the same
        order. Process 0 gives a ticket to an agreement once all processes have entered it or, with `without_dead`, have
        died. Process 0 decides for all processes which ones are left out; their payloads are empty. A process whose
        time is up ends the agreement for all processes, unless process 0 was first: the first value written is the
        verdict.

        Raises:
          RuntimeError: a process did not come within `seconds`, or has died; it is named, by every process that came.
        """
        base = f"{PREFIX}/{key}"
        self._store.set(f"{base}/{self._process}", payload)
        limit = self._clock() + seconds
        if self._process == 0:
            values = [self._wait(f"{base}/{p}", limit, range(self._count)) for p in range(self._count)]
            absent = [p for p, value in enumerate(values) if value is None]
            gone = sorted(set(absent) & set(self._dead())) if without_dead else []
            late = [p for p in absent if p not in gone]
            if late:
                self._obey(key, self._end(base, late, seconds))
            with self._order:  # a ticket that is not given out would leave a gap in the order
                ticket = self._next
                verdict = " ".join(["ticket", str(ticket), *map(str, gone)]).encode()
                first = self._store.set_once(f"{base}/verdict", verdict)
                self._next += first == verdict
            self._obey(key, first)
            return ticket, [value or b"" for value in values], gone
        grace = 5.0  # process 0 began to wait when it came, perhaps later than this one
        answer = self._wait(f"{base}/verdict", limit + grace, (0,))
        if answer is None:
            late = [p for p in range(self._count) if self._store.get(f"{base}/{p}", 0.001) is None]
            answer = self._end(base, late or [0], seconds)
        ticket, gone = self._obey(key, answer)
        payloads = [b"" if p in gone else self._store.get(f"{base}/{p}", SLICE_S) or b"" for p in range(self._count)]
        return ticket, payloads, gone

    def _end(self, base: str, late: list[int], seconds: float) -> bytes:
        """Writes the verdict that the agreement fails because `late` did not come, unless there is a verdict already;
        returns the verdict."""
        return self._store.set_once(f"{base}/verdict", f"late {','.join(map(str, late))} {seconds:.0f}".encode())

    def _obey(self, key: str, verdict: bytes) -> tuple[int, list[int]]:
        """Returns the ticket of a verdict and the processes that are left out; raises if the verdict names late
        processes."""
        word, value, *rest = verdict.decode().split()
        if word == "late":
            raise RuntimeError(self._text(key, [int(p) for p in value.split(",")], float(rest[0])))
        return int(value), [int(p) for p in rest]

    def _wait(self, key: str, limit: float, watched: Collection[int]) -> bytes | None:
        while True:
            left = limit - self._clock()
            value = self._store.get(key, max(0.001, min(SLICE_S, left)))
            if value is not None or left <= 0:
                return value
            if gone := set(self._dead()) & set(watched):
                # a payload that a process wrote before it died still counts
                return self._store.get(key, 0.001) if key.rsplit("/", 1)[1] not in map(str, gone) else None

    def _text(self, key: str, late: list[int], seconds: float) -> str:
        gone = sorted(set(self._dead()) & set(late))  # a death is the cause: the wait ends without the late processes
        names = ", ".join(map(str, gone or late))
        why = f"process {names} has died" if gone else f"process {names} did not come within {seconds:.0f} s"
        return (
            f"xen_moe_jax: the processes of this job change the symmetric memory of a mesh axis together ({key}), and "
            f"{why}. Every process must compile the same programs and open and close the same xm.Buffers, in any order "
            "but all of them; find out what that process does instead"
        )
