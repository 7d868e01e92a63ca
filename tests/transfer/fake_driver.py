"""Windows in GPU memory on a machine without a GPU: "cuda" memory is the host's, and the driver is this file.

Run as a program, in a process of its own. It has arrays in imported memory when it ends: its exit status counts, too.
"""

import ctypes
import gc

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt
from xen_moe_jax.transfer import _cuda_memory, _device, _memory, _posting, _ucp

SHAPE, FLOAT8 = (16, 8), jnp.float8_e4m3fn
_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype, _libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
allocated = set()


def allocate(nbytes):
    allocated.add(pointer := _libc.aligned_alloc(256, -(-nbytes // 256) * 256))
    return pointer


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


def main():
    install()
    x = jax.random.normal(jax.random.key(0), SHAPE)
    with xt.Engine(name="receiver") as receiver, xt.Engine(name="sender") as sender:
        window = receiver.window(
            {"kv": jax.ShapeDtypeStruct(SHAPE, x.dtype), "scales": jax.ShapeDtypeStruct((4,), FLOAT8)}
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
        receiver.publish("published", x)  # Nobody can map it: peers read a copy.
        np.testing.assert_array_equal(np.asarray(sender.read(peer["published"])), np.asarray(x))
        sender.send(peer, {"x": x, "y": 2 * x})
        np.testing.assert_array_equal(np.asarray(receiver.recv(timeout=20)["y"]), np.asarray(2 * x))
    return got


if __name__ == "__main__":
    kept = main()
    print("whole")
