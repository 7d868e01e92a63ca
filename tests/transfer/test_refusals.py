"""Mistakes of users, and the errors that they get; barriers that were given up."""

import concurrent.futures
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.transfer.transfer_sides import slow_source
from xen_moe_jax.transfer import _memory, _ucp


class TestWhatErrorsSay:
    """Peer and request are attributes of every error; a request that makes no sense is refused by the call itself."""

    @pytest.fixture
    def sides(self, engine):
        with xt.Engine(name="sender") as sender:
            window = engine.window({"kv": jax.ShapeDtypeStruct((4, 2), np.float32)})
            peer = sender.connect(engine.descriptor)
            yield engine, sender, peer, window

    SOURCE = np.ones((4, 2), np.float32)
    WRONG = {
        "no array": lambda e, target: e.write([1.0], target),
        "another shape": lambda e, target: e.write(np.ones((4, 3), np.float32), target),
        "pages of three": lambda e, target: e.write(TestWhatErrorsSay.SOURCE, target, pages=(1, 2, 3)),
        "pages of bools": lambda e, target: e.write(jnp.ones((4, 2)), target, pages=([True], [False])),
        "deleted": lambda e, target: e.write(deleted(), target).wait(5),
        "traced": lambda e, target: jax.jit(lambda x: e.write(x, target))(TestWhatErrorsSay.SOURCE),
        "nothing published": lambda e, target: e.read(target),
        "scattered": lambda e, target: e.scatter(TestWhatErrorsSay.SOURCE, [(0, target)]),
    }

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("name", WRONG)
    def test_of_a_transfer(self, sides, name, known):
        engine, sender, peer, _ = sides
        target = peer["kv"]
        if known:  # The short way of a write that was planned before refuses it too.
            sender.write(jnp.ones((4, 2)), target, pages=([0], [1])).wait(5)
            sender.write(jnp.ones((4, 2)), target).wait(5)
        with pytest.raises(xt.TransferRefused) as found:
            self.WRONG[name](sender, target)
        assert found.value.peer == "here" and "kv" in found.value.request + str(found.value), vars(found.value)
        assert found.value.request and found.value.bytes_done == 0

    def test_of_a_stale_window(self, sides):
        engine, sender, peer, window = sides
        target = peer["kv"]
        window.commit(5)
        with pytest.raises(xt.StaleWindow, match="write <kv.*generation 1 .*not open any more") as found:
            sender.write(self.SOURCE, target)
        assert (found.value.peer, found.value.request) == ("here", f"write {target!r}")

    def test_of_a_published_array(self, sides):
        engine, sender, peer, _ = sides
        engine.publish("p", self.SOURCE)
        with pytest.raises(xt.TransferRefused, match="only read") as found:
            sender.write(self.SOURCE, peer["p"])
        assert found.value.peer == "here"

    def test_of_a_wait(self, sides):
        engine, sender, peer, window = sides
        there = engine.peer("sender")
        with pytest.raises(xt.TransferTimeout) as found:
            engine.counter(1, expect=1, source=there).wait(0.01)
        assert found.value.peer == "sender"
        with pytest.raises(xt.TransferTimeout) as found:
            engine.barrier([there], 0.01)
        assert found.value.peer == "sender"
        sent = sender.send(peer, b"x")
        with pytest.raises(xt.TransferTimeout) as found:
            sent.wait(0.01)
        assert found.value.peer == "here"

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (({"a": "text"},), "a is a str"),
            (({"a": SOURCE}, jax.P("x")), "shardings must be one sharding"),
            (({"a": SOURCE}, {"a": jax.P("x")}), "must be jax.sharding.Sharding"),
            (({"a": SOURCE}, {"b": None}), "pytree of shardings like avals"),
            (({"a": jax.ShapeDtypeStruct((-1,), np.float32)},), r"a has shape \(-1,\): must be integers of 0 or more"),
            (({"a": jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), np.float32)},), r"a has shape \(n,\)"),
        ],
    )
    def test_of_a_window(self, engine, arguments, text):
        with pytest.raises(ValueError, match=text):
            engine.window(*arguments)

    @pytest.mark.parametrize(("option", "value"), [("name", 5), ("name", ""), ("writers", 5), ("writers", [1])])
    def test_of_names(self, engine, option, value):
        with pytest.raises(ValueError, match=option):
            engine.window({"a": self.SOURCE}, **{option: value})

    @pytest.mark.parametrize("name", [("kv", "k"), ["kv"], "", 0, None, slice(0, 2)], ids=str)
    def test_of_names_of_a_peer_s_windows(self, sides, name):
        """The peer took a list for a breach of the protocol, and the connection was lost."""
        engine, _, peer, _ = sides
        with pytest.raises(ValueError, match="window of 'here': name=.* must be a string"):
            peer[name]
        with pytest.raises(ValueError, match="must be a string, not empty"):
            engine.window({"": self.SOURCE})
        assert peer["kv"].shape == (4, 2)

    def test_of_a_sharding_that_does_not_divide(self, engine):
        here = jax.NamedSharding(jax.make_mesh((3,), ("x",), devices=jax.devices()[:3]), jax.P("x"))
        with pytest.raises(ValueError, match="a cannot be split"):
            engine.window({"a": self.SOURCE}, here)

    @pytest.mark.parametrize("host", ["", None, 7, "0.0.0.0"])
    def test_of_a_host_that_no_peer_could_connect_to(self, engine, host):
        with pytest.raises(ValueError, match="host="):
            xt.Engine(name="second", host=host)
        with pytest.raises(OSError, match="host='no.such.host.invalid', port=0: cannot listen there"):
            xt.Engine(name="second", host="no.such.host.invalid")

    def test_of_settings(self, engine):
        """No transport of that name: the library said so, in a byte that was not read, and the process crashed."""
        for settings in ({"TLS": 3}, {3: "tcp"}, ["TLS"]):
            with pytest.raises(ValueError, match="settings=.* must be strings"):
                xt.Engine(name="second", settings=settings)
        with pytest.raises(RuntimeError, match="ucp_init with .*'TLS': 'nothing'.* failed: No such device"):
            xt.Engine(name="second", settings={"TLS": "nothing"})

    def test_of_a_port_that_is_taken(self, engine):
        with pytest.raises(OSError, match=r"host='127.0.0.1', port=\d+: cannot listen"):
            xt.Engine(name="second", port=engine._loop.address[1])

    @pytest.mark.parametrize("dtype", [">f4", "U3", object, "M8[D]", "m8[s]", [("a", "i4")], "V4", "g", "G"], ids=str)
    def test_of_dtypes_whose_name_says_nothing_to_the_other_side(self, sides, dtype):
        """Numbers in another byte order would arrive as other numbers; behind an array of text no message arrived."""
        engine, sender, peer, _ = sides
        array = np.zeros(2, dtype)
        for call in (lambda: sender.send(peer, array), lambda: engine.publish("p", array)):
            with pytest.raises(xt.TransferRefused, match="numbers or bools in this machine's byte order"):
                call()
        sender.send(peer, b"next")
        assert engine.recv(timeout=5) == b"next"

    def test_of_tags_and_groups_that_a_peer_would_not_take(self, sides):
        engine, sender, peer, _ = sides
        for call in (lambda: sender.send(peer, b"", tag=3), lambda: engine.recv(tag=None, timeout=1)):
            with pytest.raises(xt.TransferRefused, match="tag=.* must be a string"):
                call()
        with pytest.raises(xt.TransferRefused, match="must be a collection of peers"):
            sender.barrier(peer, 1)
        with pytest.raises(xt.TransferTimeout, match="'here' did not come"):
            sender.barrier((each for each in [peer]), 0.01)
        sender.send(peer, b"next", tag="")
        assert engine.recv(timeout=5) == b"next" and not peer.lost

    @pytest.mark.parametrize("index", [1.7, True, None, ..., "1", np.array([1, 2]), np.float64(2)], ids=repr)
    def test_of_indices_that_are_no_integers(self, sides, index):
        *_, peer, _ = sides
        with pytest.raises(IndexError, match="must be an integer or a slice"):
            peer["kv"][index]

    def test_of_parts_that_are_not_there(self, sides):
        """JAX clamps a number that lies outside: another row was written, without a word."""
        _, sender, peer, window = sides
        for index in (4, -5, (0, 2), np.array([0, 9])):
            with pytest.raises(xt.TransferRefused, match="scatter of 1 parts: the source has no part"):
                sender.scatter(jnp.ones((4, 2)), [(index, peer["kv"][0])])
        with pytest.raises(xt.TransferRefused, match=r"must be a pair \(index, target\)"):
            sender.scatter(self.SOURCE, [peer["kv"]])
        sender.scatter(jnp.arange(8.0).reshape(4, 2), [(-1, peer["kv"][0]), (slice(1, 3), peer["kv"][2:])]).wait(5)
        np.testing.assert_array_equal(window.commit(5)["kv"], [[6, 7], [0, 0], [2, 3], [4, 5]])

    def test_of_arrays_that_were_deleted(self, sides):
        engine, sender, peer, _ = sides
        for call in (
            lambda: engine.publish("p", {"a": deleted()}),
            lambda: sender.send(peer, deleted()),
            lambda: sender.scatter(deleted(), [(0, peer["kv"][0])]),
        ):
            with pytest.raises(xt.TransferRefused, match="was deleted or donated"):
                call()

    def test_of_messages_with_containers(self, sides):
        engine, sender, peer, _ = sides
        with pytest.raises(xt.TransferRefused, match="flat dict"):
            sender.send(peer, {"a": {"b": self.SOURCE}})
        with pytest.raises(xt.TransferRefused, match=r"the keys \[1\] are not strings"):
            sender.send(peer, {1: self.SOURCE, "a": self.SOURCE})

    @pytest.mark.parametrize("dtype", ["int1", "uint1", "uint4", "float6_e2m3fn", "float6_e3m2fn"])
    def test_of_elements_below_a_byte(self, sides, dtype):
        """XLA ended the receiver's process when it was to make an array of float6."""
        engine, sender, peer, _ = sides
        array = np.zeros(2, dtype)
        with pytest.raises(xt.TransferRefused, match="below one byte"):
            sender.send(peer, array)
        with pytest.raises(xt.TransferRefused, match="below one byte"):
            engine.window({"odd": array})
        with pytest.raises(xt.TransferRefused, match="below one byte"):  # as a peer could describe one
            _memory.Block((2,), np.dtype(dtype), None)

    def test_of_two_arrays_with_one_path(self, sides):
        """One of the two was left out without a word."""
        engine, sender, peer, _ = sides
        tree = {"a": {"b": self.SOURCE}, "a/b": self.SOURCE}
        calls = (
            lambda: engine.window(tree, name="two"),
            lambda: engine.publish("two", tree),
            lambda: xt.plan(tree, tree),
            lambda: sender.write(tree, peer["tree"]),
        )
        engine.window({"tree": {"a": {"b": self.SOURCE}}})
        for call in calls:
            with pytest.raises(ValueError, match="two arrays of the tree have the path 'a/b'"):
                call()

    def test_of_shardings_without_devices_and_of_other_memory(self, sides):
        """The window was lost when its arrays could not be made at the end."""
        engine, sender, peer, _ = sides
        abstract = jax.NamedSharding(jax.sharding.AbstractMesh((2,), ("x",)), jax.P("x"))
        pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        engine.publish("p", self.SOURCE)
        for sharding, text in ((abstract, "names no devices"), (pinned, "memory_kind='pinned_host'")):
            with pytest.raises(xt.TransferRefused, match=f"window 'w'.*{text}"):
                engine.window(jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding), name="w")
            with pytest.raises(xt.TransferRefused, match=f"read <p.*{text}"):
                sender.read(peer["p"], sharding=sharding)
        leaf = jax.ShapeDtypeStruct((4,), np.float32, sharding=abstract)
        for src, dst, side in (({"w": leaf}, {"w": self.SOURCE}, "src"), ({"w": self.SOURCE}, {"w": leaf}, "dst")):
            with pytest.raises(ValueError, match=f"plan: {side}: w has .*names no devices; give a sharding over"):
                xt.plan(src, dst)

    def test_of_a_tree_without_arrays(self, sides):
        engine, sender, peer, _ = sides
        engine.publish("none", {})
        assert sender.read(peer["none"]) == {}
        with pytest.raises(xt.TransferRefused, match="no arrays to write"):
            sender.write({}, peer["none"])

    @pytest.mark.parametrize("number", [2**256, 10**5000], ids=["digits", "no text"])
    def test_of_numbers_that_do_not_travel(self, sides, number):
        engine, sender, peer, window = sides
        for call in (lambda: sender.write(self.SOURCE, peer["kv"], imm=number), lambda: engine.counter(number, 1)):
            with pytest.raises(xt.TransferRefused, match="at most 256"):
                call()
        sender.write(self.SOURCE, peer["kv"], imm=2**256 - 1).wait(5)
        engine.counter(2**256 - 1, expect=1).wait(5)


