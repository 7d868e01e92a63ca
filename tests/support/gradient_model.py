"""A small MoE for tests of derivatives: by expert parallelism in each layout, and dense, which knows no ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax.experts.ragged_dot import ragged_dot

RANKS, TOKENS, HIDDEN, WIDE, EXPERTS, TOP_K = 4, 12, 64, 32, 10, 3
LAYOUTS = ("grouped", "ranked", "padded")


# -- the dense model: every expert on every token ------------------------------
def expert(x, w_in, w_out):
    return jax.nn.silu(x @ w_in) @ w_out


@jax.jit
def dense_moe(x, idx, weights, w_in, w_out):
    """`sum_k weights[t, k] * expert_{idx[t, k]}(x[t])`; an index outside the experts contributes nothing."""
    every = jax.vmap(expert, (None, 0, 0), 1)(x, w_in[:EXPERTS], w_out[:EXPERTS])  # [T, E, H]
    share = jnp.sum(jax.nn.one_hot(idx, EXPERTS) * weights[..., None], axis=1)  # [T, E]
    return jnp.einsum("te,teh->th", share, every, precision="highest")


# -- the same with expert parallelism, in each layout ------------------------------
def ep_moe(layout, x, idx, weights, w_in, w_out, *, axis="ep", **options):
    """`w_in [L, H, F]`, `w_out [L, F, H]` are this rank's experts."""
    routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name=axis, layout=layout, **options)
    if layout == "grouped":
        y = jax.nn.silu(ragged_dot(routed.x, w_in, routed.group_sizes))
        return xm.combine(ragged_dot(y, w_out, routed.group_sizes), routed.handle, weighted=True)
    if layout == "padded":
        used = jnp.arange(routed.x.shape[1])[None, :, None] < routed.num_tokens_per_expert[:, None, None]
        y = jnp.einsum("lcf,lfh->lch", jax.nn.silu(jnp.einsum("lch,lhf->lcf", routed.x, w_in)), w_out)
        return xm.combine(jnp.where(used, y, 0), routed.handle, weighted=True)
    every = jnp.stack([expert(routed.x, w_in[e], w_out[e]) for e in range(w_in.shape[0])], axis=1)
    share = jnp.sum(jax.nn.one_hot(routed.topk_idx, w_in.shape[0]) * routed.topk_weights[..., None], axis=1)
    return xm.combine(jnp.einsum("cl,clh->ch", share, every), routed.handle, weighted=False)


def model(seed=0):
    """x, idx (with a duplicate expert and unused slots), weights, expert weights padded to L experts on every rank."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((RANKS * TOKENS, HIDDEN)).astype(np.float32)
    idx = np.argsort(rng.random((RANKS * TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    idx[0, 1] = idx[0, 0]
    idx[1] = -1
    idx[2, 0] = EXPERTS + 3
    weights = rng.uniform(0.1, 1, idx.shape).astype(np.float32)
    local = -(-EXPERTS // RANKS)
    w_in = rng.standard_normal((local * RANKS, HIDDEN, WIDE)).astype(np.float32) / np.sqrt(HIDDEN)
    w_out = rng.standard_normal((local * RANKS, WIDE, HIDDEN)).astype(np.float32) / np.sqrt(WIDE)
    return x, idx, weights, w_in, w_out


def sharded(f, mesh, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), **options)


def place(mesh, *arrays):
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("ep")))


def assert_close(actual, expected, what):
    scale = float(np.max(np.abs(expected))) or 1.0
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=2e-5, atol=2e-6 * scale, err_msg=what)


def assert_gradients_close(actual, expected):
    for name, a, e in zip(("x", "weights", "w_in", "w_out"), actual, expected, strict=True):
        assert_close(a, e, f"gradient of {name}")
