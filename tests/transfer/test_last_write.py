"""Requests that are finished survive their sender, and a process that replaces a stopped one is let in."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.transfer.transfer_sides import content
from xen_moe_jax.transfer import _reading

SHAPE = (64, 1024)


@pytest.fixture
def window(engine):
    return engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="w")


@pytest.mark.parametrize("kind", ["array", "again", "pages", "tree", "scatter", "nothing to count"])
def test_a_sender_that_is_killed_after_its_last_write_spoils_nothing(engine, others, kind):
    window = engine.window({"k": jax.ShapeDtypeStruct(SHAPE, np.uint8)}, name="w")
    sender = others("sender")
    peer = engine.peer("sender")
    sender.start("write_last_and_die", "w", kind, 5)
    if kind == "nothing to count":
        engine._core.wait(lambda: peer.lost, 20, lambda: "the sender lives", "test")
    else:
        engine.counter("last", expect=2 if kind in ("again", "scatter") else 1, source=peer).wait(20)
    engine._core.wait(lambda: peer.lost, 20, lambda: "the sender lives", "test")
    got = np.asarray(window.commit(10)["k"])
    np.testing.assert_array_equal(got, content(5, SHAPE, np.uint8))


def test_the_same_sender_without_last_spoils_its_generation(engine, window, others):
    sender = others("sender")
    sender.call("write", "w", 5, SHAPE, np.uint8, "first")
    sender.kill()
    engine.counter("first", expect=1).wait(10)
    with pytest.raises(xt.PeerLost, match="reset"):
        window.commit(10)


def test_a_sender_that_writes_after_its_last_write_has_permission_again(engine, window, others):
    sender = others("sender")
    sender.call("write", "w", 5, SHAPE, np.uint8, "w", None, (), None, None, False, True)
    engine.counter("w", expect=1).wait(10)
    assert not window.open_generation.writers
    sender.call("write", "w", 6, SHAPE, np.uint8, "w")
    assert window.open_generation.writers
    sender.kill()
    engine._core.wait(lambda: window.open_generation.lost, 10, lambda: "the death was not noticed", "test")
    with pytest.raises(xt.PeerLost):
        window.commit(10)


def test_a_stopped_sender_delays_no_commit_after_its_last_write(engine, window, others):
    sender = others("sender")
    sender.call("write", "w", 5, SHAPE, np.uint8, "w", None, (), None, None, False, True)
    sender.pause()
    begun = time.monotonic()
    np.testing.assert_array_equal(np.asarray(window.commit(60)), content(5, SHAPE, np.uint8))
    assert time.monotonic() - begun < 40


def test_permission_is_given_back_when_the_other_writes_have_ended_too(engine, others):
    """The last write may be the first that ends: its sources are ready, and those of an earlier write are not."""
    window = engine.window(jax.ShapeDtypeStruct((2, 900, 900), np.float32), name="w")
    sender = others("sender")
    sender.start("slow_then_last", "w")
    engine.counter("w", expect=2).wait(30)
    assert not window.open_generation.writers
    assert sender.result()
    assert (np.asarray(window.commit(10))[1] == 1).all()


def test_a_process_that_replaces_a_stopped_one_is_let_in(engine, others):
    stopped = others("worker")
    stopped.pause()
    new = others("worker", connected=False)
    with pytest.raises(xt.TransferRefused, match=r"engine\.peer\('worker'\)\.close\(\) in 'here'"):
        new.call("connect", engine.descriptor)
    old = engine.peer("worker")
    old.close()
    assert new.call("connect", engine.descriptor) == "here"
    assert engine.peer("worker") is not old and engine.peer("worker").process["id"] == new.process.pid
    stopped.resume()
    with pytest.raises(xt.PeerLost):
        stopped.call("send", b"x", "")


def test_a_message_to_a_stopped_peer_can_be_cancelled(engine, other):
    there = engine.peer("there")
    other.pause()
    transfer = engine.send(there, jnp.ones(1 << 20), tag="never taken")
    begun = time.monotonic()
    assert transfer.cancel(0.3)
    assert time.monotonic() - begun < 20
    with pytest.raises(xt.TransferCancelled):
        transfer.wait(1)
    assert there.lost


def test_a_read_that_the_publisher_cannot_confirm_fails(engine, other, monkeypatch):
    """The publisher may have donated the arrays while they were read: only it knows."""
    other.call("publish", "p", 3, SHAPE, np.uint8)
    there = engine.peer("there")
    target = there["p"]

    class Last(_reading.Transfer):
        def wait(self, timeout=None):
            super().wait(timeout)
            other.kill()
            engine._core.wait(lambda: there.lost, 10, lambda: "the death was not noticed", "test")

    monkeypatch.setattr(_reading, "Transfer", Last)
    with pytest.raises(xt.PeerLost, match="'there'"):
        engine.read(target)
