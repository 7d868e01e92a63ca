"""Loads a Mixtral checkpoint and decodes: experts over the mesh axis "ep", tokens on every rank, a key-value cache.

    python examples/decode_hugging_face.py [FOLDER]

FOLDER holds `config.json` and `*.safetensors`. Without one, a small checkpoint with random weights and Mixtral's own
names is written to a temporary folder, so that the example runs anywhere. Needs xen-moe-jax[flax,hugging-face].
"""

import functools
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from xen_moe_jax.flax import load_hugging_face
from xen_moe_jax.flax.nnx import MoE

SMALL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
}


def write_small_checkpoint(folder: pathlib.Path) -> None:
    """Random weights under Mixtral's names; matrices as torch keeps them, `[out, in]`."""
    rng, c = np.random.default_rng(0), SMALL
    hidden, head = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "lm_head.weight": (c["vocab_size"], hidden)}
    ones = {"model.norm.weight"}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        kv_heads = c["num_key_value_heads"]
        for name, heads in (("q", c["num_attention_heads"]), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (heads * head, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        ones |= {f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"}
        shapes[f"{layer}.block_sparse_moe.gate.weight"] = (c["num_local_experts"], hidden)
        for e in range(c["num_local_experts"]):
            for name in ("w1", "w2", "w3"):
                wide, narrow = c["intermediate_size"], hidden
                shape = (narrow, wide) if name == "w2" else (wide, narrow)
                shapes[f"{layer}.block_sparse_moe.experts.{e}.{name}.weight"] = shape
    tensors = {n: (rng.normal(size=s) * s[-1] ** -0.5).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors | {n: np.ones(hidden, np.float32) for n in ones}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(c))


def read_others(folder: pathlib.Path) -> dict[str, jax.Array]:
    """Everything but the experts and routers: embeddings, attention, norms."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            found |= {n: jnp.asarray(tensors.get_tensor(n)) for n in tensors.keys() if "block_sparse_moe" not in n}
    return found


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * scale


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions of `x [batch, length, heads, features]`."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-jnp.arange(half) / half)[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, weights, moe_layers, cache, tokens, start):
    """Logits `[batch, vocabulary]` of the token after `tokens [batch, length]`, and the cache with them in it.

    `cache [layers, 2, batch, room, heads, features]` holds `start` tokens already.
    """
    c = dict(config)
    batch, length = tokens.shape
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    positions = start + jnp.arange(length)
    x = weights["model.embed_tokens.weight"][tokens]
    for i, moe in enumerate(moe_layers):
        layer = f"model.layers.{i}"
        h = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (
            (h @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).reshape(batch, length, n, -1)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (rotate(a, positions, c["rope_theta"]) for a in (q, k))
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v])[None], (i, 0, 0, start, 0, 0))
        visible = jnp.arange(cache.shape[3])[None, :] <= positions[:, None]
        mixed = jax.nn.dot_product_attention(q, cache[i, 0], cache[i, 1], mask=visible[None, None])
        x = x + mixed.reshape(batch, length, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        h = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        x = x + moe(h)[0]
    x = rms_norm(x[:, -1], weights["model.norm.weight"], c["rms_norm_eps"])
    return x @ weights["lm_head.weight"].T, cache


def main(folder: str | None = None, new_tokens: int = 8) -> float:
    """Decodes greedily; returns the largest logit difference to evaluating the whole text again without a cache."""
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(folder or temporary)
        if folder is None:
            write_small_checkpoint(path)
        config = json.loads((path / "config.json").read_text())
        mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.set_mesh(mesh):
            # token_axes=(): every rank has the tokens, computes its own experts, and one sum brings them together
            load = functools.partial(load_hugging_face, path, dtype=jnp.float32, token_axes=(), layout="padded")
            moe_layers = [MoE.from_weights(*load(i)) for i in range(config["num_hidden_layers"])]
            weights = read_others(path)
            print(f"{len(moe_layers)} layers of {config['num_local_experts']} experts over {mesh.size} devices")
            return decode(tuple((k, v) for k, v in config.items() if np.isscalar(v)), weights, moe_layers, new_tokens)


def decode(config, weights, moe_layers, new_tokens: int) -> float:
    c = dict(config)
    prompt = jnp.asarray([[1, 5, 2, 7], [3, 9, 4, 6]])
    batch, length = prompt.shape
    features = c["hidden_size"] // c["num_attention_heads"]
    room = (len(moe_layers), 2, batch, length + new_tokens, c["num_key_value_heads"], features)
    empty = jnp.zeros(room, weights["lm_head.weight"].dtype)
    logits, cache = forward(config, weights, moe_layers, empty, prompt, 0)
    text = prompt
    for step in range(new_tokens):
        text = jnp.concatenate([text, logits.argmax(-1)[:, None]], axis=1)
        if step < new_tokens - 1:
            logits, cache = forward(config, weights, moe_layers, cache, text[:, -1:], length + step)
    print("tokens:", *text.tolist(), sep="\n  ")
    again, _ = forward(config, weights, moe_layers, empty, text[:, :-1], 0)
    return float(jnp.abs(again - logits).max() / jnp.abs(again).max())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:2])
