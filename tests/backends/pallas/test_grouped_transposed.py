"""The kernels of grouped matmuls and of their gradients in interpret mode, and the layer that has them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax._config import RowsInHalves
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts import combined, grouped_matmul, mlp, on_tpu
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.grouped_by_weight import WeightTiles, grouped_by_weight
from xen_moe_jax.pallas_kernels.grouped_transposed import (
    Tiles,
    Window,
    activation_gradients,
    grouped_products,
    grouped_transposed,
    pieces_of,
)
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import Record

SIZES = {
    "experts that share tiles, one without rows": (100, 0, 156, 128, 70),
    "no rows at all": (0, 0, 0),
    "every row": (128, 256, 128),
    "pieces that would end behind their tile": (250, 20, 242),
    "few rows": (1, 0, 2, 0),
    "the last experts have none": (0, 40, 0, 0),
}
KINDS = ("experts that share tiles, one without rows", "no rows at all", "pieces that would end behind their tile")
ROWS, DEPTH = 512, 256
KERNELS = {"grouped_products", "grouped_transposed", "grouped_by_weight", "activation_gradients"}
INTERPRETED = xm.KernelConfig(backend="pallas", interpret=True)


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    with interpreter.clean(capfd):
        yield


def whole_numbers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def launch(mode):
    return Launch(1, interpret=pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True))


def rounded(values, dtype):
    """Returns values rounded to `dtype`, as float32."""
    return np.asarray(jnp.asarray(values, dtype), np.float32)


def assert_values(found, expected, dtype, name):
    assert found.dtype == dtype
    assert_bits(np.asarray(found, np.float32), rounded(expected, dtype), name)


STEPS = {"two steps": Tiles(256, 128, 128, 64), "one step": Tiles(128, 128, 256, 32)}


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(SIZES, 1))
@pytest.mark.parametrize("steps", STEPS)
def test_cotangents_times_transposed_weights(steps, name, dtype, mode):
    """Two pairs are added up; a width that tiles do not divide; what lies past the last group is zero."""
    rng, sizes, width = np.random.default_rng(0), SIZES[name], 200
    cotangents = [whole_numbers(rng, ROWS, DEPTH) for _ in range(2)]
    weights = [whole_numbers(rng, len(sizes), width, DEPTH) for _ in range(2)]
    expected = np.zeros((ROWS, width), np.float32)
    for e, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        for cotangent, weight in zip(cotangents, weights, strict=True):
            expected[end - size : end] += cotangent[end - size : end] @ weight[e].T
    for cotangent in cotangents:
        cotangent[sum(sizes) :] = np.nan
    out = jax.jit(functools.partial(grouped_transposed, tiles=STEPS[steps], launch=launch(mode)))(
        [jnp.asarray(a, dtype) for a in cotangents],
        [jnp.asarray(w, dtype) for w in weights],
        jnp.asarray(sizes, jnp.int32),
    )
    assert not interpreter.races_found(out)
    assert_values(out, expected, dtype, name)


@pytest.mark.parametrize(("tile", "piece", "apart"), [(256, 64, 16), (512, 128, 32), (128, 128, 128), (128, 32, 16)])
def test_pieces_have_the_rows_of_an_expert_and_few_more(tile, piece, apart):
    """Counted from the multiple of 16 rows at or before an expert's first row, the pieces have the least rows, of all
    sums of whole and longer pieces, that reach the expert's last row."""
    begin, end = (a.astype(np.int32) for a in np.triu_indices(tile + 1, 1))
    tiles = Tiles(tile, 128, 128, piece)
    first, count, more = (np.asarray(a) for a in pieces_of(begin, end, tiles))
    longer = np.array([0, *tiles.longer])
    size = count * piece + longer[more]
    assert (first >= 0).all() and not (first % 16).any() and (first + size <= tile).all()
    assert (first <= begin).all() and (first + size >= end).all()
    least = np.maximum(-(-(end - begin // 16 * 16) // apart) * apart, piece)
    assert (size == least).all() and set(more) == set(range(len(longer)))


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(KINDS, 1))
@pytest.mark.parametrize("steps", STEPS)
def test_products_and_their_activation(steps, name, dtype, mode):
    """Rows past the last group reach no row of a group; a width that tiles do not divide."""
    rng, sizes, width = np.random.default_rng(3), SIZES[name], 200
    used = sum(sizes)
    rows = whole_numbers(rng, ROWS, DEPTH)
    weights = [whole_numbers(rng, len(sizes), DEPTH, width) for _ in range(2)]
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = [np.einsum("ca,cab->cb", rows[:used], weight[group]) for weight in weights]
    rows[used:] = np.nan
    given = jnp.asarray(rows, dtype), [jnp.asarray(w, dtype) for w in weights], jnp.asarray(sizes, jnp.int32)
    run = functools.partial(grouped_products, activation=Activation("relu2"), tiles=STEPS[steps], launch=launch(mode))
    one, *_ = jax.jit(lambda rows, weights, sizes: run(rows, weights[1:], sizes, keep=False))(*given)
    assert not interpreter.races_found(one)
    assert_values(one[:used], np.square(np.maximum(rounded(expected[1], dtype), 0)), dtype, name)
    both = jax.jit(functools.partial(grouped_products, tiles=STEPS[steps], launch=launch(mode)))(*given)
    assert not interpreter.races_found(both)
    for value, wanted in zip(both, expected, strict=True):
        assert_values(value[:used], wanted, dtype, name)


@pytest.mark.parametrize(("name", "mode"), list(zip(KINDS, ("on_wait", "eager", "eager"), strict=True)))
def test_products_in_halves_are_products(name, mode):
    """Sums of more than 256 are not whole numbers in bfloat16: each half is rounded to the nearest even one."""
    rng, sizes = np.random.default_rng(6), SIZES[name]
    rows = jnp.asarray(rng.integers(-15, 16, (ROWS, DEPTH)), jnp.bfloat16)
    weight = jnp.asarray(rng.integers(-15, 16, (len(sizes), DEPTH, 256)), jnp.bfloat16)
    given = rows.at[sum(sizes) :].set(jnp.nan), weight, jnp.asarray(sizes, jnp.int32)
    run = functools.partial(grouped_products, halves=True, tiles=Tiles(256, 128, DEPTH, 64), launch=launch(mode))
    out = jax.jit(lambda rows, weight, sizes: run(rows, [weight], sizes)[0].reshape(ROWS, 256))(*given)
    assert not interpreter.races_found(out)
    group = np.repeat(np.arange(len(sizes)), sizes)
    exact = np.einsum("ca,cab->cb", np.asarray(rows, np.float32)[: sum(sizes)], np.asarray(weight, np.float32)[group])
    expected = np.asarray(jnp.asarray(exact, jnp.bfloat16))
    rounded = expected.astype(np.float32)
    assert not exact.size or ((rounded > exact).any() and (rounded < exact).any())
    assert_bits(np.asarray(out)[: sum(sizes)], expected, name)


@pytest.mark.parametrize(("depth", "mode"), [(64, "eager"), (128, "on_wait")], ids=["two steps", "one step"])
def test_gradients_by_rows_in_halves_are_those_by_whole_rows(depth, mode):
    """Two pairs are added up in both halves; experts with no row, one row and shared tiles; zeros past the last."""
    rng, rows, width, sizes = np.random.default_rng(8), 128, 512, (37, 0, 1, 33)
    cotangents = [rng.standard_normal((rows, 128)) for _ in range(2)]
    weights = [jnp.asarray(rng.standard_normal((len(sizes), width, 128)), jnp.bfloat16) for _ in range(2)]
    for cotangent in cotangents:
        cotangent[sum(sizes) :] = np.nan
    given = [jnp.asarray(cotangent, jnp.bfloat16) for cotangent in cotangents], weights, jnp.asarray(sizes, jnp.int32)
    run = functools.partial(grouped_transposed, tiles=Tiles(64, 128, depth, 32), launch=launch(mode))
    found = jax.jit(functools.partial(run, halves=True))(*given)
    assert found.shape == (2 * rows, width // 2) and not interpreter.races_found(found)
    expected = np.asarray(jax.jit(run)(*given))
    assert expected[: sum(sizes)].all() and not expected[sum(sizes) :].any()
    assert_bits(np.asarray(found).reshape(rows, width), expected, str(depth))


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(KINDS, 1))
def test_gradients_by_a_weight(name, dtype, mode):
    """Memory past the last group is not a number in both operands."""
    rng, sizes, width = np.random.default_rng(4), SIZES[name], 128
    rows, cotangents = whole_numbers(rng, ROWS, DEPTH), whole_numbers(rng, ROWS, width)
    expected = np.zeros((len(sizes), DEPTH, width), np.float32)
    for e, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        expected[e] = rows[end - size : end].T @ cotangents[end - size : end]
    for array in (rows, cotangents):
        array[sum(sizes) :] = np.nan
    given = jnp.asarray(rows, dtype), jnp.asarray(cotangents, dtype), jnp.asarray(sizes, jnp.int32)
    run = functools.partial(grouped_by_weight, tiles=WeightTiles(256, 128, 128, 64), launch=launch(mode))
    (out,) = jax.jit(run)(*given)
    assert not interpreter.races_found(out)
    assert_values(out, expected, dtype, name)


@pytest.mark.parametrize(("name", "mode"), [(name, ("eager", "on_wait")[n % 2]) for n, name in enumerate(SIZES)])
def test_gradients_by_a_weight_in_windows_have_the_bits_of_one_call(name, mode):
    rng, sizes = np.random.default_rng(6), jnp.array(SIZES[name], jnp.int32)
    drawn = [jnp.asarray(rng.standard_normal((ROWS, width)), jnp.float32) for width in (256, 128)]

    @functools.partial(jax.jit, static_argnums=0)
    def run(cut, rows, cotangents, sizes):
        found = []
        for begin, end in itertools.pairwise(cut):
            window = Window(begin, end - begin, ROWS, dict(enumerate(found)))
            found = grouped_by_weight(
                *(a[begin:end] for a in (rows, cotangents)),
                sizes,
                tiles=WeightTiles(128, 128, 128, 64),
                launch=launch(mode),
                window=window if len(cut) > 2 else None,
            )
        return found[0]

    cut = (0, 128, 256, 512) if name == "few rows" else (0, 128, 384, 512)
    assert_bits(np.asarray(run(cut, *drawn, sizes)), np.asarray(run((0, ROWS), *drawn, sizes)), name)


@pytest.mark.parametrize("name", KINDS[:2])
@pytest.mark.parametrize(("activation", "mode"), [("swiglu", "eager"), ("relu2", "on_wait")])
def test_gradients_through_an_activation(name, activation, mode):
    """The kernel computes the gradients of `(f * a(gate, up)) @ weight`. Rows past the last group reach no result, and
    their gradients are zero."""
    rng, sizes, width, depth = np.random.default_rng(1), SIZES[name], 256, 128
    activation = Activation(activation)
    used = np.arange(ROWS) < sum(sizes)
    group = np.repeat(np.arange(len(sizes)), sizes)
    cotangent = whole_numbers(rng, ROWS, depth)
    weight = whole_numbers(rng, len(sizes), width, depth)
    projections = [rng.standard_normal((ROWS, width)).astype(np.float32) for _ in range(1 + activation.gated)]
    factors = rng.random(ROWS).astype(np.float32)

    def inner(projections, factors):
        return factors[:, None] * activation(*projections)

    by_inner = np.zeros((ROWS, width), np.float32)
    by_inner[used] = np.einsum("ca,cba->cb", cotangent[used], weight[group])
    expected, pull = jax.vjp(inner, projections, factors)
    by_projections, by_factors = pull(jnp.asarray(by_inner))
    for array in (cotangent, factors, *projections):
        array[~used] = np.nan
    tiles = Tiles(256, 128, 64, 64)
    run = functools.partial(activation_gradients, activation=activation, tiles=tiles, launch=launch(mode))
    given = jax.tree.map(jnp.asarray, (cotangent, weight, projections, factors, np.asarray(sizes, np.int32)))
    *found, weighted, of_factors = jax.jit(run)(*given)
    assert not interpreter.races_found(weighted)
    of_factors = on_tpu.summed_factors(of_factors)
    for value, wanted in [(weighted, expected), (of_factors, by_factors), *zip(found, by_projections, strict=True)]:
        value, wanted = np.asarray(value), np.where(used.reshape(-1, *[1] * (value.ndim - 1)), wanted, 0)
        assert np.abs(value - wanted).max() <= 1e-6 * max(np.abs(wanted).max(), 1)
        assert not value[~used].any()


def chosen(rows, weights, axis_names=frozenset(("ep", "dp"))):
    """Returns True if the kernels multiply operands of these shapes on a mesh with these manual axes."""
    mesh = jax.make_mesh((2, 1), ("ep", "dp"), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = []

    def traced(rows, weights):
        found.append(grouped_matmul.by_pallas("auto", rows, weights))
        return rows

    shapes = (jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) for a in (rows, weights))
    specs = {"in_specs": P("ep"), "out_specs": P("ep"), "axis_names": set(axis_names)}
    jax.eval_shape(jax.jit(jax.shard_map(traced, mesh=mesh, **specs)), *shapes)
    return found[0]


@pytest.fixture
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "platform", lambda: "tpu")
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    grouped_matmul.warn_once.cache_clear()


def test_what_leaves_the_kernels_says_so_once(on_a_tpu):
    """With the shapes, the reason and the remedy. Operands that the kernels take, and no rows at all, say nothing."""
    rows, weights = jnp.zeros((128, 256)), jnp.zeros((2, 256, 128))
    says = {
        r"float32\[100, 256\] by float32\[2, 256, 192\] leaves .*: C=100 and B=192: choose .* multiples of 128": (
            jnp.zeros((100, 256)),
            jnp.zeros((2, 256, 192)),
        ),
        "float16 and weights float16: both must be of one dtype, bfloat16 or float32": (
            rows.astype("float16"),
            weights.astype("float16"),
        ),
    }
    for message, operands in says.items():
        with pytest.warns(UserWarning, match=message):
            assert not chosen(*operands)
    with pytest.warns(UserWarning, match=r"mesh axes \['dp'\] are automatic here.*leave axis_names out"):
        assert not chosen(rows, weights, {"ep"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(rows, weights) and not chosen(rows[:0], weights)
        for operands in says.values():
            assert not chosen(*operands)  # said already


def test_a_mesh_of_cpus_beside_a_tpu_has_no_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chosen(jnp.zeros((128, 256)), jnp.zeros((2, 256, 128)))


def test_tiles_fit_and_divide():
    """Tiles of the presets' layers, and of widths that few numbers divide, fit VMEM, on v4 with 16 MiB, too."""
    for limit, (rows, depth, width), operands, results in itertools.product(
        (16 * 2**20, 64 * 2**20, 128 * 2**20),
        ((40960, 7168, 2048), (40960, 2048, 7168), (128, 128, 128), (384, 2944, 1152)),
        ((1, 1), (2, 1), (2, 2)),
        (1, 5),
    ):
        tiles = on_tpu.tiles_for(limit, rows, depth, width, *operands, 2, 64, results)
        assert rows % tiles.rows == width % tiles.columns == depth % tiles.depth == tiles.rows % tiles.piece == 0
        assert tiles.vmem_bytes(*operands, 2, results) <= limit * 3 // 4
        assert operands[0] * tiles.columns * tiles.depth <= on_tpu.STEP
        shared = on_tpu.tiles_for(limit, rows, depth, width, *operands, 2, 64, results, cores=2)
        assert width // shared.columns % 2 == 0 or width // 128 % 2 == 1
        if operands == (1, 1) and results == 1:
            for piece, cores in ((128, 1), (128, 2), (256, 2)):
                if rows % piece:
                    continue
                of_weight = on_tpu.weight_tiles_for(limit, rows, depth, width, 2, piece, cores)
                assert rows % of_weight.rows == of_weight.rows % piece == 0
                assert depth % of_weight.above == width % of_weight.columns == 0
                assert of_weight.vmem_bytes(2) <= limit * 3 // 4
                assert depth // of_weight.above % cores == 0 or depth // 128 % 2 == 1


@pytest.mark.parametrize("changes", [{}, {"activation": "relu2"}, {"apply_weights_to": "input"}], ids=str)
def test_a_layer_has_the_gradients_of_ragged_dot(changes, monkeypatch, on_a_tpu):
    """On a TPU without tokamax, to the rounding of sums."""
    monkeypatch.setattr(on_tpu, "DEFAULT", INTERPRETED)
    rng, ranks, tokens, hidden, width = np.random.default_rng(2), 2, 32, 128, 128
    gated = "activation" not in changes
    experts, top_k = 4, 2
    x = jnp.asarray(rng.standard_normal((ranks * tokens, hidden)), jnp.float32)
    idx = jnp.asarray(np.argsort(rng.random((ranks * tokens, experts)), axis=1)[:, :top_k], jnp.int32)
    factors = jnp.asarray(rng.random(idx.shape), jnp.float32)
    shapes = [(hidden, width)] * (1 + gated) + [(width, hidden)]
    weights = [jnp.asarray(rng.standard_normal((experts, *shape)) / 8, jnp.float32) for shape in shapes]
    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))

    started = []
    monkeypatch.setattr(
        combined, "combine_start", lambda *rows, **options: started.append(1) or xm.combine_start(*rows, **options)
    )

    def run(grouped_matmul):
        started.clear()

        def layer(x, idx, factors, weights):
            matrices = weights if gated else [None, *weights]
            return xm.moe_mlp(
                x, idx, factors, *matrices, num_experts=experts, axis_name="ep", capacity=128,
                grouped_matmul=grouped_matmul, config=xm.KernelConfig(mode="throughput"), **changes,
            )  # fmt: skip

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)

        def loss(x, factors, weights):
            y = mapped(x, idx, factors, weights)
            return jnp.sum(y * jnp.cos(y)), y

        program = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        jaxpr = str(jax.make_jaxpr(program)(x, factors, weights))
        for kernel in ("grouped_products", "grouped_transposed", "grouped_by_weight"):
            assert (kernel in jaxpr) == (grouped_matmul == "auto")
        assert ("ragged_dot" in jaxpr) == (grouped_matmul == "ragged_dot")
        if grouped_matmul == "auto":
            with pytest.raises(NotImplementedError, match="second derivative .* or a TPU.*ragged_dot"):
                first = jax.grad(lambda x: loss(x, factors, weights)[0])
                jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x))), x)
        weighted = grouped_matmul == "auto" and "apply_weights_to" not in changes
        # where it is true, the gradient of the rows goes home by a start and a done
        assert ("activation_gradients" in jaxpr) == weighted == bool(started)
        return jax.jit(program)(x, factors, weights)

    (_, y), gradients = run("auto")
    (_, expected), expected_gradients = run("ragged_dot")

    def assert_close(value, wanted):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()

    jax.tree.map(assert_close, (y, gradients), (expected, expected_gradients))


