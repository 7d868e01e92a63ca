"""Deliberate bugs in the kernels, each caught by a means that the other tests rely on.

Run as a program: `python planted_bugs.py NAME MODE`. It plants the bug, runs one dispatch and one combine in
interpret mode and prints what was noticed: `RACE DETECTED` and `non-zero count` (printed by the interpreter), `WRONG`
(results), `RuntimeError`. A bug may also hang: `test_tpu_planted_bugs.py` runs this under a time limit and counts
that as noticed.
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax.pallas_kernels import peers, push, reduce_slots


def no_wait_for_arrivals() -> None:
    """A rank reads its staging before its records have arrived."""
    push.await_records = lambda *args: None
    reduce_slots.await_records = lambda *args: None


def no_wait_for_sends() -> None:
    """A record buffer is used again, or the kernel ends, while DMAs still read it."""
    original = peers.wait_rows
    arrivals = push.await_records

    def wait_rows(rows, count, semaphore):
        if wait_rows.for_arrivals:
            original(rows, count, semaphore)

    def await_records(*args):
        wait_rows.for_arrivals = True
        arrivals(*args)
        wait_rows.for_arrivals = False

    wait_rows.for_arrivals = False
    peers.wait_rows = wait_rows
    push.await_records = await_records
    reduce_slots.await_records = await_records


def buffer_reused_early() -> None:
    """Sends of two blocks ago are awaited only at the end: the buffer is overwritten while they read it."""
    original = peers.wait_rows
    owed = []

    def wait_rows(rows, count, semaphore):
        # the first call of a kernel body is the one that guards the reuse of a buffer
        if not owed:
            owed.append((rows, count, semaphore))
            return
        original(rows, count, semaphore)

    peers.wait_rows = wait_rows


def one_record_too_few() -> None:
    """The receiver waits for one record less than it gets from every source."""
    original = push.await_records

    class Fewer:
        def __init__(self, expected):
            self.expected = expected

        def __getitem__(self, i):
            return jnp.maximum(self.expected[i] - 1, 0)

    def await_records(staging, expected, recv, num_ranks):
        original(staging, Fewer(expected), recv, num_ranks)

    push.await_records = await_records


def no_exit_credits() -> None:
    """A rank leaves a kernel that others have not entered: its credits are never collected."""
    peers.leave = lambda credits, count: None


def no_announcement() -> None:
    """A rank never says that its buffers are ready: the others wait for ever."""
    peers.announce = lambda *args, **kwargs: None


def none() -> None:
    """No bug: nothing may be noticed."""


BUGS = {
    f.__name__: f
    for f in (
        none,
        no_wait_for_arrivals,
        no_wait_for_sends,
        buffer_reused_early,
        one_record_too_few,
        no_exit_credits,
        no_announcement,
    )
}


def main(name: str, mode: str) -> None:
    BUGS[name]()
    ranks, tokens, hidden, experts, top_k = 2, 24, 128, 4, 2
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ranks * tokens, hidden)).astype(np.float32)
    idx = np.argsort(rng.random((ranks * tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((ranks * tokens, top_k)).astype(np.float32)
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def program(config):
        def body(x, idx, weights):
            routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", config=config)
            live = jnp.arange(routed.x.shape[0]) < jnp.sum(routed.group_sizes)
            rows = jnp.where(live[:, None], routed.x, 0)
            return rows, xm.combine(rows, routed.handle, config=config)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))

    interpret = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    expected = program(xm.KernelConfig(backend="reference"))(x, idx, weights)
    actual = program(xm.KernelConfig(backend="pallas", interpret=interpret, block_tokens=8))(x, idx, weights)
    for what, a, b in zip(("dispatch", "combine"), actual, expected, strict=True):
        if not np.array_equal(np.asarray(a), np.asarray(b)):
            print(f"WRONG {what}")
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
