"""Layers out of checkpoints of several families against an independent float64 evaluation of each."""

import contextlib
import dataclasses
import functools
import json
import shutil
import sys

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("safetensors", reason="needs xen-moe-jax[hugging-face]")

from safetensors.numpy import load_file, save_file

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
    "Qwen2-MoE": hugging_face.qwen2_moe,
    "DeepSeek-V2": hugging_face.deepseek_v2,
    "ERNIE 4.5": hugging_face.ernie,
    "Phi-3.5-MoE": hugging_face.phimoe,
    "Granite 4.0": hugging_face.granite,
    "Llama 4": hugging_face.llama4,
    "Llama 4, two experts": functools.partial(hugging_face.llama4, top_k=2),
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
    y, _ = jax.jit(linen.MoE(config).apply)(linen.variables_of(weights), jnp.asarray(X, jnp.bfloat16))
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
    chex.assert_trees_all_equal(split, whole, strict=True)


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
            functools.partial(hugging_face.qwen2_moe, normalize=True),
            ["norm_topk_prob"],  # the default of transformers for these types differs from that of Qwen2
            {"model_type": "qwen3_next"},
        ),
        (
            functools.partial(hugging_face.qwen2_moe, normalize=True),
            ["norm_topk_prob", "mlp_only_layers"],
            {"model_type": "qwen3_5_moe_text"},
        ),
        (
            functools.partial(hugging_face.deepseek_v2),
            ["moe_layer_freq", "scoring_func"],
            {"mlp_bias": False},  # as transformers writes it
        ),
        (hugging_face.granite, [], {"model_type": "granitemoeshared"}),
        (
            hugging_face.deepseek_v3,
            ["first_k_dense_replace"],
            {"model_type": "deepseek_v32", "mlp_layer_types": ["dense"] * 3 + ["sparse"]},
        ),
    ],
    ids=[
        "Qwen3-MoE by transformers 5",
        "OLMoE",
        "Kimi K2",
        "GLM-4.5",
        "dots1",
        "Qwen3-Next",
        "Qwen3.5",
        "DeepSeek-V2 by transformers 5",
        "Granite 3.1",
        "DeepSeek-V3.2",
    ],
)
def test_another_config_for_the_same_tensors(write, drop, config, tmp_path):
    layer, _ = write(tmp_path)
    expected = load_hugging_face(tmp_path, layer)
    rewritten(tmp_path, drop, **config)
    loaded = load_hugging_face(tmp_path, layer)
    assert loaded.config == expected.config
    chex.assert_trees_all_equal(loaded.weights, expected.weights, strict=True)
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
    chex.assert_trees_all_equal(loaded.weights, expected.weights, strict=True)


