"""Watches the kernels of this process for `tools/tpu_check.py`, which sees it only from outside.

It writes one JSON file, replaced at every step: the program (a test's name), whether it is being compiled or
runs, and the names of its kernels in the order in which they were traced. When a process is killed because nothing
moved, the file says which program that was.

It changes programs where the environment asks for it, so that a process can say more about a program that hung:
- `XEN_MOE_TPU_KEEP=N` leaves the first N kernels of each program and replaces the results of later ones by zeros. The
  smallest N that hangs names the kernel, and the time that one kernel more adds is that kernel's time.
- `XEN_MOE_TPU_WITHOUT=WAIT` leaves out one kind of wait (`WAITS`). The kernel that ends without it hangs in it.
- `XEN_MOE_TPU_PLANT=hang:KERNEL | wrong:KERNEL | slow:KERNEL` makes a kernel faulty, so that reports can be tested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax.pallas_kernels import launch, peers, send

FILE, KEEP, WITHOUT, PLANT = (f"XEN_MOE_TPU_{name}" for name in ("PROGRESS", "KEEP", "WITHOUT", "PLANT"))
WAITS = {
    "barrier": "the barrier semaphore: every peer announces itself there when it enters the kernel",
    "credits": "the regular semaphore of exit credits: every peer gives one after it has passed the barrier",
    "arrivals": "the DMA semaphores of rows that arrive from peers",
    "departures": "the DMA semaphores of rows that leave this rank",
}
"""Kinds of waits in a kernel that reaches other ranks, in their order, and the semaphore of each."""
FAULTS = ("hang", "wrong", "slow")
SLOW_SECONDS = 3.0
_began = time.monotonic()

PEER, HERE = "peer", "here"
"""Reach of a kernel: other ranks, or this rank alone."""

traced: list[tuple[str, str]] = []
"""(kernel, its reach) of the program that is being compiled, in the order of their traces."""
_state: dict[str, Any] = {"program": "", "phase": "starting"}
_current: list[str] = []
_keep: list[int | None] = [None]


def note(**facts: Any) -> None:
    """Updates the file with these facts."""
    _state.update(facts)
    path = os.environ.get(FILE)
    if path:
        record = _state | {"kernels": [list(kernel) for kernel in traced], "since": time.time(), "waits": WAITS}
        beside = pathlib.Path(f"{path}.new")
        beside.write_text(json.dumps(record))
        beside.replace(path)


def compiling(program: str) -> None:
    """A program is about to be traced and compiled."""
    traced.clear()
    note(program=program, phase="compiling")


def running(program: str, kernels: list[tuple[str, str]]) -> None:
    """A compiled program with these kernels is about to run."""
    traced[:] = kernels
    note(program=program, phase="running")


def finished() -> None:
    note(phase="between programs")


@contextlib.contextmanager
def keep(kernels: int | None) -> Iterator[None]:
    """Programs that are traced inside keep this number of kernels (None: all)."""
    before, _keep[0] = _keep[0], kernels
    traced.clear()
    try:
        yield
    finally:
        _keep[0] = before


def install() -> None:
    """Begins to watch; asked twice, it does nothing."""
    if getattr(launch.Launch.call, "watched", False):
        return
    original = launch.Launch.call
    kept = os.environ.get(KEEP)
    _keep[0] = None if kept is None else int(kept)
    fault, _, kernel = os.environ.get(PLANT, "").partition(":")
    if fault and fault not in FAULTS:
        raise ValueError(f"{PLANT}={fault}:{kernel}: must be one of {FAULTS}, a colon and a kernel")
    leave_out(os.environ.get(WITHOUT))
    if fault == "hang":
        _plant_hang(kernel)
    pending = [False]

    @functools.wraps(original)
    def call(self: Any, body: Callable, *args: Any, name: str, remote: bool, out_shape: Any, **options: Any) -> Any:
        limit = _keep[0]
        absent = limit is not None and len(traced) >= limit and not pending[0]
        traced.append((name, PEER if remote else HERE))
        pending[0] = bool(options.get("pending")) and remote and not absent  # its DMAs go on: the next kernel waits
        note()
        if absent:
            return _zeros(out_shape)

        def named(refs: Any) -> None:
            _current.append(name)
            try:
                body(refs)
            finally:
                _current.pop()

        with _never_removed() if limit is not None else contextlib.nullcontext():
            run = original(self, named, *args, name=name, remote=remote, out_shape=out_shape, **options)
        if name == kernel and fault == "wrong":
            return lambda *operands: jax.tree.map(_off_by_one, run(*operands))
        if name == kernel and fault == "slow":
            return lambda *operands: _late(run(*operands))
        return run

    call.watched = True  # type: ignore[attr-defined]
    launch.Launch.call = call  # type: ignore[method-assign]


@contextlib.contextmanager
def _never_removed() -> Iterator[None]:
    """Within it, kernels are made that XLA keeps although nothing reads their results: it looks through barriers. Those
    of a start half and its done half, which are otherwise ordered by their results alone, would go, too."""
    params = launch.pltpu.CompilerParams

    def kept(*, has_side_effects: Any = False, **given: Any) -> Any:
        del has_side_effects
        return params(has_side_effects=True, **given)

    launch.pltpu.CompilerParams = kept  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        launch.pltpu.CompilerParams = params  # type: ignore[misc]


def _zeros(out_shape: Any) -> Callable:
    """Replaces a kernel: returns zeros that depend on its operands, so that XLA keeps what makes those."""

    def zeros(*operands: Any) -> Any:
        arrays = [a for a in operands if jnp.issubdtype(a.dtype, jnp.number)]  # no semaphores
        zero = jax.lax.optimization_barrier((jnp.zeros((), jnp.int32), *arrays))[0]

        def one(shape: Any) -> jax.Array:
            size, dtype = shape if isinstance(shape, tuple) else (shape.shape, jnp.int32)  # else: semaphores
            return jnp.zeros(size, dtype) + zero.astype(dtype)

        return [one(s) for s in out_shape] if isinstance(out_shape, list) else one(out_shape)

    return zeros


def leave_out(wait: str | None) -> None:
    """Kernels that are traced from now on do not wait for this kind (`WAITS`).

    Raises:
      ValueError: there is no such kind.
    """
    if wait is None:
        return
    if wait not in WAITS:
        raise ValueError(f"{WITHOUT}={wait}: must be one of {tuple(WAITS)}")
    run = send.Link._run
    if wait in ("barrier", "credits"):
        semaphore = {"barrier": peers.BARRIER, "credits": peers.CREDITS}[wait]

        def without(self: Any, phase: tuple[Any, ...]) -> None:
            run(self, tuple(s for s in phase if not (isinstance(s, peers.Wait) and s.semaphore == semaphore)))

        send.Link._run = without  # type: ignore[method-assign]
    elif wait == "arrivals":
        send.Link.await_records = lambda *args: None  # type: ignore[method-assign]
        send.Link.drain_runs = lambda self, rows, sent, expected: send._wait_runs(  # type: ignore[method-assign]
            rows, sent, lambda i: self.send.at[0], self.num_peers
        )
    else:
        send.Link.await_sent = lambda *args: None  # type: ignore[method-assign]
        send.Link.drain_runs = lambda self, rows, sent, expected: send._wait_runs(  # type: ignore[method-assign]
            self.target, expected, self._arrivals, self.num_peers
        )


def _plant_hang(kernel: str) -> None:
    """A rank never says that its buffers are ready, in this kernel alone."""
    announce = send.Link.announce

    def silent(self: Any) -> None:
        if not (_current and _current[-1] == kernel):
            announce(self)

    send.Link.announce = silent  # type: ignore[method-assign]


def _off_by_one(a: Any) -> Any:
    return a + jnp.ones((), a.dtype)


@functools.cache
def _slow_seconds() -> float:
    """Returns how late a slow kernel is, in all of its runs: `SLOW_SECONDS`, or longer where this process has needed
    long to come here, on a slow or busy machine. There the other kernels, which are interpreted, take longer, too."""
    return max(SLOW_SECONDS, 0.6 * (time.monotonic() - _began))


def _late(results: Any) -> Any:
    """Returns the results unchanged, after a sleep on the host."""
    leaves, tree = jax.tree.flatten(results)

    def sleep(first: Any) -> Any:
        time.sleep(_slow_seconds())
        return first

    first = jax.lax.slice(leaves[0], (0,) * leaves[0].ndim, (1,) * leaves[0].ndim)
    slept = jax.pure_callback(sleep, jax.ShapeDtypeStruct(first.shape, first.dtype), first)
    leaves[0] = jax.lax.dynamic_update_slice(leaves[0], slept, (0,) * leaves[0].ndim)
    return jax.tree.unflatten(tree, leaves)
