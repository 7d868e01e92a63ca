"""The drop-ins where `jax.lax` is subtle: vmap, axes of an enclosing vmap, PRNG keys, symbolic shapes.

Neither jax's wheel nor its source distribution on PyPI holds jax's own tests of these collectives (they are in its
repository only), so every case is held against `jax.lax` itself, or against a loop where `jax.lax` has no answer on
this platform. docs/user/migrating.md lists the cases that differ from `jax.lax`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits
from tests.support.ragged import in_pieces, ragged_operands

RANKS, BATCH = 4, 3


def on(mesh, body, **options):
    """`body` on every rank; operands and results carry the rank in front."""

    def each(*stacked):
        return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], stacked)))

    program = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), **options))
    return lambda *stacked: program(*jax.device_put(stacked, jax.NamedSharding(mesh, P("ep"))))


def batches(shared_segments: bool):
    """Operands of `ragged_all_to_all` `[R, B, ...]`; the segments `[R, ...]` are those of all, or each has its own."""
    made = [ragged_operands(np.random.default_rng(seed), RANKS, "random", (5,), "float32") for seed in range(BATCH)]
    stacked = [np.stack(parts, axis=1) for parts in zip(*made, strict=True)]
    return [*stacked[:2], *made[0][2:]] if shared_segments else stacked


# -- several segments for each peer ------------------------------------------------------------------------------------
def test_several_segments_for_each_peer(mesh4):
    """Several segments give the result of one segment and of the oracle, and the gradient is the transpose."""
    whole = ragged_operands(np.random.default_rng(7), RANKS, "random", (5,), "float32")
    pieces = in_pieces(*whole)
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep")
    moved = on(mesh4, exchange)(*pieces)
    assert_bits(moved, oracle.ragged_all_to_all(*pieces), "three segments, by the oracle")
    assert_bits(moved, on(mesh4, exchange)(*whole), "three segments as one")

    def pulled(cotangent, operand, output, *segments):
        return jax.vjp(lambda operand, output: exchange(operand, output, *segments), operand, output)[1](cotangent)

    cotangent = np.random.default_rng(8).integers(-9, 9, moved.shape).astype("float32")
    by_operand, by_output = (np.asarray(a) for a in on(mesh4, pulled)(cotangent, *pieces))
    assert (cotangent * np.asarray(moved)).sum() == (by_operand * pieces[0]).sum() + (by_output * pieces[1]).sum()
    assert by_operand.any() and by_output.any()


def test_several_segments_in_groups(mesh4):
    groups = [[0, 3], [2, 1]]
    parts = [in_pieces(*ragged_operands(np.random.default_rng(g), 2, "random", (3,), "float32")) for g in range(2)]
    operands = [np.zeros((RANKS, *a.shape[1:]), a.dtype) for a in parts[0]]
    expected = np.zeros((RANKS, *parts[0][1].shape[1:]), np.float32)
    for group, part in zip(groups, parts, strict=True):
        for whole, a in zip(operands, part, strict=True):
            whole[group] = a
        expected[group] = oracle.ragged_all_to_all(*part)
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep", axis_index_groups=groups)
    assert_bits(on(mesh4, exchange)(*operands), expected, "three segments in groups")


@pytest.mark.parametrize(
    "rows, there, trailing", [(4, 4, (0,)), (4, 4, (2, 0)), (4, 0, (3,)), (0, 4, (3,)), (0, 0, (3,))]
)
def test_segments_of_nothing(mesh4, rows, there, trailing):
    """Where rows are empty, or there are none to send or to receive, the result is `output`, and so is its gradient."""
    operand = np.ones((RANKS, rows, *trailing), np.float32)
    output = np.full((RANKS, there, *trailing), 2, np.float32)
    segments = (
        np.broadcast_to(np.arange(RANKS, dtype=np.int32), (RANKS, RANKS)),
        np.ones((RANKS, RANKS), np.int32),
    ) * 2

    def loss(operand, output, *segments):
        moved = xm.ragged_all_to_all(operand, output, *segments, axis_name="ep")
        return jnp.sum(moved**2), moved

    differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, moved), (by_operand, by_output) = on(mesh4, differentiated)(operand, output, *segments)
    assert_bits(moved, output, "result")
    assert_bits(by_output, 2 * output, "gradient")
    assert by_operand.shape == operand.shape and not by_operand.any()


# -- vmap of ragged_all_to_all -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [True, False], ids=["shared segments", "own segments"])
def test_vmap_of_ragged_all_to_all_is_a_loop(mesh4, shared):
    operands = batches(shared)
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep")
    mapped = jax.vmap(exchange, in_axes=(0, 0, *[None if shared else 0] * 4))

    def loop(operand, output, *segments):
        of = [segments if shared else [s[b] for s in segments] for b in range(BATCH)]
        return jnp.stack([exchange(operand[b], output[b], *of[b]) for b in range(BATCH)])

    assert_bits(on(mesh4, mapped)(*operands), on(mesh4, loop)(*operands), "vmap of ragged_all_to_all")


@pytest.mark.parametrize("wire", [None, "float8_e4m3fn", "int8", "mxfp4"])
@pytest.mark.parametrize("tiled", [False, True])
def test_vmap_of_no_entries(mesh4, wire, tiled):
    """A batch of size zero has results, and gradients, of the shapes of any batch."""
    x, segment = np.ones((RANKS, 0, 4, 256), np.float32), np.ones((RANKS, RANKS), np.int32)
    gather = jax.vmap(functools.partial(xm.all_gather, axis_name="ep", tiled=tiled, wire=wire))
    exchange = jax.vmap(functools.partial(xm.ragged_all_to_all, axis_name="ep"), in_axes=(0, None, *[None] * 4))

    def results(x, segment):
        out, pull = jax.vjp(gather, x)
        moved, pulled = jax.vjp(lambda x: exchange(x, jnp.ones((3, 256)), *[segment] * 4), x)
        return out, pull(out)[0], moved, pulled(moved)[0]

    out, by_x, moved, by_operand = on(mesh4, results)(x, segment)
    assert out.shape == (RANKS, 0, *((4 * RANKS,) if tiled else (RANKS, 4)), 256)
    assert moved.shape == (RANKS, 0, 3, 256) and by_x.shape == by_operand.shape == x.shape


@pytest.mark.parametrize("axes", [(1, 0), (None, 2), (1, None)], ids=str)
def test_vmap_of_one_operand_and_over_inner_axes(mesh4, axes):
    operand, output, *segments = ragged_operands(np.random.default_rng(5), RANKS, "random", (5,), "float32")
    batched = [
        a if axis is None else np.stack([a + b for b in range(BATCH)], axis=axis + 1)
        for a, axis in ((operand, axes[0]), (output, axes[1]))
    ]
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep")

    def mapped(operand, output, *segments):
        return jax.vmap(exchange, in_axes=(*axes, None, None, None, None))(operand, output, *segments)

    def loop(operand, output, *segments):
        def entry(a, axis, b):
            return a if axis is None else jax.lax.index_in_dim(a, b, axis, keepdims=False)

        return jnp.stack(
            [exchange(entry(operand, axes[0], b), entry(output, axes[1], b), *segments) for b in range(BATCH)]
        )

    assert_bits(on(mesh4, mapped)(*batched, *segments), on(mesh4, loop)(*batched, *segments), "vmap")


@pytest.mark.parametrize("shared", [True, False], ids=["shared segments", "own segments"])
def test_gradient_of_a_vmapped_exchange_is_that_of_a_loop(mesh4, shared):
    operand, output, *segments = batches(shared)
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep")

    def mapped(operand, output, *segments):
        return jax.vmap(exchange, in_axes=(0, 0, *[None if shared else 0] * 4))(operand, output, *segments)

    def loop(operand, output, *segments):
        of = [segments if shared else [s[b] for s in segments] for b in range(BATCH)]
        return jnp.stack([exchange(operand[b], output[b], *of[b]) for b in range(BATCH)])

    def gradient(f):
        def run(operand, output, *segments):
            return jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b, *segments))), (0, 1))(operand, output)

        return on(mesh4, run)(operand, output, *segments)

    for ours, theirs, name in zip(gradient(mapped), gradient(loop), ("operand", "output"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)


# -- groups and gradients ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)), ((3, 1, 0, 2),)], ids=str)
def test_groups_of_any_size_and_order(mesh4, groups):
    """Rank `groups[g][p]` is peer `p` of its group; a group of one rank keeps its rows."""
    size = len(groups[0])
    parts = [ragged_operands(np.random.default_rng(g), size, "random", (3,), "float32") for g in range(len(groups))]
    operands, expected = [], np.zeros((RANKS, *parts[0][1].shape[1:]), np.float32)
    for i in range(6):
        stacked = np.zeros((RANKS, *parts[0][i].shape[1:]), parts[0][i].dtype)
        for group, part in zip(groups, parts, strict=True):
            stacked[list(group)] = part[i]
        operands.append(stacked)
    for group, part in zip(groups, parts, strict=True):
        expected[list(group)] = oracle.ragged_all_to_all(*part)

    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep", axis_index_groups=groups)
    assert_bits(on(mesh4, exchange)(*operands), expected, "ragged_all_to_all in groups")

    def difference(operand, output, *segments):
        """Returns the gradient along a direction and the change of the loss along it, equal for a linear exchange."""

        def loss(operand, output):
            return jnp.sum(
                jnp.cos(jnp.arange(output.size)).reshape(output.shape) * exchange(operand, output, *segments)
            )

        gradient = jax.grad(loss, (0, 1))(operand, output)
        direction = jnp.sin(operand), jnp.cos(output)
        along = sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
        total = jax.lax.psum(along, "ep"), jax.lax.psum(loss(*direction), "ep")
        return jax.lax.pcast(jnp.stack(total), "ep", to="varying")

    along, change = np.asarray(on(mesh4, difference)(*operands))[0]
    assert abs(along) > 1e-3 and along == pytest.approx(change, rel=1e-4)


def test_a_cotangent_that_is_not_finite_reaches_its_own_row_alone(mesh4):
    """Rows of `operand` that are not sent have a gradient of zero, whatever the cotangent holds."""
    operand, output, *segments = ragged_operands(np.random.default_rng(9), RANKS, "random", (5,), "float32")
    exchange = functools.partial(xm.ragged_all_to_all, axis_name="ep")
    landed = segments[2][segments[1] > 0].min()  # the first row of some rank's result that another rank's rows land in
    sent = np.zeros(operand.shape[:2], bool)
    for rank in range(RANKS):
        for first, size in zip(segments[0][rank], segments[1][rank], strict=True):
            sent[rank, first : first + size] = True

    def pulled(bad, operand, output, *segments):
        cotangent = jnp.ones_like(output).at[bad].set(jnp.nan)
        return jax.vjp(lambda operand: exchange(operand, output, *segments), operand)[1](cotangent)[0]

    for row in (0, landed):
        by_operand = np.asarray(on(mesh4, pulled)(np.full(RANKS, row), operand, output, *segments))
        assert not by_operand[~sent].any() and np.isnan(by_operand[sent]).sum() <= RANKS * 5


# -- all_to_all --------------------------------------------------------------------------------------------------------
def both_ways(body):
    """Returns the results of `body` with the drop-in and with `jax.lax`."""
    return lambda *operands: [body(f, *operands) for f in (xm.all_to_all, jax.lax.all_to_all)]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("split", "concat", "tiled"), [(0, 1, True), (1, 0, True), (1, 0, False), (1, 1, False)])
def test_vmap_of_all_to_all(mesh4, axis, split, concat, tiled):
    entries = np.random.default_rng(0).standard_normal((RANKS, BATCH, 2 * RANKS, RANKS)).astype(np.float32)

    def body(f, x):
        return jax.vmap(lambda x: f(x, "ep", split, concat, tiled=tiled), in_axes=axis)(x)

    ours, theirs = on(mesh4, both_ways(body))(np.moveaxis(entries, 1, axis + 1))
    assert_bits(ours, theirs, "vmap of all_to_all")


def test_an_axis_of_an_enclosing_vmap():
    """No mesh at all: parts change places between the entries of the batch."""
    x = np.arange(3 * 6 * 2.0, dtype=np.float32).reshape(3, 6, 2)
    for split, concat in ((0, 0), (0, 1)):

        def body(f, x, split=split, concat=concat):
            return jax.vmap(lambda x: f(x, "batch", split, concat, tiled=True), axis_name="batch")(x)

        ours, theirs = both_ways(body)(x)
        assert_bits(ours, theirs, "all_to_all over a vmapped axis")


@pytest.mark.parametrize("names", ["batch", ("ep", "batch"), ("batch", "ep")], ids=str)
def test_an_axis_of_an_enclosing_vmap_inside_shard_map(mesh4, names):
    x = np.random.default_rng(0).standard_normal((RANKS, 2, 2 * RANKS, 3)).astype(np.float32)

    def body(f, x):
        return jax.vmap(lambda x: f(x, names, 0, 0, tiled=True), axis_name="batch")(x)

    ours, theirs = on(mesh4, both_ways(body), check_vma=False)(x)
    assert_bits(ours, theirs, "all_to_all over a vmapped axis")


def test_a_vmapped_axis_with_checks_of_varying_axes(mesh4):
    """`jax.lax.all_to_all` fails an assertion here."""
    x = np.random.default_rng(0).standard_normal((RANKS, 2, 4, 3)).astype(np.float32)

    def body(x):
        return jax.vmap(lambda x: xm.all_to_all(x, "batch", 0, 0, tiled=True), axis_name="batch")(x)

    expected = x.reshape(RANKS, 2, 2, 2, 3).swapaxes(1, 2).reshape(x.shape)
    assert_bits(on(mesh4, body)(x), expected, "all_to_all over a vmapped axis")


def test_a_ragged_exchange_over_a_vmapped_axis_is_refused():
    x, sizes = jnp.ones((2, 4, 3)), jnp.ones(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="'batch': an axis of an enclosing vmap"):
        jax.vmap(lambda x: xm.ragged_all_to_all(x, x, *[sizes] * 4, axis_name="batch"), axis_name="batch")(x)


# -- all_gather --------------------------------------------------------------------------------------------------------
def gathered_both_ways(body):
    """Returns the results of `body` with the drop-in and with `jax.lax`."""
    return lambda *operands: [body(f, *operands) for f in (xm.all_gather, jax.lax.all_gather)]


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize(("axis", "tiled"), [(0, True), (1, False), (-1, False)])
def test_vmap_of_all_gather(mesh4, dim, axis, tiled):
    entries = np.random.default_rng(0).integers(-8, 8, (RANKS, BATCH, 5, 4)).astype(np.float32)

    def body(f, x):
        def loss(x):
            out = f(x, "ep", axis=axis, tiled=tiled)
            return jnp.sum(out * out), out

        mapped = jax.vmap(lambda x: f(x, "ep", axis=axis, tiled=tiled), in_axes=dim)(x)
        return mapped, jax.vmap(jax.grad(loss, has_aux=True), in_axes=dim)(x)

    ours, theirs = on(mesh4, gathered_both_ways(body))(np.moveaxis(entries, 1, dim + 1))
    jax.tree.map(lambda a, b: assert_bits(a, b, "vmap of all_gather"), ours, theirs)


def test_all_gather_over_an_axis_of_an_enclosing_vmap(mesh4):
    x = np.random.default_rng(0).standard_normal((RANKS, 2, 3)).astype(np.float32)

    def body(f, x):
        return jax.vmap(lambda x: f(x, "batch", axis=0, tiled=True), axis_name="batch")(x)

    ours, theirs = on(mesh4, gathered_both_ways(body), check_vma=False)(x)
    assert_bits(ours, theirs, "all_gather over a vmapped axis")
    with pytest.raises(ValueError, match="knows no wire"):
        jax.vmap(lambda x: xm.all_gather(x, "batch", wire="int8"), axis_name="batch")(x)


def test_all_gather_of_trees_keys_and_nothing(mesh4):
    keys = jax.device_put(
        jax.random.split(jax.random.key(3), (RANKS, 3)), jax.NamedSharding(mesh4, P("ep"))
    )  # a scalar, an empty array and PRNG keys
    tree = {"scalar": np.arange(RANKS, dtype=np.int32), "keys": keys, "empty": np.zeros((RANKS, 2, 0, 3), np.float32)}
    out = on(mesh4, lambda tree: xm.all_gather(tree, "ep"))(tree)
    gathered = np.asarray(jax.random.key_data(out["keys"]))
    for rank in range(RANKS):
        assert_bits(np.asarray(out["scalar"])[rank], tree["scalar"], "scalars")
        assert_bits(gathered[rank], np.asarray(jax.random.key_data(keys)), "keys")
    assert out["empty"].shape == (RANKS, RANKS, 2, 0, 3)
    assert on(mesh4, lambda x: xm.all_gather(x, "ep", axis=1, tiled=True))(tree["empty"]).shape == (RANKS, 2, 0, 3)


def test_all_gather_to_a_result_that_does_not_vary(mesh4):
    x = np.arange(RANKS * 3.0, dtype=np.float32)

    def body(x):
        return xm.all_gather(x, "ep", tiled=True, to="invarying")

    out = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P()))(
        jax.device_put(x, jax.NamedSharding(mesh4, P("ep")))
    )
    assert_bits(out, x, "all_gather to='invarying'")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"axis": 2}, ValueError, "axis=2: the result has 2 dimensions"),
        ({"axis": 1, "tiled": True}, ValueError, "axis=1: x has 1 dimensions"),
        ({"axis": 0.5}, TypeError, "axis=0.5: must be an int"),
        ({"axis_index_groups": [[0, 1]]}, ValueError, "axis_index_groups="),
        ({"wire": "int4"}, ValueError, "wire='int4': must be None"),
        ({"wire": "int8", "to": "invarying"}, ValueError, "knows no wire"),
    ],
)
def test_wrong_arguments_of_all_gather(mesh4, options, error, text):
    with pytest.raises(error, match=text):
        on(mesh4, lambda x: xm.all_gather(x, "ep", **options))(np.zeros((RANKS, 4), np.float32))


def test_wrong_operands_of_gathers(mesh4):
    with pytest.raises(TypeError, match="only arrays of"):
        on(mesh4, lambda x: xm.all_gather(x, "ep", wire="int8"))(np.zeros((RANKS, 4), np.int32))
    with pytest.raises(ValueError, match="x is a scalar"):
        on(mesh4, lambda x: xm.all_gather(x, "ep", tiled=True))(np.zeros(RANKS, np.float32))
    with pytest.raises(ValueError, match=r"must be \[T, ..., H\] and \[H, N\]"):
        on(mesh4, lambda x: xm.all_gather_matmul(x, x, "ep"))(np.zeros((RANKS, 4, 3), np.float32))
    with pytest.raises(ValueError, match="Call it inside jax.shard_map"):
        xm.all_gather_matmul(jnp.zeros((4, 3)), jnp.zeros((3, 4)), "ep")


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_of_less_than_a_byte(mesh4, dtype):
    """GPUs pack them, and on the CPU XLA's own collectives lose half of an int4: here they travel as whole bytes."""
    x = (np.arange(RANKS * RANKS * 5).reshape(RANKS, RANKS, 5) % 4 - 2 * (dtype[0] != "u")).astype(np.float32)

    def both(x):
        x = x.astype(dtype)
        parts = xm.all_gather(x, "ep"), xm.all_to_all(x, "ep", 0, 0)
        assert all(part.dtype == x.dtype for part in parts)
        return [part.astype(jnp.float32) for part in parts]

    gathered, exchanged = on(mesh4, both)(x)
    np.testing.assert_array_equal(gathered, np.broadcast_to(x, (RANKS, *x.shape)))
    np.testing.assert_array_equal(exchanged, x.swapaxes(0, 1))


