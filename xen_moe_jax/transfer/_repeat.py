"""The same small write again and again, with as little as possible around the library's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xen_moe_jax.transfer import _posting
from xen_moe_jax.transfer._counter import Imm
from xen_moe_jax.transfer._transfer import Arrived, Job, Runs, Transfer

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine
    from xen_moe_jax.transfer._remote import Grant
    from xen_moe_jax.transfer._wire import Posting


class Repeat:
    """A write that was planned before: an array on one device, or pages of it, into one piece of a peer's memory.

    Planning it anew says what is wrong with a write; this says only whether it is the same again.
    """

    __slots__ = ("_aval", "_grant", "_kind", "_request", "_runs", "_sharding")

    def __init__(self, grant: Grant, request: str, source: Any, runs: Runs):
        template = _posting.at_address(runs.addresses, -source.unsafe_buffer_pointer())
        self._grant, self._request = grant, request
        self._runs = _posting.Repeated(runs.key, runs.memory, runs.nbytes, template)
        self._kind, self._aval, self._sharding = type(source), source.aval, source.sharding

    def write(self, engine: Engine, source: Any, imm: Imm | None) -> Transfer | None:
        """The transfer, or None where the source differs or is not ready, or the window was closed."""
        if type(source) is not self._kind:  # NumPy's, or one that is being traced.
            return None
        if (found := source.aval) is not self._aval:
            if found.shape != self._aval.shape or found.dtype != self._aval.dtype:
                return None
        if (sharding := source.sharding) is not self._sharding and sharding != self._sharding:
            return None
        grant = self._grant
        peer = grant.peer
        if peer._engine is not engine:
            return None
        with engine._lock:
            if not grant.open or engine._closing or peer.lost or source.is_deleted() or not source.is_ready():
                return None
            if engine._device is not None:
                engine._adopt_device()
            runs, pointer = self._runs, source.unsafe_buffer_pointer()
            lasting = runs.lasting
            posting: Posting | None
            if lasting is not None and not peer.link.failed:
                posting = lasting.posting(handle) if (handle := lasting.call(pointer)) else None
            else:
                posting = peer.link.post_again(runs, pointer)
            if posting is None and imm is None and not source.is_deleted():
                return Arrived(engine, self._request, runs.nbytes)
            transfer = Transfer(engine, "put", self._request, [], [source], imm)
            job = Job(peer, grant, None)
            job.add(posting, runs.nbytes)
            grant.take(transfer)
            transfer._begun(job)
            if not transfer._ended:
                transfer._follow()
        return transfer
