"""Senders and receivers that are killed at any moment: nothing torn is ever committed, and the next one goes on."""

import random
import time

import pytest

import xen_moe_jax.transfer as xt
from tests.transfer import transfer_sides


def kill_senders(engine, others, numbers, seed, last=False, **options):
    """Kills one sender after another, as many as there are numbers. Returns (generations that were committed,
    generations that were thrown away). With `last` the senders give their permission back with the last write of a
    generation: a generation whose counter was met is never thrown away.
    """
    rng = random.Random(seed)
    window = transfer_sides.leaves_window(engine)
    whole = thrown = 0
    kept = []
    for number in numbers:
        other = others(f"sender{number}", connected=False, **options)
        other.start("fill_generations", engine.descriptor, last)
        peer = engine.peer(f"sender{number}", 30)
        commits, killed = rng.randrange(4), False
        until = time.monotonic() + 20
        while True:
            generation = window.generation
            counter = engine.counter(f"model{generation}", expect=transfer_sides.LEAVES)
            if commits == 0:
                commits, until = -1, time.monotonic() + rng.uniform(0, 0.005)
            if not killed and time.monotonic() > until:
                other.kill()
                killed = True
            if counter.done() and not (peer.lost and not last):
                try:
                    got = window.commit(20)
                except xt.PeerLost:
                    assert not last, "a finished generation did not survive its sender"
                    break
                assert transfer_sides.is_whole(got, generation), f"generation {generation} is torn"
                kept = [*kept[-3:], (got, generation)]
                whole, commits = whole + 1, commits - 1
                counter.close()
            elif peer.lost:
                break
            else:
                time.sleep(0.0002)
        for got, generation in kept:
            assert transfer_sides.is_whole(got, generation), f"generation {generation} changed after its commit"
        if window.open_generation.lost:
            with pytest.raises(xt.PeerLost):
                window.commit(1)
            thrown += 1
        window.reset()
        other.end()
    return whole, thrown


def kill_receivers(engine, others, numbers, seed):
    """Kills one receiver after another under a sender that never stops; generations that were sent."""
    rng = random.Random(seed)
    sent = 0
    for number in numbers:
        other = others(f"receiver{number}")
        other.call("open_leaves_window")
        other.start("take_generations")
        peer = engine.peer(f"receiver{number}", 30)
        until = time.monotonic() + rng.uniform(0, 0.05)
        seen = 0
        with pytest.raises(xt.PeerLost, match=f"receiver{number}") as lost:
            while True:
                if time.monotonic() > until:
                    other.process.kill()
                before, seen = seen, transfer_sides.fill_generation(engine, peer, seen)
                sent += seen != before
        other.process.join(60)
        assert other.process.exitcode == -9, f"torn, or lost for another reason: {lost.value}"
        other.end()
    return sent


@pytest.mark.parametrize("kill", [kill_senders, kill_receivers])
def test_ten_kills(engine, others, kill):
    kill(engine, others, range(10), 1)


def test_finished_generations_survive_ten_kills(engine, others):
    whole, _ = kill_senders(engine, others, range(10), 4, last=True)
    assert whole >= 5


@pytest.mark.slow
def test_five_hundred_senders(engine, others):
    whole, thrown = kill_senders(engine, others, range(500), 2)
    assert whole > 500 and thrown > 50, (whole, thrown)


@pytest.mark.slow
def test_five_hundred_receivers(engine, others):
    assert kill_receivers(engine, others, range(500), 3) > 500
