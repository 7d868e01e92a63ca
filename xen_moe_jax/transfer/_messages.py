"""Messages between engines: `send`, `recv` and `barrier`.

Bytes travel in the frame. For arrays the frame has their addresses: the receiver reads them, and says when it has.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._connection import Connection
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused, TransferTimeout
from xen_moe_jax.transfer._layout import Leaf, leaves_by_path
from xen_moe_jax.transfer._reading import fetch
from xen_moe_jax.transfer._region import Region, array_records
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteWindow
from xen_moe_jax.transfer._transfer import Job, Transfer

MAX_INLINE = 1 << 20
"""Bytes that travel in the frame; more travel as an array."""
MAX_PENDING = 64 << 20
"""Bytes of a peer's messages that may wait for `recv`; more are refused."""


class _Letter(Transfer):
    """The transfer of one sent message. It ends when the peer says that it has taken the message."""

    def __init__(self, mailbox: Mailbox, peer: Connection, request: str, number: int, nbytes: int):
        super().__init__(mailbox.core, "put", request, [Job(peer, None, lambda: ([], []))], [])
        self._mailbox, self._peer = mailbox, peer
        self.number, self.nbytes, self._posted = number, nbytes, True
        self.region: Region | None = None
        self.held: list[object] = []

    def advance(self) -> bool:
        return False

    def stop(self, error) -> None:
        """Withdraws the message. The peer may be reading it: it ends when the peer says so, or is lost."""
        if not self.ended and self._error is None:
            self._error = error
            self._peer.send({"t": "withdraw", "i": self.number})

    def lose(self, peer: Connection) -> None:
        """Ends the message; a withdrawn one with the error that withdrew it."""
        if peer is self._peer and not self.ended:
            self.finish(self._error or peer.lost_error(self._progress_text(), self.request, self.bytes_done))

    def refuse(self, reason: str) -> None:
        """Ends with the peer's refusal, or with the error that withdrew the message."""
        text = f"{self.request}: {reason}"
        self.finish(self._error or TransferRefused(text, peer=self._peer.name, request=self.request))

    def finish(self, error) -> None:
        """Ends with an error, or with None."""
        self._error = error
        if error is None:
            self.bytes_done = self.nbytes or 0
        if self.region is not None:
            self.region.release()
            self.region = None
        self.held = []
        self._mailbox.letters.pop((self._peer.number, self.number), None)
        self._end()
        self._core.pending = [operation for operation in self._core.pending if operation is not self]


def check_peer(peer: Any, request: str) -> None:
    """Raises `TransferRefused` for a value that is not a `Peer`."""
    if not isinstance(peer, Peer):
        raise TransferRefused(
            f"{request}: {peer!r} is a {type(peer).__name__}, not a Peer, as connect() and peer(name) return it",
            request=request,
        )


def check_tag(tag: Any, request: str) -> None:
    """Raises `TransferRefused` unless `tag` is a string: a peer gives up an engine that sends another one."""
    if not isinstance(tag, str):
        raise TransferRefused(f"{request}: tag={tag!r} must be a string", request=request)


