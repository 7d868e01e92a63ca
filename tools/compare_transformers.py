"""One MoE layer of a checkpoint by this library and by `transformers`, on the CPU.

    python tools/compare_transformers.py FOLDER LAYER

Needs torch and transformers, which nothing else here does. Both see the same random tokens in float32. Exit status 1 if
the outputs differ by more than 1e-6 of their norm. Two options write a small random checkpoint to FOLDER first:
`--make FAMILY` writes the checkpoint of the tests, and `--generate MODEL_TYPE` one that transformers itself makes and
saves; `--set NAME=JSON` sets a field of its config.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "ernie", "granite", "llama4", "gpt_oss")
PLACES = ("block_sparse_moe", "mlp", "feed_forward")
"""Places of the block inside a decoder layer."""
BESIDE = "shared_mlp"
"""Place of a shared expert that transformers adds up outside the block (Granite)."""


SIZES = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "moe_k": 3,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 80,
    "shared_intermediate_size": 80,
    "initializer_range": 0.1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Sizes of a generated model, as far as its config knows them."""


def generate(model_type: str, folder: pathlib.Path, **fields: Any) -> None:
    """Writes a small random model of `model_type`, whose layer 1 has experts, as transformers saves it.

    Args:
      fields: of its config, in place of those of `SIZES`.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    kind = type(transformers.AutoConfig.for_model(model_type))
    known = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map) | set(kind().to_dict())
    config = kind(**{name: size for name, size in SIZES.items() if name in known} | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, array in (*model.named_buffers(), *model.named_parameters()):
        if "correction" in name:  # the router's bias, zero in a new model
            array.data.normal_(0, 0.3)
    model.save_pretrained(folder)


def quantize(folder: pathlib.Path, shipped: pathlib.Path, model_type: str) -> None:
    """Writes the checkpoint in `folder` to `shipped` with the experts in the format in which its family is published:
    fp8 in blocks of 128 x 128 (`deepseek_v3`) or MXFP4 (`gpt_oss`). In `folder` transformers' own code then dequantizes
    them again, to float32.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    (file,) = folder.glob("*.safetensors")
    tensors, packed, wide = load_file(file), {}, {}
    for name, array in tensors.items():
        if model_type == "deepseek_v3" and "experts." in name:
            values, scales = _fp8_blocks(array)
            packed |= {name: values, f"{name}_scale_inv": scales}
            wide[name] = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
        elif model_type == "gpt_oss" and name.endswith("_proj") and ".experts." in name:
            blocks, exponents = _mxfp4_blocks(array)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            wide[name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
        else:
            packed[name] = wide[name] = array
    config = json.loads((folder / "config.json").read_text())
    method = {"deepseek_v3": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config["quantization_config"] = method.get(model_type, {"quant_method": "mxfp4"})
    shipped.mkdir(parents=True, exist_ok=True)
    (shipped / "config.json").write_text(json.dumps(config))
    save_file({name: array.contiguous() for name, array in packed.items()}, shipped / file.name)
    save_file({name: array.contiguous() for name, array in wide.items()}, file, metadata={"format": "pt"})


def _fp8_blocks(array: Any) -> tuple[Any, Any]:
    """float32 `[out, in]` -> float8_e4m3fn and float32 scales of blocks of 128 x 128, which divide it."""
    import torch

    rows, columns = array.shape
    blocks = array.reshape(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(array.shape), scales


def _mxfp4_blocks(array: Any) -> tuple[Any, Any]:
    """float32 `[experts, in, out]` -> uint8 `[experts, out, in / 32, 16]` and exponents `[experts, out, in / 32]`."""
    import torch

    blocks = array.transpose(1, 2).reshape(array.shape[0], array.shape[2], -1, 32)
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scaled = blocks / exponents.exp2()[..., None]
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (scaled.abs()[..., None] - numbers).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def difference(folder: pathlib.Path, layer: int, num_tokens: int = 64, shipped: pathlib.Path | None = None) -> float:
    """Returns the norm of the difference of the two outputs of a layer, relative to transformers'.

    Args:
      shipped: a folder with the same weights in a quantized format, which this library then reads and keeps.
    """
    import torch
    import transformers

    from xen_moe_jax.flax import load_hugging_face
    from xen_moe_jax.flax.nnx import MoE

    kept = {"keep_quantised": True} if shipped else {}
    config, weights = load_hugging_face(shipped or folder, layer, dtype=jnp.float32, **kept)
    x = np.random.default_rng(0).normal(size=(1, num_tokens, config.hidden_size)).astype(np.float32)
    ours = np.asarray(MoE.from_weights(config, weights)(jnp.asarray(x))[0])

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = model.model.layers[layer]
    block = next(getattr(decoder, place) for place in PLACES if hasattr(decoder, place))
    if hasattr(getattr(block, "experts", None), "limit"):
        # transformers has gpt-oss's limit in its code and does not read it from the checkpoint
        block.experts.limit = config.activation_limit
    with torch.no_grad():
        given = torch.from_numpy(x)
        theirs = block(given.clone())
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(x.shape)
        if getattr(decoder, BESIDE, None) is not None:
            theirs = theirs + getattr(decoder, BESIDE)(given)
    return float(np.linalg.norm(ours - theirs.numpy()) / np.linalg.norm(theirs.numpy()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("layer", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--make", choices=FAMILIES, help="write a small random checkpoint first")
    parser.add_argument("--generate", metavar="MODEL_TYPE", help="let transformers write a small random one first")
    parser.add_argument("--set", metavar="NAME=JSON", action="append", default=[], help="a field of its config")
    options = parser.parse_args(arguments)
    try:
        fields = {name: json.loads(value) for name, value in (text.split("=", 1) for text in options.set)}
    except ValueError as error:
        parser.error(f"--set {options.set}: each must be NAME=JSON ({error})")
    try:
        import torch  # noqa: F401  # needed by transformers, whose own error names no package
        import transformers
    except ModuleNotFoundError as error:
        parser.error(f"needs torch and transformers: {error}")
    if options.make:
        from tests.support import hugging_face

        options.layer, _ = getattr(hugging_face, options.make)(options.folder)
    if options.generate:
        generate(options.generate, options.folder, **fields)
    error = difference(options.folder, options.layer, options.tokens)
    versions = f"transformers {transformers.__version__}, jax {jax.__version__}"
    print(f"{options.folder}, layer {options.layer}, {versions}")
    print(f"relative difference {error:.2e}")
    return int(not error <= 1e-6)


if __name__ == "__main__":
    sys.exit(main())
