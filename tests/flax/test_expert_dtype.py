"""Layers whose experts multiply in fp8: near the layer in float32, the same in both front ends, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import flax.linen as nn

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from tests.support.layers import layer, make_mesh
from xen_moe_jax.experts import float8
from xen_moe_jax.flax import MoEConfig, linen, nnx
from xen_moe_jax.flax._parameters import parameter_table
from xen_moe_jax.flax._placement import quantized_weights

CONFIG = MoEConfig(
    hidden_size=160, intermediate_size=96, num_experts=6, top_k=2, num_shared_experts=1, expert_dtype="float8_e4m3fn"
)
PLAIN = dataclasses.replace(CONFIG, expert_dtype=None)


def test_a_layer_and_its_gradients():
    mesh = make_mesh((4,), ("ep",))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 40, 160)), jnp.float32)
    params = nn.unbox(jax.jit(linen.MoE(CONFIG, mesh=mesh).init)(jax.random.key(0), x))["params"]

    def run(config, params, x, codes=None):
        def loss(params, x):
            y, _ = linen.MoE(config, mesh=mesh).apply({"params": params}, x, quantized=codes)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    gradients, y = run(CONFIG, params, x)
    exact_gradients, exact = run(PLAIN, params, x)
    ours, others = (jax.tree.leaves_with_path(t) for t in ((gradients, y), (exact_gradients, exact)))
    for (path, one), (_, other) in zip(ours, others, strict=True):
        one, other = (np.asarray(a, np.float64).ravel() for a in (one, other))
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > 0.995, f"{jax.tree_util.keystr(path)}: {cosine}"
    assert not np.array_equal(y, exact)

    in_linen = jax.jit(lambda p: linen.MoE(CONFIG, mesh=mesh).apply({"params": p}, method="quantized_weights"))
    in_nnx = jax.jit(lambda p: nnx.MoE.from_weights(CONFIG, p, mesh=mesh).quantized_weights())
    codes = in_linen(params)
    for one, other in zip(jax.tree.leaves(in_nnx(params)), jax.tree.leaves(codes), strict=True):
        assert_bits(one, other, "codes")
    for one, other in zip(jax.tree.leaves(run(CONFIG, params, x, codes)), jax.tree.leaves((gradients, y)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="quantized weights with MoEConfig.expert_dtype=None: set 'float8_e4m3fn'"):
        run(PLAIN, params, x, codes)

    values = {
        n: xm.QuantizedWeight(*jax.jit(float8.quantize_weights)(params[n]), (128, 128)) for n in ("gate", "up", "down")
    }
    as_they_are, quantized_here = (
        jax.jit(lambda layer, x: layer(x)[0])(nnx.MoE.from_weights(CONFIG, weights, mesh=mesh), x)
        for weights in (params | values, params)
    )
    assert_bits(as_they_are, quantized_here, "weights as they are")
    np.testing.assert_allclose(quantized_here, y, rtol=1e-4, atol=1e-5)  # XLA fuses another program otherwise


def traced(changes, mesh=None, compute_dtype=None, by_codes=True, inside=False):
    """Traces a layer with these `changes` of `CONFIG`, by its codes, and returns its output's shape; `inside` a
    `shard_map` that gives every rank all weights."""
    moe = linen.MoE(dataclasses.replace(CONFIG, **changes), mesh=None if inside else mesh)

    def run(params, x):
        codes = moe.apply(params, compute_dtype, method="quantized_weights")
        return moe.apply(params, x, quantized=codes if by_codes else None)[0]

    run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep")) if inside else run
    params = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in parameter_table(moe.config).items()}
    return jax.eval_shape(run, {"params": params}, jax.ShapeDtypeStruct((8, 160), jnp.bfloat16)).shape


def test_chunks_multiply_by_the_codes(monkeypatch):
    calls, quantize = [], float8.quantize_weights
    monkeypatch.setattr(float8, "quantize_weights", lambda weights: calls.append(weights) or quantize(weights))
    for by_codes, count in ((True, 3), (False, 6)):
        assert traced({"num_chunks": 2, "remat": "none"}, by_codes=by_codes) == (8, 160) and len(calls) == count
        calls.clear()


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_of_a_tensor_axis_hold_whole_blocks_of_codes(inside):
    run = functools.partial(traced, mesh=make_mesh((2, 2), ("ep", "tp")), inside=inside)
    assert run({"tensor_axis": "tp", "intermediate_size": 256}) == (8, 160)
    for width in (128, 384):
        with pytest.raises(ValueError, match=rf"size={width}: the 2 ranks of tensor_axis='tp' cut .* multiple of 256"):
            run({"tensor_axis": "tp", "intermediate_size": width})


def test_codes_of_weights_in_the_dtype_of_the_tokens():
    params = {name: jax.random.normal(jax.random.key(0), (6, 160, 160)) for name in ("gate", "up", "down")}
    config = dataclasses.replace(CONFIG, intermediate_size=160)
    codes = quantized_weights(config, None, params, "bfloat16")
    expected = xm.quantize_weights(jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
    for one, other in zip(jax.tree.leaves(codes), jax.tree.leaves(expected), strict=True):
        assert_bits(one, other, "codes")
    with pytest.raises(ValueError, match="compute_dtype=bfloat16 with MoEConfig.dtype=float32.* leave compute_dtype"):
        traced({"dtype": jnp.float32}, compute_dtype="bfloat16")
    shipped = {name: xm.QuantizedWeight(code.values, code.scales, (128, 128)) for name, code in codes.items()}
    assert quantized_weights(config, None, shipped) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"expert_dtype": "int4"},
            r"MoEConfig.expert_dtype='int4': must be None, 'float8_e4m3fn' or 'int8'",
        ),
        ({"expert_dtype": "int8", "grouped_matmul": "hopper"}, "'int8' with grouped_matmul='hopper': .*use 'auto'"),
        ({"layout": "padded"}, r"expert_dtype='float8_e4m3fn' with layout='padded': .*use 'grouped'"),
        ({"grouped_matmul": "tokamax"}, r"with grouped_matmul='tokamax': it has a matmul of its own; use 'auto'"),
        ({"experts": lambda rows, sizes, weights: rows}, r"with experts=<function.*use None"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
    assert hash(dataclasses.replace(CONFIG, top_k=1)) != hash(CONFIG)
    in_int8 = dataclasses.replace(CONFIG, expert_dtype="int8")  # made from a config whose matmul is chosen already
    assert (
        in_int8.grouped_matmul is float8.automatic_in_int8
        and dataclasses.replace(in_int8, expert_dtype=float8.DTYPE) == CONFIG
    )
    assert dataclasses.replace(CONFIG, expert_dtype=jnp.int8) == in_int8
    for quantized in (CONFIG, in_int8):  # without a dtype the experts are not quantized
        assert dataclasses.replace(quantized, expert_dtype=None).grouped_matmul == "auto"
    plainly = dataclasses.replace(in_int8, grouped_matmul="ragged_dot")
    assert dataclasses.replace(plainly, expert_dtype=None).grouped_matmul == "ragged_dot"


@pytest.mark.parametrize(
    ("codes", "error", "message"),
    [
        (lambda of: 3, TypeError, "quantized is a int: must be a dict; pass what quantized_weights returned"),
        (lambda of: {"up": 3}, TypeError, r"quantized\['up'\] is a int: must be a Float8Weight"),
        (lambda of: {"router": of["up"]}, ValueError, r"codes of 'router': must be one of \('gate', 'up', 'down'\)"),
    ],
    ids=["no dict", "no codes", "no expert"],
)
def test_wrong_codes(codes, error, message):
    moe = layer(CONFIG)
    with pytest.raises(error, match=message):
        moe(jnp.ones((4, CONFIG.hidden_size)), quantized=codes(moe.quantized_weights()))
    with pytest.raises(TypeError, match="compute_dtype='wide': must be None or a dtype"):
        moe.quantized_weights("wide")


def test_codes_without_scales_are_no_weights():
    moe = layer(PLAIN)
    weights = {name: getattr(moe, name)[...] for name in moe.weight_names}
    weights["up"] = jnp.ones(weights["up"].shape, jnp.int8)
    x = jnp.ones((4, CONFIG.hidden_size))
    with pytest.raises(TypeError, match="up has dtype int8: must be floating point, or an xm.QuantizedWeight"):
        nnx.MoE.from_weights(PLAIN, weights)(x)
    with pytest.raises(TypeError, match="up has dtype int8"):
        linen.MoE(PLAIN).apply(linen.variables_of(weights), x)
