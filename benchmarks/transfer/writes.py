"""`python -m benchmarks transfer`: writes from this process to another one of the host, beside raw NIXL and raw UCX.

Every row is one size, one batch (pieces of an operation, none of them neighbours) and one concurrency (operations in
flight). Seconds are from the start of the operations to the confirmation that all bytes are in the other process's
memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.transfer import peers as transfer_peers
from benchmarks.transfer.peers import COPY, RAW_NIXL, RAW_UCX, Cell, Operation
from tools.children import bound

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple((2 * KIB) << shift for shift in range(0, 17, 2))  # 2 KiB to 128 MiB
BATCHES, CONCURRENCIES = (1, 64), (1, 16)
PAGES = tuple(KIB << shift for shift in range(7))  # 1 to 64 KiB
PAGES_OF_A_WRITE = 256
MOST_BYTES = 512 * MIB
"""Most bytes of a batch at the target: larger cells are left out, and named."""
MOST_IN_FLIGHT = 2048 * MIB
SECONDS = 0.4
TURNS = 5
MOST_REPEATS = 400


OURS = "this package"


class TargetProcess:
    """`transfer_target` on the second GPU, or on the CPU."""

    def __init__(self, gpu: int | None):
        environment = dict(os.environ)
        if gpu is not None:
            environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "benchmarks.transfer.target", *([] if gpu is None else [str(gpu)])]
        self._process = subprocess.Popen(
            bound(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
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


def time_in_turns(operations: dict[str, Operation], concurrency: int) -> dict[str, list[float]]:
    """Seconds of each round of `concurrency` operations, for about `SECONDS` each, by turns, so that other work of the
    machine disturbs all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(TURNS):
        for name, operation in operations.items():
            taken: list[float] = []
            until = time.perf_counter() + SECONDS / TURNS
            while not taken or (len(taken) <= MOST_REPEATS // TURNS and time.perf_counter() < until):
                begun = time.perf_counter()
                operation(concurrency)
                taken.append(time.perf_counter() - begun)
            seconds[name] += taken[1:] or taken  # The first one of a turn finds its data out of the caches.
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


Check = Callable[[], None]
"""Raises if the arrived bytes differ from the sent ones."""


def engine_operations(
    target: TargetProcess, table: list[Cell], not_measured: dict[str, str]
) -> Iterator[tuple[dict[str, Operation], Check]]:
    """For each cell: this package, and beside it raw UCX and raw NIXL, where they are measured; and the check."""
    import jax

    import xen_moe_jax.transfer as xt

    nixl: Any = None
    with xt.Engine(name="source") as engine:
        peer = engine.connect(bytes.fromhex(target("describe")["descriptor"]), timeout=60)
        rng = np.random.default_rng(0)
        for number, (kind, size, batch, _) in enumerate(table):
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
            operations: dict[str, Operation] = {OURS: ours}
            if RAW_UCX not in not_measured:
                operations[RAW_UCX] = transfer_peers.raw_ucx(engine, place, piece, pages)
            if RAW_NIXL not in not_measured:
                try:
                    nixl = nixl or transfer_peers.RawNixl(target)
                    operations[RAW_NIXL] = nixl.operation(name, piece, table[number])
                except Exception as error:  # A peer that breaks must not lose the figures of the next peers.
                    not_measured[RAW_NIXL] = f"{type(error).__name__}: {error}"

            def check(name=name, piece=piece, place=place, pages=pages, host=host, even=even, cell=(kind, size, batch)):
                engine.write(piece, place, pages=pages, imm=name).wait(60)
                expected = np.zeros_like(host)
                expected[even] = host[even]
                if target("take", name=name, writes=1)["hash"] != hashlib.blake2b(expected.tobytes()).hexdigest():
                    raise RuntimeError("{}, {} bytes, batch {}: what arrived is not what was sent".format(*cell))

            yield operations, check


def measure_by_turns(
    target: TargetProcess, table: list[Cell], not_measured: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Rows of this package, of raw UCX and of raw NIXL, which are timed by turns."""
    for cell, (operations, check) in zip(table, engine_operations(target, table, not_measured), strict=True):
        for peer, seconds in time_in_turns(operations, cell[-1]).items():
            yield row(peer, *cell, seconds)
        check()


def measure_copies(table: list[Cell], not_measured: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields rows of single writes, as a copy in one process. Puts the reason into `not_measured` if it ends early."""
    if COPY in not_measured:
        return
    for cell in table:
        if cell[0] != "sizes" or cell[2:] != (1, 1):
            continue
        try:
            seconds = time_in_turns({COPY: transfer_peers.copy(cell[1])}, 1)[COPY]
        except Exception as error:  # It comes last: what it raises must not lose the figures before it.
            not_measured[COPY] = f"{type(error).__name__}: {error}"
            return
        yield row(COPY, *cell, seconds)


def describe(document: dict[str, Any]) -> str:
    """The tables: microseconds (p50 / p99), GB/s, and this package's part of the best raw peer's rate."""
    from benchmarks.lib import report

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

    from benchmarks.lib import report

    gpus = [] if jax.default_backend() != "gpu" else jax.local_devices()
    target = TargetProcess(1 if len(gpus) > 1 else 0 if gpus else None)
    table = cells(options.sizes or SIZES)
    document = report.header(arguments, None) | {"results": [], "not_measured": {}}
    for peer in transfer_peers.PEERS:
        if reason := transfer_peers.left_out(peer, options.peers):
            document["not_measured"][peer] = reason

    def keep() -> None:
        """Writes the figures so far, in case the next peer hangs."""
        if options.json:
            report.write_json(options.json, document)

    try:
        for result in measure_by_turns(target, table, document["not_measured"]):
            document["results"].append(result)
            report.progress(f"{result['peer']}: {result['bytes']:,} x {result['batch']} x {result['concurrency']}")
            keep()
        for result in measure_copies(table, document["not_measured"]):
            document["results"].append(result)
            report.progress(f"{COPY}: {result['bytes']:,}")
    finally:  # what was measured before an error is shown, too
        target.end()
        keep()
        print(describe(document))
    if options.plot:
        write_plot(options.plot, document)
    return 0
