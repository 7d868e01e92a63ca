"""Windows in GPU memory on a machine without a GPU: "cuda" memory is the host's, and the driver is this file.

Run as a program, in a process of its own. It has arrays in imported memory when it ends: its exit status counts, too.
Memory is a file that another process can map; copies run when an event behind them has been asked for a few times.
"""

import ctypes
import gc
import json
import mmap
import os
import struct
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt
from xen_moe_jax.transfer import _cuda_memory, _device, _memory, _posting, _ucp

SHAPE, FLOAT8 = (16, 8), jnp.float8_e4m3fn
WIDE = (512, 4096)
PATIENCE = 3
"""Number of queries of an event before the copies in front of it have run."""
allocated = {}
"""Pointer to (file, bytes)."""
mapped = {}


def map_file(file, nbytes):
    view = mmap.mmap(file, nbytes)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(view))
    mapped[pointer] = view
    return pointer


def allocate(nbytes):
    file = os.memfd_create("memory")
    os.ftruncate(file, nbytes)
    pointer = map_file(file, nbytes)
    allocated[pointer] = file, nbytes
    return pointer


HANDLE = struct.Struct("<qqq40x")


def export(pointer):
    if pointer not in allocated:
        return None
    file, nbytes = allocated[pointer]
    return HANDLE.pack(os.getpid(), file, nbytes), file, pointer, nbytes - driver.hidden


def open_exported(handle):
    process, file, nbytes = HANDLE.unpack(handle)
    return map_file(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR), nbytes)


class Driver:
    """One stream. `error` is the next copy's return value; the driver does not report `hidden` bytes of an
    allocation."""

    def __init__(self):
        self.waiting, self.events, self.copies, self.opened = [], {}, 0, 0
        self.error = self.hidden = self.batches = 0
        self.without_batches = self.from_host = False
        self.patience = PATIENCE
        c_int, u64, pointer = ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
        array, size = ctypes.POINTER, ctypes.c_size_t
        calls = [
            (self.copy, [u64, u64, ctypes.c_size_t, pointer]),
            (self.event_create, [ctypes.POINTER(pointer), ctypes.c_uint]),
            (self.event_record, [pointer, pointer]),
            (self.event_query, [pointer]),
            (lambda event: 0, [pointer]),
            (lambda context: 0, [pointer]),
            (lambda context: 0, [ctypes.POINTER(pointer)]),
            (self.batch, [array(u64), array(u64), array(size), size, *[pointer] * 2, size, pointer]),
        ]
        self._kept = [ctypes.CFUNCTYPE(c_int, *arguments)(call) for call, arguments in calls]

    def functions(self, from_host):
        self.from_host |= from_host
        addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in self._kept]
        return [*addresses[:-1], None if from_host else addresses[-1]]

    def copy(self, to, origin, nbytes, _stream):
        if self.error:
            return self.error
        self.copies += 1
        self.waiting.append((to, origin, nbytes))
        return 0

    def batch(self, to, origin, nbytes, count, _attributes, _first, _number, stream):
        if self.without_batches:
            return 801
        self.batches += 1
        return max(self.copy(to[i], origin[i], nbytes[i], stream) for i in range(count))

    def event_create(self, event, _flags):
        event[0] = len(self.events) + 1
        self.events[len(self.events) + 1] = None
        return 0

    def event_record(self, event, _stream):
        self.events[event] = self.patience
        return 0

    def event_query(self, event):
        self.events[event] -= 1
        if self.events[event] > 0:
            return 600
        self.run()
        return 0

    def run(self):
        while self.waiting:
            ctypes.memmove(*self.waiting.pop())

    def open(self, handle):
        self.opened += 1
        return open_exported(handle)


driver = Driver()


def install():
    _ucp.MEMORY_TYPES["cuda"] = _ucp.MEMORY_TYPES["host"]
    _posting._PARAMETERS["cuda"] = _ucp.parameters("host")
    _memory._IN_PLACE = {"cpu": "cuda"}
    _cuda_memory._CUDA = 1  # DLPack's kDLCPU
    _device.allocate = allocate
    _device.zero = lambda pointer, nbytes: ctypes.memset(pointer, 0, nbytes)
    _device.copy = lambda to, origin, nbytes: ctypes.memmove(to, origin, nbytes)
    _device.is_shareable = lambda pointer: pointer in allocated
    _device.ordinal_of = _device.ordinal = lambda _: 0
    _device.default_ordinal = lambda: 0
    _device.make_current = lambda _: None
    _device.context = lambda _: 0
    _device.export, _device.open_exported, _device.close_exported = export, driver.open, mapped.pop
    _device.new_stream, _device.end_stream = lambda: 0, lambda _: driver.run()
    _device.copy_functions = driver.functions


