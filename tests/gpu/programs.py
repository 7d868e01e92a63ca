"""Small programs for tests of failures, and checks of failed results.

They run on any backend: without a failure, the reference backend gives the same results on CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

EP = P("ep")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's operands: tokens, elements of a token, experts of all ranks, slots."""

    tokens: int = 64
    hidden: int = 256
    experts: int = 16
    top_k: int = 4


SIZES = Sizes()


def operands(mesh: Mesh, sizes: Sizes = SIZES, dtype: Any = np.float32, seed: int = 0) -> tuple[jax.Array, ...]:
    """`x`, `topk_idx`, `topk_weights` over all ranks. Small integers and quarters: sums are exact."""
    rng = np.random.default_rng(seed)
    rows = mesh.size * sizes.tokens
    idx = np.argsort(rng.random((rows, sizes.experts)), axis=1)[:, : sizes.top_k].astype(np.int32)
    x = rng.integers(-8, 8, (rows, sizes.hidden)).astype(np.float32)
    weights = np.full((rows, sizes.top_k), 0.25, np.float32)
    sharding = jax.sharding.NamedSharding(mesh, EP)
    return tuple(jax.device_put(a, sharding) for a in (x.astype(jnp.dtype(dtype)), idx, weights))


def distributed_operands(mesh: Mesh) -> tuple[jax.Array, ...]:
    """Returns tokens, experts and weights of a quarter for each slot, the same in every process of a job."""
    rng = np.random.default_rng(0)
    rows = mesh.size * SIZES.tokens
    idx = np.argsort(rng.random((rows, SIZES.experts)), axis=1)[:, : SIZES.top_k].astype(np.int32)
    values = (
        rng.integers(0, 8, (rows, SIZES.hidden)).astype(np.float32),
        idx,
        np.full((rows, SIZES.top_k), 0.25, np.float32),
    )
    sharding = jax.sharding.NamedSharding(mesh, EP)
    return tuple(jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i]) for v in values)


def over(mesh: Mesh, body: Callable, num_operands: int = 3, **options: Any) -> Callable:
    """`body` on every rank of `mesh`, jitted."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(EP,) * num_operands, out_specs=EP, check_vma=False)
    return jax.jit(mapped, **options)


def dispatch(
    x: Any, idx: Any, weights: Any, config: xm.KernelConfig, sizes: Sizes = SIZES, **options: Any
) -> xm.Routed:
    return xm.dispatch(x, idx, weights, num_experts=sizes.experts, axis_name="ep", config=config, **options)


def round_trip(config: xm.KernelConfig, sizes: Sizes = SIZES, **options: Any) -> Callable:
    """A round trip with identity experts: the result is `x` times the sum of a token's weights, here `x`."""

    def body(x, idx, weights):
        routed = dispatch(x, idx, weights, config, sizes, **options)
        return xm.combine(routed.x, routed.handle, config=config)

    return body


def skipped_on(rank: int | None, operation: Callable, instead: Callable) -> Any:
    """`operation()` on every rank but `rank`, where `instead()` is run."""
    if rank is None:
        return operation()
    return jax.lax.cond(jax.lax.axis_index("ep") == rank, lambda _: instead(), lambda _: operation(), 0)


def zeros_like_results(operation: Callable) -> Callable:
    """Something to run instead of `operation` that gives results of the same shapes."""
    shapes = jax.eval_shape(operation)
    return lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def float_leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float32) for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)]


def assert_poisoned(tree: Any) -> None:
    """Every element of every floating array is NaN."""
    leaves = float_leaves(tree)
    assert leaves
    for leaf in leaves:
        good = int(np.sum(~np.isnan(leaf)))
        assert good == 0, f"{good} of {leaf.size} elements of a failed result are not NaN"
