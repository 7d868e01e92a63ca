"""Asynchronous operations on any machine: derivatives, remat, `xm.overlap`, and the order in a GPU's program.

The starts of the CUDA backend return the result buffers themselves, still pending. A test can switch the reference
backend to this too, where each start is a whole operation: these tests cover everything but the overlap.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.gpu import async_programs
from tests.gpu.programs import over
from tests.support.checks import assert_bits
from xen_moe_jax.backends import load, reference
from xen_moe_jax.backends.base import BackendUnavailable

# Two programs are compared bit for bit, experts included. With few optimisations, XLA's rounding of a tanh depends on
# the operations that it is fused with.
pytestmark = pytest.mark.optimized

CONFIG = xm.KernelConfig(backend="reference")


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])


@pytest.fixture
def lands(monkeypatch):
    monkeypatch.setattr(reference.BACKEND, "supports_async", lambda spec, config: True)


def equations(program, *args):
    """The library's own primitives in the program, in order."""
    return re.findall(r"= xen_moe_(\w+)\[", str(jax.make_jaxpr(program)(*args)))


def assert_same(mesh, body):
    args = async_programs.arguments(mesh)
    whole, split = (
        over(mesh, lambda *a, way=way: body(way, CONFIG, *a), 5) for way in (async_programs.WHOLE, async_programs.SPLIT)
    )
    assert "dispatch_start" in equations(split, *args)
    for got, wanted in zip(jax.tree.leaves(split(*args)), jax.tree.leaves(whole(*args)), strict=True):
        assert_bits(got, np.asarray(wanted), "result")


@pytest.mark.parametrize("name", async_programs.BODIES)
def test_the_same_bits(mesh, lands, name):
    assert_same(mesh, async_programs.BODIES[name])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("remat", "layout"),
    [
        *[("none", layout) for layout in ("grouped", "ranked", "padded")],
        *[("all", "grouped"), slow("all", "ranked"), slow("all", "padded")],
        *[("names", "grouped"), slow("names", "ranked"), slow("names", "padded")],
    ],
)
def test_gradients(mesh, lands, layout, remat):
    assert_same(mesh, async_programs.gradients(layout, remat))


def test_gradients_travel_by_their_own_wire(mesh, lands):
    assert_same(mesh, async_programs.gradients("grouped", "none", gradient_wire="float8_e4m3fn"))


def test_the_backward_pass_is_made_of_whole_operations(mesh, lands):
    args = async_programs.arguments(mesh)
    body = async_programs.gradients("grouped", "none")
    found = equations(over(mesh, lambda *a: body(async_programs.SPLIT, CONFIG, *a), 5), *args)
    backward = found[found.index("redispatch") :]
    assert [e for e in backward if e not in ("order", "weights_from_rows")] == ["redispatch", "combine"]


def test_what_remat_saves_does_not_start_again(mesh, lands):
    """A pending operation without a done half is an error: values that only order it belong to the done half."""
    args = async_programs.arguments(mesh)
    starts = {}
    for remat in ("all", "names"):
        body = async_programs.gradients("grouped", remat)
        found = equations(over(mesh, lambda *a, body=body: body(async_programs.SPLIT, CONFIG, *a), 5), *args)
        assert found.count("dispatch_start") == found.count("dispatch_done")
        assert found.count("combine_start") == found.count("combine_done")
        starts[remat] = found.count("dispatch_start")
    assert starts == {"all": 2, "names": 1}


