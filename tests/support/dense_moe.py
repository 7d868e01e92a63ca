"""A dense MoE in plain `jnp`, written from the papers and not from the library: every expert sees every token."""

import jax
import jax.numpy as jnp


def swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def router_weights(config, weights, x):
    """Float32 `[N, E]`: each token's weight for each expert, zero for those not chosen; and the scores."""
    logits = jnp.matmul(x.astype(jnp.float32), weights["router"], precision="highest")
    scores = jax.nn.softmax(logits) if config.score == "softmax" else 1 / (1 + jnp.exp(-logits))
    choice = scores + weights.get("router_bias", 0.0)
    if config.num_groups > 1:
        groups = choice.reshape(len(x), config.num_groups, -1)
        strength = jnp.sort(groups, axis=-1)[..., -2:].sum(-1)
        kept = strength >= jnp.sort(strength, axis=-1)[:, -config.topk_groups][:, None]
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen = choice >= jnp.sort(choice, axis=-1)[:, -config.top_k][:, None]
    picked = jnp.where(chosen, scores, 0.0)
    if config.normalize_weights:
        picked = picked / picked.sum(-1, keepdims=True)
    return config.weight_scale * picked, scores, chosen


def dense_moe(config, weights, x):
    """`x [..., H]` -> `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    share, _, _ = router_weights(config, weights, flat)
    y = jnp.zeros_like(flat)
    for e in range(config.num_experts):
        y = y + share[:, e : e + 1] * swiglu(flat, weights["gate"][e], weights["up"][e], weights["down"][e])
    if config.num_shared_experts:
        y = y + swiglu(flat, weights["shared_gate"], weights["shared_up"], weights["shared_down"])
    return y.reshape(x.shape)


def dense_aux_loss(config, weights, x):
    """Load-balancing loss over all tokens, and int `[E]` tokens per expert."""
    _, scores, chosen = router_weights(config, weights, x.reshape(-1, x.shape[-1]))
    counts = chosen.sum(0)
    fraction = counts / counts.sum()
    mean_share = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return config.aux_loss_weight * config.num_experts * jnp.sum(fraction * mean_share), counts
