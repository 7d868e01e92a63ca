"""A short path for a small write that is repeated: as little as possible around the library's call."""

from __future__ import annotations

import weakref
from typing import Any

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._connection import Grant
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._counter import Imm
from xen_moe_jax.transfer._posting import SHORT
from xen_moe_jax.transfer._transfer import Arrived, Job, Runs, Transfer
from xen_moe_jax.transfer._wire import Posting, Repeated, at_address


class Repeat:
    """A write that was planned before: an array on one device, or pages of it, into one piece of a peer's memory.

    It only decides whether a further write is the same again. If not, the write is planned anew, which raises the
    errors of a write that is wrong.
    """

    __slots__ = ("_aval", "_grant", "_is_long", "_kind", "_request", "_runs", "_seen", "_sharding")

    def __init__(self, grant: Grant, request: str, source: Any, runs: Runs):
        template = at_address(runs.addresses, -source.unsafe_buffer_pointer())
        self._grant, self._request = grant, request
        self._runs = Repeated(runs.key, runs.memory, runs.nbytes, template)
        self._is_long = runs.nbytes > SHORT
        self._kind, self._aval, self._sharding = type(source), source.aval, source.sharding
        self._seen = weakref.ref(source)

    def write(self, core: Core, source: Any, imm: Imm | None, last: bool) -> Transfer | None:
        """Returns the transfer, or None if the source differs or is not ready, or if the window was closed."""
        if type(source) is not self._kind:  # A NumPy array, or one that is being traced.
            return None
        if (found := source.aval) is not self._aval:
            if found.shape != self._aval.shape or found.dtype != self._aval.dtype:
                return None
        if (sharding := source.sharding) is not self._sharding and sharding != self._sharding:
            return None
        grant = self._grant
        peer = grant.peer
        if peer.core is not core:
            return None
        with core.lock:
            if not grant.open or core.closing or peer.lost or source.is_deleted() or not source.is_ready():
                return None
            if source is not self._seen():  # JAX takes 2 us to tell an array's layout.
                if not _memory.is_row_major(source):
                    return None
                self._seen = weakref.ref(source)
            if core.device is not None:
                core.adopt_device()
            runs, pointer = self._runs, source.unsafe_buffer_pointer()
            lasting = runs.lasting
            posting: Posting | None
            kept = _memory.held(source, runs.memory) if self._is_long else [source]  # Other threads run meanwhile.
            if lasting is not None and not peer.link.failed:
                posting = None if (loop := lasting.call(pointer)) is None else lasting.posting(loop)
            else:
                posting = peer.link.post_again(runs, pointer)
            if posting is None and imm is None and not source.is_deleted():
                if last:
                    grant.finish()
                return Arrived(core, self._request, runs.nbytes)
            job = Job(peer, grant, None)
            job.add(posting, runs.nbytes)
            if posting is not None and not self._is_long:
                kept = _memory.held(source, runs.memory)
            return Transfer(core, "put", self._request, [], kept, imm, last).start_posted(job)
