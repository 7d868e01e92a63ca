"""A dense MoE in plain `jnp`, written from the papers and not from the library: every expert sees every token."""

import jax
import jax.numpy as jnp


def activation(config, gate, up):
    if config.activation == "swiglu":
        return gate / (1 + jnp.exp(-gate)) * up
    if config.activation == "geglu":
        return 0.5 * gate * (1 + jax.lax.erf(gate / 2**0.5)) * up
    if config.activation == "gelu":
        return 0.5 * up * (1 + jax.lax.erf(up / 2**0.5))
    if config.activation == "relu2":
        return jnp.where(up > 0, up * up, 0)
    limit = config.activation_limit
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate / (1 + jnp.exp(-config.activation_alpha * gate)) * (up + 1)


def expert(config, x, w):
    """One expert's weights by name; biases where it has them."""
    gate = x @ w["gate"] + w.get("gate_bias", 0) if config.activation.endswith("glu") else None
    hidden = activation(config, gate, x @ w["up"] + w.get("up_bias", 0))
    return hidden @ w["down"] + w.get("down_bias", 0)


def router_weights(config, weights, x):
    """Float32 `[N, E]`: each token's weight for each expert, zero for those not chosen; and the scores."""
    logits = jnp.matmul(x.astype(jnp.float32), weights["router"], precision="highest") + weights.get("logits_bias", 0)
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


def dense_experts(config, weights, x, share):
    """`x [N, H]`, `share [N, E]` -> `[N, H]`."""
    routed = {name: w for name, w in weights.items() if name.removesuffix("_bias") in ("gate", "up", "down")}
    every = jax.vmap(lambda w: expert(config, x, w))(routed)  # [E, N, H]
    y = jnp.einsum("ne,enh->nh", share, every, precision="highest")
    if config.num_shared_experts:
        shared = {name.removeprefix("shared_"): w for name, w in weights.items() if name.startswith("shared_")}
        y = y + expert(config, x, shared)
    return y


def dense_moe(config, weights, x):
    """`x [..., H]` -> `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    share, _, _ = router_weights(config, weights, flat)
    return dense_experts(config, weights, flat, share).reshape(x.shape)


def dense_aux_loss(config, weights, x):
    """Load-balancing loss over all tokens, and int `[E]` tokens per expert."""
    _, scores, chosen = router_weights(config, weights, x.reshape(-1, x.shape[-1]))
    counts = chosen.sum(0)
    fraction = counts / counts.sum()
    mean_share = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return config.aux_loss_weight * config.num_experts * jnp.sum(fraction * mean_share), counts