@pytest.mark.parametrize("cores", [1, 2])
def test_bfloat16_has_the_bits_of_dispatch_experts_and_combine(cores, monkeypatch, on_a_tpu):
    """The activation is rounded once in both. Two cores share the tiles of columns."""
    monkeypatch.setattr(on_tpu, "DEFAULT", INTERPRETED)
    monkeypatch.setattr(hardware, "SMALLEST", dataclasses.replace(hardware.SMALLEST, cores=cores))
    rng, tokens, hidden, width, experts, top_k = np.random.default_rng(5), 64, 256, 256, 3, 2
    drawn = [(tokens, hidden), (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)]
    x, *weights = (jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.bfloat16) for shape in drawn)
    idx = jnp.asarray(np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k], jnp.int32)
    factors = jnp.asarray(rng.random(idx.shape), jnp.float32)
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    routing = {"num_experts": experts, "axis_name": "ep", "capacity": 128}

    def both(x, idx, factors, weights):
        by_name = dict(zip(("gate", "up", "down"), weights, strict=True))
        routed = xm.dispatch(x, idx, factors, **routing)
        y = mlp.grouped_experts(ExpertFunction(), routed.x, routed.group_sizes, by_name)
        return xm.moe_mlp(x, idx, factors, *weights, **routing), xm.combine(y, routed.handle, weighted=True)

    mapped = jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    got, expected = jax.jit(mapped)(x, idx, factors, weights)
    assert np.asarray(expected, np.float32).any()
    assert_bits(np.asarray(got), np.asarray(expected), "moe_mlp")


