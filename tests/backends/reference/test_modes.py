"""JAX's global modes, narrow integers, and sizes nearer to real ones."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits

RANKS, T, H, K = 4, 8, 64, 2


def operands(experts, idx_dtype=np.int32, tokens=T, hidden=H, top_k=K):
    rng = np.random.default_rng(31)
    x = rng.standard_normal((RANKS * tokens, hidden)).astype(np.float32)
    scores = rng.random((RANKS * tokens, experts))
    idx = np.argpartition(scores, top_k, axis=1)[:, :top_k].astype(idx_dtype)
    return x, idx, rng.random(idx.shape).astype(np.float32)


def layer(mesh, experts, **options):
    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", **options)
        return xm.combine(routed.x, routed.handle)

    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


def place(mesh, *arrays):
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("ep")))


@pytest.mark.parametrize(
    ("dtype", "experts"), [("uint8", 256), ("int8", 128), ("int16", 32768), ("uint32", 8), ("int32", 8)], ids=str
)
def test_slots_of_every_integer_width(mesh4, dtype, experts):
    """The number of experts itself need not fit the dtype, only the index of the last expert: 128 is no int8."""
    x, idx, weights = operands(min(experts, 128), dtype)
    out = jax.jit(layer(mesh4, experts))(*place(mesh4, x, idx, weights))
    np.testing.assert_allclose(out, x * weights.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 257), ("int8", 129), ("int16", 32769)], ids=str)
def test_a_dtype_that_cannot_name_the_last_expert_is_refused(mesh4, dtype, experts):
    arrays = place(mesh4, *operands(128, dtype))
    with pytest.raises(ValueError, match=rf"dtype {dtype}.* cannot name expert {experts - 1} of num_experts={experts}"):
        jax.eval_shape(layer(mesh4, experts), *arrays)


MODES = {
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
    "strict_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "checking_leaks": jax.checking_leaks,
    "eager": contextlib.nullcontext,
}


@pytest.mark.optimized
@pytest.mark.parametrize("mode", MODES)
def test_global_modes_do_not_change_the_result(mesh4, mode):
    arrays = operands(8)
    expected = np.asarray(jax.jit(layer(mesh4, 8))(*place(mesh4, *arrays)))
    with MODES[mode]():
        program = layer(mesh4, 8)
        out = (program if mode in ("eager", "disable_jit") else jax.jit(program))(*place(mesh4, *arrays))
    assert_bits(out, expected, mode)


def test_int64_slots_and_float64_weights(mesh4):
    """Under x64 the gradient of the weights has their dtype, and huge indices do not wrap into range."""
    x, idx, weights = operands(8)
    with jax.enable_x64(True):
        idx = idx.astype(np.int64)
        idx[0] = [2**32, 2**33 + 1]  # 0 and 1 if cut to 32 bits
        program = layer(mesh4, 8)
        args = place(mesh4, x, idx, weights.astype(np.float64))
        out = np.asarray(jax.jit(program)(*args))
        dweights = jax.jit(jax.grad(lambda w, x, i: jnp.sum(program(x, i, w))))(args[2], *args[:2])
    assert not out[0].any() and out[1].any()
    assert dweights.dtype == np.float64 and not np.asarray(dweights)[0].any()


@pytest.mark.parametrize("layout", ["grouped", "ranked", "padded"])
def test_larger_sizes(mesh4, layout):
    """128 experts, eight slots, a thousand tokens: identity experts, so that the sum of the weights is the answer."""
    x, idx, weights = operands(128, tokens=256, hidden=256, top_k=8)

    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=128, axis_name="ep", layout=layout)
        y = routed.x
        if layout == "ranked":
            y = y * jnp.sum(routed.topk_weights, axis=1)[:, None]
        return xm.combine(y, routed.handle), routed.num_tokens_per_expert, routed.num_dropped[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))
    out, per_expert, dropped = program(*place(mesh4, x, idx, weights))
    np.testing.assert_allclose(out, x * weights.sum(1, keepdims=True), rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(per_expert, np.bincount(idx.ravel(), minlength=128))
    assert not np.asarray(dropped).any()
