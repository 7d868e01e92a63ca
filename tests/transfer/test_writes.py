"""Writes, reads and messages between two real processes, byte for byte."""

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import xen_moe_jax.transfer as xt
from tests.transfer.transfer_sides import content, sharding


def aval(shape, dtype, spec=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else sharding(spec))


def same(array, expected):
    array = np.asarray(array)
    assert array.shape == expected.shape and array.dtype == expected.dtype
    assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(expected).tobytes()


DTYPES = [
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.int8,
    np.uint32,
    np.bool_,
    np.complex64,
    np.float16,
]


def test_every_dtype_and_shape(engine, other):
    shapes = [(5, 7), (), (3,), (0, 4), (2, 3, 4)]
    avals = {f"{np.dtype(d).name}-{i}": aval(s, d) for d in DTYPES for i, s in enumerate(shapes)}
    window = engine.window(avals, name="all")
    seeds = {key: (number, a.shape, a.dtype) for number, (key, a) in enumerate(avals.items())}
    other.call("write_tree", "all", seeds, 1)
    engine.counter(1, expect=1).wait(10)
    for key, array in window.commit(10).items():
        same(array, content(*seeds[key]))


def test_names_are_the_keys_of_a_nameless_window(engine, other):
    window = engine.window(
        {"kv": {"k": aval((4, 2), np.float32), "v": [aval((3,), np.int32)]}, "w": aval((2,), np.int8)}
    )
    other.call("write_tree", "kv", {"k": (1, (4, 2), np.float32), "v": [(2, (3,), np.int32)]}, "kv")
    other.call("write", "w", 3, (2,), np.int8, "w")
    other.call("write", "kv", 4, (2,), np.float32, "row", None, ("k",), 2)
    for imm in "kv", "w", "row":
        engine.counter(imm, expect=1).wait(10)
    got = window.commit(10)
    expected = content(1, (4, 2), np.float32).copy()
    expected[2] = content(4, (2,), np.float32)
    same(got["kv"]["k"], expected)
    same(got["kv"]["v"][0], content(2, (3,), np.int32))
    same(got["w"], content(3, (2,), np.int8))


def test_pages(engine, other):
    window = engine.window(aval((64, 16, 2, 8), ml_dtypes.bfloat16), name="kv")
    rng = np.random.default_rng(0)
    expected = np.zeros((64, 16, 2, 8), ml_dtypes.bfloat16)
    places = rng.permutation(64)
    for number in range(4):
        there, here = places[number * 16 : number * 16 + 16], rng.permutation(32)[:16]
        pages = (here.tolist(), there.tolist())
        other.call("write", "kv", number, (32, 16, 2, 8), ml_dtypes.bfloat16, 7, pages, (), None, None, number % 2 == 0)
        expected[there] = content(number, (32, 16, 2, 8), ml_dtypes.bfloat16)[here]
    engine.counter(7, expect=4).wait(10)
    same(window.commit(10), expected)


@pytest.mark.parametrize(
    "index, part",
    [(3, (5, 6)), ((slice(2, 5), 1), (3, 6)), ((slice(None), slice(1, 3), slice(2, 6)), (8, 2, 4)), ((-1, -1, -1), ())],
)
def test_rectangles(engine, other, index, part):
    window = engine.window(aval((8, 5, 6), np.int32), name="x")
    other.call("write", "x", 5, part, np.int32, 1, None, (), index)
    engine.counter(1, expect=1).wait(10)
    expected = np.zeros((8, 5, 6), np.int32)
    expected[index] = content(5, part, np.int32)
    same(window.commit(10), expected)


SPECS = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),), (None, ("b", "a"))]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_from_every_sharding_to_every_sharding(engine, other):
    windows = {to: engine.window(aval((16, 24), np.float32, to), name=str(to)) for to in SPECS}
    arrivals = 0
    for to, window in windows.items():
        for seed, source in enumerate(SPECS):
            other.call("write", str(to), seed, (16, 24), np.float32, arrivals, None, (), None, source)
            engine.counter(arrivals, expect=1).wait(10)
            arrivals += 1
            got = window.commit(10)
            same(got, content(seed, (16, 24), np.float32))
            assert got.sharding == sharding(to)
            for shard in got.addressable_shards:  # Every replica, not only the one that np.asarray looks at.
                same(shard.data, content(seed, (16, 24), np.float32)[shard.index])
    assert arrivals == len(SPECS) ** 2


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_pages_of_sharded_caches(engine, other):
    window = engine.window(aval((12, 4, 8), np.float32, (None, "a", "b")), name="kv")
    pages = ([0, 5, 2], [11, 3, 4])
    other.call("write", "kv", 1, (6, 4, 8), np.float32, 1, pages, (), None, (None, "b", "a"))
    engine.counter(1, expect=1).wait(10)
    expected = np.zeros((12, 4, 8), np.float32)
    expected[pages[1]] = content(1, (6, 4, 8), np.float32)[pages[0]]
    same(window.commit(10), expected)


