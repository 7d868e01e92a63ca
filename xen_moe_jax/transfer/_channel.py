"""The authenticated message channel between two engines: one TCP connection, frames of a JSON head and raw bytes, each
with a tag.

The handshake proves on both sides that the other knows the secret (the engine's token, or the secret in its
descriptor), without sending it. Every frame then carries a keyed BLAKE2b tag over its number, direction and content: a
frame that was changed, repeated or moved ends the connection. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections import deque
from typing import Any

from xen_moe_jax.transfer._errors import PeerLost, TransferRefused, TransferTimeout

VERSION = 1
MAX_HELLO = 64 << 10
MAX_FRAME = 256 << 20
_SIZES = struct.Struct("<II")
TAG = 16

Head = dict[str, Any]


def tag(key: bytes, *parts: bytes) -> bytes:
    """Returns a keyed BLAKE2b over the parts, each with its length."""
    hasher = hashlib.blake2b(key=key, digest_size=TAG)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def secret_key(token: bytes) -> bytes:
    """Returns the 32-byte key for a token of any length."""
    return hashlib.blake2b(token, digest_size=32, person=b"xen-moe-transfer").digest()


def encode(head: Head, payload: bytes | memoryview = b"") -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_SIZES.pack(len(text), len(payload)), text, payload))


class Channel:
    """Frames over a connected socket, without blocking: `send` queues the bytes that the kernel does not take now, and
    `receive` returns whole frames.
    """

    def __init__(self, connection: socket.socket, key: bytes, is_client: bool):
        connection.setblocking(False)
        # A host that vanished is noticed within about ten seconds; a stopped process is not: its kernel goes on
        # answering.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 3),
            ("TCP_KEEPINTVL", 2),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 10_000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._keys = (tag(key, b"client"), tag(key, b"server"))
        self._directions = (0, 1) if is_client else (1, 0)
        self._sent = self._received = 0
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()

    def send(self, head: Head, payload: bytes = b"") -> None:
        """Queues a frame and sends as much as fits. Raises OSError if the connection is broken."""
        body = encode(head, payload)
        mark = tag(self._keys[self._directions[0]], self._sent.to_bytes(8, "little"), body)
        self._sent += 1
        self._outgoing.append(memoryview(body + mark))
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            first = self._outgoing[0]
            try:
                count = self.socket.send(first)
            except BlockingIOError:
                return
            if count == len(first):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = first[count:]

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> tuple[list[tuple[Head, bytes]], bool]:
        """Returns (whole frames that have arrived, whether the connection has ended).

        Raises OSError, or ValueError for a bad frame.
        """
        ended = False
        while not ended:
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError as cause:
                if cause.errno not in (errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE):
                    raise
                data = b""
            self._incoming += data
            ended = not data
            if len(self._incoming) > 4 << 20:
                break
        return self._whole_frames(), ended

    def _whole_frames(self) -> list[tuple[Head, bytes]]:
        frames, start = [], 0
        while len(self._incoming) - start >= _SIZES.size:
            head_size, payload_size = _SIZES.unpack_from(self._incoming, start)
            if head_size + payload_size > MAX_FRAME:
                raise ValueError(f"a frame of {head_size + payload_size} bytes; the limit is {MAX_FRAME}")
            body_end = start + _SIZES.size + head_size + payload_size
            if len(self._incoming) < body_end + TAG:
                break
            body = bytes(memoryview(self._incoming)[start:body_end])
            mark = bytes(self._incoming[body_end : body_end + TAG])
            expected = tag(self._keys[self._directions[1]], self._received.to_bytes(8, "little"), body)
            if not hmac.compare_digest(mark, expected):
                raise ValueError("a frame whose authentication tag is wrong")
            self._received += 1
            text = body[_SIZES.size : _SIZES.size + head_size]
            frames.append((json.loads(text), body[_SIZES.size + head_size :]))
            start = body_end + TAG
        if start:
            del self._incoming[:start]
        return frames

    def close(self) -> None:
        self.socket.close()


class _Handshake:
    """Sends and receives the messages of a handshake, blocking, all before one deadline."""

    def __init__(self, connection: socket.socket, deadline: float):
        self.connection, self.deadline = connection, deadline

    def _limit(self) -> None:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self.connection.settimeout(remaining)

    def send(self, message: Head) -> None:
        self._limit()
        self.connection.sendall(encode(message))

    def receive(self) -> Head:
        head_size, payload_size = _SIZES.unpack(self._exactly(_SIZES.size))
        if payload_size or head_size > MAX_HELLO:
            raise ValueError("not a handshake of this package")
        message = json.loads(self._exactly(head_size))
        if not isinstance(message, dict):
            raise ValueError("not a handshake of this package")
        return message

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit()
            part = self.connection.recv(count - len(data))
            if not part:
                raise ConnectionResetError("closed during the handshake")
            data += part
        return data


def _proof(key: bytes, role: bytes, nonces: bytes, hello: Head) -> str:
    return tag(key, role, nonces, json.dumps(hello, sort_keys=True).encode()).hex()


def _session(key: bytes, nonces: bytes) -> bytes:
    return tag(key, b"session", nonces)


def open_channel(
    address: tuple[str, int], key: bytes, hello: Head, target: str, deadline: float
) -> tuple[Channel, Head]:
    """Connects to the engine with identity `target`. Returns (channel, its hello). Raises this package's errors."""
    where = f"{address[0]}:{address[1]}"
    request = f"connect to {where}"
    try:
        connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
    except TimeoutError as cause:
        raise TransferTimeout(f"{request}: no engine answered in time", request=request) from cause
    except OSError as cause:
        raise PeerLost(f"{request}: {cause.strerror or cause}; is its engine open?", request=request) from cause
    try:
        talk = _Handshake(connection, deadline)
        own = os.urandom(16)
        talk.send({"version": VERSION, "nonce": own.hex(), "target": target})
        answer = talk.receive()
        if "refused" in answer:
            raise TransferRefused(f"{request}: {answer['refused']}", request=request)
        nonces = own + bytes.fromhex(answer["nonce"])
        if not hmac.compare_digest(_proof(key, b"server", nonces, answer["hello"]), answer["proof"]):
            raise TransferRefused(
                f"{request}: the peer does not know this engine's token; give both engines the same token",
                request=request,
            )
        talk.send({"hello": hello, "proof": _proof(key, b"client", nonces, hello)})
        verdict = talk.receive()
        if "refused" in verdict:
            raise TransferRefused(f"{request}: {verdict['refused']}", request=request)
        return Channel(connection, _session(key, nonces), is_client=True), answer["hello"]
    except BaseException as cause:
        connection.close()
        if isinstance(cause, TimeoutError) and not isinstance(cause, TransferTimeout):
            raise TransferTimeout(f"{request}: no handshake in time", request=request) from cause
        if isinstance(cause, OSError | ValueError | KeyError):
            raise PeerLost(f"{request}: the handshake broke off ({cause})", request=request) from cause
        raise


