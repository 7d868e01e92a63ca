"""The fp8 kernels on a Hopper GPU: quantized values bit by bit, products beside float64, experts with gradients."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.cases import ROUTINGS
from xen_moe_jax.experts import hopper, hopper_float8
from xen_moe_jax.experts.grouped_matmul import warn_once
from xen_moe_jax.pallas_kernels.hopper import float8_activation, float8_quantize
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.float8_contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.float8_rows import BLOCK, Quantized, activated_rows, rows_by_weights

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.on_hopper(), reason="needs a Hopper GPU (compute capability 9.0)"
)

SWIGLU = Activation()
NUM_SMS = None
TILES = hopper_float8.TILES
CASES = {
    # group sizes, hidden size, width, tiles
    "odd": ((77, 1, 300, 130), 256, 512, TILES),
    "empty ones": ((0, 0, 513, 0, 5, 0), 384, 256, dataclasses.replace(TILES, band=8)),
    "all empty": ((0, 0, 0), 256, 128, TILES),
    "half of gpt-oss": ((40, 0, 200), 2880, 1472, TILES),
    "many small, claimed": ((3,) * 40, 128, 192, dataclasses.replace(TILES, claimed=True)),
}


def quantized(x, block=BLOCK):
    """float32 `[..., A]` -> e4m3 values `[..., A]` and scales `[..., A / block]`, by the kernels' rule in NumPy."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    finite = np.isfinite(blocks).all(-1)
    amax = np.maximum(np.abs(np.where(finite[..., None], blocks, 0)).max(-1), np.float32(2.0**-96))
    scaled = np.where(finite[..., None], blocks * (np.float32(448) / amax)[..., None], 0)
    return scaled.astype(ml_dtypes.float8_e4m3fn).reshape(x.shape), np.where(finite, amax / np.float32(448), np.nan)


def padded(x, *axes):
    return np.pad(x, [(0, -size % BLOCK if axis in axes else 0) for axis, size in enumerate(x.shape)])


def rows_of(x):
    values, scales = quantized(padded(x, 1))
    return Quantized(values, scales.T[None])


