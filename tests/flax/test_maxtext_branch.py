"""The expert-parallel branch of a MaxText-like layer by this library's calls: same outputs, same gradients.

`by_hand` is what such a branch does, written anew in plain JAX: sort slots by expert, exchange the sizes, a ragged
all-to-all, group again by local expert, grouped matmuls, and all of it back. `by_calls` is the same branch by dispatch
and combine. tests/clients/test_maxtext.py runs MaxText itself.
"""

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from tests.support.layers import make_mesh

B, S, H, F, E, K = 4, 6, 16, 24, 8, 2


def exchange(operand, room, input_offsets, send_sizes, output_offsets):
    """A ragged all-to-all out of an all-gather: CPUs have none in `jax.lax`."""
    operands, starts, sizes, places = (
        jax.lax.all_gather(a, "expert") for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, j = jax.lax.axis_index("expert"), jnp.arange(operand.shape[0])
    out = jnp.zeros((room, operand.shape[1]), operand.dtype)
    for source in range(operands.shape[0]):
        rows = operands[source, jnp.minimum(starts[source, me] + j, operand.shape[0] - 1)]
        out = out.at[jnp.where(j < sizes[source, me], places[source, me] + j, room)].set(rows, mode="drop")
    return out


def exclusive(x, axis=0):
    return jnp.cumsum(x, axis) - x


def by_hand(x, logits, w0, w1, wo):
    ranks, local, me = jax.lax.axis_size("expert"), w0.shape[0], jax.lax.axis_index("expert")
    flat = x.reshape(-1, H)
    weights, experts = jax.lax.top_k(logits.reshape(-1, E), K)
    weights = jax.nn.softmax(weights)
    order = jnp.argsort(experts.reshape(-1), stable=True)  # slots by expert
    sorted_rows = flat[order // K]
    counts = jnp.bincount(experts.reshape(-1), length=E)
    to_rank = jax.lax.all_gather(counts.reshape(ranks, local).sum(1), "expert")  # [source, destination]
    room = ranks * flat.shape[0] * min(K, local)
    starts, places = exclusive(to_rank, 1), exclusive(to_rank, 0)
    received = exchange(sorted_rows, room, starts[me], to_rank[me], places[me])

    mine = jax.lax.all_gather(counts, "expert").reshape(ranks, ranks, local)[:, me]  # [source, local expert]
    expert_of_row = jnp.repeat(jnp.tile(jnp.arange(local), ranks), mine.reshape(-1), total_repeat_length=room)
    expert_of_row = jnp.where(jnp.arange(room) < mine.sum(), expert_of_row, local)
    grouping = jnp.argsort(expert_of_row, stable=True)
    grouped, group_sizes = received[grouping], mine.sum(0)
    grouped = jnp.where(jnp.arange(room)[:, None] < group_sizes.sum(), grouped, 0)

    gate, up = (jax.lax.ragged_dot(grouped, w, group_sizes) for w in (w0, w1))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, wo, group_sizes)

    ungrouped = y[jnp.argsort(grouping)]
    returned = exchange(ungrouped, flat.shape[0] * K, places[:, me], to_rank[:, me], starts[:, me])
    slots = returned[jnp.argsort(order)].reshape(-1, K, H)
    return jnp.einsum("tkh,tk->th", slots, weights, precision="highest").reshape(x.shape)


def by_calls(x, logits, w0, w1, wo):
    weights, experts = jax.lax.top_k(logits.reshape(-1, E), K)
    weights = jax.nn.softmax(weights)
    routed = xm.dispatch(x.reshape(-1, H), experts, weights, num_experts=E, axis_name="expert")
    gate, up = (jax.lax.ragged_dot(routed.x, w, routed.group_sizes) for w in (w0, w1))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, wo, routed.group_sizes)
    return xm.combine(y, routed.handle).reshape(x.shape)


def test_outputs_and_gradients_agree():
    mesh = make_mesh((2,), ("expert",))
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((B, S, H), (B, S, E), (E, H, F), (E, H, F), (E, F, H))
    inputs = [jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, shape in zip(keys, shapes, strict=False)]
    target = jax.random.normal(keys[5], (B, S, H))

    def evaluate(branch):
        # such layers turn the check of varying axes off
        layer = jax.shard_map(branch, mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"), check_vma=False)

        def loss(*inputs):
            y = layer(*inputs)
            return (y * target).sum(), y

        gradients, y = jax.jit(jax.grad(loss, argnums=tuple(range(5)), has_aux=True))(*inputs)
        return [y, *gradients]

    names = ("output", "x", "logits", "w0", "w1", "wo")
    for name, expected, got in zip(names, evaluate(by_hand), evaluate(by_calls), strict=True):
        assert np.abs(expected).max() > 1e-3, f"nothing is tested about {name}"
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=name)