class Mailbox:
    """The messages of one engine, sent and received, and its barriers."""

    def __init__(self, core: Core, identity: str):
        self.core, self._identity = core, identity
        self.letters: dict[tuple[int, int], _Letter] = {}
        self._next = 0
        self._arrived: deque[tuple[Peer, dict, bytes]] = deque()
        self._pulled: dict[tuple[int, int], bool] = {}  # Messages that are being read, and whether they were withdrawn.
        self._pending: Counter[int] = Counter()
        # By the connection's number: an engine that connects again counts from zero, on both sides.
        self._own_barriers: Counter[tuple[int, str]] = Counter()
        self._barriers: Counter[tuple[int, str]] = Counter()
        self._unfinished: set[tuple[int, str]] = set()

    def send(self, peer: Peer, value, tag: str) -> Transfer:
        """Sends a message; see `Engine.send`."""
        check_peer(peer, "send")
        check_tag(tag, "send")
        payload, kind = b"", "bytes"
        tree: Any = None
        if isinstance(value, bytes | bytearray | memoryview):
            view = memoryview(value)
            if view.nbytes <= MAX_INLINE:
                payload = bytes(view)
            else:
                tree = np.frombuffer(view if view.c_contiguous else bytes(view), np.uint8)
        else:
            kind, tree = ("dict", value) if isinstance(value, dict) else ("array", value)
            if kind == "array":
                _memory.check_array(value, "send: the value, neither bytes nor a dict,")
        request = f"send of {kind} (tag {tag!r}) to {peer.name!r}"
        with self.core.lock:
            number, self._next = self._next, self._next + 1
        letter = _Letter(self, peer, request, number, len(payload))
        head: dict = {"t": "msg", "i": number, "tag": tag, "kind": kind}
        if tree is not None:
            if kind == "dict" and (keys := [key for key in tree if not isinstance(key, str)]):
                raise TransferRefused(f"{request}: the keys {keys} are not strings, as which they would arrive")
            flat = leaves_by_path(tree)
            if kind == "dict" and (nested := [key for key, array in tree.items() if key not in flat]):
                raise TransferRefused(f"{request}: {nested} hold further containers: must be a flat dict of arrays")
            records, letter.held = array_records(tree, request)
            letter.nbytes = sum(array.size * np.dtype(array.dtype).itemsize for array in flat.values())
            letter.region = Region(self.core, records)
            head["leaves"] = letter.region.describe(with_memory=True)
        with self.core.lock:
            if peer.lost:
                if letter.region is not None:
                    letter.region.release()
                raise peer.lost_error(request, request)
            self.letters[peer.number, number] = letter
            self.core.pending.append(letter)
            peer.send(head, payload)
        return letter

    def recv(self, peer: Peer | None, tag: str, sharding, timeout: float | None):
        """Waits for a message; see `Engine.recv`."""
        check_tag(tag, "recv")
        request = f"recv (tag {tag!r}){f' from {peer.name!r}' if peer else ''}"
        found: list[tuple[Peer, dict, bytes]] = []

        def arrived() -> bool:
            for entry in self._arrived:
                if entry[1]["tag"] == tag and (peer is None or entry[0] is peer):
                    self._arrived.remove(entry)
                    self._pulled |= {(entry[0].number, entry[1]["i"]): False} if "leaves" in entry[1] else {}
                    found.append(entry)
                    return True
            if peer is not None and peer.lost:
                raise peer.lost_error(request, request)
            return False

        self.core.wait(arrived, timeout, lambda: f"{request}: no message", request)
        sender, head, payload = found[0]
        if "leaves" not in head:
            with self.core.lock:
                self._pending[sender.number] -= len(payload)
                sender.send({"t": "took", "i": head["i"]})
            return payload
        try:
            arrays = self._pull(sender, head, sharding, timeout, request)
        except BaseException:
            self._put_back(found[0])
            raise
        with self.core.lock:
            self._pulled.pop((sender.number, head["i"]), None)
            sender.send({"t": "took", "i": head["i"]})
        if head["kind"] == "bytes":
            return np.asarray(arrays[""]).tobytes()
        return arrays if head["kind"] == "dict" else arrays[""]

    def _put_back(self, entry: tuple[Peer, dict, bytes]) -> None:
        """Makes a message that could not be read available again, unless it was withdrawn meanwhile."""
        sender, head, _ = entry
        with self.core.lock:
            if self._pulled.pop((sender.number, head["i"]), False):
                sender.send({"t": "took", "i": head["i"], "no": "withdrawn"})
            elif not sender.lost:
                self._arrived.appendleft(entry)

    def _pull(self, sender: Peer, head: dict, sharding: Any, timeout: float | None, request: str) -> dict[str, Any]:
        """Reads the arrays of a message from the sender's memory."""
        leaves = {record["p"]: Leaf.from_json(record) for record in head["leaves"]}
        blocks = {
            path: _memory.Block(
                leaf.shape, leaf.dtype, None if head["kind"] == "bytes" else sharding, on_host=leaf.on_host
            )
            for path, leaf in leaves.items()
        }
        target = RemoteWindow(sender, "message", 0, 0, False, leaves)

        arrays = {path: RemoteArray(target, leaf) for path, leaf in leaves.items()}
        fetch(self.core, sender, arrays, leaves, blocks, request, timeout)
        return {path: block.array() for path, block in blocks.items()}

    def barrier(self, group: Sequence[Peer], timeout: float | None) -> None:
        """Waits for every engine of the group; see `Engine.barrier`."""
        if isinstance(group, Peer) or not isinstance(group, Iterable):  # type: ignore[unreachable]
            raise TransferRefused(f"barrier: {group!r} must be a collection of peers, as in [peer]", request="barrier")
        group = list(group)  # It may be an iterator.
        for peer in group:
            check_peer(peer, "barrier")
        members = sorted({self._identity, *(peer.identity for peer in group)})
        key = hashlib.blake2b("/".join(members).encode(), digest_size=16).hexdigest()
        request = f"barrier of {len(members)}"
        with self.core.lock:
            places = {(peer.number, key): peer for peer in group}
            for place in (
                places.keys() - self._unfinished
            ):  # Peers that an earlier call gave up waiting for are in it still.
                self._unfinished.add(place)
                self._own_barriers[place] += 1
                places[place].send({"t": "barrier", "k": key})

        def missing() -> list[Peer]:
            turns = self._own_barriers
            return [peer for peer in group if self._barriers[peer.number, key] < turns[peer.number, key]]

        def complete() -> bool:
            for peer in missing():
                if peer.lost:
                    raise peer.lost_error(request, request)
            return not missing()

        def text() -> str:
            return f"{request}: {', '.join(repr(p.name) for p in missing())} did not come"

        try:
            self.core.wait(complete, timeout, text, request)
        except TransferTimeout as error:
            error.peer = ", ".join(peer.name for peer in missing())
            raise
        except BaseException:
            self._unfinished.difference_update(places)
            raise
        self._unfinished.difference_update(places)

    # The methods from here on need the engine's lock.

    def handle(self, peer: Peer, head: dict, payload: bytes) -> bool:
        """Handles a frame of a peer; returns False for a frame of another kind."""
        if head["t"] == "msg":
            if not isinstance(head["i"], int) or not isinstance(head["tag"], str):
                raise ValueError("a message without number and tag")
            if self._pending[peer.number] + len(payload) > MAX_PENDING:
                reason = f"{self.core.name!r} has {MAX_PENDING} bytes of unread messages"
                peer.send({"t": "took", "i": head["i"], "no": reason})
            else:
                self._pending[peer.number] += len(payload)
                self._arrived.append((peer, head, payload))
        elif head["t"] == "took":
            if letter := self.letters.get((peer.number, head["i"])):
                if refused := head.get("no"):
                    letter.refuse(refused)
                else:
                    letter.finish(None)
        elif head["t"] == "withdraw":
            place = peer.number, head["i"]
            if place in self._pulled:
                self._pulled[place] = True
            for entry in [e for e in self._arrived if (e[0].number, e[1]["i"]) == place]:
                self._arrived.remove(entry)
                self._pending[peer.number] -= len(entry[2])
                peer.send({"t": "took", "i": head["i"], "no": "withdrawn"})
        elif head["t"] == "barrier":
            self._barriers[peer.number, head["k"]] += 1
        else:
            return False
        return True

    def lose(self, peer: Connection) -> None:
        """Drops the messages of a lost peer whose arrays would have to be read. Messages that have arrived completely
        stay."""
        self._arrived = deque(entry for entry in self._arrived if entry[0] is not peer or "leaves" not in entry[1])
