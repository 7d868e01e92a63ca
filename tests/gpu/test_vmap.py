"""`jax.vmap` on GPUs: every entry of a batch has the results of a call of its own.

In the loop that `vmap` makes, XLA fuses slices of the batch with a call unless a barrier stands between them, and such
a fusion loses which operands and results of the call share memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

BATCH, TOKENS, HIDDEN, WIDTH, TOP_K = 3, 96, 256, 384, 4
ALL = P(None, "ep")


@pytest.fixture(params=[pytest.param(ranks, marks=getattr(pytest.mark, f"gpu{ranks}")) for ranks in (1, 2)])
def mesh(request):
    devices = jax.devices()[: request.param]
    yield jax.make_mesh((request.param,), ("ep",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    xm.check()


def compare(mesh, body, entries, shared=(), tolerance=0.0):
    """Compares `jax.vmap(body)` over the first axis of `entries` with calls of `body` for each entry: the first result
    bit for bit, and the others within `tolerance` of their norm."""
    given = jax.device_put(entries, jax.NamedSharding(mesh, ALL))
    shared = jax.device_put(shared, jax.NamedSharding(mesh, P("ep")))
    axes = (0,) * len(entries) + (None,) * len(shared)
    specs = (ALL,) * len(entries) + (P("ep"),) * len(shared)
    batched = jax.jit(jax.shard_map(jax.vmap(body, axes), mesh=mesh, in_specs=specs, out_specs=ALL))
    single = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    found = jax.tree.leaves(batched(*given, *shared))
    calls = [jax.tree.leaves(single(*(array[entry] for array in given), *shared)) for entry in range(BATCH)]
    for number, (array, *alone) in enumerate(zip(found, *calls, strict=True)):
        array, alone = np.asarray(array), np.stack([np.asarray(one) for one in alone])
        assert np.abs(alone.astype(np.float32)).max() > 0.1, f"result {number}"
        if number == 0 or not tolerance:
            np.testing.assert_array_equal(array.view(np.uint8), alone.view(np.uint8), f"result {number}")
        else:
            array, alone = array.astype(np.float64), alone.astype(np.float64)
            difference = np.linalg.norm(array - alone) / np.linalg.norm(alone)
            assert difference <= tolerance, f"result {number}: {difference}"


def routing(mesh, experts: int, named: int):
    """Tokens, bfloat16 `[B, R * T, H]`, experts, of the first `named` alone, and weights of each entry's tokens."""
    keys = jax.random.split(jax.random.key(35), 3)
    x = jax.random.normal(keys[0], (BATCH, mesh.size * TOKENS, HIDDEN), jnp.bfloat16)
    scores = jax.random.uniform(keys[1], (BATCH, mesh.size * TOKENS, named)) + 0.5 / (1 + jnp.arange(named))
    weights, idx = jax.lax.top_k(scores, TOP_K)
    return x, idx, weights


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_dispatch_and_combine(mesh, mode):
    """Forward and backward."""
    config = xm.KernelConfig(backend="cuda", mode=mode)

    def body(x, idx, weights):
        def round_trip(x, weights):
            options = {"num_experts": 16, "axis_name": "ep", "config": config}
            routed = xm.dispatch(x, idx, weights, **options)
            scale = 1 + routed.expert_ids()[:, None].astype(x.dtype)
            return xm.combine(scale * routed.x, routed.handle, config=config)

        out, pull = jax.vjp(round_trip, x, weights)
        return out, pull(out)

    compare(mesh, body, routing(mesh, 16, 16))


def test_an_exchange_that_writes_into_its_output(mesh):
    """The rows of `output` that no rank sends stay."""

    def body(rows, output, sizes):
        first = sizes * 0
        return xm.ragged_all_to_all(
            rows, output, first, sizes, first + jax.lax.axis_index("ep") * 8, sizes, axis_name="ep",
            config=xm.KernelConfig(backend="cuda"),
        )  # fmt: skip

    rows = jax.random.normal(jax.random.key(1), (2, BATCH, mesh.size * 64, HIDDEN), jnp.float32)
    sizes = np.random.default_rng(2).integers(1, 8, (BATCH, mesh.size, mesh.size)).astype(np.int32)
    if mesh.size > 1:
        sizes[:] = (sizes + sizes.swapaxes(1, 2)) // 2  # what a rank sends to another one is what it gets from it
    compare(mesh, body, (*rows, sizes.reshape(BATCH, -1)))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_lent_weights(mesh, backward):
    """All rows are for experts of the first rank: on two ranks the other one borrows four, in several rounds."""
    experts = 8 * mesh.size
    options = {"num_experts": experts, "axis_name": "ep", "balance": "exact"}

    def layer(idx, x, weights, *matrices):
        return xm.moe_mlp(x, idx, weights, *matrices, **options)

    def body(x, idx, weights, *matrices):
        if not backward:
            return layer(idx, x, weights, *matrices)
        out, pull = jax.vjp(functools.partial(layer, idx), x, weights, *matrices)
        return out, pull(out)

    keys = jax.random.split(jax.random.key(3), 3)
    sizes = (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    matrices = [
        (jax.random.normal(key, (experts, *size)) * size[0] ** -0.5).astype(jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    ]
    compare(mesh, body, routing(mesh, experts, 8), matrices, tolerance=3e-3)
