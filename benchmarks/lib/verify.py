"""Verifies timed programs: against a float32 NumPy evaluation, and bitwise against the reference backend.

Nothing here trusts the program under test: the expected round trip is computed from the tokens and the routing alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm
from xen_moe_jax.tuning.problem import AXIS, SPECS, Problem
from xen_moe_jax.tuning.programs import Program, dispatch_arguments, expert_scale, own_round_trip, scaling_experts
from xen_moe_jax.tuning.timing import Timed, on_ranks
from xen_moe_jax.tuning.workload import Workload, draw_tokens

TOKENS_CHECKED = 256
"""Tokens of each addressable rank that the NumPy check looks at."""

QUANTIZED_TOLERANCE = 2.0**-3
"""Tolerance relative to the largest element: fp8 e4m3 keeps 3 bits after the leading one; two roundings there and back,
plus the sums."""


def tolerance(work: Workload) -> float:
    """Allowed error of a round trip relative to its largest element: a few roundings of the compute dtype, or of the
    wire.
    """
    if work.block_scaled or work.wire or work.combine_wire:
        return QUANTIZED_TOLERANCE
    return 6 * float(jnp.finfo(work.compute_dtype).eps)


class WrongResultError(AssertionError):
    """A timed program computed something else than it should have."""


def expected_round_trip(
    work: Workload, rank: int, tokens: np.ndarray, topk_idx: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """float32 `[n, H]` for token numbers `tokens [n]` of `rank`: the weighted sum of the results of scaling experts."""
    x = draw_tokens(work, rank)[tokens].astype(np.float32)
    factor = (topk_weights[tokens] * expert_scale(topk_idx[tokens]).astype(np.float32)).sum(1)
    return x * factor[:, None]


def compile_check(program: Program, problem: Problem) -> Any:
    """The round trip of the last routing of the pool through scaling experts, compiled."""
    round_trip = program.round_trip
    if round_trip is None:
        raise ValueError(f"{program.name}: {program.operation} is not a round trip")
    experts = partial(scaling_experts, local_experts=problem.work.local_experts)

    def run(x, idx_pool, weights_pool):
        return round_trip(x, idx_pool[-1], weights_pool[-1], experts)

    return on_ranks(run, problem.mesh, SPECS).lower(*problem.inputs.arrays()).compile()


def check_round_trip(program: Program, problem: Problem, compiled: Any = None) -> float:
    """Largest error relative to the largest expected element, on the last routing of the pool.

    Args:
      compiled: the result of `compile_check`, where it was compiled before.

    Raises:
      WrongResultError: when it exceeds `tolerance(work)` or is not finite.
    """
    compiled = compile_check(program, problem) if compiled is None else compiled
    work, topk_idx, topk_weights = problem.work, problem.topk_idx, problem.topk_weights
    out = compiled(*problem.inputs.arrays())
    worst = 0.0
    for shard in out.addressable_shards:
        rank = (shard.index[0].start or 0) // work.tokens
        tokens = np.linspace(0, work.tokens - 1, min(TOKENS_CHECKED, work.tokens)).astype(int)
        want = expected_round_trip(work, rank, tokens, topk_idx[-1, rank], topk_weights[-1, rank])
        got = np.asarray(shard.data[jnp.asarray(tokens)]).astype(np.float32)
        error = np.abs(got - want).max() / np.abs(want).max()
        worst = max(worst, float(error)) if np.isfinite(error) else float("nan")
    if not worst <= tolerance(work):
        raise WrongResultError(
            f"{program.name}: round trip is off by {worst:.2e} of the largest element, allowed {tolerance(work):.2e}"
        )
    return worst


def check_timed_result(timed: Timed, problem: Problem) -> None:
    """Checks the results of the timed loop itself: a chained round trip still holds its tokens, other results are
    finite.

    The weights of a token sum to one and the experts are the identity, so `n` calls may only add `n` roundings.
    """
    leaves = [leaf for leaf in jax.tree.leaves(timed.result) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if timed.program.operation == "round trip":
        tokens = problem.inputs.x.astype(jnp.float32)
        error = float(jnp.max(jnp.abs(leaves[0].astype(jnp.float32) - tokens)) / jnp.max(jnp.abs(tokens)))
        if not error <= tolerance(problem.work) * timed.inner:
            raise WrongResultError(
                f"{timed.program.name}: after {timed.inner} chained round trips tokens are off by {error:.2e}"
            )
    elif timed.program.operation == "combine" and not all(bool(jnp.isfinite(leaf).all()) for leaf in leaves):
        raise WrongResultError(f"{timed.program.name}: combine left values that are not finite")


def local_total(counts: jax.Array) -> int:
    """Sum over the ranks that this process addresses."""
    return sum(int(np.asarray(shard.data).sum()) for shard in counts.addressable_shards)


def unequal_bits(a: jax.Array, b: jax.Array, keep: jax.Array) -> jax.Array:
    """int32 `[1]`: elements of `a` and `b` that differ in any bit where `keep` (leading dimensions) holds."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    bits = [jax.lax.bitcast_convert_type(v, unsigned) for v in (a, b)]
    keep = keep.reshape(keep.shape + (1,) * (a.ndim - keep.ndim))
    return jnp.sum((bits[0] != bits[1]) & keep, dtype=jnp.int32).reshape(1)


