"""One MoE layer of a checkpoint by this library and by `transformers`, on the CPU: python tools/compare_transformers.py FOLDER LAYER

Needs torch and transformers, which nothing else here does. The layer's module is built from the checkpoint's config and
gets its tensors by name; both see the same random tokens in float32. Exit status 1 if outputs differ by more than 1e-3
of their norm. `--make FAMILY` writes one of the tests' small checkpoints to FOLDER first.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

BLOCKS = {  # model_type: module of transformers, class, where the block is inside a decoder layer
    "mixtral": ("mixtral.modeling_mixtral", "MixtralSparseMoeBlock", ("block_sparse_moe", "mlp")),
    "qwen3_moe": ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeSparseMoeBlock", ("mlp",)),
    "deepseek_v3": ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3MoE", ("mlp",)),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss", "GptOssMLP", ("mlp",)),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("layer", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--make", choices=BLOCKS, help="write a small random checkpoint first")
    options = parser.parse_args(arguments)
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        parser.error(f"needs torch and transformers: {error}")

    from xen_moe_jax.flax import load_hugging_face
    from xen_moe_jax.flax.nnx import MoE

    if options.make:
        from tests.support import hugging_face

        options.layer, _ = getattr(hugging_face, options.make)(options.folder)
    config, weights = load_hugging_face(options.folder, options.layer, dtype=jnp.float32)
    x = np.random.default_rng(0).normal(size=(1, options.tokens, config.hidden_size)).astype(np.float32)
    ours = np.asarray(MoE.from_weights(config, weights)(jnp.asarray(x))[0])

    hf_config = transformers.AutoConfig.from_pretrained(options.folder)
    module, name, places = BLOCKS[hf_config.model_type]
    block = getattr(importlib.import_module(f"transformers.models.{module}"), name)(hf_config)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    layer = model.model.layers[options.layer]
    block.load_state_dict(next(getattr(layer, p) for p in places if hasattr(layer, p)).state_dict())
    with torch.no_grad():
        theirs = block(torch.from_numpy(x))
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).numpy().reshape(x.shape)
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    print(
        f"{hf_config.model_type}, layer {options.layer}, transformers {transformers.__version__}, jax {jax.__version__}"
    )
    print(f"relative difference {error:.2e}")
    return int(not error < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
