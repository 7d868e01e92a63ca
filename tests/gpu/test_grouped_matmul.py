"""The Hopper kernels on a Hopper GPU: outputs and gradients against float64, at groups of every kind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xen_moe_jax.experts import hopper
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import Into, activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import Tiles

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.on_hopper(), reason="needs a Hopper GPU (compute capability 9.0)"
)

GROUPS = {
    "whole tiles": (128, 256, 128, 512),
    "odd": (77, 1, 300, 130),
    "empty ones": (0, 0, 513, 0, 5, 0),
    "all empty": (0, 0, 0),
    "many small": (3,) * 40,
    "one": (1000,),
}
TILINGS = {
    "usual": Tiles(),
    "tall": hopper.TALL,
    "split n": Tiles(split="n"),
    "half as high": Tiles(m=64, split="n"),
    "half as high, claimed": Tiles(m=64, split="n", claimed=True),
    "a piece a tile": Tiles(m=64, n=128, stages=8, split="n"),
    "a piece a tile, claimed": Tiles(m=64, n=128, stages=8, split="n", claimed=True),
    "claimed": Tiles(claimed=True),
    "claimed, small": Tiles(n=128, stages=6, claimed=True),
    "fitted": Tiles(m=144, split="n", fitted=True, band=2),
    "fitted, claimed": Tiles(m=144, split="n", fitted=True, claimed=True),
    "pairs": Tiles(pair=True, band=20),
    "fitted, pairs": Tiles(m=144, split="n", fitted=True, band=20, pair=True),
}


def operands(sizes, dtype=jnp.bfloat16, extra=72, depth=256, columns=512):
    """Rows with NaN past the last group, weights, cotangents with NaN there too."""
    used = sum(sizes)
    keys = jax.random.split(jax.random.key(used), 3)
    rows = jax.random.normal(keys[0], (used + extra, depth)).at[used:].set(jnp.nan).astype(dtype)
    weights = (jax.random.normal(keys[1], (len(sizes), depth, columns)) / depth**0.5).astype(dtype)
    cotangent = jax.random.normal(keys[2], (used + extra, columns)).at[used:].set(jnp.nan).astype(dtype)
    return rows, weights, jnp.asarray(sizes, jnp.int32), cotangent


def exact(rows, weights, sizes, cotangent):
    rows, weights, cotangent = (np.asarray(a, np.float64) for a in (rows, weights, cotangent))
    out = np.zeros((rows.shape[0], weights.shape[2]))
    by_rows, by_weights = np.zeros_like(rows), np.zeros_like(weights)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        part = slice(start, start + size)
        out[part] = rows[part] @ weights[group]
        by_rows[part] = cotangent[part] @ weights[group].T
        by_weights[group] = rows[part].T @ cotangent[part]
        start += size
    return out, by_rows, by_weights, start


def check(rows, weights, sizes, cotangent, plan=None):
    def both(rows, weights, cotangent):
        out, pull = jax.vjp(lambda r, w: hopper.grouped_matmul(r, w, sizes, plan), rows, weights)
        return out, *pull(cotangent)

    got = jax.jit(both)(rows, weights, cotangent)
    *expected, used = exact(rows, weights, sizes, cotangent)
    for name, one, other in zip(("out", "rows", "weights"), got, expected, strict=True):
        one, other = (a if name == "weights" else a[:used] for a in (np.asarray(one, np.float64), other))
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, atol=0.01, err_msg=name)


@pytest.fixture(params=["dealt", "claimed"])
def tiles(request, monkeypatch):
    """Selects how tiles are assigned: fixed, as in a matmul alone, or claimed, as beside a pending operation."""
    monkeypatch.setattr(hopper, "in_overlap", lambda: request.param == "claimed")


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups, tiles):
    check(*operands(GROUPS[groups]))


@pytest.mark.parametrize("tiling", TILINGS)
def test_tilings(tiling):
    tiles = TILINGS[tiling]
    plan = hopper.Plan(tiles, tiles, Tiles() if tiles.fitted or tiles.pair else tiles)
    check(*operands((300, 0, 77, 128), depth=512), plan)
    check(*operands((1, 700, 9, 12000), depth=512), plan)


GATHERED = "usual", "half as high, claimed", "claimed, small", "tall", "fitted, claimed", "pairs", "fitted, pairs"


@pytest.mark.parametrize("tiling", GATHERED)
@pytest.mark.parametrize("groups", GROUPS)
def test_gathered_rows(groups, tiling):
    """Rows by an index: the bits of the same kernels on rows that were put in order, and of any index behind them."""
    sizes, tiles, swiglu = GROUPS[groups], TILINGS[tiling], TILINGS[tiling].n == 256
    used, tokens, hidden, width = sum(sizes), 100, 320, 512 if tiles.pair else 384
    capacity = used + 72 + -used % 8
    keys = iter(jax.random.split(jax.random.key(3), 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape).astype(jnp.bfloat16)

    x, down = draw(tokens, hidden), draw(len(sizes), width, hidden)
    gate, up = draw(len(sizes), hidden, width), draw(len(sizes), hidden, width)
    wide = draw(capacity, width).at[used:].set(jnp.nan)
    index = jax.random.randint(next(keys), (capacity,), -3, tokens + 3, jnp.int32)
    inside = (index >= 0) & (index < tokens)
    sorted_rows = jnp.where(inside[:, None], x[jnp.where(inside, index, 0)], 0)

    def kernels(rows, index):
        group_sizes = jnp.asarray(sizes, jnp.int32)
        of_rows = rows_by_weights(rows, gate, group_sizes, index=index, transposed=False, tiles=tiles)
        by_rows = rows_by_weights(rows, down, group_sizes, index=index, transposed=True, tiles=tiles)
        activated = ()
        if swiglu:
            run = functools.partial(activated_rows, activation=Activation(), projections=True, tiles=tiles)
            activated = run(rows, (gate, up), group_sizes, index=index)
        of_weights = Tiles() if tiles.fitted or tiles.pair else tiles
        left = rows_by_rows(rows, wide, group_sizes, index, gathered="rows", tiles=of_weights)
        right = rows_by_rows(wide, rows, group_sizes, index, gathered="others", tiles=of_weights)
        return [of_rows[:used], by_rows[:used], *(a[:used] for a in activated), left, right]

    for one, other in zip(jax.jit(kernels)(x, index), jax.jit(kernels)(sorted_rows, None), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))
        assert not used or one.any()


def by_groups(sizes, *arrays):
    """The slice of each group's rows, and arrays as float64."""
    starts = np.cumsum([0, *np.asarray(sizes)])
    slices = [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    return slices, *(np.asarray(a, np.float64) for a in arrays)


def exact_swiglu(rows, gate, up, sizes, row_weights, cotangent):
    """The activation, and gradients by rows, `gate`, `up` and `row_weights`."""
    parts, rows, gate, up, row_weights, cotangent = by_groups(sizes, rows, gate, up, row_weights, cotangent)
    out = np.zeros((rows.shape[0], gate.shape[2]))
    by_rows, by_gate, by_up, by_factors = (np.zeros_like(a) for a in (rows, gate, up, row_weights))
    for group, part in enumerate(parts):
        g, u = rows[part] @ gate[group], rows[part] @ up[group]
        sigmoid = 1 / (1 + np.exp(-g))
        out[part] = g * sigmoid * u
        by_factors[part] = (out[part] * cotangent[part]).sum(-1)
        out[part] *= row_weights[part, None]
        by_out = cotangent[part] * row_weights[part, None]
        by_g, by_u = by_out * u * sigmoid * (1 + g * (1 - sigmoid)), by_out * g * sigmoid
        by_rows[part] = by_g @ gate[group].T + by_u @ up[group].T
        by_gate[group], by_up[group] = rows[part].T @ by_g, rows[part].T @ by_u
    return out, by_rows, by_gate, by_up, by_factors


def compare(names, got, expected, used):
    for name, one, other in zip(names, got, expected, strict=True):
        one, other = (a if name in ("gate", "up") else a[:used] for a in (np.asarray(one, np.float64), other))
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, atol=0.01, err_msg=name)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_swiglu_and_its_gradients(groups, weighted, tiles):
    """Stored with the projections (for the gradients) and without them: the same bits."""
    rows, gate, sizes, cotangent = operands(GROUPS[groups])
    up = gate[:, ::-1] * 1.5
    used = int(sizes.sum())
    factors = jax.random.uniform(jax.random.key(9), rows.shape[:1]).at[used:].set(jnp.nan)

    def activation(rows, gate, up, factors):
        return hopper.activated(rows, (gate, up), sizes, None, factors if weighted else None)

    def both(rows, gate, up, factors, cotangent):
        out, pull = jax.vjp(activation, rows, gate, up, factors)
        return out, *pull(cotangent)

    got = jax.jit(both)(rows, gate, up, factors, cotangent)
    expected = exact_swiglu(rows, gate, up, sizes, factors if weighted else jnp.ones_like(factors), cotangent)
    names = ("out", "rows", "gate", "up", "factors")
    compare(names[: 4 + weighted], got[: 4 + weighted], expected[: 4 + weighted], used)
    alone = jax.jit(activation)(rows, gate, up, factors)
    np.testing.assert_array_equal(np.asarray(alone[:used]).view(np.uint16), np.asarray(got[0][:used]).view(np.uint16))


