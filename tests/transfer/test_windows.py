"""Generations: a committed one never changes, a stale write never arrives, an unfinished one never looks whole."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.transfer.transfer_sides import content

SHAPE = (64, 1024)


@pytest.fixture
def window(engine):
    return engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="w")


def test_a_committed_array_never_changes(engine, window, other):
    kept = []
    for seed in range(6):
        other.call("write", "w", seed, SHAPE, np.uint8, f"w{seed}")
        engine.counter(f"w{seed}", expect=1).wait(10)
        kept.append(window.commit(10))
        assert window.generation == seed + 2
    other.call("write", "w", 99, SHAPE, np.uint8)
    for seed, array in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(array), content(seed, SHAPE, np.uint8))


def test_the_next_generation_starts_empty(engine, window, other):
    other.call("write", "w", 1, SHAPE, np.uint8)
    window.commit(10)
    assert not np.asarray(window.commit(10)).any()


def test_a_write_to_a_generation_that_was_committed_is_stale(engine, window, other):
    assert other.call("keep_target", "w") == 1
    first = window.commit(10)
    with pytest.raises(xt.StaleWindow, match="generation 1 of window 'w'"):
        other.call("write_kept", "w", 5, "late")
    assert not np.asarray(first).any() and not np.asarray(window.commit(10)).any()
    assert engine.counter("late", expect=1).value == 0


def test_committing_under_a_writer_that_does_not_stop(engine, window, other):
    """Every element of a committed array is from whole writes or the zeros before; the writer learns that it is
    stale.
    """
    other.start("flood", "w", 20.0)
    engine.counter("flood", expect=3).wait(10)
    array = window.commit(10)
    before = np.asarray(array).copy()
    count, error = other.result()
    assert error == "StaleWindow", (count, error)
    time.sleep(0.05)
    np.testing.assert_array_equal(np.asarray(array), before)
    assert set(np.unique(before)) <= {0, 1, 2, 3}


@pytest.mark.parametrize("first", ["commit", "reset"])
@pytest.mark.parametrize("second", ["commit", "reset", "close"])
def test_of_two_threads_one_has_the_generation(window, monkeypatch, first, second):
    """The second thread comes in while the first one makes the next generation, and a commit also after its wait."""
    make, wait = window._new_generation, window._core.wait

    def meanwhile(function, *arguments):
        monkeypatch.undo()
        result = function(*arguments)
        getattr(window, second)()
        return result

    places = [(window, "_new_generation", make)] + [(window._core, "wait", wait)] * (first == "commit")
    for at, name, function in places if second != "close" else places[:1]:
        monkeypatch.setattr(at, name, lambda *arguments, function=function: meanwhile(function, *arguments))
        before = window.generation
        with pytest.raises(xt.StaleWindow, match=f"{first} of .*window 'w'.*meanwhile"):
            getattr(window, first)()
        assert window.generation == before + (second != "close")
        assert window._state == ("closed" if second == "close" else "open")


def test_commit_last_closes_the_window(engine, window, other):
    other.call("keep_target", "w")
    window.commit(10, last=True)
    with pytest.raises(xt.StaleWindow):
        other.call("write_kept", "w", 1)
    with pytest.raises(xt.TransferRefused, match="does not exist"):
        other.call("write", "w", 1, SHAPE, np.uint8)
    with pytest.raises(xt.StaleWindow, match="closed"):
        window.commit(1)
    engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="w").close()


def test_only_the_peers_that_were_given_a_window_see_it(engine, others):
    engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="w", writers=["friend"])
    friend, stranger = others("friend"), others("stranger")
    friend.call("write", "w", 1, SHAPE, np.uint8, 1)
    with pytest.raises(xt.TransferRefused, match="is not for this peer"):
        stranger.call("write", "w", 2, SHAPE, np.uint8, 1)
    assert engine.counter(1, expect=1).value == 1


def test_a_writer_that_is_killed_spoils_its_generation_until_reset(engine, window, others):
    first, second = others("first"), others("second")
    first.call("keep_target", "w")
    first.call("write_kept", "w", 1, "layers")
    counter = engine.counter("layers", expect=3, source=engine.peer("first"))
    first.kill()
    begun = time.monotonic()
    with pytest.raises(xt.PeerLost, match="'first'.*process ended") as lost:
        counter.wait(60)
    assert time.monotonic() - begun < 40 and lost.value.peer == "first"
    with pytest.raises(xt.PeerLost, match="reset"):
        window.commit(10)
    window.reset()
    assert engine.counter("layers", expect=1).value == 0, "arrivals of the thrown away generation still count"
    second.call("write", "w", 7, SHAPE, np.uint8, "layers")
    engine.counter("layers", expect=1).wait(10)
    np.testing.assert_array_equal(np.asarray(window.commit(10)), content(7, SHAPE, np.uint8))


def test_a_writer_that_left_in_order_spoils_nothing(engine, window, other):
    other.call("write", "w", 3, SHAPE, np.uint8, 1)
    other.connection.send(("exit", ()))
    other.process.join(10)
    engine.counter(1, expect=1).wait(5)
    np.testing.assert_array_equal(np.asarray(window.commit(10)), content(3, SHAPE, np.uint8))


def test_a_stopped_writer_delays_a_commit_but_not_a_reset(engine, window, others):
    stopped, second = others("stopped"), others("second")
    stopped.call("keep_target", "w")
    stopped.pause()
    with pytest.raises(xt.TransferTimeout, match="'stopped' did not confirm"):
        window.commit(0.3)
    begun = time.monotonic()
    window.reset()
    assert time.monotonic() - begun < 8, "it waited for a peer"
    second.call("write", "w", 7, SHAPE, np.uint8, 1)
    engine.counter(1, expect=1).wait(10)
    assert engine._windows.retired, "memory that a stopped process can write into was given up"
    stopped.resume()
    with pytest.raises(xt.StaleWindow):
        for _ in range(1000):  # Until it has read that its leave was withdrawn; before, it writes into the old memory.
            stopped.call("write_kept", "w", 8)
            time.sleep(0.02)
    array = window.commit(10)
    np.testing.assert_array_equal(np.asarray(array), content(7, SHAPE, np.uint8))
    engine._core.wait(lambda: not engine._windows.retired, 5, lambda: "memory was kept for no peer", "test")


def test_commit_may_be_called_again_after_a_timeout(engine, window, other):
    other.call("keep_target", "w")
    other.call("write_kept", "w", 4)
    other.pause()
    with pytest.raises(xt.TransferTimeout):
        window.commit(0.2)
    other.resume()
    np.testing.assert_array_equal(np.asarray(window.commit(10)), content(4, SHAPE, np.uint8))


def test_the_memory_of_a_killed_writer_is_given_back_when_it_is_gone(engine, window, other):
    there = engine.peer("there")
    other.call("keep_target", "w")
    other.kill()
    engine._core.wait(lambda: there.lost, 5, lambda: "the death was not noticed", "test")
    window.reset()
    assert engine._windows.retired
    engine._core.wait(
        lambda: engine._windows.release_retired() is None and not engine._windows.retired, 10, lambda: "kept", "test"
    )


def test_committed_arrays_outlive_the_engine(others, engine):
    other = others()
    with xt.Engine(name="short") as second:
        window = second.window(jax.ShapeDtypeStruct((8,), np.float32), name="w")
        other.call("connect", second.descriptor)
        other.call("write", "w", 3, (8,), np.float32, 1)
        second.counter(1, expect=1).wait(10)
        array = window.commit(10)
    np.testing.assert_array_equal(np.asarray(array), content(3, (8,), np.float32))
    assert float(jnp.sum(array * 0 + 1)) == 8


@pytest.mark.parametrize("bad", ["empty", "nameless", "taken", "int4", "key"])
def test_windows_that_cannot_be(engine, bad):
    aval = jax.ShapeDtypeStruct((4,), np.float32)
    if bad == "empty":
        with pytest.raises(ValueError, match="without arrays"):
            engine.window({}, name="w")
    elif bad == "nameless":
        with pytest.raises(ValueError, match="give a name"):
            engine.window(aval)
    elif bad == "taken":
        engine.window(aval, name="w")
        with pytest.raises(ValueError, match=r"\['w'\] are taken"):
            engine.window(aval, name="w")
        with pytest.raises(ValueError, match="is a window's"):
            engine.publish("w", jnp.zeros(3))
    elif bad == "int4":
        with pytest.raises(xt.TransferRefused, match="bitcast to uint8"):
            engine.window(jax.ShapeDtypeStruct((4,), jnp.int4), name="w")
    else:
        with pytest.raises(xt.TransferRefused, match="key_data"):
            engine.publish("k", jax.random.key(0))


def test_windows_of_one_peer_do_not_share_their_end(engine, other):
    """On one host the keys of different memory may be equal bytes: taking one window away must not touch another's."""
    first = engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="first")
    second = engine.window(jax.ShapeDtypeStruct(SHAPE, np.uint8), name="second")
    for seed in range(5):
        other.call("keep_target", "first")
        other.call("keep_target", "second")
        first.commit(10)
        other.call("write_kept", "second", seed, seed)
        engine.counter(seed, expect=1).wait(10)
        np.testing.assert_array_equal(np.asarray(second.commit(10)), content(seed, SHAPE, np.uint8))