def weights_of(w):
    """`[L, A, B]` -> the quantized weights for the product, `[L, B, A]`, and for the gradient of rows, `[L, A, B]`."""
    w = padded(w, 1, 2)
    local, a, b = (*w.shape[:1], w.shape[1] // BLOCK, w.shape[2] // BLOCK)
    tiles = w.reshape(local, a, BLOCK, b, BLOCK).swapaxes(2, 3)
    values, scales = quantized(tiles.reshape(local, a, b, BLOCK * BLOCK), BLOCK * BLOCK)
    values, scales = values.reshape(tiles.shape).swapaxes(2, 3).reshape(w.shape), scales[..., 0]
    return Quantized(*(np.ascontiguousarray(m.swapaxes(1, 2)) for m in (values, scales))), Quantized(values, scales)


def columns_of(x, sizes):
    x = padded(x, 1)
    count = x.shape[0] // BLOCK + len(sizes)
    blocks, at, start = np.zeros((count, BLOCK, x.shape[1]), np.float32), 0, 0
    for size in sizes:
        for first in range(0, size, BLOCK):
            part = x[start + first : start + min(first + BLOCK, size)]
            blocks[at, : len(part)] = part
            at += 1
        start += size
    values, scales = quantized(blocks.swapaxes(1, 2))
    return Quantized(np.ascontiguousarray(values.swapaxes(0, 1)).reshape(x.shape[1], -1), scales[..., 0]), at


def wide_rows(q):
    return np.asarray(q.values, np.float64) * np.repeat(np.asarray(q.scales[0].T, np.float64), BLOCK, axis=1)


def wide_weights(q):
    scales = np.repeat(np.repeat(np.asarray(q.scales, np.float64), BLOCK, 1), BLOCK, 2)
    return (np.asarray(q.values, np.float64) * scales).swapaxes(1, 2)


@functools.cache
def operands(name):
    sizes, hidden, width, _ = CASES[name]
    used = sum(sizes)
    count = -(-(used + 40) // 8) * 8
    rng = np.random.default_rng(len(name))

    def draw(*shape, scale=1.0):
        return (rng.standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)

    x, cotangent = draw(count, hidden), draw(count, width)
    x[:used] *= np.exp(rng.standard_normal((used, 1))).astype(ml_dtypes.bfloat16)
    x[used:], cotangent[used:] = np.nan, np.nan  # unspecified
    gate, up = (draw(len(sizes), hidden, width, scale=hidden**-0.5) for _ in range(2))
    down = draw(len(sizes), width, hidden, scale=width**-0.5)
    return x, gate, up, down, cotangent, np.asarray(sizes, np.int32)


def kernels(name):
    """Returns each kernel of a case, by its name, with its operands."""
    _, hidden, width, tiles = CASES[name]
    x, gate, up, down, cotangent, sizes = operands(name)
    (gate_p, gate_g), (up_p, up_g), (down_p, _) = (weights_of(w) for w in (gate, up, down))
    rows, by = rows_of(x), rows_of(cotangent)
    columns, _ = columns_of(x, sizes)
    by_columns, _ = columns_of(cotangent, sizes)
    given = {"tiles": tiles, "num_sms": NUM_SMS}

    def chained(rows, gate, up, down, sizes):
        inner, kept = activated_rows(
            rows, (gate, up), sizes, width=width, activation=SWIGLU, projections=jnp.bfloat16, **given
        )
        return kept, rows_by_weights(((inner, down),), sizes, columns=hidden, dtype=jnp.bfloat16, **given)

    def product(rows, gate, sizes):
        return rows_by_weights(((rows, gate),), sizes, columns=width, dtype=jnp.float16, **given)

    def two(by, gate, up, sizes):
        return rows_by_weights(((by, gate), (by, up)), sizes, columns=hidden, dtype=jnp.bfloat16, **given)

    def contraction(rows, others, sizes):
        return rows_by_rows(rows, others, -(-sizes // BLOCK), height=hidden, width=width, dtype=jnp.bfloat16, **given)

    def quantizers(x, w, quantized, sizes):
        facts, blocks = float8_quantize.blocks_of_groups(sizes, x.shape[0])
        by_columns, again = (float8_quantize.columns(a, facts) for a in (x, quantized))
        of_weights = float8_quantize.weights(w, product=True, gradient=True)
        return float8_quantize.rows(x), of_weights, by_columns, again, float8_quantize.both(x, facts), blocks

    return {
        "product": (product, (rows, gate_p, sizes)),
        "chained": (chained, (rows, gate_p, up_p, down_p, sizes)),
        "two": (two, (by, gate_g, up_g, sizes)),
        "contraction": (contraction, (columns, by_columns, sizes)),
        "quantizers": (quantizers, (x, gate, rows, sizes)),
    }


@functools.cache
def results(name):
    """Returns the results of all kernels of a case, which are compiled side by side."""

    def run(case):
        function, given = case
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.tree.map(jnp.asarray, given)))

    cases = kernels(name)
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(run, cases.values()), strict=True))


def groups(sizes):
    ends = np.cumsum(sizes)
    return [(e, slice(end - size, end)) for e, (end, size) in enumerate(zip(ends, sizes, strict=True)) if size]


def assert_near(got, exact, bound, name):
    """Asserts that every element differs by at most `bound` times the largest magnitude of `exact`."""
    got, scale = np.asarray(got, np.float64), max(np.abs(exact).max(initial=0.0), 1e-6)
    np.testing.assert_allclose(got / scale, exact / scale, atol=bound, rtol=0, err_msg=name)


