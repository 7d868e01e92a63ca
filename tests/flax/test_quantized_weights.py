"""Layers with weights as a checkpoint ships them: bits of the widened layer, memory, meshes, gradients, errors."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("safetensors", reason="needs xen-moe-jax[hugging-face]")

from flax import nnx
from safetensors.numpy import load_file, save_file

import xen_moe_jax as xm
from tests.support import hugging_face
from tests.support.checks import assert_bits
from tests.support.hugging_face import E, F, H
from tests.support.layers import make_mesh
from xen_moe_jax.flax import linen, load_hugging_face
from xen_moe_jax.flax.nnx import MoE

X = np.random.default_rng(7).normal(size=(16, H))


def per_channel(folder, dtype=np.int8):
    """Mixtral with a scale for each output channel, as compressed-tensors writes it."""
    layer, _ = hugging_face.mixtral(folder)
    file = next(folder.glob("*.safetensors"))
    tensors, rng = load_file(file), np.random.default_rng(2)
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors[name].shape
        values = np.clip(rng.normal(size=(rows, columns)) * 40, -127, 127)
        tensors[name] = values.astype(dtype)
        tensors[f"{name}_scale"] = rng.uniform(0.5, 2, (rows, 1)).astype(ml_dtypes.bfloat16) / 400
    save_file(tensors, file)
    return layer, None


FORMATS = {
    "fp8 blocks": functools.partial(hugging_face.deepseek_v3, fp8=True),
    "MXFP4": functools.partial(hugging_face.gpt_oss, mxfp4=True),
    "int8 channels": per_channel,
    "fp8 channels": functools.partial(per_channel, dtype=ml_dtypes.float8_e4m3fn),
}
EXPERTS = ("gate", "up", "down")


def both(folder, layer, **options):
    """The layer with widened weights, and with weights as they are."""
    return load_hugging_face(folder, layer, **options), load_hugging_face(folder, layer, keep_quantised=True, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_the_widened_layer(name, dtype, tmp_path):
    """On a mesh whose ranks cut blocks of fp8 (48 x 32), under both layouts, and on one device."""
    layer, _ = FORMATS[name](tmp_path)
    x = jnp.asarray(X, dtype)
    for mesh, options in (
        (make_mesh((2, 2), ("ep", "tp")), {"tensor_axis": "tp"}),
        (None, {"layout": "padded"}),
    ):
        wide, kept = both(tmp_path, layer, mesh=mesh, dtype=dtype, **options)
        assert {n for n, w in kept.weights.items() if isinstance(w, xm.QuantizedWeight)} >= set(EXPERTS)
        for weight in EXPERTS:
            quarter = 4 if name == "MXFP4" else 2
            assert kept.weights[weight].values.nbytes * quarter == wide.weights[weight].astype(jnp.bfloat16).nbytes
            if mesh is not None:
                (shape,) = {part.data.shape for part in kept.weights[weight].values.addressable_shards}
                assert np.prod(shape) * 4 == kept.weights[weight].values.size
        run = jax.jit(lambda module, x: module(x)[0])
        y = run(MoE.from_weights(*kept, mesh=mesh), x)
        assert_bits(y, run(MoE.from_weights(*wide, mesh=mesh), x), f"{name} {options}")
        assert np.abs(np.asarray(y, np.float32)).max() > 0.1
    y, expected = (
        jax.jit(linen.MoE(config).apply)(linen.variables_of(weights), x)[0] for config, weights in (kept, wide)
    )
    assert_bits(y, expected, name)


@pytest.mark.parametrize("name", ["MXFP4", "int8 channels"])
def test_ranks_that_do_not_divide_the_experts_and_another_mesh(name, tmp_path):
    """Loaded on one device; 3 ranks own 8 experts. Channels' scales of down are on every rank of the tensor axis."""
    layer, _ = FORMATS[name](tmp_path)
    x = jnp.asarray(X, jnp.float32)
    for mesh, options in ((make_mesh((3,), ("ep",)), {}), (make_mesh((2, 2), ("ep", "tp")), {"tensor_axis": "tp"})):
        wide, kept = both(tmp_path, layer, dtype=jnp.float32, **options)
        y, expected = (
            jax.jit(lambda module, x: module(x)[0])(MoE.from_weights(*w, mesh=mesh), x) for w in (kept, wide)
        )
        assert_bits(y, expected, name)


