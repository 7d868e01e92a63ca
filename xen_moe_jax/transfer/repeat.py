"""The same small write again and again, with as little as possible around the library's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xen_moe_jax.transfer.counter import Imm
from xen_moe_jax.transfer.remote import at_address
from xen_moe_jax.transfer.transfer import Job, Runs, Transfer

if TYPE_CHECKING:
    from xen_moe_jax.transfer.engine import Engine
    from xen_moe_jax.transfer.remote import Grant


class Repeat:
    """A write that was planned before: an array on one device, or pages of it, into one piece of a peer's memory.

    Planning it anew says what is wrong with a write; this says only whether it is the same again.
    """

    __slots__ = ("_dtype", "_grant", "_request", "_runs", "_shape", "_sharding", "_target")

    def __init__(self, grant: Grant, request: str, source: Any, runs: Runs):
        template = at_address(runs.addresses, -source.unsafe_buffer_pointer())
        self._grant, self._request, self._runs = grant, request, runs._replace(addresses=template)
        self._sharding, self._shape, self._dtype = source.sharding, source.shape, source.dtype
        # A single run from the source's first byte on needs no arithmetic.
        self._target = int(template[0, 1]) if len(template) == 1 and not template[0, 0] else None

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
            key, memory, nbytes, template = self._runs
            if self._target is None:
                posting = peer.link.post("put", key, memory, nbytes, at_address(template, pointer))
            else:
                posting = peer.link.post_one("put", key, memory, pointer, self._target, nbytes)
            transfer = Transfer(engine, "put", self._request, [], [source], imm)
            if posting is None and imm is None and not source.is_deleted():
                transfer._arrived(nbytes)
                return transfer
            job = Job(peer, grant, None)
            job.add(posting, nbytes)
            grant.take(transfer)
            transfer._begun(job)
            if not transfer._ended:
                engine._active.append(transfer)
                engine._loop.wake()
        return transfer
