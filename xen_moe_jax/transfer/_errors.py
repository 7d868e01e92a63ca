"""The errors of transfers between processes.

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

    Attributes: `peer` (its name, or None), `request` (the operation that failed), `bytes_done` (bytes that were
    confirmed in the peer's memory before the error).
    """

    def __init__(self, text: str, *, peer: str | None = None, request: str = "", bytes_done: int = 0):
        self.peer = peer
        self.request = request
        self.bytes_done = bytes_done
        super().__init__(text)


class about:
    """A context that adds the request and the peer to the transfer errors raised in it which do not name them."""

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
    """The operation did not end in time. It is still pending, unless it is cancelled."""


class StaleWindow(TransferError):
    """The generation of the window is not open any more: it was committed, reset or closed."""


class TransferRefused(TransferError):
    """The peer or this process refuses: no permission, wrong token, wrong shape, engine closed."""


class TransferCancelled(TransferError):
    """`Transfer.cancel` was called; nothing more of the transfer can be written."""


class TransferUnavailable(ImportError):
    """The engine's library is not installed: `pip install 'xen-moe-jax[transfer]'`."""


def stale_window(request: str, peer: str, window: str, generation: int) -> StaleWindow:
    """Returns the error for a write into a generation that is not open any more."""
    text = (
        f"{request}: generation {generation} of window {window!r} of {peer!r} was closed; take peer[{window!r}] again"
    )
    return StaleWindow(text, peer=peer, request=request)
