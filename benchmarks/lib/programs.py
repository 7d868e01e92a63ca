"""Programs of peers' dispatch and combine, and loops without an operation, to be timed beside the library's own
programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from xen_moe_jax.tuning.peer import Peer
from xen_moe_jax.tuning.programs import Program, never
from xen_moe_jax.tuning.workload import BLOCK_SCALED_DTYPES, Workload


def peer_dispatch(work: Workload, peer: Peer, name: str, relative_cost: int = 1) -> Program:
    """A peer's dispatch alone; tokens that come quantized arrive quantized, as they do in `own_dispatch`."""
    comes_scaled = work.block_scaled and peer.quantized

    def prepare(x, topk_idx, topk_weights):
        return xm.quantize(x, dtype=work.dtype) if comes_scaled else x

    def step(tokens, carry, topk_idx, topk_weights):
        if work.wire in BLOCK_SCALED_DTYPES and peer.quantized:
            rows = xm.dequantize(peer.dispatch(xm.quantize(tokens, dtype=work.wire), topk_idx)[0], tokens.dtype)
        else:
            rows = peer.dispatch(tokens, topk_idx)[0]
        return jax.lax.optimization_barrier(rows)

    def initial(tokens, topk_idx, topk_weights):
        rows = jax.eval_shape(lambda: step(tokens, None, topk_idx, topk_weights))
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rows)

    def chain(rows):
        return sum(never(leaf) for leaf in jax.tree.leaves(rows))

    return Program(name, "dispatch", prepare, initial, step, chain, relative_cost=relative_cost)


def peer_combine(work: Workload, peer: Peer, name: str, relative_cost: int = 1) -> Program:
    """A peer's combine alone, of the rows that its dispatch of the first routing brought in the compute dtype."""

    def prepare(x, topk_idx, topk_weights):
        rows, _, route = peer.dispatch(x, topk_idx)
        return rows, route, topk_weights

    def initial(operands, topk_idx, topk_weights):
        return jnp.zeros((work.tokens, work.hidden), operands[0].dtype)

    def step(operands, out, topk_idx, topk_weights):
        y, route, weights = operands
        # nothing of a call may be computed before the last one has ended, nor once for all of them
        y, again = jax.lax.optimization_barrier((y, never(out)))
        return peer.combine(y, jax.tree.map(lambda leaf: leaf - again, route), weights)

    return Program(name, "combine", prepare, initial, step, relative_cost=relative_cost)


def empty_chain() -> Program:
    """The work between the single calls of `timing.chained_by_barriers`: the routing with a flag from the previous
    call."""
    return Program(
        "empty loop",
        "none",
        prepare=lambda x, topk_idx, topk_weights: x[:1],
        initial=lambda x, topk_idx, topk_weights: topk_idx,
        step=lambda operands, carry, topk_idx, topk_weights: topk_idx,
        chain=never,
    )


def empty_loop() -> Program:
    """The loop of a single dispatch without the dispatch: it picks a routing and chains calls."""

    def step(operands, carry, topk_idx, topk_weights):
        topk_idx, topk_weights = jax.lax.optimization_barrier((topk_idx, topk_weights))
        return carry + topk_weights[:1, :1] + topk_idx[:1, :1].astype(jnp.float32)

    return Program(
        "empty loop",
        "none",
        prepare=lambda x, topk_idx, topk_weights: x[:1],
        initial=lambda x, topk_idx, topk_weights: jnp.zeros((1, 1), jnp.float32),
        step=step,
        chain=never,
    )
