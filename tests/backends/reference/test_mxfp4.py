"""wire="mxfp4": bits of the oracle, gradients straight through, the error of a backend without kernels.

Whole operations are cases of the conformance class.
"""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits
from xen_moe_jax import _mxfp4
from xen_moe_jax._quantize import Wire, from_wire, quantize_arrays
from xen_moe_jax.backends import cuda

R, T, K, E, H = 4, 5, 2, 8, 80


def test_every_number_of_four_bits():
    codes = jnp.arange(16)
    values = _mxfp4.values_of(codes)
    np.testing.assert_array_equal(
        values, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    # halfway between neighbours, a little more and a little less, and beyond the largest
    between = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0], np.float32)
    x = np.concatenate([between, np.nextafter(between, 9), np.nextafter(between, -9)])
    x = np.concatenate([x, -x]).astype(np.float32)
    np.testing.assert_array_equal(_mxfp4.values_of(_mxfp4.codes_of(jnp.asarray(x))), x.astype(ml_dtypes.float4_e2m1fn))
    chex.assert_trees_all_equal(_mxfp4.unpack(_mxfp4.pack(codes)), codes.astype(jnp.int32))
    exponents = jnp.arange(256, dtype=jnp.uint8)
    chex.assert_trees_all_equal(_mxfp4.exponents_of(_mxfp4.scales_of(exponents))[1:], exponents[1:])


@pytest.mark.parametrize("scale", [1.0, 2.0**-120, 5e37], ids=["usual", "below the smallest scale", "largest"])
def test_rows(scale):
    """The oracle's rows, NaN where a block holds a NaN or an infinity, errors up to a fifth of a block's largest."""
    x = (np.random.default_rng(0).uniform(-3, 3, (7, 100)) * scale).astype(np.float32)
    wire = Wire("mxfp4")
    assert (wire.scale_format, wire.row_bytes(100)) == ("ue8m0", 4 * 17)

    @jax.jit
    def there_and_back(x):
        payload = quantize_arrays(x, wire)
        assert [(a.dtype, a.shape) for a in payload] == [(jnp.uint8, (7, 64)), (jnp.uint8, (7, 4))]
        return from_wire(payload, wire, 100, jnp.float32)

    back = np.asarray(there_and_back(x))
    assert_bits(back, oracle.mxfp4(x), "rows")
    if scale == 1:
        largest = np.abs(np.pad(x, ((0, 0), (0, 28)))).reshape(7, 4, 32).max(-1).repeat(32, 1)[:, :100]
        assert (np.abs(back - x) <= largest * 0.2000001).all()
        x[2, 40], x[3, 99] = np.nan, -np.inf
        back = np.asarray(there_and_back(x))
        wanted = np.zeros(x.shape, bool)
        wanted[2, 32:64], wanted[3, 96:] = True, True
        np.testing.assert_array_equal(np.isnan(back), wanted)


def layer(wire, gradient_wire=None, *, halves=False, config=None):
    def body(x, idx, weights):
        given = {"wire": wire, "gradient_wire": gradient_wire, "config": config}
        if halves:
            flight = xm.dispatch_start(x, idx, weights, num_experts=E, axis_name="ep", **given)
            routed = xm.dispatch_done(flight)
            return xm.combine_done(xm.combine_start(3 * routed.x, routed.handle, **given))
        routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name="ep", **given)
        return xm.combine(3 * routed.x, routed.handle, **given)

    mesh = jax.make_mesh((R,), ("ep",), devices=jax.devices()[:R], axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def operands():
    rng = np.random.default_rng(1)
    idx = np.argsort(rng.random((R * T, E)), axis=1)[:, :K].astype(np.int32)
    return (
        jnp.asarray(rng.standard_normal((R * T, H)), jnp.float32),
        idx,
        jnp.asarray(rng.random((R * T, K)), jnp.float32),
    )


def test_gradients_are_straight_through_and_halves_have_the_same_bits():
    x, idx, weights = operands()
    target = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.float32)

    def run(*wires):
        def loss(x):
            out = layer(*wires)(x, idx, weights)
            return jnp.vdot(out, target), out

        (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        return out, gradient

    (plain, exact), (out, straight), (_, travelled) = run(None), run("mxfp4"), run("mxfp4", "mxfp4")
    chex.assert_trees_all_equal(straight, exact)
    error = np.linalg.norm(travelled - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.2
    chex.assert_trees_all_equal(layer("mxfp4", halves=True)(x, idx, weights), out)
    assert 0.01 < np.linalg.norm(out - plain) / np.linalg.norm(out) < 0.2


@pytest.mark.parametrize("halves", [False, True])
def test_a_backend_without_kernels_says_so(halves):
    message = r"wire='mxfp4': the pallas backend has no kernels for it.*KernelConfig\(backend='reference'\)"
    with pytest.raises(ValueError, match=message):
        layer("mxfp4", halves=halves).trace(*operands()).lower(lowering_platforms=("tpu",))
    cuda.BACKEND.check_wire(Wire("mxfp4"))
    by_jax = layer("mxfp4", halves=halves, config=xm.KernelConfig(backend="reference")).trace(*operands())
    assert by_jax.lower(lowering_platforms=("tpu",)).as_text()


def test_quantize_knows_no_rows_of_this_format():
    with pytest.raises(ValueError, match=r"dtype='mxfp4': must be one of \('float8_e4m3fn', 'int8'\)"):
        xm.quantize(jnp.zeros((2, 128)), dtype="mxfp4")
