"""The engine: one per process; every transfer begins and ends at one.

The engine's thread drives pending transfers, and so do callers of the API while they wait. One lock guards all state.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from xen_moe_jax.transfer import _channel, _memory, _process
from xen_moe_jax.transfer._checks import as_int, check_name, deadline
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._counter import Imm, ImmCounter, check_imm
from xen_moe_jax.transfer._errors import TransferError, TransferRefused, TransferTimeout, about
from xen_moe_jax.transfer._jobs import write_job
from xen_moe_jax.transfer._loop import Loop
from xen_moe_jax.transfer._messages import Mailbox, check_peer
from xen_moe_jax.transfer._reading import read
from xen_moe_jax.transfer._region import Generation, Published
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteTree, pages_key
from xen_moe_jax.transfer._service import Service
from xen_moe_jax.transfer._transfer import Transfer
from xen_moe_jax.transfer._ucx import UcxWire
from xen_moe_jax.transfer._window import Window, Windows
from xen_moe_jax.transfer._wire import Wire

BACKENDS = ("auto", "ucx")
COMES = "it connects to this engine itself"
"""The reason of a refusal: when two engines connect to each other at once, that of the lower identity refuses."""
ASK_AGAIN_S = 0.2
"""Seconds after such a refusal in which the other engine's connection may come, before this one connects again."""

_never_released: list[Generation] = []
"""Memory that a peer which was cut off may still address: it is kept until this process ends."""


def _no_listener(host: str, port: int, cause: OSError) -> OSError:
    return OSError(cause.errno, f"host={host!r}, port={port}: cannot listen there: {cause.strerror}")


def _address(host: Any, port: int) -> str:
    """Returns the IPv4 address of a host. It also decides which network UCX uses."""
    if not isinstance(host, str) or not host:
        raise ValueError(f"host={host!r} must be an address or a name of this machine")
    try:
        address = socket.gethostbyname(host)
    except OSError as cause:
        raise _no_listener(host, port, cause) from cause
    if address == "0.0.0.0":
        raise ValueError(f"host={host!r} is no address that a peer could connect to: give the one of a network")
    return address