SHAPES = {
    "gpt-oss": (2880, 2880),
    "half of gpt-oss": (2880, 1440),
    "padded": (2888, 40),
    "narrow": (16, 48),
    "Qwen3-30B": (2048, 768),
    "wide": (512, 4864),
}
"""Hidden size and width; "padded" and "narrow" are no multiples of 32, and some of their sizes are below 128."""


CASES = [
    ("gpt-oss", "clipped_swiglu", True),
    ("gpt-oss", "swiglu", False),
    ("half of gpt-oss", "geglu", True),
    ("half of gpt-oss", "relu2", False),
    ("padded", "swiglu", True),
    ("padded", "gelu", False),
    ("narrow", "clipped_swiglu", False),
    ("narrow", "relu2", True),
    ("Qwen3-30B", "gelu", True),
    ("Qwen3-30B", "swiglu", False),
    ("wide", "geglu", False),
    ("wide", "swiglu", True),
]
"""Shape, activation and whether there are biases: every shape twice, every activation with biases and without."""


@pytest.mark.parametrize(("shape", "name", "biased"), CASES)
def test_experts_of_every_shape(shape, name, biased):
    """Both matmuls of an expert with its activation: outputs and all gradients beside a float32 loop over groups."""
    sizes = (77, 0, 1, 130, 300)
    used, (hidden, width) = sum(sizes), SHAPES[shape]
    activation = Activation(name)
    keys = iter(jax.random.split(jax.random.key(7), 12))

    def draw(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    count = 1 + activation.gated
    rows, cotangent = draw(used + 8, hidden).at[used:].set(jnp.nan), draw(used + 8, hidden)
    weights = [draw(len(sizes), hidden, width, scale=hidden**-0.5) for _ in range(count)]
    down = draw(len(sizes), width, hidden, scale=width**-0.5)
    biases = [draw(len(sizes), width) for _ in range(count)] + [draw(len(sizes), hidden)] if biased else []
    factors = jax.random.uniform(next(keys), (used + 8,), minval=0.1)

    def kernels(rows, weights, down, biases, factors):
        given = jnp.asarray(sizes, jnp.int32)
        inner = hopper.activated(
            rows, tuple(weights), given, tuple(biases[:-1]) or None, factors, activation=activation
        )
        outer = {"bias": biases[-1], "row_weights": factors} if biases else {}
        return hopper.grouped_matmul(inner, down, given, **outer)[:used]

    def loop(rows, weights, down, biases, factors):
        parts, start = [], 0
        for group, size in enumerate(sizes):
            part = slice(start, start + size)
            start += size
            projections = [jnp.dot(rows[part], w[group], precision="highest") for w in weights]
            if biases:
                projections = [p + b[group] for p, b in zip(projections, biases, strict=False)]
            inner = activation(*projections) * factors[part, None]
            out = jnp.dot(inner, down[group], precision="highest")
            parts.append(out + (biases[-1][group] * factors[part, None] if biases else 0))
        return jnp.concatenate(parts)

    def both(function, operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(cotangent[:used].astype(out.dtype))

    got = jax.jit(lambda *operands: both(kernels, operands))(rows, weights, down, biases, factors)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (rows, weights, down, biases, factors))
    expected = jax.jit(lambda *operands: both(loop, operands))(*exact)
    for path, other in jax.tree_util.tree_leaves_with_path(expected):
        one = functools.reduce(lambda tree, key: tree[key.idx], path, got)
        one, other = (np.asarray(a, np.float32)[:used] for a in (one, other))
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, atol=0.02, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("tiling", ["usual", "split n", "half as high", "half as high, claimed", "fitted", "pairs"])
def test_tilings_of_swiglu(tiling, monkeypatch):
    monkeypatch.setattr(hopper, "GATED", TILINGS[tiling])
    monkeypatch.setattr(hopper, "in_overlap", lambda: TILINGS[tiling].claimed)  # or the plan would not claim
    rows, gate, sizes, cotangent = operands((1, 700, 9, 3000), depth=512)
    used = int(sizes.sum())
    factors = jax.random.uniform(jax.random.key(9), rows.shape[:1])
    got = jax.jit(lambda r, *weights: hopper.activated(r, weights, sizes, None, factors))(rows, gate, gate[:, ::-1])
    expected = exact_swiglu(rows, gate, gate[:, ::-1], sizes, factors, cotangent)[0]
    compare(("out",), (got,), (expected,), used)


@pytest.mark.parametrize("tiling", ["half as high", "a piece a tile", "a piece a tile, claimed", "claimed, small"])
def test_many_short_tiles_have_the_bits_of_few_long_ones(tiling):
    """A tile of two steps is stored when the one before may still be on its way, from the same buffer."""
    rows, weights, sizes, _ = operands((16, 9, 23) * 21, depth=128, columns=7168)
    used = int(sizes.sum())

    @functools.partial(jax.jit, static_argnums=2)
    def run(rows, weights, tiles):
        return rows_by_weights(rows, weights, sizes, transposed=False, tiles=tiles)[:used]

    for factor in range(1, 13):  # other numbers each time, and these tiles first: an old result would show
        got, expected = (np.asarray(run(rows * factor, weights, t)) for t in (TILINGS[tiling], Tiles()))
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("band", [1, 4, 20])
@pytest.mark.parametrize("sizes", [(300, 0, 77, 128, 1100, 603), (1, 2, 5), (128,) * 5, (0, 0)])
def test_pairs_of_blocks_have_the_bits_of_single_ones(sizes, band):
    """Bands of even and odd heights, whose turn has other weights for each block, and tiles without a partner below."""
    rows, gate, group_sizes, cotangent = operands(sizes, depth=512, columns=1024)
    used, up, also = sum(sizes), gate[:, ::-1], (-cotangent, gate[:, :, ::-1])

    @functools.partial(jax.jit, static_argnums=0)
    def run(pair, factor):
        tiles = Tiles(band=band, pair=pair)
        product = functools.partial(rows_by_weights, group_sizes=group_sizes, tiles=tiles)
        inner = activated_rows(
            rows * factor, (gate, up), group_sizes, activation=Activation(), projections=True, tiles=tiles
        )
        both = product(cotangent * factor, gate, also=also, transposed=True)
        return [array[:used] for array in (*inner, product(rows * factor, gate, transposed=False), both)]

    for factor in range(1, 4):
        for one, other in zip(run(True, factor), run(False, factor), strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))
            assert not used or np.asarray(one).any()


