"""Collectives of the plain JAX backend: XLA's inside `jax.shard_map`, and in an `elastic.Group`, between whose
processes XLA has no collective, the group's exchange through the host.

A group exchanges with its members, which are known when a program runs and not when it is traced. The part of an absent
rank is zero in every result.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from xen_moe_jax import _jax_internals, _mesh
from xen_moe_jax._config import KernelConfig

type Names = tuple[str, ...]


def index(axis_name: Names) -> jax.Array:
    """Returns this rank's number, int32 `[]`, as `jax.lax.axis_index` does."""
    group = _mesh.group_of(axis_name)
    return lax.axis_index(axis_name) if group is None else jnp.int32(group.rank)


def all_gather(x: jax.Array, axis_name: Names) -> jax.Array:
    """Returns `[R, ...]` of the dtype of `x`: entry `s` is the `x` of rank `s`, as `jax.lax.all_gather(x)` does."""
    group = _mesh.group_of(axis_name)
    if group is None:
        return lax.all_gather(x, axis_name)
    return _exchange(group, "gather", axis_name, x, (group.num_ranks, *x.shape))


def all_to_all(x: jax.Array, axis_name: Names, *, axis_index_groups: Any = None) -> jax.Array:
    """Returns `[R, ...]` of the dtype of `x [R, ...]`: entry `s` is the one that rank `s` had for this rank, as
    `jax.lax.all_to_all(x, 0, 0)` does.

    Raises:
      NotImplementedError: `axis_index_groups` in a group.
    """
    group = _mesh.group_of(axis_name)
    if group is None:
        return lax.all_to_all(x, axis_name, 0, 0, axis_index_groups=axis_index_groups)
    if axis_index_groups is not None:
        raise NotImplementedError("axis_index_groups inside an elastic.Group: its ranks exchange all together")
    return _exchange(group, "scatter", axis_name, x, x.shape)


def largest(x: jax.Array, axis_name: Names) -> jax.Array:
    """Returns the elementwise maximum of the ranks' `x`, which must not be negative, as `jax.lax.pmax` does."""
    if _mesh.group_of(axis_name) is None:
        return lax.pmax(x, axis_name)
    return jnp.max(all_gather(x, axis_name), axis=0)


def absent_is_unused(topk_idx: jax.Array, axis_name: Names) -> jax.Array:
    """Encodes integers `topk_idx` for an exchange in a group, and decodes them after it: the zero that stands for an
    absent rank's entry decodes to -1, an unused slot."""
    return topk_idx if _mesh.group_of(axis_name) is None else ~topk_idx


# -- through a group ---------------------------------------------------------------------------------------------------

exchange_p = Primitive("xen_moe_member_exchange")
exchange_p.def_effectful_abstract_eval(
    lambda x, *, shape, **_: (x.update(shape=shape, weak_type=False), {_jax_internals.ORDERED_EXCHANGE})
)


def _exchange(group: Any, kind: str, axis_name: Names, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del group  # the lowering finds it again: no program holds it
    if x.size == 0:
        return jnp.zeros(shape, x.dtype)
    # The key is the same in every process, and differs between the exchanges of a program and between shapes.
    words = f"{_mesh.lowering_site()} {_mesh.next_exchange()} {kind} {x.shape} {x.dtype.name}"
    return exchange_p.bind(x, kind=kind, axis_name=axis_name, shape=shape, key=zlib.crc32(words.encode()))


def _lower_exchange(ctx: Any, x: Any, *, kind: str, axis_name: Names, shape: Any, key: int) -> Any:
    del shape
    group = _mesh.group_of(axis_name)

    def call(array: np.ndarray) -> tuple[np.ndarray]:
        return (group.exchange(kind, key, np.asarray(array)),)

    return _jax_internals.emit_ordered_callback(ctx, call, x)


mlir.register_lowering(exchange_p, _lower_exchange)

good_p = Primitive("xen_moe_member_check")
good_p.def_effectful_abstract_eval(
    lambda after, active, **_: (
        active.update(shape=(), dtype=jnp.dtype(bool), weak_type=False),
        {_jax_internals.ORDERED_EXCHANGE},
    )
)


def _lower_good(ctx: Any, after: Any, active: Any, *, axis_name: Names, operation: str) -> Any:
    group = _mesh.group_of(axis_name)

    def call(_: np.ndarray, active: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(group.good(operation, np.asarray(active))),)

    return _jax_internals.emit_ordered_callback(ctx, call, after, active)


mlir.register_lowering(good_p, _lower_good)


def poison_failed(results: Any, active: jax.Array | None, operation: str, axis_name: Names) -> tuple[jax.Array, ...]:
    """Returns the results of an operation in a group, with their shapes and dtypes. They are poisoned where the group
    has failed, in this operation or before, and where `active`, bool `[R]`, names other ranks than the group's members.

    In poisoned results floating elements are NaN, the counts of a dispatch (int32 `[R, L]`, its fourth result) are 0,
    and other integers are -1. `active` is None for an operation that takes none.
    """
    results = tuple(results) if isinstance(results, tuple | list) else (results,)
    if not any(r.size for r in results):
        return results
    after = jnp.stack([jnp.isnan(r.reshape(-1)[0]) if _floats(r) else r.reshape(-1)[0] == 0 for r in results if r.size])
    group = _mesh.group_of(axis_name)
    checked = jnp.zeros((group.num_ranks,), bool) if active is None else active
    name = operation if active is not None else ""
    good = good_p.bind(after, checked, axis_name=axis_name, operation=name)
    return tuple(jnp.where(good, r, _poison(i, r, operation)) for i, r in enumerate(results))


def _floats(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _poison(place: int, x: jax.Array, operation: str) -> jax.Array:
    counts = operation == "dispatch" and place == 3
    return jnp.asarray(jnp.nan if _floats(x) else 0 if counts else -1, x.dtype)


def effects(axis_name: Sequence[str], config: KernelConfig) -> Any:
    """Returns the effects of an operation over this axis. Exchanges through the host are ordered, because all processes
    of a group must run them in the same order. Kernels need no order: they tell operations apart by themselves."""
    return {_jax_internals.ORDERED_EXCHANGE} if by_host(axis_name, config) else set()


def by_host(axis_name: Sequence[str], config: KernelConfig) -> bool:
    """Returns True if the axis is that of an `elastic.Group` of this process, whose ranks exchange through the host."""
    return _mesh.group_of(tuple(axis_name)) is not None and config.backend != "cuda"