def by_groups(left, right, sizes):
    out = np.zeros((left.shape[0], right.shape[2]))
    for e, group in groups(sizes):
        out[group] = left[group] @ right[e]
    return out


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    sizes, hidden, width, _ = CASES[name]
    x, gate, up, down, cotangent, _ = operands(name)
    used = sum(sizes)
    (gate_p, gate_g), (up_p, up_g), (down_p, _) = (weights_of(w) for w in (gate, up, down))
    rows, by = wide_rows(rows_of(x)), wide_rows(rows_of(cotangent))
    of_gate, of_up = (by_groups(rows, wide_weights(w), sizes)[:used, :width] for w in (gate_p, up_p))
    assert_near(results(name)["product"][:used], of_gate, 2e-3, "product")
    (got_gate, got_up), out = results(name)["chained"]
    assert_near(got_gate[:used], of_gate, 5e-3, "gate")
    assert_near(got_up[:used], of_up, 5e-3, "up")
    inner = of_gate / (1 + np.exp(-of_gate)) * of_up
    quantized_inner = wide_rows(rows_of(inner.astype(np.float32)))
    expected = by_groups(quantized_inner, wide_weights(down_p), sizes)[:used, :hidden]
    assert_near(out[:used], expected, 2e-2, "down, of the quantized activation")  # a rounding of it may differ
    difference = np.linalg.norm(np.asarray(out[:used], np.float64) - expected)
    assert difference <= 8e-3 * np.linalg.norm(expected)
    expected = sum(by_groups(by, wide_weights(w).swapaxes(1, 2), sizes) for w in (_turned(gate_g), _turned(up_g)))
    assert_near(results(name)["two"][:used], expected[:used, :hidden], 5e-3, "two products")


def _turned(q):
    """Swaps the last two dimensions, so that `wide_weights` of the result gives weights as they lie, `[L, A, B]`."""
    return Quantized(q.values.swapaxes(1, 2), q.scales.swapaxes(1, 2))


