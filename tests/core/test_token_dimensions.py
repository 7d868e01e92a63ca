"""Tokens of several dimensions: `x [B, S, H]` gives the bits of `x [B*S, H]`, in the same dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits

RANKS, B, S, H, K, E = 4, 2, 3, 128, 2, 6


def operands():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((RANKS, B, S, H)).astype(np.float32)
    return x, rng.standard_normal((RANKS, B, S, E)).astype(np.float32)


def flat(a):
    return a.reshape(-1, a.shape[-1])


def everything(x, logits, kind):
    """All operations that know tokens, with gradients; `x` and `logits` in any dimensions."""
    idx, weights = xm.routing.top_k(logits, K, score="sigmoid")
    options = {"num_experts": E, "axis_name": "ep", "capacity": 9, "drop": "weight"}

    def layer(x, weights):
        if kind == "replicated":
            routed = xm.dispatch_replicated(x, idx, weights, num_experts=E, axis_name="ep")
            return xm.combine_replicated(jnp.sin(routed.x), routed.handle), routed
        if kind == "halves":
            routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, **options))
            return xm.combine_done(xm.combine_start(jnp.sin(routed.x), routed.handle)), routed
        given = xm.quantize(jax.lax.stop_gradient(x)) if kind == "quantized" else x
        routed = xm.dispatch(given, idx, weights, **options)
        rows = xm.dequantize(routed.x, jnp.float32) if kind == "quantized" else routed.x
        if kind == "whole":
            rows = rows + xm.redispatch(jnp.cos(x), routed.handle) + xm.redispatch(flat(x), routed.handle)
        return xm.combine(jnp.sin(rows), routed.handle), routed

    def loss(x, weights):
        out, routed = layer(x, weights)
        return jnp.sum(out**2), (out, routed)

    (_, (out, routed)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, weights)
    counted = xm.get_dispatch_layout(idx, num_experts=E, num_ranks=RANKS)
    of_tokens = {"out": out, "grads": grads, "idx": idx, "weights": weights, "reached": counted.is_token_in_rank}
    arrays = jax.tree.leaves(routed.handle)
    of_rows = {"x": routed.x, "dropped": routed.num_dropped, "handle": arrays, "counts": counted.num_tokens_per_expert}
    return of_tokens, of_rows


@pytest.mark.parametrize("kind", ["whole", "halves", "quantized", "replicated"])
def test_the_bits_of_tokens_in_a_row(mesh4, kind):
    def body(x, logits):
        x, logits = x[0], logits[0]
        if kind == "replicated":
            x, logits = (jax.lax.psum(jnp.where(jax.lax.axis_index("ep") == 0, a, 0), "ep") for a in (x, logits))
        found, routed = everything(x, logits, kind)
        row, expected = everything(flat(x), flat(logits), kind)
        for name, value in found.items():
            for leaf in jax.tree.leaves(value):
                assert leaf.shape[:-1] == (B, S), name
        return jax.tree.map(lambda a: a[None], (jax.tree.map(flat, found), row, routed, expected))

    mapped = jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep"))
    placed = jax.device_put(operands(), jax.NamedSharding(mesh4, P("ep")))
    found, row, routed, expected = jax.tree.map(np.asarray, jax.jit(mapped)(*placed))
    jax.tree.map(lambda a, b: assert_bits(a, b, "of tokens"), found, row)
    assert np.abs(found["grads"][1]).sum() > 0 and (kind == "quantized" or np.abs(found["grads"][0]).sum() > 0)
    jax.tree.map(lambda a, b: assert_bits(a, b, "of rows", any_nan=True), routed, expected)


def test_routers_keep_the_dimensions():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((B, S, 8)), jnp.float32)
    idx, _ = jax.jit(xm.routing.top_k, static_argnums=1)(logits, K)
    calls = (
        lambda l, i: xm.routing.top_k(logits=l, k=K, bias=jnp.arange(8.0)),
        lambda l, i: xm.routing.group_limited_top_k(jax.nn.sigmoid(l), K, num_groups=4, topk_groups=2),
        lambda l, i: xm.routing.chosen_weights(l, topk_idx=i),
        lambda l, i: xm.routing.sparsemixer_weights(l, i),
    )
    for call in map(jax.jit, calls):
        for found, row in zip(*(jax.tree.leaves(call(*a)) for a in ((logits, idx), (flat(logits), flat(idx))))):
            assert found.shape[:-1] == (B, S)
            assert_bits(flat(found), np.asarray(row), "router")
    for shape in ((), (K,), (1, 1), (S, 1), (B, 1, K), (B, S, 1)):
        scale = rng.random(shape).astype(np.float32)
        for router in (xm.routing.top_k, xm.routing.group_limited_top_k):
            found = router(logits, K, scale=scale)[1]
            np.testing.assert_allclose(found, router(logits, K)[1] * scale, rtol=1e-6)
    for score in xm.routing.SCORES:
        found, row, one = (xm.routing.router_scores(l, score) for l in (logits, flat(logits), logits[0, 0]))
        assert_bits(found, np.asarray(row).reshape(B, S, -1), "scores")
        np.testing.assert_allclose(one, found[0, 0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"chosen_weights: an array has shape \(6, 2\): .*\(2, 3\) of those of logits"):
        xm.routing.chosen_weights(logits, flat(idx))