class Engine:
    """Moves JAX arrays to and from other processes. A context manager; `close()` ends it.

    Args:
        name: the name that peers see; unique among the engines that talk to each other.
        backend: "ucx" uses UCX for all bytes (processes of one host, NVLink, RDMA, TCP). "auto" does too, but copies
            between GPUs of one host are made by the CUDA driver, which takes less time for each piece.
        token: the secret that all engines of one job share. Without a token the descriptor holds a random secret, and
            any process that has the descriptor may connect.
        host: the address to listen on, which peers connect to. The loopback address serves this machine alone; any
            other address opens a port to its network.
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
        if (number := as_int(port)) is None or not 0 <= number < 2**16:
            raise ValueError(f"port={port!r} must be 0 (any that is free) to 65535")
        chosen = {} if settings is None else settings
        if not isinstance(chosen, Mapping) or not all(isinstance(w, str) for w in (*chosen, *chosen.values())):
            raise ValueError(f"settings={settings!r} must be strings by strings, as in {{'TLS': 'tcp'}}")
        address = _address(host, number)
        self.name = name
        self.identity = secrets.token_hex(8)
        self._secret = secrets.token_bytes(32) if token is None else None
        self._key = _channel.secret_key(self._secret or (token.encode() if isinstance(token, str) else token or b""))
        ucx = functools.partial(UcxWire, address, dict(chosen), backend == "auto")
        self._core = Core(name, ucx if wire is None else lambda: wire)
        self._windows = Windows(self._core)
        self._mailbox = Mailbox(self._core, self.identity)
        self._service = Service(self._windows, self._mailbox)
        self._peers: list[Peer] = []  # Peers that are not lost, under the lock.
        self._peer_numbers = itertools.count(1)
        # Identities of engines to which a thread connects, and of those that are let in: under the lock.
        self._opening: set[str] = set()
        self._admitting: set[str] = set()
        try:
            self._loop = Loop(
                self._core,
                address,
                number,
                greet=self._greet,
                peers=lambda: self._peers,
                housekeeping=self._windows.release_retired,
            )
        except OSError as cause:
            self._core.wire.close()
            raise _no_listener(host, number, cause) from cause
        self._loop.start()

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} at {self._loop.address}>"

    # --- peers

    @property
    def descriptor(self) -> bytes:
        """The bytes that another process passes to `connect`. Without a shared token they hold a secret: give them only
        to processes that may connect.
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
        """Connects to the engine of a descriptor, which then has this engine as a peer too. A second call returns the
        same peer; so does a call of another thread, or of the other engine, at the same time.

        Raises `TransferRefused` (wrong token, changed descriptor, a name in use), `PeerLost` (no engine listens there),
        `TransferTimeout`.
        """
        self._core.check_open("connect")
        until = deadline(timeout, "connect")
        if not isinstance(descriptor, bytes | bytearray):
            raise TransferRefused(
                f"connect: the descriptor is a {type(descriptor).__name__}: must be the bytes of engine.descriptor",
                request="connect",
            )
        try:
            body, mark = descriptor[: -_channel.TAG], descriptor[-_channel.TAG :]
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
        found: list[Peer] = []

        def connected() -> bool:
            found.extend(peer for peer in self._peers if peer.identity == identity)
            return bool(found)

        def is_ours_to_open() -> bool:
            if not connected() and not {identity} & (self._opening | self._admitting):
                self._opening.add(identity)
                return True
            return bool(found)

        def settle(state) -> None:
            text_of = f"connect to {text['name']!r}: another connection to it was still being made"
            core.wait(state, until - time.monotonic(), lambda: text_of, "connect")

        core = self._core
        while True:
            settle(is_ours_to_open)
            if found:
                return found[-1]
            try:
                self._check_name(text["name"])
                return self._join(*_channel.open_channel(address, key, self._hello(), identity, until))
            except TransferRefused as refused:  # also where the other engine connects to this one at the same time
                settle(lambda: connected() or identity not in self._admitting)
                if not found and COMES not in str(refused):
                    raise
            finally:
                with core.lock:
                    self._opening.discard(identity)
                    core.changed.notify_all()
            with contextlib.suppress(TransferTimeout):  # ask again: the other engine may have given up
                core.wait(connected, min(ASK_AGAIN_S, until - time.monotonic()), lambda: "connect", "connect")

    @property
    def peers(self) -> dict[str, Peer]:
        """The peers that are connected now, by name."""
        with self._core.lock:
            return {peer.name: peer for peer in self._peers}

    def peer(self, name: str, timeout: float = 30.0) -> Peer:
        """Waits until a peer of that name has connected, and returns it. Raises `TransferTimeout`."""
        found: list[Peer] = []

        def connected() -> bool:
            found.extend(peer for peer in self._peers if peer.name == name)
            return bool(found)

        self._core.wait(connected, timeout, lambda: f"peer {name!r} has not connected", f"peer {name!r}")
        return found[-1]

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
            name: the name under which peers find it. Without a name `avals` must be a dict, and its keys are the names.
            writers: names of the peers that may write into it. None lets every connected peer write.
            readable: lets peers `read` the committed arrays; the engine then keeps the last generation.
            in_place: on GPUs, committed arrays stay in the window's memory instead of being copied into JAX's. A
                program that XLA runs as a CUDA graph may then fail (docs, "Memory"). Elsewhere it changes nothing.

        Raises `ValueError` for a wrong argument or a name in use, `TransferRefused` for a dtype with elements below one
        byte, or if the engine is closed.
        """
        self._core.check_open("window")
        if name is not None:
            check_name(name, "window")
        if name is None and not (isinstance(avals, dict) and avals):
            raise ValueError("window: give a name, or a dict of avals whose keys are the names")
        for key in () if name is not None else avals:
            check_name(str(key), "window")
        with about("window" if name is None else f"window {name!r}"):
            window = Window(self._windows, avals, shardings, name, writers, readable, in_place)
        names = {name: ""} if name is not None else {str(key): str(key) for key in avals}
        self._windows.add(window, names)
        return window

    def publish(self, name: str, tree) -> Published:
        """Lets every peer read these arrays (`read(peer[name])`) until `close()`. A second call with the same name
        replaces the first.
        """
        self._core.check_open("publish")
        check_name(name, "publish")
        return self._windows.publish(name, tree)

    # --- transfers

    def write(
        self,
        src,
        target: RemoteArray | RemoteTree,
        *,
        pages: tuple[Any, Any] | None = None,
        imm: Imm | None = None,
        last: bool = False,
        timeout: float = 30.0,
    ) -> Transfer:
        """Starts writing arrays into a peer's window.

        Args:
            src: an array of the target's shape and dtype, or a pytree like the target. A `jax.Array` may still be in
                computation. Do not donate it, and do not change a NumPy array, before the transfer has ended.
            target: `peer["kv"]`, or a part of it.
            pages: (source pages, destination pages), equal numbers of indices into the first dimensions: `src[i]` is
                written to `target[j]`.
            imm: the counter at the peer that this write adds one to when all of it has arrived: an int of at most 256
                bits, or a string of at most 256 characters.
            last: gives the permission to write back when this write, and all others of this engine into the same
                generation, have ended. The peer learns it together with `imm`: once its counter is met, the death of
                this process no longer spoils the generation. A later write asks for permission again.
            timeout: seconds for the peer to give permission (at the first write into a generation).

        Raises `StaleWindow`, `TransferRefused`, `PeerLost`, `TransferTimeout`. `Transfer.wait` raises later errors.
        """
        if imm is not None:
            with about("write"):
                imm = check_imm(imm)
        if type(target) is RemoteArray and target.repeats:
            key = None
            if pages is not None:
                with about(f"write {target!r}", target.peer.name):
                    key = pages_key(pages)
            if (known := target.repeats.get(key)) is not None:
                if (again := known.write(self._core, src, imm, last)) is not None:
                    return again
        request = self._request("write", target)
        with about(request, target.peer.name):
            job, sources = write_job(self._core, src, target, pages, request, timeout)
        return Transfer(self._core, "put", request, [job], sources, imm, last).start()

    def scatter(
        self,
        src,
        pieces: Sequence[tuple[Any, RemoteArray]],
        *,
        imm: Imm | None = None,
        last: bool = False,
        timeout: float = 30.0,
    ) -> Transfer:
        """Starts one transfer with a part for each of several targets: `src[index]` is written to the target of every
        (index, target) in `pieces`.

        Every peer counts `imm` once for each part that has arrived. `last` is that of `write`, for every target, and so
        are the errors.
        """
        request = f"scatter of {len(pieces)} parts"
        jobs, sources = [], []
        with about(request):
            imm = None if imm is None else check_imm(imm)
        for piece in pieces:
            if not isinstance(piece, Sequence) or len(piece) != 2:
                raise TransferRefused(f"{request}: {piece!r} must be a pair (index, target)", request=request)
            index, target = piece
            self._request("scatter", target)
            with about(request, target.peer.name):
                part = _memory.part_of(src, index)
                job, source = write_job(self._core, part, target, None, request, timeout)
            jobs.append(job)
            sources += source
        return Transfer(self._core, "put", request, jobs, sources, imm, last).start()

    def read(self, target: RemoteArray | RemoteTree, *, sharding=None, timeout: float = 60.0):
        """Reads published arrays, or the last committed generation of a readable window. Returns an array, or a dict of
        arrays by path.

        Args:
            target: `peer["w"]`, or a part of it.
            sharding: the sharding of every result. None puts them on the first local device.

        Raises `TransferRefused`, `PeerLost`, `TransferTimeout`.
        """
        request = self._request("read", target)
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise ValueError(f"{request}: sharding={sharding!r} must be a jax.sharding.Sharding")
        with about(request, target.peer.name):
            return read(self._core, target, sharding, timeout, request)

    def counter(self, imm: Imm, expect: int, source: Peer | None = None) -> ImmCounter:
        """Returns a counter of the writes with number `imm` that have arrived, from all peers or from `source` alone
        (whose death `wait` then notices).
        """
        writes = as_int(expect)
        if writes is None or writes < 0:
            raise ValueError(f"counter {imm!r}: expect={expect!r} must be a number of writes, 0 or more")
        if source is not None:
            check_peer(source, f"counter {imm!r}")
        with about("counter"):
            return self._windows.counter(imm, writes, source)

    # --- messages

    def send(self, peer: Peer, value, *, tag: str = "") -> Transfer:
        """Sends bytes, an array, or a flat dict of arrays to the peer's `recv`. The transfer ends when the peer has
        taken it.
        """
        self._core.check_open("send")
        with about("send", peer.name if isinstance(peer, Peer) else None):
            return self._mailbox.send(peer, value, tag)

    def recv(self, peer: Peer | None = None, *, tag: str = "", sharding=None, timeout: float | None = None):
        """Waits for the next message with that tag (of that peer). Returns the message as it was sent: bytes, array, or
        dict. Raises `TransferTimeout`, `PeerLost`.
        """
        self._core.check_open("recv")
        if peer is not None:
            check_peer(peer, "recv")
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise ValueError(f"recv: sharding={sharding!r} must be a jax.sharding.Sharding")
        with about("recv", None if peer is None else peer.name):
            return self._mailbox.recv(peer, tag, sharding, timeout)

    def barrier(self, group: Sequence[Peer], timeout: float | None = None) -> None:
        """Returns when every engine of the group (this one and the peers given) has called it with the same group.

        Raises `TransferRefused`, `PeerLost`, `TransferTimeout`.
        """
        self._core.check_open("barrier")
        self._mailbox.barrier(group, timeout)

    # --- the end

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._core.closed

    def close(self, timeout: float = 10.0) -> None:
        """Ends everything; returns when no write is possible any more, neither of this process elsewhere nor of a peer
        here.

        Pending transfers are cancelled. A peer that does not confirm within `timeout` seconds is cut off, and the
        memory that it could write into is kept until this process ends.
        """
        until = deadline(timeout, "close")
        core, windows = self._core, self._windows
        with core.lock:
            if core.closing:
                return
            core.closing = True
            transfers = [operation for operation in core.pending if isinstance(operation, Transfer)]
        for transfer in transfers:
            transfer.cancel(max(0.1, until - time.monotonic()))
        for window in windows.all():
            window.close()
        with core.lock:
            windows.close_published()
            for peer in list(self._peers):
                peer.send({"t": "bye"})

        def confirmed() -> bool:
            waits = any(generation.writers for _, generation in windows.retired)
            return not waits and not any(peer.channel.has_outgoing for peer in self._peers)

        try:
            core.wait(confirmed, max(0.1, until - time.monotonic()), lambda: "close", "close")
        except TransferError:
            pass  # Peers that have not confirmed are cut off below.
        with core.lock:
            unsettled = [generation for _, generation in windows.retired if generation.writers or generation.lost]
            for peer in list(self._peers):
                peer.lose("this engine was closed")
            # With the wire closed below, only a living process with permission to write could still reach its memory.
            _never_released.extend(
                g for g in unsettled if not all(_process.has_ended(p.process) for p in [*g.writers, *g.lost])
            )
            core.closed = True
            core.changed.notify_all()
        self._loop.stop()
        with core.lock:
            for _, generation in windows.retired:
                generation.region.release()
            core.wire.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- peers come and go

    def _request(self, kind: str, target) -> str:
        self._core.check_open(kind)
        if not isinstance(target, (RemoteArray, RemoteTree)):
            raise TransferRefused(
                f"{kind}: the target is a {type(target).__name__}, not a peer's window: peer[name]", request=kind
            )
        if target.peer.core is not self._core:
            raise TransferRefused(f"{kind}: {target!r} was taken through another engine", request=kind)
        return f"{kind} {target!r}"

    def _hello(self) -> dict:
        return {
            "name": self.name,
            "identity": self.identity,
            "process": _process.describe(),
            "wire": base64.b64encode(self._core.wire.address).decode(),
        }

    def _reason_to_refuse(self, hello: dict) -> str | None:
        if self._core.closing:
            return f"the engine {self.name!r} is closed"
        if (name := hello.get("name")) in self.peers:
            return self._name_in_use(name)
        if (identity := str(hello.get("identity"))) in self._opening and self.identity < identity:
            return COMES
        return None

    def _name_in_use(self, name: Any) -> str:
        return (
            f"a peer named {name!r} is connected to {self.name!r} already; names must be unique. If the new one "
            f"replaces one that is stopped or hangs, first call engine.peer({name!r}).close() in {self.name!r}"
        )

    def _check_name(self, name: str) -> None:
        """Raises TransferRefused if a peer has this name."""
        if name in self.peers:
            raise TransferRefused(f"connect to {name!r}: {self._name_in_use(name)}", peer=name, request="connect")

    def _greet(self, connection: socket.socket, until: float) -> None:
        """Performs the handshake with a client, and makes it a peer."""
        admitted: set[str] = set()

        def refuse(hello: dict) -> str | None:
            with self._core.lock:
                if (reason := self._reason_to_refuse(hello)) is None:
                    admitted.add(str(hello.get("identity")))
                    self._admitting.update(admitted)
            return reason

        try:
            self._join(*_channel.accept_channel(connection, self._key, self._hello(), self.identity, until, refuse))
        finally:
            with self._core.lock:
                self._admitting -= admitted
                self._core.changed.notify_all()

    def _join(self, channel: _channel.Channel, hello: dict) -> Peer:
        core = self._core
        with core.lock:
            try:
                core.check_open("connect")
                self._check_name(hello["name"])
            except TransferRefused:
                channel.close()
                raise
            link = core.wire.connect(base64.b64decode(hello["wire"]))
            peer = Peer(core, next(self._peer_numbers), channel, link, hello, self._on_lost, self._disconnect)
            self._peers.append(peer)
            core.poller.watch(channel.socket, functools.partial(self._service.read, peer))
            core.poller.wake()
            core.changed.notify_all()
            return peer

    def _on_lost(self, peer: Peer) -> None:
        """Ends the operations of a lost peer. Under the lock."""
        self._peers.remove(peer)
        self._windows.lose(peer)
        for operation in list(self._core.pending):
            operation.lose(peer)
        self._mailbox.lose(peer)

    def _disconnect(self, peer: Peer) -> None:
        with self._core.lock:
            transfers = [operation for operation in self._core.pending if isinstance(operation, Transfer)]
        for transfer in transfers:
            if transfer.concerns(peer):
                transfer.cancel(5.0)
        with self._core.lock:
            peer.send({"t": "bye"})
            peer.lose("this engine closed the connection")
