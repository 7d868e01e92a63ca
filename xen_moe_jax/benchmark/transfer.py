"""`benchmark --mode transfer`: writes from this process to another one of the host, beside raw NIXL, raw UCX and JAX's
own transfer.

Every row is one size, one batch (pieces of an operation, none of them neighbours) and one concurrency (operations in
flight). Seconds are from the start of the operations to the confirmation that all bytes are in the other process's
memory.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple((2 * KIB) << shift for shift in range(0, 17, 2))  # 2 KiB to 128 MiB
BATCHES, CONCURRENCIES = (1, 64), (1, 16)
PAGES = tuple(KIB << shift for shift in range(7))  # 1 to 64 KiB
PAGES_OF_A_WRITE = 256
MOST_BYTES = 512 * MIB
"""Of a batch at the target: larger cells are left out, and named."""
MOST_IN_FLIGHT = 2048 * MIB
SECONDS = 0.4
MOST_REPEATS = 400

Cell = tuple[str, int, int, int]
"""Table, bytes of a piece, pieces of an operation, operations in flight."""

Operation = Callable[[int], None]
"""Runs that many operations at once, and returns when all have ended."""


class TargetProcess:
    """`transfer_target` on the second GPU, or on the CPU."""

    def __init__(self, gpu: int | None):
        environment = dict(os.environ)
        if gpu is not None:
            environment |= {"JAX_CUDA_VISIBLE_DEVICES": str(gpu), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "xen_moe_jax.benchmark.transfer_target"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, do: str, **arguments: Any) -> dict:
        return self.start(do, **arguments)()

    def start(self, do: str, **arguments: Any) -> Callable[[], dict]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"do": do} | arguments), file=self._process.stdin, flush=True)

        def answer() -> dict:
            line = self._process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise RuntimeError(f"the target process ended with status {self._process.wait()}")
            reply = json.loads(line)
            if "error" in reply:
                raise RuntimeError(reply["error"])
            return reply

        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def time_operations(operation: Operation, concurrency: int) -> list[float]:
    """Seconds of each round of `concurrency` operations, for about `SECONDS`."""
    for _ in range(3):
        operation(concurrency)
    seconds: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(seconds) < 5 or (time.perf_counter() < until and len(seconds) < MOST_REPEATS):
        begun = time.perf_counter()
        operation(concurrency)
        seconds.append(time.perf_counter() - begun)
    return seconds


def row(peer: str, table: str, size: int, batch: int, concurrency: int, seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    return {
        "peer": peer,
        "table": table,
        "bytes": size,
        "batch": batch,
        "concurrency": concurrency,
        "p50_us": median * 1e6,
        "p99_us": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e6,
        "gb_per_s": size * batch * concurrency / median / 1e9,
        "million_pieces_per_s": batch * concurrency / median / 1e6,
        "repeats": len(seconds),
    }


def cells(sizes: Sequence[int]) -> list[Cell]:
    """The size table (size x batch x concurrency), then the table of paged writes."""
    table = [
        ("sizes", size, batch, concurrency)
        for batch in BATCHES
        for concurrency in CONCURRENCIES
        for size in sizes
        if 2 * size * batch <= MOST_BYTES and size * batch * concurrency <= MOST_IN_FLIGHT
    ]
    return table + [("pages", size, PAGES_OF_A_WRITE, 1) for size in PAGES if size <= max(sizes)]


def measure_engine(target: TargetProcess, table: list[Cell]) -> Iterator[dict[str, Any]]:
    """This package, and the calls of UCX below it with nothing around them; checks what has arrived."""
    import jax

    import xen_moe_jax.transfer as xt

    with xt.Engine(name="source") as engine:
        peer = engine.connect(bytes.fromhex(target("describe")["descriptor"]), timeout=60)
        rng = np.random.default_rng(0)
        for number, (kind, size, batch, concurrency) in enumerate(table):
            name = f"cell{number}"
            target("window", name=name, pages=2 * batch, page_bytes=size)
            host = rng.integers(0, 256, (2 * batch, size), np.uint8)
            source = jax.block_until_ready(jax.device_put(host, jax.local_devices()[0]))
            remote: Any = peer[name]
            even = np.arange(batch) * 2
            pages = None if batch == 1 else (even, even)
            piece: Any = source[0] if batch == 1 else source
            place = remote[0] if batch == 1 else remote

            def ours(count, piece=piece, place=place, pages=pages):
                for transfer in [engine.write(piece, place, pages=pages) for _ in range(count)]:
                    transfer.wait(60)

            ours(1)
            yield row("this package", kind, size, batch, concurrency, time_operations(ours, concurrency))
            yield row(
                "raw UCX",
                kind,
                size,
                batch,
                concurrency,
                time_operations(raw_ucx(engine, place, piece, pages), concurrency),
            )
            engine.write(piece, place, pages=pages, imm=name).wait(60)
            expected = np.zeros_like(host)
            expected[even] = host[even]
            if target("take", name=name, writes=1)["hash"] != hashlib.blake2b(expected.tobytes()).hexdigest():
                raise RuntimeError(f"{kind}, {size} bytes, batch {batch}: what arrived is not what was sent")


def raw_ucx(engine: Any, place: Any, piece: Any, pages: Any) -> Operation:
    from xen_moe_jax.transfer import _memory

    grant = place.target.grant("benchmark", 30)
    shards, kept = _memory.local_shards(piece)
    (runs,) = place.runs(shards, grant.leaves[place.leaf.path].shards, pages)

    def operation(count: int, kept=kept) -> None:
        with engine._lock:  # noqa: SLF001
            postings = [place.peer.link.post("put", *runs) for _ in range(count)]
            while not all(posting.advance() for posting in postings):
                engine._wire.progress()  # noqa: SLF001
        if failed := [posting.error for posting in postings if posting.error]:
            raise RuntimeError(f"raw UCX: {failed[0]}")

    return operation


def measure_nixl(target: TargetProcess, table: list[Cell]) -> Iterator[dict[str, Any]]:
    """NIXL's Python interface: a prepared request for each operation in flight, posted again and again."""
    import jax
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("source", nixl_agent_config(backends=["UCX"]))
    most = max(2 * size * batch for _, size, batch, _ in table)
    there = target("nixl", nbytes=most)
    source = jax.block_until_ready(jax.device_put(np.zeros((most,), np.uint8), jax.local_devices()[0]))
    pointer, device = source.unsafe_buffer_pointer(), getattr(source.device, "local_hardware_id", 0) or 0
    agent.register_memory([(pointer, most, device, "")], there["memory"])
    remote = agent.add_remote_agent(base64.b64decode(there["metadata"]))
    for kind, size, batch, concurrency in table:
        pieces = range(0, 2 * batch * size, 2 * size)
        local_list = agent.get_xfer_descs([(pointer + o, size, device) for o in pieces], there["memory"])
        remote_list = agent.get_xfer_descs(
            [(there["pointer"] + o, size, there["device"]) for o in pieces], there["memory"]
        )
        handles = [agent.initialize_xfer("WRITE", local_list, remote_list, remote) for _ in range(concurrency)]

        def operation(count: int, handles=handles) -> None:
            waiting = [handle for handle in handles[:count] if agent.transfer(handle) == "PROC"]
            while waiting:
                states = [(handle, agent.check_xfer_state(handle)) for handle in waiting]
                if any(state == "ERR" for _, state in states):
                    raise RuntimeError("NIXL reports an error")
                waiting = [handle for handle, state in states if state == "PROC"]

        yield row("raw NIXL", kind, size, batch, concurrency, time_operations(operation, concurrency))
        for handle in handles:
            agent.release_xfer_handle(handle)


