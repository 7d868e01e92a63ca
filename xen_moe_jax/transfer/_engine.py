"""The engine: one per process, the end of every transfer.

A thread of its own drives what is under way; calls of the API may drive it, too. All state is under one lock.
"""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from xen_moe_jax.transfer import _channel, _device, _process
from xen_moe_jax.transfer._checks import as_int, check_name, deadline
from xen_moe_jax.transfer._counter import Arrivals, Imm, ImmCounter, check_imm
from xen_moe_jax.transfer._errors import TransferError, TransferRefused, about
from xen_moe_jax.transfer._jobs import parts_job, write_job
from xen_moe_jax.transfer._loop import Loop
from xen_moe_jax.transfer._messages import Mailbox, check_peer
from xen_moe_jax.transfer._reading import read
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteTree, pages_key
from xen_moe_jax.transfer._service import HANDLERS, answer_look
from xen_moe_jax.transfer._transfer import Transfer
from xen_moe_jax.transfer._waiting import wait
from xen_moe_jax.transfer._window import Published, Window, _Generation
from xen_moe_jax.transfer._wire import UcxWire, Wire

BACKENDS = ("auto", "ucx")
LINGER_S = 2.0
"""Memory that a dead process could write into is not used again before its process has been gone for this long."""

_never_released: list[_Generation] = []
"""Memory that a peer which was cut off may still address: it is kept until this process ends."""