@pytest.mark.parametrize(("mode", "weighted"), [("eager", True), ("on_wait", False)])
def test_a_combine_of_rows_in_halves(mode, weighted, monkeypatch):
    """A combine in halves has the bits of the reference, which reads whole rows."""
    monkeypatch.setattr(hardware, "HALVES", (hardware.SMALLEST.name,))
    rng, tokens, hidden, experts, top_k = np.random.default_rng(7), 8, 256, 3, 2
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    idx = jnp.asarray(np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k], jnp.int32)
    factors = jnp.asarray(2.0 ** rng.integers(-3, 1, idx.shape), jnp.float32)  # no product with them is rounded
    interpreted = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    halves = RowsInHalves(backend="pallas", mode="throughput", interpret=interpreted)

    def both(x, idx, factors):
        routed = xm.dispatch(x, idx, factors, num_experts=experts, axis_name="ep", capacity=16)
        return [xm.combine(routed.x, routed.handle, weighted=weighted, config=config) for config in (halves, None)]

    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    found, expected = jax.jit(mapped)(x, idx, factors)
    assert not interpreter.races_found(found)
    assert np.asarray(expected, np.float32).any()
    assert_bits(np.asarray(found), np.asarray(expected), mode)


def test_both_combines_of_a_layer_read_rows_in_halves(monkeypatch, on_a_tpu):
    """In bfloat16 the combine of the outputs and that of the rows' gradient do, as a start, too, which several ranks
    have in its place; in float32 neither does. Their VMEM is counted alike."""
    read, reduce_slots = [], slots_kernel.reduce_slots
    counted, vmem_bytes = set(), slots_kernel.vmem_bytes

    def recorded(*operands, **options):
        read.append((options["halved"], options["axes"] is None))
        return reduce_slots(*operands, **options)

    def recorded_bytes(*operands, halved):
        counted.add(halved)
        return vmem_bytes(*operands, halved=halved)

    monkeypatch.setattr(slots_kernel, "reduce_slots", recorded)
    monkeypatch.setattr(slots_kernel, "vmem_bytes", recorded_bytes)
    monkeypatch.setattr(hardware, "HALVES", (hardware.SMALLEST.name,))
    config = xm.KernelConfig(backend="pallas", mode="throughput")

    def lowered(dtype, ranks):
        axis = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=axis)
        experts, tokens = 3 * ranks, 16 * ranks

        def layer(x, idx, factors, weights):
            options = {"num_experts": experts, "axis_name": "ep", "capacity": 128, "config": config}
            return xm.moe_mlp(x, idx, factors, *weights, **options)

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        gradient = jax.value_and_grad(lambda *operands: jnp.sum(mapped(*operands)).astype(jnp.float32))
        shapes = (tokens, 256), (experts, 256, 128), (experts, 256, 128), (experts, 128, 256)
        x, *weights = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        idx, factors = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
        jax.jit(gradient).trace(x, idx, factors, weights).lower(lowering_platforms=("tpu",))
        return read[-2:]

    assert lowered(jnp.bfloat16, 1) == [(True, False)] * 2
    assert lowered(jnp.bfloat16, 2) == [(True, False), (True, True)] and len(read) == 4 and counted == {True}
    assert lowered(jnp.float32, 1) == [(False, False)] * 2 and len(read) == 6 and counted == {True, False}