def test_float16_and_rows_that_are_no_multiple_of_eight():
    check(*operands((77, 13, 256), jnp.float16, extra=3))


def test_the_same_bits_again(tiles):
    rows, weights, sizes, _ = operands((2000, 1, 700, 33), extra=0, depth=512)
    run = jax.jit(lambda *given: hopper.grouped_matmul(*given))  # traced for these tiles, not taken from the other case
    first = np.asarray(run(rows, weights, sizes)).view(np.uint16)
    for _ in range(20):
        run(-rows, weights, sizes).block_until_ready()  # or memory would hold these bits already
        np.testing.assert_array_equal(np.asarray(run(rows, weights, sizes)).view(np.uint16), first)


def test_what_it_does_not_support_is_an_error():
    rows, weights, sizes, _ = operands((77, 13))
    with pytest.raises(ValueError, match="grouped_matmul='hopper'.*use 'auto'"):
        hopper.grouped_matmul(rows.astype(jnp.float32), weights.astype(jnp.float32), sizes)


@pytest.mark.parametrize("rows_a_group", [None, 200], ids=["many rows", "fitted"])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_some_groups_alone_have_the_bits_of_all(first, rows_a_group, tiles):
    """Groups from a row on, whose results go into arrays with other rows: as a round of lent weights."""
    sizes = (300, 0, 77, 513, 5)
    rows, weights, all_sizes, cotangent = operands(sizes, extra=81)
    up, plan, some = weights[:, ::-1], hopper.plan(256, 512, rows_a_group), slice(first, first + 2)
    start, count = sum(sizes[:first]), all_sizes[some]
    end, first_row = start + sum(sizes[some]), jnp.int32(start)

    def into(*like):
        return Into([jnp.full((len(rows), columns), 7, rows.dtype) for columns in like], first_row)

    gated = {"activation": Activation(), "projections": True, "tiles": plan.gated}
    pairs = [
        (
            rows_by_weights(rows, weights, all_sizes, transposed=False, tiles=plan.forward),
            rows_by_weights(rows, weights[some], count, into=into(512), transposed=False, tiles=plan.forward),
        ),
        (
            rows_by_weights(cotangent, weights, all_sizes, transposed=True, tiles=plan.rows),
            rows_by_weights(cotangent, weights[some], count, into=into(256), transposed=True, tiles=plan.rows),
        ),
        *zip(
            activated_rows(rows, (weights, up), all_sizes, **gated),
            activated_rows(rows, (weights[some], up[some]), count, into=into(512, 512, 512), **gated),
            strict=True,
        ),
    ]
    for whole, part in pairs:
        whole, part = (np.asarray(a, np.float32) for a in (whole, part))
        np.testing.assert_array_equal(part[start:end], whole[start:end])
        assert (part[:start] == 7).all() and (part[end:] == 7).all()
    by_weights = rows_by_rows(rows, cotangent, all_sizes, tiles=plan.weights)
    of_some = rows_by_rows(rows, cotangent, count, first_row=first_row, tiles=plan.weights)
    np.testing.assert_array_equal(np.asarray(of_some, np.float32), np.asarray(by_weights[some], np.float32))