def in_one_process():
    x = jax.random.normal(jax.random.key(0), SHAPE)
    with xt.Engine(name="receiver") as receiver, xt.Engine(name="sender") as sender:
        window = receiver.window(
            {"kv": jax.ShapeDtypeStruct(SHAPE, x.dtype), "scales": jax.ShapeDtypeStruct((4,), FLOAT8)},
            in_place=True,
        )
        peer = sender.connect(receiver.descriptor)
        for generation in range(3):
            sender.write(x + generation, peer["kv"]).wait(20)
            pages = ([0, 1], [5, 9])
            sender.write(np.asarray(x[:2]), peer["kv"], pages=pages, imm="pages").wait(20)  # Staged on the "GPU".
            sender.write(jnp.ones((4,), FLOAT8), peer["scales"]).wait(20)
            with receiver.counter("pages", expect=1) as counter:
                counter.wait(20)
            got = window.commit(20)
            expected = np.asarray(x + generation).copy()
            expected[[5, 9]] = np.asarray(x[:2])
            np.testing.assert_array_equal(np.asarray(got["kv"]), expected)
            np.testing.assert_array_equal(np.asarray(got["scales"]), np.ones(4, FLOAT8))
            assert got["kv"].unsafe_buffer_pointer() in allocated, "the committed array was copied"
            if generation < 2:
                del got
                gc.collect()
        assert len(allocated) == 4, f"memory was not used again: {len(allocated)} pieces for two arrays"
        assert x.unsafe_buffer_pointer() not in allocated
        copied = receiver.window(jax.ShapeDtypeStruct(SHAPE, x.dtype), name="copied")
        sender.write(x, peer["copied"]).wait(20)
        copy = copied.commit(20, last=True)
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(x))
        assert copy.unsafe_buffer_pointer() not in allocated, "the committed array is not in JAX's memory"
        receiver.publish("published", x)  # Other processes cannot map it: peers read a copy.
        np.testing.assert_array_equal(np.asarray(sender.read(peer["published"])), np.asarray(x))
        sender.send(peer, {"x": x, "y": 2 * x})
        np.testing.assert_array_equal(np.asarray(receiver.recv(timeout=20)["y"]), np.asarray(2 * x))
    assert driver.copies == 0, "a process cannot open its own memory"
    return got


def content(generation):
    return np.random.default_rng(generation).integers(0, 256, WIDE, np.uint8)


