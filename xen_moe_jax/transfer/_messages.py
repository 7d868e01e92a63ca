"""Messages between engines: `send`, `recv` and `barrier`.

Bytes travel in the frame. Of arrays the frame tells where they lie; the receiver pulls them, and says when it has.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._errors import TransferRefused, TransferTimeout
from xen_moe_jax.transfer._layout import Leaf, distinct, leaves_by_path
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteWindow
from xen_moe_jax.transfer._transfer import Job, Runs, Transfer
from xen_moe_jax.transfer._window import Region

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine

MAX_INLINE = 1 << 20
"""Bytes that travel in the frame; more travel as an array."""
MAX_PENDING = 64 << 20
"""Bytes of a peer's messages that wait here for `recv`; more are refused."""


class _Letter(Transfer):
    """The transfer of one sent message: it has ended when the peer says that it has taken it."""

    def __init__(self, engine: Engine, peer: Peer, request: str, number: int, nbytes: int):
        super().__init__(engine, "put", request, [Job(peer, None, lambda: ([], []))], [])
        self.number, self.nbytes, self._posted = number, nbytes, True
        self.region: Region | None = None
        self.held: list[object] = []
        self.sent = False

    def _advance(self) -> bool:
        return False

    def _stop(self, error) -> None:
        """The peer may be reading it: it has ended when the peer says so, or is lost."""
        if self._ended or self._error is not None:
            return
        peer = self._jobs[0].peer
        if peer.lost:
            self.finish(error)
        else:
            self._error = error
            peer.send({"t": "withdraw", "i": self.number})

    def finish(self, error) -> None:
        self._error = error
        if error is None:
            self.bytes_done = self.nbytes or 0
        if self.region is not None:
            self.region.release()
            self.region = None
        self.held = []
        mailbox = self._engine._mailbox
        mailbox.letters.pop((self._jobs[0].peer.number, self.number), None)
        self._end()
        self._engine._active = [t for t in self._engine._active if t is not self]


def check_peer(peer: Any, request: str) -> None:
    """Raises `TransferRefused` for what is not a `Peer`."""
    if not isinstance(peer, Peer):
        raise TransferRefused(
            f"{request}: {peer!r} is a {type(peer).__name__}, not a Peer, as connect() and peer(name) return it",
            request=request,
        )


