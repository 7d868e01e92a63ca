"""A peer that never arrives: an error that names the rank and the operation, and a process that goes on."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.gpu import bodies
from tests.gpu.bodies import Setup
from tests.support.cases import CASES

TIMEOUT_S = 2.0
ABSENT = 1
TOKENS, HIDDEN, EXPERTS, TOP_K = 32, 256, 16, 4


def dispatch_all_but(mesh, absent: int | None, config: xm.KernelConfig):
    """A program in which rank `absent` skips the dispatch that every other rank makes."""

    def body(x, idx, weights):
        def make(_):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", config=config)
            return routed.num_tokens_per_expert

        def skip(_):
            return jnp.zeros(EXPERTS // mesh.size, jnp.int32)

        if absent is None:
            return make(0)
        return jax.lax.cond(jax.lax.axis_index("ep") == absent, skip, make, 0)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3, out_specs=P("ep"), check_vma=False))


@pytest.mark.gpu4
def test_absent_rank_is_named_and_the_process_goes_on(gpu_mesh):
    mesh = gpu_mesh((4,), ("ep",))
    config = xm.KernelConfig(backend="cuda", timeout_s=TIMEOUT_S)
    rng = np.random.default_rng(0)
    tokens = mesh.size * TOKENS
    operands = (
        rng.standard_normal((tokens, HIDDEN), np.float32),
        rng.integers(0, EXPERTS, (tokens, TOP_K)).astype(np.int32),
        np.ones((tokens, TOP_K), np.float32),
    )
    whole = dispatch_all_but(mesh, None, config)
    before = np.asarray(whole(*operands))

    began = time.monotonic()
    with pytest.raises(Exception, match=rf"(?i)dispatch(.|\n)*rank {ABSENT}\b|rank {ABSENT}\b(.|\n)*dispatch"):
        jax.block_until_ready(dispatch_all_but(mesh, ABSENT, config)(*operands))
        jax.block_until_ready(whole(*operands))  # the error may be reported by the call after the one that gave up
    assert time.monotonic() - began < TIMEOUT_S + 20.0

    np.testing.assert_array_equal(np.asarray(whole(*operands)), before)
    case = next(c for c in CASES if c.name == "grouped")
    bodies.assert_same(Setup(case, mesh, ("ep",), 20, 256), "zipf", config)