def between_two_processes():
    """Windows of this process, written by another one: by the driver's copies."""
    window_of = jax.ShapeDtypeStruct(WIDE, jnp.uint8)
    with xt.Engine(name="receiver") as receiver:
        window = receiver.window(window_of, name="w")
        receiver.publish("published", jnp.asarray(content(99)))
        receiver.publish("on the host", content(98))
        command = [sys.executable, __file__, receiver.descriptor.hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            peer = receiver.peer("sender", 60)

            def ask(**order):
                receiver.send(peer, json.dumps(order).encode()).wait(20)
                return json.loads(receiver.recv(peer, timeout=60))

            order = np.random.default_rng(1).permutation(WIDE[0])[:200].tolist()
            for generation in range(4):  # The third one lies where the first one did: nothing is opened again.
                answer = ask(do="write", seed=generation, imm=generation, pages=order if generation % 2 else None)
                with receiver.counter(generation, expect=1) as counter:
                    counter.wait(20)
                got = window.commit(20)
                expected = content(generation)
                if generation % 2:
                    expected = np.zeros(WIDE, np.uint8)
                    expected[order] = content(generation)[: len(order)]
                np.testing.assert_array_equal(np.asarray(got), expected)
                del got
                gc.collect()
            # In pages: one copy for each; in a whole array: one for all.
            assert answer["copies"] == 2 * (1 + len(order)), answer
            assert answer["opened"] == 2, answer
            assert answer["batches"] == 2, answer
            # The sender does not wait: its thread has to poll. Also by a driver without batches.
            for number, change in enumerate(
                ({"patience": 3000}, {"without_batches": True}, {"from_host": True, "in_callback": True})
            ):
                before = answer["copies"]
                ask(do="post", seed=20 + number, imm=f"post{number}", pages=order, **change)
                with receiver.counter(f"post{number}", expect=1) as counter:
                    counter.wait(20)
                expected = np.zeros(WIDE, np.uint8)
                expected[order] = content(20 + number)[: len(order)]
                np.testing.assert_array_equal(np.asarray(window.commit(20)), expected)
                answer = ask(do="report")
                assert answer["copies"] - before == len(order), (change, answer)
            assert answer["batches"] == 3 and answer["from_host"], answer
            assert ask(do="read", seed=99)["equal"]
            answer = ask(do="read", seed=98, name="on the host")
            assert answer["equal"] and answer["by UCX"] == 0, answer
            answer = ask(do="fail", error=700)
            assert "CUDA error 700" in answer["error"], answer
            driver.hidden = 4096  # A window that reports too short a length: the bytes behind it are not written.
            short = receiver.window(window_of, name="short")
            answer = ask(do="write", name="short", seed=5, imm="short", pages=None)
            assert "CUDA error 1 " in answer["error"], answer
            driver.hidden = 0
            short.close()
            flooded = receiver.window(window_of, name="flooded", in_place=True)
            flood = ask(do="flood", seed=11)  # Copies that are pending when the window is closed are waited for.
            assert flood["pending"] > 0, flood
            got = flooded.commit(30)
            seen = np.array(got)
            time.sleep(0.3)
            np.testing.assert_array_equal(np.asarray(got), seen)
            del got
            receiver.send(peer, json.dumps({"do": "die", "seed": 7}).encode()).wait(20)
            other.wait(30)
            try:
                window.commit(20)
                raise AssertionError("half a write was committed")
            except xt.PeerLost:
                window.reset()


def by_ucx_alone():
    with xt.Engine(name="receiver") as receiver:
        window = receiver.window(jax.ShapeDtypeStruct(WIDE, jnp.uint8), name="w")
        with subprocess.Popen([sys.executable, __file__, receiver.descriptor.hex(), "ucx"]) as other:
            peer = receiver.peer("sender", 60)
            order = {"do": "write", "seed": 3, "imm": 3, "pages": None}
            receiver.send(peer, json.dumps(order).encode()).wait(20)
            answer = json.loads(receiver.recv(peer, timeout=60))
            np.testing.assert_array_equal(np.asarray(window.commit(20)), content(3))
            assert answer["copies"] == answer["opened"] == 0, answer
            other.kill()


def sender(descriptor, backend="auto"):
    with xt.Engine(name="sender", backend=backend) as engine:
        peer = engine.connect(bytes.fromhex(descriptor))
        posted = []
        while True:
            order = json.loads(engine.recv(peer, timeout=60))
            answer = {}
            source = jnp.asarray(content(order.get("seed", 0)))
            driver.error = order.get("error", 0)
            try:
                if order["do"] == "read":
                    got = engine.read(peer[order.get("name", "published")])
                    answer["equal"] = bool((np.asarray(got) == content(order["seed"])).all())
                elif order["do"] == "write":
                    pages = order["pages"] and (range(len(order["pages"])), order["pages"])
                    transfer = engine.write(source, peer[order.get("name", "w")], pages=pages, imm=order["imm"])
                    transfer.wait(20)
                    assert not driver.waiting, "it ended before its copies"
                elif order["do"] == "post":
                    driver.patience = order.get("patience", PATIENCE)
                    driver.without_batches = order.get("without_batches", False)
                    pages = range(len(order["pages"])), order["pages"]
                    given = np.asarray(source) if order.get("from_host") else source
                    if order.get("in_callback"):  # JAX's default device is the CPU there.
                        _device.default_ordinal = lambda: None
                    posted.append(engine.write(given, peer["w"], pages=pages, imm=order["imm"]))
                    assert "patience" not in order or driver.waiting, "it was waited for"
                elif order["do"] == "report":
                    answer["from_host"] = driver.from_host
                elif order["do"] == "flood":
                    driver.patience = 1000
                    target = peer["flooded"]
                    kept = [engine.write(source + i, target) for i in range(6)]
                    answer["pending"] = sum(not transfer.done() for transfer in kept)
                    driver.patience = PATIENCE
                else:
                    transfer = engine.write(source, peer["w"])
                    if order["do"] == "die":
                        os._exit(9)
                    transfer.wait(20)
            except xt.TransferError as error:
                answer["error"] = str(error)
            answer["by UCX"] = len(peer.link._keys)
            answer |= {"copies": driver.copies, "opened": driver.opened, "batches": driver.batches}
            engine.send(peer, json.dumps(answer).encode()).wait(20)


if __name__ == "__main__":
    install()
    if sys.argv[1:]:
        sender(*sys.argv[1:])
    kept = in_one_process()
    between_two_processes()
    by_ucx_alone()
    print("whole")
