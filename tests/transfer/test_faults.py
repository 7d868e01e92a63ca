"""Errors: each of them, from a real cause, with the peer, the request and the bytes; and nothing hangs."""

import concurrent.futures
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.support import HANG_S, ROOT, transfer
from tests.transfer.transfer_sides import content, slow_source
from xen_moe_jax.transfer import _channel, _loop, _ucp


def aval(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_without_the_library_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "libucx", None)
    _ucp._libraries.cache_clear()
    with pytest.raises(xt.TransferUnavailable, match=r"pip install 'xen-moe-jax\[transfer\]'"):
        xt.Engine(name="x")
    monkeypatch.undo()
    _ucp._libraries.cache_clear()


def test_a_receiver_that_is_killed_is_named_at_once(engine, other):
    other.call("window", "w", (1 << 20,), np.float32)
    there = engine.peer("there")
    target = there["w"]
    engine.write(np.ones(1 << 20, np.float32), target).wait(10)
    other.kill()
    begun = time.monotonic()
    with pytest.raises(xt.PeerLost, match="'there'") as lost:
        for _ in range(1000):
            engine.write(np.ones(1 << 20, np.float32), target).wait(30)
    assert time.monotonic() - begun < 20, "a wait of 30 s was not ended by the death"
    assert lost.value.peer == "there" and lost.value.request.startswith("write <w float32") and there.lost
    with pytest.raises(xt.PeerLost):
        there["w"]
    with pytest.raises(xt.PeerLost):
        engine.send(there, b"x")
    with pytest.raises(xt.PeerLost):
        engine.barrier([there], 5)


def test_a_caller_that_waits_for_a_peer_that_dies_is_told(engine, other):
    there = engine.peer("there")
    transfer = engine.send(there, np.ones(4), tag="never taken")
    other.start("leave")
    for wait in (
        lambda: transfer.wait(60),
        lambda: engine.recv(there, timeout=60),
        lambda: engine.barrier([there], 60),
    ):
        begun = time.monotonic()
        with pytest.raises(xt.PeerLost):
            wait()
        assert time.monotonic() - begun < 40


def test_a_peer_that_closes_its_engine_is_lost_too(engine, other):
    there = engine.peer("there")
    other.call("close_engine")
    with pytest.raises(xt.PeerLost, match="its engine was closed"):
        engine.recv(there, timeout=10)


def test_a_counter_says_how_far_it_came(engine, other):
    engine.window(aval(4), name="w")
    other.call("write", "w", 0, (4,), np.float32, 5)
    engine._core.wait(lambda: engine.counter(5, expect=1).done(), 30, lambda: "no write was counted", "test")
    with pytest.raises(xt.TransferTimeout, match="counter 5: 1 of 3 writes after 0.1 s"):
        engine.counter(5, expect=3).wait(0.1)
    with engine.counter(5, expect=1) as counter:
        counter.wait(1)
    assert engine.counter(5, expect=1).value == 0


REFUSED = {
    "shape": ({"shape": (5,), "dtype": np.float32}, r"float32\[5\], the target <w float32\[4\]"),
    "dtype": ({"shape": (4,), "dtype": np.int32}, r"int32\[4\], the target"),
    "pages out of range": (
        {"shape": (4,), "dtype": np.float32, "pages": ([0], [4])},
        "destination pages 4..4 of the target",
    ),
    "source pages out of range": ({"shape": (4,), "dtype": np.float32, "pages": ([-1], [0])}, "source pages -1..-1"),
    "pages of other lengths": ({"shape": (4,), "dtype": np.float32, "pages": ([0, 1], [0])}, "2 source pages for 1"),
    "a page twice": ({"shape": (4,), "dtype": np.float32, "pages": ([0, 1], [2, 2])}, "named twice"),
    "no such window": ({"name": "v", "shape": (4,), "dtype": np.float32}, r"does not exist; this peer can see \['w'\]"),
    "pages that are no integers": ({"shape": (4,), "dtype": np.float32, "pages": ([0.5], [1])}, "must be integers"),
    "pages of one side": ({"shape": (4,), "dtype": np.float32, "pages": 3}, "pages=3 must be \\(source pages"),
    "imm": ({"shape": (4,), "dtype": np.float32, "imm": 1.5}, "imm=1.5"),
}


@pytest.fixture(scope="module")
def refusing():
    transfer.require()
    with xt.Engine(name="a") as a, xt.Engine(name="b") as b:
        b.window(aval(4), name="w")
        yield a, a.connect(b.descriptor)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_moves(refusing, case):
    engine, peer = refusing
    given, text = REFUSED[case]
    given = dict(given)
    array = content(0, given.pop("shape"), given.pop("dtype"))
    with pytest.raises(xt.TransferRefused, match=text):
        engine.write(array, peer[given.pop("name", "w")], **given)


def test_a_target_must_be_a_window_of_this_engine(refusing):
    engine, peer = refusing
    with pytest.raises(xt.TransferRefused, match="peer\\[name\\]"):
        engine.write(np.ones(4, np.float32), np.ones(4))
    with xt.Engine(name="c") as c:
        with pytest.raises(xt.TransferRefused, match="another engine"):
            c.write(np.ones(4, np.float32), peer["w"])
    with pytest.raises(xt.TransferRefused, match="is closed"):
        c.publish("x", np.ones(4))


