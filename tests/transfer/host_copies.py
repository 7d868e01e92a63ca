"""Writes between host memory of two processes, by stores into mapped memory and by the kernel's copies. Run as a
program, in a process of its own.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt
from xen_moe_jax.transfer import _process, _shared_memory

PAGES = (700, 48)
LONG = 40 << 20  # More than the loop hands over at once.


def content(seed, shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def copies_of(peer):
    return peer.link._host_copies._copies


def mapped():
    """Number of pieces of another process's file that are mapped here; a sender has none of its own."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:xen_moe_jax.transfer")


def receiver(by):
    with xt.Engine(name="receiver") as engine:
        window = engine.window(
            {"pages": jax.ShapeDtypeStruct(PAGES, np.uint8), "long": jax.ShapeDtypeStruct((LONG,), np.uint8)}
        )
        engine.publish("published", jnp.asarray(content(9, PAGES)))
        print(engine.descriptor.hex(), flush=True)
        peer = engine.peer("sender", 300)
        for generation in range(2):  # Each write twice: the second one goes the short way.
            with engine.counter(generation, expect=4) as counter:
                counter.wait(30)
            got = window.commit(30)
            order = np.random.default_rng(generation).permutation(PAGES[0])[:600]
            expected = np.zeros(PAGES, np.uint8)
            expected[order] = content(generation, PAGES)[:600]
            np.testing.assert_array_equal(np.asarray(got["pages"]), expected)
            np.testing.assert_array_equal(np.asarray(got["long"]), content(10 + generation, (LONG,)))
        engine.publish("committed", got["pages"])
        # A stopped sender of large writes: nothing lands after the commit.
        engine.send(peer, b"flood").wait(30)
        assert engine.recv(peer, timeout=30) == b"flooding"
        time.sleep(0.05)
        long = window.commit(30)["long"]
        seen = np.array(long)
        time.sleep(0.2)
        np.testing.assert_array_equal(np.asarray(long), seen)
        report = json.loads(engine.recv(peer, timeout=30))
        expected = {
            "copies": True,
            "committed": True,
            "kept": 0,
            "stale": True,
            "read": True,
            "outside": True,
        }
        # In an open generation both arrays are mapped; at last only the written one, since a committed array is not
        # mapped.
        expected["mapped"] = [2, 2, 1] if by == "mapped" else [0, 0, 0]
        assert report == expected, report
        engine.send(peer, b"die").wait(30)
        time.sleep(300)  # The sender kills this process.


def sender(descriptor, by):
    if by == "kernel":
        _shared_memory.open_file = lambda process, place: None
    with xt.Engine(name="sender") as engine:
        peer = engine.connect(bytes.fromhex(descriptor))
        pieces = []
        for generation in range(2):
            while peer["pages"].generation != generation + 1:
                time.sleep(0.001)
            pages, long = peer["pages"], peer["long"]
            order = np.random.default_rng(generation).permutation(PAGES[0])[:600]
            source = jnp.asarray(content(generation, PAGES))
            for repeat in range(2):
                transfer = engine.write(source, pages, pages=(range(600), order), imm=generation)
                transfer.wait(30)
                assert transfer.bytes_done == transfer.nbytes == 600 * PAGES[1]
                engine.write(jnp.asarray(content(10 + generation, (LONG,))), long, imm=generation).wait(30)
                if not repeat:
                    pieces.append(mapped())
        report = {"copies": copies_of(peer) is not None, "mapped": pieces}
        report["read"] = bool((engine.read(peer["published"]) == content(9, PAGES)).all())
        assert engine.recv(peer, timeout=30) == b"flood"
        while peer["long"].generation != 3:  # By then the written array is not mapped any more.
            time.sleep(0.001)
        expected = np.zeros(PAGES, np.uint8)
        expected[order] = content(1, PAGES)[:600]
        report["committed"] = bool((engine.read(peer["committed"]) == expected).all())
        report["kept"] = mapped()
        while (long := peer["long"]).generation != 3:
            time.sleep(0.001)
        sources = [jnp.full((LONG,), fill, np.uint8) for fill in range(4)]
        engine.write(sources[0], long).wait(30)
        engine.send(peer, b"flooding")
        try:
            while True:
                for transfer in [engine.write(source, long) for source in sources]:
                    transfer.wait(30)
        except xt.StaleWindow:
            report["stale"] = True
        pages = peer["pages"]
        engine.write(source := jnp.asarray(content(3, PAGES)), pages).wait(30)
        report["outside"] = outside(peer, pages, source)
        pieces.append(mapped())
        engine.send(peer, json.dumps(report).encode()).wait(30)
        assert engine.recv(peer, timeout=30) == b"die"
        os.kill(peer.process["id"], 9)
        try:
            while True:
                engine.write(source, pages).wait(30)
        except xt.PeerLost as lost:
            assert lost.peer == "receiver"
            os._exit(0)


def outside(peer, target, source):
    """Returns whether a posting fails that writes behind the memory that the peer gave."""
    grant = target.target.grant("test", 10)
    (shard,) = grant.leaves[target.leaf.path].shards
    runs = np.array([[source.unsafe_buffer_pointer(), shard.pointer + source.nbytes - 8, 16]], np.int64)
    posting = peer.link.post("put", shard.key, "host", 16, runs)
    failed = posting is not None and posting.advance() and "Invalid argument" in posting.error
    return bool(failed)


def marks():
    """The marks identify a process, and another process with its number is not mistaken for it."""
    mark, place = _process.mark()
    own = _process.open_marked(os.getpid(), mark, place)
    assert own is not None
    os.close(own)
    assert _process.open_marked(os.getpid(), bytes(16), place) is None, "a wrong mark"
    assert _process.open_marked(os.getpid(), mark, 8) is None, "no memory there"
    assert _process.open_marked(2**22 + 7, mark, place) is None, "no such process"
    child = os.fork()
    if not child:  # Another process, although it has all that this one had.
        os._exit(0 if _process.mark()[0] != mark else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child has its parent's mark"
    assert len(ctypes.string_at(place, 16)) == 16


def children():
    """A child does not give back memory that it has from its parent."""
    memory = _shared_memory.SharedMemory(1 << 20)
    ctypes.memset(memory.pointer, 7, 1 << 20)
    child = os.fork()
    if not child:
        del memory
        os._exit(0 if _shared_memory.place_of(0) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ctypes.string_at(memory.pointer, 1 << 20) == bytes([7]) * (1 << 20), "a child gave it back"


def both(by):
    with subprocess.Popen([sys.executable, __file__, "receiver", by], stdout=subprocess.PIPE, text=True) as receiving:
        descriptor = receiving.stdout.readline().strip()
        done = subprocess.run([sys.executable, __file__, descriptor, by], timeout=300)
        assert done.returncode == 0, "the sender did not see what it should"
        assert receiving.wait(30) == -9, "the receiver ended before it was killed"


if __name__ == "__main__":
    if sys.argv[1:]:
        receiver(sys.argv[2]) if sys.argv[1] == "receiver" else sender(*sys.argv[1:])
    else:
        marks()
        children()
        both("mapped")
        both("kernel")