def test_no_engine_of_the_process_is_in_progress_while_another_is_taken_down(engine, monkeypatch):
    seen = []
    loaded = _ucp.library()

    class Library:
        def __getattr__(self, name):
            if name == "ucp_worker_destroy":
                seen.append(engine._core.wire.progressing.locked())
            return getattr(loaded, name)

    monkeypatch.setattr(_ucp, "library", Library)
    with xt.Engine(name="other") as other:
        other.connect(engine.descriptor)
    assert seen == [True]


def deleted():
    array = jnp.ones((4, 2))
    array.delete()
    return array


def test_a_barrier_that_was_given_up_is_taken_up_again(engine):
    with xt.Engine(name="other") as other:
        there, here = other.connect(engine.descriptor), engine.peer("other")
        for _ in range(2):
            with pytest.raises(xt.TransferTimeout):
                engine.barrier([here], 0.01)
        waiting = threading.Thread(target=engine.barrier, args=([here], 10))
        waiting.start()
        other.barrier([there, there], 10)  # Once: the three calls there are one barrier; and a peer is one member.
        waiting.join(10)
        assert not waiting.is_alive()
        with pytest.raises(xt.TransferTimeout):
            other.barrier([there], 0.05)


def test_engines_that_connect_anew_begin_their_barriers_anew(engine):
    with xt.Engine(name="other") as other:
        for _ in range(2):
            there, here = other.connect(engine.descriptor), engine.peer("other")
            waiting = threading.Thread(target=engine.barrier, args=([here], 10))
            waiting.start()
            other.barrier([there], 10)
            waiting.join(10)
            assert not waiting.is_alive()
            there.close()
            deadline = time.monotonic() + 60
            while engine.peers and time.monotonic() < deadline:
                time.sleep(0.01)


