"""The same small write again and again, with as little as possible around the library's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from xen_moe_jax.transfer.counter import Imm
from xen_moe_jax.transfer.transfer import Job, Runs, Transfer

if TYPE_CHECKING:
    from xen_moe_jax.transfer.engine import Engine
    from xen_moe_jax.transfer.remote import Grant


class Repeat:
    """A write that was planned before: a whole array on one device, into one run of a peer's memory.

    Planning it anew says what is wrong with a write; this says only whether it is the same again.
    """

    __slots__ = ("_dtype", "_grant", "_nbytes", "_request", "_runs", "_shape", "_sharding", "_target")

    def __init__(self, grant: Grant, request: str, source: jax.Array, runs: Runs):
        self._grant, self._request, self._runs = grant, request, runs
        self._sharding, self._shape, self._dtype = source.sharding, source.shape, source.dtype
        self._target, self._nbytes = runs.addresses[0, 1:].tolist()

    def write(self, engine: Engine, source: Any, imm: Imm | None) -> Transfer | None:
        """The transfer, or None where the source differs or is not ready, or the window was closed."""
        if source.shape != self._shape or source.dtype != self._dtype or source.sharding != self._sharding:
            return None
        grant = self._grant
        peer = grant.peer
        if peer._engine is not engine:
            return None
        with engine._lock:
            if not grant.open or engine._closing or peer.lost or source.is_deleted() or not source.is_ready():
                return None
            engine._adopt_device()
            pointer = source.unsafe_buffer_pointer()
            posting = peer.link.post_one("put", *self._runs[:2], pointer, self._target, self._nbytes)
            transfer = Transfer(engine, "put", self._request, [], [source], imm)
            if posting is None and imm is None and not source.is_deleted():
                transfer._arrived(self._nbytes)
                return transfer
            job = Job(peer, grant, None)
            job.add(posting, self._nbytes)
            grant.take(transfer)
            transfer._begun(job)
            if not transfer._ended:
                engine._active.append(transfer)
                engine._loop.wake()
        return transfer
