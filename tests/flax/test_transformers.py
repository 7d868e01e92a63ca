"""Small random models that transformers makes and saves: a layer by this library and by transformers' own code.

These tests need torch and transformers; elsewhere `tests/support/hugging_face.py` writes such checkpoints.
"""

import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("torch", reason="compares with torch's layers")
pytest.importorskip("transformers", minversion="5.0", reason="compares with its layers")

import xen_moe_jax as xm
from tools import compare_transformers
from xen_moe_jax.flax import load_hugging_face

GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES = [
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
    ("qwen3_5_moe_text", {}),
    ("olmoe", {}),
    ("llama4_text", {}),
    ("llama4_text", {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    ("phimoe", {"num_experts_per_tok": 2}),
    ("phimoe", {"num_experts_per_tok": 2, "router_jitter_noise": 0.3}),
    ("granitemoe", {}),
    ("granitemoeshared", {}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("granitemoehybrid", {}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_norm_min": 0.9}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("deepseek_v2", {}),
    ("deepseek_v2", GROUPS),
    ("deepseek_v3", {}),
    ("deepseek_v32", {}),
    ("glm4_moe", {}),
    ("dots1", {}),
    ("minimax_m2", {}),
    ("gpt_oss", {}),
]


@pytest.mark.parametrize("model_type, fields", CASES, ids=[f"{kind} {fields or ''}".strip() for kind, fields in CASES])
def test_equals_transformers(model_type, fields, tmp_path):
    compare_transformers.generate(model_type, tmp_path, **fields)
    assert compare_transformers.difference(tmp_path, layer=1) <= 1e-6


@pytest.mark.parametrize(
    "model_type, fields",
    [("deepseek_v3", {"hidden_size": 256, "moe_intermediate_size": 128}), ("gpt_oss", {"intermediate_size": 160})],
)
def test_equals_transformers_with_weights_as_they_are_shipped(model_type, fields, tmp_path):
    """What transformers' own code dequantizes, and this library keeps: fp8 in blocks of 128 x 128, and MXFP4."""
    compare_transformers.generate(model_type, tmp_path / "wide", **fields)
    before = compare_transformers.difference(tmp_path / "wide", layer=1)
    compare_transformers.quantize(tmp_path / "wide", tmp_path / "shipped", model_type)
    kept = load_hugging_face(tmp_path / "shipped", 1, keep_quantised=True).weights
    assert all(isinstance(kept[name], xm.QuantizedWeight) for name in ("gate", "up", "down"))
    error = compare_transformers.difference(tmp_path / "wide", layer=1, shipped=tmp_path / "shipped")
    assert before <= 1e-6 and error <= 1e-6


def test_dense_layers_are_those_of_transformers(tmp_path):
    compare_transformers.generate("llama4_text", tmp_path, interleave_moe_layer_step=2)
    with pytest.raises(ValueError, match="layer=0: .* not one with experts"):
        load_hugging_face(tmp_path, 0)
