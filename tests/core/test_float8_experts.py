"""Experts in fp8 and in int8, in plain JAX: every rounding against NumPy, bits where sums are exact, errors."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle, plain_float8
from tests.support.checks import assert_bits
from xen_moe_jax import _overlap
from xen_moe_jax.experts import float8, hopper, hopper_float8
from xen_moe_jax.experts.arrived import ArrivedRows
from xen_moe_jax.experts.float8 import grouped_matmul
from xen_moe_jax.experts.grouped_matmul import warn_once

SIZES = np.array([200, 0, 57, 3], np.int32)
C, A, B = 270, 200, 144  # ten rows past the last group; neither width is a multiple of 128


MATMULS = {float8.DTYPE: grouped_matmul, "int8": float8.in_int8}
LARGEST = {float8.DTYPE: 448, "int8": 127}


def blocks_of(x, axis, dtype=float8.DTYPE):
    """Float64 values of `x` quantized for 128 elements along an axis, by the oracle."""
    moved = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    return np.moveaxis(np.asarray(oracle.dequantize(*oracle.quantize(moved, dtype)), np.float64), -1, axis)


def tiles_of(weights, dtype=float8.DTYPE):
    largest = np.float32(LARGEST[dtype])
    out = np.empty(weights.shape)
    for e, i, j in np.ndindex(len(weights), -(-weights.shape[1] // 128), -(-weights.shape[2] // 128)):
        tile = (e, slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        amax = np.float32(max(np.abs(weights[tile]).max(), 2.0**-96))
        scaled = weights[tile] * np.float32(largest / amax)
        values = (np.rint(scaled) if dtype == "int8" else scaled).astype(dtype)
        out[tile] = values.astype(np.float64) * np.float64(np.float32(amax / largest))
    return out


def operands(seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((C, A)).astype(np.float32) * rng.uniform(0.1, 9, (C, 1)).astype(np.float32)
    weights = rng.standard_normal((len(SIZES), A, B)).astype(np.float32) / 16
    cotangent = rng.standard_normal((C, B)).astype(np.float32)
    rows[SIZES.sum() :], cotangent[SIZES.sum() :] = np.nan, np.inf  # unspecified
    return rows, weights, cotangent


def groups():
    ends = np.cumsum(SIZES)
    return [(e, slice(end - size, end)) for e, (end, size) in enumerate(zip(ends, SIZES, strict=True))]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(matmul, rows, weights, sizes, cotangent):
    """Returns the product, and its gradients by rows and weights."""
    y, pull = jax.vjp(lambda rows, weights: matmul(rows, weights, sizes), rows, weights)
    return y, *pull(cotangent)


def assert_sums(value, exact, magnitudes):
    """Within the roundings of float32 sums of products."""
    assert np.isfinite(exact).all() and np.abs(exact).max() > 1
    assert (np.abs(np.asarray(value, np.float64) - exact) <= 2e-6 * magnitudes + 1e-30).all()


@pytest.mark.parametrize("dtype", MATMULS)
def test_products_and_gradients_follow_the_rule(dtype):
    rows, weights, cotangent = operands()
    y, by_rows, by_weights = with_gradients(MATMULS[dtype], rows, weights, SIZES, cotangent)
    wide = tiles_of(weights, dtype)
    for e, group in groups():
        x, dy = blocks_of(rows[group], 1, dtype), blocks_of(cotangent[group], 1, dtype)
        if x.size:
            assert_sums(y[group], x @ wide[e], np.abs(x) @ np.abs(wide[e]))
            assert_sums(by_rows[group], dy @ wide[e].T, np.abs(dy) @ np.abs(wide[e].T))
        exact, magnitudes = np.zeros((A, B)), np.zeros((A, B))
        for at in range(0, len(x), 128):
            left = blocks_of(oracle.dequantize(*oracle.quantize(rows[group][at : at + 128], dtype)), 0, dtype)
            right = blocks_of(cotangent[group][at : at + 128], 0, dtype)
            exact, magnitudes = exact + left.T @ right, magnitudes + np.abs(left.T) @ np.abs(right)
        if x.size:
            assert_sums(by_weights[e], exact, magnitudes)
        else:
            assert not np.asarray(by_weights[e]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_where_sums_are_exact(dtype):
    """Every block's largest number is 448, so that scales are one; the others are small whole numbers."""
    rng = np.random.default_rng(1)

    def whole(*shape):
        return rng.integers(-3, 4, shape).astype(np.float32)

    rows, weights, cotangent = whole(384, 256), whole(3, 256, 128), whole(384, 128)
    rows[:, ::128], cotangent[:, 0] = 448, 448
    rows[::128], cotangent[::128] = 448, 448  # for blocks of 128 rows
    weights[:, ::128, ::128] = 448
    sizes = jnp.full(3, 128, jnp.int32)

    def both(matmul, exact):
        given = (jnp.asarray(a, jnp.float32 if exact else dtype) for a in (rows, weights, cotangent))
        r, w, c = given
        found = with_gradients(matmul, r, w, sizes, c)
        return [np.asarray(jnp.asarray(a, dtype).astype(jnp.float32)) for a in found]

    for name, ours, plain in zip(
        ("product", "by rows", "by weights"), both(grouped_matmul, False), both(jax.lax.ragged_dot, True), strict=True
    ):
        assert_bits(ours, plain, name)


