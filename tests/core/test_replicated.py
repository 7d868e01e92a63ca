"""Tokens that every rank of the expert axis has, in plain JAX: values, gradients, types. The conformance class has the
rows themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from tests.support.gradient_model import EXPERTS, TOKENS, assert_gradients_close, dense_moe, model


def moe(layout, in_front, x, idx, weights, w_in, w_out):
    """The model of `gradient_model.ep_moe`, decoding; the weights in front of the last matmul or behind it."""
    routed = xm.dispatch_replicated(x, idx, weights, num_experts=EXPERTS, axis_name="ep", layout=layout)
    if layout == "grouped":
        hidden = jax.nn.silu(jax.lax.ragged_dot(routed.x, w_in, routed.group_sizes))
        hidden = hidden * routed.weights[:, None] if in_front else hidden
        y = jax.lax.ragged_dot(hidden, w_out, routed.group_sizes)
        y = jnp.where(routed.expert_ids()[:, None] < w_in.shape[0], y, jnp.nan)  # no expert may read these rows
    else:
        hidden = jax.nn.silu(jnp.einsum("lch,lhf->lcf", routed.x, w_in))
        hidden = hidden * routed.weights[..., None] if in_front else hidden
        y = jnp.einsum("lcf,lfh->lch", hidden, w_out)
    return xm.combine_replicated(y, routed.handle, weighted=not in_front)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(("layout", "in_front"), [("grouped", False), ("grouped", True), ("padded", False)])
def test_equals_the_dense_model_with_gradients(mesh4, layout, in_front, check_vma):
    x, idx, weights, w_in, w_out = model()
    x, idx, weights = x[:TOKENS], idx[:TOKENS], weights[:TOKENS]
    specs = (P(), P(), P(), P("ep"), P("ep"))
    body = functools.partial(moe, layout, in_front)
    decode = jax.shard_map(body, mesh=mesh4, in_specs=specs, out_specs=P(), check_vma=check_vma)

    def loss(layer, x, weights, w_in, w_out, idx):
        out = layer(x, idx, weights, w_in, w_out)
        return jnp.sum(jnp.sin(out)), out

    def value_and_gradients(layer):
        return jax.value_and_grad(functools.partial(loss, layer), (0, 1, 2, 3), has_aux=True)

    shardings = [jax.NamedSharding(mesh4, spec) for spec in (P(), P(), P("ep"), P("ep"), P())]
    with jax.default_matmul_precision("highest"):
        placed = jax.device_put((x, weights, w_in, w_out, idx), tuple(shardings))
        (_, out), actual = jax.jit(value_and_gradients(decode))(*placed)
        (_, dense), expected = value_and_gradients(dense_moe)(x, weights, w_in, w_out, idx)
    np.testing.assert_allclose(out, dense, rtol=2e-5, atol=2e-5)
    assert_gradients_close(actual, expected)


def on_all(mesh, body, *arrays):
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, P()))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("ep")))(*placed)


def test_quantized_tokens_and_one_expert_named_twice(mesh4):
    """A `BlockScaled` arrives as one. With fewer experts than slots on a rank, a slot that finds no room is counted."""
    x = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    idx = np.array([[0, 0, 0], [0, 1, 2], [0, -1, 9]], np.int32)

    def body(x, idx):
        given = xm.quantize(x)
        routed = xm.dispatch_replicated(given, idx, num_experts=4, axis_name="ep")  # one expert and three rows a rank
        out = xm.combine_replicated(xm.dequantize(routed.x, jnp.float32), routed.handle)
        return out, routed.num_dropped[None], xm.dequantize(given, jnp.float32)

    out, dropped, through = map(np.asarray, on_all(mesh4, body, x, idx))
    assert_bits(dropped, np.array([2, 0, 0, 0], np.int32), "num_dropped")
    times = np.array([[3], [2], [0]], np.float32)  # the first token's three slots took the room of expert 0
    np.testing.assert_array_equal(out[:3], times * through[:3])


def test_the_weight_of_an_unused_slot_reaches_nothing(mesh4):
    """Not even as a NaN, in the output and in the gradients."""
    x, idx, weights, *_ = (a[:TOKENS] for a in model())
    used = (idx >= 0) & (idx < EXPERTS)
    assert not used.all()

    def body(x, idx, weights):
        routed = xm.dispatch_replicated(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
        return xm.combine_replicated(jnp.sin(routed.x), routed.handle)

    @jax.jit
    def results(x, weights):
        out, back = jax.vjp(lambda x, weights: shared(x, idx, weights), x, weights)
        return out, back(jnp.cos(out))

    shared = jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=P())
    clean = results(x, weights)
    broken = results(x, np.where(used, weights, np.float32(np.nan)))
    jax.tree.map(functools.partial(assert_bits, what="a result"), broken, clean)
    assert np.isfinite(clean[0]).all()


def test_one_sum_over_the_ranks_is_all_that_travels(mesh4):
    """Only one sum travels in the compiled program; an exported one gives the same bits, and takes the handle as an
    argument."""
    x, idx, weights, *_ = model()
    x, idx, weights = x[:TOKENS], idx[:TOKENS], weights[:TOKENS]

    def body(x, idx, weights):
        routed = xm.dispatch_replicated(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
        return xm.combine_replicated(jnp.sin(routed.x), routed.handle)

    mapped = jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=P())
    placed = jax.device_put((x, idx, weights), jax.NamedSharding(mesh4, P()))
    dispatched = jax.shard_map(
        lambda *arrays: jax.tree.map(
            lambda a: a[None], xm.dispatch_replicated(*arrays, num_experts=EXPERTS, axis_name="ep")
        ),
        mesh=mesh4,
        in_specs=P(),
        out_specs=P("ep"),
    )

    def back(stacked):
        routed = jax.tree.map(lambda a: a[0], stacked)
        return xm.combine_replicated(jnp.sin(routed.x), routed.handle)

    combined = jax.jit(jax.shard_map(back, mesh=mesh4, in_specs=P("ep"), out_specs=P()))
    routed = jax.jit(dispatched)(*placed)
    exported = jax.export.deserialize(jax.export.export(combined)(routed).serialize())
    assert_bits(exported.call(routed), np.asarray(jax.jit(mapped)(*placed)), "exported")
    program = jax.jit(mapped).lower(*placed).compile().as_text()
    assert program.count(" all-reduce(") == 1 and "all-to-all(" not in program and "all-gather(" not in program
