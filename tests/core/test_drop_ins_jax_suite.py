"""The cases of jax's own tests of both collectives, with the drop-ins.

jax's tests are in its repository only, so each of them that calls `all_to_all` or `ragged_all_to_all` is done again
here with data of the same kind. `IN_JAX` lists them all; a case that agrees is a test below, and a case that differs is
in `DIFFERENT` with the reason; docs/user/migrating.md sums it up. Where jax runs on the CPU, the expected value is
its own answer; for `ragged_all_to_all`, which it does not run there, the oracle's.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits
from tests.support.ragged import ragged_operands

IN_JAX = {  # jax's file: its tests of the two collectives
    "batching_test.py": ("testAllToAll", "testAllToAllSplitAxis"),
    "pmap_test.py": ("testAllToAll", "testAllToAllReplicaGroups"),  # its testAllToAllSplitAxis needs nested pmap: gone
    "shard_map_test.py": ("test_all_to_all", "test_all_to_all_with_axis_index_groups", "test_all_to_all_grad"),
    "ragged_collective_test.py": (
        "test_ragged_all_to_all",
        "test_ragged_all_to_all_grad",
        "test_ragged_all_to_all_axis_index_groups",
        "test_ragged_all_to_all_degenerate_groups",
        "test_ragged_all_to_all_vmap_multi_dim_operand",
        "test_ragged_all_to_all_vmap",
        "test_ragged_all_to_all_vmap_unsupported_axis_index_groups",
        "test_ragged_all_to_all_errors",
        "test_vmap_basic",
    ),
}
DIFFERENT = {
    "test_ragged_all_to_all": "the lowered text is this library's program, not XLA's custom call; values agree",
    "test_ragged_all_to_all_axis_index_groups": "the same",
    "test_ragged_all_to_all_degenerate_groups": "the same",
    "test_ragged_all_to_all_vmap_unsupported_axis_index_groups": "no error: it works",
    "test_ragged_all_to_all_errors": "the errors have other texts",
}


def mesh_of(sizes, names):
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:count])


def agree(body, *operands):
    """`body(all_to_all, *operands)` gives the same with jax's."""
    ours, theirs = body(xm.all_to_all, *operands), body(jax.lax.all_to_all, *operands)
    assert ours.dtype == theirs.dtype
    assert_bits(ours, theirs, "all_to_all")
    return np.asarray(ours)


# -- batching_test.py --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", range(4))
def test_batching_all_to_all(axis):
    x = np.arange(4**4, dtype=np.int32).reshape(4, 4, 4, 4)
    for split, concat in itertools.product(range(3), repeat=2):
        y = agree(lambda f, x: jax.vmap(lambda x: f(x, "i", split, concat), in_axes=axis, axis_name="i")(x), x)  # noqa: B023
        assert_bits(y, np.moveaxis(x, (axis, split + (axis <= split)), (concat + 1, 0)), f"{split} {concat}")


@pytest.mark.parametrize("axis", range(3))
def test_batching_all_to_all_over_two_axes(axis):
    shape = [4, 4, 4]
    shape[axis : axis + 1] = (2, 2)
    x = np.arange(64, dtype=np.int32).reshape(shape)
    for split, concat in itertools.product(range(2), repeat=2):

        def body(f, x, split=split, concat=concat):
            inner = jax.vmap(lambda x: f(x, ("i", "j"), split, concat), in_axes=axis, axis_name="j")
            return jax.vmap(inner, in_axes=axis, axis_name="i")(x)

        agree(body, x)


# -- pmap_test.py ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("split", "concat"), list(itertools.product(range(2), repeat=2)))
def test_pmap_all_to_all(split, concat):
    x = np.arange(64, dtype=np.int32).reshape(4, 4, 4)
    pmap = functools.partial(jax.pmap, axis_name="i", devices=jax.devices()[:4])
    y = agree(lambda f, x: pmap(lambda x: f(x, "i", split, concat))(x), x)
    assert_bits(y, np.moveaxis(x, (0, split + 1), (concat + 1, 0)), "all_to_all")


def test_pmap_all_to_all_in_groups():
    x = np.arange(8, dtype=np.int32).reshape(4, 2)
    groups = [[0, 2], [1, 3]]
    pmap = functools.partial(jax.pmap, axis_name="i", devices=jax.devices()[:4])
    y = agree(lambda f, x: pmap(lambda x: f(x, "i", 0, 0, axis_index_groups=groups))(x), x)
    assert y.tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]


# -- shard_map_test.py -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [None, ((0, 1), (2, 3))], ids=["all", "groups"])
def test_shard_map_all_to_all_and_its_gradient(groups):
    mesh = mesh_of((4,), ("x",))
    a = jax.device_put(jnp.arange(64.0).reshape(8, 8), jax.NamedSharding(mesh, P("x")))

    def exchanged(f, a):
        def body(a):
            return f(a, "x", split_axis=1, concat_axis=0, axis_index_groups=groups, tiled=True)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x")))(a)

    agree(exchanged, a)
    weights = jnp.sin(jnp.arange(exchanged(xm.all_to_all, a).size).reshape(exchanged(xm.all_to_all, a).shape))
    gradient = agree(lambda f, a: jax.grad(lambda a: (exchanged(f, a) * weights).sum())(a), a)
    assert sorted(gradient.ravel()) == sorted(np.asarray(weights).ravel()), "every weight comes home once"