@pytest.mark.parametrize("rows, depth, columns", [(0, 8, 5), (3, 0, 5), (3, 8, 0)])
def test_all_gather_matmul_of_nothing(mesh4, rows, depth, columns):
    def loss(x, w):
        out = xm.all_gather_matmul(x, w, "ep")
        return jnp.sum(jnp.sin(out)), out

    x, w = np.ones((RANKS, rows, depth), np.float32), np.ones((RANKS, depth, columns), np.float32)
    (_, out), gradients = on(mesh4, jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)
    assert out.shape == (RANKS, RANKS * rows, columns) and not np.any(out)
    assert [g.shape for g in gradients] == [x.shape, w.shape] and not any(np.any(g) for g in gradients)


def test_all_gather_matmul_as_its_parts(mesh4):
    """Operands of three dimensions and of two dtypes, derivatives of both kinds, and a map over a batch."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((RANKS, 3, 2, 8)).astype(np.float32)
    w = rng.standard_normal((RANKS, BATCH, 8, 5)).astype("bfloat16")

    def body(product, x, w):
        def loss(x, w):
            return jnp.sum(jnp.sin(product(x, w)))

        one = w[0]
        tangent = jax.jvp(product, (x, one), (x + 1, one))[1]
        mapped = jax.vmap(product, in_axes=(None, 0))(x, w)
        return product(x, one), jax.grad(loss, argnums=(0, 1))(x, one), tangent, mapped

    def both(x, w):
        ours = body(lambda x, w: xm.all_gather_matmul(x, w, "ep"), x, w)
        return ours, body(lambda x, w: jnp.matmul(jax.lax.all_gather(x, "ep", tiled=True), w), x, w)

    ours, theirs = on(mesh4, both)(x, w)
    for name, mine, expected in zip(("value", "gradients", "tangent", "mapped"), ours, theirs, strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6, err_msg=name)


# -- PRNG keys ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_arrays_of_keys(mesh4, implementation):
    keys = jax.random.split(jax.random.key(7, impl=implementation), (RANKS, 2 * RANKS, 3))
    keys = jax.device_put(keys, jax.NamedSharding(mesh4, P("ep")))

    def body(keys):
        return tuple(f(keys, "ep", 0, 1, tiled=True) for f in (xm.all_to_all, jax.lax.all_to_all))

    ours, theirs = on(mesh4, body)(keys)
    assert ours.dtype == theirs.dtype == keys.dtype
    assert_bits(jax.random.key_data(ours), jax.random.key_data(theirs), "keys")

    def one_row_each(keys):
        rank = jnp.arange(RANKS, dtype=jnp.int32)
        one, landing = jnp.ones(RANKS, jnp.int32), jnp.full(RANKS, jax.lax.axis_index("ep"), jnp.int32)
        return xm.ragged_all_to_all(keys, keys, rank, one, landing, one, axis_name="ep")

    moved = jax.random.key_data(on(mesh4, one_row_each)(keys))
    given = np.asarray(jax.random.key_data(keys))
    expected = given.copy()
    expected[:, :RANKS] = given[:, :RANKS].swapaxes(0, 1)
    assert_bits(moved, expected, "keys by ragged_all_to_all")


# -- symbolic shapes ---------------------------------------------------------------------------------------------------
def exported(mesh, body, *shapes):
    sharding = jax.NamedSharding(mesh, P("ep"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    return export.export(program)(*[jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes])


def dispatch_and_combine(x, idx):
    routed = xm.dispatch(x, idx, num_experts=8, axis_name="ep")
    return xm.combine(routed.x, routed.handle)


def test_all_to_all_with_symbolic_sizes(mesh4):
    b, h = export.symbolic_shape("b, h")
    program = exported(mesh4, lambda x: xm.all_to_all(x, "ep", 0, 0, tiled=True), ((16 * b, h), jnp.float32))
    program = export.deserialize(program.serialize())
    x = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    ours = jax.jit(program.call)(jax.device_put(x, jax.NamedSharding(mesh4, P("ep"))))
    assert_bits(ours, x.reshape(4, 4, 2, 3).swapaxes(0, 1).reshape(x.shape), "exported all_to_all")


@pytest.mark.parametrize("what", ["tokens", "slots", "hidden", "rows", "gathered", "multiplied", "weights"])
def test_sizes_that_a_program_is_built_for_cannot_be_symbolic(mesh4, what):
    """XLA would crash, for good, on an exported program that broadcasts to a size that is open."""
    (b,) = export.symbolic_shape("b")
    sizes = jnp.ones(RANKS, jnp.int32)
    with pytest.raises(ValueError, match=r"has the symbolic shape \(.*b.*\): every size must be known"):
        exchange = {
            "rows": lambda x: xm.ragged_all_to_all(x, x, *[sizes] * 4, axis_name="ep"),
            "gathered": lambda x: xm.all_gather(x, "ep"),
            "multiplied": lambda x: xm.all_gather_matmul(x, jnp.ones((3, 2)), "ep"),
            "weights": lambda w: xm.all_gather_matmul(jnp.ones((2, 3)), w.T, "ep"),
        }.get(what)
        if exchange is not None:
            exported(mesh4, exchange, ((4 * b, 3), jnp.float32))
        tokens, slots, hidden = {"tokens": (4 * b, 2, 8), "slots": (16, b, 8), "hidden": (16, 2, b)}[what]
        exported(mesh4, dispatch_and_combine, ((tokens, hidden), jnp.float32), ((tokens, slots), jnp.int32))