class Mailbox:
    def __init__(self, engine: Engine):
        self._engine = engine
        self.letters: dict[tuple[int, int], _Letter] = {}
        self._next = 0
        self._arrived: deque[tuple[Peer, dict, bytes]] = deque()
        self._pulled: dict[tuple[int, int], bool] = {}  # Messages that are being read: whether they were withdrawn.
        self._pending: Counter[int] = Counter()
        # By peer's number: an engine that has connected anew begins anew, on both sides.
        self._own_barriers: Counter[tuple[int, str]] = Counter()
        self._barriers: Counter[tuple[int, str]] = Counter()
        self._unfinished: set[tuple[int, str]] = set()

    def send(self, peer: Peer, value, tag: str) -> Transfer:
        engine = self._engine
        check_peer(peer, "send")
        payload, kind = b"", "bytes"
        tree: Any = None
        if isinstance(value, bytes | bytearray | memoryview):
            if len(value) <= MAX_INLINE:
                payload = bytes(value)
            else:
                tree = np.frombuffer(value, np.uint8)
        else:
            kind, tree = ("dict", value) if isinstance(value, dict) else ("array", value)
            if kind == "array":
                _memory.check_array(value, "send: the value, neither bytes nor a dict,")
        request = f"send of {kind} (tag {tag!r}) to {peer.name!r}"
        with engine._lock:
            number, self._next = self._next, self._next + 1
        letter = _Letter(engine, peer, request, number, len(payload))
        head: dict = {"t": "msg", "i": number, "tag": tag, "kind": kind}
        if tree is not None:
            flat = leaves_by_path(tree)
            for path, array in flat.items():
                _memory.check_array(array, f"{request}: {path or 'the value'}")
            if kind == "dict" and (nested := [key for key, array in tree.items() if str(key) not in flat]):
                raise TransferRefused(f"{request}: {nested} hold further containers: must be a flat dict of arrays")
            jax.block_until_ready(tree)
            records = []
            for path, array in flat.items():
                dtype = _memory.check_dtype(array.dtype, f"{request}: {path or 'the array'}")
                shards, kept = _memory.local_shards(array)
                letter.held += kept
                records.append((path, tuple(array.shape), dtype, shards))
                letter.nbytes = (letter.nbytes or 0) + array.size * dtype.itemsize
            letter.region = Region(engine, records)
            head["leaves"] = letter.region.describe(with_memory=True)
        with engine._lock:
            if peer.lost:
                if letter.region is not None:
                    letter.region.release()
                raise peer.lost_error(request, request)
            self.letters[peer.number, number] = letter
            engine._active.append(letter)
            peer.send(head, payload)
        return letter

    def recv(self, peer: Peer | None, tag: str, sharding, timeout: float | None):
        engine = self._engine
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

        engine._wait(arrived, timeout, lambda: f"{request}: no message", request)
        sender, head, payload = found[0]
        if "leaves" not in head:
            with engine._lock:
                self._pending[sender.number] -= len(payload)
                sender.send({"t": "took", "i": head["i"]})
            return payload
        try:
            arrays = self._pull(sender, head, sharding, timeout, request)
        except BaseException:
            self._put_back(found[0])
            raise
        with engine._lock:
            self._pulled.pop((sender.number, head["i"]), None)
            sender.send({"t": "took", "i": head["i"]})
        if head["kind"] == "bytes":
            return np.asarray(arrays[""]).tobytes()
        return arrays if head["kind"] == "dict" else arrays[""]

    def _put_back(self, entry: tuple[Peer, dict, bytes]) -> None:
        """What could not be read can be received again, unless it was withdrawn meanwhile."""
        sender, head, _ = entry
        with self._engine._lock:
            if self._pulled.pop((sender.number, head["i"]), False):
                sender.send({"t": "took", "i": head["i"], "no": "withdrawn"})
            elif not sender.lost:
                self._arrived.appendleft(entry)

    def _pull(self, sender: Peer, head: dict, sharding: Any, timeout: float | None, request: str) -> dict[str, Any]:
        """The arrays of a message, from the sender's memory."""
        engine = self._engine
        leaves = {record["p"]: Leaf.from_json(record) for record in head["leaves"]}
        blocks = {
            path: _memory.Block(
                leaf.shape, leaf.dtype, None if head["kind"] == "bytes" else sharding, on_host=leaf.on_host
            )
            for path, leaf in leaves.items()
        }
        target = RemoteWindow(sender, "message", 0, 0, False, leaves)

        def plan():
            runs: list[Runs] = []
            for path, leaf in leaves.items():
                runs += RemoteArray(target, leaf).runs(blocks[path].shards, distinct(leaf.shards))
            return runs, list(blocks.values())

        transfer = engine._start(Transfer(engine, "get", request, [Job(sender, None, plan)], []))
        try:
            transfer.wait(timeout)
        except TimeoutError:
            transfer.cancel(5.0)
            raise
        finally:
            with engine._lock:
                for leaf in leaves.values():
                    for shard in leaf.shards:
                        if not sender.lost:
                            sender.link.forget(shard.key)
        return {path: block.array() for path, block in blocks.items()}

    def barrier(self, group: Sequence[Peer], timeout: float | None) -> None:
        engine = self._engine
        for peer in group:
            check_peer(peer, "barrier")
        members = sorted([engine.identity, *(peer.identity for peer in group)])
        key = hashlib.blake2b("/".join(members).encode(), digest_size=16).hexdigest()
        request = f"barrier of {len(members)}"
        with engine._lock:
            places = {(peer.number, key): peer for peer in group}
            for place in places.keys() - self._unfinished:  # Whom it was given up waiting for is waited for again.
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
            engine._wait(complete, timeout, text, request)
        except TransferTimeout as error:
            error.peer = ", ".join(peer.name for peer in missing())
            raise
        except BaseException:
            self._unfinished.difference_update(places)
            raise
        self._unfinished.difference_update(places)

    # Under the engine's lock.

    def handle(self, peer: Peer, head: dict, payload: bytes) -> bool:
        if head["t"] == "msg":
            if not isinstance(head["i"], int) or not isinstance(head["tag"], str):
                raise ValueError("a message without number and tag")
            if self._pending[peer.number] + len(payload) > MAX_PENDING:
                peer.send(
                    {
                        "t": "took",
                        "i": head["i"],
                        "no": f"{self._engine.name!r} has {MAX_PENDING} bytes of unread messages",
                    }
                )
            else:
                self._pending[peer.number] += len(payload)
                self._arrived.append((peer, head, payload))
        elif head["t"] == "took":
            if letter := self.letters.get((peer.number, head["i"])):
                refused = head.get("no")
                request = letter._request
                error = TransferRefused(f"{request}: {refused}", peer=peer.name, request=request) if refused else None
                letter.finish(letter._error if refused and letter._error is not None else error)
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

    def lose(self, peer: Peer) -> None:
        """A lost peer's messages that lie here whole can still be taken; those that would have to be pulled cannot."""
        self._arrived = deque(entry for entry in self._arrived if entry[0] is not peer or "leaves" not in entry[1])