@pytest.mark.parametrize("name", CASES)
def test_contraction(name):
    sizes, hidden, width, _ = CASES[name]
    x, _, _, _, cotangent, _ = operands(name)
    (left, _), (right, _) = columns_of(x, sizes), columns_of(cotangent, sizes)
    left, right = (
        np.asarray(q.values, np.float64) * np.repeat(np.asarray(q.scales, np.float64).T, BLOCK, axis=1)
        for q in (left, right)
    )
    at, exact = 0, np.zeros((len(sizes), hidden, width))
    for e, size in enumerate(sizes):
        part = slice(at, at := at + -(-size // BLOCK) * BLOCK)
        exact[e] = (left[:, part] @ right[:, part].T)[:hidden, :width]
    assert_near(results(name)["contraction"], exact, 5e-3, "contraction")


@pytest.mark.parametrize("name", CASES)
def test_quantized_bits(name):
    """Quantized values have the bits of the rule in NumPy, except at ties, since a scale may differ in its last bit."""
    sizes, hidden, width, _ = CASES[name]
    x, gate, *_ = operands(name)
    used = sum(sizes)
    rows, (product, gradient), by_columns, again, (rows_of_both, columns_of_both), blocks = results(name)["quantizers"]

    def compare(got, expected, what, elements=slice(None), scales=slice(None)):
        one, other = (np.asarray(a, np.float32)[elements] for a in (got.values, expected.values))
        assert (one != other).sum() <= 1e-4 * one.size, f"{what}: {(one != other).sum()} of {one.size} values differ"
        np.testing.assert_allclose(got.scales[scales], expected.scales[scales], rtol=3e-7, err_msg=what)

    expected = rows_of(x)
    for got in (rows, rows_of_both):
        compare(got, expected, "rows", slice(used), (slice(None), slice(None), slice(used)))
    for got, wanted, what in zip((product, gradient), weights_of(gate), ("product", "gradient"), strict=True):
        compare(got, wanted, what)
    wanted, total = columns_of(x, sizes)
    assert total == blocks.sum()
    for got in (by_columns, columns_of_both):
        compare(got, wanted, "columns", (slice(None), slice(total * BLOCK)), slice(total))
    dequantized = wide_rows(expected).astype(np.float32)
    wanted, _ = columns_of(dequantized[:, : x.shape[1]], sizes)
    compare(again, wanted, "columns of quantized rows", (slice(None), slice(total * BLOCK)), slice(total))


def test_tiles_that_are_claimed_have_the_same_bits():
    """The activation's backward pass runs so beside a pending operation, whose thread blocks keep multiprocessors."""
    sizes, width = (300, 0, 77, 1, 130), 384
    keys = jax.random.split(jax.random.key(4), 4)
    by, gate, up = (jax.random.normal(key, (sum(sizes), width), jnp.bfloat16) for key in keys[:3])
    facts, blocks = float8_quantize.blocks_of_groups(jnp.asarray(sizes, jnp.int32), sum(sizes))
    given = by, (gate, up), jax.random.uniform(keys[3], (sum(sizes),)), facts
    used = int(blocks.sum()) * BLOCK
    dealt, claimed = (float8_activation.gradients(SWIGLU, *given, claimed=claimed) for claimed in (False, True))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(dealt), jax.tree.leaves(claimed), strict=True):
        one, other = (np.asarray(array) for array in (one, other))
        if one.ndim == 3:  # scales of rows
            one, other = (array[:, :, : sum(sizes)] for array in (one, other))
        elif one.shape[0] == width:  # columns of blocks
            one, other = (array[:, :used] for array in (one, other))
        elif one.shape[1:] == (width,) and one.dtype == np.float32:  # scales of blocks
            one, other = (array[: used // BLOCK] for array in (one, other))
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), jax.tree_util.keystr(path))


def test_tokens_for_the_wire():
    """They have the bits of `xm.quantize`, with those of blocks that are not finite."""
    x = jax.random.normal(jax.random.key(2), (200, 384), jnp.bfloat16) * jnp.exp2(jnp.arange(-100.0, 100)[:, None])
    x = x.astype(jnp.bfloat16).at[3, 5].set(jnp.nan).at[77, 300].set(jnp.inf).at[9].set(0)
    got, expected = float8_quantize.rows(x, by_row=True), jax.jit(xm.quantize)(x)
    for one, other in ((got.values, expected.values), (got.scales, expected.scales)):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


def test_nan_and_infinity():
    """A NaN or infinity in a row makes NaN of that row of the product alone; in the gradient of its group's weights it
    makes NaN of the 128 rows of its block alone."""
    sizes = jnp.asarray((100, 60), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (160, 256), jnp.bfloat16).at[3, 5].set(jnp.nan).at[120, 200].set(jnp.inf)
    w = jax.random.normal(jax.random.key(1), (2, 256, 128), jnp.bfloat16) / 16

    def both(x, w):
        out, pull = jax.vjp(lambda x, w: hopper_float8.grouped_matmul(x, None, w, sizes), x, w)
        return out, pull(jnp.ones_like(out))

    out, (by_x, by_w) = jax.jit(both)(x, w)
    wrong = np.isnan(np.asarray(out, np.float32))
    assert wrong[[3, 120]].all() and not np.delete(wrong, [3, 120], 0).any()
    assert np.isfinite(np.asarray(by_x, np.float32)).all()
    # rows that were NaN when the forward pass quantized them, 128 columns of them
    wrong = np.isnan(np.asarray(by_w, np.float32))
    assert wrong[0, :128].all() and wrong[1, 128:].all() and not wrong[0, 128:].any() and not wrong[1, :128].any()


@pytest.mark.parametrize(
    ("sizes", "hidden", "width", "name"),
    [((300, 0, 77, 1, 130), 512, 384, "swiglu"), ((200, 9), 200, 72, "clipped_swiglu"), ((64, 64), 320, 448, "relu2")],
)
def test_experts_and_their_gradients(sizes, hidden, width, name):
    """Whole experts, and products one by one, are near float32 without quantization, and so are their gradients."""
    activation, used = Activation(name), sum(sizes)
    keys = iter(jax.random.split(jax.random.key(7), 8))
    count = 1 + activation.gated
    x, cotangent = (jax.random.normal(next(keys), (used + 3, hidden), jnp.bfloat16) for _ in range(2))
    first = [
        jax.random.normal(next(keys), (len(sizes), hidden, width), jnp.bfloat16) * hidden**-0.5 for _ in range(count)
    ]
    last = jax.random.normal(next(keys), (len(sizes), width, hidden), jnp.bfloat16) * width**-0.5
    given = jnp.asarray(sizes, jnp.int32)
    whole = hopper_float8.whole

    def fused(x, first, last):
        operands = whole(x, 0, 1), None, tuple(whole(w, 1, 2) for w in first), whole(last, 1, 2), given
        return hopper_float8.experts(activation, *operands)[:used, :hidden]

    def single(x, first, last):
        projections = [hopper_float8.grouped_matmul(x, None, w, given).astype(jnp.float32) for w in first]
        inner = activation(*projections).astype(x.dtype)
        return hopper_float8.grouped_matmul(inner, None, last, given)[:used]

    def loop(x, first, last):
        parts, start = [], 0
        for group, size in enumerate(sizes):
            part = x[start : start + size]
            start += size
            inner = activation(*(jnp.dot(part, w[group], precision="highest") for w in first))
            parts.append(jnp.dot(inner, last[group], precision="highest"))
        return jnp.concatenate(parts)

    def both(function, operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(cotangent[:used].astype(out.dtype))

    exact = both(loop, jax.tree.map(lambda a: a.astype(jnp.float32), (x, first, last)))
    for function in (fused, single):
        got = jax.jit(lambda *operands, function=function: both(function, operands))(x, first, last)
        for path, other in jax.tree_util.tree_leaves_with_path(exact):
            one = functools.reduce(lambda tree, key: tree[key.idx], path, got)
            one, other = (np.asarray(a, np.float64)[: None if a.ndim == 3 else used].ravel() for a in (one, other))
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert cosine > 0.997, f"{function.__name__}, {jax.tree_util.keystr(path)}: {cosine}"


@pytest.fixture(scope="module")
def layer():
    """Returns a function that computes output and gradients of `moe_mlp` on one rank, by an fp8 wire and experts in fp8
    or in bfloat16: `(in_fp8, x, idx) -> (output, (x, weights, matrices))`."""
    tokens, experts, hidden, width = 256, 8, 512, 384
    keys = iter(jax.random.split(jax.random.key(3), 8))
    x, cotangent = (jax.random.normal(next(keys), (tokens, hidden), jnp.bfloat16) for _ in range(2))
    weights, idx = jax.lax.top_k(jax.random.uniform(next(keys), (tokens, experts)), 2)
    shapes = (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)
    matrices = [jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[1] ** -0.5 for shape in shapes]
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.jit, static_argnums=0)
    def both(in_fp8, x, idx, weights, matrices):
        options = {"experts": "float8_e4m3fn", "wire": "float8_e4m3fn"} if in_fp8 else {}

        def body(x, idx, weights, matrices):
            return xm.moe_mlp(x, idx, weights, *matrices, num_experts=experts, axis_name="ep", **options)

        def layer(x, weights, matrices):
            return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, weights, matrices)

        out, pull = jax.vjp(layer, x, weights, matrices)
        return out, pull(cotangent)

    def run(in_fp8, x=x, idx=idx):
        return jax.tree.map(lambda a: np.asarray(a, np.float64), both(in_fp8, x, idx, weights, matrices))

    return run, x, idx


