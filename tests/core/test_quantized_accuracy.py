"""Experts and wires that are quantized: how near to float64 a layer and its gradients are, at groups of every kind, and
what a NaN or an infinity in a token reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from xen_moe_jax.experts import hopper

R, T, E, K, H, F = 2, 96, 6, 2, 256, 192
FP8 = "float8_e4m3fn"
LEAST = {
    "fp8 experts": ({"experts": FP8}, 0.997),
    "int8 experts, wire": ({"experts": "int8", "wire": "int8"}, 0.999),
    "fp8 experts and wires": ({"experts": FP8, "wire": FP8, "combine_wire": FP8, "gradient_wire": FP8}, 0.996),
    "fp8 wires": ({"wire": FP8, "combine_wire": FP8, "gradient_wire": FP8}, 0.998),
    "MXFP4 on the way out": ({"wire": "mxfp4"}, 0.98),
    "MXFP4 wires": ({"wire": "mxfp4", "combine_wire": "mxfp4", "gradient_wire": "mxfp4"}, 0.97),
}
"""Arguments, and the least cosine of the output and of every gradient to those in float64. One product of normally
distributed numbers in e4m3 has 0.9993 already: both factors are rounded to four significant bits, by 2.6 % of their
norms."""
NAMES = ("output", "tokens", "router weights", "gate", "up", "down")


def operands(groups="even"):
    rng = np.random.default_rng(0)
    x, cotangent = (rng.standard_normal((R * T, H)).astype(np.float32) for _ in range(2))
    idx = np.argsort(rng.random((R * T, E)), axis=1)[:, :K].astype(np.int32)
    if groups == "all to one expert":
        idx[:, 0], idx[:, 1] = 1, -1
    if groups == "one row":
        idx[:] = -1
        idx[5, 0] = 3
    weights = rng.random((R * T, K)).astype(np.float32)
    shapes = ((H, F), (H, F), (F, H))
    matrices = [(rng.standard_normal((E, *s)) * s[0] ** -0.5).astype(np.float32) for s in shapes]
    return x, cotangent, idx, weights, matrices


@pytest.fixture(scope="module")
def layer():
    """Returns a function: output and gradients of `moe_mlp` with options, compiled once for each."""
    mesh = jax.make_mesh((R,), ("ep",), devices=jax.devices()[:R], axis_types=(jax.sharding.AxisType.Auto,))
    programs = {}

    def run(options, x, cotangent, idx, weights, matrices):
        def body(x, idx, weights, matrices):
            return xm.moe_mlp(x, idx, weights, *matrices, num_experts=E, axis_name="ep", **options)

        def loss(x, weights, matrices, idx, cotangent):
            y = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, weights, matrices)
            return jnp.sum(jnp.sin(y) * cotangent), y

        if str(options) not in programs:
            programs[str(options)] = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        (by_x, by_weights, by_matrices), y = programs[str(options)](x, weights, matrices, idx, cotangent)
        return dict(zip(NAMES, (y, by_x, by_weights, *by_matrices), strict=True))

    return run


@jax.jit
def in_float64(x, weights, matrices, cotangent, idx):
    def loss(x, weights, matrices):
        known = jnp.where(idx < 0, E, idx)
        gates = jnp.zeros((R * T, E + 1)).at[np.arange(R * T)[:, None], known].add(jnp.where(idx < 0, 0, weights))
        gate, up = (jnp.einsum("th,ehf->tef", x, m) for m in matrices[:2])
        y = jnp.einsum("tef,efh,te->th", jax.nn.silu(gate) * up, matrices[2], gates[:, :E])
        return jnp.sum(jnp.sin(y) * cotangent), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, matrices)


def exact(x, cotangent, idx, weights, matrices):
    """Returns the layer's output and its gradients in float64, computed without a dispatch."""
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, weights, matrices))
        (by_x, by_weights, by_matrices), y = in_float64(*given, cotangent, idx)
        return dict(zip(NAMES, map(np.asarray, (y, by_x, by_weights, *by_matrices)), strict=True))


@pytest.mark.parametrize("groups", ["even", "all to one expert", "one row"])
def test_near_float64(layer, groups):
    given = operands(groups)
    wanted = exact(*given)
    for name, (options, least) in LEAST.items():
        found = layer(options, *given)
        for what in NAMES:
            one, other = np.asarray(found[what], np.float64).ravel(), wanted[what].ravel()
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert cosine > least - (0.01 if groups == "one row" else 0), f"{name}, {what}: {cosine}"
            assert not one[other == 0].any(), f"{name}, {what}: an expert or a token without rows has zeros"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite_reaches_no_other(layer, value):
    """Its block's scale is NaN: its own output and gradient are NaN, and those of its experts' weights."""
    x, cotangent, idx, weights, matrices = operands()
    broken = x.copy()
    broken[7, 130] = value
    own = np.zeros(R * T, bool)
    own[7] = True
    experts = np.isin(np.arange(E), idx[7])
    for name, (options, _) in LEAST.items():
        clean, found = (layer(options, tokens, cotangent, idx, weights, matrices) for tokens in (x, broken))
        for what in ("output", "tokens", "router weights"):
            one, other = (np.asarray(a[what]) for a in (found, clean))
            assert_bits(one[~own], other[~own], f"{name}, {what} of other tokens")
        assert np.isnan(found["output"][7]).all() and np.isnan(found["tokens"][7]).all(), name
        for what in ("gate", "up", "down"):
            one, other = (np.asarray(a[what]) for a in (found, clean))
            assert_bits(one[~experts], other[~experts], f"{name}, {what} of other experts")
            assert np.isnan(one[experts]).any(), f"{name}, {what}"


@pytest.mark.parametrize("by", ["tokens", "gate"])
@pytest.mark.parametrize("dtype", [FP8, "int8", "kernels", "kernels of single matmuls"])
def test_quantized_experts_have_first_derivatives_alone(dtype, by, monkeypatch):
    """Gradients pass straight through rounding. Their own derivative is an error, and not that of the casts."""
    x, _, idx, weights, (gate, up, down) = operands()
    where = "activation" if dtype == "kernels of single matmuls" else "rows"
    if dtype.startswith("kernels"):
        monkeypatch.setattr(hopper, "on_hopper", lambda: True)
        x, gate, up, down = (array.astype(jnp.bfloat16) for array in (x, gate, up, down))
        dtype = FP8
    number = ("tokens", "gate").index(by)

    def loss(x, gate):
        args = x, idx[:T], weights[:T], gate, up[: E // R], down[: E // R]
        return jnp.sum(xm.moe_mlp(*args, num_experts=E, axis_name="ep", experts=dtype, apply_weights_to=where))

    def twice(*args):
        return jax.grad(lambda *args: jnp.sum(jax.grad(loss, number)(*args)), number)(*args)

    mesh = jax.sharding.AbstractMesh((R,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    program = jax.shard_map(twice, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(NotImplementedError, match="second derivative of experts in fp8 or int8.*leave experts"):
        jax.eval_shape(program, x, gate)


@pytest.mark.parametrize("dtype", [FP8, "int8"])
def test_a_gradient_through_quantize_is_refused(dtype):
    x = jnp.ones((2, 200))

    def loss(x, cut=lambda a: a):
        return jnp.sum(x * xm.dequantize(cut(xm.quantize(x, dtype)), jnp.float32))

    assert_bits(jax.grad(lambda x: loss(x, jax.lax.stop_gradient))(x), np.asarray(x), "the factor's gradient alone")
    with pytest.raises(TypeError, match=f"quantize to {dtype} has no gradient.*wire='{dtype}'"):
        jax.grad(loss)(x)