# -- ragged_collective_test.py -----------------------------------------------------------------------------------------
def ragged(mesh, axis="x", groups=None, **options):
    """The exchange as jax's tests write it: every rank's operands are rows of the arrays."""

    def body(operand, output, *segments):
        segments = [s.reshape(s.shape[1:]) for s in segments]
        exchange = functools.partial(xm.ragged_all_to_all, axis_name=axis, axis_index_groups=groups)
        return exchange(operand.reshape(operand.shape[1:]), output.reshape(output.shape[1:]), *segments)

    return jax.shard_map(body, mesh=mesh, in_specs=(P(axis, None),) * 6, out_specs=P(axis), check_vma=False, **options)


def two_ranks(dtype=np.int32):
    """Two ranks, rows of one number: operand `[2, 3]`, output `[2, 4]`, segments `[2, 2]`."""
    operand = np.array([[1, 2, 2], [3, 4, 0]], dtype)
    sizes, landing = np.array([[1, 2], [1, 1]]), np.array([[0, 0], [1, 2]])
    return operand, np.zeros((2, 4), dtype), np.array([[0, 1], [0, 1]]), sizes, landing, sizes.T


def test_ragged_two_ranks():
    mesh = mesh_of((2,), ("x",))
    moved = jax.jit(ragged(mesh))(*two_ranks())
    assert moved.reshape(2, 4).tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


def test_ragged_gradients_agree_with_differences():
    operand, output, *segments = two_ranks(np.float32)
    program = jax.jit(ragged(mesh_of((2,), ("x",))))
    check_grads(lambda operand, output: program(operand, output, *segments), (operand, output), order=1)


def test_ragged_in_groups():
    doubled = [np.concatenate([a, 10 * a if a.ndim and i < 1 else a]) for i, a in enumerate(two_ranks())]
    moved = jax.jit(ragged(mesh_of((4,), ("x",)), groups=((0, 1), (2, 3))))(*doubled)
    expected = [[1, 3, 0, 0], [2, 2, 4, 0]]
    assert moved.reshape(4, 4).tolist() == [*expected, *(np.array(expected) * 10).tolist()]


def test_ragged_in_groups_of_one():
    operand = np.array([[1, 0, 0, 0], [2, 3, 4, 0]])
    segments = [np.array(s) for s in ([[0], [0]], [[1], [3]], [[2], [1]], [[1], [3]])]
    moved = jax.jit(ragged(mesh_of((2,), ("x",)), groups=((0,), (1,))))(operand, np.zeros((2, 4), int), *segments)
    assert moved.reshape(2, 4).tolist() == [[0, 0, 1, 0], [0, 2, 3, 4]]


@pytest.mark.parametrize("groups", [None, [[0, 1]]], ids=["all", "groups"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("split_axis", [0, 1])
def test_ragged_under_vmap_of_shard_map(axis, split_axis, groups):
    """vmap outside shard_map, over a dimension in front or behind, of data that another dimension shards."""
    mesh = mesh_of((2, 2), ("x", "y"))
    operands = [np.stack([a, a + (i < 1)], axis=axis) for i, a in enumerate(two_ranks())]
    sharding = jax.NamedSharding(mesh, P("x") if split_axis == 0 else P(None, "x"))
    program = ragged(mesh, groups=groups)
    mapped = jax.jit(jax.vmap(program, in_axes=axis))(*jax.device_put(operands, sharding))
    program = jax.jit(program)
    loop = [program(*(np.take(a, entry, axis=axis) for a in operands)) for entry in range(2)]
    assert_bits(mapped, np.stack(loop), "vmap")
    assert mapped.any()


def test_ragged_under_vmap_over_a_pipeline_axis():
    """Rows of several numbers; the batch lies on a mesh axis that the exchange does not name."""
    mesh = mesh_of((2, 4), ("expert", "pipeline"))
    parts = [ragged_operands(np.random.default_rng(seed), 2, "random", (3,), "float32") for seed in range(4)]
    expected = np.stack([oracle.ragged_all_to_all(*part) for part in parts])
    stacked = [np.stack(arrays) for arrays in zip(*parts, strict=True)]
    placed = jax.device_put(stacked, jax.NamedSharding(mesh, P("pipeline", "expert")))

    def body(*operands):
        return xm.ragged_all_to_all(*(a[0] for a in operands), axis_name="expert")[None]

    one = jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    assert_bits(jax.jit(jax.vmap(one))(*placed), expected, "vmap over the pipeline's axis")


@pytest.mark.parametrize("wrong", ["dtype", "rank", "empty"])
@pytest.mark.parametrize("name", ["input_offsets", "send_sizes", "output_offsets", "recv_sizes"])
def test_ragged_errors(name, wrong):
    """ValueError as jax's, outside of any mesh as its test has it, and inside."""
    names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    good = jnp.array([0, 1], jnp.int32)
    bad = {"dtype": good.astype(jnp.float32), "rank": good[None], "empty": good[:0]}[wrong]
    segments = [bad if name == other else good for other in names]
    rows = jnp.ones((4, 3))
    program = jax.jit(lambda *given: xm.ragged_all_to_all(*given, axis_name="x"))
    with pytest.raises(ValueError, match="axis_name='x'"):
        program.lower(rows, rows, *segments)
    inside = jax.shard_map(program, mesh=mesh_of((2,), ("x",)), in_specs=P(), out_specs=P("x"), check_vma=False)
    with pytest.raises((ValueError, TypeError), match=name if wrong != "dtype" else f"{name} has dtype float32"):
        inside(rows, rows, *segments)


def test_what_differs_is_a_test_of_jax():
    assert set(DIFFERENT) <= {name for tests in IN_JAX.values() for name in tests}
