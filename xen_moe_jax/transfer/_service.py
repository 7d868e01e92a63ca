"""Serves the frames of an engine's peers. All of it runs under the engine's lock."""

from __future__ import annotations

from collections.abc import Callable

from xen_moe_jax.transfer._connection import Connection, Grant
from xen_moe_jax.transfer._errors import StaleWindow, TransferError, TransferRefused
from xen_moe_jax.transfer._layout import Leaf
from xen_moe_jax.transfer._messages import Mailbox
from xen_moe_jax.transfer._remote import Peer
from xen_moe_jax.transfer._window import Windows

ERRORS: dict[str, type[TransferError]] = {"StaleWindow": StaleWindow, "TransferRefused": TransferRefused}


def _on_grant(peer: Connection, head: dict) -> None:
    leaves = {record["p"]: Leaf.from_json(record) for record in head["leaves"]}
    grant = Grant(peer, head["name"], head["w"], head["g"], leaves)
    peer.grants[grant.window, grant.generation] = grant
    _on_reply(peer, head)


def _on_revoke(peer: Connection, head: dict) -> None:
    if grant := peer.grants.get((head["w"], head["g"])):
        grant.revoke()
    else:
        peer.send({"t": "revoked", "w": head["w"], "g": head["g"]})


def _on_reply(peer: Connection, head: dict) -> None:
    peer.answer(head["q"], head)


def _on_no(peer: Connection, head: dict) -> None:
    error = ERRORS.get(head["e"], TransferRefused)
    peer.answer(head["q"], error(str(head["m"]), peer=peer.name))  # `ask` adds the request.


class Service:
    """Calls the handler of each frame."""

    def __init__(self, windows: Windows, mailbox: Mailbox):
        self._handlers: dict[str, Callable[[Connection, dict], None]] = {
            "look": windows.on_look,
            "open": windows.on_open,
            "revoked": windows.on_revoked,
            "imm": windows.on_imm,
            "lease": windows.on_lease,
            "release": windows.on_release,
            "bye": windows.on_bye,
            "grant": _on_grant,
            "revoke": _on_revoke,
            "here": _on_reply,
            "leased": _on_reply,
            "released": _on_reply,
            "no": _on_no,
        }
        self._mailbox = mailbox

    def read(self, peer: Peer) -> None:
        """Handles all frames that have arrived from a peer. A peer that breaks the protocol is lost."""
        if peer.lost:
            return
        try:
            frames, ended = peer.channel.receive()
            for head, payload in frames:
                self._handle(peer, head, payload)
        except Exception as cause:  # A bad frame costs the engine the peer that sent it, and nothing else.
            peer.lose(f"its channel broke: {cause!r}")
            return
        if ended:
            peer.lose("its engine was closed" if peer.left else "its process ended, or its connection broke")

    def _handle(self, peer: Peer, head: dict, payload: bytes) -> None:
        if peer.lost:
            return
        kind = head["t"]
        if handler := self._handlers.get(kind):
            handler(peer, head)
        elif not self._mailbox.handle(peer, head, payload):
            raise ValueError(f"a frame of unknown kind {kind!r}")
        peer.core.changed.notify_all()