def assert_cosines(got, exact, least=0.996):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(exact), strict=True):
        one, other = one.ravel(), other.ravel()
        assert one.any() == other.any(), jax.tree_util.keystr(path)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other) if other.any() else 1.0
        assert cosine > least, f"{jax.tree_util.keystr(path)}: {cosine}"


@pytest.fixture(scope="module", params=[pytest.param(n, marks=getattr(pytest.mark, f"gpu{n}")) for n in (1, 2)])
def conforming(request):
    """Returns a function of a routing: value and gradients of a layer by the kernels, with weights that it quantizes
    and with codes, and by the rule in plain JAX on the reference backend."""
    ranks, tokens, experts, hidden, width = request.param, 96, 4 * request.param, 256, 192
    keys = iter(jax.random.split(jax.random.key(11), 8))
    x, cotangent = (jax.random.normal(next(keys), (ranks * tokens, hidden), jnp.bfloat16) for _ in range(2))
    weights = jax.random.uniform(next(keys), (ranks * tokens, 4))
    shapes = (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)
    matrices = [jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[1] ** -0.5 for shape in shapes]
    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))
    in_fp8 = {"experts": "float8_e4m3fn", "wire": "float8_e4m3fn", "num_experts": experts, "axis_name": "ep"}
    kernels = {"config": xm.KernelConfig(backend="cuda")}
    plain = {"config": xm.KernelConfig(backend="reference"), "grouped_matmul": "ragged_dot"}

    def compiled(options, by_codes):
        def body(x, idx, weights, matrices):
            if by_codes:
                matrices = [code.of(w) for code, w in zip(xm.quantize_weights(matrices), matrices, strict=True)]
            return xm.moe_mlp(x, idx, weights, *matrices, **in_fp8, **options)

        @jax.jit
        def both(idx):
            def layer(x, weights, matrices):
                return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, weights, matrices)

            out, pull = jax.vjp(layer, x, weights, matrices)
            return out, pull(cotangent)

        return both.lower(jax.ShapeDtypeStruct((ranks * tokens, 4), jnp.int32)).compile()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        run = list(pool.map(compiled, (kernels, kernels, plain), (False, True, False)))

    def of(routing):
        rng = np.random.default_rng(len(routing))
        idx = jnp.asarray(ROUTINGS[routing](rng, (ranks, tokens, 4), experts).reshape(-1, 4), jnp.int32)
        return [jax.tree.map(lambda a: np.asarray(a, np.float64), program(idx)) for program in run]

    return of


