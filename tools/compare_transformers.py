"""One MoE layer of a checkpoint by this library and by `transformers`, on the CPU.

    python tools/compare_transformers.py FOLDER LAYER

Needs torch and transformers, which nothing else here does. Both see the same random tokens in float32. Exit status 1 if
the outputs differ by more than 1e-3 of their norm. `--make FAMILY` writes one of the small checkpoints of the tests to
FOLDER first.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
PLACES = ("block_sparse_moe", "mlp")
"""Where the block is inside a decoder layer."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("layer", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--make", choices=FAMILIES, help="write a small random checkpoint first")
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

    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    layer = model.model.layers[options.layer]
    block = next(getattr(layer, place) for place in PLACES if hasattr(layer, place))
    if hasattr(getattr(block, "experts", None), "limit"):
        # transformers has gpt-oss's limit in its code and does not read it from the checkpoint
        block.experts.limit = config.activation_limit
    with torch.no_grad():
        theirs = block(torch.from_numpy(x))
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).numpy().reshape(x.shape)
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    versions = f"transformers {transformers.__version__}, jax {jax.__version__}"
    print(f"{model.config.model_type}, layer {options.layer}, {versions}")
    print(f"relative difference {error:.2e}")
    return int(not error < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
