"""What can go wrong between two processes, by name.

Every error says which peer, which request and how many bytes had been confirmed: `error.peer`, `error.request`,
`error.bytes_done`.
"""

from __future__ import annotations

__all__ = [
    "PeerLost",
    "StaleWindow",
    "TransferCancelled",
    "TransferError",
    "TransferRefused",
    "TransferTimeout",
    "TransferUnavailable",
]


class TransferError(RuntimeError):
    """The base of this module's errors.

    Attributes: `peer` (its name, or None), `request` (what was going on, with its number), `bytes_done` (bytes that the
    engine had confirmed in the peer's memory; 0 where nothing was).
    """

    def __init__(self, text: str, *, peer: str | None = None, request: str = "", bytes_done: int = 0):
        self.peer = peer
        self.request = request
        self.bytes_done = bytes_done
        super().__init__(text)


class about:
    """Says of the errors within which request and which peer they concern, where they do not say it themselves."""

    __slots__ = ("_peer", "_request")

    def __init__(self, request: str, peer: str | None = None):
        self._request, self._peer = request, peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, TransferError):
            if error.peer is None:
                error.peer = self._peer
            if not error.request:
                error.request = self._request
                if self._request not in str(error):
                    error.args = (f"{self._request}: {error}",)


class PeerLost(TransferError):
    """The peer's process ended, its connection broke, or its engine was closed."""


class TransferTimeout(TransferError, TimeoutError):
    """What was waited for did not happen in time; it may still happen, unless it is cancelled."""


class StaleWindow(TransferError):
    """The generation of the window that was meant is not open any more (committed, reset or closed)."""


class TransferRefused(TransferError):
    """The peer, or this process, will not do it: no permission, wrong token, wrong shape, engine closed."""


class TransferCancelled(TransferError):
    """`Transfer.cancel` was called; nothing of it can land any more."""


class TransferUnavailable(ImportError):
    """The engine's library is not installed: `pip install 'xen-moe-jax[transfer]'`."""
