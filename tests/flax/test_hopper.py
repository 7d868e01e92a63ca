"""The grouped matmul for Hopper GPUs: its kernels in Pallas' GPU interpreter, its tiles, and its lowering for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

import xen_moe_jax as xm
from tests.support import hopper_kernels, plain_hopper
from xen_moe_jax import _overlap
from xen_moe_jax.experts import grouped_matmul, hopper
from xen_moe_jax.pallas_kernels.hopper import contraction, ring
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.contraction import rows_by_rows
from xen_moe_jax.pallas_kernels.hopper.rows import Into, activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import HEIGHTS, Tiles, largest_first, row_tiles

SIZES = (70, 0, 131, 37)
SMALL = {
    "plain": Tiles(m=128, n=128, stages=2),
    "few rows": Tiles(m=64, n=128, stages=2, split="n"),
    "bands": Tiles(m=64, n=128, stages=2, split="n", band=2),
}
SMALL_SWIGLU = {"plain": SMALL["plain"], "few rows": Tiles(m=64, stages=2, split="n")}


@pytest.mark.parametrize(("alignment", "band"), [(1, 1), (2, 3), (8, 20)])
@pytest.mark.parametrize(("tile_m", "fitted"), [(64, False), (128, False), (256, False), (HEIGHTS[-1], True)])
@pytest.mark.parametrize("sizes", [(70, 0, 131, 37), (0, 0, 0), (1,) * 40, (512,), (8, 8, 256), (517, 530, 9, 300)])
def test_every_row_of_a_group_is_in_one_tile(sizes, tile_m, fitted, alignment, band):
    capacity = sum(sizes) + 13
    given = capacity, tile_m, fitted, None, alignment, band
    compiled = jax.jit(lambda sizes: row_tiles(sizes, *given))
    facts, up_to = map(np.asarray, compiled(jnp.asarray(sizes, jnp.int32)))
    group, first, skip, end, top, height, *chosen = facts
    *_, total, counter = up_to
    assert counter == 0
    seen = np.full(capacity, -1)
    for tile in range(total):
        rows = first[tile] + np.arange(max(skip[tile], 0), min(end[tile], tile_m))
        assert rows.size and first[tile] % alignment == 0 and (alignment > 1 or skip[tile] == 0)
        in_band = slice(top[tile], top[tile] + height[tile])
        assert in_band.start <= tile < in_band.stop and height[tile] <= band
        assert (group[in_band] == group[tile]).all() and (top[in_band] == top[tile]).all()
        assert not fitted or end[tile] <= HEIGHTS[chosen[0][tile]]
        assert (seen[rows] == -1).all()
        seen[rows] = group[tile]
    np.testing.assert_array_equal(seen[: sum(sizes)], np.repeat(np.arange(len(sizes)), sizes))
    assert (seen[sum(sizes) :] == -1).all() and total <= group.size


def operands():
    """Rows with NaN past the last group, weights, cotangents with NaN there too."""
    rng = np.random.default_rng(0)
    used = sum(SIZES)
    rows, cotangent = rng.normal(size=(used + 2, 128)), rng.normal(size=(used + 2, 256))
    rows[used:], cotangent[used:] = np.nan, np.nan
    weights = rng.normal(size=(len(SIZES), 128, 256))
    return *(jnp.asarray(a, jnp.bfloat16) for a in (rows, weights, cotangent)), jnp.asarray(SIZES, jnp.int32)


def close(got, expected):
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    np.testing.assert_allclose(got / np.abs(expected).max(), expected / np.abs(expected).max(), atol=0.005)


@pytest.fixture
def interpreter(monkeypatch):
    """The interpreter has no inline instructions: what they do to a stage is done by reading and writing all of it. It
    knows no layouts, so that one reference is for all."""

    def silence(stage, low, high, _):
        row = lax.broadcasted_iota(jnp.int32, stage.shape, 0)
        stage[...] = jnp.where((row >= low) & (row < high), stage[...], jnp.zeros((), stage.dtype))

    monkeypatch.setattr(contraction, "silence", silence)
    monkeypatch.setattr(ring, "two_views", lambda by_rows, in_tiles: in_tiles)
    monkeypatch.setattr(ring, "views", lambda memory: (memory, memory))
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.mark.parametrize("tiles", SMALL)
def test_kernels_in_the_interpreter(tiles, interpreter):
    rows, weights, cotangent, sizes = operands()
    transposed = jnp.swapaxes(weights, 1, 2)
    starts = np.cumsum((0, *SIZES))
    parts = [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    exact = [np.asarray(a, np.float64) for a in (rows, weights, cotangent)]
    product = np.concatenate([exact[0][part] @ exact[1][group] for group, part in enumerate(parts)])
    run = functools.partial(rows_by_weights, tiles=SMALL[tiles], num_sms=2)
    close(run(rows, weights, sizes, transposed=False)[: starts[-1]], product)
    close(run(rows, transposed, sizes, transposed=True)[: starts[-1]], product)
    both = jnp.concatenate([rows, -rows], axis=1)
    by_weights = rows_by_rows(both, cotangent, sizes, tiles=SMALL[tiles], num_sms=2)
    for group, part in enumerate(parts):
        expected = exact[0][part].T @ exact[2][part]
        if SIZES[group]:
            close(by_weights[group], np.concatenate([expected, -expected]))
        else:
            assert not np.asarray(by_weights[group], np.float32).any()


@pytest.mark.parametrize("tiles", SMALL_SWIGLU)
def test_two_products_in_the_interpreter(tiles, interpreter):
    """Their sum in one accumulator, and SwiGLU in front of the store."""
    rows, gate, _, sizes = operands()
    up, used = gate[:, ::-1], sum(SIZES)
    starts = np.cumsum((0, *SIZES))
    factors = jnp.arange(rows.shape[0], dtype=jnp.float32).at[used:].set(jnp.nan) / used - 0.5

    def product(rows, weights):
        rows, weights = (np.asarray(a, np.float64) for a in (rows, weights))
        return np.concatenate([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)])

    g, u = product(rows, gate / 8), product(rows, up)
    run = {"tiles": SMALL_SWIGLU[tiles], "num_sms": 2}
    both = rows_by_weights(rows, gate, sizes, (-2 * rows, up), transposed=False, **run)
    out, *projections = activated_rows(
        rows, (gate / 8, up), sizes, None, factors, activation=Activation(), projections=True, **run
    )
    close(both[:used], product(rows, gate) - 2 * u)
    close(out[:used], g / (1 + np.exp(-g)) * u * np.asarray(factors, np.float64)[:used, None])
    for got, expected in zip(projections, (g, u), strict=True):
        close(got[:used], expected)


@pytest.mark.parametrize("band", [2, 8])
def test_pairs_of_blocks_in_the_interpreter(band, interpreter):
    """Bands of one to four tiles: where the height is odd, the blocks of some pairs have weights of their own."""
    rng = np.random.default_rng(3)
    sizes = (70, 0, 331, 137, 260)
    used, starts = sum(sizes), np.cumsum((0, *sizes))
    rows = jnp.asarray(rng.normal(size=(used + 2, 64)), jnp.bfloat16).at[used:].set(jnp.nan)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 64, 512)), jnp.bfloat16)
    tiles = Tiles(stages=2, band=band, pair=True)
    out = rows_by_weights(rows, weights, jnp.asarray(sizes), transposed=False, tiles=tiles, num_sms=4)
    exact = [np.asarray(a, np.float64) for a in (rows, weights)]
    close(
        out[:used], np.concatenate([exact[0][a:b] @ w for a, b, w in zip(starts, starts[1:], exact[1], strict=False)])
    )


def test_fitted_tiles_in_the_interpreter(interpreter):
    """Turned accumulators: every height, biases and factors, columns that end within a tile, and rows of some groups in
    an array with other rows."""
    rng = np.random.default_rng(2)
    sizes = jnp.asarray((70, 0, 131, 37, 109), jnp.int32)
    used = int(sizes.sum())
    rows = jnp.asarray(rng.normal(size=(used + 5, 128)), jnp.bfloat16).at[used:].set(jnp.nan)
    weights = jnp.asarray(rng.normal(size=(5, 128, 192)) / 16, jnp.bfloat16)
    biases = jnp.asarray(rng.normal(size=(2, 5, 192)), jnp.bfloat16)
    factors = jnp.arange(used + 5, dtype=jnp.float32).at[used:].set(jnp.nan) / used - 0.5
    tiles = dataclasses.replace(hopper.FITTED, stages=2, band=2)
    epilogue = {"activation": Activation("clipped_swiglu", limit=0.5), "projections": True, "tiles": tiles}
    given = rows, (weights, -weights), sizes, tuple(biases), factors
    inner = activated_rows(*given, **epilogue, num_sms=2)
    for got, expected in zip(inner, plain_hopper.activated_rows(*given, **epilogue), strict=True):
        close(got[:used], expected[:used])
    turned = {"transposed": True, "tiles": tiles}
    into = Into([jnp.full((used + 5, 192), 7, rows.dtype)], jnp.int32(70))  # the first group stays as it is
    given = rows, jnp.swapaxes(weights, 1, 2)[1:], sizes[1:], None, biases[0, 1:], factors, None, into
    close(rows_by_weights(*given, **turned, num_sms=2), plain_hopper.rows_by_weights(*given, **turned))


def test_columns_that_end_within_a_tile_in_the_interpreter(interpreter):
    """192 and 320 columns in tiles of 256 and 128, in bands, with biases; rows past the last group are NaN."""
    rng = np.random.default_rng(1)
    used = sum(SIZES)
    rows = jnp.asarray(rng.normal(size=(used + 2, 192)), jnp.bfloat16).at[used:].set(jnp.nan)
    weights = jnp.asarray(rng.normal(size=(len(SIZES), 192, 320)) / 16, jnp.bfloat16)
    biases = jnp.asarray(rng.normal(size=(2, len(SIZES), 320)), jnp.bfloat16)
    factors = jnp.arange(used + 2, dtype=jnp.float32).at[used:].set(jnp.nan) / used - 0.5
    sizes, tiles = jnp.asarray(SIZES, jnp.int32), Tiles(m=128, n=256, stages=2, band=2)
    activation = Activation("clipped_swiglu", limit=0.5)
    run = {"tiles": tiles, "num_sms": 2}
    epilogue = {"activation": activation, "projections": True, "tiles": tiles}
    given = (rows, (weights, -weights), sizes, tuple(biases), factors)
    out = rows_by_weights(rows, weights, sizes, None, biases[0], factors, transposed=False, **run)
    inner = activated_rows(*given, **epilogue, num_sms=2)
    back = rows_by_weights(inner[0], weights, sizes, transposed=True, **run)
    by_weights = rows_by_rows(rows, inner[0], sizes, **run)
    sums = rows_by_rows(jnp.ones_like(rows), inner[0], sizes, **run, height=8)
    plain = {"transposed": False, "tiles": tiles}
    close(out[:used], plain_hopper.rows_by_weights(rows, weights, sizes, None, biases[0], factors, **plain)[:used])
    for got, expected in zip(inner, plain_hopper.activated_rows(*given, **epilogue), strict=True):
        close(got[:used], expected[:used])
    close(back[:used], plain_hopper.rows_by_weights(inner[0], weights, sizes, transposed=True, tiles=tiles)[:used])
    close(by_weights, plain_hopper.rows_by_rows(rows, inner[0], sizes, tiles=tiles))
    close(sums, plain_hopper.rows_by_rows(jnp.ones_like(rows), inner[0], sizes, tiles=tiles, height=8))


def test_shapes_of_two_products_are_those_of_one():
    rows, weights, _, sizes = operands()
    rows = rows[: sum(SIZES) // 8 * 8]
    with pytest.raises(ValueError, match="rows and weights of two products"):
        rows_by_weights(rows, weights, sizes, (rows, weights[:2]), transposed=False, tiles=SMALL["plain"], num_sms=2)
    with pytest.raises(ValueError, match="a warpgroup's 32 columns of 64"):
        tiles = Tiles(n=128, split="n")
        activated_rows(rows, (weights,) * 2, sizes, activation=Activation(), projections=False, tiles=tiles, num_sms=2)


@pytest.mark.parametrize(("claimed", "rows_a_rank"), [(False, 1001), (True, 1001), (True, 101)])
def test_gradients_lower_for_cuda_inside_shard_map(monkeypatch, claimed, rows_a_rank):
    """Layouts, swizzles and barriers of the default tiles are checked by the lowering, which needs no GPU."""
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    monkeypatch.setattr(hopper, "in_overlap", lambda: claimed)
    for kernel in ("rows_by_weights", "rows_by_rows", "activated_rows"):
        monkeypatch.setattr(hopper, kernel, functools.partial(getattr(hopper, kernel), num_sms=132))
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def loss(rows, weights, sizes):
        def on_rank(rows, weights, sizes):
            hidden = hopper.activated(
                rows, (weights, weights[..., ::-1]), sizes, row_weights=rows[:, 0].astype(jnp.float32)
            )
            weights = jnp.swapaxes(weights, 1, 2)
            out = hopper.activated(
                hidden, (weights,), sizes, (rows[:4],), activation=Activation("relu2"), row_weights=None
            )
            return hopper.grouped_matmul(out, weights[:, :512], sizes, bias=rows[4:8]).astype(jnp.float32).sum()[None]

        specs = (jax.P("ep"),) * 3
        return jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=jax.P("ep"))(rows, weights, sizes).sum()

    rows = jax.ShapeDtypeStruct((2 * rows_a_rank, 512), jnp.bfloat16)  # rows that are no multiple of 8
    weights = jax.ShapeDtypeStruct((8, 512, 768), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = export.export(gradient, platforms=["cuda"], disabled_checks=checks)(rows, weights, sizes)
    assert [a.shape for a in exported.out_avals] == [rows.shape, weights.shape]


def test_tiles_are_claimed_beside_pending_operations_and_in_their_backward_pass(monkeypatch):
    """All tiles are claimed in the work of an `overlap` with pending operations; elsewhere those of weights' gradients.
    (Fitted ones of two projections, too, but `SIZES` are few rows.)"""
    rows, weights, cotangent, sizes = operands()
    seen = []

    def spy(name):
        real = getattr(plain_hopper, name)
        return lambda *a, tiles, **k: seen.append((name, tiles.claimed)) or real(*a, tiles=tiles, **k)

    for name in ("rows_by_weights", "rows_by_rows", "activated_rows"):
        monkeypatch.setattr(hopper, name, spy(name))
    monkeypatch.setattr(hopper, "supports", lambda rows, weights: True)

    def experts(rows):
        hidden = hopper.activated(rows, (weights, weights[..., ::-1]), sizes)
        return hopper.grouped_matmul(hidden, jnp.swapaxes(weights, 1, 2), sizes)

    def gradient(is_pending):
        monkeypatch.setattr(_overlap, "is_pending", lambda flight: is_pending)
        monkeypatch.setattr(_overlap, "_order", lambda states, others: (states, others))
        monkeypatch.setattr(_overlap, "use_flight", lambda *_: None)

        def overlapped(rows):
            return xm.overlap(xm.Flight(rows, "dispatch"), experts, rows)[1]

        seen.clear()
        jax.eval_shape(lambda rows: jax.vjp(overlapped, rows)[1](rows), rows)
        return {name for name, claimed in seen if claimed}, len(seen)

    assert gradient(True) == ({"rows_by_weights", "rows_by_rows", "activated_rows"}, 7)
    assert gradient(False) == ({"rows_by_rows"}, 7)


@pytest.mark.parametrize("sizes", [[3, 9, 0, 9, 1], [5], [0, 0, 0], [1, 2, 3, 4]])
def test_the_largest_groups_come_first(sizes):
    order = np.asarray(largest_first(jnp.array(sizes, jnp.int32)))
    np.testing.assert_array_equal(order, np.argsort(-np.array(sizes), kind="stable"))


def kernel_in(program):
    """The Mosaic module in a lowered program, as text, without the number that each one gets."""
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call" and "mhlo.backend_config" in operation.attributes:
            config = operation.attributes["mhlo.backend_config"]
            found.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    program.compiler_ir().operation.walk(visit)
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic_gpu.dialect.register_dialect(context)
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(*found)
        del module.operation.attributes["mosaic_gpu.dump_basename"]
        return module.operation.get_asm(enable_debug_info=False)


@pytest.mark.parametrize("kernel", hopper_kernels.KERNELS)
def test_claims_are_of_one_thread_whatever_is_lowered_beside(kernel, monkeypatch):
    """jax 0.11.2 and 0.12.0.1 keep in a variable of the process that they lower for one thread, and others read it."""

    def lowered():
        program = hopper_kernels.program(kernel, Tiles(claimed=True))
        return kernel_in(program.trace(hopper_kernels.operands()).lower(lowering_platforms=("cuda",)))

    alone = lowered()
    assert "atom.relaxed.gpu.global.inc" in alone
    monkeypatch.setattr(mosaic_utils, "_ONCE_PER", mosaic_utils.ThreadSubset.BLOCK)
    assert lowered() == alone


@pytest.mark.parametrize("kernel", hopper_kernels.KERNELS)
def test_kernels_that_claim_run_one_after_the_other_under_vmap(kernel):
    """In one launch they would share a counter. Others are one launch with one more dimension of the grid."""

    def outermost(claimed):
        def run(operands):
            batched = {name: a for name, a in operands.items() if name in ("rows", "wide")}
            rest = {name: a for name, a in operands.items() if name not in batched}
            return jax.vmap(lambda batched: kernel(Tiles(claimed=claimed), **batched, **rest))(batched)

        given = hopper_kernels.operands()
        given |= {name: jax.ShapeDtypeStruct((3, *given[name].shape), jnp.bfloat16) for name in ("rows", "wide")}
        return re.search(r"(scan|mpmd_map)\[", str(jax.make_jaxpr(run)(given)))[1]

    assert outermost(True) == "scan" and outermost(False) == "mpmd_map"


SHAPES = {  # of experts: hidden size, width
    "Mixtral": (4096, 14336),
    "Qwen3-30B-A3B": (2048, 768),
    "Qwen3-235B-A22B": (4096, 1536),
    "Qwen3-Next": (2048, 512),
    "DeepSeek-V3, Kimi K2": (7168, 2048),
    "gpt-oss": (2880, 2880),
    "OLMoE": (2048, 1024),
    "GLM-4.5": (5120, 1536),
    "GLM-4.5-Air": (4096, 1408),
    "Llama 4": (5120, 8192),
}


@pytest.mark.parametrize("model", SHAPES)
def test_tiles_of_models_waste_little(model):
    """Columns computed past the last one, of all columns."""
    hidden, width = SHAPES[model]
    assert grouped_matmul.why_not(hidden, width, jnp.bfloat16) is None
    for depth, columns in ((hidden, width), (width, hidden)):
        plan = hopper.plan(depth, columns)
        assert plan.forward.swizzle == 128
        for tiles, size in ((plan.forward, columns), (plan.rows, depth), (plan.weights, columns)):
            assert -size % tiles.n / size < 0.01
        assert -columns % (plan.gated.n // 2) / columns < 0.03


def test_plans():
    assert hopper.plan(2880, 2880).forward.n == 192 and hopper.plan(4096, 1408).forward.n == 128
    assert hopper.plan(4096, 1536).forward == hopper.plan(4096, 14336).forward == Tiles(band=hopper.BAND, pair=True)
    assert hopper.plan(4096, 1536).weights == Tiles(claimed=True)
    assert hopper.plan(4096, 14336).weights == Tiles(band=hopper.CONTRACTION_BAND, claimed=True)
    swizzles = {n: hopper.plan(2880, n).forward.swizzle for n in (2880, 1440, 720)}
    assert swizzles == {2880: 128, 1440: 64, 720: 128}  # 720 is padded up to 768


def test_plans_for_few_rows():
    """By the rows of the buffer for each group."""
    many, few = hopper.plan(7168, 2048), hopper.plan(7168, 2048, 64 * 8, 8)
    assert hopper.plan(7168, 2048, 641 * 8, 8) == many
    some, more = (hopper.plan(7168, 2048, rows * 8, 8) for rows in (65, 640))
    fitted = dataclasses.replace(hopper.FITTED, band=hopper.BAND)
    claimed = dataclasses.replace(fitted, claimed=True)
    assert (some.forward, some.rows, some.gated, some.weights) == (fitted, fitted, claimed, many.weights)
    assert more == dataclasses.replace(some, forward=many.forward)
    assert few == hopper.Plan(hopper.FEW[0], hopper.FEW[0], many.weights, hopper.FEW[0], many.sums)
    assert hopper.plan(7168, 128, 2048, 64).forward == hopper.FEW[1]
    assert some.projections_gathered == dataclasses.replace(fitted, pair=True)
    for depth, columns in ((2880, 2880), (4096, 1408)):  # not deep enough, and an odd number of columns of tiles
        shallow = hopper.plan(depth, columns, 640 * 8, 8)
        assert shallow.projections_gathered == shallow.gated == claimed
    with _overlap.overlap_work():
        busy = hopper.plan(7168, 2048, 640 * 8, 8)
    assert busy.projections_gathered == busy.gated == claimed


@pytest.mark.parametrize("band", [1, 3, 8])
@pytest.mark.parametrize("height", [1, 7, 8, 20])
def test_bands_visit_every_tile_once(band, height):
    width = 5
    at = jax.vmap(lambda number: jnp.stack(Tiles(band=band).at(number, height, width)))(jnp.arange(height * width))
    at = [tuple(int(i) for i in place) for place in at]
    assert sorted(at) == [(m, n) for m in range(height) for n in range(width)]
    assert at[: min(band, height)] == [(m, 0) for m in range(min(band, height))]


def test_not_on_this_machine():
    rows, weights, _, sizes = operands()
    with pytest.raises(ValueError, match="grouped_matmul='hopper'.*needs a Hopper GPU.*use 'auto'"):
        hopper.grouped_matmul(rows, weights, sizes)