def test_many_small_writes_in_any_order(engine, other):
    window = engine.window(aval((300, 17), np.uint16), name="rows")
    counter = engine.counter("rows", expect=300)
    assert other.call("many", "rows", 300, "rows", 3) == 300 * 34
    counter.wait(10)
    assert counter.value == 300
    same(window.commit(10), np.stack([content(i, (17,), np.uint16) for i in range(300)]))


def test_a_source_may_still_be_being_computed(engine, other):
    window = engine.window(aval((900, 900), np.float32), name="slow")
    ready, begun, done = other.call("write_slow", "slow", 1)
    assert not ready and begun is None, "the computation was over before the write: the test shows nothing"
    engine.counter(1, expect=1).wait(10)
    assert done == 900 * 900 * 4 and np.asarray(window.commit(10)).any()


def test_cancel_before_anything_was_posted(engine, other):
    window = engine.window(aval((900, 900), np.float32), name="slow")
    assert other.call("cancel_slow", "slow", 1) is True
    assert other.call("cancel_done", "slow") is False
    assert engine.counter(1, expect=1).value == 0
    assert not np.asarray(window.commit(10)).any()


@pytest.mark.parametrize("again", [False, True])
def test_a_source_that_is_deleted_while_it_is_written_is_not_counted(engine, other, again):
    """The memory was unmapped under the loop that copies, which ended the sender's process."""
    engine.window({"big": aval((64 << 20,), np.float32)})
    with pytest.raises(xt.TransferRefused, match="deleted or donated"):
        other.call("write_and_delete", "big", 1, again)
    assert engine.counter(1, expect=1).value == 0 and not engine.peer("there").lost


@pytest.mark.parametrize("rows", [1000, 4_000_000])
@pytest.mark.parametrize("how", ["deleted", "donated"])
def test_a_message_that_is_deleted_or_donated_before_it_is_received(engine, rows, how):
    """The receiver got what lay in the memory by then, or lost the connection where nothing did."""
    with xt.Engine(name="sender") as sender:
        peer = sender.connect(engine.descriptor)
        source = jnp.arange(float(rows)).block_until_ready()
        sent = sender.send(peer, source)
        if how == "deleted":
            source.delete()
        else:
            jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(source).block_until_ready()
        others = [jnp.full((rows,), 7.0).block_until_ready() for _ in range(3)]
        same(engine.recv(timeout=10), np.arange(rows, dtype=np.float32))
        sent.wait(10)
        del others


def test_a_published_array_that_was_deleted_is_refused_alone(engine):
    with xt.Engine(name="reader") as reader:
        peer = reader.connect(engine.descriptor)
        source = jnp.arange(4e6)
        engine.publish("p", source)
        target = peer["p"]
        source.delete()
        with pytest.raises(xt.TransferRefused, match="'here' has donated or deleted 'p'"):
            reader.read(target)
        assert not peer.lost


def test_a_source_that_was_deleted_is_not_counted(engine, other):
    engine.window(aval((900, 900), np.float32), name="slow")
    with pytest.raises(xt.TransferRefused, match="deleted or donated"):
        other.call("write_deleted", "slow", 1)
    assert engine.counter(1, expect=1).value == 0


def test_reads(engine, other):
    x = content(1, (16, 24), np.float32)
    engine.publish(
        "w", {"a": jax.device_put(x, sharding(("a",)) if jax.device_count() >= 8 else None), "b": jnp.arange(3)}
    )
    got = other.call("read", "w")
    same(got["a"], x)
    same(other.call("read", "w", ("b",)), np.arange(3, dtype=np.int32))
    engine.publish("w", jnp.full((5,), 7.0))
    same(other.call("read", "w"), np.full(5, 7, np.float32))
    with pytest.raises(xt.TransferRefused, match="does not exist"):
        other.call("read", "nothing")


def test_read_the_other_way_and_resharded(engine, other):
    other.call("publish", "w", 9, (16, 24), np.float32, ("b", "a") if jax.device_count() >= 8 else None)
    peer = engine.peer("there")
    got = engine.read(peer["w"], sharding=sharding((None, "b")) if jax.device_count() >= 8 else None)
    same(got, content(9, (16, 24), np.float32))
    same(engine.read(peer["w"][3:7, 5]), content(9, (16, 24), np.float32)[3:7, 5])


def test_a_readable_window_shows_its_last_committed_generation(engine, other):
    window = engine.window(aval((4,), np.int32), name="w", readable=True)
    for seed in 1, 2:
        other.call("write", "w", seed, (4,), np.int32, seed)
        engine.counter(seed, expect=1).wait(10)
        window.commit(10)
        other.call("write", "w", 99, (4,), np.int32)
        same(other.call("read", "w"), content(seed, (4,), np.int32))


def test_messages(engine, other):
    big = content(1, (3 << 20,), np.uint8).tobytes()
    other.start("send", b"small", "a")
    assert engine.recv(tag="a", timeout=10) == b"small"
    assert other.result() == 5
    other.start("send", big, "b")
    assert engine.recv(tag="b", timeout=10) == big
    assert other.result() == len(big)
    other.start("send", {"x": content(2, (5, 6), np.float32)}, "c")
    got = engine.recv(engine.peer("there"), tag="c", timeout=10)
    same(got["x"], content(2, (5, 6), np.float32))
    other.result()
    other.start("receive", "d", 10)
    engine.send(engine.peer("there"), jnp.arange(4.0), tag="d").wait(10)
    same(other.result(), np.arange(4, dtype=np.float32))
    with pytest.raises(xt.TransferTimeout):
        engine.recv(tag="a", timeout=0.05)