@pytest.mark.parametrize("who", ["threads", "both", "threads of both"])
def test_engines_that_connect_at_once_have_one_connection(engine, who):
    """With two connections, a message sent over one is never received by who waits for the peer of the other one."""
    for _ in range(10):
        with xt.Engine(name="other") as other:
            pairs = {"threads": [(engine, other)] * 4, "both": [(engine, other), (other, engine)]}
            calls = pairs.get(who, pairs["both"] * 2)
            start = threading.Barrier(len(calls))

            def connect(pair, start=start):
                start.wait()
                return pair[0], pair[0].connect(pair[1].descriptor, timeout=20)

            with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
                met = list(pool.map(connect, calls))
            there, here = other.peer(engine.name), engine.peer("other")
            assert all(peer is (here if side is engine else there) for side, peer in met)
            assert len(engine.peers) == len(engine._peers) == len(other._peers) == 1
            engine.send(here, b"x")
            assert other.recv(there, timeout=5) == b"x"
        deadline = time.monotonic() + 60
        while engine.peers and time.monotonic() < deadline:
            time.sleep(0.01)


def test_numbers_of_numpy_are_numbers(engine):
    with xt.Engine(name="other") as other:
        engine.window({"a": jax.ShapeDtypeStruct((2,), np.float32)})
        other.write(np.ones(2, np.float32), other.connect(engine.descriptor)["a"], imm=np.int64(7)).wait(5)
        engine.counter(7, expect=1).wait(5)