def test_values_that_are_no_arrays_and_peers_that_are_none(refusing):
    engine, peer = refusing
    for call in (
        lambda: engine.write(1.0, peer["w"]),
        lambda: engine.write([1.0] * 4, peer["w"]),
        lambda: engine.send(peer, None),
        lambda: engine.send(peer, [np.ones(4)]),
        lambda: engine.send(peer, {"a": 1}),
        lambda: engine.publish("number", 3),
    ):
        with pytest.raises(xt.TransferRefused, match="must be a jax.Array or a NumPy array"):
            call()
    for call in (lambda: engine.send("b", b"x"), lambda: engine.barrier(["b"], 1)):
        with pytest.raises(xt.TransferRefused, match="'b' is a str, not a Peer"):
            call()
    with pytest.raises(xt.TransferRefused, match="barrier: 3 must be a collection of peers"):
        engine.barrier(3, 1)


@pytest.mark.parametrize("timeout", [float("nan"), "1", 1j])
def test_a_limit_that_is_no_time_is_an_error_and_no_wait_for_ever(refusing, timeout):
    engine, peer = refusing
    for wait in (
        lambda: engine.counter("never", expect=1).wait(timeout),
        lambda: engine.recv(timeout=timeout),
        lambda: engine.barrier([peer], timeout),
        lambda: engine.connect(b"whatever", timeout=timeout),
        lambda: xt.Watcher().wait(1, timeout),
        lambda: engine.close(timeout),
    ):
        with pytest.raises(ValueError, match="timeout=.* must be seconds"):
            wait()
    with pytest.raises(xt.TransferTimeout):
        engine.counter("never", expect=1).wait(np.float32(0))


@pytest.mark.parametrize(
    "given, text",
    [
        ({"name": 5}, "name=5 must be a string"),
        ({"name": ""}, "name='' must be a string of 1 to 256"),
        ({"name": "x", "token": ""}, "token= must be bytes or a string, not empty"),
        ({"name": "x", "token": 5}, "token= must be bytes or a string"),
        ({"name": "x", "port": 65536}, "port=65536 must be 0"),
        ({"name": "x", "backend": "nixl"}, "backend='nixl'"),
    ],
    ids=str,
)
def test_engines_that_cannot_be(given, text):
    with pytest.raises(ValueError, match=text):
        xt.Engine(**given)


def test_names_of_writers_are_not_letters(refusing):
    _, peer = refusing
    with xt.Engine(name="d") as engine, pytest.raises(ValueError, match=r"writers='decode' must be .* \['decode'\]"):
        engine.window(aval(4), name="v", writers="decode")
    with pytest.raises(ValueError, match="plan: cast={'\\*': 'float7'}: 'float7' is no dtype"):
        xt.plan({"a": np.ones(3)}, {"a": np.ones(3)}, cast={"*": "float7"})
    with xt.Engine(name="e") as engine, pytest.raises(ValueError, match="expect=-1 must be a number of writes"):
        engine.counter(1, expect=-1)


def test_descriptors_are_authenticated(engine):
    with pytest.raises(xt.TransferRefused, match="not an engine's descriptor"):
        engine.connect(b"nonsense")
    with xt.Engine(name="tokened", token="secret") as second:
        with pytest.raises(xt.TransferRefused, match="has a token"):
            engine.connect(second.descriptor)
        with xt.Engine(name="wrong", token="secreT") as third:
            with pytest.raises(xt.TransferRefused, match="another token"):
                third.connect(second.descriptor)
        with xt.Engine(name="right", token=b"secret") as fourth:
            assert fourth.connect(second.descriptor).name == "tokened"
            changed = second.descriptor.replace(b'"tokened"', b'"tokenee"')
            with pytest.raises(xt.TransferRefused, match="was changed"):
                fourth.connect(changed)
            with pytest.raises(xt.TransferRefused, match="own descriptor"):
                fourth.connect(fourth.descriptor)
    assert b"secret" not in second.descriptor.replace(b'"secret": null', b"")


def test_two_peers_of_one_name_are_refused(engine, others):
    others("twin")
    with xt.Engine(name="twin") as twin:
        with pytest.raises(xt.TransferRefused, match="names must be unique"):
            twin.connect(engine.descriptor)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_loopback_interface_by_any_name_opens_no_port_to_a_network(engine, host):
    """UCX's own ports, which ask for no token, were open to every network where the host was a name."""
    if socket.gethostbyname(host) != "127.0.0.1":
        pytest.skip(f"{host} is another address here")
    before = listening()
    with xt.Engine(name="second", host=host):
        opened = listening() - before
    assert opened and {address for address, _ in opened} == {"0100007F"}, opened