@pytest.mark.parametrize("halved", [False, True])
def test_the_bytes_of_a_combine_are_those_of_its_buffers(halved, monkeypatch):
    """The kernel is given buffers of as many bytes of VMEM as `vmem_bytes` counts without tables, which are operands of
    the grid. With rows in halves the two buffers of rows take half of the bytes."""
    given, call, block, slots, hidden = [], Launch.call, 32, 4, 512

    def recorded(self, *operands, name, **options):
        if name == "xen_moe_reduce_slots_local":
            given.extend(ref for ref in options["grid_spec"].scratch_shapes if ref.memory_space == pltpu.VMEM)
        return call(self, *operands, name=name, **options)

    monkeypatch.setattr(Launch, "call", recorded)
    record = Record(hidden, "bfloat16")

    def run(y, rows, peer, weights, zero):
        pairs = slots_kernel.Pairs(rows, peer, peer, zero, staging_rows=64)
        options = {"record": record, "quantize": None, "axes": None, "launch": Launch(block), "halved": halved}
        return slots_kernel.reduce_slots(y, pairs, weights, zero, **options)

    shapes = ((128, hidden), "bfloat16"), ((64, slots), "int32"), ((64,), "int32"), ((128,), "float32"), ((1,), "int32")
    jax.eval_shape(run, *itertools.starmap(jax.ShapeDtypeStruct, shapes))
    in_vmem = sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in given)
    assert in_vmem == slots_kernel.vmem_bytes(record, slots, block, halved=halved) - block * 2 * 4 * 128
    assert max(math.prod(ref.shape) for ref in given) == 2 * slots * block * hidden // (1 + halved)


