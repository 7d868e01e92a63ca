"""A wire that behaves as badly as a library may, and in some ways worse.

It posts in another order, late and in small parts, says twice that something has ended, fails after part of the bytes,
and cuts links. Arrival frames of its engine are held back, swapped and sent twice.
"""

import random

import numpy as np

from xen_moe_jax.transfer._ucx import UcxWire
from xen_moe_jax.transfer._wire import at_address

FAIL, CUT = 0.01, 0.0005
"""Probability that a posting fails in the middle, and that its link breaks."""


class AdversaryPosting:
    runs_alone = False

    def __init__(self, link, kind, key, memory, runs, rng):
        self._link, self._rng, self._kind, self._key, self._memory = link, rng, kind, key, memory
        self.nbytes, self.bytes_posted, self.error = int(runs[:, 2].sum()), 0, None
        parts = []
        for local, remote, nbytes in runs.tolist():
            first = rng.randrange(nbytes + 1)
            parts += [(local, remote, first), (local + first, remote + first, nbytes - first)]
        rng.shuffle(parts)
        self._parts = [part for part in parts if part[2]]
        self._delay = rng.randrange(6)
        self._fails = rng.random() < FAIL
        self._inner = None

    def stop(self):
        self._parts = []
        if self._inner is not None:
            self._inner.stop()

    def advance(self):
        if self._delay > 0:
            self._delay -= 1
            return False
        if self._link.failed:
            self.error, self._parts = self.error or self._link.failed, []
        if self._inner is not None and not self._inner.advance():
            return False
        if self._inner is not None:
            self.bytes_posted += 0 if self._inner.error else self._inner.nbytes
            self.error = self.error or self._inner.error
            self._inner = None
        if not self._parts:
            return True  # Repeats the attack as often as it is asked.
        if self._rng.random() < CUT:
            self._link.failed = self.error = "the adversary cut the link"
            self._parts = []
            return True
        if self._fails:
            self.error, self._parts = "the adversary failed a posting", self._parts[: len(self._parts) // 2]
            self._fails = False
        if not self._parts:
            return True
        part = self._parts.pop()
        self._inner = self._link.inner.post(self._kind, self._key, self._memory, part[2], np.array([part], np.int64))
        if self._inner is None:
            self.bytes_posted += part[2]
        self._delay = self._rng.randrange(3)
        return False


class AdversaryLink:
    def __init__(self, inner, rng):
        self.inner, self._rng, self._failed = inner, rng, None

    @property
    def failed(self):
        return self._failed or self.inner.failed

    @failed.setter
    def failed(self, reason):
        self._failed = reason

    def post(self, kind, key, memory, nbytes, runs):
        return AdversaryPosting(self, kind, key, memory, runs, self._rng)

    def post_again(self, runs, pointer):
        return self.post("put", runs.key, runs.memory, runs.nbytes, at_address(runs.template, pointer))

    def takes_host_memory(self, key):
        return self.inner.takes_host_memory(key)

    def forget(self, key):
        self.inner.forget(key)

    def close(self, force):
        self.inner.close(force)


class AdversaryWire:
    def __init__(self, seed):
        self._inner = UcxWire("127.0.0.1", {})
        self._rng = random.Random(seed)
        self.address, self.event_fd = self._inner.address, self._inner.event_fd

    def register(self, pointer, nbytes, memory):
        return self._inner.register(pointer, nbytes, memory)

    def connect(self, address):
        return AdversaryLink(self._inner.connect(address), self._rng)

    def progress(self):
        self._inner.progress()

    def arm(self):
        return self._inner.arm()

    def close(self):
        self._inner.close()


def disturb(peer, seed):
    """Holds back, swaps and repeats the arrival frames that are sent to a peer; other frames let those that are held
    go first.
    """
    rng, held, send = random.Random(seed), [], peer.send

    def sending(head, payload=b""):
        if head["t"] == "imm":
            held.append(head)
            if rng.random() < 0.2:
                held.append(head)
            if len(held) < 4:
                return
        rng.shuffle(held)
        while held:
            send(held.pop())
        if head["t"] != "imm":
            send(head, payload)

    peer.send = sending
    return lambda: sending({"t": "revoked", "w": 0, "g": 0})
