"""The posting loop: contents, a link that breaks, an installation without the compiled part, and the scheduled poll."""

import ctypes
import selectors
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.support import transfer as support
from xen_moe_jax.transfer import _posting


def test_pages_short_writes_and_a_link_that_breaks(engine):
    rng = np.random.default_rng(0)
    with xt.Engine(name="receiver") as receiver, xt.Engine(name="sender") as sender:
        peer = sender.connect(receiver.descriptor)
        for rows, width, chosen in ((1, 8, 1), (700, 48, 300), (5000, 16, 2500), (3, 5 << 20, 2)):
            window = receiver.window(jax.ShapeDtypeStruct((rows, width), np.uint8), name="w")
            for repeat in range(3):  # The second and third by the short way.
                source = jnp.asarray(rng.integers(0, 256, (rows, width), np.uint8))
                pages = rng.permutation(rows)[:chosen], rng.permutation(rows)[:chosen]
                expected = np.zeros((rows, width), np.uint8)
                expected[pages[1]] = np.asarray(source)[pages[0]]
                for _ in range(2):
                    transfer = sender.write(source, peer["w"], pages=pages, imm="w")
                    transfer.wait(30)
                    assert transfer.bytes_done == transfer.nbytes == chosen * width
                with receiver.counter("w", expect=2) as counter:
                    counter.wait(30)
                got = np.asarray(window.commit(30))
                assert (got == expected).all(), (rows, width, repeat)
            window.close()
        window = receiver.window(jax.ShapeDtypeStruct((64 << 20,), np.uint8), name="big")
        target, source = peer["big"], jnp.ones((64 << 20,), np.uint8)
        link = peer.link
        transfer = sender.write(source, target)
        link._lost(None, None, -80)  # Acts as the library does when it finds the peer gone.
        try:
            transfer.wait(30)
            ended = "well"
        except xt.PeerLost:
            ended = "lost"
        assert ended == "lost" or transfer.bytes_done == 64 << 20
        receiver.publish("r", jnp.arange(1000))


@pytest.mark.parametrize("failing", ["put", "flush"])
def test_an_error_is_one_byte_of_what_the_library_returns(failing):
    """UCX's status is one byte of a register, the rest of which is left undefined: 231 is -25, a failed write."""
    support.require()
    pointer, word, request = ctypes.c_void_p, ctypes.c_uint32, 1 << 12
    statuses = {"put": [231, 0], "flush": [0, 231]}[failing]
    calls = [
        ctypes.CFUNCTYPE(pointer, *[pointer] * 6)(lambda *_: request),
        ctypes.CFUNCTYPE(pointer, *[pointer] * 6)(lambda *_: request),
        ctypes.CFUNCTYPE(pointer, *[pointer] * 2)(lambda *_: request),
        ctypes.CFUNCTYPE(word, pointer)(lambda _: 0),
        ctypes.CFUNCTYPE(word, pointer)(lambda _: statuses.pop(0)),
        ctypes.CFUNCTYPE(None, pointer)(lambda _: None),
    ]
    link = _posting.native().Link(1 << 20, 1 << 20, 8)
    link.use_ucx([ctypes.cast(call, pointer).value for call in calls], 0, 0, [0, 0], 0)
    posting = link.start(False, 0, False, np.array([[64, 64, 8]], np.int64), 4, False)
    assert posting is not None and posting.status == -25


def test_without_the_compiled_part_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "xen_moe_jax.transfer._native", None)
    with pytest.raises(xt.TransferUnavailable, match="which this installation lacks .*`make transfer`"):
        _posting.native.__wrapped__()


def test_a_scheduled_poll_comes_once_and_in_time(engine):
    """Later copies do not put off the poll that is scheduled for the first."""
    poller, rings = engine._core.poller, []
    with engine._core.lock:
        alarm, on_alarm = poller.alarm.descriptor, poller.alarm.on_alarm
        poller.selector.modify(alarm, selectors.EVENT_READ, lambda: (rings.append(time.monotonic()), on_alarm()))
    begun = time.monotonic()
    while not rings:
        with engine._core.lock:
            poller.schedule_poll(10 << 20)  # Some 85 us.
        time.sleep(2e-5)
        assert time.monotonic() - begun < 10, "it was put off again and again"
    with engine._core.lock:
        poller.cancel_poll()
        poller.schedule_poll(200_000_000_000)  # Half a second.
        poller.cancel_poll()
        rested = time.monotonic()
    time.sleep(0.9)
    late = [ring - rested for ring in rings if ring > rested + 0.4]  # signals that had rung already are heard before
    assert not late, "it rang although there was nothing to look after"