class TestMessagesThatAreGivenUp:
    @pytest.fixture
    def sides(self, engine):
        with xt.Engine(name="sender") as sender:
            yield engine, sender, sender.connect(engine.descriptor)

    @pytest.mark.parametrize("value", [b"short", np.arange(1 << 18, dtype=np.int32)], ids=["bytes", "array"])
    def test_a_cancelled_message_is_never_received(self, sides, value):
        engine, sender, peer = sides
        sent = sender.send(peer, value)
        assert sent.cancel(5)
        with pytest.raises(xt.TransferCancelled):
            sent.wait(1)
        with pytest.raises(xt.TransferTimeout):
            engine.recv(timeout=0.05)

    def test_a_received_message_cannot_be_cancelled(self, sides):
        engine, sender, peer = sides
        sent = sender.send(peer, np.arange(8, dtype=np.int32))
        engine.recv(timeout=5)
        assert not sent.cancel(5)

    def test_what_could_not_be_read_is_received_again(self, sides):
        engine, sender, peer = sides
        sent = sender.send(peer, np.arange(7, dtype=np.int32))
        uneven = jax.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.P("x"))
        with pytest.raises(ValueError, match=r"sharding: an array of shape \(7,\) cannot be split so"):
            engine.recv(sharding=uneven, timeout=5)
        assert not sent.done()
        np.testing.assert_array_equal(np.asarray(engine.recv(timeout=5)), np.arange(7))
        sent.wait(5)


