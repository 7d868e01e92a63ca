"""What an engine does with its peers' frames: windows, leave to write, arrivals, reads. Under the engine's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xen_moe_jax.transfer._counter import check_imm
from xen_moe_jax.transfer._errors import TransferRefused
from xen_moe_jax.transfer._layout import Leaf
from xen_moe_jax.transfer._remote import ERRORS, Grant, Peer

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine


def _refuse(engine: Engine, peer: Peer, head: dict, error: str, text: str) -> None:
    peer.send({"t": "no", "q": head["q"], "e": error, "m": text})


def answer_look(engine: Engine, peer: Peer, head: dict) -> None:
    name = head["name"]
    window, prefix = engine._names.get(name, (None, ""))
    if window is not None and window.may_write(peer):
        if window._state == "closing":
            engine._waiting_looks.append((peer, head))
            return
        region, number, generation, writable = window._open.region, window.number, window.generation, True
    elif name in engine._published:
        published, prefix = engine._published[name]
        region, number, generation, writable = published.region, 0, 0, False
    else:
        why = "is not for this peer" if window is not None else "does not exist"
        known = sorted(n for n, (w, _) in engine._names.items() if w.may_write(peer)) + sorted(engine._published)
        _refuse(
            engine,
            peer,
            head,
            "TransferRefused",
            f"window {name!r} of {engine.name!r} {why}; this peer can see {known}",
        )
        return
    reply = {"t": "here", "q": head["q"], "w": number, "g": generation, "prefix": prefix, "writable": writable}
    peer.send(reply | {"leaves": region.describe(with_memory=False)})


def _on_open(engine: Engine, peer: Peer, head: dict) -> None:
    window = engine._windows.get(head["w"])
    name = head["name"]
    if window is None and name in engine._published:
        _refuse(engine, peer, head, "TransferRefused", f"{name!r} of {engine.name!r} is published: it is only read")
    elif window is None:
        _refuse(engine, peer, head, "StaleWindow", f"window {name!r} of {engine.name!r} was closed")
    elif not window.may_write(peer):
        _refuse(engine, peer, head, "TransferRefused", f"window {name!r} of {engine.name!r} is not for {peer.name!r}")
    elif window.generation != head["g"] or window._state != "open":
        _refuse(
            engine,
            peer,
            head,
            "StaleWindow",
            f"generation {head['g']} of window {name!r} of {engine.name!r} is not open any more; "
            f"take peer[{name!r}] again",
        )
    else:
        window._open.writers.add(peer)
        leaves = window._open.region.describe(with_memory=True)
        peer.send({"t": "grant", "q": head["q"], "w": window.number, "g": head["g"], "name": name, "leaves": leaves})


def _on_grant(engine: Engine, peer: Peer, head: dict) -> None:
    leaves = {record["p"]: Leaf.from_json(record) for record in head["leaves"]}
    grant = Grant(peer, head["name"], head["w"], head["g"], leaves)
    peer.grants[grant.window, grant.generation] = grant
    _on_reply(engine, peer, head)


def _on_revoke(engine: Engine, peer: Peer, head: dict) -> None:
    if grant := peer.grants.get((head["w"], head["g"])):
        grant.revoke()
    else:
        peer.send({"t": "revoked", "w": head["w"], "g": head["g"]})


def _on_revoked(engine: Engine, peer: Peer, head: dict) -> None:
    if window := engine._windows.get(head["w"]):
        window.confirm(peer, head["g"])
    for window, generation in engine._retired:
        if (window.number, generation.number) == (head["w"], head["g"]):
            generation.writers.discard(peer)


def _on_imm(engine: Engine, peer: Peer, head: dict) -> None:
    window, imm = engine._windows.get(head["w"]), check_imm(head["k"])
    # A number that was seen, or a generation that is not open, counts nothing.
    if not peer.arrivals_seen.add(head["n"]):
        return
    if window is not None and window.generation == head["g"] and peer in window._open.writers:
        if not engine._arrivals.add(imm, (peer.number, head["w"], head["g"])):
            engine._lose(peer, "it counts too many different numbers; close counters that have been waited for")


def _on_lease(engine: Engine, peer: Peer, head: dict) -> None:
    published, _ = engine._published.get(head["name"], (None, ""))
    if published is None:
        _refuse(engine, peer, head, "TransferRefused", f"{engine.name!r} has published nothing named {head['name']!r}")
        return
    published.lease()
    engine._leases[peer.number, head["q"]] = published
    peer.send({"t": "leased", "q": head["q"], "l": head["q"], "leaves": published.region.describe(with_memory=True)})


def _on_release(engine: Engine, peer: Peer, head: dict) -> None:
    published = engine._leases.pop((peer.number, head["l"]), None)
    intact = published is not None and published.intact()
    if published is not None:
        published.give_back()
    peer.send({"t": "released", "q": head["q"], "intact": intact})


def _on_reply(engine: Engine, peer: Peer, head: dict) -> None:
    if head["q"] in engine._calls:
        engine._calls[head["q"]] = head


def _on_no(engine: Engine, peer: Peer, head: dict) -> None:
    if head["q"] in engine._calls:
        error = ERRORS.get(head["e"], TransferRefused)
        engine._calls[head["q"]] = error(str(head["m"]), peer=peer.name)  # Who asked knows the request.


def _on_bye(engine: Engine, peer: Peer, head: dict) -> None:
    """The peer has nothing under way any more: what it wrote is whole, what it was to confirm is confirmed."""
    peer.left = True
    for window in engine._windows.values():
        window._open.writers.discard(peer)
    for _, generation in engine._retired:
        generation.writers.discard(peer)


HANDLERS: dict[str, Callable[[Engine, Peer, dict], None]] = {
    "look": answer_look,
    "open": _on_open,
    "grant": _on_grant,
    "revoke": _on_revoke,
    "revoked": _on_revoked,
    "imm": _on_imm,
    "lease": _on_lease,
    "release": _on_release,
    "here": _on_reply,
    "leased": _on_reply,
    "released": _on_reply,
    "no": _on_no,
    "bye": _on_bye,
}