def test_a_message_that_is_not_taken_does_not_end(engine, other):
    transfer = engine.send(engine.peer("there"), jnp.arange(4.0), tag="later")
    with pytest.raises(xt.TransferTimeout):
        transfer.wait(0.1)
    same(other.call("receive", "later", 10), np.arange(4, dtype=np.float32))
    transfer.wait(10)


def test_scatter_and_barrier(engine, others):
    names = ["a", "b", "c"]
    three = [others(name) for name in names]
    for number, side in enumerate(three):
        side.call("window", "part", (number + 1, 4), np.int32)
    src = content(0, (6, 4), np.int32)
    places = [slice(0, 1), slice(1, 3), slice(3, 6)]
    pieces = [(place, engine.peer(name)["part"]) for place, name in zip(places, names)]
    transfer = engine.scatter(jnp.asarray(src), pieces, imm="part")
    transfer.wait(10)
    assert transfer.bytes_done == src.nbytes
    for place, side in zip(places, three):
        side.call("count", "part", 1, 10)
        same(side.call("commit", "part"), src[place])


def test_a_barrier_waits_for_the_last(engine, others):
    others("a")
    b = others("b")
    b.start("barrier", ["here"], 10)
    with pytest.raises(xt.TransferTimeout, match="'a'"):
        engine.barrier([engine.peer("a")], 0.2)
    begun = time.monotonic()
    engine.barrier([engine.peer("b")], 10)
    assert b.result() >= begun - 1.0


class TestOtherLayouts:
    """JAX's arrays are row-major unless a program or the user chose another layout: peers get the same elements."""

    @pytest.fixture
    def sides(self, engine):
        with xt.Engine(name="sender") as sender:
            yield engine, sender, sender.connect(engine.descriptor)

    @staticmethod
    def turned(array):
        return jax.device_put(array, Format(Layout(tuple(reversed(range(array.ndim)))), array.sharding))

    def test_of_writes_and_of_their_repetition(self, sides):
        engine, sender, peer = sides
        window = engine.window({"a": aval((4, 3, 2), np.float32)})
        plain = jnp.arange(24.0).reshape(4, 3, 2)
        target = peer["a"]
        for number, source in enumerate((self.turned(plain), plain + 1, plain + 2, self.turned(plain + 3))):
            for pages in (([0, 1], [3, 2]), None):
                sender.write(source, target, pages=pages, imm=number).wait(5)
        engine.counter(3, expect=2).wait(5)
        same(window.commit(5)["a"], np.asarray(plain + 3))

    def test_of_pages(self, sides):
        engine, sender, peer = sides
        window = engine.window({"a": aval((4, 3), np.float32)})
        plain = jnp.arange(12.0).reshape(4, 3)
        sender.write(self.turned(plain), peer["a"], pages=([0, 1, 2, 3], [3, 2, 1, 0])).wait(5)
        same(window.commit(5)["a"], np.asarray(plain)[::-1])

    def test_of_shards_pushes_messages_and_published_arrays(self, sides):
        engine, sender, peer = sides
        split = jax.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.P("x"))
        plain = jax.device_put(jnp.arange(24.0).reshape(4, 6), split)
        source = self.turned(plain)
        window = engine.window({"w": aval((4, 6), np.float32), "v": aval((4, 6), ml_dtypes.bfloat16)}, name="w")
        plan = xt.plan({"w": source, "v": source}, peer["w"].layout, cast={"v": "bfloat16"})
        xt.push({"w": source, "v": source}, plan, [peer]).wait(5)
        got = window.commit(5)
        same(got["w"], np.asarray(plain))
        same(got["v"], np.asarray(plain.astype(jnp.bfloat16)))
        sender.send(peer, {"m": source})
        same(engine.recv(timeout=5)["m"], np.asarray(plain))
        engine.publish("p", source)
        same(sender.read(peer["p"]), np.asarray(plain))

    def test_of_memory_beside_the_device_s_own(self, sides):
        engine, sender, peer = sides
        window = engine.window({"a": aval((4, 6), np.float32)})
        plain = jnp.arange(24.0).reshape(4, 6)
        sender.write(jax.device_put(plain, plain.sharding.with_memory_kind("pinned_host")), peer["a"]).wait(5)
        same(window.commit(5)["a"], np.asarray(plain))


def test_bytes_of_any_view(engine):
    """The limit of what travels in the frame is one of bytes, and a view need not be dense."""
    values = [memoryview(np.arange(1 << 18)), memoryview(bytes(range(256)) * 10_000)[::2]]
    with xt.Engine(name="sender") as sender:
        peer = sender.connect(engine.descriptor)
        for value in values:
            sent = sender.send(peer, value)
            assert engine.recv(timeout=5) == value.tobytes()
            sent.wait(5)