def measure_jax(target: TargetProcess, table: list[Cell]) -> Iterator[dict[str, Any]]:
    """`jax.experimental.transfer`: the target pulls; every array is offered before the clock runs."""
    import jax
    from jax.experimental import transfer

    device = jax.local_devices()[0]
    server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    number = 0
    for kind, size, batch, concurrency in table:
        if kind != "sizes" or concurrency > 1:
            continue
        repeats = 5 if size * batch > MIB else 20
        arrays = [jax.device_put(np.zeros((size,), np.uint8), device) for _ in range(batch)]
        jax.block_until_ready(arrays)
        for offered in range(number, number + repeats):
            server.await_pull(offered, arrays)
        reply = target("pull", address=server.address(), first=number, count=repeats, batch=batch, nbytes=size)
        number += repeats
        yield row("jax.experimental.transfer", kind, size, batch, concurrency, reply["seconds"][2:])


def measure_copies(target: TargetProcess, table: list[Cell]) -> Iterator[dict[str, Any]]:
    """A plain copy inside one process: GPU to GPU over NVLink, or memory to memory."""
    import jax

    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    if not on_cpu and len(devices) < 2:
        return
    for size in sorted({size for kind, size, _, _ in table if kind == "sizes"}):
        host = np.zeros((2, size), np.uint8)
        array = None if on_cpu else jax.block_until_ready(jax.device_put(host[0], devices[0]))

        def copy(count: int, host=host, array=array) -> None:
            for _ in range(count):
                if array is None:
                    np.copyto(host[1], host[0])
                else:
                    jax.block_until_ready(jax.device_put(array, devices[1]))

        yield row("copy in one process", "sizes", size, 1, 1, time_operations(copy, 1))