def accept_channel(
    connection: socket.socket, key: bytes, hello: Head, identity: str, deadline: float, refuse: Any
) -> tuple[Channel, Head]:
    """The other side of `open_channel`. `refuse(hello)` gives a reason not to admit this client, or None. Raises
    OSError/ValueError.
    """
    talk = _Handshake(connection, deadline)
    opening = talk.receive()
    if opening.get("version") != VERSION or opening.get("target") != identity:
        talk.send(
            {"refused": f"this engine speaks version {VERSION} as {identity}: the descriptor is of another engine"}
        )
        raise ValueError("a client for another engine or version")
    own = os.urandom(16)
    nonces = bytes.fromhex(opening["nonce"]) + own
    talk.send({"nonce": own.hex(), "hello": hello, "proof": _proof(key, b"server", nonces, hello)})
    answer = talk.receive()
    if not hmac.compare_digest(_proof(key, b"client", nonces, answer["hello"]), answer["proof"]):
        talk.send({"refused": "wrong token; give both engines the same token"})
        raise ValueError("a client without the token")
    if reason := refuse(answer["hello"]):
        talk.send({"refused": reason})
        raise ValueError(reason)
    talk.send({"welcome": True})
    return Channel(connection, _session(key, nonces), is_client=False), answer["hello"]
