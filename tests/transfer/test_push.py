"""Plans, weight pushes and ticks."""

import time

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import xen_moe_jax.transfer as xt
from tests.transfer.transfer_sides import FSDP, SERVING, content, place, serving_avals, sharding, specs_like, weights
from xen_moe_jax.transfer._layout import Leaf

eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def same_tree(got, expected):
    for here, there in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert here.dtype == there.dtype
        for shard in here.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), there[shard.index])


@eight
def test_trainer_to_server_resharded(engine, other):
    window = engine.window(serving_avals(None), name="weights")
    for seed in range(3):
        counter = window.counter(expect=6)
        arrivals, nbytes = other.call("push_weights", "weights", seed)
        assert arrivals == {"here": 6}
        assert nbytes == sum(x.nbytes for x in jax.tree.leaves(weights(seed)))
        counter.wait(10)
        same_tree(window.commit(10), weights(seed))


@eight
def test_cast_on_the_way(engine, other):
    window = engine.window(serving_avals(ml_dtypes.float8_e4m3fn), name="weights")
    other.call("push_weights", "weights", 1, {"*": "float8_e4m3fn"})
    window.counter(expect=6).wait(10)
    same_tree(window.commit(10), jax.tree.map(lambda x: x.astype(ml_dtypes.float8_e4m3fn), weights(1)))


@eight
def test_a_trainer_that_dies_after_its_push_spoils_nothing(engine, other):
    window = engine.window(serving_avals(None), name="weights")
    other.call("push_weights", "weights", 4)
    window.counter(expect=6).wait(10)
    other.kill()
    same_tree(window.commit(10), weights(4))


@eight
@pytest.mark.parametrize("source", [(), ("a",), ("b", "a"), (("a", "b"),), (None, "b")])
@pytest.mark.parametrize("destination", [(), (None, "a"), ("b",), (None, ("a", "b"))])
def test_every_element_is_sent_once_for_each_slice_of_a_receiver(source, destination):
    aval = {"w": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=sharding(source))}
    dst = {"w": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=sharding(destination))}
    plan = xt.plan(aval, dst)
    counts = np.zeros((16, 8), int)
    for piece in plan.pieces:
        counts[tuple(slice(*extent) for extent in piece.box)] += 1
    assert (counts == 1).all()
    assert plan.nbytes == 16 * 8 * 4 and plan.arrivals == {"": 1}


@pytest.mark.parametrize(
    "dst, cast, text",
    [
        ({"v": ((4,), np.float32)}, None, r"differ in \['v', 'w'\]"),
        ({"w": ((5,), np.float32)}, None, r"float32\[4\] as sent .* float32\[5\]"),
        ({"w": ((4,), np.int8)}, None, r"int8\[4\] at"),
        ({"w": ((4,), np.float32)}, {"w*": "bfloat16"}, r"bfloat16\[4\] as sent"),
        (
            {"w": ((4,), np.float32)},
            {"w": "float32", "v*": "int8"},
            r"cast={'v\*': ...}: no array has such a path.*'w'",
        ),
    ],
)
def test_plans_that_do_not_fit(dst, cast, text):
    with pytest.raises(ValueError, match=text):
        xt.plan(
            {"w": jax.ShapeDtypeStruct((4,), np.float32)},
            {key: jax.ShapeDtypeStruct(*value) for key, value in dst.items()},
            cast,
        )


def test_the_first_pattern_that_matches_counts():
    arrays = {name: jax.ShapeDtypeStruct((4,), np.float32) for name in ("a", "b")}
    there = arrays | {"a": jax.ShapeDtypeStruct((4,), jax.numpy.bfloat16)}
    assert xt.plan(arrays, there, cast={"a": "bfloat16", "*": "float32"}).dtypes["a"] == "bfloat16"
    with pytest.raises(ValueError, match="a is float32"):
        xt.plan(arrays, there, cast={"*": "float32", "a": "bfloat16"})


def test_a_layout_that_no_process_can_fill():
    leaf = xt.Layout("r", "w", (Leaf.of_boxes("", (4,), np.dtype("float32"), [((0, 6),)]),))
    with pytest.raises(ValueError, match="no process holds 2 elements"):
        xt.plan(jax.ShapeDtypeStruct((4,), np.float32), leaf)


@eight
def test_staging_is_bounded(engine, other):
    """With room for one array at a time the push still ends, and is right."""
    other.call("window_of_weights", "weights")
    peer = engine.peer("there")
    params = place(weights(3), FSDP)
    plan = xt.plan(params, peer["weights"].layout, {"*": "bfloat16"})
    xt.push(params, plan, {"there": peer}, staging=1).wait(10)
    got = other.call("commit_weights", "weights", plan.arrivals["there"])
    expected = jax.tree.map(lambda array: np.asarray(array).astype(ml_dtypes.bfloat16), weights(3))
    chex.assert_trees_all_equal(got, expected, strict=True)


@eight
def test_specs_describe_the_same_tree():
    assert jax.tree.structure(specs_like(weights(0), FSDP)) == jax.tree.structure(specs_like(weights(0), SERVING))


