"""Checkpoints whose tensors, scales, files or configs are damaged or odd: each one loads rightly, or the error says
which tensor is wrong, and what it has to be."""

import functools
import json

import chex
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("safetensors", reason="needs xen-moe-jax[hugging-face]")

from safetensors.numpy import load_file, save_file

from tests.support import hugging_face
from tests.support.hugging_face import E
from tests.support.layers import make_mesh
from xen_moe_jax.flax import load_hugging_face
from xen_moe_jax.flax.hugging_face import Checkpoint, quantized

FP8 = functools.partial(hugging_face.deepseek_v3, fp8=True)
MXFP4 = functools.partial(hugging_face.gpt_oss, mxfp4=True)
FUSED = "block_sparse_moe.input_linear.weight"


def tensors_of(folder):
    """All tensors, out of files that are then gone."""
    with Checkpoint(folder) as checkpoint:
        found = {name: np.array(checkpoint.read(name)) for name in checkpoint._files_of}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return found


def save(folder, tensors, file="model-00001-of-00001.safetensors"):
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / file)


def with_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def longer(array):
    return np.concatenate([array, array])


W1, UP = "experts.3.w1.weight", "experts.3.up_proj.weight"
SHARED, BLOCKS, SCALES = "shared_experts.up_proj.weight", "down_proj_blocks", "down_proj_scales"
MIXTRAL, GRANITE, GPT_OSS = hugging_face.mixtral, hugging_face.granite, hugging_face.gpt_oss
DAMAGED = {
    "one expert is larger": (MIXTRAL, W1, longer, r"3.w1.weight is BF16\[128, 128\] and .*0.w1.* BF16\[64"),
    "one expert is transposed": (MIXTRAL, W1, np.transpose, r"3.w1.weight is BF16\[128, 64\] and .*one shape"),
    "one expert is a vector": (MIXTRAL, W1, lambda a: a[0], r"3.w1.weight is BF16\[128\] and .*one shape"),
    "one expert is int8": (MIXTRAL, W1, lambda a: a.astype(np.int8), r"3.w1.weight is I8\[64, 128\] and"),
    "one expert is float16": (MIXTRAL, W1, lambda a: a.astype(np.float16), r"is F16.*shape and type"),
    "the router is a vector": (MIXTRAL, "moe.gate.weight", lambda a: a[0], r"\[128\]: must have 2 dimensions"),
    "the router bias is short": (FP8, "correction_bias", lambda a: a[1:], r"(bias has shape \[7\], and by|\(7,\) and)"),
    "scales are few": (FP8, f"{UP}_scale_inv", lambda a: a[1:], r"3.up_proj.weight_scale_inv has shape \[1, 4\]: must"),
    "scales are many": (FP8, f"{UP}_scale_inv", longer, r"\[4, 4\]: must have one scale .* \[48, 32\] of .*, \[2, 4\]"),
    "scales are flat": (FP8, f"{UP}_scale_inv", np.ravel, r"3.up_proj.weight_scale_inv has shape \[8\]: must"),
    "scales are exponents": (FP8, f"{UP}_scale_inv", lambda a: a.astype(np.uint8), r"_inv uint8: .*scales floating"),
    "wide values with scales": (FP8, SHARED, lambda a: a.astype(np.float16), r"up_proj.weight is float16 and .*one of"),
    "few scales of MXFP4": (MXFP4, SCALES, lambda a: a[..., 1:], r"down_proj_scales U8\[8, 128, 1\]: must be U8"),
    "scales of float32": (MXFP4, SCALES, lambda a: a.astype(np.float32), r"down_proj_scales F32\[8, 128, 2\]: must"),
    "short blocks": (MXFP4, BLOCKS, lambda a: a[..., 8:], r"down_proj_blocks is U8\[8, 128, 2, 8\] and"),
    "no blocks": (MXFP4, BLOCKS, lambda a: a.reshape(E, 128, -1), r"\[8, 128, 32\]: must have 4 dimensions"),
    "halves of an odd number": (GRANITE, FUSED, lambda a: a[:, 1:], r"\[8, 127, 128\]: its outputs must be 2 equal"),
    "one fused expert": (GRANITE, FUSED, lambda a: a[0], r"linear.weight has shape \[128, 128\]: must have 3"),
    "more fused experts": (GRANITE, FUSED, longer, r"gate: the checkpoint's part is .*16.* and config.json says"),
    "fewer fused experts": (GRANITE, FUSED, lambda a: a[1:], r"(\[7, 128, 128\], and by|gate: .* part is \(7)"),
    "a bias of fewer experts": (GPT_OSS, "down_proj_bias", lambda a: a[1:], r"(\[7, 128\], and by|_bias: .* is \(7)"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tensors(name, tmp_path):
    """The error is the library's and names the tensor, on one device and where every device reads a part alone."""
    write, end, change, message = DAMAGED[name]
    layer, _ = write(tmp_path)
    tensors = tensors_of(tmp_path)
    (tensor,) = [other for other in tensors if other.endswith(end) and f".{layer}." in other]
    save(tmp_path, tensors | {tensor: change(tensors[tensor])})
    for mesh in (None, make_mesh((4, 2), ("ep", "tp"))):
        for keep in (False, True):
            with pytest.raises(ValueError, match=message):
                load_hugging_face(tmp_path, layer, mesh=mesh, keep_quantised=keep, tensor_axis=mesh and "tp")


def test_more_experts_than_the_config_counts(tmp_path):
    layer, _ = MIXTRAL(tmp_path)
    tensors = tensors_of(tmp_path)
    (name,) = [name for name in tensors if f".{layer}." in name and name.endswith(W1)]
    save(tmp_path, tensors | {name.replace("experts.3.", f"experts.{E}."): tensors[name]})
    with pytest.raises(ValueError, match=rf"experts\.{E}\.w1\.weight: config.json counts {E} experts"):
        load_hugging_face(tmp_path, layer)


@pytest.mark.parametrize("size", [[48], [0, 32], [32.0, 48], "48", 48, {"a": 1}], ids=str)
def test_block_sizes_that_are_none(size, tmp_path):
    layer, _ = FP8(tmp_path)
    with_config(tmp_path, quantization_config={"weight_block_size": size})
    with pytest.raises(
        ValueError, match=r"config.json has quantization_config.weight_block_size=.*: must be two positive"
    ):
        load_hugging_face(tmp_path, layer)


@pytest.mark.parametrize("found", [None, [], {"weight_block_size": None}, {"weight_block_size": [1000, 1000]}], ids=str)
def test_block_sizes_of_other_scales(found, tmp_path):
    layer, _ = FP8(tmp_path)
    with_config(tmp_path, quantization_config=found)
    with pytest.raises(
        ValueError, match=r"weight_scale_inv has shape \[2, 4\]: must have one scale for each block of \[1"
    ):
        load_hugging_face(tmp_path, layer)


def test_scales_in_e8m0(tmp_path):
    """The bits of the same powers of two in float32; 2 ** 127 of MXFP4 was off by an ulp, and 255 gave a warning."""
    layer, _ = FP8(tmp_path)
    tensors = tensors_of(tmp_path)
    powers = {n: np.exp2(np.round(np.log2(a))).astype(np.float32) for n, a in tensors.items() if n.endswith("_inv")}
    save(tmp_path, tensors | powers)
    expected = load_hugging_face(tmp_path, layer, keep_quantised=True).weights
    save(tmp_path, tensors | {name: array.astype(ml_dtypes.float8_e8m0fnu) for name, array in powers.items()})
    chex.assert_trees_all_equal(load_hugging_face(tmp_path, layer, keep_quantised=True).weights, expected, strict=True)

    with np.errstate(all="raise"):
        scales = quantized.mxfp4(np.zeros((256, 16), np.uint8), np.arange(256, dtype=np.uint8)).scales
    np.testing.assert_array_equal(scales, [*np.ldexp(np.float32(1), np.arange(255) - 127), np.nan])


def test_a_tensor_in_several_files(tmp_path):
    """The index says which file counts: the last file in the order of names did."""
    layer, _ = hugging_face.mixtral(tmp_path)
    expected = load_hugging_face(tmp_path, layer).weights
    tensors = load_file(tmp_path / "model-00001-of-00001.safetensors")
    name = next(name for name in tensors if name.endswith(W1))
    for file in ("a.safetensors", "z.safetensors"):
        save(tmp_path, {name: np.zeros_like(tensors[name])}, file)
    (tmp_path / "folder.safetensors").mkdir()
    chex.assert_trees_all_equal(load_hugging_face(tmp_path, layer).weights, expected, strict=True)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match=r"3.w1.weight is in \['a.safetensors', .*no model.safetensors.index.json says"
    ):
        load_hugging_face(tmp_path, layer)


def test_a_file_of_the_index_that_is_absent(tmp_path):
    layer, _ = hugging_face.qwen3_moe(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(KeyError, match=r"no tensor '.*' in .* \(by its index model-00003-of-00003.safetensors has it"):
        load_hugging_face(tmp_path, layer)


@pytest.mark.parametrize(
    "write, field, message",
    [
        (hugging_face.mixtral, {"num_hidden_layers": None}, "num_hidden_layers=None: must be an int"),
        (hugging_face.mixtral, {"model_type": ["mixtral"]}, r"model_type=\['mixtral'\]: must be one of"),
        (hugging_face.qwen3_moe, {"mlp_only_layers": 3}, "a field is of another type or length than qwen3_moe configs"),
        (hugging_face.deepseek_v3, {"mlp_layer_types": ["sparse"]}, "a field is of another type or length"),
        (hugging_face.deepseek_v3, {"routed_scaling_factor": None}, "MoEConfig.weight_scale=None: must be a finite"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),  # str of a function has its address
)
def test_fields_of_another_type(write, field, message, tmp_path):
    layer, _ = write(tmp_path)
    with_config(tmp_path, **field)
    with pytest.raises(ValueError, match=message):
        load_hugging_face(tmp_path, layer)


def test_the_folder_is_a_path():
    with pytest.raises(TypeError, match="folder=None: must be a str or a pathlib.Path"):
        load_hugging_face(None, 0)
