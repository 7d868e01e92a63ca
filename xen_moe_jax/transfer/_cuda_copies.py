"""Copies from this process into another process's GPU memory by the CUDA driver (CUDA IPC, NVLink).

UCX does the same, but takes 30 us for every piece of XLA's memory. The driver's own copy takes 2 us, and half of one in
a batch; and from host memory UCX cannot write there at all. Registered memory is exported beside UCX's key. A process
that can open the export copies by the driver; everything else (other machines, the same process) stays with UCX. The
C++ is `ffi/transfer/cuda_copies.cc`.
"""

from __future__ import annotations

import struct

from xen_moe_jax.transfer import _device, _posting, _process

_EXPORT = struct.Struct("<16s16s64sQQQ")
"""Machine, process, CUDA's handle, its buffer number, first address and bytes of the allocation."""
IDLE_MAPPINGS = 64
"""Unused mappings that are kept: opening one takes longer than a small write."""


def export(pointer: int) -> bytes:
    """Returns the bytes by which another process of this machine maps the allocation at `pointer`; empty if it
    cannot."""
    found = _device.export(pointer)
    return b"" if found is None else _EXPORT.pack(_process.machine_mark(), _process.mark()[0], *found)


class Mapping(_posting.Key):
    """A peer's exported memory in this process. It counts its postings as a key does, and is kept while it is idle."""

    def __init__(self, here: int, remote: int, nbytes: int):
        self.here = here
        self._memory = _posting.native().PeerMemory(remote, nbytes, here)
        super().__init__(self._memory.address)

    def release(self) -> None:
        """Does nothing: `Copies` closes mappings."""


class Copies:
    """The copies from one GPU of this process, or from its host memory, into one peer's memory: a stream, and the
    mappings in that GPU's context.
    """

    def __init__(self, link: _posting.LinkState, device: int, from_host: bool):
        self._link, self._device = link, device
        self._mappings: dict[bytes, Mapping | None] = {}
        _device.make_current(device)
        self._stream: int | None = _device.new_stream()
        calls = [call or 0 for call in _device.copy_functions(from_host)]
        self._copies = _posting.native().DriverCopies(calls, _device.context(device), self._stream)
        self.starter = _posting.Starter(self)
        self.starter.link.use_driver(self._copies)

    open = True  # On a closed link events are waited for too: copies that were queued cannot be called back.
    runs_alone = True

    @property
    def failed(self) -> str | None:
        return self._link.failed

    def status_text(self, _status: int) -> str:
        return f"CUDA error {self._copies.error} of a copy into another process's GPU memory"

    def mapping(self, exported: bytes) -> Mapping | None:
        """Returns the exported memory in this process, or None if it cannot be mapped."""
        if exported in self._mappings:
            found = self._mappings.pop(exported)
        else:
            found = self._map(exported)
        self._mappings[exported] = found  # The order is that of use.
        return found

    def _map(self, exported: bytes) -> Mapping | None:
        machine, process, *handle, remote, nbytes = _EXPORT.unpack(exported)
        if machine != _process.machine_mark() or process == _process.mark()[0]:
            return None
        _device.make_current(self._device)
        self._close_idle(IDLE_MAPPINGS)
        here = _device.open_exported(handle[0])
        if here is None:  # An earlier allocation may still be mapped at its place.
            self._close_idle(0)
            here = _device.open_exported(handle[0])
        return None if here is None else Mapping(here, remote, nbytes)

    def _close_idle(self, keep: int) -> None:
        idle = [e for e, mapping in self._mappings.items() if mapping is None or not mapping.postings]
        for exported in idle[: max(0, len(idle) - keep)]:
            if mapping := self._mappings.pop(exported):
                _device.close_exported(mapping.here)

    def idle(self) -> bool:
        return not any(mapping and mapping.postings for mapping in self._mappings.values())

    def close(self) -> None:
        """Waits until no copy is pending, and closes the mappings."""
        if self._stream is not None:
            _device.make_current(self._device)
            _device.end_stream(self._stream)
            for mapping in self._mappings.values():
                if mapping is not None:
                    _device.close_exported(mapping.here)
            self._mappings = {}
            self._stream = None
            self._copies.close()


class LinkCopies:
    """The copies into one peer's GPU memory: from any GPU of this process, or from the host through the GPU `through`
    (None: this process has none).
    """

    def __init__(self, link: _posting.LinkState, through: int | None):
        self._link, self._through, self._by_device = link, through, dict[int | None, Copies]()

    def way(self, exported: bytes, local: int | None) -> tuple[_posting.Starter, Mapping] | None:
        """Returns the function that starts a posting from the GPU that has `local`, or from the host (None), and its
        key.

        Returns None if the driver cannot copy.
        """
        if len(exported) != _EXPORT.size:
            return None
        device = None if local is None else _device.ordinal_of(local)
        copies = self._by_device.get(device)
        if copies is None:
            through = self._through if device is None else device
            if through is None:
                return None
            copies = self._by_device[device] = Copies(self._link, through, device is None)
        mapping = copies.mapping(exported)
        return None if mapping is None else (copies.starter, mapping)

    def idle(self) -> bool:
        return all(copies.idle() for copies in self._by_device.values())

    def close(self) -> None:
        """Waits until no copy is pending."""
        for copies in self._by_device.values():
            copies.close()
        self._by_device = {}