def test_ticks_come_while_the_program_runs():
    seen = []
    watcher = xt.Watcher(lambda index, data: seen.append((index, time.monotonic(), data)))

    @jax.jit
    def program(x):
        for layer in range(4):
            x = jax.lax.fori_loop(0, 30, lambda i, x: jnp.sin(x @ x), x)
            x = xt.tick(x, watcher, layer, data=x[:2, :2])
        return x

    program.lower(jnp.ones((400, 400))).compile()
    result = program(jnp.ones((400, 400))).block_until_ready()
    ended = time.monotonic()
    watcher.wait(4, timeout=10)
    assert sorted(index for index, _, _ in seen) == [0, 1, 2, 3]
    by_layer = {index: (when, data) for index, when, data in seen}
    assert by_layer[0][0] < ended - 0.25 * (ended - by_layer[0][0]) and by_layer[0][0] < by_layer[3][0]
    np.testing.assert_array_equal(by_layer[3][1], np.asarray(result)[:2, :2])


def test_tick_returns_its_value_and_ticks_in_loops():
    watcher = xt.Watcher()

    @jax.jit
    def program(x):
        def layer(x, index):
            return xt.tick({"x": x["x"] * 2, "n": x["n"] + 1}, watcher, index), index

        return jax.lax.scan(layer, x, jnp.arange(5))[0]

    got = program({"x": jnp.ones(3), "n": jnp.int32(0)})
    np.testing.assert_array_equal(np.asarray(got["x"]), [32.0] * 3)
    watcher.wait(5, timeout=10)
    assert watcher.ticks == 5 and int(got["n"]) == 5


def test_gradients_and_explicit_shardings_pass_a_tick():
    watcher = xt.Watcher()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for spec in (jax.P("x"), jax.P(None, "x")):
            x = jax.device_put(jnp.arange(8.0).reshape(2, 4), spec)

            def loss(x):
                return jnp.sum(xt.tick(x * x, watcher, x[0, 0], data=x))

            value, gradient = jax.jit(jax.value_and_grad(loss))(x)
            np.testing.assert_array_equal(np.asarray(gradient), 2 * np.asarray(x))
            assert float(value) == float((x * x).sum())
    watcher.wait(2, timeout=10)
    assert float(jax.jvp(lambda x: xt.tick(x * x, watcher), (3.0,), (1.0,))[1]) == 6.0


def test_a_tick_needs_a_watcher_and_a_number():
    """The second error came from the callback, in the middle of a run."""
    with pytest.raises(TypeError, match="tick: watcher is a builtin_function_or_method: must be an xt.Watcher"):
        jax.jit(lambda x: xt.tick(x, print)).lower(1.0)
    with pytest.raises(ValueError, match=r"tick: index has shape \(2,\): must be a number"):
        jax.jit(lambda x: xt.tick(x, xt.Watcher(), jnp.arange(2))).lower(1.0)


def test_a_tick_without_a_cpu_device_is_an_error_when_the_program_is_made(monkeypatch):
    """JAX_PLATFORMS=cuda gives this case: an error in the middle of a run would leave the other devices waiting."""

    def local_devices(backend=None):
        raise RuntimeError(f"Unknown backend: {backend!r} requested")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(xt.TransferRefused, match="JAX_PLATFORMS=.*,cpu"):
        jax.jit(lambda x: xt.tick(x, xt.Watcher())).lower(1.0)


def test_an_error_in_a_watcher_is_raised_where_one_waits():
    def fail(index, data):
        raise ZeroDivisionError("in the callback")

    watcher = xt.Watcher(fail)
    assert float(jax.jit(lambda x: xt.tick(x, watcher) + 1)(1.0)) == 2.0
    with pytest.raises(ZeroDivisionError, match="in the callback"):
        watcher.wait(1, timeout=10)
    with pytest.raises(xt.TransferTimeout, match="0 of 1 ticks"):
        xt.Watcher().wait(1, timeout=0.05)


def test_contents_differ_by_seed():
    """The other tests compare contents: they must be able to differ."""
    assert (content(1, (64,), np.uint8) != content(2, (64,), np.uint8)).any()
    assert (weights(1)["embed"] != weights(2)["embed"]).any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"src": {"w": 1.0}}, "src: w is a float: must be an array"),
        ({"dst": "weights"}, "dst: the value is a str: must be an array"),
        ({"dst": [np.ones(2), xt.Layout("a", "w", ())]}, r"dst: .*1.* is the Layout of 'a' in a tree of other values"),
        ({"dst": {"w": xt.Layout("a", "w", ())}}, "dst: w is the Layout of 'a'.* a list of Layouts alone"),
        ({"cast": ["bfloat16"]}, r"cast=\['bfloat16'\]: must be a dictionary"),
    ],
)
def test_plans_of_what_is_no_array(given, words):
    array = {"w": np.ones((4, 2), np.float32)}
    with pytest.raises(TypeError, match=f"plan: {words}"):
        xt.plan(**({"src": array, "dst": array} | given))