def test_a_layer_with_rows_in_halves_has_the_bits_of_one_with_whole_rows(monkeypatch, on_a_tpu):
    """The value and all gradients of `moe_mlp`, with an expert that has no rows, and rows past the last expert."""
    monkeypatch.setattr(on_tpu, "DEFAULT", INTERPRETED)
    rng, tokens, hidden, width, experts = np.random.default_rng(9), 16, 256, 128, 3
    drawn = [(tokens, hidden), (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)]
    x, *weights = (jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.bfloat16) for shape in drawn)
    idx = jnp.asarray(rng.permuted([[0, 2]] * tokens, axis=1), jnp.int32)
    factors = jnp.asarray(rng.random(idx.shape), jnp.float32)
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    config = dataclasses.replace(INTERPRETED, mode="throughput")
    made, grouped = [], {name: getattr(on_tpu, name) for name in ("grouped_products", "grouped_transposed")}

    def recorded(name, *operands, **options):
        made.append((name, options["halves"]))
        return grouped[name](*operands, **options)

    for name in grouped:
        monkeypatch.setattr(on_tpu, name, functools.partial(recorded, name))

    def run(halves):
        monkeypatch.setattr(hardware, "HALVES", halves)
        made.clear()

        def layer(x, idx, factors, weights):
            return xm.moe_mlp(
                x, idx, factors, *weights, num_experts=experts, axis_name="ep", capacity=128, config=config
            )

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)

        def loss(x, factors, weights):
            y = mapped(x, idx, factors, weights)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, factors, weights)
        return jax.tree.map(np.asarray, (y, gradients)), set(made)

    expected, whole = run(())
    found, by_halves = run((hardware.SMALLEST.name,))
    assert {name for name, halves in by_halves if halves} == set(grouped) and not any(halves for _, halves in whole)
    assert all(np.asarray(value, np.float32).any() for value in jax.tree.leaves(expected))
    jax.tree.map(lambda value, wanted: assert_bits(value, wanted, "moe_mlp"), found, expected)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "generation", ["v5e", *(pytest.param(g, marks=pytest.mark.slow) for g in ("v4", "v5p", "v6e", "tpu7x"))]
)
def test_a_compiled_layer_copies_no_weights(generation):
    """With `ragged_dot` XLA makes a transposed copy of every matrix and passes over the rows. Nothing of it is left."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    pytest.importorskip("flax", reason="the layer's configuration is the Flax layers': pip install 'xen-moe-jax[flax]'")
    from benchmarks.tpu import layer_programs

    sizes, width = {"hidden": 1024, "experts": 32, "top_k": 4}, 512
    copied, passes = {}, {}
    for matmul in ("auto", "ragged_dot"):
        text = layer_programs.compile_layer(layer_programs.OWN, generation, None, 512, sizes, width, matmul).as_text()
        copied[matmul] = len(re.findall(r"= bf16\[(?:1,)?4,(?:1024,512|512,1024)\]\S* copy\(", text))
        for kernel in KERNELS:
            assert (f"xen_moe_{kernel}" in text) == (matmul == "auto")
        assert ("ragged-dot" in text) == (matmul == "ragged_dot")
        passes[matmul] = [len(re.findall(rf"= [^=]*bf16\[2560,{n}\][^=]* fusion\(", text)) for n in (1024, width)]
    assert copied["auto"] == 0 < copied["ragged_dot"], copied
    assert passes["auto"] == [0, 0] and min(passes["ragged_dot"]) > 0, passes


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_kernels_compile(generation):
    """All kernels at DeepSeek-V3's sizes, with the tiles of this chip: they fit its VMEM."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    from benchmarks.tpu import topologies

    local, rows, hidden, width = 4, 4096, 7168, 2048
    mesh = topologies.mesh(generation)

    def shape(*sizes, dtype=jnp.bfloat16):
        sharding = jax.NamedSharding(mesh, P("ep"))
        return jax.ShapeDtypeStruct((mesh.size * sizes[0], *sizes[1:]), dtype, sharding=sharding)

    def gradients(by_x, by_y, gate, up, down, sizes, factors):
        inner, projections = on_tpu.activated_and_products(by_y, (gate, up), sizes, Activation("swiglu"), keep=True)
        behind = on_tpu.behind_activation(by_y, down, projections, factors, sizes, Activation("swiglu"))
        by_down = on_tpu.by_weight(inner, sizes, by_y, on_tpu.DEFAULT)
        return (
            on_tpu.products(inner, [down], sizes),
            behind,
            by_down,
            on_tpu.by_operands(by_y, (gate, up), sizes, (by_x, by_x)),
        )

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    into, out = shape(local, hidden, width), shape(local, width, hidden)
    operands = shape(rows, width), shape(rows, hidden), into, into, out
    sizes, factors = shape(local, dtype=jnp.int32), shape(rows, dtype=jnp.float32)
    text = jax.jit(mapped).trace(*operands, sizes, factors).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert set(re.findall(r"%xen_moe_(\w+?)(?:\.\d+)? = .*tpu_custom_call", text)) == KERNELS