class TestPush:
    @pytest.fixture
    def sides(self, engine):
        with xt.Engine(name="trainer") as trainer:
            avals = {name: jax.ShapeDtypeStruct((900, 900), np.float32) for name in ("a", "b")}
            window = engine.window(avals, name="w")
            peer = trainer.connect(engine.descriptor)
            yield peer, window, xt.plan(avals, peer["w"].layout)

    def test_cancel_ends_every_part(self, sides):
        peer, _, plan = sides
        pushed = xt.push({"a": slow_source(), "b": slow_source()}, plan, [peer])
        pushed.cancel(30)
        assert [transfer.done() for transfer in pushed.transfers] == [True, True]

    @pytest.mark.parametrize(
        ("params", "peers", "error", "text"),
        [
            ({"a": 0}, None, ValueError, "params and the plan differ in .'b'"),
            (None, [], KeyError, "receiver 'here' is not among"),
            (None, "here", ValueError, "must be a collection of peers"),
            (None, ["here"], xt.TransferRefused, "not a Peer"),
        ],
    )
    def test_what_does_not_fit(self, sides, params, peers, error, text):
        peer, _, plan = sides
        whole = {name: jnp.zeros((900, 900)) for name in ("a", "b")}
        with pytest.raises(error, match=text):
            xt.push(params or whole, plan, [peer] if peers is None else peers)
        with pytest.raises(ValueError, match="collection of peers"):
            xt.push(whole, plan, peer)

    @pytest.mark.parametrize(
        ("wrong", "error", "text"),
        [
            (np.zeros((900, 901), np.float32), ValueError, r"a is float32\[900, 901\], and was float32\[900, 900\]"),
            (np.zeros((900, 900), np.int32), ValueError, r"a is int32\[900, 900\], and was float32"),
            (3.0, xt.TransferRefused, "a is a float: must be a jax.Array"),
            ("deleted", xt.TransferRefused, "a was deleted or donated"),
        ],
        ids=["shape", "dtype", "float", "deleted"],
    )
    def test_params_of_another_plan(self, sides, wrong, error, text):
        """What the plan had cut out of the right arrays was cut out of these, and cast."""
        peer, _, plan = sides
        if isinstance(wrong, str):
            wrong = jnp.zeros((900, 900))
            wrong.delete()
        with pytest.raises(error, match=text):
            xt.push({"a": wrong, "b": jnp.zeros((900, 900))}, plan, [peer])

    def test_params_that_are_sharded_otherwise(self, sides):
        peer, _, plan = sides
        here = jax.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.P("x"))
        with pytest.raises(ValueError, match="make another plan"):
            xt.push({name: jax.device_put(jnp.zeros((900, 900)), here) for name in ("a", "b")}, plan, [peer])


class TestWithoutSixtyFourBits:
    """An array of int64 would be made as one of int32, with half the bytes that a peer writes."""

    @pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
    def test_such_a_window_is_refused(self, engine, dtype):
        with pytest.raises(xt.TransferRefused, match="jax_enable_x64"):
            engine.window({"a": jax.ShapeDtypeStruct((4,), np.dtype(dtype))})

    def test_such_a_message_or_read_is_refused(self, engine):
        with xt.Engine(name="sender") as sender:
            peer = sender.connect(engine.descriptor)
            sender.send(peer, np.arange(4, dtype=np.int64))
            with pytest.raises(xt.TransferRefused, match="jax_enable_x64"):
                engine.recv(timeout=5)
            engine.publish("p", np.arange(4, dtype=np.int64))
            with pytest.raises(xt.TransferRefused, match="jax_enable_x64"):
                sender.read(peer["p"])


def test_an_engine_asks_again_when_the_other_one_gives_up_its_own_connection():
    """The engine of the lower identity refuses the other one while it connects itself. Its own connection may fail."""
    with xt.Engine(name="a", token="t") as first, xt.Engine(name="b", token="t") as second:
        low, high = sorted((first, second), key=lambda engine: engine.identity)
        with low._core.lock:
            low._opening.add(high.identity)
        given_up = threading.Timer(0.3, low._opening.discard, [high.identity])
        given_up.start()
        begun = time.monotonic()
        assert high.connect(low.descriptor, timeout=30).name == low.name
        assert 0.2 < time.monotonic() - begun < 25
        given_up.join()


def test_an_engine_connects_to_no_second_peer_of_one_name():
    with xt.Engine(name="a", token="t") as engine:
        with xt.Engine(name="twin", token="t") as first, xt.Engine(name="twin", token="t") as second:
            found = engine.connect(first.descriptor)
            with pytest.raises(xt.TransferRefused, match="names must be unique"):
                engine.connect(second.descriptor)
            assert engine.peers == {"twin": found} and not second.peers