def test_int8_has_no_kernels_on_a_hopper_gpu_and_says_so_once(monkeypatch):
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    warn_once.cache_clear()
    rows, weights, _ = map(jnp.asarray, operands())
    matmuls = [float8.choose("int8", name, None, "grouped", "experts") for name in ("auto", "ragged_dot")]
    with pytest.warns(UserWarning, match="experts in int8 .* plain JAX on GPUs, slowly: float8_e4m3fn has kernels"):
        jax.eval_shape(matmuls[0], rows, weights, jnp.asarray(SIZES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for matmul in matmuls:  # said already
            jax.eval_shape(matmul, rows, weights, jnp.asarray(SIZES))
        warn_once.cache_clear()
        jax.eval_shape(matmuls[1], rows, weights, jnp.asarray(SIZES))


def test_int8_is_multiplied_as_bfloat16_on_cuda_alone(monkeypatch):
    """There XLA's own int8 matmuls can be wrong. The bits are those of int32 sums."""
    given = tuple(map(jnp.asarray, operands()))

    def both(rows, weights, cotangent):
        out, pull = jax.vjp(lambda *given: float8.in_int8(*given, jnp.asarray(SIZES)), rows, weights)
        return out, pull(cotangent)

    traced = jax.jit(both).trace(*given)
    for platform, narrow in (("cpu", True), ("tpu", True), ("cuda", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        products = [line for line in text.splitlines() if re.search(r"ragged_dot\"?\(|dot_general", line)]
        assert products and all(("xi8>" in line) == narrow for line in products), (platform, products)
    exact = jax.jit(both)(*given)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))
    for one, other in zip(jax.tree.leaves(jax.jit(lambda *a: both(*a))(*given)), jax.tree.leaves(exact), strict=True):
        assert_bits(one, other, "as bfloat16")


def test_weights_as_they_are():
    rows, weights, cotangent = (jnp.asarray(a) for a in operands())
    values, scales = jax.jit(float8.quantize_weights)(weights)
    kept = xm.QuantizedWeight(values, scales, (128, 128))
    used = np.arange(C) < SIZES.sum()

    @jax.jit
    def of(w):
        y, pull = jax.vjp(lambda r: grouped_matmul(r, w, jnp.asarray(SIZES)), rows)
        return y, pull(cotangent)[0]

    for one, other in zip(of(kept), of(weights), strict=True):
        assert_bits(np.asarray(one)[used], np.asarray(other)[used], "weights as they are")
    with pytest.raises(TypeError, match="a gradient by a quantized weight"):
        jax.eval_shape(jax.grad(lambda w: grouped_matmul(rows, w, jnp.asarray(SIZES)).sum()), kept)
    with pytest.raises(ValueError, match=r"weights in int8 and blocks of \(128, 128\): must be float8_e4m3fn"):
        grouped_matmul(rows, xm.QuantizedWeight(values.astype(jnp.int8), scales, (128, 128)), jnp.asarray(SIZES))
    with pytest.raises(ValueError, match=r"experts in int8 with weights in float8_e4m3fn .* must be int8"):
        float8.in_int8(rows, kept, jnp.asarray(SIZES))
    whole = xm.QuantizedWeight(*float8.quantize_weights(weights, "int8"), (128, 128))
    by_codes, by_weights = (float8.in_int8(rows, w, jnp.asarray(SIZES)) for w in (whole, weights))
    assert_bits(np.asarray(by_codes)[used], np.asarray(by_weights)[used], "int8 as it is")
    one_scale = xm.QuantizedWeight(values, scales[:, :1, :1], weights.shape[1:])
    for function in (float8.automatic, float8.by_hopper):  # before the kernels are chosen, which know one format
        with pytest.raises(ValueError, match="must be float8_e4m3fn in blocks of"):
            float8.by_kernels(function, rows, one_scale)


RANKS, TOKENS, EXPERTS, HIDDEN, WIDTH = 2, 24, 4, 128, 256
AT = {"num_experts": EXPERTS, "axis_name": "ep"}


def layer(body, dtype=jnp.float32):
    """Value and gradients of `body(x, idx, weights, matrices)` on two ranks."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((RANKS * TOKENS, HIDDEN)), dtype)
    idx = jnp.asarray(np.argsort(rng.random((RANKS * TOKENS, EXPERTS)), axis=1)[:, :2], jnp.int32)
    weights = jnp.asarray(rng.random((RANKS * TOKENS, 2)), jnp.float32)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    matrices = [jnp.asarray(rng.standard_normal((EXPERTS, *s)) / 12, dtype) for s in shapes]
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS], axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, weights, matrices):
        y = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, weights, matrices)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, weights, matrices)
    return jax.tree.leaves((y, gradients))


def cosine(one, other):
    one, other = (np.asarray(a, np.float64).ravel() for a in (one, other))
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


def ours(x, idx, weights, m, **options):
    return xm.moe_mlp(x, idx, weights, *m, **{"experts": "float8_e4m3fn", **AT, **options})


def once(x, idx, weights, m, **options):
    """`ours` by codes that are made in front of it, and inside of a layer that the backward pass computes again."""
    codes = xm.quantize_weights(m)

    @jax.checkpoint
    def layer(x, weights, m):
        return ours(x, idx, weights, [code.of(w) for code, w in zip(codes, m, strict=True)], **options)

    return layer(x, weights, m)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "float8_e4m3fn:ue8m0", "int8"])
def test_rows_are_multiplied_as_they_arrive(wire):
    """Values and scales of the wire go into the product, and the gradients home on the wire for gradients."""
    dtype, _, scale_format = wire.partition(":")
    scale_format, grouped_matmul = scale_format or "float32", MATMULS[dtype]

    def composed(x, idx, weights, matrices):
        scaled = xm.quantize(jax.lax.stop_gradient(x), dtype, scale_format)
        routed = xm.dispatch(scaled, idx, weights, **AT)
        assert isinstance(routed.x, xm.BlockScaled)
        rows = ArrivedRows(jnp.full_like(routed.x.values, jnp.nan, x.dtype), routed.x)
        gate, up = (grouped_matmul(rows, w, routed.group_sizes) for w in matrices[:2])
        y = grouped_matmul(jax.nn.silu(gate) * up, matrices[2], routed.group_sizes)
        return xm.combine(y, routed.handle, gradient_wire="float8_e4m3fn")

    def again(x, idx, weights, matrices):
        """Rows are dequantized and quantized again, as one may do outside of `moe_mlp`."""
        routed = xm.dispatch(x, idx, weights, wire=wire, gradient_wire="float8_e4m3fn", **AT)
        gate, up = (grouped_matmul(routed.x, w, routed.group_sizes) for w in matrices[:2])
        y = grouped_matmul(jax.nn.silu(gate) * up, matrices[2], routed.group_sizes)
        return xm.combine(y, routed.handle, gradient_wire="float8_e4m3fn")

    got = layer(functools.partial(ours, wire=wire, gradient_wire="float8_e4m3fn", experts=dtype))
    one, _, *gradients = layer(composed)
    assert_bits(got[0], one, "value")
    for name, mine, other in zip(("weights", "gate", "up", "down"), got[2:], gradients, strict=True):
        assert_bits(mine, other, name)
    if scale_format == "ue8m0":  # to quantize again is to round by another scale
        others = layer(again)
        assert not np.array_equal(got[0], others[0])
        for name, mine, other in zip(("value", "x", "weights", "gate", "up", "down"), got, others, strict=True):
            assert cosine(mine, other) > 0.998, f"{name}: {cosine(mine, other)}"


def test_the_kernels_composition():
    """The composition of the kernels for Hopper GPUs, with plain JAX in the place of each kernel, follows the rule."""
    options = {"wire": "float8_e4m3fn", "apply_weights_to": "activation"}
    plain = layer(functools.partial(ours, **options), jnp.bfloat16)
    with plain_float8.in_the_kernels_place() as quantizers:
        kernels = layer(functools.partial(ours, **options), jnp.bfloat16)
        assert quantizers.calls == 3  # in both layouts at once
        by_codes = layer(functools.partial(once, **options), jnp.bfloat16)
        assert quantizers.calls == 3
    for name, one, other in zip(("value", "x", "weights", "gate", "up", "down"), kernels, plain, strict=True):
        assert one.dtype == other.dtype and cosine(one, other) > 0.9985, f"{name}: {cosine(one, other)}"
    for one, other in zip(by_codes, kernels, strict=True):
        assert_bits(one, other, "weights quantized once")


def test_every_kernel_knows_that_an_operation_is_pending(monkeypatch):
    """In the work of an `xm.overlap`, and in its backward pass, tiles of all fp8 kernels are claimed; nowhere else."""
    weight, sizes = jnp.ones((2, 128, 128)), jnp.asarray([70, 30])
    seen = []

    def spy(real):
        return lambda *a, **k: seen.append(k["tiles"].claimed if "tiles" in k else k["claimed"]) or real(*a, **k)

    def experts(rows):
        return hopper_float8.experts(hopper.SWIGLU, rows, None, (weight, weight), weight, sizes)

    def overlapped(rows):
        with _overlap.overlap_work():
            return experts(rows)

    with plain_float8.in_the_kernels_place():
        for name in ("rows_by_weights", "rows_by_rows", "activated_rows"):
            monkeypatch.setattr(hopper_float8, name, spy(getattr(hopper_float8, name)))
        monkeypatch.setattr(
            plain_float8.Activations, "gradients", staticmethod(spy(plain_float8.Activations.gradients))
        )
        for function, expected in ((overlapped, True), (experts, False)):
            seen.clear()
            jax.eval_shape(lambda rows, function=function: jax.vjp(function, rows)[1](rows), jnp.ones((104, 128)))
            assert seen == [expected] * 8
        monkeypatch.undo()


def test_errors_of_weights_quantized_once():
    weight = jnp.ones((2, 200, 144))
    codes = xm.quantize_weights(weight)
    with pytest.raises(TypeError, match="a gradient by a quantized weight"):
        jax.grad(lambda c: grouped_matmul(jnp.ones((8, 200)), c.of(weight), jnp.asarray([3, 4])).sum())(codes)
    for shape in ([2, 300, 144], [2, 250, 130]):  # [2, 250, 130] is padded to the shape of these codes
        with pytest.raises(ValueError, match=re.escape(f"codes of a weight [2, 200, 144] with a weight {shape}: give")):
            codes.of(jnp.ones(shape))
    with pytest.raises(ValueError, match="quantize_weights: dtype='int8': must be 'float8_e4m3fn'"):
        xm.quantize_weights(weight, "int8")
    with pytest.raises(TypeError, match=r"quantize_weights: int32\[2\]: must be floating point \[L, A, B\]"):
        xm.quantize_weights(jnp.zeros(2, jnp.int32))
    with pytest.raises(TypeError, match=r"float8_e4m3fn\[2, 256, 256\]: must be .* of 16 bits or more"):
        xm.quantize_weights(codes.values)
    with pytest.raises(TypeError, match="compute_dtype=int8: must be floating point of 16 bits or more"):
        xm.quantize_weights(weight, compute_dtype="int8")
    for given in (codes, codes.of(weight), xm.QuantizedWeight(codes.values, codes.scales, (128, 128))):
        with pytest.raises(
            TypeError, match=f"weights hold a {type(given).__name__}, which is quantized already: leave"
        ):
            xm.quantize_weights({"gate": given})

    def failing(x, idx, weights, m, given, **options):
        given = [given(code, w) for code, w in zip(xm.quantize_weights(m), m, strict=True)]
        return xm.moe_mlp(x, idx, weights, *given, **AT, **options)

    with pytest.raises(TypeError, match=r"gate is a Float8Weight: pass experts='float8_e4m3fn' with it, or its master"):
        layer(functools.partial(failing, given=lambda code, w: code.of(w)))
    with pytest.raises(TypeError, match=r"gate is a Float8Weight without a master: pass codes.of\(weight\)"):
        layer(functools.partial(failing, given=lambda code, w: code, experts="float8_e4m3fn"))


def test_moe_mlp():
    """The MLP of `dispatch`, these matmuls and `combine`, to the bit, and near the one in float32."""

    def composed(x, idx, weights, matrices):
        routed = xm.dispatch(x, idx, weights, **AT)
        gate, up = (grouped_matmul(routed.x, w, routed.group_sizes) for w in matrices[:2])
        return xm.combine(grouped_matmul(jax.nn.silu(gate) * up, matrices[2], routed.group_sizes), routed.handle)

    got = layer(ours)
    for one, other in zip(got, layer(composed), strict=True):
        assert_bits(one, other, "moe_mlp")
    for one, other in zip(layer(once), got, strict=True):
        assert_bits(one, other, "weights quantized once")
    for one, exact in zip(got, layer(lambda x, idx, weights, m: xm.moe_mlp(x, idx, weights, *m, **AT)), strict=True):
        assert 0.99 < cosine(one, exact) < 1 - 1e-7

    def failing(**arguments):
        layer(lambda x, idx, weights, m: xm.moe_mlp(x, idx, weights, *m, **AT, **arguments))

    with pytest.raises(ValueError, match="moe_mlp: experts='int4': must be None, 'float8_e4m3fn' or 'int8'"):
        failing(experts="int4")
    with pytest.raises(ValueError, match=r"experts='float8_e4m3fn' with layout='padded': .*use 'grouped'"):
        failing(experts="float8_e4m3fn", layout="padded")
    with pytest.raises(ValueError, match=r"with grouped_matmul='tokamax': it has a matmul of its own; use 'auto'"):
        failing(experts="float8_e4m3fn", grouped_matmul="tokamax")
    with pytest.raises(ValueError, match=r"experts='int8' with grouped_matmul='hopper': .*use 'auto'"):
        failing(experts="int8", grouped_matmul="hopper")
    with pytest.raises(
        ValueError, match=r"grouped_matmul='hopper': the rows are float32: none of bfloat16 and float16"
    ):
        failing(experts="float8_e4m3fn", grouped_matmul="hopper")
