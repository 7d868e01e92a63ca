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


def difference(folder: pathlib.Path, layer: int, num_tokens: int = 64) -> float:
    """Returns the norm of the difference of the two outputs of a layer, relative to transformers'."""
    import torch
    import transformers

    from xen_moe_jax.flax import load_hugging_face
    from xen_moe_jax.flax.nnx import MoE

    config, weights = load_hugging_face(folder, layer, dtype=jnp.float32)
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
