"""Layers out of checkpoints of several families against an independent float64 evaluation of each."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("safetensors", reason="needs xen-moe-jax[hugging-face]")

from tests.support import hugging_face
from tests.support.hugging_face import E, F, H
from tests.support.layers import make_mesh
from xen_moe_jax.flax import linen, load_hugging_face
from xen_moe_jax.flax.hugging_face import FAMILIES as KNOWN
from xen_moe_jax.flax.hugging_face import register_family
from xen_moe_jax.flax.nnx import MoE

FAMILIES = {
    "Mixtral": hugging_face.mixtral,
    "Qwen3-MoE": hugging_face.qwen3_moe,
    "DeepSeek-V3": hugging_face.deepseek_v3,
    "DeepSeek-V3, fp8": functools.partial(hugging_face.deepseek_v3, fp8=True),
    "MiniMax-M2": hugging_face.minimax_m2,
    "gpt-oss": hugging_face.gpt_oss,
    "gpt-oss, MXFP4": functools.partial(hugging_face.gpt_oss, mxfp4=True),
}
X = np.random.default_rng(7).normal(size=(16, H))


def assert_close(y, expected):
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)  # float32 against float64


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_family(name, tmp_path):
    layer, forward = FAMILIES[name](tmp_path / "model")
    mesh = make_mesh((2, 2), ("ep", "tp"))
    with jax.set_mesh(mesh):
        config, weights = load_hugging_face(tmp_path / "model", layer, dtype=jnp.float32, tensor_axis="tp")
        assert {s.data.shape for s in weights["gate"].addressable_shards} == {(E // 2, H, F // 2)}
        moe = MoE.from_weights(config, weights)
        y, _ = jax.jit(lambda x: moe(x))(jnp.asarray(X, jnp.float32))
    assert_close(y, forward(X))


def test_one_device_linen_and_the_default_dtype(tmp_path):
    layer, forward = hugging_face.deepseek_v3(tmp_path)
    config, weights = load_hugging_face(tmp_path, layer)
    assert (
        weights["gate"].dtype == jnp.bfloat16 and weights["router"].dtype == weights["router_bias"].dtype == jnp.float32
    )
    y, _ = linen.MoE(config).apply(linen.variables_of(weights), jnp.asarray(X, jnp.bfloat16))
    error = np.linalg.norm(np.asarray(y, np.float64) - forward(X)) / np.linalg.norm(forward(X))
    assert error < 0.03, "bfloat16 weights and tokens; a flipped choice of experts would cost more"


@pytest.mark.parametrize("axes", [("ep",), ("node", "gpu")])
def test_any_mesh(axes, tmp_path):
    """Every device holds its own part, which it has read from the file itself."""
    layer, _ = hugging_face.gpt_oss(tmp_path, mxfp4=True)
    whole = load_hugging_face(tmp_path, layer, dtype=jnp.float32).weights
    mesh = make_mesh((4,) if len(axes) == 1 else (2, 2), axes)
    axis_name = axes[0] if len(axes) == 1 else axes
    split = load_hugging_face(tmp_path, layer, mesh=mesh, dtype=jnp.float32, axis_name=axis_name).weights
    assert {s.data.shape for s in split["up_bias"].addressable_shards} == {(E // 4, F)}
    jax.tree.map(np.testing.assert_array_equal, split, whole)


def changed(tmp_path, **config):
    layer, _ = hugging_face.mixtral(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return functools.partial(load_hugging_face, tmp_path, layer)


def rewritten(folder, drop=(), **config):
    file = folder / "config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in drop}
    file.write_text(json.dumps(kept | config))


@pytest.mark.parametrize(
    "write, drop, config",
    [
        (hugging_face.qwen3_moe, ["num_experts"], {"num_local_experts": E}),  # as transformers 5 writes it
        (hugging_face.qwen3_moe, ["moe_intermediate_size"], {"model_type": "olmoe", "intermediate_size": F}),
        (hugging_face.deepseek_v3, [], {"model_type": "kimi_k2"}),
        (hugging_face.deepseek_v3, ["topk_method", "scoring_func", "moe_layer_freq"], {"model_type": "glm4_moe"}),
        (hugging_face.deepseek_v3, ["topk_method", "moe_layer_freq"], {"model_type": "dots1"}),
        (
            hugging_face.deepseek_v3,
            ["first_k_dense_replace"],
            {"model_type": "deepseek_v32", "mlp_layer_types": ["dense"] * 3 + ["sparse"]},
        ),
    ],
    ids=["Qwen3-MoE by transformers 5", "OLMoE", "Kimi K2", "GLM-4.5", "dots1", "DeepSeek-V3.2"],
)
def test_another_config_for_the_same_tensors(write, drop, config, tmp_path):
    layer, _ = write(tmp_path)
    expected = load_hugging_face(tmp_path, layer)
    rewritten(tmp_path, drop, **config)
    loaded = load_hugging_face(tmp_path, layer)
    assert loaded.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, expected.weights)
    if "mlp_layer_types" in config:
        with pytest.raises(ValueError, match="layer=2: .* not one with experts"):
            load_hugging_face(tmp_path, 2)


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_config_and_tensors_of_a_model_of_text_and_images(start, tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path / "text")
    expected = load_hugging_face(tmp_path / "text", layer)
    layer, _ = hugging_face.mixtral(tmp_path / "both", start=start)
    text = json.loads((tmp_path / "both" / "config.json").read_text())
    (tmp_path / "both" / "config.json").write_text(json.dumps({"model_type": "sees_too", "text_config": text}))
    loaded = load_hugging_face(tmp_path / "both", layer)
    assert loaded.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, expected.weights)


def test_a_family_of_your_own(tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path)
    expected = load_hugging_face(tmp_path, layer)
    rewritten(tmp_path, model_type="mine")
    with pytest.raises(ValueError, match=r"model_type='mine'.*register_family"):
        load_hugging_face(tmp_path, layer)
    try:
        register_family("mine", KNOWN["mixtral"])
        jax.tree.map(np.testing.assert_array_equal, load_hugging_face(tmp_path, layer).weights, expected.weights)
    finally:
        KNOWN.pop("mine", None)
    with pytest.raises(TypeError, match="family='mixtral': must be a"):
        register_family("mine", "mixtral")
    with pytest.raises(TypeError, match="model_type=3: must be the string"):
        register_family(3, KNOWN["mixtral"])


@pytest.mark.parametrize(
    "file, content, message",
    [
        (
            "model-00001-of-00001.safetensors",
            b"version https://git-lfs.github.com/spec/v1",
            r"not a whole safetensors file.*lfs pull",
        ),
        ("config.json", b'{"model_type": "mixtral"', r"config.json: not JSON .*; fetch it again"),
        ("config.json", b"[]", r"config.json: holds a list and must hold an object"),
        (
            "config.json",
            b'{"model_type": "mixtral"}',
            r"config.json: has no 'hidden_size', which mixtral configs have.*register_family",
        ),
    ],
)
def test_broken_files(file, content, message, tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path)
    assert (tmp_path / file).exists()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_hugging_face(tmp_path, layer)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layer": "1"}, "layer='1': must be an int"),
        ({"layer": 1.0}, "layer=1.0: must be an int"),
        ({"layer": 1, "mesh": "ep"}, "mesh='ep': must be a jax.sharding.Mesh"),
    ],
)
def test_arguments_of_another_type(arguments, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        load_hugging_face(tmp_path, **arguments)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*has no config.json; give the folder"):
        load_hugging_face(tmp_path / "nowhere", 0)
    with pytest.raises(ValueError, match=r"model_type='bert': must be one of \('mixtral'"):
        changed(tmp_path, model_type="bert")()
    with pytest.raises(ValueError, match=r"hidden_act='gelu': only 'silu'"):
        changed(tmp_path, hidden_act="gelu")()
    with pytest.raises(ValueError, match=r"gate: the checkpoint's part is .* and config.json says"):
        changed(tmp_path, intermediate_size=F + 1)()
    with pytest.raises(KeyError, match=r"no tensor 'model.layers.4.block_sparse_moe.gate.weight'.*no such layer"):
        changed(tmp_path, num_hidden_layers=6)
        load_hugging_face(tmp_path, 4)
    changed(tmp_path)
    with pytest.raises(ValueError, match=r"layer=5: the checkpoint has 2 layers"):
        load_hugging_face(tmp_path, 5)
    with pytest.raises(ValueError, match=r"a mixtral checkpoint has no weights for \['shared_down'"):
        changed(tmp_path)(num_shared_experts=1)
    layer, _ = hugging_face.qwen3_moe(tmp_path / "qwen")
    for dense in (0, 1, 2):
        with pytest.raises(ValueError, match=rf"layer={dense}: .* not one with experts"):
            load_hugging_face(tmp_path / "qwen", dense)
    config, weights = load_hugging_face(tmp_path / "qwen", layer)
    with pytest.raises(ValueError, match=r"weights: router_bias is \(8,\) and must be None"):
        MoE.from_weights(config, weights | {"router_bias": jnp.zeros(8)})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'xen-moe-jax\[hugging-face\]'"):
        load_hugging_face(tmp_path, 0)