@pytest.mark.parametrize("routing", ROUTINGS)
def test_conformance(conforming, routing):
    """Every routing of the conformance table. Weights that are quantized once have the bits of the others."""
    by_kernels, by_codes, plain = conforming(routing)
    assert_cosines(by_kernels, plain, 0.998)
    for one, other in zip(jax.tree.leaves(by_codes), jax.tree.leaves(by_kernels), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer(layer):
    """Rows from an fp8 wire go into the kernels without being asked for: near the layer in bfloat16."""
    run, _, _ = layer
    assert_cosines(run(True), run(False))


def test_a_layer_with_all_rows_at_two_experts(layer):
    """The others have no row, and a gradient of zero."""
    run, _, idx = layer
    idx = jnp.broadcast_to(jnp.array([2, 5], idx.dtype), idx.shape)
    got, exact = run(True, idx=idx), run(False, idx=idx)
    for one, other in zip(got[1][2], exact[1][2], strict=True):
        assert not np.delete(one, [2, 5], 0).any()
        assert_cosines(one[[2, 5]], other[[2, 5]])
    assert_cosines((got[0], got[1][:2]), (exact[0], exact[1][:2]))


def test_a_layer_with_nan(layer):
    """A token with a NaN, or with an infinity, keeps it for itself: the outputs of others have the same bits."""
    run, x, _ = layer
    clean = run(True)[0]
    got = run(True, x=x.at[7, 3].set(jnp.nan).at[100, 500].set(jnp.inf))[0]
    assert np.isnan(got[[7, 100]]).all()
    np.testing.assert_array_equal(np.delete(got, [7, 100], 0), np.delete(clean, [7, 100], 0))


@pytest.mark.gpu2
def test_a_layer_in_int8():
    """Experts in int8 behind an int8 wire, on two ranks: multiplied in plain JAX, which a warning says once. Value and
    gradients are those of the reference backend."""
    experts, hidden, width = 6, 256, 192
    keys = iter(jax.random.split(jax.random.key(12), 8))
    x = jax.random.normal(next(keys), (128, hidden), jnp.bfloat16)
    weights, idx = jax.lax.top_k(jax.random.uniform(next(keys), (128, experts)), 2)
    shapes = (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)
    matrices = [jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[1] ** -0.5 for shape in shapes]
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def both(backend, dtype="int8"):
        def body(x, idx, weights, matrices):
            config = xm.KernelConfig(backend=backend)
            given = {"num_experts": experts, "axis_name": "ep", "experts": dtype, "wire": dtype, "config": config}
            return xm.moe_mlp(x, idx, weights, *matrices, **given)

        def layer(x, weights, matrices):
            return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, weights, matrices)

        out, pull = jax.vjp(layer, x, weights, matrices)
        return out, pull(x)

    def run(backend, dtype="int8"):
        return jax.tree.map(lambda a: np.asarray(a, np.float64), jax.jit(functools.partial(both, backend, dtype))())

    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="experts in int8 are multiplied in plain JAX on GPUs, slowly") as said:
        got = run("cuda")
        exact = run("reference")
    assert sum("experts in int8" in str(warning.message) for warning in said) == 1
    assert_cosines(got, exact, 0.99999)
    assert_cosines(got, run("cuda", None), 0.999)