def defined_rows(layout: str, routed: Any) -> jax.Array:
    """Rows of `routed.x` that the contract defines: bool `[C]`, padded `[L, R*T]`."""
    if layout == "padded":
        return jnp.arange(routed.weights.shape[1]) < routed.num_tokens_per_expert[:, None]
    if layout == "grouped":
        return jnp.arange(routed.weights.shape[0]) < routed.group_sizes.sum()
    return (routed.topk_idx >= 0).any(-1)


def differing_bits(problem: Problem, config: xm.KernelConfig) -> dict[str, int]:
    """Elements that differ between `config`'s backend and the reference backend, on the same devices, last routing of
    the pool.

    Raises:
      WrongResultError: when any element differs.
    """
    work, caps = problem.work, problem.caps
    reference = dataclasses.replace(config, backend="reference", chunk_tokens=None)
    arguments = dispatch_arguments(work, caps, config)
    experts = partial(scaling_experts, local_experts=work.local_experts)

    def compare(x, idx_pool, weights_pool):
        tokens = xm.quantize(x, dtype=work.dtype) if work.block_scaled else x
        routing = idx_pool[-1], weights_pool[-1]
        ours = xm.dispatch(tokens, *routing, **arguments)
        theirs = xm.dispatch(tokens, *routing, **(arguments | {"config": reference}))
        keep = defined_rows(work.layout, theirs)
        rows = [unequal_bits(a, b, keep) for a, b in zip(*map(jax.tree.leaves, (ours.x, theirs.x)), strict=True)]
        outs = [own_round_trip(work, caps, c)(x, *routing, experts) for c in (config, reference)]
        return {
            "dispatch rows": sum(rows),
            "positions": unequal_bits(ours.handle.positions, theirs.handle.positions, jnp.ones((), bool)),
            "weights": unequal_bits(ours.weights, theirs.weights, keep)
            if work.layout != "ranked"
            else jnp.zeros(1, jnp.int32),
            "combine": unequal_bits(outs[0], outs[1], jnp.ones((), bool)),
        }

    counts = jax.tree.map(local_total, on_ranks(compare, problem.mesh, SPECS)(*problem.inputs.arrays()))
    wrong = {name: count for name, count in counts.items() if count}
    if wrong:
        raise WrongResultError(
            f"backend {config.backend!r} and the reference differ in {wrong} elements ({AXIS}={work.ranks})"
        )
    return counts


def num_dropped(problem: Problem, config: xm.KernelConfig) -> int:
    """Rows dropped over all ranks this process addresses and all routings of the pool; a fair comparison drops none."""
    work = problem.work
    arguments = dispatch_arguments(work, problem.caps, config)

    def count(x, idx_pool, weights_pool):
        tokens = xm.quantize(x, dtype=work.dtype) if work.block_scaled else x
        dropped = [xm.dispatch(tokens, idx_pool[p], weights_pool[p], **arguments).num_dropped for p in range(work.pool)]
        return sum(dropped).reshape(1)

    out = on_ranks(count, problem.mesh, SPECS)(*problem.inputs.arrays())
    return local_total(out)
