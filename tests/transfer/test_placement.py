"""Weights go to the slots of another plan by transfers: slots are pages of a window, listed by `xm.balance.moves`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from tests.support import transfer

RANKS, SLOTS, EXPERTS = 3, 4, 9


def test_moves_are_the_pages_of_writes():
    """What lies in the windows is what `Placement.move` computes; a pair of ranks takes one write."""
    transfer.require()
    import xen_moe_jax.transfer as xt

    counts = np.random.default_rng(0).integers(1, 50, (2, EXPERTS)) ** 2
    old, new = (xm.balance.plan(load, RANKS, SLOTS) for load in counts)
    weights = np.random.default_rng(1).standard_normal((RANKS, SLOTS, 8, 16)).astype(np.float32)
    table = xm.balance.moves(old, new)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xt.Engine(name=f"rank-{rank}")) for rank in range(RANKS)]
        windows = [engine.window({"w": jax.ShapeDtypeStruct((SLOTS, 8, 16), jnp.float32)}) for engine in engines]
        writes, expected = [], [0] * RANKS
        far = table[table[:, 0] != table[:, 2]]
        assert len(far) > 2
        for giver, taker in {(row[0], row[2]) for row in far.tolist()}:
            gives, gets = table[(table[:, 0] == giver) & (table[:, 2] == taker)][:, [1, 3]].T.tolist()
            peer = engines[giver].connect(engines[taker].descriptor, timeout=5.0)
            writes.append(engines[giver].write(weights[giver], peer["w"], pages=(gives, gets), imm="plan"))
            expected[taker] += 1
        for engine, count in zip(engines, expected, strict=True):
            engine.counter("plan", expect=count).wait(timeout=5.0)
        for write in writes:
            write.wait(timeout=5.0)
        arrived = np.stack([np.asarray(window.commit(5.0)["w"]) for window in windows])
    for giver, gives, taker, gets in table[table[:, 0] == table[:, 2]]:
        arrived[taker, gets] = weights[giver, gives]
    np.testing.assert_array_equal(arrived.reshape(-1, 8, 16), new.move(weights.reshape(-1, 8, 16), old, new))
