"""Peers of `python -m benchmarks transfer`: raw UCX, raw NIXL and a plain copy.

"Raw UCX" is a loop in C over the same library, worker, endpoint and key as the engine's: a put for each piece, a flush
for each operation. "Raw NIXL" is NIXL's Python interface with requests that were prepared before the clock runs. The
"copy" is `cuMemcpyDtoDAsync` from the first GPU to the second in one process, or NumPy's on the CPU.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import importlib
import importlib.util
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

Cell = tuple[str, int, int, int]
"""Table, bytes of a piece, pieces of an operation, operations in flight."""

Operation = Callable[[int], None]
"""Runs that many operations at once, and returns when all have ended."""

RAW_UCX, RAW_NIXL, COPY = PEERS = ("raw UCX", "raw NIXL", "copy in one process")


def unavailable(module: str) -> str | None:
    """Returns the reason why a peer cannot be measured on this machine, or None."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot be imported: {error}"
    return None


class _Loop(ctypes.Structure):
    """`struct loop` of ucx_loop.c."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("put", "flush", "progress", "status", "release", "worker", "endpoint", "key", "put_parameters")
    ] + [("flush_parameters", ctypes.c_void_p)]


@functools.cache
def _compiled_loop() -> Any:
    """`run_operations` of ucx_loop.c, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source = pathlib.Path(__file__).with_name("ucx_loop.c")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "ucx_loop.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).run_operations
    function.argtypes = [ctypes.POINTER(_Loop), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return function


def raw_ucx(engine: Any, place: Any, piece: Any, pages: Any) -> Operation:
    """The C loop over the engine's own endpoint, for a write that the engine has done before."""
    from xen_moe_jax.transfer import _memory, _ucp

    grant = place.target.grant("benchmark", 30)
    shards, kept = _memory.local_shards(piece)
    (runs,) = place.runs(shards, grant.leaves[place.leaf.path].shards, pages)
    link, ucp = place.peer.link, _ucp.library()
    addresses = np.ascontiguousarray(runs.addresses)
    parameters, flush_parameters = _ucp.parameters(runs.memory), _ucp.RequestParams()
    calls = ("ucp_put_nbx", "ucp_ep_flush_nbx", "ucp_worker_progress", "ucp_request_check_status", "ucp_request_free")
    handles = (engine._core.wire._worker, link.endpoint, link.key(runs.key))
    loop = _Loop(
        *(ctypes.cast(getattr(ucp, call), ctypes.c_void_p) for call in calls),
        *handles,
        ctypes.addressof(parameters),
        ctypes.addressof(flush_parameters),
    )
    run = _compiled_loop()

    def operation(count: int, kept: Any = (kept, parameters, flush_parameters)) -> None:
        with engine._core.lock:
            status = run(ctypes.byref(loop), addresses.ctypes.data, len(addresses), count)
        if status:
            raise RuntimeError(f"raw UCX: {_ucp.status_text(status)}")

    return operation


class RawNixl:
    """NIXL's Python interface: a prepared request for each operation in flight, posted again and again.

    On the CPU it copies between the same memory that this package writes from and into: the operating system's cost of
    a page differs from memory to memory by more than the libraries do. On GPUs it copies between memory of the driver
    on both sides, which suits the UCX inside NIXL better than XLA's memory.
    """

    def __init__(self, target: Any):
        from nixl._api import nixl_agent, nixl_agent_config

        self._target = target
        self._agent = nixl_agent("source", nixl_agent_config(backends=["UCX"]))
        self._remote: str | None = None
        self._end: Callable[[], None] = lambda: None

    def operation(self, window: str, piece: Any, cell: Cell) -> Operation:
        """Writes of `piece`, or of its even rows, to the target's memory of a cell: that of `window` on the CPU."""
        from xen_moe_jax.transfer import _device, _memory

        self._end()
        agent, (_, size, batch, concurrency) = self._agent, cell
        there = self._target("nixl", window=window, nbytes=2 * batch * size)
        source, device = piece, 0
        if there["memory"] == "VRAM":
            source, device = (
                _memory.Block((2 * batch * size,), np.dtype(np.uint8), None),
                _device.default_ordinal() or 0,
            )
        pointer = piece.unsafe_buffer_pointer() if source is piece else source.shards[0].pointer
        registered = agent.register_memory([(pointer, source.nbytes, device, "")], there["memory"])
        self._remote = agent.add_remote_agent(base64.b64decode(there["metadata"]))
        pieces = range(0, 2 * batch * size, 2 * size)
        lists = (
            agent.get_xfer_descs([(base + offset, size, number) for offset in pieces], there["memory"])
            for base, number in ((pointer, device), (there["pointer"], there["device"]))
        )
        local, remote = lists
        handles = [agent.initialize_xfer("WRITE", local, remote, self._remote) for _ in range(concurrency)]

        def operation(count: int, kept: Any = source) -> None:
            waiting = [handle for handle in handles[:count] if agent.transfer(handle) == "PROC"]
            while waiting:
                states = [(handle, agent.check_xfer_state(handle)) for handle in waiting]
                if any(state == "ERR" for _, state in states):
                    raise RuntimeError("NIXL reports an error")
                waiting = [handle for handle, state in states if state == "PROC"]

        def end() -> None:
            for handle in handles:
                agent.release_xfer_handle(handle)
            agent.remove_remote_agent(self._remote)
            agent.deregister_memory(registered)
            self._target("nixl_end")

        self._end = end
        operation(1)
        return operation


def copy(size: int) -> Operation:
    """Returns an operation that copies `size` bytes inside one process, one copy at a time: from GPU to GPU over
    NVLink, or from memory to memory."""
    import jax

    devices, host = jax.local_devices(), np.zeros((2, size), np.uint8)
    if devices[0].platform == "cpu":
        return _host_copy(host)
    return _driver_copy(*(jax.block_until_ready(jax.device_put(host[0], device)) for device in devices[:2]))


def _host_copy(host: np.ndarray) -> Operation:
    def operation(count: int) -> None:
        for _ in range(count):
            np.copyto(host[1], host[0])

    return operation


def _driver_copy(source: Any, destination: Any) -> Operation:
    """`cuMemcpyDtoDAsync` and the wait for it. Peer access is JAX's."""
    from xen_moe_jax.transfer import _device

    driver, stream = _device.driver(), ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"the copy between two GPUs failed with CUDA error {status}")

    _device.make_current(_device.ordinal(source.device))
    check(driver.cuStreamCreate(ctypes.byref(stream), 1))
    to, origin = (ctypes.c_uint64(array.unsafe_buffer_pointer()) for array in (destination, source))

    def operation(count: int, kept: Any = (source, destination)) -> None:
        for _ in range(count):
            check(driver.cuMemcpyDtoDAsync_v2(to, origin, ctypes.c_size_t(source.nbytes), stream))
        check(driver.cuStreamSynchronize(stream))

    return operation


def left_out(peer: str, chosen: str) -> str | None:
    """Returns the reason why a peer is not measured, or None; `chosen` are the names in `--peers`."""
    import jax

    if chosen != "all" and peer not in (name.strip() for name in chosen.split(",")):
        return f"--peers {chosen}"
    if peer == RAW_UCX and _compiled_loop() is None:
        return "no C compiler (cc) to build its loop with"
    if peer == COPY and jax.default_backend() == "gpu" and len(jax.local_devices()) < 2:
        return "a single GPU"
    return unavailable("nixl") if peer == RAW_NIXL else None
