"""A dense MoE in plain `jnp`, written from the papers and not from the library: every expert sees every token.

Each function is jitted as one program: run operation by operation, XLA would compile every operation by itself, which
takes ten times as long.
"""

import functools

import jax
import jax.numpy as jnp

compiled = functools.partial(jax.jit, static_argnames="config")


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


@compiled
def router_weights(config, weights, x):
    """Float32 `[N, E]`: each token's weight for each expert, zero for an expert that is not chosen; and the scores."""
    logits = jnp.matmul(x.astype(jnp.float32), weights["router"], precision="highest") + weights.get("logits_bias", 0)
    if config.score == "sparsemixer":
        return sparsemixer(config, logits)
    scores = jax.nn.softmax(logits) if config.score == "softmax" else 1 / (1 + jnp.exp(-logits))
    choice = scores + weights.get("router_bias", 0.0)
    if config.num_groups > 1:
        groups = choice.reshape(len(x), config.num_groups, -1)
        strength = jnp.sort(groups, axis=-1)[..., -config.group_best :].sum(-1)
        kept = strength >= jnp.sort(strength, axis=-1)[:, -config.topk_groups][:, None]
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen = choice >= jnp.sort(choice, axis=-1)[:, -config.top_k][:, None]
    picked = jnp.where(chosen, scores, 0.0)
    if config.normalize_weights:
        picked = picked / jnp.maximum(picked.sum(-1, keepdims=True), config.min_score_sum)
    return config.weight_scale * picked, scores, chosen


def sparsemixer(config, logits):
    """Computes `router_weights`, but every expert except those chosen before competes, unless it is too far from the
    best."""
    experts = jnp.arange(logits.shape[1])
    left, share = logits, jnp.zeros_like(logits)
    for _ in range(config.top_k):
        best = left.max(-1, keepdims=True)
        near = jnp.where(
            (best - logits) / jnp.maximum(jnp.abs(logits), best) <= 2 * config.sparsemixer_eps, left, -1e30
        )
        chosen = experts == jnp.argmax(left, axis=-1)[:, None]
        share = jnp.where(chosen, jax.nn.softmax(near), share)
        left = jnp.where(chosen, -1e30, left)
    return config.weight_scale * share, jax.nn.softmax(logits), left == -1e30


@compiled
def dense_experts(config, weights, x, share):
    """`x [N, H]`, `share [N, E]` -> `[N, H]`."""
    routed = {name: w for name, w in weights.items() if name.removesuffix("_bias") in ("gate", "up", "down")}
    if config.apply_weights_to == "input":
        every = jax.vmap(lambda w, s: expert(config, s[:, None] * x, w))(routed, share.T)  # [E, N, H]
        share = share != 0
    else:
        every = jax.vmap(lambda w: expert(config, x, w))(routed)
    y = jnp.einsum("ne,enh->nh", share.astype(every.dtype), every, precision="highest")
    if "shared_down" in weights:
        shared = {name.removeprefix("shared_"): w for name, w in weights.items() if name.startswith("shared_")}
        gate = 1 / (1 + jnp.exp(-x @ shared["router"])) if config.shared_expert_gate else 1
        y = y + gate * expert(config, x, shared)
    return y


@compiled
def dense_moe(config, weights, x):
    """`x [..., H]` -> `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    share, _, _ = router_weights(config, weights, flat)
    return dense_experts(config, weights, flat, share).reshape(x.shape)


@compiled
def dense_aux_loss(config, weights, x):
    """Load-balancing loss over all tokens, and int `[E]` tokens per expert."""
    _, scores, chosen = router_weights(config, weights, x.reshape(-1, x.shape[-1]))
    counts = chosen.sum(0)
    fraction = counts / counts.sum()
    mean_share = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return config.aux_loss_weight * config.num_experts * jnp.sum(fraction * mean_share), counts