def test_second_derivatives(mesh, lands):
    def along_and_back(way):
        def body(x, idx, weights, a, w):
            def loss(x, weights):
                return jnp.sum(jnp.sin(async_programs.one_layer(way, CONFIG, x, idx, weights, a, w)[0]))

            slope = jax.grad(loss, (0, 1))
            along = jax.jvp(slope, (x, weights), (jnp.cos(x), jnp.sin(weights)))[1]
            back = jax.grad(lambda x, weights: sum(jnp.sum(jnp.sin(g)) for g in slope(x, weights)), (0, 1))(x, weights)
            return along, back

        return over(mesh, body, 5)

    args = async_programs.arguments(mesh)
    results = [jax.tree.leaves(along_and_back(way)(*args)) for way in (async_programs.WHOLE, async_programs.SPLIT)]
    for wanted, got in zip(*results, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_a_dispatch_of_one_byte_values_has_no_gradient(mesh, lands):
    x, idx, weights, *_ = async_programs.arguments(mesh)

    def body(x, idx, weights):
        def f(scale):
            values = xm.quantize(x * scale)
            return jnp.sum(xm.dequantize(xm.dispatch_done(flight(values, idx, weights)).x, jnp.float32))

        return jax.grad(f)(jnp.ones(()))[None]

    def flight(values, idx, weights):
        return xm.dispatch_start(values, idx, weights, num_experts=16, axis_name="ep", config=CONFIG)

    with pytest.raises(TypeError, match="dispatch of a BlockScaled x has no gradient"):
        jax.eval_shape(over(mesh, body), x, idx, weights)


# -- overlap -----------------------------------------------------------------------------------------------------------


def traced(mesh, body):
    return jax.eval_shape(over(mesh, body, 5), *async_programs.arguments(mesh))


def start(x, idx, weights):
    return xm.dispatch_start(x, idx, weights, num_experts=16, axis_name="ep", config=CONFIG)


def test_overlap_says_what_it_wants(mesh):
    def no_flight(x, idx, weights, a, w):
        return xm.overlap(x, jnp.sin, a)

    def no_array(x, idx, weights, a, w):
        return xm.overlap(start(x, idx, weights), lambda: a)

    with pytest.raises(TypeError, match="overlap: flights=.*pass what dispatch_start or combine_start returned"):
        traced(mesh, no_flight)
    with pytest.raises(ValueError, match="overlap: no array among args.*overlap\\(flight, work, x\\)"):
        traced(mesh, no_array)
    with pytest.raises(ValueError, match="overlap: no array among args"):
        traced(mesh, lambda x, idx, weights, a, w: xm.overlap(start(x, idx, weights), lambda n: n, 2.0))
    with pytest.raises(TypeError, match="overlap: work is a .*: must be a function"):
        traced(mesh, lambda x, idx, weights, a, w: xm.overlap(start(x, idx, weights), a, w))


def test_overlap_leaves_what_is_no_array_as_it_is(mesh, lands):
    def body(x, idx, weights, a, w):
        flight, (a, count) = xm.overlap(start(x, idx, weights), lambda a, n: (jnp.tile(a, n), n), a, 2)
        assert count == 2 and type(count) is int  # static, as where nothing is ordered
        return xm.dispatch_done(flight).x, a

    assert traced(mesh, body)[1].shape[-1] == 2 * async_programs.arguments(mesh)[3].shape[-1]


@pytest.mark.parametrize("again", ["given", "given and replaced", "overlapped twice", "finished before"])
@pytest.mark.parametrize("pending", [True, False])
def test_overlap_uses_a_flight_up(mesh, request, again, pending):
    """Also where nothing is pending, so that a mistake shows before the program comes to a backend that overlaps."""
    if pending:
        request.getfixturevalue("lands")

    def body(x, idx, weights, a, w):
        flight = start(x, idx, weights)
        if again == "finished before":
            xm.dispatch_done(flight)
        other, a = xm.overlap(flight, jnp.sin, a)
        if again == "overlapped twice":
            xm.overlap(flight, jnp.sin, a)
        return xm.dispatch_done(flight if again == "given" else other).x, xm.dispatch_done(flight).x

    with pytest.raises(ValueError, match="finished before: a flight is used once"):
        traced(mesh, body)


def test_overlap_may_be_repeated_and_takes_pytrees(mesh, lands):
    def body(x, idx, weights, a, w):
        pair = {"one": start(x, idx, weights), "two": (start(2 * x, idx, weights),)}
        pair, a = xm.overlap(pair, lambda a, w: {"a": a @ w}, a, w)
        pair, a = xm.overlap(pair, jnp.sin, a["a"])
        return [xm.dispatch_done(f).x for f in (pair["one"], *pair["two"])], a

    args = async_programs.arguments(mesh)
    (one, two), _ = over(mesh, body, 5)(*args)
    assert_bits(np.asarray(two), 2 * np.asarray(one), "rows")


# -- the program for GPUs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda_text():
    try:
        load("cuda")
    except BackendUnavailable as reason:
        pytest.skip(f"the CUDA module is not built: {reason}")
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])
    config = xm.KernelConfig(backend="cuda", channel=2)
    body = async_programs.gradients("grouped", "none")
    way = async_programs.SPLIT
    both = lambda *a: (async_programs.one_layer(way, config, *a), body(way, config, *a))  # noqa: E731
    mapped = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    return mapped.trace(*async_programs.arguments(mesh)).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """(target, line) of every FFI call of this library."""
    return [(m.group(1), m.group(0)) for m in re.finditer(r"[^\n]*custom_call @xen_moe_(\w+)\([^\n]*", text)]


def test_start_and_done_are_two_calls_on_a_gpu(cuda_text):
    names = [name for name, _ in calls(cuda_text) if name != "exchange"]
    assert names[:4] == ["dispatch_start", "done", "combine_start", "done"]
    assert names.count("done") == sum(name.endswith("_start") for name in names) >= 4
    assert {"redispatch", "combine"} <= set(names[4:])


def test_everything_under_way_is_aliased_through_and_operands_stay_alive(cuda_text):
    open_calls = []
    for name, line in calls(cuda_text):
        if name != "done" and not name.endswith("_start"):
            continue
        assert "has_side_effect = true" in line
        if name != "done":
            open_calls.append(re.findall(r"%[\w#]+", line.split("(", 1)[1].split(")")[0]))
            assert "flight = 1 : i64" in line and "channel = 2 : i64" in line
            continue
        aliased = re.findall(r"operand_index = (\d+)", line.split("output_operand_aliases", 1)[1])
        results = line.rsplit("->", 1)[1].count("tensor<")
        assert list(map(int, aliased)) == list(range(results))
        operands = re.findall(r"%[\w#]+", line.split("(", 1)[1].split(")")[0])
        given = open_calls.pop(0)
        if len(open_calls) == 0 and name == "done":  # every array of the start that is not made anew stands here again
            assert len(operands) >= results + len(given)


HALVES = r"@xen_moe_\w+_start\(|@xen_moe_done\(|optimization_barrier|dot_general"


def test_work_stands_between_start_and_done(cuda_text):
    """By data: a barrier that the start's results and the matmul's operand pass, and one behind the matmul."""
    lines = [line for line in cuda_text.splitlines() if re.search(HALVES, line)]
    kinds = [next(k for k in ("_start(", "@xen_moe_done(", "barrier", "dot_general") if k in line) for line in lines]
    for i, kind in enumerate(kinds):
        if kind != "_start(":
            continue
        behind = list(itertools.takewhile(lambda k: k != "@xen_moe_done(", kinds[i + 1 :]))
        barriers = [n for n, k in enumerate(behind) if k == "barrier"]
        assert len(barriers) >= 2 and "dot_general" in behind[barriers[0] : barriers[-1]], behind