def unavailable(module: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot be imported: {error}"
    return None


PEERS: dict[str, tuple[Callable[[TargetProcess, list[Cell]], Iterator[dict[str, Any]]], str]] = {
    "raw NIXL": (measure_nixl, "nixl"),
    "jax.experimental.transfer": (measure_jax, "jax.experimental.transfer"),
    "copy in one process": (measure_copies, "numpy"),
}


def describe(document: dict[str, Any]) -> str:
    """The tables: microseconds (p50 / p99), GB/s, and this package's part of the best raw peer's rate."""
    from xen_moe_jax.benchmark import report

    columns = ["bytes", "batch", "in flight", "who", "p50 us", "p99 us", "GB/s", "Mpieces/s", "ours / this"]
    lines = []
    ours = {key(r): r for r in document["results"] if r["peer"] == "this package"}
    for result in sorted(document["results"], key=lambda r: (r["table"], r["batch"], r["concurrency"], r["bytes"])):
        mine = ours.get(key(result))
        ratio = "" if mine is None or mine is result else f"{result['p50_us'] / mine['p50_us']:.2f}"
        figures = [f"{result[name]:.{digits}f}" for name, digits in FIGURES.items()]
        lines.append(
            [f"{result['bytes']:,}", str(result["batch"]), str(result["concurrency"]), result["peer"], *figures, ratio]
        )
    left_out = "\n".join(f"not measured: {name}: {why}" for name, why in document["not_measured"].items())
    return "\n\n".join([report.describe(document), report.format_table(columns, lines), left_out])


FIGURES = {"p50_us": 1, "p99_us": 1, "gb_per_s": 2, "million_pieces_per_s": 3}


def key(result: dict[str, Any]) -> tuple:
    return result["table"], result["bytes"], result["batch"], result["concurrency"]


def write_plot(path: str, document: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.5))
    panels = [("sizes", 1, 1, "one write"), ("sizes", 64, 1, "64 pieces"), ("pages", PAGES_OF_A_WRITE, 1, "pages")]
    for axis, (table, batch, concurrency, title) in zip(axes, panels, strict=True):
        for peer in dict.fromkeys(result["peer"] for result in document["results"]):
            points = [
                (r["bytes"], r["gb_per_s"])
                for r in document["results"]
                if (r["peer"], r["table"], r["batch"], r["concurrency"]) == (peer, table, batch, concurrency)
            ]
            if points:
                axis.loglog(*zip(*points), marker="o", label=peer)
        axis.set(title=title, xlabel="bytes of a piece", ylabel="GB/s")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the mode; its exit status."""
    import jax

    from xen_moe_jax.benchmark import report

    gpus = [] if jax.default_backend() != "gpu" else jax.local_devices()
    target = TargetProcess(1 if len(gpus) > 1 else 0 if gpus else None)
    table = cells(options.sizes or SIZES)
    document = report.header(arguments, None) | {"results": [], "not_measured": {}}
    document["not_measured"]["DLSlime"] = (
        unavailable("dlslime") or "it has no TCP endpoint for windows of another process"
    )
    try:
        for result in measure_engine(target, table):
            document["results"].append(result)
            report.progress(f"{result['peer']}: {result['bytes']:,} x {result['batch']} x {result['concurrency']}")
        for peer, (measure, module) in PEERS.items():
            if options.peers == "none" or (reason := unavailable(module)):
                document["not_measured"][peer] = "--peers none" if options.peers == "none" else reason
                continue
            document["results"] += list(measure(target, table))
    finally:
        target.end()
    print(describe(document))
    if options.json:
        report.write_json(options.json, document)
    if options.plot:
        write_plot(options.plot, document)
    return 0