ELSEWHERE = {
    "no shared expert (Granite 3.0)": functools.partial(hugging_face.granite, kind="granitemoe"),
    "no bias (ERNIE 4.5)": functools.partial(hugging_face.ernie, bias=False, norm_min=1e-12),
    "normalized (Qwen2-MoE)": functools.partial(hugging_face.qwen2_moe, normalize=True),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_a_config_can_say(name, tmp_path):
    layer, forward = ELSEWHERE[name](tmp_path)
    config, weights = load_hugging_face(tmp_path, layer, dtype=jnp.float32)
    y, _ = jax.jit(linen.MoE(config).apply)(linen.variables_of(weights), jnp.asarray(X, jnp.float32))
    assert_close(y, forward(X))


@pytest.mark.parametrize(
    "axes, layout", [({}, "grouped"), ({"token_axes": ()}, "padded")], ids=["one device", "replicated"]
)
def test_llama4_elsewhere(axes, layout, tmp_path):
    layer, forward = hugging_face.llama4(tmp_path, top_k=2)
    with jax.set_mesh(make_mesh((2,), ("ep",))) if axes else contextlib.nullcontext():
        config, weights = load_hugging_face(tmp_path, layer, dtype=jnp.float32, layout=layout, **axes)
        y, _ = jax.jit(linen.MoE(config).apply)(linen.variables_of(weights), jnp.asarray(X, jnp.float32))
    assert_close(y, forward(X))


@pytest.mark.parametrize(
    "write, kind, out_first",
    [
        (hugging_face.qwen2_moe, "qwen3_5_moe", True),
        (hugging_face.qwen3_moe, "qwen3_vl_moe", False),
        (hugging_face.qwen3_moe, "qwen3_vl_moe", True),
    ],
    ids=["Qwen3.5", "Qwen3-VL", "Qwen3-VL by transformers 5"],
)
def test_experts_in_one_tensor(write, kind, out_first, tmp_path):
    """Returns the experts as `[E, out, in]` or `[E, in, out]`. Gate and up are square here: `2 * F == H`."""
    layer, _ = write(tmp_path / "single", normalize=True)
    expected = load_hugging_face(tmp_path / "single", layer)
    shutil.copytree(tmp_path / "single", tmp_path / "fused")
    for file in (tmp_path / "fused").glob("*.safetensors"):
        file.unlink()
    tensors = {}
    for file in sorted((tmp_path / "single").glob("*.safetensors")):
        tensors |= load_file(file)
    start = f"model.layers.{layer}.mlp.experts"
    gate, up, down = (
        np.stack([tensors.pop(f"{start}.{e}.{name}_proj.weight") for e in range(E)]) for name in ("gate", "up", "down")
    )
    both = np.concatenate([gate, up], axis=1)
    tensors[f"{start}.gate_up_proj"] = both if out_first else np.ascontiguousarray(both.swapaxes(1, 2))
    tensors[f"{start}.down_proj"] = down if out_first else np.ascontiguousarray(down.swapaxes(1, 2))
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    rewritten(tmp_path / "fused", model_type=kind)
    for mesh in (None, make_mesh((2, 2), ("ep", "tp"))):
        loaded = load_hugging_face(tmp_path / "fused", layer, mesh=mesh, tensor_axis="tp" if mesh else None)
        chex.assert_trees_all_equal(loaded.weights, expected.weights, strict=True)


REFUSED = [
    (hugging_face.qwen2_moe, {"hidden_act": "gelu"}, r"hidden_act='gelu': only 'silu' is known for qwen2_moe"),
    (hugging_face.qwen2_moe, {"mlp_only_layers": [1]}, r"layer=1: .* not one with experts"),
    (hugging_face.qwen2_moe, {"mlp_only_layers": None, "decoder_sparse_step": 3}, r"layer=1: .* not one with experts"),
    (hugging_face.qwen2_moe, {"decoder_sparse_step": 0}, r"decoder_sparse_step=0: must be a positive int"),
    (hugging_face.qwen2_moe, {"shared_expert_intermediate_size": 24}, r"shared_gate: .* \(128, 48\) .* \(128, 24\)"),
    (hugging_face.qwen2_moe, {"model_type": "qwen3_moe"}, r"no parameter of a qwen3_moe .*shared_expert"),
    (hugging_face.qwen2_moe, {"model_type": "qwen3_5_moe"}, r"norm_topk_prob=False: only True is known"),
    (hugging_face.phimoe, {"num_experts_per_tok": 3}, r"num_experts_per_tok=3: only 2 is known for phimoe"),
    (hugging_face.granite, {"shared_intermediate_size": 0}, None),  # nothing of shared_mlp is read
    (hugging_face.granite, {"num_local_experts": 0}, r"layer=0: .* not one with experts"),
    (
        hugging_face.granite,
        {"intermediate_size": F // 2},
        r"gate: .* \(8, 128, 64\) and config.json says \(8, 128, 32\)",
    ),
    (hugging_face.ernie, {"use_bias": True}, r"use_bias=True: only False is known for ernie4_5_moe"),
    (hugging_face.ernie, {"moe_gate": "top2_fused"}, r"moe_gate='top2_fused': only 'topk'"),
    (hugging_face.ernie, {"moe_layer_start_index": 2}, r"layer=1: .* not one with experts"),
    (hugging_face.ernie, {"moe_layer_end_index": 0}, r"layer=1: .* not one with experts"),
    (hugging_face.ernie, {"moe_layer_interval": 4}, r"layer=1: .* not one with experts"),
    (hugging_face.ernie, {"moe_num_shared_experts": None}, r"tensors that no parameter .*shared_experts"),
    (hugging_face.ernie, {"moe_use_aux_free": False}, r"tensors that no parameter .*e_score_correction_bias"),
    (hugging_face.deepseek_v2, {"norm_topk_prob": True}, r"norm_topk_prob=True: only False is known for deepseek_v2"),
    (hugging_face.deepseek_v2, {"topk_method": "noaux_tc"}, r"topk_method='noaux_tc': must be 'greedy' or 'group"),
    (hugging_face.deepseek_v2, {"scoring_func": "sigmoid"}, r"scoring_func='sigmoid': only 'softmax'"),
    (hugging_face.deepseek_v2, {"mlp_bias": True}, r"mlp_bias=True: only False"),
    (hugging_face.deepseek_v3, {"topk_method": "greedy"}, r"topk_method='greedy': only 'noaux_tc'"),
    (hugging_face.minimax_m2, {"use_routing_bias": False}, r"use_routing_bias=False: only True"),
]


@pytest.mark.parametrize("write, config, message", REFUSED, ids=[f"{w.__name__} {c}" for w, c, _ in REFUSED])
def test_what_the_config_says_is_followed_or_refused(write, config, message, tmp_path):
    layer, _ = write(tmp_path)
    rewritten(tmp_path, **config)
    if message is None:
        assert "shared_down" not in load_hugging_face(tmp_path, layer).weights
        return
    with pytest.raises(ValueError, match=message):
        load_hugging_face(tmp_path, layer)


def test_layers_of_llama4(tmp_path):
    layer, _ = hugging_face.llama4(tmp_path)
    for dense in (0, 2):
        with pytest.raises(ValueError, match=rf"layer={dense}: .* not one with experts"):
            load_hugging_face(tmp_path, dense)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rewritten(tmp_path, text_config=text | {"moe_layers": [0, 2, 3]})
    with pytest.raises(ValueError, match=rf"layer={layer}: .* not one with experts"):
        load_hugging_face(tmp_path, layer)


def test_tensors_that_no_parameter_is_read_from(tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path)
    file = tmp_path / "model-00001-of-00001.safetensors"
    name = f"model.layers.{layer}.block_sparse_moe.experts.3.w2.bias"
    beside = {f"model.layers.{layer}.self_attn.w": np.zeros(1), "model.layers.0.block_sparse_moe.w": np.zeros(1)}
    save_file(load_file(file) | beside, file)
    expected = load_hugging_face(tmp_path, layer).weights
    save_file(load_file(file) | {name: np.zeros(H, np.float32)}, file)
    with pytest.raises(ValueError, match=r"no parameter of a mixtral layer is read from: .*w2.bias.*register_family"):
        load_hugging_face(tmp_path, layer)
    try:
        rewritten(tmp_path, model_type="mine")
        register_family("mine", dataclasses.replace(KNOWN["mixtral"], unused=("w2.bias",)))
        chex.assert_trees_all_equal(load_hugging_face(tmp_path, layer).weights, expected, strict=True)
    finally:
        KNOWN.pop("mine", None)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
def test_weights_quantized_in_another_way(dtype, tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path)
    file = tmp_path / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    for expert in range(E):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"
        tensors[name] = tensors[name].astype(dtype)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"gate: the checkpoint keeps it in (float8_e4m3fn|int8), quantized in a way"):
        load_hugging_face(tmp_path, layer)


def test_a_config_of_a_narrower_expert_on_a_mesh(tmp_path):
    """Each device reads a part alone, and all of these parts are there."""
    load = changed(tmp_path, intermediate_size=F // 2)
    with pytest.raises(ValueError, match=r"gate: the checkpoint's part is 64 long and config.json says 32"):
        load(mesh=make_mesh((2, 2), ("ep", "tp")), tensor_axis="tp")


def test_a_family_of_your_own(tmp_path):
    layer, _ = hugging_face.mixtral(tmp_path)
    expected = load_hugging_face(tmp_path, layer)
    rewritten(tmp_path, model_type="mine")
    with pytest.raises(ValueError, match=r"model_type='mine'.*register_family"):
        load_hugging_face(tmp_path, layer)
    try:
        register_family("mine", KNOWN["mixtral"])
        chex.assert_trees_all_equal(load_hugging_face(tmp_path, layer).weights, expected.weights, strict=True)
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
    layer, _ = hugging_face.deepseek_v3(tmp_path / "deepseek")
    with pytest.raises(ValueError, match=r"a deepseek_v3 checkpoint has router_bias, and this layer would not"):
        load_hugging_face(tmp_path / "deepseek", layer, balancing="none")
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