def listening():
    """Returns (address, port), in hexadecimal digits, of this process's sockets that listen."""
    links = [os.readlink(file) for file in pathlib.Path("/proc/self/fd").iterdir() if file.is_symlink()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    words = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {tuple(w[1].split(":")) for w in words if w[3] == "0A" and w[9] in own}


def test_a_process_may_end_in_the_middle_of_a_write():
    """An engine's thread that came back from its copies when Python had ended aborted the process, in most runs."""
    transfer.require()
    program = """
import atexit
atexit.register(lambda: print(sender._loop._thread.is_alive()))  # the first to register is the last to be called
import jax, jax.numpy as jnp
import xen_moe_jax.transfer as xt
sender, receiver = xt.Engine(name="sender"), xt.Engine(name="receiver")
peer = sender.connect(receiver.descriptor)
window = receiver.window(jax.ShapeDtypeStruct((64 << 20,), jnp.uint8), name="w")
source, target = jnp.ones((64 << 20,), jnp.uint8), peer["w"]
pending = [sender.write(source, target) for _ in range(8)]
assert not pending[-1].ended
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_no_engine_listens(engine):
    second = xt.Engine(name="gone")
    descriptor = second.descriptor
    second.close()
    with pytest.raises(xt.PeerLost, match="is its engine open"):
        engine.connect(descriptor, timeout=2)


def test_another_program_listens_and_says_nothing(engine):
    with socket.create_server(("127.0.0.1", 0)) as silent, xt.Engine(name="gone", token="t") as second:
        second._loop.address = silent.getsockname()
        with xt.Engine(name="asking", token="t") as asking:
            begun = time.monotonic()
            with pytest.raises(xt.TransferTimeout):
                asking.connect(second.descriptor, timeout=0.3)
            assert time.monotonic() - begun < 20, "it waited for the default of 30 s"


def test_silent_strangers_are_sent_away_and_the_next_client_is_let_in(engine, monkeypatch):
    monkeypatch.setattr(_loop, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(_loop, "HANDSHAKE_S", 1.5)
    with contextlib.ExitStack() as opened:
        for _ in range(3):
            stranger = opened.enter_context(socket.create_connection(engine._loop.address))
        assert opened.enter_context(xt.Engine(name="patient")).connect(engine.descriptor).name == "here"
        stranger.settimeout(30)
        assert stranger.recv(1) == b"", "the last stranger was sent away, too"


def test_many_connect_at_once(engine, monkeypatch):
    monkeypatch.setattr(_loop, "MAX_HANDSHAKES", 2)
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor(12) as pool:
        clients = [opened.enter_context(xt.Engine(name=f"client {i}")) for i in range(12)]
        peers = list(pool.map(lambda client: client.connect(engine.descriptor).name, clients))
        assert peers == ["here"] * 12
        for client in clients:
            engine.peer(client.name)


def test_noise_on_the_port_does_no_harm(engine, others):
    for noise in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        _channel.encode({"version": 1, "nonce": "zz", "target": "x"}),
    ):
        with socket.create_connection(engine._loop.address) as stranger:
            stranger.sendall(noise)
    others("later").call("barrier", [], 5)
    assert set(engine.peers) == {"later"}


@pytest.mark.parametrize(
    "frame",
    [
        {"t": "nonsense"},
        {"t": "open"},
        {"t": "imm", "w": 1, "g": 1, "k": [1], "n": 10**9},
        {"t": "grant", "q": 1, "leaves": [{}]},
        {"t": "msg", "i": "x"},
    ],
    ids=lambda frame: frame["t"],
)
def test_a_peer_that_breaks_the_protocol_loses_itself_alone(engine, frame):
    engine.window(aval(4), name="w")
    with xt.Engine(name="bad") as bad, xt.Engine(name="good") as good:
        broken, fine = bad.connect(engine.descriptor), good.connect(engine.descriptor)
        bad.write(np.ones(4, np.float32), broken["w"], imm=0).wait(5)
        with bad._core.lock:
            broken.send(frame)
        bad._core.wait(lambda: broken.lost, 5, lambda: "the engine put up with it", "test")
        good.write(np.ones(4, np.float32), fine["w"], imm=2).wait(5)
        engine.counter(2, expect=1).wait(5)


def test_closing_ends_what_is_under_way(engine, other):
    other.call("window", "w", (900, 900), np.float32)
    second = xt.Engine(name="short")
    other.call("connect", second.descriptor)
    there = second.peer("there")
    target = there["w"]
    transfer = second.write(slow_source(), target, imm=1)
    begun = time.monotonic()
    second.close(60)
    assert time.monotonic() - begun < 40
    with pytest.raises(xt.TransferError):
        transfer.wait(1)
    with pytest.raises(xt.TransferRefused, match="closed"):
        second.write(np.ones((900, 900), np.float32), target)
    second.close()


def test_closing_beside_a_stopped_peer_ends(others):
    from xen_moe_jax.transfer import _engine as module

    with xt.Engine(name="short") as second:
        other = others(connected=False)
        other.call("connect", second.descriptor)
        second.window(aval(4), name="w")
        other.call("keep_target", "w")
        other.pause()
        kept = len(module._never_released)
        begun = time.monotonic()
        second.close(timeout=0.5)
        assert time.monotonic() - begun < 8, "it waited for the default of 10 s"
        assert len(module._never_released) == kept + 1, (
            "a stopped process can still write into memory that was given up"
        )
