"""`Buffer`, `buffer_size_hint`, start and done, where no symmetric memory exists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

SIZES = {"num_tokens": 8, "hidden": 128}


def test_plain_jax_needs_no_symmetric_memory(mesh4):
    assert xm.buffer_size_hint(num_ranks=4, backend="reference", **SIZES) == 0
    assert isinstance(xm.buffer_size_hint(num_ranks=4, backend="pallas", **SIZES), int)


def test_buffer_is_a_context_manager(mesh4, node_mesh):
    with xm.Buffer(mesh4, "ep", backend="reference", **SIZES) as buffer:
        assert buffer.size_bytes == 0 and buffer.axis_name == ("ep",) and buffer.channel == 0
    buffer.close()  # twice is harmless
    with pytest.raises(RuntimeError, match=r"Buffer: axis_name=\('ep',\) channel=0 is closed.*make a new Buffer"):
        buffer.__enter__()
    with xm.Buffer(node_mesh, ("node", "gpu"), size_bytes=4096, channel=2, backend="reference", **SIZES) as buffer:
        assert buffer.size_bytes == 4096 and buffer.channel == 2


def test_operations_run_inside_an_open_buffer(mesh4):
    x = jnp.ones((32, 128))
    idx = jnp.arange(32)[:, None] % 8

    def body(x, idx):
        routed = xm.dispatch(x, idx, num_experts=8, axis_name="ep")
        return xm.combine(routed.x, routed.handle)

    with xm.Buffer(mesh4, "ep", **SIZES):
        program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))
        out = program(*jax.device_put((x, idx), jax.NamedSharding(mesh4, P("ep"))))
    np.testing.assert_array_equal(out, x)


def test_flights_pass_through_jit_boundaries_of_scan(mesh4):
    """A flight is a pytree: started in one loop step, finished in the next."""
    x = jnp.ones((32, 128))
    idx = jnp.arange(32)[:, None] % 8

    def body(x, idx):
        options = {"num_experts": 8, "axis_name": "ep"}

        def step(flight, scale):
            routed = xm.dispatch_done(flight)
            out = xm.combine(routed.x * scale, routed.handle)
            return xm.dispatch_start(x * scale, idx, **options), out

        _, out = jax.lax.scan(step, xm.dispatch_start(x, idx, **options), jnp.array([2.0, 3.0]))
        return out

    program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P(None, "ep")))
    out = np.asarray(program(*jax.device_put((x, idx), jax.NamedSharding(mesh4, P("ep")))))
    assert (out[0] == 2).all() and (out[1] == 2 * 3).all()


def test_start_and_done_are_differentiable(mesh4):
    x = jnp.ones((32, 128))
    idx = jnp.arange(32)[:, None] % 8

    def loss(x, idx):
        routed = xm.dispatch_done(xm.dispatch_start(x, idx, num_experts=8, axis_name="ep"))
        return jnp.sum(xm.combine_done(xm.combine_start(routed.x * 5, routed.handle)))

    program = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))
    dx = program(*jax.device_put((x, idx), jax.NamedSharding(mesh4, P("ep"))))
    np.testing.assert_array_equal(dx, np.full(x.shape, 5.0))


@pytest.mark.parametrize("name", ["num_tokens", "hidden", "num_ranks", "top_k", "num_experts"])
def test_every_size_of_the_hint_is_checked(name):
    sizes = {"num_ranks": 4, "top_k": 2, "num_experts": 8, **SIZES} | {name: -3}
    with pytest.raises(ValueError, match=f"buffer_size_hint: {name}=-3: must be >= 1"):
        xm.buffer_size_hint(**sizes)