def by_hand(weight):
    """The numbers of a QuantizedWeight, element by element."""
    values, scales = np.asarray(weight.values), np.asarray(weight.scales)
    out = np.empty(weight.shape)
    for *before, a, b in np.ndindex(out.shape):
        if weight.is_mxfp4:
            byte = int(values[*before, a // 2, b])
            code = byte >> 4 if a % 2 else byte & 15
            value = hugging_face.FP4[code % 8] * (-1 if code >= 8 else 1)
            scale = 2.0 ** (int(scales[*before, a // 32, b]) - 127) if scales[*before, a // 32, b] < 255 else np.nan
        else:
            value, scale = (
                float(values[*before, a, b]),
                float(scales[*before, a // weight.block[0], b // weight.block[1]]),
            )
        out[*before, a, b] = value * scale
    return out


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_widen(dtype):
    """Short last blocks, every byte, the exponent that means NaN, NaN and infinity as values and scales."""
    rng = np.random.default_rng(1)
    every = np.arange(256, dtype=np.uint8)
    if dtype == "uint8":
        exponents = rng.integers(100, 140, (2, 2, 8)).astype(np.uint8)
        exponents[0, 0, :2] = (2, 255)  # below 2, results are subnormal, and XLA may flush them
        weight = xm.QuantizedWeight(every.repeat(2).reshape(2, 32, 8), exponents, (32, 1))
    else:
        scales = rng.uniform(0.1, 9, (2, 3, 2)).astype(np.float32)
        scales[0, 0, 0], scales[1, 0, 0] = np.nan, np.inf
        values = every.repeat(2)[:500].reshape(2, 25, 10).view(jnp.dtype(dtype))
        weight = xm.QuantizedWeight(values, scales, (9, 7))
    given, exact = jax.tree.map(jnp.asarray, weight), by_hand(weight)
    assert given.shape == exact.shape and np.isnan(exact).any()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(given.widen(jnp.float32), exact.astype(np.float32))
        for run in (jax.jit(lambda w: w.widen(jnp.bfloat16)), lambda w: w.widen()):
            expected = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(np.asarray(run(given)).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
def test_gradients(name, tmp_path):
    """Everything else has the gradients of the widened layer; a quantized weight has none."""
    layer, _ = FORMATS[name](tmp_path)
    x = jnp.asarray(X, jnp.float32)
    wide, kept = both(tmp_path, layer, dtype=jnp.float32)

    def loss(config, own, others, x):
        return jnp.sum(jnp.square(linen.MoE(config).apply(linen.variables_of(others | own), x)[0]))

    own = {n: w for n, w in kept.weights.items() if not isinstance(w, xm.QuantizedWeight)}
    fixed = {n: w for n, w in kept.weights.items() if n not in own}
    run = jax.jit(jax.grad(loss, argnums=(1, 3)), static_argnums=0)
    expected = run(wide.config, own, {n: wide.weights[n] for n in fixed}, x)
    chex.assert_trees_all_equal(run(kept.config, own, fixed, x), expected)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(expected))

    of_module = nnx.grad(lambda m, x: jnp.sum(jnp.square(m(x)[0])), allow_int=True)
    as_module = jax.eval_shape(lambda x: of_module(MoE.from_weights(*kept), x), x)
    assert set(nnx.to_pure_dict(as_module)) == set(own) - {"router_bias"}
    message = "a gradient by a quantized weight .* was asked for: it has none"
    if name == "MXFP4":  # JAX refuses integers, and with allow_int=True their derivative is float0
        with pytest.raises(TypeError, match="but got uint8"):
            jax.grad(loss, argnums=2)(kept.config, own, fixed, x)
    else:
        for transform in (lambda f: f, jax.jit, jax.checkpoint):
            with pytest.raises(TypeError, match=message):
                jax.eval_shape(jax.grad(transform(lambda w: loss(kept.config, own, w, x))), fixed)
        with pytest.raises(TypeError, match=message):
            jax.grad(lambda w: jnp.sum(w.widen(jnp.float32)))(fixed["up"])


def test_functions_of_the_caller_get_weights_as_they_are(tmp_path):
    layer, _ = per_channel(tmp_path)
    wide, _ = both(tmp_path, layer)
    seen = []

    def matmul(rows, weights, group_sizes):
        seen.append(weights.values.dtype)
        return jax.lax.ragged_dot(rows, weights.widen(rows.dtype), group_sizes)

    kept = load_hugging_face(tmp_path, layer, keep_quantised=True, grouped_matmul=matmul)
    y, expected = (MoE.from_weights(*w)(jnp.asarray(X, jnp.bfloat16))[0] for w in (kept, wide))
    assert_bits(y, expected, "a grouped matmul of the caller")
    assert set(seen) == {jnp.dtype("int8")}


def test_errors(tmp_path):
    layer, _ = hugging_face.gpt_oss(tmp_path / "oss", mxfp4=True)
    with pytest.raises(TypeError, match="keep_quantised=1: must be True or False"):
        load_hugging_face(tmp_path / "oss", layer, keep_quantised=1)
    mesh = make_mesh((2, 4), ("ep", "tp"))
    with pytest.raises(
        ValueError, match=r"down is in MXFP4, blocks of 32 along a dimension of 64 that 'tp' divides into"
    ):
        load_hugging_face(tmp_path / "oss", layer, keep_quantised=True, mesh=mesh, tensor_axis="tp")
    load_hugging_face(tmp_path / "oss", layer, mesh=mesh, tensor_axis="tp")

    layer, _ = FORMATS["fp8 blocks"](tmp_path / "fp8")
    config, weights = load_hugging_face(tmp_path / "fp8", layer, keep_quantised=True, tensor_axis="tp")
    mesh = make_mesh((2, 4), ("ep", "tp"))
    with pytest.raises(ValueError, match=r"down has blocks of \(32, 48\) .* 4 ranks of 'tp' cut in a dimension of 64"):
        MoE.from_weights(config, weights, mesh=mesh)(jnp.zeros((8, H)))
    up, scales = weights["up"].values, weights["up"].scales
    cut = jnp.zeros((E, H // 2, F), jnp.uint8), jnp.zeros((E, 8, F), jnp.uint8)
    for wrong, kind, message in (
        (xm.QuantizedWeight(up, scales[:, 1:], (32, 48)), ValueError, "the scales must have shape"),
        (xm.QuantizedWeight(up, None, (32, 48)), TypeError, "has scales of type NoneType"),
        *(
            (xm.QuantizedWeight(up, scales, b), ValueError, "two positive ints")
            for b in ((0, 48), (32,), (32.0, 48), 32)
        ),
        (xm.QuantizedWeight(up, up, (1, 1)), TypeError, "must be values of one of"),
        (xm.QuantizedWeight(*cut, (16, 1)), ValueError, "MXFP4 has blocks of"),
    ):
        with pytest.raises(kind, match=message):
            MoE.from_weights(config, weights | {"up": wrong})
        with pytest.raises(kind, match=message):
            linen.MoE(config).apply(linen.variables_of(weights | {"up": wrong}), jnp.zeros((8, H)))
    with pytest.raises(ValueError, match="up is .* and must be"):
        MoE.from_weights(config, weights | {"up": jax.tree.map(lambda a: a[1:], weights["up"])})
    variables = linen.variables_of(weights)
    variables["quantized"]["up"] = jnp.zeros((E, H, F))
    with pytest.raises(TypeError, match=r"quantized\['up'\] is a .*: must be an xm.QuantizedWeight"):
        linen.MoE(config).apply(variables, jnp.zeros((8, H)))

    layer, _ = per_channel(tmp_path / "int8")
    file = next((tmp_path / "int8").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_scale"))
    save_file(tensors | {name: np.ones((3, 1), np.float32)}, file)
    with pytest.raises(ValueError, match=r"_scale has shape \[3, 1\]: must have one scale for each of the"):
        load_hugging_face(tmp_path / "int8", layer)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(ValueError, match=r"7 of 8 experts have scales; must all or none"):
        load_hugging_face(tmp_path / "int8", layer)
    save_file(tensors | {name.replace("_scale", "_zero_point"): np.ones(1)}, file)
    with pytest.raises(ValueError, match="no parameter of a mixtral layer is read from: .*weight_zero_point"):
        load_hugging_face(tmp_path / "int8", layer)
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["model_type"] == "mixtral"
