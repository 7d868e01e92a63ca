"""Thousands of writes through an adversary: a committed generation is whole, every time, and every arrival counts
once."""

import functools
import hashlib
import time

import jax
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.transfer import transfer_sides
from xen_moe_jax.transfer._connection import SeenNumbers

ROWS, WIDTH = 64, 512


def expected_hash(generation):
    rows = [transfer_sides.row(generation, index, WIDTH) for index in range(ROWS)]
    return hashlib.sha256(np.stack(rows).tobytes()).hexdigest()


def connected(engine):
    return list(engine.peers.values())


def run(engine, others, transfers, seed, limit):
    window = engine.window(jax.ShapeDtypeStruct((ROWS, WIDTH), np.uint8), name="rows")
    other = others(connected=False, adversary=seed)
    other.start("adversarial_writer", engine.descriptor, seed, limit)
    whole = resets = 0
    while whole * ROWS < transfers:
        generation = window.generation
        counter = engine.counter(f"rows{generation}", expect=ROWS)
        try:
            # The counter cannot notice the loss of a writer that was cut off before its first row arrived.
            opened = window.open_generation
            ended = functools.partial(lambda g, c: c.done() or g.lost, opened, counter)
            engine._core.wait(ended, 30, lambda: "the writer is silent", "test")
            assert window.open_generation.lost or counter.value == ROWS, "an arrival counted twice"
            array = window.commit(10)
        except xt.PeerLost:
            resets += 1
            window.reset()
            continue
        finally:
            counter.close()
        digest = hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
        assert digest == expected_hash(generation), f"generation {generation} is torn"
        whole += 1
    told = {}  # A peer may be cut off before it has read the message: every peer that connects gets it again.
    until = time.monotonic() + 30
    while not other.connection.poll(0.05):
        assert time.monotonic() < until, f"{len(told)} peers were told to stop"
        told |= {
            peer.number: engine.send(peer, b"", tag="stop") for peer in connected(engine) if peer.number not in told
        }
    writes, failures, losses = other.result()
    assert writes >= transfers and failures > transfers // 500, (writes, failures)
    return writes, failures, losses, resets


def test_three_thousand_writes(engine, others):
    run(engine, others, 3_000, 1, 40)


@pytest.mark.slow
def test_a_hundred_thousand_writes(engine, others):
    writes, failures, losses, resets = run(engine, others, 100_000, 2, 1800)
    assert losses > 5 and resets > 5, (writes, failures, losses, resets)


def test_the_hash_notices_one_byte():
    rows = np.stack([transfer_sides.row(1, index, WIDTH) for index in range(ROWS)])
    assert hashlib.sha256(rows.tobytes()).hexdigest() == expected_hash(1)
    rows[ROWS // 2, 3] ^= 1
    assert hashlib.sha256(rows.tobytes()).hexdigest() != expected_hash(1)


def test_numbers_are_seen_once_in_any_order():
    seen = SeenNumbers()
    order = np.random.default_rng(0).permutation(200)
    assert all(seen.add(int(n)) for n in order)
    assert not any(seen.add(int(n)) for n in order)
    with pytest.raises(ValueError):
        seen.add(10**9)
