"""Deliberate bugs in the kernels, each caught by a means that the other tests rely on.

Run as a program: `python planted_bugs.py NAME MODE`. It plants the bug, runs one dispatch and one combine in
interpret mode and prints the findings: `RACE DETECTED` and `non-zero count` (printed by the interpreter), `WRONG`
(results), `RuntimeError`. A bug may also hang: `test_planted_bugs.py` runs this under a time limit and counts
that as noticed.
"""

from __future__ import annotations

import os
import sys

from tests.support import quick_compiler

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = quick_compiler.flags(2)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import interpreter
from xen_moe_jax.pallas_kernels import send


def no_wait_for_arrivals() -> None:
    """A rank reads its staging before its records have arrived."""
    send.Link.await_records = lambda *args: None


def no_wait_for_sends() -> None:
    """A record buffer is used again, or the kernel ends, while DMAs still read it."""
    send.Link.await_sent = lambda *args: None


def buffer_reused_early() -> None:
    """Sends of two blocks ago are awaited only at the end: the buffer is overwritten while they read it."""
    original = send.Link.await_sent
    owed = []

    def await_sent(*args):
        # the first call of a kernel body is the one that guards the reuse of a buffer
        if not owed:
            owed.append(args)
            return
        original(*args)

    send.Link.await_sent = await_sent


def one_record_too_few() -> None:
    """The receiver waits for one record less than it gets from every source."""
    original = send.Link.await_records

    class Fewer:
        def __init__(self, expected):
            self.expected = expected

        def __getitem__(self, i):
            return jnp.maximum(self.expected[i] - 1, 0)

    send.Link.await_records = lambda link, expected: original(link, Fewer(expected))


def no_exit_credits() -> None:
    """A rank leaves a kernel that others have not entered: its credits are never collected."""
    send.Link.leave = lambda *args: None


def no_announcement() -> None:
    """A rank never announces that its buffers are ready: its peers wait for ever."""
    send.Link.announce = lambda *args: None


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

    def operations(config):
        """Results of a dispatch, then of a combine: a program each, so that a bug shows before the second is there."""

        def dispatch(x, idx, weights):
            routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", config=config)
            live = jnp.arange(routed.x.shape[0]) < jnp.sum(routed.group_sizes)
            return jnp.where(live[:, None], routed.x, 0), jax.tree.map(lambda a: a[None], routed.handle)

        def combine(rows, handle):
            return xm.combine(rows, jax.tree.map(lambda a: a[0], handle), config=config)

        def run(body, *operands):
            mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            return jax.block_until_ready(jax.jit(mapped)(*operands))

        rows, handle = run(dispatch, x, idx, weights)
        yield rows
        yield run(combine, rows, handle)

    interpret = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    ours = xm.KernelConfig(backend="pallas", interpret=interpret, block_tokens=8, mode="throughput")
    both = zip(operations(ours), operations(xm.KernelConfig(backend="reference")), strict=True)
    for what, (actual, expected) in zip(("dispatch", "combine"), both, strict=True):
        if not np.array_equal(np.asarray(actual), np.asarray(expected)):
            print(f"WRONG {what}", flush=True)
    print("FINISHED", flush=True)


if __name__ == "__main__":
    with interpreter.quick():
        main(*sys.argv[1:])