class Engine:
    """Moves JAX arrays to and from other processes. A context manager; `close()` ends it.

    Args:
        name: what peers see; unique among the engines that talk to each other.
        backend: "ucx" uses UCX for all bytes (processes of one host, NVLink, RDMA, TCP). "auto" does too, but copies
            between GPUs of one host are made by the CUDA driver, which takes less time for each piece.
        token: the secret that all engines of one job share. Without a token the descriptor holds a random secret, and
            any process that has the descriptor may connect.
        host: the address to listen on. The loopback address serves this machine alone; any other address opens a port
            to its network.
        port: the port to listen on; 0 lets the system choose.
        settings: UCX settings (names without `UCX_`).
        wire: a `Wire` to use instead of UCX; for tests.

    Raises `TransferUnavailable` where the backend's library is not installed.
    """

    def __init__(
        self,
        name: str,
        backend: str = "auto",
        *,
        token: bytes | str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        wire: Wire | None = None,
    ):
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} must be one of {BACKENDS}")
        if not isinstance(name, str) or not 1 <= len(name) <= 256:
            raise ValueError(f"name={name!r} must be a string of 1 to 256 characters")
        if token is not None and (not isinstance(token, bytes | str) or not token):
            raise ValueError("token= must be bytes or a string, not empty; without one the descriptor holds a secret")
        if not isinstance(port, int) or not 0 <= port < 2**16:
            raise ValueError(f"port={port!r} must be 0 (any that is free) to 65535")
        self.name = name
        self.identity = secrets.token_hex(8)
        self._secret = secrets.token_bytes(32) if token is None else None
        self._key = _channel.secret_key(self._secret or (token.encode() if isinstance(token, str) else token or b""))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = self._closing = False
        self._spinning = 0  # Callers that drive the engine at this moment.
        self._failure: BaseException | None = None
        # UCX looks for GPUs with the context that is current; it pushes another one where the memory is another GPU's.
        self._default_device, self._device = _device.default(), _device.default_ordinal()
        self._adopt_device()
        self._wire = wire if wire is not None else UcxWire(host, dict(settings or {}), backend == "auto")
        self._active: list[Transfer] = []
        self._peers_by_number: dict[int, Peer] = {}
        self._peer_numbers = itertools.count(1)
        self._windows: dict[int, Window] = {}
        self._names: dict[str, tuple[Window, str]] = {}
        self._published: dict[str, tuple[Published, str]] = {}
        self._leases: dict[tuple[int, int], Published] = {}
        self._waiting_looks: list[tuple[Peer, dict]] = []
        self._retired: list[tuple[Window, _Generation]] = []
        self._gone_since: dict[int, float] = {}
        self._arrivals = Arrivals()
        self._calls: dict[int, dict | TransferError | None] = {}
        self._call_numbers = itertools.count(1)
        self._mailbox = Mailbox(self)
        try:
            self._loop = Loop(self, host, port)
        except OSError as cause:
            self._wire.close()
            raise OSError(cause.errno, f"host={host!r}, port={port}: cannot listen there: {cause.strerror}") from cause
        self._loop.start()

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} at {self._loop.address}>"

    # --- peers

    @property
    def descriptor(self) -> bytes:
        """What another process gives to `connect`. Without a shared token it holds a secret: give it to whom it
        concerns.
        """
        text = {
            "version": _channel.VERSION,
            "name": self.name,
            "identity": self.identity,
            "address": self._loop.address,
            "secret": base64.b64encode(self._secret).decode() if self._secret else None,
        }
        body = json.dumps(text).encode()
        return body + _channel.tag(self._key, b"descriptor", body)

    def connect(self, descriptor: bytes, timeout: float = 30.0) -> Peer:
        """The peer that a descriptor describes; it sees this engine as a peer, too. A second call gives the same peer.

        Raises `TransferRefused` (wrong token, changed descriptor), `PeerLost` (nobody listens), `TransferTimeout`.
        """
        self._check_open("connect")
        until = deadline(timeout, "connect")
        if not isinstance(descriptor, bytes | bytearray):
            raise TransferRefused(
                f"connect: the descriptor is a {type(descriptor).__name__}: must be the bytes of engine.descriptor",
                request="connect",
            )
        try:
            body, mark = descriptor[: -_channel._TAG], descriptor[-_channel._TAG :]
            text = json.loads(body)
            identity, address, secret = text["identity"], tuple(text["address"]), text["secret"]
        except (ValueError, KeyError, TypeError) as cause:
            raise TransferRefused(
                f"connect: {descriptor[:40]!r}... is not an engine's descriptor", request="connect"
            ) from cause
        if (secret is None) != (self._secret is None):
            who = (
                "this engine has a token, the other has none"
                if secret
                else "the other engine has a token, this one has none"
            )
            raise TransferRefused(
                f"connect to {text['name']!r}: {who}; give both the same", peer=text["name"], request="connect"
            )
        key = _channel.secret_key(base64.b64decode(secret)) if secret else self._key
        if _channel.tag(key, b"descriptor", body) != mark:
            raise TransferRefused(
                f"connect to {text['name']!r}: the descriptor was changed, or its engine has another token",
                peer=text["name"],
                request="connect",
            )
        if identity == self.identity:
            raise TransferRefused("connect: this is the engine's own descriptor", request="connect")
        with self._lock:
            for peer in self._peers_by_number.values():
                if peer.identity == identity and not peer.lost:
                    return peer
        channel, hello = _channel.open_channel(address, key, self._hello(), identity, until)
        return self._join(channel, hello)

    @property
    def peers(self) -> dict[str, Peer]:
        """The peers that are connected now, by name."""
        with self._lock:
            return {peer.name: peer for peer in self._peers_by_number.values() if not peer.lost}

    def peer(self, name: str, timeout: float = 30.0) -> Peer:
        """The peer of that name, as soon as it has connected. Raises `TransferTimeout`."""
        self._wait(lambda: name in self.peers, timeout, lambda: f"peer {name!r} has not connected", f"peer {name!r}")
        return self.peers[name]

    # --- windows and published arrays

    def window(
        self,
        avals,
        shardings=None,
        *,
        name: str | None = None,
        writers: Collection[str] | None = None,
        readable: bool = False,
        in_place: bool = False,
    ) -> Window:
        """Writable, registered memory for arrays like `avals`.

        Args:
            avals: pytree of `jax.ShapeDtypeStruct` (or arrays: only shape, dtype and sharding count).
            shardings: pytree of shardings like `avals`, or one for all; None takes the avals' own, or the default
            device.
            name: by which peers find it. Without a name `avals` must be a dict, and its keys are the names.
            writers: names of the peers that may write into it; None: every peer that is connected.
            readable: peers may `read` the committed arrays; the engine then holds the last generation.
            in_place: on GPUs, committed arrays stay in the window's memory instead of being copied into JAX's. A
                program that XLA runs as a CUDA graph may then fail (docs, "Memory"). Elsewhere it changes nothing.
        """
        self._check_open("window")
        if name is not None:
            check_name(name, "window")
        if name is None and not (isinstance(avals, dict) and avals):
            raise ValueError("window: give a name, or a dict of avals whose keys are the names")
        with about("window" if name is None else f"window {name!r}"):
            window = Window(self, avals, shardings, name, writers, readable, in_place)
        names = {name: ""} if name is not None else {str(key): str(key) for key in avals}
        with self._lock:
            if taken := [n for n in names if n in self._names or n in self._published]:
                window._open.region.release()
                raise ValueError(f"window: the names {taken} are taken; close what has them first")
            self._windows[window.number] = window
            self._names.update({n: (window, prefix) for n, prefix in names.items()})
        return window

    def publish(self, name: str, tree) -> Published:
        """Lets every peer read these arrays (`read(peer[name])`) until `close()`; a second call with the name takes
        the first's place.
        """
        self._check_open("publish")
        check_name(name, "publish")
        with about(f"publish {name!r}"):
            published = Published(self, name, tree)
        with self._lock:
            if name in self._names:
                published.close()
                raise ValueError(
                    f"publish: the name {name!r} is a window's; close the window first, or make it readable"
                )
            previous, _ = self._published.get(name, (None, ""))
            self._published[name] = (published, "")
        if previous is not None:
            previous.close()
        return published

    # --- transfers

    def write(
        self,
        src,
        target: RemoteArray | RemoteTree,
        *,
        pages: tuple[Any, Any] | None = None,
        imm: Imm | None = None,
        timeout: float = 30.0,
    ) -> Transfer:
        """Starts writing arrays into a peer's window.

        Args:
            src: an array of the target's shape and dtype, or a pytree like the target. A `jax.Array` may still be in
                computation. Do not donate it, and do not change a NumPy array, before the transfer has ended.
            target: `peer["kv"]`, or a part of it.
            pages: (source pages, destination pages), equal numbers of indices into the first dimensions: `src[i]` is
                written to `target[j]`.
            imm: the counter at the peer that this write adds one to when all of it has arrived.
            timeout: seconds for the peer to give leave (at the first write into a generation).

        Raises `StaleWindow`, `TransferRefused`, `PeerLost`, `TransferTimeout` here; what comes later is raised by
        `Transfer.wait`.
        """
        if imm is not None:
            with about("write"):
                imm = check_imm(imm)
        if type(target) is RemoteArray and target.repeats:
            key = None
            if pages is not None:
                with about(f"write {target!r}", target.peer.name):
                    key = pages_key(pages)
            if (known := target.repeats.get(key)) is not None and (again := known.write(self, src, imm)) is not None:
                return again
        request = self._request("write", target)
        with about(request, target.peer.name):
            job, sources = write_job(self, src, target, pages, request, timeout)
        return self._start(Transfer(self, "put", request, [job], sources, imm))

    def scatter(
        self, src, pieces: Sequence[tuple[Any, RemoteArray]], *, imm: Imm | None = None, timeout: float = 30.0
    ) -> Transfer:
        """One transfer with a part for each of several targets: `src[index]` goes to its target, for every (index,
        target).

        Every peer counts `imm` when the parts for it have arrived; several parts for one peer count once each.
        """
        request = f"scatter of {len(pieces)} parts"
        jobs, sources = [], []
        with about(request):
            imm = None if imm is None else check_imm(imm)
        for index, target in pieces:
            self._request("scatter", target)
            with about(request, target.peer.name):
                job, source = write_job(self, src[index], target, None, request, timeout)
            jobs.append(job)
            sources += source
        return self._start(Transfer(self, "put", request, jobs, sources, imm))

    def read(self, target: RemoteArray | RemoteTree, *, sharding=None, timeout: float = 60.0):
        """Pulls published arrays (or the last committed generation of a readable window); an array, or a dict of arrays
        by path.

        Args:
            target: `peer["w"]`, or a part of it.
            sharding: of the result; one for all. None: the first local device.
        """
        request = self._request("read", target)
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise ValueError(f"{request}: sharding={sharding!r} must be a jax.sharding.Sharding")
        return read(self, target, sharding, timeout, request)

    def counter(self, imm: Imm, expect: int, source: Peer | None = None) -> ImmCounter:
        """Counts arrivals of writes with number `imm`; of all peers, or of `source` alone (whose death `wait` then
        notices).
        """
        writes = as_int(expect)
        if writes is None or writes < 0:
            raise ValueError(f"counter {imm!r}: expect={expect!r} must be a number of writes, 0 or more")
        if source is not None:
            check_peer(source, f"counter {imm!r}")
        with about("counter"):
            return ImmCounter(self, check_imm(imm), writes, None if source is None else source.number)

    # --- messages

    def send(self, peer: Peer, value, *, tag: str = "") -> Transfer:
        """Sends bytes, an array, or a flat dict of arrays to the peer's `recv`. The transfer ends when the peer has
        taken it.
        """
        self._check_open("send")
        with about("send", peer.name if isinstance(peer, Peer) else None):
            return self._mailbox.send(peer, value, tag)

    def recv(self, peer: Peer | None = None, *, tag: str = "", sharding=None, timeout: float | None = None):
        """The next message with that tag (of that peer), as it was sent: bytes, array, or dict. Raises
        `TransferTimeout`, `PeerLost`.
        """
        self._check_open("recv")
        if peer is not None:
            check_peer(peer, "recv")
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise ValueError(f"recv: sharding={sharding!r} must be a jax.sharding.Sharding")
        with about("recv", None if peer is None else peer.name):
            return self._mailbox.recv(peer, tag, sharding, timeout)

    def barrier(self, group: Sequence[Peer], timeout: float | None = None) -> None:
        """Returns when every engine of the group (this one and the peers given) has called it with the same group."""
        self._check_open("barrier")
        self._mailbox.barrier(group, timeout)

    # --- the end

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self, timeout: float = 10.0) -> None:
        """Ends everything; returns when no write can land any more, neither of this process elsewhere nor of a peer
        here.

        Transfers under way are cancelled. A peer that does not confirm within `timeout` seconds is cut off, and the
        memory that it could write into is kept until this process ends.
        """
        until = deadline(timeout, "close")
        with self._lock:
            if self._closing:
                return
            self._closing = True
            transfers = list(self._active)
            windows = list(self._windows.values())
        for transfer in transfers:
            transfer.cancel(max(0.1, until - time.monotonic()))
        for window in windows:
            window.close()
        with self._lock:
            for published in {id(p): p for p, _ in self._published.values()}.values():
                published.close()
            for peer in self._peers_by_number.values():
                peer.send({"t": "bye"})
        try:
            self._wait(
                lambda: (
                    not any(generation.writers for _, generation in self._retired)
                    and not any(p.channel.has_outgoing for p in self._peers_by_number.values() if not p.lost)
                ),
                max(0.1, until - time.monotonic()),
                lambda: "close",
                "close",
            )
        except TransferError:
            pass  # Whoever has not confirmed is cut off below.
        with self._lock:
            unsettled = [g for _, g in self._retired if g.writers or g.lost]
            for peer in list(self._peers_by_number.values()):
                self._lose(peer, "this engine was closed")
            # With the wire closed below, only a living process with leave to write could still reach its memory.
            _never_released.extend(
                g for g in unsettled if not all(_process.has_ended(p.process) for p in [*g.writers, *g.lost])
            )
            self._closed = True
            self._changed.notify_all()
        self._loop.stop()
        with self._lock:
            for _, generation in self._retired:
                generation.region.release()
            self._wire.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- waiting and driving

    def _check_open(self, request: str) -> None:
        if self._closing:
            raise TransferRefused(f"{request}: the engine {self.name!r} is closed", request=request)

    def _request(self, kind: str, target) -> str:
        self._check_open(kind)
        if not isinstance(target, (RemoteArray, RemoteTree)):
            raise TransferRefused(
                f"{kind}: the target is a {type(target).__name__}, not a peer's window: peer[name]", request=kind
            )
        if target.peer._engine is not self:
            raise TransferRefused(f"{kind}: {target!r} was taken through another engine", request=kind)
        return f"{kind} {target!r}"

    def _wait(
        self,
        state: Callable[[], bool],
        timeout: float | None,
        describe: Callable[[], str],
        request: str,
        bytes_done: Callable[[], int] = lambda: 0,
    ) -> None:
        wait(self, state, timeout, describe, request, bytes_done)

    def _progress(self) -> bool:
        """Drives the wire and every transfer; whether something was done."""
        if self._closed:
            return False
        self._wire.progress()
        moved = False
        for transfer in list(self._active):
            moved |= transfer._advance()
        if moved:
            self._active = [t for t in self._active if not t._ended]
        return moved

    def _start(self, transfer: Transfer) -> Transfer:
        self._adopt_device()
        with self._lock:
            if self._closing:
                raise TransferRefused(
                    f"{transfer._request}: the engine {self.name!r} is closed", request=transfer._request
                )
            for job in transfer._jobs:
                if job.grant is not None:
                    job.grant.take(transfer)
            transfer._advance()
            if not transfer._ended:  # Small writes between processes of one host have.
                transfer._follow()
        return transfer

    def _adopt_device(self) -> None:
        if self._device is not None:
            _device.make_current(self._device)

    def _write_parts(
        self, parts: list[tuple[str, Any, RemoteArray]], request: str, imm: Imm, timeout: float, last: bool
    ) -> Transfer:
        """A write of several arrays; after the `last` one the leave to write is given back."""
        job, sources = parts_job(self, parts, None, request, timeout)
        transfer = self._start(Transfer(self, "put", request, [job], sources, imm))
        if last and job.grant is not None:
            with self._lock:
                job.grant.finish()
        return transfer

    def _call(self, peer: Peer, head: dict, timeout: float, request: str) -> dict:
        """A question to a peer, and its answer."""
        number = next(self._call_numbers)
        with self._lock:
            self._calls[number] = None
            peer.send(head | {"q": number})

        def answered() -> bool:
            if self._calls[number] is None and peer.lost:
                raise peer.lost_error(request, request)
            return self._calls[number] is not None

        try:
            with about(request, peer.name):
                self._wait(answered, timeout, lambda: f"{request}: {peer.name!r} did not answer", request)
            reply = self._calls[number]
        finally:
            with self._lock:
                del self._calls[number]
        if isinstance(reply, TransferError):
            with about(request):
                raise reply
        assert reply is not None
        return reply

    # --- peers come and go; under the lock

    def _hello(self) -> dict:
        return {
            "name": self.name,
            "identity": self.identity,
            "process": _process.describe(),
            "wire": base64.b64encode(self._wire.address).decode(),
        }

    def _reason_to_refuse(self, hello: dict) -> str | None:
        if self._closing:
            return f"the engine {self.name!r} is closed"
        if hello.get("name") in self.peers:
            return f"a peer named {hello.get('name')!r} is connected to {self.name!r} already; names must be unique"
        return None

    def _join(self, channel: _channel.Channel, hello: dict) -> Peer:
        with self._lock:
            self._check_open("connect")
            link = self._wire.connect(base64.b64decode(hello["wire"]))
            peer = Peer(self, next(self._peer_numbers), channel, link, hello)
            self._peers_by_number[peer.number] = peer
            self._loop.add(peer)
            self._changed.notify_all()
            return peer

    def _lose(self, peer: Peer, reason: str) -> None:
        if peer.lost:
            return
        peer.lost = reason
        self._loop.remove(peer)
        peer.link.close(force=True)
        for window in self._windows.values():
            window.lose(peer)
        for _, generation in self._retired:
            if peer in generation.writers:
                generation.writers.discard(peer)
                generation.lost.append(peer)
        for key in [key for key in self._leases if key[0] == peer.number]:
            self._leases.pop(key).give_back()
        self._waiting_looks = [(p, head) for p, head in self._waiting_looks if p is not peer]
        for transfer in list(self._active):
            if transfer._concerns(peer):
                transfer._stop(peer.lost_error(transfer._progress_text(), transfer._request, transfer.bytes_done))
        self._mailbox.lose(peer)
        self._changed.notify_all()
        self._loop.wake()

    def _disconnect(self, peer: Peer) -> None:
        with self._lock:
            transfers = [t for t in self._active if t._concerns(peer)]
        for transfer in transfers:
            transfer.cancel(5.0)
        with self._lock:
            peer.send({"t": "bye"})
            self._lose(peer, "this engine closed the connection")

    def _read(self, peer: Peer) -> None:
        if peer.lost:
            return
        try:
            frames, ended = peer.channel.receive()
            for head, payload in frames:
                self._handle(peer, head, payload)
        except Exception as cause:  # Whatever a peer sends, it can only lose itself.
            self._lose(peer, f"its channel broke: {cause!r}")
            return
        if ended:
            self._lose(peer, "its engine was closed" if peer.left else "its process ended, or its connection broke")

    def _handle(self, peer: Peer, head: dict, payload: bytes) -> None:
        if peer.lost:
            return
        kind = head["t"]
        if handler := HANDLERS.get(kind):
            handler(self, peer, head)
        elif not self._mailbox.handle(peer, head, payload):
            raise ValueError(f"a frame of unknown kind {kind!r}")
        self._changed.notify_all()

    # --- memory that is not in use any more

    def _forget_window(self, window: Window) -> None:
        self._windows.pop(window.number, None)
        self._names = {name: entry for name, entry in self._names.items() if entry[0] is not window}

    def _forget_published(self, published: Published) -> None:
        self._published = {name: entry for name, entry in self._published.items() if entry[0] is not published}

    def _answer_waiting(self, window: Window) -> None:
        ready = [(p, head) for p, head in self._waiting_looks if self._names.get(head["name"], (window,))[0] is window]
        self._waiting_looks = [entry for entry in self._waiting_looks if entry not in ready]
        for peer, head in ready:
            answer_look(self, peer, head)

    def _retire(self, window: Window, generation: _Generation) -> None:
        self._retired.append((window, generation))
        for writer in list(generation.writers):
            writer.send({"t": "revoke", "w": window.number, "g": generation.number})
        self._housekeeping()

    def _gone(self, peer: Peer) -> bool:
        """Whether nothing of a lost peer can land: its process has ended a while ago."""
        if peer.number not in self._gone_since and _process.has_ended(peer.process):
            self._gone_since[peer.number] = time.monotonic()
        since = self._gone_since.get(peer.number)
        return since is not None and time.monotonic() - since >= LINGER_S

    def _housekeeping(self) -> None:
        if not self._retired:
            return
        kept = []
        for window, generation in self._retired:
            generation.lost = [peer for peer in generation.lost if not self._gone(peer)]
            if generation.writers or generation.lost:
                kept.append((window, generation))
            else:
                generation.region.release()
        self._retired = kept
